"""Talking to other ranks and to the device: collectives, the order check, streams."""
