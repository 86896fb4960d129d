"""The block encodings in one pass over memory each, by Triton, on GPUs where Triton is installed.

The arithmetic is that of ``encodings.py``, with which the tests compare it; without a GPU they do
so in Triton's interpreter, which ``TRITON_INTERPRET=1`` turns on. Programs run on the device and
the stream that are current, which the engine sets to those of the tensors.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import warnings
from typing import Any

import torch

#: What kernels read and write; they compute in float32.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: How many numbers a program has: 16 for each of its threads, as many as a vector has codes.
_NUMBERS = 2048
#: The largest block that has a kernel: all of its numbers are in registers at the same time.
LARGEST_BLOCK = 8192
#: The first GPUs that convert to float8 (e4m3fn).
_CONVERTS_TO_FLOAT8 = (8, 9)


def serve(tensor: torch.Tensor, codes: torch.dtype, block: int) -> bool:
    """True if kernels encode and decode what is on the device of ``tensor``, in its dtype."""
    if tensor.dtype not in _DTYPES or block > LARGEST_BLOCK:
        return False
    if not tensor.is_cuda:
        # Triton's interpreter rounds to float8 in a way of its own.
        return codes is torch.int8 and _interprets() and _is_installed()
    return _run_on(tensor.device, codes)


def encode(
    rows: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, block: int, largest_code: float
) -> None:
    """Write the codes and scales of ``rows``."""
    sizes = _sizes(block)
    _compiled().encode[_programs(scales, sizes), rows.shape[0]](
        rows,
        codes,
        scales,
        rows.shape[1],
        rows.stride(0),
        codes.stride(0),
        scales.stride(0),
        LARGEST=largest_code,
        **sizes,
    )


def decode(codes: torch.Tensor, scales: torch.Tensor, rows: torch.Tensor, block: int) -> None:
    """Write the numbers that codes and scales stand for to ``rows``."""
    sizes = _sizes(block)
    _compiled().decode[_programs(scales, sizes), rows.shape[0]](
        codes,
        scales,
        rows,
        rows.shape[1],
        codes.stride(0),
        scales.stride(0),
        rows.stride(0),
        **sizes,
    )


def add(codes: torch.Tensor, scales: torch.Tensor, total: torch.Tensor, block: int) -> None:
    """Add what all rows stand for to ``total``, which is read and written once."""
    sizes = _sizes(block)
    _compiled().add[_programs(scales, sizes),](
        codes,
        scales,
        total,
        total.numel(),
        codes.stride(0),
        scales.stride(0),
        # A constant, as Triton 3.6 cannot interpret a loop over another number with numpy 2.4.
        COUNT=codes.shape[0],
        **sizes,
    )


@functools.cache
def _sizes(block: int) -> dict[str, int]:
    """The constants of the programs for blocks of this size: see the note in the programs."""
    width = 1 << (block - 1).bit_length()
    return {"BLOCK": block, "WIDTH": width, "BLOCKS": max(1, _NUMBERS // width)}


def _programs(scales: torch.Tensor, sizes: dict[str, int]) -> int:
    return -(-scales.shape[1] // sizes["BLOCKS"])


@functools.cache
def _run_on(device: torch.device, codes: torch.dtype) -> bool:
    """True if Triton is installed and makes programs here: it needs a C compiler, too."""
    if not _is_installed() or (codes is not torch.int8 and not _has_float8(device)):
        return False
    numbers, coded, scales = torch.zeros(3, 1, 16, device=device)
    try:
        # Which imports Triton first: that may fail as well, if it was built for another machine.
        encode(numbers, coded.to(codes), scales[:, :1], 16, 1.0)
    except Exception as error:
        warnings.warn(
            f"{codes} is encoded by torch's operations, in several passes over memory: Triton is "
            f"installed, but cannot make its programs here: {error}",
            stacklevel=2,
        )
        return False
    return True


def _has_float8(device: torch.device) -> bool:
    # AMD's GPUs, which torch calls by the same name, have other codes.
    nvidia = torch.version.hip is None
    return nvidia and torch.cuda.get_device_capability(device) >= _CONVERTS_TO_FLOAT8


@functools.cache
def _interprets() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _compiled() -> Any:
    """The module with the kernels, which imports Triton."""
    return importlib.import_module(".triton_kernels", __package__)
