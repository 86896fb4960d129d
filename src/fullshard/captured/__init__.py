"""Training steps as CUDA graphs: what can be decided about calls, their kinds, and the graphs."""
