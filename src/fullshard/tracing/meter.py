"""Counts the memory of a rank by cause while steps run.

The engine's memory is counted when it is allocated and released. Activations are the rest of what
the allocator counts: torch's on an accelerator, glibc's on a host.

Note: asking the allocator
    glibc counts by walking through all that is free: 10 µs if that is in the processor's caches,
    and above 100 µs in the middle of a step. So it is asked where activations come and go only, and
    no longer than the allowance below; in between, activations are taken to be what they were.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..engine.runtime.unit import State, Unit
from .allocator import counter_of, forget_peak
from .clocks import Mark
from .records import Memory

#: Seconds of the processor's time that asking the allocator may take: at first, so that the first
#: steps are seen whole, and then per second of the trace.
_ALLOWANCE, _PER_SECOND = 5e-3, 5e-3


class _Sizes:
    """Sizes by unit, and their sum."""

    def __init__(self) -> None:
        self.total = 0
        self._of: dict[Unit, int] = {}

    def of(self, unit: Unit) -> int:
        return self._of.get(unit, 0)

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
        #: Units that were resharded and had their memory still when they were last looked at.
        self._resharded: list[Unit] = []
        self._optimizer = 0
        #: The moment, and bytes: the optimizer's, gradients, unsharded, reducing, all in use.
        self._samples: list[tuple[Any, ...]] = []
        self._begun, self._spent = time.perf_counter(), 0.0
        for unit in units:
            self.note_unsharded(unit)
        self.note_all_gradients()
        #: What the allocator counts beside the causes that were there when the trace began:
        #: other models, libraries, the program itself.
        self._beside, self._most = 0, 0
        if self._in_use is not None:
            # Or it would tell of no peak that an earlier step has reached, too.
            forget_peak(device)
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

    def note_resharded(self, unit: Unit) -> None:
        """The unit was resharded. An accelerator may release its memory later."""
        self._resharded.append(unit)
        self._note_released()

    def _note_released(self) -> None:
        """Count units again that were resharded and had their memory still."""
        waiting, self._resharded = self._resharded, []
        for unit in waiting:
            self.note_unsharded(unit)
            if self._unsharded.of(unit) and unit.state is State.SHARDED:
                self._resharded.append(unit)

    def note_unsharded(self, unit: Unit) -> None:
        """The unit's full parameters, or a part of them, were given memory."""
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
        """Whether the optimizer's state is counted."""
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
        """Note the memory by cause, activations included, if that is within the allowance."""
        self._append(at, self._count())

    def sample_causes(self, at: Mark) -> None:
        """Likewise, where activations are what they were."""
        self._append(at, None)

    def _append(self, at: Mark, now: int | None) -> None:
        if self._resharded:
            self._note_released()
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

    def _count(self) -> int | None:
        """What the allocator has in use now; None if it is not to be asked."""
        allowed = _ALLOWANCE + _PER_SECOND * (time.perf_counter() - self._begun)
        if self._in_use is None or self._spent > allowed:
            return None
        started = time.thread_time()
        now, most = self._in_use()
        self._spent += time.thread_time() - started
        if most > max(now, self._most) and self._samples:
            # A new peak since the last sample: shown as lasting since then.
            *causes, _ = self._samples[-1]
            self._samples.append((*causes, most))
        self._most = most
        return now

    def memory(self, seconds: Callable[[Mark], float]) -> list[Memory]:
        """All samples, with what the allocator counted beyond the causes as their rest."""
        found: list[Memory] = []
        rest = None if self._in_use is None else 0
        for at, optimizer, gradients, unsharded, reducing, in_use in self._samples:
            causes = (self.shards, optimizer, gradients, unsharded, reducing)
            if in_use is not None:
                rest = max(0, in_use - self._beside - sum(causes))
            found.append(Memory(seconds(at), *causes, rest))
        return found


def _held_by(tensor: torch.Tensor) -> int:
    """The memory that a tensor has now, which may be none."""
    return tensor.untyped_storage().nbytes()
