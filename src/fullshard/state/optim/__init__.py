"""Optimizer state dicts: full, sharded and local, by the names of the original parameters."""
