"""Ranks that have run out of data take part in the other ranks' steps (torch's ``Join``)."""
