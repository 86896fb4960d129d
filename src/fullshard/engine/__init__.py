"""The engine: flat layout, units, schedule and collectives. Nothing here knows the wrapper."""
