"""Triton programs of the block encodings; imported by ``kernels.py``, where Triton is.

Note: several blocks in a program
    A program has ``BLOCKS`` blocks, side by side, each in ``WIDTH`` places: the power of two that
    covers it. So a warp has whole blocks, finds their largest number without the other warps, and
    loads and stores as much at a time as it can.
"""

# mypy: ignore-errors
# Triton compiles these functions from their source, and their arguments are no Python values.

from __future__ import annotations

import triton
import triton.language as tl

#: The smallest normal float32: scales below it are taken for zero, as their inverse overflows.
_TINY = tl.constexpr(1.1754943508222875e-38)
#: Added to a number below 2^22 and taken away again, leaves the nearest whole one, halves to even.
_NO_FRACTION = tl.constexpr(12582912.0)


@triton.jit
def _larger(first, second):
    """The larger number, or NaN if one of them is."""
    return tl.maximum(first, second, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _places(numel, BLOCK: tl.constexpr, WIDTH: tl.constexpr, BLOCKS: tl.constexpr):
    """This program's blocks, and which of them there are; then the same of their numbers."""
    blocks = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = tl.arange(0, WIDTH)[None, :]
    at = blocks[:, None] * BLOCK + inside
    used = at < numel
    if WIDTH != BLOCK:
        used = used & (inside < BLOCK)
    return blocks, blocks * BLOCK < numel, at, used


@triton.jit
def encode(
    rows,
    codes,
    scales,
    numel,
    rows_stride,
    codes_stride,
    scales_stride,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Write the codes and the scales of blocks."""
    blocks, there, at, used = _places(numel, BLOCK, WIDTH, BLOCKS)
    row = tl.program_id(1).to(tl.int64)
    values = tl.load(rows + row * rows_stride + at, mask=used, other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.reduce(tl.abs(values), 1, _larger), LARGEST)
    # Not a NaN, which is not smaller than anything.
    scale = tl.where(scale < _TINY, 0.0, scale)
    inverse = tl.where(scale == 0.0, 0.0, tl.div_rn(1.0, scale))
    scaled = values * inverse[:, None]
    if codes.dtype.element_ty == tl.int8:
        scaled = (scaled + _NO_FRACTION) - _NO_FRACTION
    encoded = scaled.to(codes.dtype.element_ty)
    tl.store(codes + row * codes_stride + at, encoded, mask=used)
    tl.store(scales + row * scales_stride + blocks, scale, mask=there)


@triton.jit
def decode(
    codes,
    scales,
    rows,
    numel,
    codes_stride,
    scales_stride,
    rows_stride,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Write the numbers of blocks."""
    blocks, there, at, used = _places(numel, BLOCK, WIDTH, BLOCKS)
    row = tl.program_id(1).to(tl.int64)
    scale = tl.load(scales + row * scales_stride + blocks, mask=there, other=0.0)
    values = tl.load(codes + row * codes_stride + at, mask=used).to(tl.float32) * scale[:, None]
    tl.store(rows + row * rows_stride + at, values.to(rows.dtype.element_ty), mask=used)


@triton.jit
def add(
    codes,
    scales,
    total,
    numel,
    codes_stride,
    scales_stride,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Add the numbers of blocks, of all ``COUNT`` rows, to the total."""
    blocks, there, at, used = _places(numel, BLOCK, WIDTH, BLOCKS)
    sums = tl.load(total + at, mask=used, other=0.0).to(tl.float32)
    for index in range(COUNT):
        row = tl.cast(index, tl.int64)
        scale = tl.load(scales + row * scales_stride + blocks, mask=there, other=0.0)
        values = tl.load(codes + row * codes_stride + at, mask=used)
        sums += values.to(tl.float32) * scale[:, None]
    tl.store(total + at, sums.to(total.dtype.element_ty), mask=used)
