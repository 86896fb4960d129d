"""FlatParamHandle: owns one group's shard, full buffers, reduce buffers and views.

A handle owns its tensors and knows nothing of when things happen; ``unit.py`` does. It never
communicates: it offers the buffers that a unit hands to the collectives.
"""

from __future__ import annotations

import collections
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ...api import ShardingStrategy, adopt
from ..comm.streams import streams_for
from ..encoding.encodings import Encoding, Encodings
from .buffers import FullBuffer, Part, ReduceBuffer, ShardBackedBuffer
from .conversion import Conversion
from .encoded_buffers import EncodedFullBuffer
from .flat_parameter import FlatParameter, HandleReference
from .flat_part import FlatPart
from .flattening import check_uniform, cut_own_shard, cuts, flat_strides, flattened
from .layout import FlatParamShardMetadata, Layout, Piece, alignment_elements
from .locations import ParameterLocation, containers_of, find_locations
from .presentation import Presentation
from .tensor_parallel import Distribution, distributions_of, local_part
from .unused_parameters import UsedParameterMarks
from .write_back import WriteBack

#: Environment variables, by the names under which programs look them up.
_FSDP_SKIP_WRITEBACK_CHECK = "FSDP_SKIP_WRITEBACK_CHECK"
_FSDP_USE_FULL_PREC_IN_EVAL = "FSDP_USE_FULL_PREC_IN_EVAL"

HandleShardingStrategy = ShardingStrategy

REQUIRES_GRAD = operator.attrgetter("requires_grad")
#: Runs an iterator to its end, in C, for its side effects.
_EXHAUST: Callable[[Iterable[Any]], None] = collections.deque(maxlen=0).extend


class Dtypes(NamedTuple):
    """The dtypes in which a group is kept, computed and reduced."""

    shard: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype


class FlatParamHandle(Presentation, WriteBack, Conversion):
    """Owns the memory of one group of parameters.

    The constructor flattens ``params``. This rank's part is kept by :meth:`shard`, or by the
    constructor with ``shard=True``.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        module: nn.Module,
        device: torch.device,
        sharding_strategy: ShardingStrategy,
        offload_params: bool,
        mp_param_dtype: torch.dtype | None,
        mp_reduce_dtype: torch.dtype | None,
        keep_low_precision_grads: bool,
        process_group: Any,
        use_orig_params: bool,
        fsdp_extension: Any = None,
        *,
        places: dict[Any, list[ParameterLocation]] | None = None,
        distributions: Mapping[nn.Parameter, Distribution] | None = None,
        shard: bool = False,
        encodings: Encodings | None = None,
    ) -> None:
        self.encodings = encodings
        self.params = list(dict.fromkeys(params))
        if not self.params:
            raise ValueError("Cannot construct a FlatParamHandle with an empty parameter list")
        self.module = module
        self.device = device
        if not isinstance(sharding_strategy, ShardingStrategy):
            sharding_strategy = adopt(sharding_strategy, ShardingStrategy, "sharding_strategy")
        self.strategy = sharding_strategy
        self.keep_low_precision_grads = keep_low_precision_grads
        self.use_orig_params = use_orig_params
        self.offload = offload_params and device.type != "cpu"
        self.skip_writeback_check = os.environ.get(_FSDP_SKIP_WRITEBACK_CHECK) == "1"
        self.is_sharded = False
        #: Whether the gradients that the user sees are unreduced ones (see ``no_sync``).
        self.local_gradients = False
        self._note_received()
        shards = self.strategy is not ShardingStrategy.NO_SHARD
        self.rank: int = process_group.rank() if shards else 0
        self._mixed_precision = (mp_param_dtype, mp_reduce_dtype)
        #: By the dtype or encoding of their all-gather; :meth:`buffer` makes missing ones.
        self.full_buffers: dict[torch.dtype | Encoding, FullBuffer] = {}
        self.reduce_buffers: dict[torch.dtype, ReduceBuffer] = {}
        self._used_marks: UsedParameterMarks | None = None
        if places is None:
            places = find_locations(module, self.params)
        self.places = [places[p] for p in self.params]
        if distributions:
            self.distributions = distributions_of(self.params, distributions)
        self._set_dtypes(self.params[0].dtype)
        compute = self.dtypes.compute
        names = [places[0].path for places in self.places]
        shapes = [p.shape for p in self.params]
        check_uniform(self.params, names, use_orig_params)
        self.layout = Layout.pack(
            names,
            shapes,
            flat_strides(self.params),
            world_size=process_group.size() if shards else 1,
            alignment=alignment_elements(compute.itemsize) if use_orig_params else 1,
        )
        self.pieces = self.layout.pieces(self.rank)
        self._cut_sizes, self._cut_positions = cuts(self.pieces, self.layout.shard_numel)
        if shard:
            self._replace_originals(cut_own_shard(self.params, self.layout, self.pieces))
        else:
            self._replace_originals(flattened(self.params, self.layout))
        if shard:
            self.shard()
        else:
            self._bind()

    # -- construction -------------------------------------------------------------------------

    def _set_dtypes(self, dtype: torch.dtype) -> None:
        compute, reduce = self._mixed_precision if dtype.is_floating_point else (None, None)
        compute = compute or dtype
        self.dtypes = Dtypes(dtype, compute, reduce or compute)
        #: The dtype or encoding in which full parameters to compute with are all-gathered.
        self.gathered_in: torch.dtype | Encoding = compute
        #: The encoding in which gradients are sent to be reduced; None: as they are.
        self.reduced_in: Encoding | None = None
        if self.encodings is not None:
            self.gathered_in = self.encodings.gather or compute
            self.reduced_in = self.encodings.reduce

    def _replace_originals(self, flat: torch.Tensor) -> None:
        self.shard_tensor = flat
        self.flat_param = FlatParameter(
            flat[: self.layout.numel], requires_grad=True in map(REQUIRES_GRAD, self.params)
        )
        self._describe(HandleReference(self))
        if not self.use_orig_params:
            for places in self.places:
                for place in places:
                    del place.module._parameters[place.name]
            self.module.register_parameter("_flat_param", self.flat_param)
            # The originals are gone; holding them would hold the whole model's memory.
            self.params = []

    def _note_received(self) -> None:
        #: The parameters that the running backward has put gradients on.
        self._received: list[nn.Parameter] = []
        #: Bound once: the step's path calls no Python here.
        self.receive = self._received.extend
        self.forget_received = self._received.clear
        #: By index among ``params``: whether no rank had a gradient of the parameter, as far as
        #: the last backward that asked found.
        self._absent: dict[int, bool] = {}

    def _reference(self) -> HandleReference:
        return HandleReference(self)

    def _describe(self, reference: HandleReference) -> None:
        flat: Any = self.flat_param
        flat._is_flat_param = True
        flat._handle_reference = reference
        slots = self.layout.slots
        flat._fqns = tuple([slot.name for slot in slots])
        flat._shapes = tuple([torch.Size(slot.shape) for slot in slots])
        flat._numels = tuple([slot.numel for slot in slots])
        flat._params = self.params if self.use_orig_params else None
        flat._shard_param_infos = self.pieces
        for parameter in self.params:
            parameter._fullshard_unit = type(self.module).__name__  # type: ignore[attr-defined]

    # -- sharding -----------------------------------------------------------------------------

    def shard(self) -> None:
        """Keep this rank's part of the flat buffer, and release the rest.

        With ``shard=True`` the constructor cut that part; this then only adopts it.
        """
        shard, size = self.shard_tensor, self.layout.shard_numel
        if shard.numel() > size:
            shard = shard[self.rank * size : (self.rank + 1) * size].clone()
        self.is_sharded = self.strategy is not ShardingStrategy.NO_SHARD
        self.adopt_shard(streams_for(self.device).rest_on_host(shard) if self.offload else shard)

    def adopt_shard(self, shard: torch.Tensor) -> None:
        """Let ``shard`` be the persistent storage; parameters and buffers follow."""
        self.shard_tensor = shard
        self.flat_param.data = shard
        self.forget_buffers()
        self._set_dtypes(shard.dtype)
        self._bind()

    def _bind(self) -> None:
        """Point every original parameter at its piece of the shard, and show it."""
        shard = self.shard_tensor
        if self.is_sharded:
            self.sharded = [shard[p.offset : p.offset + p.numel] for p in self.pieces]
        else:
            self.sharded = [
                shard.as_strided(s.shape, s.stride, s.offset) for s in self.layout.slots
            ]
        if self.use_orig_params:
            for parameter, view in zip(self.params, self.sharded, strict=True):
                parameter.data = view
        self._containers, self._keys, self._indices = containers_of(
            self.places, registered=self.use_orig_params
        )
        self._remember()
        self.show_sharded()

    def _remember(self) -> None:
        """Note the objects and addresses with which the user's parameters are compared before each
        use.
        """
        visible: Sequence[Any] = self.params if self.use_orig_params else self.sharded
        self._visible = [visible[index] for index in self._indices]
        #: The parameters through which the user, or an optimizer, changes the shard.
        self.optimizer_params = self.params if self.use_orig_params else [self.flat_param]
        #: The tensors that count in-place changes to the shard.
        self.versioned: Sequence[torch.Tensor] = self.optimizer_params
        for parameter in self.optimizer_params:
            parameter._fullshard_is_cut = self.is_cut  # type: ignore[attr-defined]
        # The addresses of the pieces, not of the parameters: one that the user put in place of two
        # others lies in one of their pieces only.
        self._expected = self.sharded if self.use_orig_params else [self.shard_tensor]
        self._addresses = list(map(torch.Tensor.data_ptr, self._expected))

    def _get_shard_metadata(self, start: int, end: int) -> tuple[Piece, ...]:
        """Pieces for the inclusive range ``start..end`` of the unsharded buffer."""
        return self.layout.pieces_between(start, end + 1)

    def shard_metadata(self) -> FlatParamShardMetadata:
        """The original parameters that this rank's shard touches."""
        return self.layout.metadata(self.flat_param._shard_param_infos)

    def whole_shape(self, index: int) -> torch.Size:
        """A parameter's shape in the user's model, before tensor parallelism or sharding."""
        distribution = self.distribution(index)
        return torch.Size(
            self.layout.slots[index].shape if distribution is None else distribution.shape
        )

    # -- swapping -----------------------------------------------------------------------------

    def show(self, tensors: Sequence[torch.Tensor]) -> None:
        """Register one tensor per parameter where the module's code finds it."""
        # Half the time of assignments in a loop, four times per unit and step.
        found = map(tensors.__getitem__, self._indices)
        _EXHAUST(map(operator.setitem, self._containers, self._keys, found))

    def show_sharded(self) -> None:
        """Register this rank's pieces again."""
        _EXHAUST(map(operator.setitem, self._containers, self._keys, self._visible))

    def shows(self, tensors: Sequence[torch.Tensor], buffer: FullBuffer) -> bool:
        """True if exactly these objects are in place, still lying in ``buffer``."""
        expected = map(tensors.__getitem__, self._indices)
        found = map(operator.getitem, self._containers, self._keys)
        if any(map(operator.is_not, found, expected)):
            return False
        locals_ = map(local_part, tensors) if self.distributions else tensors
        addresses = map(torch.Tensor.data_ptr, locals_)
        return not any(map(operator.ne, addresses, map(torch.Tensor.data_ptr, buffer.views)))

    # -- buffers ------------------------------------------------------------------------------

    def buffer(self, gathered_in: torch.dtype | Encoding) -> FullBuffer:
        """The full buffer that is gathered in a dtype, or encoded; made at its first use."""
        buffer = self.full_buffers.get(gathered_in)
        if buffer is None:
            layout, shard, shown_as = self.layout, self.shard_tensor, self.presentations()
            to_fill = (layout, self.rank, shard)
            if isinstance(gathered_in, Encoding):
                kind = (self.dtypes.compute, self.device, shown_as)
                buffer = EncodedFullBuffer(*to_fill, *kind, encoding=gathered_in)
            elif layout.world_size == 1 and self._is_shard_backed(gathered_in):
                buffer = ShardBackedBuffer(layout, shard, shown_as)
            else:
                buffer = FullBuffer(*to_fill, gathered_in, self.device, shown_as)
            self.full_buffers[gathered_in] = buffer
        return buffer

    def allocated_buffer(self) -> FullBuffer | None:
        """The full buffer that has memory now, if one has."""
        return next((b for b in self.full_buffers.values() if b.is_allocated), None)

    def part(self, full: FullBuffer, size: int, rank: int) -> Part:
        """The part of the full parameters that the ``rank``-th of ``size`` ranks keeps."""
        return FlatPart(full, size, rank)

    def shown_part(self, part: Part, mesh: Any) -> list[nn.Parameter] | None:
        """The parameters that users see while ``part`` is kept; None: the sharded ones."""
        return None

    def reduce_buffer(self, dtype: torch.dtype) -> ReduceBuffer:
        """The buffer that gradients are reduced from in ``dtype``, made at its first use."""
        buffer = self.reduce_buffers.get(dtype)
        if buffer is None:
            buffer = self.reduce_buffers[dtype] = ReduceBuffer(self.layout, dtype, self.device)
        return buffer

    def _is_shard_backed(self, dtype: torch.dtype) -> bool:
        return dtype == self.dtypes.shard and self.shard_tensor.device == self.device

    def forget_buffers(self) -> None:
        """Make new buffers at the next use."""
        self.full_buffers.clear()
        self.reduce_buffers.clear()
        self._used_marks = None

    @property
    def used_marks(self) -> UsedParameterMarks:
        """The marks for this rank's gradients in a flat buffer that is about to be reduced."""
        if self._used_marks is None:
            self._used_marks = UsedParameterMarks(self.layout, self.dtypes.reduce, self.device)
        return self._used_marks

    def cut(self, flat: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        """``flat`` (a shard, or all of it when nothing is sharded) cut along the parameters.

        Pairs of parameter index and piece; parameters without a piece here are left out.
        """
        if not self.is_sharded:
            slots = enumerate(self.layout.slots)
            return [(i, flat.as_strided(s.shape, s.stride, s.offset)) for i, s in slots]
        parts = flat.split_with_sizes(self._cut_sizes)
        return [(index, parts[position]) for index, position in self._cut_positions]

    def witness(self, reduced: torch.Tensor, index: int, piece: torch.Tensor) -> torch.Tensor:
        """The part of a reduced shard that shows whether any rank has a parameter's gradient."""
        return piece

    def room(self, reduced: torch.Tensor, index: int) -> torch.Tensor:
        """The elements of a reduced shard that belong to a parameter: see :meth:`witness`."""
        piece = self.pieces[index]
        return reduced[piece.offset : piece.offset + piece.numel]

    def keep_changes(self, buffer: FullBuffer) -> None:
        """Copy changes that were made to the full parameters in ``buffer`` into the shard."""
        self.shard_tensor.data.copy_(buffer.own)

    # -- the user's view ----------------------------------------------------------------------

    def received(self) -> list[nn.Parameter]:
        """The parameters that the running backward has put gradients on, each once."""
        return list(dict.fromkeys(self._received))

    def remember_absent(self, slot: int, is_absent: bool) -> None:
        """Note whether no rank had a gradient of a parameter of which this rank had none."""
        self._absent[slot] = is_absent

    def was_absent(self, slot: int) -> bool | None:
        """The last note of :meth:`remember_absent`; None if there is none."""
        return self._absent.get(slot)

    def show_local_gradients(self, shown: bool) -> None:
        """Note whether the gradients that the user sees are unreduced ones."""
        self.local_gradients = shown

    @property
    def keeps_local_gradients(self) -> bool:
        """True if there are unreduced gradients: the user may have cleared them since."""
        return self.local_gradients and any(p.grad is not None for p in self.optimizer_params)

    @property
    def trainable(self) -> tuple[bool, ...]:
        """Per parameter, whether it takes part in training now."""
        if self.use_orig_params:
            return tuple(map(REQUIRES_GRAD, self.params))
        return (self.flat_param.requires_grad,) * len(self.layout.slots)

    @property
    def is_cut(self) -> bool:
        """True if this rank's shard is less than the whole flat buffer."""
        return self.is_sharded and self.layout.world_size > 1

    @property
    def has_trainable(self) -> bool:
        """True if any parameter takes part in training now."""
        return any(map(REQUIRES_GRAD, self.optimizer_params))
