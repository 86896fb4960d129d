"""The progress of each unit in the running step, per unit and per forward call.

The reason why a unit is unsharded is in ``residency.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .outputs import SideOutputs
    from .unit import Unit


class ForwardCall:
    """One forward of a unit whose backward is known to end when its inputs have gradients.

    ``birth``: no input has one. Then autograd runs what is left of this forward before it runs the
    unit's node, which is as old as the unit's last forward: not if another forward came since.
    """

    __slots__ = ("__weakref__", "asking", "birth", "reached_in")

    def __init__(self, birth: int | None = None) -> None:
        self.birth = birth
        #: The number of the backward that has reached this forward's outputs.
        self.reached_in = -1
        #: The hooks on inputs. Inputs may outlive this forward's graph (leaves, and parameters of
        #: other units, do), so the hooks are removed with the graph.
        self.asking: Any = None

    def ask(self, inputs: Sequence[torch.Tensor], hook: Callable[[Any], None]) -> None:
        """Have ``hook`` called when all ``inputs`` have gradients, until this object is deleted."""
        if len(inputs) == 1:
            # A view that was changed in place gets its node when it is asked for one; without,
            # torch 2.13 ends the process.
            _ = inputs[0].grad_fn
            self.asking = inputs[0].register_hook(hook)
        else:
            self.asking = torch.autograd.graph.register_multi_grad_hook(inputs, hook)

    def __del__(self) -> None:
        if self.asking is not None:
            self.asking.remove()


class StepState:
    """The progress of one unit through a forward and a backward.

    A record without decisions: ``forward.py`` and ``backward.py`` write it, and nobody else does.
    """

    __slots__ = (
        "active",
        "birth",
        "held",
        "inputs",
        "inputs_tell",
        "open_calls",
        "received",
        "side_outputs",
        "task",
    )

    def __init__(self) -> None:
        #: Forwards of this unit that are running now.
        self.active = 0
        #: The running forward's inputs: it may return them, or put tensors into them.
        self.inputs: Any = None
        #: The attributes in which the unit's modules keep tensors such as auxiliary losses.
        self.side_outputs: SideOutputs | None = None
        #: The graph task in which a gradient reached the unit's output; None when closed.
        self.task: int | None = None
        #: Calls whose outputs were reached and whose inputs were not, see ``Backward._close``; and
        #: those without such inputs that were not the last: they end with the backward.
        self.open_calls = 0
        #: Whether the running backward has computed gradients of its parameters.
        self.received = False
        #: Whether the unit may need its parameters after its parameters' gradients are computed; if
        #: so, its inputs' gradients tell when it is done. None until its first forward has ended.
        self.inputs_tell: bool | None = None
        #: Whether the unit is kept until the end of backward, since no input has a gradient.
        self.held = False
        #: Autograd's sequence number when the unit's last forward (the outermost, if they are
        #: nested) began.
        self.birth = 0

    def keep_side_outputs(self, side_outputs: SideOutputs) -> SideOutputs:
        """Use the same ``side_outputs`` in every forward."""
        self.side_outputs = side_outputs
        return side_outputs

    def learn_who_tells(self, holds_reentrant_checkpoint: bool) -> None:
        """Note whether a reentrant checkpoint needs parameters after their gradients are there."""
        self.inputs_tell = self.held = holds_reentrant_checkpoint

    def hold_if_nobody_tells(self) -> None:
        """No input has a gradient: if those would have told the unit's end, hold the unit."""
        self.held = bool(self.inputs_tell)

    def close(self) -> None:
        """The unit's backward is over."""
        self.task = None
        self.open_calls = 0
        self.received = False

    def end_backward(self) -> None:
        """The whole backward is over: nothing is held any more."""
        self.close()
        self.held = False


def tell_enclosing(states: Mapping[Unit, StepState], unit: Unit, aside: list[torch.Tensor]) -> None:
    """Let the unit around ``unit`` know by which tensors autograd may enter both of them."""
    others = (state for other, state in states.items() if other is not unit and state.active)
    enclosing = max(others, key=lambda state: state.birth, default=None)
    if enclosing is not None and enclosing.side_outputs is not None:
        enclosing.side_outputs.note(aside)
