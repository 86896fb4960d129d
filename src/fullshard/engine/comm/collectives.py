"""The collectives of a step: all-gather, reduce-scatter, all-reduce, all-to-all.

The ranks of a group first agree on every operation (see ``order_check.py``), then issue it. This
code works with every backend; ``gloo.py`` has implementations that are faster over gloo.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from ..encoding.encodings import Encoding
from . import failures
from .agreements import NoAgreement, agreement_for
from .backends import backend_of, is_gloo
from .between_steps import BetweenSteps
from .disagreement import RankLostError, RanksDisagreeError
from .encoded_exchange import EncodedParts
from .messages import as_real, bytes_of, own_alias
from .order_check import Agreement
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


class Group(BetweenSteps):
    """A process group, and the engine's collectives over it.

    The process group may be an object with ``rank()`` and ``size()`` only, up to the first
    collective.
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
        #: The order of operations that ranks expect; None if it is not checked.
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
            self._check_order(asked, begins_pass=False)

    def begin_pass(self, kind: str, unit: str) -> None:
        """Return when all ranks are known to begin this kind of pass."""
        if self._order is not None:
            self._check_order((kind, unit, 0), begins_pass=True)

    def _check_order(self, asked: tuple[str, str, int], begins_pass: bool) -> None:
        if self.refuse is not None:
            self.refuse(*asked[:2])
        try:
            self._agreement.check(asked, begins_pass)
        except BaseException as error:
            self._give_up(error)
            raise

    def _give_up(self, error: BaseException) -> None:
        stuck.append(self.group)
        if self.runs_ahead and isinstance(error, RanksDisagreeError | RankLostError):
            # The device waits for something that will not come: the process could not end.
            abort(self.group)

    def _explain(self, error: RuntimeError) -> NoReturn:
        """Raise an error that says why the backend fails: most likely a rank is gone."""
        try:
            self._agreement.explain(error)
        except RuntimeError as explained:
            self._give_up(explained)
            raise

    def note_capturing(self, active: bool) -> None:
        """Note whether collectives are captured in a graph from now on, or carried out.

        Ranks agree on captured collectives as on others, but not on replays, in which no Python
        runs.
        """
        self._agreement.note_capturing(active)
        # Not asked for: who has not reduced over two levels yet has none.
        levels: TwoLevels | None = vars(self).get("_levels")
        if levels is not None:
            levels.inside.note_capturing(active)
            levels.across.note_capturing(active)

    def bookmark(self) -> Any:
        """The place of this rank among the group's operations, to :meth:`return_to` it."""
        return None if self._order is None else self._order.bookmark()

    def return_to(self, bookmark: Any) -> None:
        """Go back to a bookmark: what ranks agreed on since was not done. All ranks call this."""
        if self._order is not None:
            self._order.return_to(bookmark)

    def wait(self, *pending: Any) -> None:
        """Wait for started operations (on an accelerator, the current stream waits)."""
        try:
            for work in pending:
                work.wait()
        except dist.DistError as error:
            self._explain(error)
        except BaseException:
            stuck.append(self.group)
            raise

    def pending(self, work: Any, *tensors: torch.Tensor) -> Any:
        """The object to wait for after starting ``work``, an operation on ``tensors``."""
        if self._order is not None:
            # Not when it is waited for: the device may come to wait for what was started later.
            self._agreement.issue(work)
        return work

    def gather(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], unit: str
    ) -> list[Any]:
        """Start filling each output with all ranks' inputs, in one launch."""
        self.agree("gather", unit, *outputs)
        # Like ``as_real``, but with one call for all tensors instead of one for each.
        received = [torch.view_as_real(t) if t.is_complex() else t for t in outputs]
        sent = [torch.view_as_real(t) if t.is_complex() else t for t in inputs]
        try:
            if len(received) == 1:
                return [self.pending(self._all_gather(received[0], sent[0]))]
            if _NEW_NAMES:
                return [self.pending(self.group.all_gather_single_coalesced(received, sent))]
            return [self.pending(self.group.allgather_into_tensor_coalesced(received, sent))]
        except dist.DistError as error:
            self._explain(error)

    def _all_gather(self, output: torch.Tensor, piece: torch.Tensor) -> Any:
        if _NEW_NAMES:
            return self.group.all_gather_single(output, piece)
        return self.group._allgather_base(output, piece)

    def reduce_scatter(self, output: torch.Tensor, full: torch.Tensor, unit: str) -> None:
        """Sum ``full`` over the ranks and leave this rank's slice in ``output``.

        ``full`` is scratch afterwards.
        """
        self.start_reduce_scatter(output, full, unit)()

    def start_reduce_scatter(
        self, output: torch.Tensor, full: torch.Tensor, unit: str, mean: bool = False
    ) -> Callable[[], None]:
        """Begin to reduce; the result is in ``output`` once the returned function was called.

        Only a group that ``averages`` can compute a ``mean``.
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
        return functools.partial(self.wait, self.pending(work))

    def start_encoded_reduce(
        self,
        output: torch.Tensor,
        full: torch.Tensor,
        present: torch.Tensor,
        encoding: Encoding,
        unit: str,
    ) -> Callable[[], torch.Tensor]:
        """Begin to sum ``full``, whose parts ranks send each other encoded.

        Once the returned function was called, ``output`` contains the sum of this rank's part, in
        its own dtype. The function returns, for each byte of ``present``, whether any rank set it.
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
        """The groups of ranks within and across hosts, if several hosts have several ranks each."""
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
        """Sum ``tensor`` over the ranks, in place, or replace it by their ``mean``."""
        self.start_all_reduce(tensor, unit, verb, mean)()

    def start_all_reduce(
        self, tensor: torch.Tensor, unit: str, verb: str = "all-reduce", mean: bool = False
    ) -> Callable[[], None]:
        """Begin to sum ``tensor``, which is complete once the returned function was called."""
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

    def start_exchange(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: Sequence[int],
        sent_sizes: Sequence[int],
        unit: str,
    ) -> Callable[[], None]:
        """Begin an all-to-all of flat tensors, complete once the returned function was called.

        The sizes are numbers of elements, one per rank; they may differ between ranks.
        """
        if self.size == 1:
            return functools.partial(received.copy_, sent)  # type: ignore[return-value]
        self.agree("exchange", unit)
        size = sent.element_size()
        # As bytes, since backends do not support all dtypes.
        received, sent = bytes_of(received), bytes_of(sent)
        sizes = [size * each for each in received_sizes], [size * each for each in sent_sizes]
        try:
            work = self.group.alltoall_base(received, sent, *sizes)
        except dist.DistError as error:
            self._explain(error)
        return functools.partial(self.wait, self.pending(work, received, sent))

    def wait_for_other(self, work: Any) -> None:
        """Wait for a collective of the same ranks that something else started."""
        self._agreement.wait(work)

    def instead(self, verb: str, unit: str) -> contextlib.AbstractContextManager[None]:
        """In this context the other ranks are told that this rank does ``verb`` instead."""
        return self._agreement.instead(verb, unit)


@contextlib.contextmanager
def explaining_failures(groups: Sequence[Group]) -> Iterator[None]:
    """Raise which rank is gone when a backend fails in between, on any process group."""
    try:
        yield
    except RuntimeError as error:
        agreements = [a for a in (g._agreement for g in groups) if isinstance(a, Agreement)]
        found = failures.explanation(agreements, error) if failures.is_of_backend(error) else None
        if found is None:
            raise
        raise found from None


def _nothing() -> None:
    """Do nothing: a single rank waits for nobody."""


#: Process groups with operations that may never complete. Destroying one waits for them, so the
#: garbage collector would hang; these groups are kept for as long as the process lives.
stuck: list[Any] = []

# Weak: a process group, and its backend's threads, are released with the last unit that uses it.
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
