"""``fully_shard``: the second API on the engine, parameters sharded one by one, as DTensors."""
