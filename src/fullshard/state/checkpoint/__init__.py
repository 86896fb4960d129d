"""Checkpoints in folders: ``save``, ``load``, ``resume``, ``latest``.

Tensors are saved and loaded by ``torch.distributed.checkpoint``.
"""

from .errors import CheckpointError
from .loading import Checkpoint, latest, load, resume
from .saving import SaveHandle, save

__all__ = ["Checkpoint", "CheckpointError", "SaveHandle", "latest", "load", "resume", "save"]
