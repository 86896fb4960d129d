"""The engine's collectives: all-gather, reduce-scatter, all-reduce, broadcast and others.

The ranks of a group first agree on every operation (see ``order_check.py``), then issue it. What is
here fits every backend; ``gloo.py`` has the ways that are faster over gloo.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from ..encoding.encodings import Encoding
from .agreements import NoAgreement, agreement_for
from .backends import backend_of, is_gloo
from .disagreement import RankLostError, RanksDisagreeError
from .encoded_exchange import EncodedParts
from .watcher import abort

if TYPE_CHECKING:
    from .two_levels import TwoLevels

# torch 2.13 renamed the flat collectives; 2.11 has only the old names, and both are methods of
# a process group, so the warnings of the functions in torch.distributed are not in the way.
_NEW_NAMES = hasattr(dist.ProcessGroup, "all_gather_single")


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

    #: Whether, on an accelerator, the device waits for operations while the host goes on.
    runs_ahead = True

    def __init__(self, group: Any, device_type: str | None = None) -> None:
        self.group = group
        self.device_type = device_type
        self.rank: int = group.rank()
        self.size: int = group.size()
        is_real = isinstance(group, dist.ProcessGroup)
        self._agreement = agreement_for(group) if is_real else NoAgreement()
        #: What all ranks expect; None where nobody checks it.
        self._order = self._agreement.order
        #: Whether the ranks agree on every operation before it starts.
        self.checks_order = self._order is not None
        #: Whether the backend itself makes means of sums, which saves a kernel for each.
        self.averages = device_type is not None and "nccl" in backend_of(group, device_type)
        self.refuse: Callable[[str, str], None] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self

    def __reduce__(self) -> Any:
        if not dist.is_initialized() or self.group is not dist.group.WORLD:
            raise TypeError(
                "A unit can be pickled when it uses the default process group; this one uses a "
                "group of its own, which another process would not know"
            )
        return _default_group, (self.device_type,)

    def on(self, device: torch.device) -> Group:
        """The same ranks' group, for tensors of ``device``."""
        return group_for(self.group, device)

    def refuse_operations(self, refuse: Callable[[str, str], None] | None) -> None:
        """Call ``refuse`` with the verb and unit of each operation before it starts (``Join``).

        It raises for an operation that ranks without data could not follow. None ends this.
        """
        self.refuse = refuse

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
        except BaseException as error:
            self._give_up(error)
            raise

    def _give_up(self, error: BaseException) -> None:
        stuck.append(self.group)
        if self.runs_ahead and isinstance(error, RanksDisagreeError | RankLostError):
            # What the device waits for will not come: the process could not even end.
            abort(self.group)

    def _explain(self, error: RuntimeError) -> NoReturn:
        """Raise why the backend refuses to start anything: most likely a rank is gone."""
        try:
            self._agreement.explain(error)
        except RuntimeError as explained:
            self._give_up(explained)
            raise

    def note_capturing(self, active: bool) -> None:
        """Note that collectives are captured in a graph from now on, or carried out again.

        Ranks agree on it as always, and not on replays: no Python runs then.
        """
        self._agreement.note_capturing(active)

    def wait(self, *pending: Any) -> None:
        """Wait for what was started (on an accelerator: order the current stream)."""
        try:
            for work in pending:
                if self._order is not None:
                    self._agreement.issue(work)
                work.wait()
        except dist.DistError as error:
            self._explain(error)
        except BaseException:
            stuck.append(self.group)
            raise

    def pending(self, work: Any, *tensors: torch.Tensor) -> Any:
        """The object to wait for, of an operation on ``tensors``."""
        return work

    def gather(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], unit: str
    ) -> list[Any]:
        """Start filling each output with all ranks' inputs, in one launch."""
        self.agree("gather", unit, *outputs)
        received, sent = list(map(as_real, outputs)), list(map(as_real, inputs))
        try:
            if len(received) == 1:
                return [self._all_gather(received[0], sent[0])]
            if _NEW_NAMES:
                return [self.group.all_gather_single_coalesced(received, sent)]
            return [self.group.allgather_into_tensor_coalesced(received, sent)]
        except dist.DistError as error:
            self._explain(error)

    def _all_gather(self, output: torch.Tensor, piece: torch.Tensor) -> Any:
        if _NEW_NAMES:
            return self.group.all_gather_single(output, piece)
        return self.group._allgather_base(output, piece)

    def gather_to_first(
        self, outputs: Sequence[torch.Tensor], piece: torch.Tensor, unit: str
    ) -> None:
        """Fill ``outputs`` on the group's first rank, one per rank, with all ranks' pieces."""
        self.agree("gather to the first rank", unit, piece)
        options = dist.GatherOptions()
        options.rootRank = 0
        received = list(map(own_alias, outputs)) if self.rank == 0 else []
        piece = own_alias(piece)
        outputs_of_first = [received] if self.rank == 0 else []
        # Not kept in a variable: nothing but what is waited for may hold the work.
        self.wait(
            self.pending(self.group.gather(outputs_of_first, [piece], options), piece, *received)
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
        """
        if self.size == 1:
            return functools.partial(output.copy_, full)  # type: ignore[return-value]
        self.agree("reduce", unit, full)
        if full.dim() != 1 or full.is_complex():
            output, full = as_real(output).view(-1), as_real(full).view(-1)
        options = (_MEAN_SCATTER,) if mean else ()
        try:
            if _NEW_NAMES:
                work = self.group.reduce_scatter_single(output, full, *options)
            else:
                work = self.group._reduce_scatter_base(output, full, *options)
        except dist.DistError as error:
            self._explain(error)
        return functools.partial(self.wait, work)

    def start_encoded_reduce(
        self,
        output: torch.Tensor,
        full: torch.Tensor,
        present: torch.Tensor,
        encoding: Encoding,
        unit: str,
    ) -> Callable[[], torch.Tensor]:
        """Begin to sum ``full``, of which ranks send each other their parts encoded.

        The sum of this rank's part is in ``output``, in its dtype, when what is returned has been
        called. That returns, for each byte of ``present``, whether it is set on any rank.
        """
        self.agree("reduce", unit, full)
        if self._levels is not None:
            return self._levels.start_encoded_reduce(output, full, present, encoding, unit)
        rows = full.view(self.size, -1)
        parts = EncodedParts(encoding, rows.shape[1], present)
        sent, received = parts.empty(self.size - 1), parts.empty(self.size - 1)
        parts.encode(rows[: self.rank], sent[: self.rank])
        parts.encode(rows[self.rank + 1 :], sent[self.rank :])
        # As tensors that nothing else holds.
        messages = [received.view(-1), sent.view(-1)]
        sizes = [parts.width] * self.size
        sizes[self.rank] = 0
        try:
            work = self.group.alltoall_base(*messages, sizes, sizes)
        except dist.DistError as error:
            self._explain(error)
        work = self.pending(work, *messages)
        return functools.partial(self._add_parts, work, parts, received, rows, output, present)

    @functools.cached_property
    def _levels(self) -> TwoLevels | None:
        """Where several hosts have several ranks each, the ranks of hosts and those across them."""
        from .two_levels import TwoLevels  # of Groups

        return TwoLevels.of(self.group, torch.device(self.device_type or "cpu"))

    def _add_parts(
        self,
        work: Any,
        parts: EncodedParts,
        received: torch.Tensor,
        rows: torch.Tensor,
        output: torch.Tensor,
        present: torch.Tensor,
    ) -> torch.Tensor:
        self.wait(work)
        return parts.add(received, rows[self.rank], output, present)

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
        tensor = own_alias(tensor)
        try:
            work = self.group.allreduce([tensor], *((_MEAN,) if mean else ()))
        except dist.DistError as error:
            self._explain(error)
        return functools.partial(self.wait, self.pending(work, tensor))

    def all_reduce_max(self, tensor: torch.Tensor, unit: str, verb: str = "maximum") -> None:
        """Replace ``tensor`` by its largest value over the ranks, in place."""
        if self.size == 1:
            return
        self.agree(verb, unit, tensor)
        tensor = own_alias(tensor)
        self.wait(self.pending(self.group.allreduce([tensor], _MAXIMUM), tensor))

    def broadcast(self, tensors: Sequence[torch.Tensor], unit: str) -> None:
        """Overwrite each tensor, which must be contiguous, with that of the group's first rank."""
        if self.size == 1:
            return
        self.agree("broadcast", unit, *tensors)
        options = broadcast_from(0)
        for tensor in map(bytes_of, tensors):
            self.wait(self.pending(self.group.broadcast([tensor], options), tensor))

    def broadcast_by(self, owner: int, tensor: torch.Tensor, unit: str) -> None:
        """Overwrite ``tensor``, which must be contiguous, with that of rank ``owner``."""
        if self.size == 1:
            return
        self.agree(f"broadcast from rank {owner}", unit, tensor)
        tensor = bytes_of(tensor)
        self.wait(self.pending(self.group.broadcast([tensor], broadcast_from(owner)), tensor))

    def start_exchange(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: Sequence[int],
        sent_sizes: Sequence[int],
        unit: str,
    ) -> Callable[[], None]:
        """Begin an all-to-all of flat tensors; it is complete when what is returned was called.

        The sizes are numbers of elements, one per rank; they may differ between ranks.
        """
        if self.size == 1:
            return functools.partial(received.copy_, sent)  # type: ignore[return-value]
        self.agree("exchange", unit)
        size = sent.element_size()
        # As bytes: backends know all dtypes so.
        received, sent = bytes_of(received), bytes_of(sent)
        sizes = [size * each for each in received_sizes], [size * each for each in sent_sizes]
        try:
            work = self.group.alltoall_base(received, sent, *sizes)
        except dist.DistError as error:
            self._explain(error)
        return functools.partial(self.wait, self.pending(work, received, sent))

    def scatter_from_first(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], unit: str
    ) -> None:
        """Fill ``output`` on each rank with the first rank's input for it, one per rank."""
        self.agree("scatter from the first rank", unit, output)
        options = dist.ScatterOptions()
        options.rootRank = 0
        sent = list(map(own_alias, inputs)) if self.rank == 0 else []
        output = own_alias(output)
        inputs_of_first = [sent] if self.rank == 0 else []
        self.wait(
            self.pending(self.group.scatter([output], inputs_of_first, options), output, *sent)
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


def broadcast_from(rank: int) -> Any:
    """Options of a broadcast by a group's ``rank``."""
    options = dist.BroadcastOptions()
    options.rootRank = rank
    return options


def _nothing() -> None:
    """There is nobody to wait for."""


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or the real and imaginary parts of a complex one: backends sum real numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of ``tensor``, in which backends see no dtypes that they do not know.

    Like the alias below, it is a tensor that nothing else holds.
    """
    return tensor.view(-1).view(torch.uint8)


def own_alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, as real numbers, in a tensor that nothing else holds."""
    return as_real(tensor).detach()


#: Process groups with operations that may never complete. To destroy one is to wait for them, so
#: that the garbage collector would hang; they are kept for as long as the process lives.
stuck: list[Any] = []

# Weak: the last unit that uses a process group lets it go, and with it the backend's threads.
_groups: weakref.WeakValueDictionary[tuple[int, str | None], Group] = weakref.WeakValueDictionary()


def group_for(group: Any, device: torch.device | None = None) -> Group:
    """The :class:`Group` for collectives of a process group on tensors of ``device``.

    All units on devices of a type share one. Without a device, it fits tensors of any.
    """
    return _group_for(group, None if device is None else device.type)


def _group_for(group: Any, device_type: str | None) -> Group:
    known = _groups.get((id(group), device_type))
    if known is None or known.group is not group:
        from .gloo import GlooGroup  # which is a Group

        kind = GlooGroup if is_gloo(group, device_type) else Group
        known = _groups[id(group), device_type] = kind(group, device_type)
    return known


def _default_group(device_type: str | None) -> Group:
    return _group_for(dist.group.WORLD, device_type)
