"""``capture``: a training step that runs as a CUDA graph wherever its calls repeat."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from ..engine.comm.collectives import Group, group_for
from ..engine.comm.disagreement import RankLostError, RanksDisagreeError
from ..engine.comm.streams import devices_in_use
from .batches import flatten, rebuilt
from .calls import Action, Calls
from .graphs import Recorder, StepGraph
from .kinds import Kind, Step, check_batch, obstacle_in, obstacle_in_result

__all__ = ["CapturedStep", "capture"]

Batch = TypeVar("Batch")
Result = TypeVar("Result")

#: Names the exchange of reasons in the error that is raised if ranks disagree during it.
_UNIT = "(captured step)"
#: Why ranks that would capture at different calls do not capture at all.
_APART = (
    "batches, modes or hyperparameters do not change at the same calls on all ranks, which have to "
    "capture together: pad batches so that they do"
)
#: What a rank tells the others: why it cannot capture, and which of its calls it repeats how.
_Answer = tuple[str | None, tuple[Action, int | None] | None]
#: Words in the message of the error that broke a capture, each with advice for the user.
_HINTS = (
    ("capturable", "construct the optimizer with capturable=True"),
    ("seed", "pass preserve_rng_state=False to checkpoint()"),
    (
        "captur",
        "the step makes the host wait for the device (.item(), float(loss), print, if on a tensor, "
        "data that is copied from the host): do that outside, with the step's results",
    ),
)


def capture(
    step: Callable[[Batch], Result],
    example_batch: Batch,
    *,
    warmup: int = 2,
    graphs: int = 8,
    group: Any = None,
) -> CapturedStep[Batch, Result]:
    """Run ``step(batch)`` as a CUDA graph, with one launch instead of thousands.

    Returns a function that replaces ``step`` and does the same. Each call is one step on its
    own batch: nothing runs on ``example_batch``, which only shows what batches look like. The
    first calls run eagerly. A call of a kind that came ``warmup`` times before (the very first
    call, in which the step's models and optimizers are found, does not count) is captured and then
    replayed, and from then on all calls of its kind are replayed. A kind is the batch's structure,
    shapes and dtypes, training modes, which parameters are trained, and the optimizers' numbers,
    such as a learning rate that is a float: make it a tensor if it changes often. ``graphs`` are
    kept at most.

    A graph repeats what the device did. What ``step`` does on the host happens only when it is
    called or captured: keep schedulers, counters and logging outside. Batches are copied to the
    device, and results are copies of what the step returned, without autograd's graph.

    If the step cannot be captured (on a CPU, over gloo, with offloaded parameters, if it waits for
    the device), it runs eagerly, with one warning that says why. All ranks of ``group`` (the
    default process group) have to make the same calls, and capture together or not at all.

    Example::

        optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=True)

        def step(batch):
            loss = model(batch)
            loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step = fullshard.capture(step, next(iter(loader)))
        for batch in loader:
            loss = step(batch)
    """
    return CapturedStep(step, example_batch, warmup, graphs, group)


class CapturedStep(Generic[Batch, Result]):
    """A step that is replayed where it can be; made by :func:`capture`."""

    def __init__(
        self,
        step: Callable[[Batch], Result],
        example_batch: Batch,
        warmup: int,
        graphs: int,
        group: Any,
    ) -> None:
        functools.update_wrapper(self, step, updated=())
        self._function = step
        self._calls = Calls(warmup, graphs)
        self._step = Step()
        self._group = group
        self._graphs: dict[Hashable, StepGraph] = {}
        self._recorder: Recorder | None = None
        #: How many calls there were.
        self._made = 0
        self._last: Kind | None = None
        #: Why no graph can stand for calls of a kind, as their eager calls have shown.
        self._contradiction: str | None = None
        #: Why all calls run eagerly; None as long as they need not.
        self.why_eager: str | None = None
        leaves, _, _ = flatten(example_batch)
        check_batch(leaves)
        device = _device_of(leaves)
        if device is not None:
            self._recorder = Recorder(device)

    @property
    def captured(self) -> int:
        """The number of graphs that are kept now."""
        return len(self._graphs)

    def __call__(self, batch: Batch) -> Result:
        if self.why_eager is not None:
            return self._run_as_it_is(batch)
        leaves, structure, spec = flatten(batch)
        check_batch(leaves)
        kind = self._step.kind_of(leaves, structure)
        # The first call shows what the step uses.
        is_first, self._made = self._made == 0, self._made + 1
        action = Action.EAGER if is_first else self._decide(kind, leaves)
        if action is Action.CAPTURE and not self._capture(kind, leaves, spec):
            action = None
        if action is None:
            return self._fall_back(batch)
        if action is not Action.EAGER:
            result: Result = self._graphs[kind].replay(leaves)
            return result
        if self._calls.is_restless and self._last is not None:
            self._tell_restless(kind, self._last)
        self._last = kind
        result = self._run(leaves, spec)
        contradiction = self._contradiction or self._step.contradiction(kind)
        self._contradiction = contradiction or obstacle_in_result(result)
        return result

    def _decide(self, kind: Kind, leaves: list[Any]) -> Action | None:
        """Decide on a call; None if all that follow, this one included, are not to be captured."""
        since, action = self._calls.since(kind), self._calls.decide(kind)
        if action is not Action.CAPTURE and not self._settles_in:
            return action
        return action if self._all_can(self._obstacle(leaves), (action, since)) else None

    @property
    def _settles_in(self) -> bool:
        """True among the first calls, in which ranks find out whether they would capture together.

        Later an eager call would pay for it, and ranks that replay could not be asked.
        """
        return not self._graphs and self._made <= self._calls.restless_after

    def _fall_back(self, batch: Batch) -> Result:
        """Run this call, and all that follow, as it is; the first rank tells its user why."""
        ranks = self._ranks
        if ranks is None or ranks.rank == 0:
            warnings.warn(
                f"This step is not captured and runs eagerly: {self.why_eager}", stacklevel=3
            )
        return self._run_as_it_is(batch)

    def _run_as_it_is(self, batch: Batch) -> Result:
        """Run the step, on the batch where the step expects it."""
        if self._recorder is None:
            return self._function(batch)
        leaves, _, spec = flatten(batch)
        return self._call(spec, self._recorder.place(leaves))

    def _run(self, leaves: list[Any], spec: Any) -> Result:
        """Run the step eagerly, and see what it uses."""
        with self._step.watched():
            if self._recorder is None:
                return self._call(spec, leaves)
            placed = self._recorder.place(leaves)
            result: Result = self._recorder.run(lambda: self._call(spec, placed))
            return result

    def _call(self, spec: Any, leaves: Any) -> Result:
        return self._function(rebuilt(leaves, spec))

    # -- capturing ----------------------------------------------------------------------------

    def _capture(self, kind: Kind, leaves: list[Any], spec: Any) -> bool:
        """Capture a call; returns whether all ranks have a graph of it now."""
        recorder = self._recorder
        assert recorder is not None
        graph: StepGraph | None = None
        call, placed = functools.partial(self._call, spec), recorder.place(leaves)
        bookmarks = [(group, group.bookmark()) for group in self._step.groups]
        try:
            with self._step.watched():
                graph = recorder.capture(call, placed, self._step.parameters)
            reason = self._step.leftover() or self._step.contradiction(kind)
        except (RanksDisagreeError, RankLostError):
            raise
        except Exception as error:
            reason = _in_words(error)
        if not self._all_have(reason):
            # A capture may have broken anywhere: no rank has done what was captured of it.
            for group, bookmark in bookmarks:
                group.return_to(bookmark)
            if graph is not None:
                graph.undo()
            return False
        assert graph is not None
        graph.settle()
        self._graphs[kind] = graph
        gone = self._calls.keep(kind)
        if gone is not None:
            self._graphs.pop(gone).drop()
        if self._calls.is_crowded:
            self._tell_crowded()
        return True

    def _obstacle(self, leaves: list[Any]) -> str | None:
        if self._recorder is None:
            return "it runs on the CPU, and CUDA graphs are for GPUs"
        return self._contradiction or obstacle_in(leaves) or self._step.obstacle()

    @property
    def _ranks(self) -> Group | None:
        group = self._group
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        return None if group is None else group_for(group)

    def _all_can(
        self, reason: str | None, repeats: tuple[Action, int | None] | None = None
    ) -> bool:
        """Before a call: true if every rank can capture, and is about to do the same."""
        answer, ranks = (reason, repeats), self._ranks
        return self._settle([answer] if ranks is None else ranks.gather_objects(answer, _UNIT))

    def _all_have(self, reason: str | None) -> bool:
        """After a capture: true if that of every rank is complete."""
        answer, ranks = (reason, None), self._ranks
        return self._settle([answer] if ranks is None else ranks.gather_objects_anywhere(answer))

    def _settle(self, answers: list[_Answer]) -> bool:
        """True if nothing is in the way of any rank; otherwise none captures from now on."""
        reasons = [reason for reason, _ in answers]
        found = next((each for each in enumerate(reasons) if each[1] is not None), None)
        if found is None and len({repeats for _, repeats in answers}) > 1:
            reasons = [_APART] * len(answers)
            found = 0, _APART
        if found is None:
            return True
        of_rank = f" (rank {found[0]})" if any(each != found[1] for each in reasons) else ""
        self.why_eager = f"{found[1]}{of_rank}"
        for graph in self._graphs.values():
            graph.drop()
        self._graphs.clear()
        if self._recorder is not None:
            self._recorder.close()
        self._calls.forget()
        return False

    def _tell_restless(self, kind: Kind, last: Kind) -> None:
        what = ", ".join(kind.differences(last)) or "nothing since the last call"
        warnings.warn(
            f"This step runs eagerly: the last {self._calls.restless_after} calls were of kinds "
            f"that have no graph. Changed in the last call: {what}. Pad batches to a few shapes, "
            "and make a learning rate that changes often a tensor on the GPU, filled in place",
            stacklevel=3,
        )

    def _tell_crowded(self) -> None:
        limit = self._calls.limit
        warnings.warn(
            f"This step is captured again and again: its calls are of more kinds than the {limit} "
            "graphs that are kept. Pad batches to fewer shapes, or keep more (graphs=...)",
            stacklevel=4,
        )


def _device_of(leaves: list[Any]) -> torch.device | None:
    """The GPU that the step is captured on: the batch's, or the current one; None on a CPU."""
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.device.type == "cuda":
            return leaf.device
    if not torch.cuda.is_available():
        return None
    # On a machine with GPUs, too, a model may be trained on the CPU.
    used = {device.type for device in devices_in_use()}
    if used and "cuda" not in used:
        return None
    return torch.device("cuda", torch.cuda.current_device())


def _in_words(error: Exception) -> str:
    """The reason why a capture failed, in one line."""
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    # The first error is the cause; later ones only say that the capture is broken.
    first = chain[-1]
    told = (str(first).strip().splitlines() or [""])[0]
    hint = next((words for mark, words in _HINTS if mark in told.lower()), None)
    return f"{type(first).__name__}: {told}" + (f" — {hint}" if hint else "")
