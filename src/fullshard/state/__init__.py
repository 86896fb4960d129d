"""What users save and load: full parameters, state dicts of models and optimizers, checkpoints."""
