"""Checkpoints for people: saving, loading and finding them. On torch.distributed.checkpoint."""

from .errors import CheckpointError
from .loading import Checkpoint, latest, load, resume
from .saving import SaveHandle, save

__all__ = ["Checkpoint", "CheckpointError", "SaveHandle", "latest", "load", "resume", "save"]
