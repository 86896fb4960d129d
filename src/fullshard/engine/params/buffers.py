"""Flat buffers of all parameters of a group, whose memory is allocated and released in every step.

Each buffer is the only owner of its storage.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from .layout import Layout
from .tensor_parallel import Presentations, as_shown
from .unused_parameters import find_grid


class FlatBuffer(ABC):
    """A flat buffer that has memory only while needed; the tensor object stays.

    ``alias`` shares the memory but not the version counter, so that autograd does not take filling
    the buffer for an in-place change of saved tensors.
    """

    #: Give the tensor memory, and take it away. Bound once: the step's path calls no Python here.
    allocate: Callable[[], object]
    release: Callable[[], object]

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self.flat = torch.empty(layout.padded_numel, dtype=dtype, device=device)
            self._storage = self.flat.untyped_storage()
            self._nbytes = self._storage.nbytes()
            self.alias = self.flat.data
            self._make_views(layout)
        self.allocate = functools.partial(self._storage.resize_, self._nbytes)
        self.release = functools.partial(self._storage.resize_, 0)
        self.release()

    @abstractmethod
    def _make_views(self, layout: Layout) -> None:
        """Make, once, views that stay valid while memory is released and allocated again."""

    @property
    def is_allocated(self) -> bool:
        return self._storage.nbytes() == self._nbytes


class ReduceBuffer(FlatBuffer):
    """Full gradients that are about to be reduced; ``places`` has a view for each parameter's."""

    def _make_views(self, layout: Layout) -> None:
        self._layout = layout
        self.places = [self.alias.as_strided(s.shape, s.stride, s.offset) for s in layout.slots]

    @functools.cached_property
    def gaps(self) -> list[torch.Tensor]:
        """The padding between the places, for reductions that read it."""
        return [self.alias[start:end] for start, end in self._layout.gaps()]

    @functools.cached_property
    def _marks(self) -> tuple[torch.Tensor, list[torch.Tensor]] | None:
        grid = find_grid(self._layout)
        if grid is None:
            return None
        beside = [self.alias[start : start + 1] for start in grid.beside]
        return self.alias[:: grid.distance], beside

    def mark_all(self) -> bool:
        """Mark all gradients as present, without using memory; False if pieces are too small."""
        if self._marks is None:
            return False
        on_grid, beside = self._marks
        on_grid.add_(0.0)
        if beside:
            torch._foreach_add_(beside, 0.0)
        return True


class FullBuffer(FlatBuffer):
    """Full parameters, as ``views``; the module computes with ``shown``.

    ``shown`` are the views, or objects that ``presentations`` make from them: DTensors of
    distributed parameters, or objects of a class that packs elements. ``own`` is the part that this
    rank's shard fills. An all-gather into the buffer sends ``gather_input``: the shard itself; or,
    if dtype or device differ, ``own``, into which ``filled_from`` (the shard) is copied first, so
    that the cast needs no further memory.
    """

    #: Whether the buffer is the shard itself.
    is_shard_backed = False
    #: Whether :meth:`begin_gather` has to prepare the all-gather's input.
    prepares_gather = False
    #: Whether full parameters are less precise than their dtype says (``encoded_buffers.py``).
    is_lossy = False
    #: Whether an all-gather fills separate memory, from which :meth:`copy_out` copies.
    is_copied_out = False
    #: The tensor that an all-gather fills.
    gather_output: torch.Tensor
    #: Ranks whose shards fill the buffer.
    world_size: int

    def __init__(
        self,
        layout: Layout,
        rank: int,
        shard: torch.Tensor,
        dtype: torch.dtype,
        device: torch.device,
        presentations: Presentations = (),
    ) -> None:
        self._rank = rank
        self._presentations = presentations
        self.world_size = layout.world_size
        super().__init__(layout, dtype, device)
        #: Give the full parameters memory.
        self.allocate_whole = self.allocate
        fits = shard.dtype == dtype and shard.device == self.flat.device
        self.gather_input = shard if fits else self.own
        self.filled_from = None if fits else shard

    def _make_views(self, layout: Layout) -> None:
        start = self._rank * layout.shard_numel
        self.own = self.alias[start : start + layout.shard_numel]
        self.gather_output = self.alias
        self.views = [self.flat.as_strided(s.shape, s.stride, s.offset) for s in layout.slots]
        self.shown = as_shown(self.views, self._presentations)

    def copy_out(self) -> None:
        """Copy all-gathered data to the full parameters, unless it was gathered in place."""

    def begin_gather(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The outputs and the inputs of an all-gather into this buffer."""
        return [self.gather_output], [self.gather_input]

    def follow(self, tensors: Sequence[torch.Tensor]) -> None:
        """Note the tensors, tracked by autograd, that were made from ``shown``."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """True if ``tensor`` lies in this buffer, and so is lost when the buffer is released."""
        start = self._storage.data_ptr()
        if start == 0:
            return False
        if type(tensor) is torch.Tensor and tensor.layout is torch.strided:
            # Most are plain; asking for their storage would take longer.
            return start <= tensor.data_ptr() < start + self._nbytes
        parts = _parts_with_memory(tensor)
        return any(part.untyped_storage().data_ptr() == start for part in parts)


class Part(Protocol):
    """The part that a rank keeps of the full parameters of ``full``, which a few ranks share."""

    @property
    def full(self) -> FullBuffer: ...

    gather_input: torch.Tensor
    gather_output: torch.Tensor

    def keep(self) -> None:
        """Copy the part from the full parameters."""

    def begin_gather(self) -> None:
        """Allocate memory for the all-gather."""

    def copy_out(self) -> None:
        """Copy all-gathered data to the full parameters."""

    def release(self) -> None:
        """Release the part's memory."""


class ShardBackedBuffer(FullBuffer):
    """A full buffer that is the shard itself: nothing to allocate, fill or release."""

    is_shard_backed = True

    def __init__(
        self, layout: Layout, shard: torch.Tensor, presentations: Presentations = ()
    ) -> None:
        self._rank = 0
        self._presentations = presentations
        self.world_size = 1
        with torch.inference_mode(False), torch.no_grad():
            self.flat = shard
            self.alias = shard.data
            self._make_views(layout)
        self.allocate = self.release = _leave_as_it_is
        self.gather_input, self.filled_from = shard, None

    @property
    def is_allocated(self) -> bool:
        return True

    def holds(self, tensor: torch.Tensor) -> bool:
        return False


def _leave_as_it_is() -> None:
    """Do nothing: the memory is the shard's."""


def any_holds(buffers: Sequence[FullBuffer], tensor: torch.Tensor) -> bool:
    """True if ``tensor`` lies in one of ``buffers``, and so is lost when that is released."""
    return True in [buffer.holds(tensor) for buffer in buffers]


_COMPRESSED = {torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}


def _parts_with_memory(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors in whose memory ``tensor`` keeps its elements: itself, or its inner tensors.

    DTensors, sparse tensors, and results of functional collectives have inner tensors.
    """
    if tensor.layout is not torch.strided:
        if tensor.layout is torch.sparse_coo:
            return [tensor._indices(), tensor._values()]
        return [tensor.values()] if tensor.layout in _COMPRESSED else []
    if type(tensor) is torch.Tensor or not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    inner = [value for name in names if torch.is_tensor(value := getattr(tensor, name))]
    return [part for each in inner for part in _parts_with_memory(each)]
