"""The block encoding of int8 in one pass over memory, by Triton, on GPUs where Triton is installed.

The arithmetic is that of ``encodings.py``, with which the tests compare it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

import torch

#: What kernels read and write; they compute in float32.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def serve(tensor: torch.Tensor) -> bool:
    """True if kernels are used for tensors on the device of ``tensor``."""
    return tensor.is_cuda and tensor.dtype in _DTYPES and _compiled() is not None


def encode(rows: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, block: int) -> None:
    """Write the codes and scales of ``rows``: one program for each block."""
    kernels, numel = _compiled(), rows.shape[1]
    kernels.encode[scales.shape[1], rows.shape[0]](
        rows,
        codes,
        scales,
        numel,
        rows.stride(0),
        codes.stride(0),
        scales.stride(0),
        BLOCK=block,
        WIDTH=_width(block),
    )


def decode(codes: torch.Tensor, scales: torch.Tensor, rows: torch.Tensor, block: int) -> None:
    """Decode codes and scales into ``rows``."""
    kernels, numel = _compiled(), rows.shape[1]
    kernels.decode[scales.shape[1], rows.shape[0]](
        codes,
        scales,
        rows,
        numel,
        codes.stride(0),
        scales.stride(0),
        rows.stride(0),
        BLOCK=block,
        WIDTH=_width(block),
    )


def add(codes: torch.Tensor, scales: torch.Tensor, total: torch.Tensor, block: int) -> None:
    """Decode all rows and add them to ``total``, which is read and written once."""
    kernels = _compiled()
    kernels.add[scales.shape[1],](
        codes,
        scales,
        total,
        total.numel(),
        codes.shape[0],
        codes.stride(0),
        scales.stride(0),
        BLOCK=block,
        WIDTH=_width(block),
    )


def _width(block: int) -> int:
    """A power of two that covers a block, as Triton wants it."""
    return 1 << (block - 1).bit_length()


@functools.cache
def _compiled() -> Any:
    """The module with the kernels, or None without Triton."""
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module(".triton_kernels", __package__)
