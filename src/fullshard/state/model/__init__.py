"""Full parameters on demand, model state dicts, and parameters constructed on the meta device."""
