"""The encodings of numbers for the wire: what comes back, and how far off it may be."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fullshard.engine.encoding import kernels
from fullshard.engine.encoding.encodings import BlockEncoding, CastEncoding, Encoding
from fullshard.testing import device

EIGHT_BITS = (torch.int8, torch.float8_e4m3fn)
sizes = st.integers(1, 700)
blocks = st.sampled_from([16, 48, 64, 256])
scales = st.floats(1e-30, 1e30)
seeds = st.integers(0, 1000)


def _numbers(rows: int, numel: int, scale: float, seed: int) -> torch.Tensor:
    """Numbers of very different sizes, side by side."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.empty(rows, numel).log_normal_(0, 2, generator=generator)
    signs = torch.randn(rows, numel, generator=generator).sign()
    return (scale * sizes * signs).clamp(-3e38, 3e38).to(device())


def _round_trip(encoding: Encoding, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    nbytes = encoding.nbytes(rows.shape[1])
    encoded = torch.full((len(rows), nbytes), 255, dtype=torch.uint8, device=rows.device)
    encoding.encode(rows, encoded)
    decoded = torch.full_like(rows, math.nan, dtype=dtype)
    encoding.decode(encoded, decoded)
    return decoded


def _largest_of_blocks(rows: torch.Tensor, block: int) -> torch.Tensor:
    """For each number, the largest absolute value of its block."""
    parts = [
        part.abs().max(1, keepdim=True).values.expand_as(part) for part in rows.split(block, 1)
    ]
    return torch.cat(parts, 1)


@given(sizes, blocks, scales, seeds)
def test_int8_is_off_by_half_a_step_at_most(
    numel: int, block: int, scale: float, seed: int
) -> None:
    rows = _numbers(2, numel, scale, seed)

    decoded = _round_trip(BlockEncoding(torch.int8, block), rows, torch.float32)

    largest = _largest_of_blocks(rows, block).double()
    # Half of a 127th; and what float32 rounds off the scale, the quotient and the product.
    bound = largest * (1 / 254 + 2**-20)
    assert bool(((decoded.double() - rows.double()).abs() <= bound).all())


@given(sizes, blocks, scales, seeds)
def test_float8_is_off_by_a_sixteenth_at_most(
    numel: int, block: int, scale: float, seed: int
) -> None:
    rows = _numbers(2, numel, scale, seed)

    decoded = _round_trip(BlockEncoding(torch.float8_e4m3fn, block), rows, torch.float32)

    largest = _largest_of_blocks(rows, block).double()
    # Four significant bits; the smallest code is 2^-9, of 448.
    bound = torch.maximum(rows.double().abs() / 16, largest / 448 / 2**10) + largest * 2**-20
    assert bool(((decoded.double() - rows.double()).abs() <= bound).all())


@given(sizes, seeds)
def test_bfloat16_is_a_cast(numel: int, seed: int) -> None:
    rows = _numbers(3, numel, 1.0, seed)

    decoded = _round_trip(CastEncoding(torch.bfloat16), rows, torch.float32)

    assert torch.equal(decoded, rows.bfloat16().float())


@pytest.mark.parametrize("dtype", EIGHT_BITS)
@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float16, torch.float64])
def test_what_comes_back_is_rounded_once_to_the_dtype_of_its_place(
    dtype: torch.dtype, kept: torch.dtype
) -> None:
    encoding, rows = BlockEncoding(dtype, 64), _numbers(2, 1000, 1e-2, 0)

    found = _round_trip(encoding, rows, kept)

    exact = _round_trip(encoding, rows, torch.float64)
    expected = exact.to(kept)
    # The product of a code and a scale is rounded to float32 first, unless it is kept in float64.
    assert bool(((found.double() - expected.double()).abs() <= 2**-7 * exact.abs()).all())
    if kept is torch.float64:
        assert bool(((found - rows).abs() <= _largest_of_blocks(rows, 64).double() / 15).all())


@pytest.mark.parametrize("dtype", EIGHT_BITS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_come_back_as_something_that_is_not_finite(
    dtype: torch.dtype, bad: float
) -> None:
    rows = torch.ones(2, 300, device=device())
    rows[1, 70] = bad

    decoded = _round_trip(BlockEncoding(dtype, 64), rows, torch.float32)

    finite = decoded.isfinite()
    assert not finite[1, 70]
    # The other blocks do not know of it.
    assert bool(finite[0].all())
    assert bool(finite[1, :64].all())
    assert bool(finite[1, 128:].all())


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_zeros_and_the_smallest_numbers_come_back_as_zeros(dtype: torch.dtype) -> None:
    rows = torch.tensor([[0.0] * 16, [1e-44] * 16], device=device())

    decoded = _round_trip(BlockEncoding(dtype, 16), rows, torch.float32)

    assert torch.equal(decoded, torch.zeros_like(rows))


@given(sizes, blocks, seeds, st.integers(1, 4), st.sampled_from(EIGHT_BITS))
def test_a_sum_is_that_of_what_comes_back(
    numel: int, block: int, seed: int, count: int, dtype: torch.dtype
) -> None:
    encoding, rows = BlockEncoding(dtype, block), _numbers(count, numel, 1.0, seed)
    encoded = torch.empty(count, encoding.nbytes(numel), dtype=torch.uint8, device=rows.device)
    encoding.encode(rows, encoded)
    total = _numbers(1, numel, 1.0, seed + 1)[0]
    expected = total.double() + _round_trip(encoding, rows, torch.float64).sum(0)

    encoding.add(encoded, total)

    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-5)


@given(st.integers(1, 100_000), st.sampled_from([128, 256, 1024]))
def test_bytes_are_one_for_each_number_and_four_for_each_block(numel: int, block: int) -> None:
    nbytes = BlockEncoding(torch.int8, block).nbytes(numel)

    assert 0 <= nbytes - (numel + 4 * -(-numel // block)) < 32
    assert nbytes % 16 == 0


def _kernels_serve(dtype: torch.dtype) -> bool:
    """Whether there are kernels here: on a GPU, or on a host with ``TRITON_INTERPRET=1``."""
    return kernels.serve(torch.empty(0, device=device()), dtype, 256)


@pytest.mark.parametrize("dtype", EIGHT_BITS)
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("numel", "block"), [(1, 16), (1000, 48), (4096, 256), (100_003, 256), (5000, 1000)]
)
def test_kernels_compute_what_torchs_operations_do(
    dtype: torch.dtype, kept: torch.dtype, numel: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not _kernels_serve(dtype):
        pytest.skip("needs Triton, and a GPU or TRITON_INTERPRET=1")
    encoding, rows = BlockEncoding(dtype, block), _numbers(3, numel, 1.0, 0).to(kept)
    if numel > 300:
        rows[1, 70], rows[2, 170], rows[2, 300] = math.nan, math.inf, -math.inf
        # Blocks of zeros, of halves between codes, and of what has no inverse.
        rows[0, : 2 * block] = 0.0
        rows[0, 2 * block : 3 * block] = torch.arange(block, device=rows.device) % 16 + 0.5
        rows[0, 2 * block] = encoding.largest_code
        rows[1, 2 * block : 3 * block] = 1e-44
    total = torch.zeros(numel, device=rows.device)
    encoded = torch.empty(3, encoding.nbytes(numel), dtype=torch.uint8, device=rows.device)
    encoding.encode(rows, encoded)
    by_kernels = _round_trip(encoding, rows, kept)
    encoding.add(encoded, total)

    monkeypatch.setattr(kernels, "serve", lambda *_: False)
    encoded_by_operations = torch.empty_like(encoded)
    encoding.encode(rows, encoded_by_operations)
    by_operations = _round_trip(encoding, rows, kept)
    expected = torch.zeros_like(total)
    encoding.add(encoded_by_operations, expected)

    scales, others = (encoding.scales_of(e, numel) for e in (encoded, encoded_by_operations))
    torch.testing.assert_close(scales, others, rtol=0, atol=0, equal_nan=True)
    # A quotient may be rounded to the next code where it lies between two.
    steps = _largest_of_blocks(rows, block) / (120 if dtype is torch.int8 else 14)
    finite = by_operations.isfinite()
    assert torch.equal(finite, by_kernels.isfinite())
    off = (by_kernels.float() - by_operations.float()).abs()
    assert bool((off[finite] <= steps[finite]).all())
    rounding = torch.finfo(kept).eps * by_operations.float().abs()
    assert (off[finite] > rounding[finite]).float().mean() < 0.01
    assert torch.equal(total.isfinite(), expected.isfinite())


def test_a_triton_that_cannot_be_imported_leaves_it_to_torchs_operations(tmp_path: Path) -> None:
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("raise OSError('not built for this machine')")
    program = (
        "import torch; from fullshard.engine.encoding import kernels; "
        "print(kernels._run_on(torch.device('cpu'), torch.int8))"
    )

    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.stdout == "False\n", done.stderr
    assert "cannot make its programs here: not built for this machine" in done.stderr


@pytest.mark.parametrize("dtype", EIGHT_BITS)
@pytest.mark.parametrize(("numel", "block"), [(20_000, 10_000), (100, 10**9)])
def test_blocks_of_any_size_are_encoded(dtype: torch.dtype, numel: int, block: int) -> None:
    rows = _numbers(2, numel, 1.0, 3)

    decoded = _round_trip(BlockEncoding(dtype, block), rows, torch.float32)

    largest = _largest_of_blocks(rows, block)
    part = 1 / 254 if dtype is torch.int8 else 1 / 16
    assert bool(((decoded - rows).abs() <= largest * (part + 2**-20)).all())
