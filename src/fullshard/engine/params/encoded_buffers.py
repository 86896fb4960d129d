"""Full parameters that are all-gathered in another form than they are computed with.

An all-gather sends a rank's shard as bytes, which are made for it, and fills memory that lasts
until the bytes of all ranks have been decoded to where full parameters are. A rank decodes its own
shard, too: all ranks compute with the same numbers.
"""

from __future__ import annotations

from typing import Any

import torch

from ..encoding.encodings import Encoding
from .buffers import FullBuffer
from .layout import Layout
from .row_buffers import RowFullBuffer


class EncodedShards:
    """The shards of all ranks as an all-gather of them sends and fills them: as bytes."""

    def __init__(
        self, encoding: Encoding, layout: Layout, rank: int, shard: torch.Tensor, device: Any
    ) -> None:
        self._encoding = encoding
        self._shard = shard
        self._device = device
        ranks, nbytes = layout.world_size, encoding.nbytes(layout.shard_numel)
        with torch.inference_mode(False), torch.no_grad():
            self._gathered = torch.empty(ranks * nbytes, dtype=torch.uint8, device=device)
            self._rows = self._gathered.view(ranks, nbytes)
            self._own = self._rows[rank : rank + 1]
        self._storage = self._gathered.untyped_storage()
        self._nbytes = self._storage.nbytes()
        self._storage.resize_(0)

    def begin_gather(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Encode this rank's shard, into memory for the shards of all ranks."""
        self._storage.resize_(self._nbytes)
        shard = self._shard.detach().to(self._device, non_blocking=True)
        with torch.no_grad():
            self._encoding.encode(shard[None], self._own)
        return [self._gathered], [self._own[0]]

    def decode(self, rows: torch.Tensor) -> None:
        """Write the shards of all ranks to ``rows``, and give their bytes' memory back."""
        self._encoding.decode(self._rows, rows)
        self.release()

    def release(self) -> None:
        self._storage.resize_(0)


class EncodedFullBuffer(FullBuffer):
    """Full parameters in the flat layout, all-gathered in an encoding."""

    prepares_gather = True
    is_copied_out = True
    is_lossy = True

    def __init__(
        self, layout: Layout, rank: int, shard: torch.Tensor, *args: Any, encoding: Encoding
    ) -> None:
        super().__init__(layout, rank, shard, *args)
        self._encoded = EncodedShards(encoding, layout, rank, shard, self.flat.device)
        self._whole_rows = self.alias.view(layout.world_size, layout.shard_numel)
        self.allocate, self._release_whole = _when_gathering, self.release
        self.release = self._release_all

    def begin_gather(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return self._encoded.begin_gather()

    def copy_out(self) -> None:
        self.allocate_whole()
        self._encoded.decode(self._whole_rows)

    def _release_all(self) -> None:
        self._encoded.release()
        self._release_whole()


class EncodedRowFullBuffer(RowFullBuffer):
    """Full parameters in rows, all-gathered in an encoding.

    They are decoded in the order of ranks, and then copied to the order of parameters.
    """

    prepares_gather = True
    is_lossy = True

    def __init__(
        self, layout: Layout, rank: int, shard: torch.Tensor, *args: Any, encoding: Encoding
    ) -> None:
        super().__init__(layout, rank, shard, *args)
        self._encoded = EncodedShards(encoding, layout, rank, shard, self.flat.device)
        self._allocate_gathered = self.allocate
        self.allocate = _when_gathering

    def begin_gather(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return self._encoded.begin_gather()

    def copy_out(self) -> None:
        self._allocate_gathered()
        self._encoded.decode(self._rows)
        super().copy_out()

    def _release_all(self) -> None:
        self._encoded.release()
        super()._release_all()


def _when_gathering() -> None:
    """Memory is taken when it is written to: for bytes by an all-gather, for numbers after it."""
