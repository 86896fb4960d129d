"""Full parameters on demand, and how parameters come into being."""
