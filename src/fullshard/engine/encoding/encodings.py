"""Encodings of numbers for the wire: their sizes in bytes, and how to encode and decode tensors.

Depends on torch and on the options alone. ``kernels.py`` has the same arithmetic in one pass each,
for GPUs.

Note: what is lost
    A block of numbers has one scale, its largest absolute value ``a`` divided by the largest code
    ``c``: 127 for int8, 448 for float8 (e4m3fn). A code is a number divided by the scale, rounded
    to the nearest one. So a number ``x`` comes back as ``y`` with

        int8      |x - y| <= a / 254                        (half a step of ``a / 127``)
        float8    |x - y| <= max(|x| / 16, a / 458,752)     (3 bits of mantissa; 2^-10 of the scale)

    and, of the arithmetic in float32, no more than ``a / 2^20`` beside it. A sum of numbers that
    ranks encoded is off by no more than the sum of what they are off by. Where ``y`` is stored in
    bfloat16, it is rounded once more. Blocks whose largest absolute value is below 2^-117 may
    become zeros. NaN and infinity make the scale of their block NaN or infinite, and what comes
    back is not finite in all of that block.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch

from ...api import Communication
from . import kernels

#: Encoded rows begin at multiples of this, as vector loads want them.
_ALIGNMENT = 16
#: How many numbers a host encodes at once, in 2 MiB: a quarter of the time of all at once.
_NUMBERS_AT_ONCE = 256 * 1024
#: The smallest normal float32: scales below it are taken for zero, as their inverse overflows.
TINY = torch.finfo(torch.float32).tiny


class Encoding(ABC):
    """Encodes rows of numbers as bytes, and decodes them.

    Each row of ``rows`` belongs to one rank; the encoded bytes have a row for each rank as well.
    """

    @abstractmethod
    def nbytes(self, numel: int) -> int:
        """The number of bytes that ``numel`` numbers take."""

    @abstractmethod
    def encode(self, rows: torch.Tensor, encoded: torch.Tensor) -> None:
        """Write ``rows`` to the bytes ``encoded``."""

    @abstractmethod
    def decode(self, encoded: torch.Tensor, rows: torch.Tensor) -> None:
        """Decode ``encoded`` into ``rows``, in the dtype of ``rows``."""

    @abstractmethod
    def add(self, encoded: torch.Tensor, total: torch.Tensor) -> None:
        """Add all rows of ``encoded`` to ``total``, in its dtype, which should be float32."""


@dataclasses.dataclass(frozen=True, eq=False)
class BlockEncoding(Encoding):
    """Codes of eight bits, and a float32 scale for each block: see the note.

    A row is encoded as its codes, then its scales; each row's blocks are its own.
    """

    dtype: torch.dtype
    block_size: int

    @property
    def largest_code(self) -> float:
        return 127.0 if self.dtype is torch.int8 else torch.finfo(self.dtype).max

    def blocks(self, numel: int) -> int:
        return -(-numel // self.block_size)

    def nbytes(self, numel: int) -> int:
        return _aligned(_aligned(numel) + 4 * self.blocks(numel))

    def scales_of(self, encoded: torch.Tensor, numel: int) -> torch.Tensor:
        """The scales in ``encoded`` rows of ``numel`` numbers; a view."""
        start = _aligned(numel)
        return encoded[:, start : start + 4 * self.blocks(numel)].view(torch.float32)

    def codes_of(self, encoded: torch.Tensor, numel: int) -> torch.Tensor:
        """The codes in ``encoded`` rows of ``numel`` numbers; a view."""
        return encoded[:, :numel].view(self.dtype)

    def encode(self, rows: torch.Tensor, encoded: torch.Tensor) -> None:
        numel = rows.shape[1]
        codes, scales = self.codes_of(encoded, numel), self.scales_of(encoded, numel)
        if self._has_kernels(rows):
            kernels.encode(rows, codes, scales, self.block_size, self.largest_code)
            return
        # What is scaled has memory of its own, which on a host should stay in the cache.
        at_once = self.blocks(numel)
        if rows.device.type == "cpu":
            at_once = max(1, _NUMBERS_AT_ONCE // self.block_size)
        for row_scales, *row in zip(scales, codes, rows, strict=True):
            for part in self._parts(row_scales, *row):
                for some in zip(*(each.split(at_once) for each in part), strict=True):
                    self._encode(*some)

    def _encode(self, scales: torch.Tensor, codes: torch.Tensor, values: torch.Tensor) -> None:
        # On a host ten times as fast as the norm that does the same.
        largest = torch.maximum(values.amax(-1, keepdim=True), values.amin(-1, keepdim=True).neg_())
        torch.div(largest.float(), self.largest_code, out=scales)
        # Not a NaN, which is not smaller than anything.
        scales.masked_fill_(scales < TINY, 0.0)
        inverse = scales.reciprocal().masked_fill_(scales == 0, 0.0)
        scaled = values * inverse
        codes.copy_(scaled.round_() if self.dtype is torch.int8 else scaled)

    def decode(self, encoded: torch.Tensor, rows: torch.Tensor) -> None:
        numel = rows.shape[1]
        codes, scales = self.codes_of(encoded, numel), self.scales_of(encoded, numel)
        if self._has_kernels(rows):
            kernels.decode(codes, scales, rows, self.block_size)
            return
        for part_scales, part_codes, places in self._parts(scales, codes, rows):
            if self.dtype is torch.int8:
                torch.mul(part_codes, part_scales, out=places)
            else:
                places.copy_(part_codes)
                places.mul_(part_scales)

    def add(self, encoded: torch.Tensor, total: torch.Tensor) -> None:
        numel = total.numel()
        codes, scales = self.codes_of(encoded, numel), self.scales_of(encoded, numel)
        if self._has_kernels(total):
            kernels.add(codes, scales, total, self.block_size)
            return
        for row_scales, row_codes in zip(scales, codes, strict=True):
            for part_scales, part_codes, sums in self._parts(row_scales, row_codes, total):
                sums.addcmul_(part_codes.to(sums.dtype), part_scales.to(sums.dtype))

    def _has_kernels(self, numbers: torch.Tensor) -> bool:
        return kernels.serve(numbers, self.dtype, self.block_size)

    def _parts(self, scales: torch.Tensor, *rows: torch.Tensor) -> Iterator[list[torch.Tensor]]:
        """The blocks of rows that are whole, then the last ones if they are not, as views.

        First their scales, which fit them as they are.
        """
        numel = rows[0].shape[-1]
        count, rest = divmod(numel, self.block_size)
        whole = numel - rest
        if whole:
            blocked = (count, self.block_size)
            parts = [row[..., :whole].unflatten(-1, blocked) for row in rows]
            yield [scales[..., :count, None], *parts]
        if rest:
            yield [scales[..., count:, None], *(row[..., None, whole:] for row in rows)]


@dataclasses.dataclass(frozen=True, eq=False)
class CastEncoding(Encoding):
    """Numbers in a dtype of fewer bits, such as bfloat16; they are summed in another dtype."""

    dtype: torch.dtype

    def nbytes(self, numel: int) -> int:
        return _aligned(numel * self.dtype.itemsize)

    def _codes_of(self, encoded: torch.Tensor, numel: int) -> torch.Tensor:
        return encoded[:, : numel * self.dtype.itemsize].view(self.dtype)

    def encode(self, rows: torch.Tensor, encoded: torch.Tensor) -> None:
        self._codes_of(encoded, rows.shape[1]).copy_(rows)

    def decode(self, encoded: torch.Tensor, rows: torch.Tensor) -> None:
        rows.copy_(self._codes_of(encoded, rows.shape[1]))

    def add(self, encoded: torch.Tensor, total: torch.Tensor) -> None:
        for row in self._codes_of(encoded, total.numel()):
            total.add_(row)


@dataclasses.dataclass(frozen=True, eq=False)
class Encodings:
    """The encodings of one group of parameters: None where numbers are sent as they are."""

    gather: Encoding | None
    reduce: Encoding | None

    @classmethod
    def of(cls, communication: Communication) -> Encodings:
        """The encodings that a user chose."""
        dtypes = communication.all_gather_dtype, communication.reduce_dtype
        gather, reduce = (_encoding(dtype, communication.block_size) for dtype in dtypes)
        return cls(gather, reduce)


def _encoding(dtype: torch.dtype | None, block_size: int) -> Encoding | None:
    if dtype is None:
        return None
    return BlockEncoding(dtype, block_size) if dtype.itemsize == 1 else CastEncoding(dtype)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
