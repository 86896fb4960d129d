"""Traces from the command line, of real runs on real ranks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.marks import in_long_runs

PROGRAM = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

dist.init_process_group("gloo")
model = FSDP(nn.Sequential(FSDP(nn.Linear(64, 64)), FSDP(nn.Linear(64, 64))))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(STEPS):
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.barrier()
dist.destroy_process_group()
"""


def fullshard_command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fullshard", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, cwd=folder)


def shown_on(page: Path) -> Any:
    embedded = re.search(r'id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert embedded is not None
    return json.loads(embedded[1])


def test_train_leaves_a_page_beside_its_checkpoints_that_compares_with_the_plan(
    tmp_path: Path,
) -> None:
    done = fullshard_command(
        tmp_path, "train", "--device", "cpu", "--ranks", "2", "--layers", "2", "--sample", "0",
        "--steps", "8", "--trace", "2",
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert "2 steps of " in done.stdout
    shown = shown_on(tmp_path / "runs/run-1/trace.html")
    assert [len(rank["steps"]) for rank in shown["ranks"]] == [2, 2]
    foretold = {name: (plan, measured) for name, plan, measured, _ in shown["comparison"]}
    plan, measured = foretold["peak memory"]
    assert 0.8 * plan < measured < 1.2 * plan
    assert list(foretold)[:2] == ["step", "peak memory"]
    assert min(foretold["step"]) > 0
    plan, measured = foretold["parameter shards"]
    assert abs(plan - measured) < 0.01 * plan
    assert json.loads((tmp_path / "runs/run-1/trace.json").read_text())["traceEvents"]


@in_long_runs
def test_a_run_that_ends_before_the_first_traced_step_says_so_and_is_saved(tmp_path: Path) -> None:
    done = fullshard_command(
        tmp_path, "train", "--device", "cpu", "--ranks", "1", "--layers", "1", "--sample", "0",
        "--steps", "2", "--trace", "2",
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert "no trace: step 5 of a run is the first that is traced" in done.stdout
    assert (tmp_path / "runs/run-1/checkpoints/step-00000002").exists()


@in_long_runs
def test_a_program_of_torchs_fsdp_is_traced_unchanged(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM.replace("STEPS", "8"))

    done = fullshard_command(
        tmp_path, "run", "--ranks", "2", "--trace", "out.html", "--trace-steps", "2", "train.py"
    )

    assert done.returncode == 0, done.stderr
    assert f"fullshard: trace of 2 steps in {tmp_path / 'out.html'}" in done.stderr
    shown = shown_on(tmp_path / "out.html")
    assert [len(rank["steps"]) for rank in shown["ranks"]] == [2, 2]
    assert len(shown["units"]) == 3


IN_PLACE = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
other = nn.Linear(2, 2)
others = torch.optim.SGD(other.parameters(), lr=0.1)
for _ in range(8):
    for _ in range(3):
        model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    other(torch.ones(2)).sum().backward()
    others.step()
dist.barrier()
dist.destroy_process_group()
"""


def test_a_program_of_torchs_fsdp2_that_accumulates_is_traced_unchanged(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(IN_PLACE)

    done = fullshard_command(
        tmp_path, "run", "--ranks", "2", "--trace", "out/trace.html", "--trace-steps", "2",
        "train.py",
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    shown = shown_on(tmp_path / "out/trace.html")
    for rank in shown["ranks"]:
        kinds = [shown["kinds"][kind] for kind, *_ in rank["compute"]]
        assert len(rank["steps"]) == 2
        assert kinds.count("optimizer") == 2
        assert min(moment[2] for moment in rank["memory"]) > 0  # AdamW's state is there


@in_long_runs
def test_a_program_that_ends_too_early_is_told_why_there_is_no_trace(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM.replace("STEPS", "5"))

    done = fullshard_command(tmp_path, "run", "--ranks", "2", "--trace", "out.html", "train.py")

    assert done.returncode == 0, done.stderr
    assert "ended before the forward that follows 7 optimizer steps" in done.stderr
    assert not (tmp_path / "out.html").exists()


def test_a_trace_of_no_known_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")

    done = fullshard_command(tmp_path, "run", "--trace", "out.txt", "train.py")

    assert done.returncode == 2
    assert ".html, .json, .png" in done.stderr


def test_steps_that_are_captured_cannot_be_traced(tmp_path: Path) -> None:
    done = fullshard_command(tmp_path, "train", "--device", "cpu", "--capture", "--trace", "2")

    assert done.returncode == 2
    assert "leave one of them out" in done.stderr
    assert not (tmp_path / "runs").exists()
