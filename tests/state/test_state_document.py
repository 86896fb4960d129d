"""The examples in docs/state.md run, one after another."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.original.training import Net, build
from tests.state.models import assert_same_state, wrapped
from tests.state.optimizers import assert_same_optim_state, full_state, trained

import fullshard
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.testing import run_on_ranks

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "state.md"
OPTIMIZERS = "## Optimizer state"


def stage(**more: Any) -> dict[str, Any]:
    """The names that examples use: a model that was trained, and its optimizer."""
    model = wrapped(build(Net), fullshard.ShardingStrategy.FULL_SHARD, "blocks")
    optimizer = torch.optim.AdamW(model.parameters())
    trained(model, optimizer, range(2))
    names = {name: getattr(fullshard, name) for name in fullshard.__all__}
    names |= {"FSDP": FSDP, "torch": torch, "dcp": dcp}
    names["bare"] = build(Net)
    return {**names, "model": model, "optimizer": optimizer, **more}


def examples(text: str) -> list[str]:
    """The blocks that continue the page's model, which ``stage`` replaces by one with a history."""
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [block for block in blocks if block.startswith("# Continues ")]


def run_on_models(text: str, folder: Path) -> None:
    os.chdir(folder)
    names = stage()
    model, bare, optimizer = names["model"], names["bare"], names["optimizer"]
    names["schedule"] = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)
    bare.load_state_dict(model.state_dict())
    with torch.no_grad():
        bare.head.weight.mul_(0.5)
    optim_state = full_state(model, optimizer)

    for example in examples(text):
        exec(example, names)

    assert_same_state(model.state_dict(), dict(bare.state_dict()))
    assert_same_optim_state(full_state(model, optimizer), optim_state)
    assert names["width"] == bare.blocks[0].up.weight.shape[0]
    assert list(names["full"]) == (list(bare.state_dict()) if dist.get_rank() == 0 else [])
    assert names["path"].resolve() == folder / "checkpoints" / "step-00000100"
    assert names["first"] == 101
    assert sorted(file.name for file in names["path"].iterdir()) == [
        "manifest.json",
        "rank-00000.bin",
        "rank-00001.bin",
    ]
    assert [file.resolve() for file in names["files"]] == [
        folder / "exported" / "model.safetensors"
    ]


def run_on_optimizers(text: str, folder: Path) -> None:
    os.chdir(folder)
    names = stage(Net=Net)
    model, optimizer = names["model"], names["optimizer"]
    expected = full_state(model, optimizer)
    for example in examples(text):
        exec(example, names)
        assert_same_optim_state(full_state(model, names["resumed"]), expected)


def test_the_examples_on_models_and_checkpoints_run_and_lose_nothing(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    text = DOCUMENT.read_text(encoding="utf-8").partition(OPTIMIZERS)[0]
    assert len(examples(text)) == 4
    run_on_ranks(2, run_on_models, text, tmp_path)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_examples_on_optimizers_run_and_every_one_of_them_resumes(tmp_path: Path) -> None:
    text = DOCUMENT.read_text(encoding="utf-8").partition(OPTIMIZERS)[2]
    assert len(examples(text)) == 3
    run_on_ranks(2, run_on_optimizers, text, tmp_path)
