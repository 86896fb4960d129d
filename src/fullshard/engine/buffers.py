"""Whole flat buffers whose memory comes and goes. Each buffer is the one owner of its storage."""

from __future__ import annotations

import torch

from .layout import Layout
from .tensor_parallel import Distributions, as_shown


class FullBuffer:
    """A whole flat buffer that exists only while needed: the tensor stays, its memory does not.

    Views are made once and stay valid while the memory comes and goes. ``alias`` shares the
    memory but not the version counter, so that refilling the buffer does not look to autograd
    like an in-place change of a saved parameter. ``shown`` is what the module computes with:
    ``views``, or DTensors made of them where parameters are distributed.
    """

    def __init__(
        self,
        layout: Layout,
        dtype: torch.dtype,
        device: torch.device,
        distributions: Distributions = (),
    ) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self.flat = torch.empty(layout.padded_numel, dtype=dtype, device=device)
            self._storage = self.flat.untyped_storage()
            self._nbytes = self._storage.nbytes()
            self._make_views(layout, distributions)
            self._storage.resize_(0)

    def _make_views(self, layout: Layout, distributions: Distributions) -> None:
        self.alias = self.flat.data
        self.views = [self.flat.as_strided(s.shape, s.stride, s.offset) for s in layout.slots]
        self.shown = as_shown(self.views, distributions)
        self.writable = [self.alias.as_strided(s.shape, s.stride, s.offset) for s in layout.slots]
        self.gaps = [self.alias[start:end] for start, end in layout.gaps()]
        self.shards = self.alias.view(layout.world_size, -1).unbind()

    def allocate(self) -> None:
        self._storage.resize_(self._nbytes)

    def release(self) -> None:
        self._storage.resize_(0)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies in this buffer, so that it dies with it."""
        address = self._storage.data_ptr()
        return address != 0 and any(
            part.untyped_storage().data_ptr() == address for part in _parts_with_memory(tensor)
        )


class StandingBuffer(FullBuffer):
    """A full buffer that is the shard itself: nothing to allocate, fill or release."""

    def __init__(
        self, layout: Layout, shard: torch.Tensor, distributions: Distributions = ()
    ) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self.flat = shard
            self._make_views(layout, distributions)

    def allocate(self) -> None:
        pass

    def release(self) -> None:
        pass

    def holds(self, tensor: torch.Tensor) -> bool:
        return False


def _parts_with_memory(tensor: torch.Tensor) -> list[torch.Tensor]:
    """``tensor``, or the tensors in which one that has no memory of its own keeps its elements.

    DTensors are such, and what a collective will have made once somebody waits for it.
    """
    if type(tensor) is torch.Tensor or not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    inner = [value for name in names if torch.is_tensor(value := getattr(tensor, name))]
    return [part for each in inner for part in _parts_with_memory(each)]
