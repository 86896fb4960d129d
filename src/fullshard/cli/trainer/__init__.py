"""``fullshard train``: trains a small GPT on every rank."""
