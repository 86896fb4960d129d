"""Ranks that have run out of data take part in the steps of the others (torch's ``Join``).

Note: instructions
    A rank without data has no forward of its own from which it could know what comes next, and the
    steps of the others may vary. So the first rank that still has data leaves an instruction in the
    group's store before each operation: which unit is all-gathered or reduced, that gradients are
    clipped, that an optimizer steps. Ranks without data do the same, without gradients of their
    own. A step ends where ``Join`` counts the ranks that have data: at the beginning of a forward
    and at the end of the context. ``Join`` counts in a process group of ours, which announces the
    count. As long as all ranks have data, there are no instructions.

Note: ranks that leave by an exception
    ``Join`` does not tell other ranks when an exception ends its context on one rank. That rank
    leaves a mark in the store; ranks that wait for it, for an instruction or in a collective, look
    for the mark.
"""

from __future__ import annotations

import contextlib
import io
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from ..comm.agreements import agreement_for
from ..comm.collectives import Group
from ..comm.order_check import LAST_RESORT, PATIENCE, Agreement, RanksDisagreeError
from .gradient_marks import GradientMarks, Since

if TYPE_CHECKING:
    from ..runtime.unit import Unit

#: The kind of pass in which ranks tell each other who still has data.
_JOIN = "join"
#: What they do before each pass.
_COUNT = f"{_JOIN}: count ranks with data"
#: The operations that ranks with data may use while others have none, and that those follow.
_FOLLOWED = (
    *("forward", "evaluation", "run", "gather", "reduce", "all-reduce", "communication hook"),
    *("vote on absent gradients", "clip", "norm", _JOIN, "gather facts"),
    *("optimizer step", "exchange"),
)
#: Seconds between two looks at the store, at first and at most.
_SHORTEST, _LONGEST = 1e-4, 2e-2

_rounds: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


class Word(NamedTuple):
    """An instruction to a rank without data: what to do, to which unit, with which details."""

    verb: str
    unit: int | None = None
    detail: Any = None


class _Channel:
    """A rank's instructions to ranks without data, through the store of their process group."""

    def __init__(self, group: Any) -> None:
        _, store = dist.distributed_c10d._world.pg_map.get(group, (None, None))
        if store is None:
            raise RuntimeError(
                "Join needs a process group made by torch.distributed, since ranks with data "
                f"instruct those without through its store; got {group!r}"
            )
        self._store = store
        self._agreement = agreement_for(group)
        _rounds[group] = _rounds.get(group, 0) + 1
        self._prefix = f"fullshard/join/{_rounds[group]}"
        self._left_key = f"{self._prefix}/left"
        self._rank = group.rank()
        self._step = 0
        self._number = 0
        self._said: list[str] = []

    def begin_step(self) -> None:
        """Begin anew: all ranks have met, so earlier instructions have been read."""
        for key in self._said:
            self._store.delete_key(key)
        self._said = []
        self._step += 1
        self._number = 0

    def say(self, word: Word) -> None:
        key = self._next_key()
        packed = io.BytesIO()
        torch.save(tuple(word), packed)
        self._store.set(key, packed.getvalue())  # type: ignore[arg-type]
        self._said.append(key)

    def hear(self) -> Word:
        """The next instruction; while waiting, looks for lost ranks, as in a collective."""
        key, pause = self._next_key(), _SHORTEST
        begun = time.monotonic()
        while not self._store.check([key]):
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
            waited = time.monotonic() - begun
            if waited > PATIENCE:
                self.check_nobody_left()
            if isinstance(self._agreement, Agreement):
                self._agreement.look_around(waited)
            elif waited > LAST_RESORT:
                raise RuntimeError(f"Waited {waited:.0f} s for ranks that still have data")
        if isinstance(self._agreement, Agreement):
            # So that this rank posts what it does when it waits again.
            self._agreement.close()
        packed = io.BytesIO(self._store.get(key))
        # Tensors and plain values only, so that others who reach the store cannot run code here.
        with torch.serialization.safe_globals([Since]):
            return Word(*torch.load(packed, weights_only=True))

    def leave(self) -> None:
        """Leave a mark: this rank is out of the context, by an exception."""
        self._store.compare_set(self._left_key, "", str(self._rank))

    def check_nobody_left(self) -> None:
        """Raise (RanksDisagreeError) if another rank has left such a mark."""
        if self._store.check([self._left_key]):
            rank = self._store.get(self._left_key).decode()
            if rank != str(self._rank):
                raise RanksDisagreeError(
                    f"Rank {rank} has left Join by an exception, and rank {self._rank} waits for "
                    "it: look at its log"
                )

    def _next_key(self) -> str:
        self._number += 1
        return f"{self._prefix}/{self._step}/{self._number}"


class CountingGroup(dist.ProcessGroup):
    """The process group in which ``Join`` counts; ``group`` is announced the count before.

    Errors are kept, and ``Join`` is told that some rank still has data: raised inside
    ``torch.distributed``, an error would be replaced by one about a group that it does not know.
    """

    def __init__(self, group: Group, before: Callable[[torch.Tensor], None]) -> None:
        super().__init__(group.rank, group.size)  # type: ignore[call-arg]
        self._group = group
        self._before = before
        self._error: Exception | None = None
        ranks = dist.distributed_c10d._world.pg_group_ranks
        ranks[self] = ranks[group.group]

    def allreduce(  # type: ignore[override]
        self, tensors: list[torch.Tensor], options: Any = None
    ) -> _Done:
        try:
            if self._error is None:
                self._count(tensors, options or dist.AllreduceOptions())
        except Exception as error:
            self._error = error
            tensors[0].fill_(1)
        return _Done()

    def _count(self, tensors: list[torch.Tensor], options: Any) -> None:
        self._before(tensors[0])
        # Otherwise NCCL returns no work to wait for.
        options.asyncOp = True
        # Here, as one waits for other collectives: Join itself would not look at the others.
        self._group.wait(self._group.pending(self._group.group.allreduce(tensors, options)))

    def raise_error(self) -> None:
        """Raise what went wrong."""
        if self._error is not None:
            raise self._error

    def forget(self) -> None:
        """Unregister the group from torch."""
        dist.distributed_c10d._world.pg_group_ranks.pop(self, None)


class _Done:
    """A work that has completed."""

    def wait(self) -> bool:
        """Return at once."""
        return True


class Joining:
    """One rank in a ``Join``: sends instructions to ranks without data, or follows them."""

    def __init__(
        self,
        group: Group,
        units: Sequence[Unit],
        notify: Callable[[], Any],
        terminated: Callable[[], None],
        by_active: bool,
        optimized: Sequence[Sequence[torch.Tensor]],
        why_no_backward: str | None,
    ) -> None:
        self.group = group
        self._refuse_other_contexts(units[0].name)
        self.counting_group = CountingGroup(group, self._count)
        self._units = list(units)
        self._index = {unit: index for index, unit in enumerate(units)}
        self._notify = notify
        self._terminated = terminated
        self._notifies = False
        self._by_active = by_active
        self._why_no_backward = why_no_backward
        self._channel = _Channel(group.group)
        self._tells = False
        #: Whether some ranks are known to have no data.
        self._some_follow = False
        self._has_ended = False
        self._counted: torch.Tensor | None = None
        self._marks = GradientMarks(optimized)
        groups = {group, *(unit.shards for unit in units)}
        self._groups = groups | {unit.copies for unit in units if unit.copies is not None}
        #: The optimizers, by their number, that have stepped since the last backward.
        self.stepped: set[int] = set()

    # -- a rank with data ---------------------------------------------------------------------

    def begin_pass(self) -> None:
        """A forward begins: say that this rank has data, and learn whether others have none."""
        self._refuse_other_contexts(self._units[0].name)
        self._notifies, self._counted = True, None
        try:
            work = self._notify()
        except BaseException:
            # Another rank has run out of data, and the user wants an exception on all ranks.
            self._terminated()
            raise
        finally:
            self._notifies = False
        if work is None:
            return
        self.counting_group.raise_error()
        assert self._counted is not None
        if int(self._counted.item()) < self.group.size:
            self._meet(has_data=True)
        else:
            self._refuse_others(False)

    def tell(self, verb: str, unit: Unit | None = None, detail: Any = None) -> None:
        """Leave an instruction about this rank's next operation, if it leads and others follow."""
        if self._tells:
            self._channel.say(Word(verb, None if unit is None else self._index[unit], detail))
        if verb == "finish":
            self.stepped.clear()

    def begin_backward(self) -> None:
        """Say what became of the gradients of the last backward: others do the same to theirs.

        Before the engine takes over those that were kept from ``no_sync``.
        """
        if self._why_no_backward is not None:
            raise RuntimeError(self._why_no_backward)
        if self._tells:
            self.tell("gradients", detail=self.became_of_gradients())

    def became_of_gradients(self) -> dict[int, Since]:
        """The changes to every optimizer's gradients since the last backward, by its number."""
        return {number: self._marks.since(number) for number in self._marks.optimizers}

    def since_backward(self, number: int) -> Since | None:
        """The changes to an optimizer's gradients, if some rank follows."""
        return self._marks.since(number) if self._some_follow else None

    def tell_of_step(self, number: int, options: Any, since: Since | None) -> None:
        """Say that an optimizer has stepped, and ``since`` a backward with what gradients."""
        if since in (Since.CHANGED, Since.ZEROED):
            self._say_refused(
                "Gradients were changed between backward and the optimizer's step, inside Join, "
                "while some ranks have run out of data: they have gradients of their own, and "
                "follow model.clip_grad_norm_ only. Clip with that, not with "
                "torch.nn.utils.clip_grad_norm_; scale the loss instead of gradients; or pass "
                "throw_on_early_termination=True"
            )
        self.tell("step", detail=(number, options, since is Since.REMOVED))
        self._marks.note()

    def note_gradients(self) -> None:
        """Note that gradients now are as a backward, or an announced change, has left them."""
        self._marks.note()

    def _count(self, tensor: torch.Tensor) -> None:
        """``Join`` is about to count: whatever was going on is over."""
        if self._has_ended:
            raise RuntimeError(
                "This Join has ended: its model was given to another one in the meantime. Contexts "
                "of one model cannot be nested"
            )
        self._look_out_for_leavers(True)
        if self._counted is None:
            # If all ranks are to raise an exception, the next collective is no count.
            self._counted = tensor
        self.tell("end")
        self._tells = self._some_follow = False
        self.group.agree(_COUNT, self._units[0].name, tensor)
        if not self._notifies and tensor.item() == 1:
            # Not a count: this rank has run out of data, and an exception tells the others.
            self._terminated()

    # -- all ranks ----------------------------------------------------------------------------

    def _meet(self, has_data: bool) -> None:
        """Find out who still has data, and who leads."""
        self.group.begin_pass(_JOIN, self._units[0].name)
        have_data: list[bool] = self.group.gather_objects(has_data, self._units[0].name)
        self._channel.begin_step()
        self._tells = have_data.index(True) == self.group.rank
        self._some_follow = has_data
        self._refuse_others(has_data)
        rescale = self.group.size / sum(have_data) if self._by_active else 1.0
        for unit in self._units:
            unit.reduction.set_rescale(rescale)

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's ``value``, at the end, when no rank has data any more."""
        self._refuse_others(False)
        self.group.begin_pass(_JOIN, self._units[0].name)
        found = self.group.gather_objects(value, self._units[0].name)
        self._channel.begin_step()
        return found

    def leave(self) -> None:
        """The context has ended."""
        self._has_ended = True
        self._tells = self._some_follow = False
        self._refuse_others(False)
        self._look_out_for_leavers(False)
        self.counting_group.forget()
        for unit in self._units:
            unit.reduction.set_rescale(1.0)

    def leave_by_exception(self) -> None:
        """The context has ended on this rank, and maybe on no other: let the others know."""
        # The process may be about to end, and the store be gone.
        with contextlib.suppress(RuntimeError):
            self._channel.leave()
        self.leave()

    def _look_out_for_leavers(self, on: bool) -> None:
        for group in self._groups:
            agreement = agreement_for(group.group)
            if isinstance(agreement, Agreement):
                agreement.check_also(self._channel.check_nobody_left if on else None)

    # -- a rank without data ------------------------------------------------------------------

    def hear_step(self, obey: Callable[[Word, Unit | None], None]) -> None:
        """Follow the other ranks to the end of a step."""
        self.counting_group.raise_error()
        self._meet(has_data=False)
        while (word := self._channel.hear()).verb != "end":
            if word.verb == "refused":
                raise RuntimeError(word.detail)
            obey(word, None if word.unit is None else self._units[word.unit])

    # -- what cannot be followed --------------------------------------------------------------

    def _refuse_others(self, on: bool) -> None:
        for group in self._groups:
            group.refuse_operations(self._refuse if on else None)

    def _refuse(self, verb: str, unit: str) -> None:
        if verb.startswith(_FOLLOWED):
            return
        self._say_refused(
            f"{verb!r} of {unit!r} inside Join, while some ranks have run out of data: they "
            "follow forward, backward, clip_grad_norm_ and the steps of the optimizers given to "
            "Join. Do it outside the context, or pass throw_on_early_termination=True"
        )

    def _say_refused(self, message: str) -> NoReturn:
        self.tell("refused", detail=message)
        # All ranks raise, and none of them is in the context any more.
        self._terminated()
        raise RuntimeError(message)

    def _refuse_other_contexts(self, unit: str) -> None:
        """Let this model refuse operations, while ranks follow another model in its ``Join``."""
        refuse = self.group.refuse
        if refuse is not None and refuse != self._refuse:
            refuse("pass of another model", unit)
