"""``fullshard.trace``: records what the engine does in a few steps, and shows it on a page."""
