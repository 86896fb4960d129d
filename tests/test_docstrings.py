"""The examples in docstrings run, on one rank, and give what they say they give."""

from __future__ import annotations

import doctest
import importlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.original.training import Block, build
from tests.original.training import Net as Blocks
from torch import nn
from torch.distributed.algorithms.join import Join

import fullshard
import fullshard.compat
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import StateDictType
from fullshard.testing import device, ranks
from fullshard.wrap import ModuleWrapPolicy

SOURCE = Path(fullshard.__file__).parent
#: What needs several ranks, or ends the process.
NOT_RUN = {"fullshard.cli.launcher.launch.launch"}


def module_of(file: Path) -> str:
    parts = file.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = sorted(module_of(file) for file in SOURCE.rglob("*.py") if ">>> " in file.read_text())


class Net(Blocks):
    """The model of the examples: three blocks, and a method beside ``forward``."""

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)


@pytest.mark.parametrize("module_name", MODULES)
@ranks(1)
def test_examples_give_what_they_say(module_name: str, tmp_path: Path) -> None:
    if module_name == "fullshard.state.checkpoint.export":
        pytest.importorskip("safetensors")
    os.chdir(tmp_path)
    module = importlib.import_module(module_name)
    report: list[str] = []
    try:
        for examples in doctest.DocTestFinder(exclude_empty=True).find(module):
            if examples.examples:
                # What a program has before it comes to the line that the example shows.
                examples.globs = prepared_names() | examples.globs
                doctest.DocTestRunner().run(examples, out=report.append)
    finally:
        fullshard.compat.uninstall()

    assert not report, "".join(report)


@pytest.mark.parametrize("module_name", MODULES)
def test_only_examples_that_need_several_ranks_are_left_out(module_name: str) -> None:
    found = doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(module_name))
    left_out = {
        examples.name
        for examples in found
        if any(example.options.get(doctest.SKIP) for example in examples.examples)
    }

    assert left_out <= NOT_RUN


def prepared_names() -> dict[str, Any]:
    """A model in training, with checkpoints of it in the current folder."""
    model = FSDP(build(Net), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters())
    batches = [torch.ones(2, 5, device=device())] * 2
    for batch in batches:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    fullshard.save("checkpoints", model, optimizer, step=99)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        dcp.save({"optim": FSDP.optim_state_dict(model, optimizer)}, checkpoint_id="distributed")
    return {
        "Block": Block,
        "FSDP": FSDP,
        "FullyShardedDataParallel": FSDP,
        "Join": Join,
        "ModuleWrapPolicy": ModuleWrapPolicy,
        "Net": Net,
        "batches": batches,
        "dcp": dcp,
        "fullshard": fullshard,
        "loss": model(batches[0]).sum(),
        "model": model,
        "nn": nn,
        "optimizer": optimizer,
        "path": "distributed",
    } | {name: getattr(fullshard, name) for name in ("OptimStateKeyType", "StateDictType")}
