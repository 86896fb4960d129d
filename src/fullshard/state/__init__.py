"""Full parameters, state dicts of models and optimizers, and checkpoints."""
