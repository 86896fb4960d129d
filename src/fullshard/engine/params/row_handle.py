"""RowHandle: one group of parameters of which every rank holds rows, shown as DTensors.

The counterpart of ``FlatParamHandle`` for ``fully_shard``, with the same interface to a unit. What
differs is where elements lie (``row_layout.py``), and what users hold: one DTensor per parameter,
whose local part is a view of this rank's shard, as the local parts of gradients are of reduced
ones.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...api import ShardingStrategy
from ..comm.custom import Memory
from ..comm.streams import streams_for
from ..encoding.encodings import Encoding, Encodings
from .buffers import FullBuffer, Part, ShardBackedBuffer
from .encoded_buffers import EncodedRowFullBuffer
from .flat_parameter import HandleReference
from .handle import REQUIRES_GRAD, FlatParamHandle
from .layout import alignment_elements
from .locations import ParameterLocation, containers_of
from .row_buffers import RowFullBuffer, RowReduceBuffer, whole_parameters
from .row_layout import RowLayout
from .row_parts import RowPart, part_of
from .row_sharding import RowSharding, at_start, maker_of_dtensors
from .row_write_back import RowWriteBack
from .tensor_parallel import Distribution, distributions_of, is_distributed

#: Inside of it, torch skips the ``__torch_function__`` lookup for DTensors, which costs as much as
#: reading the attribute.
_AS_TENSORS = torch._C.DisableTorchFunctionSubclass


class RowHandle(RowWriteBack, FlatParamHandle):
    """Owns the memory of one group of parameters that are sharded by rows.

    ``params`` are replaced in their modules by DTensors on construction.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        module: nn.Module,
        device: torch.device,
        strategy: ShardingStrategy,
        offload: bool,
        dtypes: tuple[torch.dtype | None, torch.dtype | None],
        process_group: Any,
        *,
        places: dict[Any, list[ParameterLocation]],
        shardings: Sequence[RowSharding],
        distributions: Mapping[nn.Parameter, Distribution] | None = None,
        encodings: Encodings | None = None,
    ) -> None:
        self.encodings = encodings
        self.module = module
        self.device = device
        self.strategy = strategy
        self.keep_low_precision_grads = False
        self.use_orig_params = True
        self.offload = offload and device.type != "cpu"
        self.skip_writeback_check = False
        self.local_gradients = False
        self._note_received()
        #: Full gradients that are not reduced yet (``set_requires_gradient_sync(False)``).
        self._unreduced: list[torch.Tensor | None] = []
        self.rank: int = process_group.rank()
        self._mixed_precision = dtypes
        self.full_buffers = {}
        self.reduce_buffers = {}
        self._used_marks = None
        #: What gives the memory that all-gathers fill, and that reduces read, if the user does.
        self._gather_memory: Memory | None = None
        self._reduce_memory: Memory | None = None
        self.places = [places[p] for p in params]
        self.shardings = list(shardings)
        self.distributions = distributions_of(params, distributions or {})
        self._set_dtypes(params[0].dtype)
        self.layout: RowLayout = RowLayout.pack_rows(
            [found[0].path for found in self.places],
            [p.shape for p in params],
            [sharding.dim for sharding in shardings],
            world_size=process_group.size(),
            alignment=alignment_elements(self.dtypes.compute.itemsize),
        )
        self.is_sharded = self.layout.world_size > 1
        self.pieces = self.layout.pieces(self.rank)
        self._chunk_shapes = [
            self.layout.chunk_shape(index, self.rank) for index in range(len(self.layout.slots))
        ]
        self._sizes, self._positions = self._cuts()
        #: For each parameter, its part of what :attr:`_sizes` cut; and its shape, unless it is one
        #: dimension, as the part is.
        self._parts = [
            (index, at, shape if len(shape) != 1 else None)
            for index, (at, shape) in enumerate(
                zip(self._positions, self._chunk_shapes, strict=True)
            )
        ]
        self._dtensor = maker_of_dtensors()
        self._shard_originals(params)

    def _cuts(self) -> tuple[list[int], list[int]]:
        """Sizes that cut a shard at its pieces' ends, and which part is which parameter's."""
        sizes: list[int] = []
        positions: list[int] = []
        end = 0
        for piece in (*self.pieces, None):
            start = self.layout.shard_numel if piece is None else piece.offset
            if start > end:
                sizes.append(start - end)
            if piece is not None:
                positions.append(len(sizes))
                sizes.append(piece.numel)
                end = piece.offset + piece.numel
        return sizes, positions

    def _shard_originals(self, originals: Sequence[nn.Parameter]) -> None:
        first = originals[0]
        shard = streams_for(first.device).lasting_zeros(self.layout.shard_numel, first.dtype)
        if self.offload:
            shard = streams_for(self.device).rest_on_host(shard)
        self.shard_tensor = shard
        self.sharded = self._views_of(shard)
        self.params = []
        with torch.no_grad():
            for index, original in enumerate(originals):
                view = self.sharded[index]
                if not original.is_meta:
                    view.copy_(self.own_rows(index, original))
                whole = self.shardings[index].assemble(at_start(view))
                parameter = nn.Parameter(whole, requires_grad=original.requires_grad)
                for name, value in vars(original).items():
                    setattr(parameter, name, value)
                self.params.append(parameter)
        self._bind()

    def own_rows(self, index: int, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a whole parameter, or of what has its shape; a view."""
        chunk = self.layout.chunks[index]
        rows = self._chunk_shapes[index][chunk.dim]
        start = min(self.rank * chunk.size, whole.shape[chunk.dim])
        return whole.detach().narrow(chunk.dim, start, rows)

    def _views_of(self, shard: torch.Tensor) -> list[torch.Tensor]:
        pairs = zip(self.pieces, self._chunk_shapes, strict=True)
        return [shard[p.offset : p.offset + p.numel].view(shape) for p, shape in pairs]

    # -- sharding -----------------------------------------------------------------------------

    def adopt_shard(self, shard: torch.Tensor) -> None:
        """Let ``shard`` be the persistent storage; parameters and buffers follow."""
        self.shard_tensor = shard
        self.forget_buffers()
        self._set_dtypes(shard.dtype)
        self.sharded = self._views_of(shard)
        self._bind()

    def _describe(self, reference: HandleReference | None = None) -> None:
        for parameter in self.params:
            parameter._fullshard_unit = type(self.module).__name__  # type: ignore[attr-defined]

    def _bind(self) -> None:
        """Let every parameter's local part be its view of the shard, and show it."""
        self._describe()
        for parameter, view in zip(self.params, self.sharded, strict=True):
            parameter._local_tensor = view  # type: ignore[attr-defined]
        #: By parameter, what a DTensor like it is made from.
        self._patterns = {
            id(parameter): at_start(view)
            for parameter, view in zip(self.params, self.sharded, strict=True)
        }
        self._containers, self._keys, self._indices = containers_of(self.places, registered=True)
        self._remember()
        self.show_sharded()

    def _remember(self) -> None:
        """Keep what is compared, before each use, with what the user may have replaced."""
        self._visible = [self.params[index] for index in self._indices]
        self.optimizer_params = self.params
        # Operations on DTensors count on the DTensor, those on local parts on the shard.
        self.versioned = [self.shard_tensor, *self.params]
        self._expected = self.sharded

    # -- buffers ------------------------------------------------------------------------------

    def buffer(self, gathered_in: torch.dtype | Encoding) -> FullBuffer:
        """The full buffer that is gathered in a dtype, or encoded; made at its first use."""
        buffer = self.full_buffers.get(gathered_in)
        if buffer is None:
            kind: Any = FullBuffer
            shown_as = self.presentations()
            if isinstance(gathered_in, Encoding):
                kind = functools.partial(EncodedRowFullBuffer, encoding=gathered_in)
                dtype = self.dtypes.compute
            else:
                dtype = gathered_in
                if self.layout.world_size > 1:
                    kind = functools.partial(RowFullBuffer, memory=self._gather_memory)
            if self.layout.world_size == 1 and self._is_shard_backed(dtype):
                buffer = ShardBackedBuffer(self.layout, self.shard_tensor, shown_as)
            else:
                shard, device = self.shard_tensor, self.device
                buffer = kind(self.layout, self.rank, shard, dtype, device, shown_as)
            self.full_buffers[gathered_in] = buffer
        return buffer

    def reduce_buffer(self, dtype: torch.dtype) -> RowReduceBuffer:
        """The buffer that gradients are reduced from in ``dtype``, made at its first use."""
        buffer = self.reduce_buffers.get(dtype)
        if buffer is None:
            buffer = RowReduceBuffer(self.layout, dtype, self.device, self._reduce_memory)
            self.reduce_buffers[dtype] = buffer
        assert isinstance(buffer, RowReduceBuffer)
        return buffer

    def take_memory_from(self, gathers: Memory | None, reduces: Memory | None) -> None:
        """Have all-gathers and reduces use memory that others give; None is the allocator's own.

        While the unit is sharded.
        """
        self._gather_memory, self._reduce_memory = gathers, reduces
        self.forget_buffers()

    def part(self, full: FullBuffer, size: int, rank: int) -> RowPart:
        """The part of the full parameters that the ``rank``-th of ``size`` ranks keeps."""
        assert isinstance(full, RowFullBuffer)
        dims = [sharding.dim for sharding in self.shardings]
        return part_of(full, self.layout, dims, size, rank)

    def shown_part(self, part: Part, mesh: Any) -> list[nn.Parameter]:
        """The DTensors that users see while ``part`` is kept, on the mesh of its ranks.

        Tensor-parallel parameters, which have a mesh already, stay as they are between steps.
        """
        assert isinstance(part, RowPart)
        shown: list[nn.Parameter] = []
        for index, (rows, parameter) in enumerate(zip(part.rows, self.params, strict=True)):
            if self.distributions and self.distributions[index] is not None:
                shown.append(parameter)
                continue
            sharding = self.shardings[index].among(mesh)
            shown.append(
                nn.Parameter(sharding.assemble(rows), requires_grad=parameter.requires_grad)
            )
        return shown

    def cut(self, flat: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        """A shard cut along the parameters: pairs of parameter index and this rank's rows."""
        parts = flat.split_with_sizes(self._sizes)
        return [
            (index, parts[at] if shape is None else parts[at].view(shape))
            for index, at, shape in self._parts
        ]

    def witness(self, reduced: torch.Tensor, index: int, piece: torch.Tensor) -> torch.Tensor:
        chunk = self.layout.chunks[index]
        return piece if piece.numel() else reduced[chunk.offset : chunk.offset + chunk.numel]

    def room(self, reduced: torch.Tensor, index: int) -> torch.Tensor:
        chunk = self.layout.chunks[index]
        return reduced[chunk.offset : chunk.offset + chunk.numel]

    def keep_changes(self, buffer: FullBuffer) -> None:
        for index, whole in enumerate(buffer.views):
            self.store(index, whole)

    def store(self, index: int, whole: torch.Tensor) -> None:
        """Copy this rank's rows of a whole parameter into the shard."""
        # Through .data, so that autograd does not see a change of a parameter saved for backward.
        self.sharded[index].data.copy_(self.own_rows(index, whole))

    def from_all_ranks(self, gathered: torch.Tensor) -> list[torch.Tensor]:
        """The parameters, in their shapes, that the shards of all ranks one after another hold."""
        return whole_parameters(gathered, self.layout)

    # -- gradients ----------------------------------------------------------------------------

    def distributed(self, parameter: Any, gradient: torch.Tensor) -> torch.Tensor:
        """A reduced gradient as users see it: a DTensor like its parameter."""
        pattern = self._patterns[id(parameter)]
        shown: Any = self._dtensor(pattern, parameter._spec, requires_grad=False)
        shown._local_tensor = gradient
        shown._fullshard_reduced = True
        return shown

    def put_gradients(
        self, pairs: Sequence[tuple[nn.Parameter, torch.Tensor]]
    ) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Show reduced gradients on trainable parameters; returns those that have some already."""
        left: list[tuple[nn.Parameter, torch.Tensor]] = []
        with _AS_TENSORS():
            for parameter, gradient in pairs:
                if not parameter.requires_grad:
                    continue
                if parameter.grad is None:
                    parameter.grad = self.distributed(parameter, gradient)
                else:
                    left.append((parameter, gradient))
        return left

    def local_gradient(self, parameter: Any) -> torch.Tensor:
        """This rank's part of the gradient that a parameter has."""
        gradient = parameter.grad
        if not is_distributed(gradient):
            index = next(i for i, known in enumerate(self.params) if known is parameter)
            raise RuntimeError(
                f"The gradient of parameter {self.places[index][0].path!r} is a plain tensor of "
                f"shape {tuple(gradient.shape)}, but fully_shard made the parameter a DTensor: set "
                "it to None, or to a DTensor such as torch.zeros_like(parameter)"
            )
        local: torch.Tensor = gradient._local_tensor
        return local

    @property
    def keeps_local_gradients(self) -> bool:
        return bool(self._unreduced)

    def keep_unreduced(self, gradients: list[torch.Tensor | None]) -> None:
        """Keep full gradients until a backward reduces them."""
        self._unreduced = gradients

    def take_unreduced(self) -> list[torch.Tensor | None]:
        """Give away the full gradients that were kept."""
        kept, self._unreduced = self._unreduced, []
        return kept

    # -- the user's view ----------------------------------------------------------------------

    @property
    def trainable(self) -> tuple[bool, ...]:
        """Per parameter, whether it takes part in training now."""
        with _AS_TENSORS():
            return tuple(map(REQUIRES_GRAD, self.params))

    @property
    def is_cut(self) -> bool:
        """DTensors know of each other: no optimizer computes with parts of them unawares."""
        return False
