"""Builds a unit around a module, and checks for modules and parameters that cannot be sharded."""
