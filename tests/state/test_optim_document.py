"""The examples on optimizer state in docs/state.md run, one after another."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.original.training import Net, build
from tests.state.models import wrapped
from tests.state.optimizers import assert_same_optim_state, full_state, trained

import fullshard
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.testing import run_on_ranks

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "state.md"


def run_examples(text: str, path: Path) -> None:
    model = wrapped(build(Net), fullshard.ShardingStrategy.FULL_SHARD, "blocks")
    optimizer = torch.optim.AdamW(model.parameters())
    trained(model, optimizer, range(2))
    names = {name: getattr(fullshard, name) for name in fullshard.__all__}
    names |= {"FSDP": FSDP, "torch": torch, "dcp": dcp, "path": path, "bare": build(Net)}
    names |= {"model": model, "optimizer": optimizer}
    expected = full_state(model, optimizer)
    for example in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        exec(example, names)
        assert_same_optim_state(full_state(model, names["resumed"]), expected)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_examples_run_and_every_one_of_them_resumes(tmp_path: Path) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    section = text[text.index("## Optimizer state") :]
    assert section.count("```python") == 3
    run_on_ranks(2, run_examples, section, tmp_path / "checkpoint")
