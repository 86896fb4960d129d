"""Replaces the wrapper of ``torch.distributed.fsdp`` by fullshard's, for unchanged programs.

>>> import fullshard.compat
>>> fullshard.compat.install()
>>> from torch.distributed.fsdp import FullyShardedDataParallel  # fullshard's

``fullshard run script.py`` does the same for a program that cannot be changed. ``names.py`` lists
the replacements. Only this package imports ``torch.distributed.fsdp``.
"""

from .replacing import install, is_installed, uninstall

__all__ = ["install", "is_installed", "uninstall"]
