"""A group's parameters in memory: the flat layout, the shard, the full buffer and its views."""
