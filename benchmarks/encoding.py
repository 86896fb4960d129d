"""What it costs to encode, decode and add up numbers, beside a plain copy of them.

    PYTHONPATH=src python3 benchmarks/encoding.py --mebi 16
    PYTHONPATH=src python3 benchmarks/encoding.py --device cuda --mebi 256

Columns: milliseconds for so many mebi-elements of ``--dtype``. "encode" and "decode" are of one
row; "add" decodes ``--ranks`` rows of which each has its part, and adds them up in float32. "copy"
reads and writes the numbers once. With ``--operations``, torch's operations also where there are
kernels.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from bars import show_table

from fullshard.engine.encoding import kernels
from fullshard.engine.encoding.encodings import BlockEncoding, CastEncoding, Encoding

ENCODINGS: dict[str, Encoding] = {
    "int8": BlockEncoding(torch.int8, 256),
    "float8": BlockEncoding(torch.float8_e4m3fn, 256),
    "bfloat16": CastEncoding(torch.bfloat16),
}
COLUMNS = ["encode ms", "decode ms", "add ms", "copy ms"]


def milliseconds(work: Callable[[], object], repeats: int, device: str) -> float:
    """The median time of ``work``."""
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times[1:])


def measure(encoding: Encoding, given: argparse.Namespace) -> dict[str, float]:
    numel = int(given.mebi * 2**20)
    rows = torch.randn(1, numel, device=given.device).to(getattr(torch, given.dtype))
    encoded = rows.new_empty(1, encoding.nbytes(numel), dtype=torch.uint8)
    part = numel // given.ranks
    parts = rows.new_empty(given.ranks, encoding.nbytes(part), dtype=torch.uint8)
    encoding.encode(rows[:, : part * given.ranks].view(given.ranks, part), parts)
    total, other = torch.zeros(part, device=given.device), torch.empty_like(rows)
    works = {
        "encode ms": lambda: encoding.encode(rows, encoded),
        "decode ms": lambda: encoding.decode(encoded, other),
        "add ms": lambda: encoding.add(parts, total),
        "copy ms": lambda: other.copy_(rows),
    }
    return {name: milliseconds(work, given.repeats, given.device) for name, work in works.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--mebi", type=float, default=4, help="elements, in 2^20")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--operations", action="store_true", help="do not use kernels")
    parser.add_argument("--json", type=Path, help="write the results to this file, too")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.operations:
        kernels.serve = lambda *_: False
    table = {name: measure(encoding, given) for name, encoding in ENCODINGS.items()}
    show_table(COLUMNS, table)
    if given.json is not None:
        given.json.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
