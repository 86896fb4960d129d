"""Gradient clipping, gradient scaling and communication hooks."""
