"""Triton programs of the block encoding of int8; imported by ``kernels.py``, where Triton is."""

# mypy: ignore-errors
# Triton compiles these functions from their source, and their arguments are no Python values.

from __future__ import annotations

import triton
import triton.language as tl

#: The smallest normal float32: scales below it are taken for zero, as their inverse overflows.
_TINY = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def encode(
    rows,
    codes,
    scales,
    numel,
    rows_stride,
    codes_stride,
    scales_stride,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write the codes and the scale of one block."""
    block = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    inside = tl.arange(0, WIDTH)
    at = block * BLOCK + inside
    used = (inside < BLOCK) & (at < numel)
    values = tl.load(rows + row * rows_stride + at, mask=used, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(values), axis=0)
    # A maximum may leave NaN out; a sum does not.
    nan = tl.sum(tl.where(values != values, 1, 0), axis=0) > 0
    scale = tl.where(nan, float("nan"), largest / 127.0)
    scale = tl.where(scale < _TINY, 0.0, scale)
    inverse = tl.where(scale == 0.0, 0.0, 1.0 / scale)
    # To the nearest, halves to even: adding and taking away 1.5 * 2^23 leaves no fraction.
    rounded = (values * inverse + 12582912.0) - 12582912.0
    tl.store(codes + row * codes_stride + at, rounded.to(tl.int8), mask=used)
    tl.store(scales + row * scales_stride + block, scale)


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
):
    """Write the numbers of one block."""
    block = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    inside = tl.arange(0, WIDTH)
    at = block * BLOCK + inside
    used = (inside < BLOCK) & (at < numel)
    values = tl.load(codes + row * codes_stride + at, mask=used, other=0.0).to(tl.float32)
    scale = tl.load(scales + row * scales_stride + block)
    tl.store(rows + row * rows_stride + at, (values * scale).to(rows.dtype.element_ty), mask=used)


@triton.jit
def add(
    codes,
    scales,
    total,
    numel,
    count,
    codes_stride,
    scales_stride,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Add the numbers of one block, of all rows, to the total."""
    block = tl.program_id(0).to(tl.int64)
    inside = tl.arange(0, WIDTH)
    at = block * BLOCK + inside
    used = (inside < BLOCK) & (at < numel)
    sums = tl.load(total + at, mask=used, other=0.0).to(tl.float32)
    for row in range(count):
        first = tl.cast(row, tl.int64)
        values = tl.load(codes + first * codes_stride + at, mask=used, other=0.0).to(tl.float32)
        sums += values * tl.load(scales + first * scales_stride + block)
    tl.store(total + at, sums.to(total.dtype.element_ty), mask=used)
