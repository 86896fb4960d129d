"""The part of full parameters, in the flat layout, that a rank keeps from forward to backward."""

from __future__ import annotations

import torch

from .buffers import FullBuffer


class FlatPart:
    """This rank's slice of ``full``, one of ``size`` equal ones; all of these fill ``full`` again.

    ``size`` divides the number of ranks that share the parameters, and so the buffer.
    """

    def __init__(self, full: FullBuffer, size: int, rank: int) -> None:
        self.full = full
        with torch.inference_mode(False), torch.no_grad():
            self.gather_output = full.alias
            self._own = full.alias.view(size, -1)[rank]
            self.gather_input = torch.empty_like(self._own)
        self._kept = self.gather_input.untyped_storage()
        self._nbytes = self._kept.nbytes()
        self._kept.resize_(0)

    def keep(self) -> None:
        """Copy the slice from the full parameters, which may be released then."""
        self._kept.resize_(self._nbytes)
        self.gather_input.copy_(self._own)

    def begin_gather(self) -> None:
        """Allocate the full parameters, which are all-gathered in place."""
        self.full.allocate_whole()

    def copy_out(self) -> None:
        """Do nothing: the slices were gathered in place."""

    def release(self) -> None:
        """Release the memory of this rank's slice."""
        self._kept.resize_(0)
