"""The errors of checkpoints that cannot be written or read."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint is damaged, belongs to another model, or could not be written.

    ``advises`` is True if the message says what to do about it.
    """

    def __init__(self, message: str, advises: bool = False) -> None:
        super().__init__(message)
        self.advises = advises


class DamagedCheckpoint(CheckpointError):
    """This checkpoint is not as it was written; an older one may still be whole."""
