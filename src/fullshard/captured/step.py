"""``capture``: a training step that runs as a CUDA graph wherever its calls repeat."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from ..engine.comm.collectives import group_for
from ..engine.runtime.capturing import watch_passes
from .calls import Action, Calls
from .graphs import Recorder, StepGraph
from .kinds import Kind, Step, check_batch, flatten

__all__ = ["CapturedStep", "capture"]

Batch = TypeVar("Batch")
Result = TypeVar("Result")

#: Names the exchange of reasons in the error that is raised if ranks disagree during it.
_UNIT = "(captured step)"
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
            return self._function(batch)
        leaves, structure, spec = flatten(batch)
        check_batch(leaves)
        # The first call has shown by now which models and optimizers the step uses.
        if self._made == 1 and not self._all_can(self._obstacle()):
            return self._function(batch)
        kind = self._step.kind_of(leaves, structure)
        action = self._calls.decide(kind) if self._made else Action.EAGER
        self._made += 1
        if action is Action.REPLAY:
            result: Result = self._graphs[kind].replay(leaves)
            return result
        if action is Action.CAPTURE and self._capture(kind, leaves, spec):
            result = self._graphs[kind].replay(leaves)
            return result
        if self._calls.is_restless and self._last is not None:
            self._tell_restless(kind, self._last)
        self._last = kind
        return self._run(leaves, spec)

    def _run(self, leaves: list[Any], spec: Any) -> Result:
        """Run the step eagerly, and note which models and optimizers it uses."""
        hook = register_optimizer_step_pre_hook(self._step.note_optimizer)
        try:
            with watch_passes(self._step):
                if self._recorder is None:
                    return self._call(spec, leaves)
                placed = self._recorder.place(leaves)
                result: Result = self._recorder.run(lambda: self._call(spec, placed))
                return result
        finally:
            hook.remove()

    def _call(self, spec: Any, leaves: Any) -> Result:
        return self._function(pytree.tree_unflatten(leaves, spec))

    # -- capturing ----------------------------------------------------------------------------

    def _capture(self, kind: Kind, leaves: list[Any], spec: Any) -> bool:
        """Capture a call, if all ranks can; returns whether there is a graph of it now."""
        if not self._all_can(self._obstacle()):
            return False
        recorder = self._recorder
        assert recorder is not None
        graph: StepGraph | None = None
        call, placed = functools.partial(self._call, spec), recorder.place(leaves)
        try:
            graph = recorder.capture(call, placed, self._step.parameters)
            reason = self._step.leftover()
        except Exception as error:
            reason = _in_words(error)
        can = self._all_can(reason)
        if graph is None or not can:
            if graph is not None:
                graph.undo()
            return False
        graph.settle()
        self._graphs[kind] = graph
        gone = self._calls.keep(kind)
        if gone is not None:
            self._graphs.pop(gone).drop()
        return True

    def _obstacle(self) -> str | None:
        if self._recorder is None:
            return "it runs on the CPU, and CUDA graphs are for GPUs"
        return self._step.obstacle()

    def _all_can(self, reason: str | None) -> bool:
        """True if every rank can capture; otherwise all ranks run eagerly from now on."""
        reasons, rank = [reason], 0
        group = self._group
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        if group is not None:
            ranks = group_for(group)
            reasons, rank = ranks.gather_objects(reason, _UNIT), ranks.rank
        found = next((each for each in enumerate(reasons) if each[1] is not None), None)
        if found is None:
            return True
        of_rank = f" (rank {found[0]})" if any(each != found[1] for each in reasons) else ""
        self.why_eager = f"{found[1]}{of_rank}"
        for graph in self._graphs.values():
            graph.drop()
        self._graphs.clear()
        self._calls.forget()
        if rank == 0:
            warnings.warn(
                f"This step is not captured and runs eagerly: {self.why_eager}", stacklevel=4
            )
        return False

    def _tell_restless(self, kind: Kind, last: Kind) -> None:
        what = ", ".join(kind.differences(last)) or "nothing since the last call"
        warnings.warn(
            f"This step runs eagerly: the last {self._calls.restless_after} calls were of kinds "
            f"that have no graph. Changed in the last call: {what}. Pad batches to a few shapes, "
            "and make a learning rate that changes often a tensor on the GPU, filled in place",
            stacklevel=3,
        )


def _device_of(leaves: list[Any]) -> torch.device | None:
    """The device on which the step is captured: the batch's GPU, or the current one."""
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.device.type == "cuda":
            return leaf.device
    if not torch.cuda.is_available():
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
