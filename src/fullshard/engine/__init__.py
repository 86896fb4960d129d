"""The engine: shards parameters, runs units, reduces gradients. Nothing here knows the wrapper."""
