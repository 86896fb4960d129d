"""Ranks that have run out of data take part in what the others do (torch's ``Join``).

Note: word by word
    A rank without data has no forward of its own to tell it what comes next, and what the others
    do may change from step to step. So it is told. Before each operation the first rank that still
    has data leaves a word in the group's store: which unit is gathered, which is reduced, what
    clips and what steps. Ranks without data do the same, with gradients of which none is there. A
    step ends where ``Join`` counts the ranks that have data, at the beginning of a forward and at
    the end of the context; it counts in a process group of ours, which says so first. As long as
    all ranks have data nobody is told anything.
"""

from __future__ import annotations

import pickle
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from .agreement import LAST_RESORT, Agreement, agreement_for
from .collectives import Group
from .started import Started

if TYPE_CHECKING:
    from .unit import Unit

#: The pass in which ranks tell each other who still has data.
_JOIN = "join"
#: What ranks with data may do while others have none: what those others are told of.
_FOLLOWED = (
    *("forward", "evaluation", "run", "gather", "reduce", "all-reduce", "communication hook"),
    *("vote on absent gradients", "clip", "norm", _JOIN, "gather facts"),
)
#: Seconds between two looks at the store, at first and at most.
_SHORTEST, _LONGEST = 1e-4, 2e-2

_rounds: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


class Word(NamedTuple):
    """What a rank is told to do, to which of the units, and with what."""

    verb: str
    unit: int | None = None
    detail: Any = None


class _Channel:
    """Words of one rank to those that have no data, in the store of their process group."""

    def __init__(self, group: Any) -> None:
        _, store = dist.distributed_c10d._world.pg_map.get(group, (None, None))
        if store is None:
            raise RuntimeError(
                "Join needs a process group made by torch.distributed, by whose store ranks "
                f"without data are told what to do; got {group!r}"
            )
        self._store = store
        self._agreement = agreement_for(group)
        _rounds[group] = _rounds.get(group, 0) + 1
        self._prefix = f"fullshard/join/{_rounds[group]}"
        self._step = 0
        self._number = 0
        self._said: list[str] = []

    def begin_step(self) -> None:
        """All ranks are here: what was said before has been read."""
        for key in self._said:
            self._store.delete_key(key)
        self._said = []
        self._step += 1
        self._number = 0

    def say(self, word: Word) -> None:
        key = self._next_key()
        self._store.set(key, pickle.dumps(tuple(word)))  # type: ignore[arg-type]
        self._said.append(key)

    def hear(self) -> Word:
        """The next word; looks around, and gives up, as those do who wait for a collective."""
        key, pause = self._next_key(), _SHORTEST
        begun = time.monotonic()
        while not self._store.check([key]):
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
            waited = time.monotonic() - begun
            if isinstance(self._agreement, Agreement):
                self._agreement.look_around(waited)
            elif waited > LAST_RESORT:
                raise RuntimeError(f"Waited {waited:.0f} s for ranks that still have data")
        return Word(*pickle.loads(self._store.get(key)))

    def _next_key(self) -> str:
        self._number += 1
        return f"{self._prefix}/{self._step}/{self._number}"


class CountingGroup(dist.ProcessGroup):
    """The process group in which ``Join`` counts: ``group``, which is told of it before."""

    def __init__(self, group: Any, before: Callable[[torch.Tensor], None]) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self._group = group
        self._before = before
        ranks = dist.distributed_c10d._world.pg_group_ranks
        ranks[self] = ranks[group]

    def allreduce(  # type: ignore[override]
        self, tensors: list[torch.Tensor], options: Any = None
    ) -> Any:
        self._before(tensors[0])
        return self._group.allreduce(tensors, options or dist.AllreduceOptions())

    def forget(self) -> None:
        """Let torch know it no longer."""
        dist.distributed_c10d._world.pg_group_ranks.pop(self, None)


class Joining:
    """One rank in a ``Join``: what it is told, or tells the others."""

    def __init__(
        self,
        group: Group,
        units: Sequence[Unit],
        notify: Callable[[], Any],
        terminated: Callable[[], None],
        by_active: bool,
    ) -> None:
        self.group = group
        self.counting_group = CountingGroup(group.group, self._count)
        self._units = list(units)
        self._index = {unit: index for index, unit in enumerate(units)}
        self._notify = notify
        self._terminated = terminated
        self._notifies = False
        self._by_active = by_active
        self._channel = _Channel(group.group)
        self._tells = False
        self._counted: torch.Tensor | None = None
        #: The optimizers, by their number, that have stepped since the last backward.
        self.stepped: set[int] = set()

    # -- a rank with data ---------------------------------------------------------------------

    def begin_pass(self) -> None:
        """A forward begins: say that this rank has data, and learn whether others have none."""
        self._notifies, self._counted = True, None
        try:
            work = self._notify()
        except BaseException:
            # Another rank has run out of data, and all were to be told by an exception.
            self._terminated()
            raise
        finally:
            self._notifies = False
        if work is None:
            return
        self.group.wait(Started(work))
        assert self._counted is not None
        if int(self._counted.item()) < self.group.size:
            self._meet(has_data=True)
        else:
            self._refuse_others(False)

    def tell(self, verb: str, unit: Unit | None = None, detail: Any = None) -> None:
        """Say what this rank is about to do, if there is anybody to be told, and it is its turn."""
        if self._tells:
            self._channel.say(Word(verb, None if unit is None else self._index[unit], detail))
        if verb == "finish":
            self.stepped.clear()

    def tell_of_reduce(self, unit: Unit) -> None:
        """Say that gradients are reduced, and whether the optimizer left some: that were zeroed."""
        if self._tells:
            handles = (handle for each in self._units for handle in each.handles)
            left = any(p.grad is not None for handle in handles for p in handle.watched)
            self.tell("reduce", unit, left)

    def _count(self, tensor: torch.Tensor) -> None:
        """``Join`` is about to count: whatever was going on is over."""
        if self._counted is None:
            # What follows, if all are to raise when one runs out of data, is no count.
            self._counted = tensor
        self.tell("end")
        self._tells = False
        if not self._notifies and tensor.item() == 1:
            # Not a count: this rank has run out of data, and tells the others by an exception.
            self._terminated()

    # -- all ranks ----------------------------------------------------------------------------

    def _meet(self, has_data: bool) -> None:
        """Find out who still has data, and who tells the others."""
        self.group.begin_pass(_JOIN, self._units[0].name)
        have_data: list[bool] = self.group.gather_objects(has_data, self._units[0].name)
        self._channel.begin_step()
        self._tells = have_data.index(True) == self.group.rank
        self._refuse_others(has_data)
        rescale = self.group.size / sum(have_data) if self._by_active else 1.0
        for unit in self._units:
            unit.reduction.rescale = rescale

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's ``value``, at the end, when no rank has data any more."""
        self._refuse_others(False)
        self.group.begin_pass(_JOIN, self._units[0].name)
        return self.group.gather_objects(value, self._units[0].name)

    def leave(self) -> None:
        """The context has ended."""
        self._refuse_others(False)
        self.counting_group.forget()
        for unit in self._units:
            unit.reduction.rescale = 1.0

    # -- a rank without data ------------------------------------------------------------------

    def hear_step(self, obey: Callable[[Word, Unit | None], None]) -> None:
        """Do what the others do, up to the end of a step."""
        self._meet(has_data=False)
        while (word := self._channel.hear()).verb != "end":
            if word.verb == "refused":
                raise RuntimeError(word.detail)
            obey(word, None if word.unit is None else self._units[word.unit])

    # -- what cannot be followed --------------------------------------------------------------

    def _refuse_others(self, on: bool) -> None:
        groups = {self.group, *(unit.shards for unit in self._units)}
        groups |= {unit.copies for unit in self._units if unit.copies is not None}
        for group in groups:
            group.refuse = self._refuse if on else None

    def _refuse(self, verb: str, unit: str) -> None:
        if verb.startswith(_FOLLOWED):
            return
        message = (
            f"{verb!r} of {unit!r} inside of Join, while some ranks have run out of data: they "
            "follow forward, backward, clip_grad_norm_ and the steps of the optimizers given to "
            "Join. Do it outside of the context, or pass throw_on_early_termination=True"
        )
        self.tell("refused", detail=message)
        # All ranks raise, and none of them is in the context any more.
        self._terminated()
        raise RuntimeError(message)
