"""The example for Ray Train: two workers train as one process does, and save."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.marks import in_long_runs

import fullshard

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "cluster" / "ray_train.py"
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="Ray is not installed: pip install 'fullshard[ray]'",
)


def losses_of_one_process(workers: int, steps: int) -> list[float]:
    """The same training without workers, shards or fullshard."""
    spec = importlib.util.spec_from_file_location("ray_train_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(example.Block() for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(1, steps + 1):
        batch = torch.cat([example.batch_of(step, rank) for rank in range(workers)])
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@in_long_runs
def test_two_workers_of_ray_train_as_one_process_and_save(tmp_path: Path) -> None:
    words = ["--folder", str(tmp_path), "--steps", "4", "--save-every", "2"]
    environment = {**os.environ, "RAY_DEDUP_LOGS": "0", "RAY_COLOR_PREFIX": "0"}
    # Ray's own processes are in the same session, and end with it if the test has to.
    started = subprocess.Popen(
        [sys.executable, str(EXAMPLE), *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = started.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        os.killpg(started.pid, signal.SIGKILL)
        pytest.fail(f"Ray has not ended: {started.communicate()[0]}")

    assert started.returncode == 0, said
    # Ray may show a line more than once.
    found = dict(re.findall(r"\bstep (\d+) loss (\d+\.\d+)$", said, re.M))
    assert list(found) == ["1", "2", "3", "4"], said
    expected = losses_of_one_process(2, 4)
    assert [float(loss) for loss in found.values()] == pytest.approx(expected, abs=2e-5)
    saved = fullshard.latest(tmp_path / "checkpoints")
    assert saved is not None
    assert saved.step == 4
