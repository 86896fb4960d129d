"""``fullshard plan``: the memory that training would take, without allocating it."""
