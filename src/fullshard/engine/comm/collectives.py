"""The only file that calls c10d: gather, reduce, all-reduce and broadcast, per backend.

Every operation is first agreed on by the ranks of its group (see ``order_check.py``), then issued
in the cheapest way the group's backend offers.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .order_check import NoAgreement, agreement_for
from .pending_work import PendingWork, leave_time_at_exit

# torch 2.13 renamed the flat collectives; 2.11 has only the old names, and both are methods of
# a process group, so the warnings of the functions in torch.distributed are not in the way.
_NEW_NAMES = hasattr(dist.ProcessGroup, "all_gather_single")


#: Up to how many bytes copies cost less than another launch, or than gloo's rounds of messages.
_SMALL = 256 * 1024
#: Up to how many ranks gloo's broadcasts beat its gather.
_BROADCASTING_RANKS = 8


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
        is_real = isinstance(group, dist.ProcessGroup)
        self._agreement = agreement_for(group) if is_real else NoAgreement()
        #: What all ranks expect; None where nobody checks it.
        self._order = self._agreement.order
        name = _backend_name(group)
        self._gloo = "gloo" in name
        #: Whether, on an accelerator, the device waits for operations while the host goes on.
        self.runs_ahead = not self._gloo
        #: Whether the backend itself makes means of sums, which saves a kernel for each.
        self.averages = "nccl" in name and not self._gloo
        self._from_each = [_broadcast_from(rank) for rank in range(self.size)] if self._gloo else []
        if self._gloo:
            leave_time_at_exit()
        #: Raises for what other ranks could not follow: see ``joining.py``.
        self.refuse: Callable[[str, str], None] | None = None

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
        order = self._order
        if order is None:
            return
        asked = (verb, unit, sum([tensor.numel() for tensor in tensors]))
        expected = order.position.following
        if expected.operation == asked and self.refuse is None:
            order.position = expected
        else:
            self._settle(asked, begins_pass=False)

    def begin_pass(self, kind: str, unit: str) -> None:
        """Return when all ranks are known to begin this kind of pass."""
        if self._order is not None:
            self._settle((kind, unit, 0), begins_pass=True)

    def _settle(self, asked: tuple[str, str, int], begins_pass: bool) -> None:
        if self.refuse is not None:
            self.refuse(*asked[:2])
        try:
            self._agreement.settle(asked, begins_pass)
        except BaseException:
            _stuck.append(self.group)
            raise

    def wait(self, *operations: PendingWork) -> None:
        """Wait for what was started (on an accelerator: order the current stream)."""
        try:
            for operation in operations:
                if self._gloo:
                    self._agreement.wait(operation.work)
                    operation.finish()
                else:
                    if self._order is not None:
                        self._agreement.issued = operation.work
                    operation.work.wait()
        except BaseException:
            _stuck.append(self.group)
            raise

    def _started(self, work: Any, *tensors: torch.Tensor) -> PendingWork:
        return PendingWork(work, tensors if self._gloo else ())

    def gather(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], unit: str
    ) -> list[PendingWork]:
        """Start filling each output with all ranks' inputs, in one launch.

        Over gloo not by its coalesced gather: several of these at a time corrupt the heap (torch
        2.13), and on another device a single one ends the process.
        """
        self.agree("gather", unit, *outputs)
        if self._gloo:
            return self._gather_over_gloo(outputs, inputs)
        if len(outputs) == 1:
            return [PendingWork(self._all_gather(outputs[0], inputs[0]))]
        if _NEW_NAMES:
            work = self.group.all_gather_single_coalesced(list(outputs), list(inputs))
        else:
            work = self.group.allgather_into_tensor_coalesced(list(outputs), list(inputs))
        return [PendingWork(work)]

    def _gather_over_gloo(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> list[PendingWork]:
        """As bytes, and on a host in the fastest of several ways.

        Gloo's own gather passes pieces around in a ring, and fills a buffer of its own first. Two
        ranks that just swap take 0.5 times as long for little, and for 16 MiB no longer than
        broadcasts. More send little to all others at once: 0.7 times as long on 4 ranks, 0.4 on 8.
        For much, that would take copies for all; broadcasts write where they should, in 0.7 to 0.95
        times as long on 4 and on 8.
        """
        on_host = outputs[0].device.type == "cpu"
        little = on_host and sum(output.nbytes for output in outputs) <= _SMALL
        received, sent = list(map(_bytes_of, outputs)), list(map(_bytes_of, inputs))
        if little and len(outputs) > 1:
            return [self._gather_packed(received, sent)]
        if on_host and self.size == 2:
            return list(map(self._swap_pieces, received, sent))
        if little:
            return list(map(self._send_to_all, received, sent))
        if on_host and self.size <= _BROADCASTING_RANKS:
            pairs = zip(received, sent, strict=True)
            return [started for pair in pairs for started in self._broadcast_pieces(*pair)]
        return [
            PendingWork(self._all_gather(output, piece), [output, piece])
            for output, piece in zip(received, sent, strict=True)
        ]

    def _all_gather(self, output: torch.Tensor, piece: torch.Tensor) -> Any:
        if _NEW_NAMES:
            return self.group.all_gather_single(output, piece)
        return self.group._allgather_base(output, piece)

    def _gather_packed(
        self, outputs: Sequence[torch.Tensor], pieces: Sequence[torch.Tensor]
    ) -> PendingWork:
        """Gather tensors as one, in which a rank's pieces lie side by side."""
        sent = torch.cat(list(pieces))
        received = sent.new_empty(self.size * sent.numel())
        parts = received.view(self.size, sent.numel())
        parts = parts.split([piece.numel() for piece in pieces], dim=1)
        places = [output.view(part.shape) for output, part in zip(outputs, parts, strict=True)]
        gather = self._swap_pieces if self.size == 2 else self._send_to_all
        started = gather(_own_alias(received), sent)
        started.then = functools.partial(torch._foreach_copy_, places, parts)
        return started

    def _swap_pieces(self, output: torch.Tensor, piece: torch.Tensor) -> PendingWork:
        """Gather on two ranks."""
        own, other = self._own_and_others(output)
        sizes = [0, 0]
        sizes[1 - self.rank] = piece.numel()
        work = self.group.alltoall_base(other[0], piece, sizes, sizes)
        _fill(own, piece)
        return PendingWork(work, [other[0], piece])

    def _send_to_all(self, output: torch.Tensor, piece: torch.Tensor) -> PendingWork:
        sent = piece.repeat(self.size)
        return PendingWork(self.group.alltoall_base(output, sent, [], []), [output, sent])

    def _broadcast_pieces(self, output: torch.Tensor, piece: torch.Tensor) -> list[PendingWork]:
        own, parts = self._own_and_others(output)
        parts.insert(self.rank, piece)
        broadcasts = [
            PendingWork(self.group.broadcast([part], options), [part])
            for part, options in zip(parts, self._from_each, strict=True)
        ]
        # While they are under way: a rank's own part is sent from where it rests.
        _fill(own, piece)
        return broadcasts

    def _own_and_others(self, output: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The parts of ``output`` that belong to this rank, and to the others."""
        parts = list(output.view(self.size, output.numel() // self.size).unbind())
        return parts.pop(self.rank), parts

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
        return functools.partial(self.wait, PendingWork(work))

    def _exchange_parts(self, full: torch.Tensor) -> tuple[PendingWork, Sequence[torch.Tensor]]:
        """Start sending every rank its part; returns what will be all ranks' parts for this one."""
        received = torch.empty_like(full)
        parts = received.view(self.size, full.numel() // self.size).unbind()
        received = _own_alias(received)
        work = self.group.alltoall_base(received, full, [], [])
        return PendingWork(work, [received, full]), parts

    def _swap_halves(self, full: torch.Tensor) -> tuple[PendingWork, Sequence[torch.Tensor]]:
        """The same for two ranks, without sending its own part to this one: 0.8 x the time."""
        halves = full.view(2, full.numel() // 2).unbind()
        received, sent = torch.empty_like(halves[0]), halves[1 - self.rank]
        sizes = [0, 0]
        sizes[1 - self.rank] = sent.numel()
        work = self.group.alltoall_base(received, sent, sizes, sizes)
        return PendingWork(work, [received, sent]), (halves[self.rank], received)

    def _add_up(
        self, started: PendingWork, parts: Sequence[torch.Tensor], output: torch.Tensor
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
        for tensor in map(_bytes_of, tensors):
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


def _fill(place: torch.Tensor, piece: torch.Tensor) -> None:
    if place.data_ptr() != piece.data_ptr():
        place.copy_(piece)


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
