"""The only file that calls c10d: gather, reduce, all-reduce and broadcast, per backend.

Every operation is first agreed on by the ranks of its group (see ``agreement.py``), then issued
in the cheapest way the group's backend offers.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .agreement import Operation, agreement_for
from .started import Started, leave_time_at_exit

# torch 2.13 renamed the flat collectives; 2.11 has only the old names, and both are methods of
# a process group, so the warnings of the functions in torch.distributed are not in the way.
_NEW_NAMES = hasattr(dist.ProcessGroup, "all_gather_single")


#: Up to how many ranks, and from how many bytes on, gloo's broadcasts beat its gather.
_BROADCASTING_RANKS = 4
_BROADCAST_BYTES = 64 * 1024


def _reducing(options: Any, operation: Any) -> Any:
    options.reduceOp = dist.ReduceOp(operation)
    return options


_MEAN = _reducing(dist.AllreduceOptions(), dist.ReduceOp.AVG)
_MAXIMUM = _reducing(dist.AllreduceOptions(), dist.ReduceOp.MAX)
_MEAN_SCATTER = _reducing(dist.ReduceScatterOptions(), dist.ReduceOp.AVG)


class Group:
    """A process group with what the engine asks of it, decided once.

    Stands in for objects that only know ``rank()`` and ``size()``, up to the first collective.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank: int = group.rank()
        self.size: int = group.size()
        self._agreement = agreement_for(group) if isinstance(group, dist.ProcessGroup) else None
        name = _backend_name(group)
        self._gloo = "gloo" in name
        #: Whether the backend itself makes means of sums, which saves a kernel for each.
        self.averages = "nccl" in name and not self._gloo
        self._from_each = [_broadcast_from(rank) for rank in range(self.size)] if self._gloo else []
        if self._gloo:
            leave_time_at_exit()

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self

    def __reduce__(self) -> Any:
        if not dist.is_initialized() or self.group is not dist.group.WORLD:
            raise TypeError(
                "A unit can be pickled when it uses the default process group; this one uses a "
                "group of its own, which another process would not know"
            )
        return _default_group, ()

    def agree(self, verb: str, unit: str, *tensors: torch.Tensor) -> None:
        """Return when all ranks are known to do this next, with tensors of these sizes."""
        if self._agreement is not None:
            elements = sum(map(torch.Tensor.numel, tensors))
            self._settle(Operation(verb, unit, elements))

    def begin_pass(self, kind: str, unit: str) -> None:
        """Return when all ranks are known to begin this kind of pass."""
        if self._agreement is not None:
            self._settle(Operation(kind, unit), begins_pass=True)

    def _settle(self, operation: Operation, begins_pass: bool = False) -> None:
        assert self._agreement is not None
        try:
            self._agreement.settle(operation, begins_pass)
        except BaseException:
            _stuck.append(self.group)
            raise

    def wait(self, *operations: Started) -> None:
        """Wait for what was started (on an accelerator: order the current stream)."""
        try:
            for operation in operations:
                if self._agreement is not None and self._gloo:
                    self._agreement.wait(operation.work)
                    operation.finish()
                else:
                    operation.work.wait()
        except BaseException:
            _stuck.append(self.group)
            raise

    def gather(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], unit: str
    ) -> list[Started]:
        """Start filling each output with all ranks' inputs, in one launch.

        Over gloo not by its coalesced gather: several of these at a time corrupt the heap (torch
        2.13), and on another device a single one ends the process.
        """
        self.agree("gather", unit, *outputs)
        if self._gloo and len(outputs) > 1 and self._is_worth_packing(outputs):
            return [self._gather_packed(outputs, inputs)]
        if self._gloo and self._is_worth_broadcasts(outputs):
            pairs = zip(outputs, inputs, strict=True)
            return [started for pair in pairs for started in self._broadcast_pieces(*pair)]
        if self._gloo or len(outputs) == 1:
            return list(map(self._gather_one, outputs, inputs))
        if _NEW_NAMES:
            work = self.group.all_gather_single_coalesced(list(outputs), list(inputs))
        else:
            work = self.group.allgather_into_tensor_coalesced(list(outputs), list(inputs))
        return [Started(work)]

    def _gather_one(
        self,
        output: torch.Tensor,
        piece: torch.Tensor,
        then: Callable[[], object] | None = None,
    ) -> Started:
        if self._gloo:
            output, piece = _bytes_of(output), _bytes_of(piece)
        if _NEW_NAMES:
            work = self.group.all_gather_single(output, piece)
        else:
            work = self.group._allgather_base(output, piece)
        return Started(work, (output, piece) if self._gloo else (), then)

    def _gather_packed(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> Started:
        """Gather tensors as one, in which a rank's pieces lie side by side."""
        pieces = list(map(_bytes_of, inputs))
        sent = torch.cat(pieces)
        received = sent.new_empty(self.size, sent.numel())
        parts = received.split([piece.numel() for piece in pieces], dim=1)
        places = [
            _bytes_of(output).view(part.shape) for output, part in zip(outputs, parts, strict=True)
        ]
        unpack = functools.partial(torch._foreach_copy_, places, parts)
        return self._gather_one(received, sent, then=unpack)

    def _started(self, work: Any, *tensors: torch.Tensor) -> Started:
        return Started(work, tensors if self._gloo else ())

    def _is_worth_broadcasts(self, outputs: Sequence[torch.Tensor]) -> bool:
        """Whether every rank had better send its piece on its own.

        Gloo's gather fills a buffer of its own first. Few ranks with much to send are done in
        0.65 (2 ranks) to 0.75 (4) times as long by broadcasts, which write where they should.
        """
        return (
            self.size <= _BROADCASTING_RANKS
            and outputs[0].device.type == "cpu"
            and _nbytes(outputs) >= _BROADCAST_BYTES
        )

    def _is_worth_packing(self, outputs: Sequence[torch.Tensor]) -> bool:
        """Whether they had better be copied: 0.6 to 0.75 times as long as a launch for each."""
        return outputs[0].device.type == "cpu" and _nbytes(outputs) < _BROADCAST_BYTES

    def _broadcast_pieces(self, output: torch.Tensor, piece: torch.Tensor) -> list[Started]:
        parts = list(output.view(torch.uint8).view(self.size, -1).unbind())
        own, parts[self.rank] = parts[self.rank], piece.view(torch.uint8)
        broadcasts = [
            Started(self.group.broadcast([part], options), [part])
            for part, options in zip(parts, self._from_each, strict=True)
        ]
        # While they are under way: a rank's own part is sent from where it rests.
        if own.data_ptr() != piece.data_ptr():
            own.copy_(parts[self.rank])
        return broadcasts

    def gather_to_first(
        self, outputs: Sequence[torch.Tensor], piece: torch.Tensor, unit: str
    ) -> None:
        """Fill ``outputs`` on the group's first rank, one per rank, with all ranks' pieces."""
        self.agree("gather to the first rank", unit, piece)
        options = dist.GatherOptions()
        options.rootRank = 0
        received = list(map(_own_alias, outputs)) if self.rank == 0 else []
        piece = _own_alias(piece)
        outputs_of_first = [received] if self.rank == 0 else []
        # Not kept in a variable: nothing but what is waited for may hold the work.
        self.wait(
            self._started(self.group.gather(outputs_of_first, [piece], options), piece, *received)
        )

    def reduce_scatter(self, output: torch.Tensor, full: torch.Tensor, unit: str) -> None:
        """Sum ``full`` over the ranks and leave this rank's slice in ``output``.

        ``full`` is scratch afterwards.
        """
        self.start_reduce_scatter(output, full, unit)()

    def start_reduce_scatter(
        self, output: torch.Tensor, full: torch.Tensor, unit: str, mean: bool = False
    ) -> Callable[[], None]:
        """Begin to reduce; the result is in ``output`` when what is returned has been called.

        A ``mean`` can be asked of a group that ``averages``.

        Over gloo the sum is made of an all-to-all and a local addition, which takes 0.6 times as
        long as gloo's own reduce-scatter or less. Not of sends and receives: one that is not
        there in time ends all of the group's connections, and a slow rank must be waited for.
        """
        if self.size == 1:
            return functools.partial(output.copy_, full)  # type: ignore[return-value]
        self.agree("reduce", unit, full)
        # For gloo as tensors that nothing else holds; others are spared the calls.
        if self._gloo or full.dim() != 1 or full.is_complex():
            output, full = as_real(output).view(-1), as_real(full).view(-1)
        if self._gloo:
            halves = self.size == 2 and full.device.type == "cpu"
            exchange = self._swap_halves if halves else self._exchange_parts
            return functools.partial(self._add_up, *exchange(full), output)
        options = (_MEAN_SCATTER,) if mean else ()
        if _NEW_NAMES:
            work = self.group.reduce_scatter_single(output, full, *options)
        else:
            work = self.group._reduce_scatter_base(output, full, *options)
        return functools.partial(self.wait, Started(work))

    def _exchange_parts(self, full: torch.Tensor) -> tuple[Started, Sequence[torch.Tensor]]:
        """Start sending every rank its part; returns what will be all ranks' parts for this one."""
        received = torch.empty_like(full)
        parts = received.view(self.size, full.numel() // self.size).unbind()
        received = _own_alias(received)
        work = self.group.alltoall_base(received, full, [], [])
        return Started(work, [received, full]), parts

    def _swap_halves(self, full: torch.Tensor) -> tuple[Started, Sequence[torch.Tensor]]:
        """The same for two ranks, without sending its own part to this one: 0.8 x the time."""
        halves = full.view(2, full.numel() // 2).unbind()
        received, sent = torch.empty_like(halves[0]), halves[1 - self.rank]
        sizes = [0, 0]
        sizes[1 - self.rank] = sent.numel()
        work = self.group.alltoall_base(received, sent, sizes, sizes)
        return Started(work, [received, sent]), (halves[self.rank], received)

    def _add_up(
        self, started: Started, parts: Sequence[torch.Tensor], output: torch.Tensor
    ) -> None:
        self.wait(started)
        torch.add(parts[0], parts[1], out=output)
        for part in parts[2:]:
            output.add_(part)

    def all_reduce(
        self, tensor: torch.Tensor, unit: str, verb: str = "all-reduce", mean: bool = False
    ) -> None:
        """Sum ``tensor`` over the ranks, in place; or make it their ``mean``, as above."""
        self.start_all_reduce(tensor, unit, verb, mean)()

    def start_all_reduce(
        self, tensor: torch.Tensor, unit: str, verb: str = "all-reduce", mean: bool = False
    ) -> Callable[[], None]:
        """Begin to sum ``tensor``; it is the sum when what is returned has been called."""
        if self.size == 1:
            return _nothing
        self.agree(verb, unit, tensor)
        tensor = _own_alias(tensor)
        work = self.group.allreduce([tensor], *((_MEAN,) if mean else ()))
        return functools.partial(self.wait, self._started(work, tensor))

    def all_reduce_max(self, tensor: torch.Tensor, unit: str, verb: str = "maximum") -> None:
        """Replace ``tensor`` by its largest value over the ranks, in place."""
        if self.size == 1:
            return
        self.agree(verb, unit, tensor)
        tensor = _own_alias(tensor)
        self.wait(self._started(self.group.allreduce([tensor], _MAXIMUM), tensor))

    def broadcast(self, tensors: Sequence[torch.Tensor], unit: str) -> None:
        """Overwrite each tensor, which must be contiguous, with that of the group's first rank."""
        if self.size == 1:
            return
        self.agree("broadcast", unit, *tensors)
        options = _broadcast_from(0)
        for tensor in map(_own_alias, map(_bytes_of, tensors)):
            self.wait(self._started(self.group.broadcast([tensor], options), tensor))

    def scatter_from_first(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], unit: str
    ) -> None:
        """Fill ``output`` on each rank with the first rank's input for it, one per rank."""
        self.agree("scatter from the first rank", unit, output)
        options = dist.ScatterOptions()
        options.rootRank = 0
        sent = list(map(_own_alias, inputs)) if self.rank == 0 else []
        output = _own_alias(output)
        inputs_of_first = [sent] if self.rank == 0 else []
        self.wait(
            self._started(self.group.scatter([output], inputs_of_first, options), output, *sent)
        )

    def gather_objects(self, value: Any, unit: str) -> list[Any]:
        """Every rank's ``value``. For small facts: they are pickled."""
        if self.size == 1:
            return [value]
        self.agree("gather facts", unit)
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def broadcast_object(self, value: Any, unit: str) -> Any:
        """The first rank's ``value``. For small facts: it is pickled."""
        if self.size == 1:
            return value
        self.agree("broadcast facts", unit)
        held = [value]
        dist.broadcast_object_list(held, dist.get_global_rank(self.group, 0), group=self.group)
        return held[0]


def _broadcast_from(rank: int) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = rank
    return options


def _nothing() -> None:
    """There is nobody to wait for."""


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or the real and imaginary parts of a complex one: backends sum real numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _nbytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of ``tensor``, in which backends see no dtypes that they do not know.

    Like the alias below, it is a tensor that nothing else holds.
    """
    return tensor.view(-1).view(torch.uint8)


def _own_alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, as real numbers, in a tensor that nothing else holds."""
    return as_real(tensor).detach()


#: Process groups with operations that may never complete. To destroy one is to wait for them, so
#: that the garbage collector would hang; they are kept for as long as the process lives.
_stuck: list[Any] = []

# Weak: the last unit that uses a process group lets it go, and with it the backend's threads.
_groups: weakref.WeakValueDictionary[int, Group] = weakref.WeakValueDictionary()


def group_for(group: Any) -> Group:
    """The :class:`Group` of a process group; all units that use it share one."""
    known = _groups.get(id(group))
    if known is None or known.group is not group:
        known = _groups[id(group)] = Group(group)
    return known


def _default_group() -> Group:
    return group_for(dist.group.WORLD)


def _backend_name(group: Any) -> str:
    if not isinstance(group, dist.ProcessGroup):
        return ""
    name: str = dist.get_backend(group)
    return name
