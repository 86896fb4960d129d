"""``fullshard plan``: predicts the memory that training takes, without allocating it."""
