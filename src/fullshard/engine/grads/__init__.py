"""From full gradients to gradient shards: reduce inputs, reduced results, unused parameters."""
