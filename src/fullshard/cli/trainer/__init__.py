"""``fullshard train``: a small GPT, trained on every rank."""
