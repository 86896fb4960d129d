"""The progress of each unit in the running step, per unit and per forward call.

Why a unit is unsharded is not kept here, but in ``residency.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .outputs import SideOutputs


class ForwardCall:
    """One forward of a unit whose end of backward is told by its inputs' gradients."""

    __slots__ = ("__weakref__", "asking", "reached_in")

    def __init__(self) -> None:
        self.reached_in = -1
        #: The hooks on inputs, which may outlive the graph of this forward (leaves, and parameters
        #: of other units, do): the hooks go with it.
        self.asking: Any = None

    def keep(self, asking: Any) -> None:
        """Remove the hooks on inputs when the call goes."""
        self.asking = asking

    def __del__(self) -> None:
        if self.asking is not None:
            self.asking.remove()


class StepState:
    """The progress of one unit through a forward and a backward."""

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
        #: What the running forward was called with: it may hand it on, or put tensors into it.
        self.inputs: Any = None
        #: Where the unit's modules keep tensors for others, such as auxiliary losses.
        self.side_outputs: SideOutputs | None = None
        #: The graph task in which a gradient reached the unit's output; None when closed.
        self.task: int | None = None
        #: Calls whose outputs were reached and whose inputs were not, see ``Backward._close``.
        self.open_calls = 0
        #: Whether the running backward has brought gradients of its parameters.
        self.received = False
        #: Whether the unit may need its parameters after its own gradients are there: its inputs'
        #: gradients tell when it is done. None until its first forward was looked at.
        self.inputs_tell: bool | None = None
        #: Needed until the end of backward, since no input's gradient can tell.
        self.held = False
        #: When the unit's last forward, the outermost of nested ones, began, in autograd's numbers.
        self.birth = 0

    def keep_side_outputs(self, side_outputs: SideOutputs) -> SideOutputs:
        """Look at the same attributes in every forward."""
        self.side_outputs = side_outputs
        return side_outputs

    def learn_who_tells(self, holds_reentrant_checkpoint: bool) -> None:
        """A reentrant checkpoint needs parameters after the unit's own gradients are there."""
        self.inputs_tell = self.held = holds_reentrant_checkpoint

    def hold_if_nobody_tells(self) -> None:
        """No input has a gradient: a unit that its inputs should tell is held until the end."""
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
