"""A step: units, when they are unsharded and resharded, forward and backward."""
