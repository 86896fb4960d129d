"""From a module to a unit: which parameters it manages, where they live, what cannot be sharded."""
