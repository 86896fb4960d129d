"""Ranks of a script: what it defines is known to them, to processes they start, and on return."""

from pathlib import Path

from tests.testing.processes import MarkedProcess

SCRIPT = """
import multiprocessing
from dataclasses import dataclass

import torch.distributed as dist

from fullshard.testing import run_on_ranks


@dataclass(frozen=True)
class Place:
    rank: int


def place():
    return Place(dist.get_rank())


def told_by_a_process(method):
    context = multiprocessing.get_context(method)
    with context.Pool(1) as pool:
        return pool.apply(Place, (dist.get_rank() + 10,))


if __name__ == "__main__":
    print(run_on_ranks(2, place))
    print(run_on_ranks(2, told_by_a_process, "spawn"))
    print(run_on_ranks(2, told_by_a_process, "fork"))
"""


def test_a_scripts_own_class_travels_between_it_its_ranks_and_their_processes(
    tmp_path: Path,
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)

    session = MarkedProcess(["script.py"], tmp_path)
    output = session.finish()

    assert session.process.returncode == 0, output
    lines = output.splitlines()
    assert lines.count("[Place(rank=0), Place(rank=1)]") == 1
    assert lines.count("[Place(rank=10), Place(rank=11)]") == 2
