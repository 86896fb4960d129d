"""The autograd node of a unit's full parameters, which receives all their gradients.

Note: one node for life
    The node's outputs are the full parameters that a module computes with; its backward receives
    all their gradients at once. It saves nothing, so it may run in any number of backwards, and
    it is made once: a unit that runs again, in the same step or in the next, hands out the same
    outputs. Within one backward autograd then sums the gradients of all uses and runs the node
    once, after the last of them. Autograd runs ready nodes latest-born first; a node must run
    before those of earlier units, so it is given a new birth number whenever the unit runs. Not
    when it runs again inside a backward (a recompute): the number taken in forward is what lets
    everything inside the unit, such as a checkpoint that still needs the parameters, run first.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .untraced import untraced

if TYPE_CHECKING:
    from ..grads.gradients import Gradients
    from ..params.handle import FlatParamHandle

#: An autograd node without inputs; constructing one uses up a sequence number.
_AnyNode = torch._C._functions.UndefinedGrad

#: Seconds for which a backward that has raised may still be cleaned up, by another thread.
_PATIENCE = 0.5
#: How long to leave the processor to that thread.
_PAUSE = 1e-4

Receiver = Callable[[tuple[torch.Tensor | None, ...]], None]


class _HandOut(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, views: Sequence[torch.Tensor], receiver: Receiver
    ) -> tuple[torch.Tensor, ...]:
        ctx.receiver = receiver
        ctx.set_materialize_grads(False)
        return tuple(view.detach() for view in views)

    @staticmethod
    @untraced
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, None, None]:
        ctx.receiver(gradients)
        return None, None, None


class ParameterNode:
    """Hands ``views`` to autograd as its outputs and their gradients to ``receiver``."""

    def __init__(self, views: Sequence[torch.Tensor], receiver: Receiver) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            # On the device: the leaf that autograd comes to then has a stream, and autograd has
            # callbacks at the end of a backward run on the stream of whoever called it.
            anchor = torch.empty(0, requires_grad=True, device=views[0].device)
            self.outputs: tuple[torch.Tensor, ...] = _HandOut.apply(anchor, views, receiver)
        node = self.outputs[0].grad_fn
        assert node is not None
        self.node = node

    def born_now(self) -> None:
        """Let the node count as made now: see the note above."""
        birth = torch.autograd._get_sequence_nr()
        self.node._set_sequence_nr(birth)
        # The next node must not get the same sequence number: autograd could then run it, or this
        # one, in the wrong order.
        _AnyNode()


class Tracked(NamedTuple):
    """Full parameters as autograd knows them, per group, and the node that they come from."""

    node: ParameterNode | None
    tensors: list[list[torch.Tensor]]
    #: Whether some of them are frozen.
    is_mixed: bool


def track(
    shown: Sequence[Sequence[torch.Tensor]],
    trainable: Sequence[tuple[bool, ...]],
    handles: Sequence[FlatParamHandle],
    receiver: Callable[[Sequence[Gradients]], None],
) -> Tracked:
    """Full parameters, one list per group, of which the ``trainable`` ones come from one node.

    ``receiver`` is given all their gradients at once, per group, None for those that have none.
    """
    tensors = [list(group) for group in shown]
    positions = [(g, i) for g, flags in enumerate(trainable) for i, on in enumerate(flags) if on]
    is_mixed = len(positions) < sum(map(len, trainable))
    if not positions:
        return Tracked(None, tensors, is_mixed)
    distributed = [
        (group, index, distribution)
        for group, index in positions
        if (distribution := handles[group].distribution(index)) is not None
    ]

    def receive(found: tuple[torch.Tensor | None, ...]) -> None:
        if len(trainable) == 1 and not (is_mixed or distributed):
            # The usual case: the found gradients are all gradients.
            receiver([found])
            return
        gradients: list[list[torch.Tensor | None]] = [[None] * len(t) for t in trainable]
        for (group, index), gradient in zip(positions, found, strict=True):
            gradients[group][index] = gradient
        for group, index, distribution in distributed:
            gradients[group][index] = distribution.local_gradient(gradients[group][index])
        receiver(gradients)

    node = ParameterNode([tensors[g][i] for g, i in positions], receive)
    for (group, index), output in zip(positions, node.outputs, strict=True):
        tensors[group][index] = output
    return Tracked(node, tensors, is_mixed)


#: The type of the node behind every full parameter that autograd tracks.
PARAMETER_NODE = _HandOut._backward_cls

#: The number of the backward that autograd runs on this thread; -1 outside of one.
graph_task: Callable[[], int] = torch._C._current_graph_task_id


def is_handed_out(tensor: torch.Tensor) -> bool:
    """True if ``tensor`` is a full parameter of some unit, as autograd knows it.

    Its gradient can be computed without unsharding the unit. The tensor outlives each forward, so
    that hooks registered on it in every forward would accumulate.
    """
    return type(tensor.grad_fn) is PARAMETER_NODE


def holds_reentrant_checkpoint(tensors: Iterable[torch.Tensor], after: int) -> bool:
    """True if a reentrant checkpoint is among the nodes, born since ``after``, of ``tensors``.

    Its backward runs a part of the module again, with parameters that the graph around it does
    not mention.
    """
    stack = [tensor.grad_fn for tensor in tensors]
    seen = set(stack)
    while stack:
        node = stack.pop()
        if node is None or node._sequence_nr() < after:
            continue
        if node.name() == "CheckpointFunctionBackward":
            return True
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                stack.append(following)
    return False


def in_backward() -> bool:
    """True if autograd is running a backward on this thread."""
    return graph_task() != -1


def refuse_compiled_backward() -> None:
    """Raise RuntimeError if Dynamo's compiled autograd runs this backward.

    It runs nodes and hooks in an order of its own, and gradients would be lost silently.
    """
    # Not imported here: programs that do not compile save the second that it takes.
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled is not None and compiled.in_compiled_autograd_region:
        raise RuntimeError(
            "A wrapped model cannot be trained under compiled autograd, which calls hooks in "
            "another order than autograd does. Leave torch._dynamo.config.compiled_autograd at "
            "False: torch.compile compiles the backward without it, too"
        )


def wait_while(is_running: Callable[[], bool]) -> None:
    """Return when a backward that another thread cleans up is over, or patience is."""
    deadline = time.monotonic() + _PATIENCE
    while is_running() and time.monotonic() < deadline:
        time.sleep(_PAUSE)


class BackwardEnd:
    """Calls ``finished`` at the end of the running backward, and ``failed`` if either of them
    raises.

    Autograd keeps a callback until the backward is over. It does not call it after an exception,
    but releases it, and ``__del__`` notices that.
    """

    def __init__(self, finished: Callable[[], None], failed: Callable[[], None]) -> None:
        self._finished = finished
        self._failed: Callable[[], None] | None = failed
        torch.autograd.Variable._execution_engine.queue_callback(self)

    @untraced
    def __call__(self) -> None:
        failed, self._failed = self._failed, None
        try:
            self._finished()
        except BaseException:
            if failed is not None:
                failed()
            raise

    def __del__(self) -> None:
        if self._failed is not None:
            self._failed()
