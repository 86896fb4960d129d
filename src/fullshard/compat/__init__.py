"""fullshard in the place of ``torch.distributed.fsdp``'s wrapper, for programs that use its names.

>>> import fullshard.compat
>>> fullshard.compat.install()
>>> from torch.distributed.fsdp import FullyShardedDataParallel  # fullshard's

``fullshard run script.py`` does the same for a program that cannot be changed. What is put in
whose place is listed in ``names.py``; this package alone imports ``torch.distributed.fsdp``.
"""

from .replacing import install, is_installed, uninstall

__all__ = ["install", "is_installed", "uninstall"]
