"""The Python blocks of docs/optimizers.md run, one after the other, on two ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.original.training import build
from torch import nn

from fullshard import FullyShardedDataParallel as FSDP
from fullshard.testing import device, ranks

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "optimizers.md"


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.up = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.attention:
            x = layer(x)
        return self.up(x)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


@ranks(2)
def test_the_blocks_of_the_document_run() -> None:
    pytest.importorskip("bitsandbytes")
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    model, bare = FSDP(build(Layers), use_orig_params=True), build(Layers)
    batches = [torch.ones(2, 5, device=device())] * 2
    matrices = {name: p for name, p in bare.named_parameters() if p.dim() == 2}
    yours: dict[str, Any] = {"model": model, "loss_of": loss_of, "batches": batches}
    first: Any = None

    for block in blocks:
        names = {**yours, "optimizer": first, "bare": bare, "matrices": matrices, "others": {}}
        exec(block, names)
        optimizer: Any = names["optimizer"]
        first = first or optimizer
        loss_of(model, batches[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if "muon" in names:
            assert list(names["muon"].state) == list(matrices.values())
    assert len(blocks) == 5
