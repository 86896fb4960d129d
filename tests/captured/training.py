"""A small model, its data, and the ways to train it: eagerly, and as a CUDA graph."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fullshard.testing import device

#: NCCL ranks on GPUs: gloo's collectives wait on the host, and there is nothing to capture.
over_nccl = pytest.mark.skipif(
    os.environ.get("FULLSHARD_TEST_BACKEND") != "nccl",
    reason="CUDA graphs need NCCL: --device cuda --backend nccl",
)

#: Steps where bits are compared for long, and for others.
LONG = 50
STEPS = 20
WARM_UP = 3
#: Seconds that a test may take: ranks that share a GPU talk by sockets.
PATIENCE = 400.0

Step = Callable[[torch.Tensor], torch.Tensor]


class Block(nn.Module):
    """Odd sizes: no shard boundary falls on a parameter's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width + 1), nn.Linear(3 * width + 1, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Returns its loss."""

    def __init__(self, width: int = 33, layers: int = 2, recomputes: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 7)
        self.dropout = nn.Dropout(0.1)
        self.unused = nn.Linear(3, 3)
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.recomputes:
                # A capture cannot ask for the state of random numbers.
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x)
        return self.head(self.dropout(x)).float().square().mean()


def make_model(**arguments: Any) -> Model:
    """A model with the same values on every rank and at every call."""
    torch.manual_seed(7)
    model = Model(**arguments).to(device())
    torch.cuda.manual_seed(11 + dist.get_rank())
    return model


def batches(count: int = LONG, rows: int = 4) -> list[torch.Tensor]:
    """Other data at every step and on every rank."""
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    return [torch.randn(rows, 33, generator=generator).to(device()) for _ in range(count)]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(parameters, lr=0.01, fused=True, capturable=True)


def whole_step(
    model: Any, optimizer: torch.optim.Optimizer, clip: Callable[[], object] | None = None
) -> Step:
    def step(batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(batch)
        loss.backward()
        if clip is not None:
            clip()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def train_eagerly(step: Step, data: Sequence[torch.Tensor]) -> list[float]:
    return [step(batch).item() for batch in data]


def train_by_graph(
    step: Step,
    data: Sequence[torch.Tensor],
    between: Callable[[int], object] | None = None,
    after_replay: Callable[[], object] | None = None,
) -> list[float]:
    """The first steps eagerly on a side stream, the others as replays of one graph.

    ``after_replay`` does, after each step, what is not in the graph.
    """
    losses: list[float] = []
    static, side = data[0].clone(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for batch in data[:WARM_UP]:
            static.copy_(batch)
            losses.append(step(static).item())
            if after_replay is not None:
                after_replay()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        loss = step(static)
    torch.cuda.synchronize()
    for index, batch in enumerate(data[WARM_UP:], WARM_UP):
        static.copy_(batch)
        graph.replay()
        losses.append(loss.item())
        if after_replay is not None:
            after_replay()
        if between is not None:
            between(index)
    return losses


def own_parts(model: nn.Module) -> list[torch.Tensor]:
    """Copies of what this rank holds of the parameters."""
    with contextlib.suppress(ImportError):
        from torch.distributed.tensor import DTensor

        return [
            (p.to_local() if isinstance(p, DTensor) else p).detach().clone()
            for p in model.parameters()
        ]
    return [p.detach().clone() for p in model.parameters()]


def assert_equal(
    found: tuple[list[float], nn.Module], expected: tuple[list[float], nn.Module], case: object
) -> None:
    """The same losses and parameters, to the last bit."""
    losses = zip(found[0], expected[0], strict=True)
    differing = [step for step, (one, other) in enumerate(losses) if one != other]
    assert not differing, f"{case}: losses differ from step {differing[0]} on"
    pairs = zip(own_parts(found[1]), own_parts(expected[1]), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs), case
