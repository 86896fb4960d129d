"""What is raised when a checkpoint cannot be written or read."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint is damaged, belongs to another model, or could not be written."""
