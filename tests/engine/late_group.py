"""A process group of real ranks whose collectives are complete later than the host goes on.

NCCL's are such: a device works on them, and who waits for one orders the current stream behind it.
With one GPU there is no second rank for NCCL. Here the data takes the way through the host, by
gloo, at once; but results are put where they belong, and what was sent is looked at again, only
after the device has slept on a stream of the group's own. On a CPU it happens when somebody waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fullshard.testing import device

#: What a GPU sleeps for before a collective is complete: some milliseconds.
_CYCLES = 6_000_000


class LateGroup:
    """The ranks of ``group``, of which nobody may take a result before he has waited for it."""

    def __init__(self, group: Any = None) -> None:
        self._group = group or dist.group.WORLD
        self._stream = torch.cuda.Stream(device()) if device().type == "cuda" else None
        self._changed: list[torch.Tensor] = []

    def rank(self) -> int:
        return dist.get_rank(self._group)

    def size(self) -> int:
        return dist.get_world_size(self._group)

    def assert_nothing_sent_was_changed(self) -> None:
        """Check that no memory was given to others, or written to, while it was being sent."""
        assert self._changed
        assert not any(changed.item() for changed in self._changed)
        self._changed.clear()

    def all_gather_single(self, output: torch.Tensor, piece: torch.Tensor, *_: Any) -> Late:
        return self.all_gather_single_coalesced([output], [piece])

    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], pieces: Sequence[torch.Tensor], *_: Any
    ) -> Late:
        def gather(sent: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            return [torch.cat(self._from_all(piece)) for piece in sent]

        return self._launch(outputs, pieces, gather)

    def reduce_scatter_single(self, output: torch.Tensor, full: torch.Tensor, *_: Any) -> Late:
        def reduce(sent: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            total = torch.stack(self._from_all(sent[0])).sum(dim=0)
            return [total.view(self.size(), -1)[self.rank()]]

        return self._launch([output], [full], reduce)

    def allreduce(self, tensors: Sequence[torch.Tensor], *_: Any) -> Late:
        def reduce(sent: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            return [torch.stack(self._from_all(tensor)).sum(dim=0) for tensor in sent]

        return self._launch(tensors, tensors, reduce)

    # What torch 2.11 calls them.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single

    def _from_all(self, sent: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, on the host; as bytes, since gloo does not know all dtypes."""
        found = [torch.empty_like(sent).view(torch.uint8) for _ in range(self.size())]
        dist.all_gather(found, sent.view(torch.uint8), group=self._group)
        return [each.view(sent.dtype) for each in found]

    def _launch(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        exchange: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]],
    ) -> Late:
        def complete() -> None:
            for given, kept in zip(inputs, sent, strict=True):
                # As bytes: between gradients lies what is no number.
                now, then = given.view(-1).view(torch.uint8), kept.view(torch.uint8)
                self._changed.append((now != then.to(now.device)).any())
            for output, result in zip(outputs, results, strict=True):
                output.view(-1).copy_(result)

        if self._stream is None:
            sent = [given.flatten().clone() for given in inputs]
            results = exchange(sent)
            return Late(complete)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            sent = [given.flatten().cpu() for given in inputs]
            results = exchange(sent)
            torch.cuda._sleep(_CYCLES)
            complete()
            over = torch.cuda.Event()
            over.record()
        return Late(lambda: torch.cuda.current_stream().wait_event(over))


class Late:
    """One of its collectives."""

    def __init__(self, complete: Callable[[], None]) -> None:
        self._complete: Callable[[], None] | None = complete

    def wait(self, *_: Any) -> bool:
        complete, self._complete = self._complete, None
        if complete is not None:
            complete()
        return True
