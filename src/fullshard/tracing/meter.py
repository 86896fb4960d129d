"""Counts the memory of a rank by cause while steps run.

The engine's memory is counted when it is allocated and released. Activations are the rest of what
the allocator counts: torch's on an accelerator, glibc's on a host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..engine.runtime.unit import Unit
from .allocator import counter_of
from .clocks import Mark
from .records import Memory


class _Sizes:
    """Sizes by unit, and their sum."""

    def __init__(self) -> None:
        self.total = 0
        self._of: dict[Unit, int] = {}

    def set(self, unit: Unit, size: int) -> None:
        self.total += size - self._of.get(unit, 0)
        self._of[unit] = size


class Meter:
    """The memory of the units' own parts on ``device`` now, and samples of all memory."""

    def __init__(self, units: Sequence[Unit], device: torch.device) -> None:
        self._units = list(units)
        self._kind = device.type
        self._in_use = counter_of(device)
        self._state_sizes: dict[torch.optim.Optimizer, int] = {}
        self.shards = sum(self._size(h.shard_tensor) for unit in units for h in unit.handles)
        self._unsharded, self._reducing, self._gradients = _Sizes(), _Sizes(), _Sizes()
        self._optimizer = 0
        #: The moment, and bytes: the optimizer's, gradients, unsharded, reducing, all in use.
        self._samples: list[tuple[Any, ...]] = []
        for unit in units:
            self.note_unsharded(unit)
        self.note_all_gradients()
        #: What the allocator counts beside the causes that were there when the trace began:
        #: other models, libraries, the program itself.
        self._beside, self._most = 0, 0
        if self._in_use is not None:
            now, self._most = self._in_use()
            self._beside = now - self._known()

    def _known(self) -> int:
        come_and_go = self._unsharded.total + self._reducing.total + self._gradients.total
        return self.shards + self._optimizer + come_and_go

    def _size(self, tensor: Any) -> int:
        local = getattr(tensor, "_local_tensor", tensor)
        if local.device.type != self._kind:
            return 0
        return int(local.numel() * local.element_size())

    # -- what comes and goes --------------------------------------------------------------------

    def note_unsharded(self, unit: Unit) -> None:
        """The unit was unsharded or resharded."""
        size = 0
        for handle in unit.handles:
            for buffer in handle.full_buffers.values():
                if not buffer.is_shard_backed:
                    size += _held_by(buffer.flat)
                if buffer.is_copied_out:
                    # The memory that an all-gather fills before it is copied.
                    size += _held_by(buffer.gather_output)
        self._unsharded.set(unit, size)

    def note_reducing(self, unit: Unit, beside: int = 0) -> None:
        """The unit's reduce buffers were filled or released; ``beside`` is further memory of the
        reduce.
        """
        size = beside
        for handle in unit.handles:
            for buffer in handle.reduce_buffers.values():
                size += _held_by(buffer.flat)
        self._reducing.set(unit, size)

    def note_gradients(self, unit: Unit) -> None:
        """The unit's gradients were delivered, or cleared."""
        size = 0
        for handle in unit.handles:
            for parameter in handle.optimizer_params:
                if parameter.grad is not None:
                    size += self._size(parameter.grad)
        self._gradients.set(unit, size)

    def note_all_gradients(self) -> None:
        """Gradients of any unit may have been cleared."""
        for unit in self._units:
            self.note_gradients(unit)

    @property
    def knows_optimizer(self) -> bool:
        return bool(self._state_sizes)

    def knows(self, optimizer: torch.optim.Optimizer) -> bool:
        """True if the optimizer's state is counted."""
        return optimizer in self._state_sizes

    def note_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped: it may have made its state."""
        states = optimizer.state.values()
        values = [v for state in states for v in state.values() if isinstance(v, torch.Tensor)]
        size = sum(map(self._size, values))
        self._optimizer += size - self._state_sizes.get(optimizer, 0)
        self._state_sizes[optimizer] = size

    def note_standing_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Note an optimizer whose state was made before the trace began."""
        before = self._optimizer
        self.note_optimizer(optimizer)
        standing = self._optimizer - before
        self._beside -= standing
        self._samples = [(at, size + standing, *more) for at, size, *more in self._samples]

    # -- samples --------------------------------------------------------------------------------

    def sample(self, at: Mark) -> None:
        """Note the memory by cause."""
        now = None
        if self._in_use is not None:
            now, most = self._in_use()
            self._note_peak_before(now, most)
        self._samples.append(
            (
                at,
                self._optimizer,
                self._gradients.total,
                self._unsharded.total,
                self._reducing.total,
                now,
            )
        )

    def _note_peak_before(self, now: int, most: int) -> None:
        """Note a new peak of the allocator since the last sample, as lasting since then."""
        if most > max(now, self._most) and self._samples:
            *causes, last = self._samples[-1]
            self._samples.append((*causes, max(last, most)))
        self._most = most

    def sample_between(self, at: Mark) -> None:
        """Sample the memory between the events of units, on a host only, where that takes 2 µs."""
        if self._kind == "cpu":
            self.sample(at)

    def memory(self, seconds: Callable[[Mark], float]) -> list[Memory]:
        """All samples, with what the allocator counted beyond the causes as their rest."""
        found = []
        for at, optimizer, gradients, unsharded, reducing, in_use in self._samples:
            causes = (self.shards, optimizer, gradients, unsharded, reducing)
            rest = None if in_use is None else max(0, in_use - self._beside - sum(causes))
            found.append(Memory(seconds(at), *causes, rest))
        return found


def _held_by(tensor: torch.Tensor) -> int:
    """The memory that a tensor has now, which may be none."""
    return tensor.untyped_storage().nbytes()
