"""Bytes that a step sends, counted at the process groups of four ranks.

    PYTHONPATH=src python3 benchmarks/bytes_sent.py --json bytes_sent.json

A GPT of 3.7 million parameters computes, and is reduced, in bf16; blocks, the embedding of tokens
and the head are units, and none stays unsharded between forward and backward. Columns, per step and
rank, and as parts of the first row: what a rank receives (and so sends) where all are on one host;
and what comes from the other host where each two share one, which differ in name only. Secondary
shards are those of two ranks.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

import gpt
import torch
import torch.distributed as dist
from bars import at_most, judge, show_table, show_verdicts

from fullshard import Communication, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from fullshard.testing import run_on_ranks
from fullshard.wrap import lambda_auto_wrap_policy

sys.path.append(str(Path(__file__).resolve().parent.parent))
from tests.engine.traffic import counted_bytes

SIZE = gpt.Size(layers=4, width=256, batch=2, length=64, heads=4, vocabulary=1024)
MIB = 2**20
INT8 = {"all_gather_dtype": torch.int8, "reduce_dtype": torch.int8}
ROWS: dict[str, dict[str, Any]] = {
    "FULL_SHARD in bf16": {},
    "int8 all-gather": {"all_gather_dtype": torch.int8},
    "int8 both": INT8,
    "secondary shards": {"secondary_shards": 2},
    "int8 both, secondary shards": {**INT8, "secondary_shards": 2},
}
COLUMNS = ["MiB", "x", "MiB between hosts", "x between hosts"]
FIRST = "FULL_SHARD in bf16"
BARS = (
    at_most(0.68, FIRST, column="MiB", row="int8 all-gather"),
    at_most(0.52, FIRST, column="MiB", row="int8 both"),
    at_most(0.36, FIRST, column="MiB between hosts", row="int8 both, secondary shards"),
)


def count(options: dict[str, Any], hosts: int) -> float:
    """MiB that one rank of a row receives: all of them, or with several hosts those from others."""
    os.environ["FULLSHARD_HOST_ID"] = f"host {dist.get_rank() * hosts // 4}"
    group: Any = dist.new_group(range(4))
    plain = gpt.build(SIZE, torch.device("cpu"))
    units = {*plain.blocks, plain.tokens, plain.head}
    model = FullyShardedDataParallel(
        plain,
        group,
        ShardingStrategy.FULL_SHARD,
        auto_wrap_policy=functools.partial(lambda_auto_wrap_policy, lambda_fn=units.__contains__),
        mixed_precision=MixedPrecision(torch.bfloat16, torch.bfloat16),
        backward_prefetch=None,
        use_orig_params=True,
        communication=Communication(**options) if options else None,
    )
    batch = gpt.tokens(SIZE, torch.device("cpu"))
    for _ in range(2):
        model(batch).backward()
    with counted_bytes() as received:
        model(batch).backward()
    # With several hosts, the group of all ranks connects each rank with other hosts only.
    return (received.total if hosts == 1 else received.by_group_size[4]) / MIB


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the results to this file, too")
    given = parser.parse_args()
    table = {
        row: {
            "MiB": run_on_ranks(4, count, options, 1)[0],
            "MiB between hosts": run_on_ranks(4, count, options, 2)[0],
        }
        for row, options in ROWS.items()
    }
    first = dict(table[FIRST])
    for values in table.values():
        values["x"] = values["MiB"] / first["MiB"]
        values["x between hosts"] = values["MiB between hosts"] / first["MiB between hosts"]
    show_table(COLUMNS, table)
    show_verdicts(judge(BARS, table))
    if given.json is not None:
        given.json.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
