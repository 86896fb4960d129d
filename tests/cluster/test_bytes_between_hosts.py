"""Collectives of four ranks on two hosts, counted at the cable between the hosts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.cluster.hosts import INTERFACE, two_hosts, why_not

from fullshard.engine.comm.collectives import group_for

_REASON = why_not()
pytestmark = pytest.mark.skipif(_REASON is not None, reason=str(_REASON))

#: A rank's piece has 4 bytes times this; large enough that headers and barriers do not count.
NUMEL = 500_000
REPEATS = 4
PORT = 29621


def _run(output: Path) -> None:
    """One rank: does each collective a few times, and counts what its host sends."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    group = group_for(dist.group.WORLD, torch.device("cpu"))
    piece, full = torch.ones(NUMEL), torch.ones(size * NUMEL)
    gathered, reduced = torch.empty(size * NUMEL), torch.empty(NUMEL)
    collectives = {
        "all-gather": lambda: group.wait(*group.gather([gathered], [piece], "unit")),
        "reduce-scatter": lambda: group.start_reduce_scatter(reduced, full.clone(), "unit")(),
        "all-reduce": lambda: group.all_reduce(full.clone(), "unit"),
        "broadcast": lambda: group.broadcast([piece], "unit"),
    }
    sent = {}
    for name, run in collectives.items():
        run()
        dist.barrier()
        before = _sent()
        for _ in range(REPEATS):
            run()
        dist.barrier()
        sent[name] = (_sent() - before) / REPEATS / (4 * NUMEL)
    everywhere: list[dict[str, float]] = [{} for _ in range(size)]
    dist.all_gather_object(everywhere, sent)
    if rank == 0:
        output.write_text(json.dumps([everywhere[0], everywhere[-1]]))
    dist.barrier()
    dist.destroy_process_group()


def _sent() -> int:
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


def test_every_collective_sends_each_byte_through_the_cable_once(tmp_path: Path) -> None:
    output = tmp_path / "sent.json"
    with two_hosts() as hosts:
        processes = []
        for rank in range(4):
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": "4",
                "MASTER_ADDR": hosts.first.address,
                "MASTER_PORT": str(PORT),
                "GLOO_SOCKET_IFNAME": INTERFACE,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": ":".join(sys.path),
            }
            command = [sys.executable, __file__, str(output)]
            processes.append(
                [*hosts][rank // 2].start(command, environment, stderr=subprocess.PIPE)
            )
        errors = [process.communicate(timeout=240)[1] for process in processes]
    assert output.exists(), "\n".join(errors)
    first, second = json.loads(output.read_text())

    # In pieces of a rank: two of four are there and two here; what is summed crosses as a sum.
    for sent in (first, second):
        assert sent["all-gather"] == pytest.approx(2, rel=0.05)
        assert sent["reduce-scatter"] == pytest.approx(2, rel=0.05)
        assert sent["all-reduce"] == pytest.approx(4, rel=0.05)
    assert first["broadcast"] == pytest.approx(1, rel=0.05)
    # What goes back are acknowledgements.
    assert second["broadcast"] < 0.05


if __name__ == "__main__":
    _run(Path(sys.argv[1]))
