"""Memory that an operation takes on a GPU while it runs, beside what it returns.

Only of operations whose scratch is as large as what they work on. Found by watching torch's
allocator around every operation of a training step on an H200.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["scratch_bytes"]

_SUM = torch.ops.aten.sum.dim_IntList
#: What torch's kernel for sums down the columns works with: columns and rows of a block, rows that
#: a thread adds up at least and, before blocks share a column, at most; blocks that a GPU of 132
#: multiprocessors has room for.
_COLUMNS, _ROWS, _LEAST, _MOST, _BLOCKS = 128, 4, 16, 256, 2112
_FLOAT = 4


def scratch_bytes(function: Any, arguments: Sequence[Any]) -> int:
    """Bytes that a call of ``function`` takes on a GPU until it is over."""
    if function is _SUM:
        given, dimensions = arguments[:2]
        return _of_column_sums(*given.shape) if given.dim() == 2 and dimensions == [0] else 0
    if function.__name__.startswith("_scaled_dot_product_") and "_backward" in function.__name__:
        # The query's gradient in full precision, and a number for each of its rows.
        query = arguments[1]
        return _FLOAT * (query.numel() + query.numel() // query.shape[-1])
    return 0


def _of_column_sums(rows: int, columns: int) -> int:
    """What is summed by several blocks, one below the other; the gradients of biases are."""
    each = -(-rows // _ROWS)
    beside = -(-columns // _COLUMNS)
    if each < _MOST or beside > _BLOCKS:
        return 0
    blocks = max(min(-(-_BLOCKS // beside), -(-each // _LEAST)), -(-each // _MOST))
    # A block has a place for each of its columns in the row of every column.
    return _FLOAT * columns * _COLUMNS * blocks if blocks > 1 else 0
