"""A round: parameters that travel to their owners together, are stepped there, and travel back.

Note: what travels
    A rank's shard stays the only lasting copy of parameters. So a round sends values along with
    gradients, and sends new values back: a step moves three times the parameters' size. Owners that
    kept whole parameters would move two, and take more memory: a third of a sharded AdamW's. What
    users do to parameters between steps needs no attention this way, and the way to the owners
    overlaps with other work. Each piece is followed by one element that says whether its rank has a
    gradient.

On an accelerator the collectives run on the backend's stream, and waiting for one orders compute
after it. The host waits for the device only to learn whether parameters of which its rank has no
piece have gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import routes
from .parameters import WholeParameter
from .routes import Journey, Parcel


class Round:
    """One round; ``parameters`` share a process group, a dtype and a device."""

    def __init__(
        self, name: str, parameters: Sequence[WholeParameter], optimizer: torch.optim.Optimizer
    ) -> None:
        self.name = name
        self.parameters = list(parameters)
        #: Steps this round's parameters, and has the state of those that this rank owns.
        self.optimizer: Any = optimizer
        first = self.parameters[0]
        self.group, self._device, self._dtype = first.group, first.device, first.dtype
        rank, size = self.group.rank, self.group.size
        self._mine = [each for each in self.parameters if each.is_mine]
        values = [each.parcel for each in self.parameters]
        marks = [_mark_of(parcel) for parcel in values]
        self._there = routes.to_owners([*values, *values, *marks], rank, size)
        self._back = routes.from_owners(values, rank, size)
        self._pending: Callable[[], None] = _nothing
        #: Tensors in flight, which are held until they have arrived, and receive buffers.
        self._travelling: tuple[torch.Tensor, torch.Tensor] | None = None
        self._marks: dict[Any, torch.Tensor] = {}
        #: Whether this rank has a gradient, for each of the parameters; None where it has no piece.
        self._present: dict[WholeParameter, bool] = {}

    def start(self) -> None:
        """Begin to send pieces of parameters and gradients to the owners."""
        if self._travelling is not None:
            # The last step ended with an exception.
            self._pending()
        held = [each for each in self.parameters if each.holds_piece]
        pieces = {each: each.piece() for each in held}
        gradients = {each: each.gradient() for each in held}
        self._present = {each: gradient is not None for each, gradient in gradients.items()}
        sent: list[torch.Tensor | None] = [pieces.get(each) for each in self.parameters]
        marks: list[torch.Tensor | None] = []
        for each in self.parameters:
            piece, gradient = pieces.get(each), gradients.get(each)
            if piece is None:
                sent.append(None)
                marks.append(None)
            else:
                sent.append(torch.zeros_like(piece) if gradient is None else gradient)
                marks.append(self._mark(piece, gradient is not None))
        self._send(self._there, [*sent, *marks])

    def _mark(self, piece: torch.Tensor, present: bool) -> torch.Tensor:
        """One element that says whether there is a gradient, where ``piece`` is; made once."""
        key = (present, piece.dtype, piece.device)
        mark = self._marks.get(key)
        if mark is None:
            mark = self._marks[key] = piece.new_full((1,), present)
        return mark

    def step(self) -> None:
        """Step this rank's parameters of the round, and begin to send them back."""
        self._put_in_place()
        try:
            self.optimizer.step()
        finally:
            results = [each.take_away() for each in self._mine]
        cuts: list[torch.Tensor] = []
        for each, result in zip(self._mine, results, strict=True):
            cuts += each.cuts_of(result)
        self._send(self._back, cuts)

    def _put_in_place(self) -> None:
        """Give the stand-ins the received tensors, in a buffer that is released on return."""
        arrived, count = self._receive(self._there), len(self._mine)
        self._read_marks(arrived[2 * count :])
        for index, each in enumerate(self._mine):
            # In memory of its own, so that it is aligned as any tensor is.
            value, gradient = torch.cat(arrived[index]), None
            if self._present[each]:
                gradient = each.whole(torch.cat(arrived[count + index]))
            each.put_in_place(each.whole(value), gradient)

    def _read_marks(self, marks: Sequence[list[torch.Tensor]]) -> None:
        """Learn of gradients of parameters of which this rank has no piece; the host waits."""
        unknown = [
            (each, mark)
            for each, mark in zip(self._mine, marks, strict=True)
            if each not in self._present
        ]
        if unknown:
            found = torch.stack([torch.cat(mark).any() for _, mark in unknown]).tolist()
            self._present.update(zip((each for each, _ in unknown), found, strict=True))

    def finish(self) -> None:
        """Put the new values of this rank's pieces in place."""
        parts = [part for (part,) in self._receive(self._back)]
        pieces = [each.piece() for each in self.parameters if each.holds_piece]
        if pieces:
            torch._foreach_copy_(pieces, parts)

    def _send(self, journey: Journey, cuts: Sequence[torch.Tensor | None]) -> None:
        pieces = [cuts[index] for index in journey.order]
        sent = joined([piece for piece in pieces if piece is not None], self._dtype, self._device)
        received = sent.new_empty(sum(journey.received))
        self._travelling = sent, received
        self._pending = self.group.start_exchange(
            received, sent, journey.received, journey.sent, self.name
        )

    def _receive(self, journey: Journey) -> list[list[torch.Tensor]]:
        """The parts of each parcel that has arrived, in the order of parcels."""
        pending, self._pending = self._pending, _nothing
        pending()
        travelling, self._travelling = self._travelling, None
        assert travelling is not None
        return arranged(travelling[1], journey)


def joined(
    pieces: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """All pieces as one flat tensor."""
    if not pieces:
        return torch.empty(0, dtype=dtype, device=device)
    return torch.cat(list(pieces)).to(device, dtype)


def arranged(received: torch.Tensor, journey: Journey) -> list[list[torch.Tensor]]:
    """The parts of each parcel that was received, in the order of parcels."""
    parts = received.split(list(journey.parts)) if journey.parts else ()
    return [[parts[place] for place in places] for places in journey.places]


def _mark_of(parcel: Parcel) -> Parcel:
    """One element for each rank that holds a piece: whether the rank has a gradient."""
    return Parcel(parcel.owner, tuple(min(1, size) for size in parcel.sizes), parcel.is_sharded)


def _nothing() -> None:
    """There is nothing to wait for."""
