"""A training step on two hosts with a slow link between them: fullshard against DDP and FSDP2.

    PYTHONPATH=src python3 benchmarks/slow_link.py --json slow_link.json
    PYTHONPATH=src python3 benchmarks/slow_link.py --rates 200mbit --ranks 4 --rows FSDP2 fullshard

The hosts are network namespaces of this machine, joined by a cable whose bandwidth ``tc`` limits;
building them takes root. Each has half of the ranks, over gloo, one thread per rank. A GPT of 3.6
million parameters, batch 2x64 on each rank, fp32, fused AdamW. Columns: "step ms", the median over
steps; "link MiB", what went through the cable in the busier direction, per step, counted by its
interface, headers and acknowledgements included. An all-gather of all parameters has to send half
of their bytes in each direction, and so has a reduce-scatter.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gpt
import torch
import torch.distributed as dist
from bars import at_most, judge, show_table, show_verdicts
from rows import Setting, Training

sys.path.append(str(Path(__file__).resolve().parent.parent))
from tests.cluster.hosts import INTERFACE, two_hosts, why_not

SIZE = gpt.Size(layers=4, width=256, batch=2, length=64, heads=4, vocabulary=1024)
LEAST = "fullshard int8, secondary shards"
ROWS = [
    "DDP",
    "FSDP2",
    "fullshard",
    "fullshard SHARD_GRAD_OP",
    "fullshard HYBRID_SHARD",
    "fullshard secondary shards",
    "fullshard int8 gather",
    "fullshard int8",
    LEAST,
]
COLUMNS = ["step ms", "x FSDP2", "link MiB"]
BARS = {
    4: (at_most(0.75, "FSDP2"),),
    2: (at_most(1.0, "FSDP2"),),
}
#: What is promised where the link decides.
BARS_OF_RATES = {("200mbit", 4): (at_most(1 / 2.5, "FSDP2", row=LEAST),)}
COUNTER = Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes")
PORT = 29611
MIB = 2**20


def train(row: str, steps: int, warmup: int, output: Path) -> None:
    """One rank of a row. The first rank of each host counts what its host sends."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = gpt.build(SIZE, torch.device("cpu"))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    batch = gpt.tokens(SIZE, torch.device("cpu"))
    training = Training(row, model, batch, Setting(gpt.Block, torch.float32, _groups(row)))
    for _ in range(warmup):
        training.step()
    times, sent = [], []
    for _ in range(steps):
        dist.barrier()
        before, began = _sent(), time.perf_counter()
        loss = training.step()
        times.append(1e3 * (time.perf_counter() - began))
        dist.barrier()
        sent.append((_sent() - before) / MIB)
    both = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(both, torch.tensor([statistics.median(sent)]))
    if dist.get_rank() == 0:
        answer = {
            "step ms": statistics.median(times),
            "link MiB": max(map(float, both)),
            "loss": float(loss),
            "parameters": parameters,
        }
        output.write_text(json.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()


def _groups(row: str) -> Any:
    if not row.endswith("HYBRID_SHARD"):
        return dist.group.WORLD
    size = dist.get_world_size()
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, size // 2))
    return mesh.get_group(1), mesh.get_group(0)


def _sent() -> int:
    return int(COUNTER.read_text())


def measure(row: str, rate: str, ranks: int, given: argparse.Namespace) -> dict[str, Any]:
    """A row on two hosts that are built for it."""
    with two_hosts() as hosts, tempfile.TemporaryDirectory() as folder:
        hosts.limit_bandwidth(rate)
        output = Path(folder) / "answer.json"
        words = ["--row", row, "--output", str(output)]
        words += ["--steps", str(given.steps), "--warmup", str(given.warmup)]
        processes = []
        for rank in range(ranks):
            host = [*hosts][rank * 2 // ranks]
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks // 2),
                "MASTER_ADDR": hosts.first.address,
                "MASTER_PORT": str(PORT),
                "GLOO_SOCKET_IFNAME": INTERFACE,
            }
            command = [sys.executable, __file__, *words]
            processes.append(host.start(command, environment, stderr=subprocess.PIPE))
        errors = [process.communicate(timeout=given.limit)[1] for process in processes]
        if not output.exists():
            return {"skipped": next((e.strip().splitlines()[-1] for e in errors if e), "no answer")}
        answer: dict[str, Any] = json.loads(output.read_text())
        return answer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", nargs="+", default=["200mbit", "1gbit"])
    parser.add_argument(
        "--ranks", nargs="+", type=int, default=[4, 2], help="on both hosts together"
    )
    parser.add_argument("--rows", nargs="+", default=ROWS)
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each row")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them")
    parser.add_argument("--limit", type=float, default=300, help="seconds for a row")
    parser.add_argument("--json", type=Path, help="write the results to this file, too")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.row is not None:
        train(given.row, given.steps, given.warmup, given.output)
        return
    reason = why_not()
    if reason is not None:
        sys.exit(f"error: {reason}")
    results = []
    for rate in given.rates:
        for ranks in given.ranks:
            table = {row: measure(row, rate, ranks, given) for row in given.rows}
            results.append({"rate": rate, "ranks": ranks, "rows": table})
            show(results[-1])
    if given.json is not None:
        facts = {"torch": torch.__version__, "cases": results}
        given.json.write_text(json.dumps(facts, indent=2) + "\n")


def show(case: dict[str, Any]) -> None:
    print(f"\n{case['rate']}, {case['ranks']} ranks on two hosts")
    measured = {row: dict(values) for row, values in case["rows"].items() if "step ms" in values}
    for values in measured.values():
        if "FSDP2" in measured:
            values["x FSDP2"] = values["step ms"] / measured["FSDP2"]["step ms"]
    if measured:
        show_table(COLUMNS, measured)
    for row, values in case["rows"].items():
        if "skipped" in values:
            print(f"{row}: not measured: {values['skipped']}")
    bars = BARS.get(case["ranks"], ()) + BARS_OF_RATES.get((case["rate"], case["ranks"]), ())
    show_verdicts(judge(bars, measured))


if __name__ == "__main__":
    main()
