"""``fullshard plan``: predicts the memory and the time of training, without allocating anything."""
