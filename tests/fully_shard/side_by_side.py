"""The same training through torch's ``fully_shard`` and through fullshard's, compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn

import fullshard
from fullshard.testing import device

#: ``fully_shard`` and what belongs to it, torch's and fullshard's.
THEIRS: Any = torch.distributed.fsdp
OURS: Any = fullshard

Build = Callable[[], nn.Module]
#: Applies ``api.fully_shard`` to a model.
Shard = Callable[[Any, nn.Module], None]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Sizes that no number of ranks divides, rows fewer than ranks, and a buffer."""

    def __init__(self, width: int = 5, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 3)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("shift", torch.full((3,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden) * self.scale + self.shift


def build() -> nn.Module:
    torch.manual_seed(0)
    return Model()


def by_block(**options: Any) -> Shard:
    """Shard each block, then the model, with these options."""

    def shard(api: Any, model: Any) -> None:
        for block in model.blocks:
            api.fully_shard(block, **options)
        api.fully_shard(model, **options)

    return shard


def inputs(step: int) -> torch.Tensor:
    """Different ones on every rank; a root moves them to where it computes."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randint(11, (4, 6), generator=generator)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, eps=1e-4)


@dataclass
class Training:
    """What happened to a model, on this rank."""

    model: nn.Module
    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Any]] = field(default_factory=list)
    parameters: list[dict[str, Any]] = field(default_factory=list)
    optimizer: Any = None


def forward_loss(model: nn.Module, step: int) -> torch.Tensor:
    return model(inputs(step)).float().square().mean()


def train(
    api: Any,
    shard: Shard,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
    steps: int = 3,
    make: Build = build,
    step_with: Callable[[Any, Any, int], torch.Tensor] | None = None,
) -> Training:
    """Train a model; ``step_with(api, model, step)`` runs one forward and backward."""
    model = make()
    shard(api, model)
    optimizer = make_optimizer(model.parameters())
    found = Training(model, optimizer=optimizer)
    for step in range(steps):
        if step_with is None:
            loss = forward_loss(model, step)
            loss.backward()
        else:
            loss = step_with(api, model, step)
        found.losses.append(loss.item())
        found.gradients.append({n: told(p.grad) for n, p in model.named_parameters()})
        optimizer.step()
        found.parameters.append({n: told(p) for n, p in model.named_parameters()})
        optimizer.zero_grad()
    return found


def told(tensor: Any) -> Any:
    """What is compared of a tensor: of a DTensor, all that users see."""
    if tensor is None or not hasattr(tensor, "to_local"):
        return None if tensor is None else tensor.detach().clone()
    local = tensor.to_local().detach().clone()
    return (tensor.shape, tensor.stride(), tensor.dtype, str(tensor.placements), local)


def skip_without_collectives_of_dtensors() -> None:
    if device().type != "cpu":
        pytest.skip("DTensor's own collectives of GPU tensors over gloo end the process")


def skip_unless_torch_has(*methods: str) -> None:
    for method in methods:
        if not hasattr(THEIRS.FSDPModule, method):
            pytest.skip(f"FSDPModule of this version of torch has no {method}")


def whole(tensor: Any) -> torch.Tensor:
    """All of a DTensor, on the host.

    DTensor's own collectives of GPU tensors over gloo end the process (torch 2.11).
    """
    if tensor.device.type == "cpu":
        return tensor.full_tensor()
    local = tensor.to_local().detach().cpu()
    for index, placement in reversed(list(enumerate(tensor.placements))):
        group = tensor.device_mesh.get_group(index)
        parts: list[Any] = [None] * group.size()
        dist.all_gather_object(parts, local, group=group)
        if placement.is_shard():
            local = torch.cat(parts, placement.dim)
    return local


def assert_same_training(ours: Training, theirs: Training, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(ours.losses, theirs.losses, rtol=tolerance, atol=tolerance)
    for what in ("gradients", "parameters"):
        for step, (found, expected) in enumerate(
            zip(getattr(ours, what), getattr(theirs, what), strict=True)
        ):
            assert list(found) == list(expected)
            for name in expected:
                assert_same(found[name], expected[name], f"{what} {name} {step}", tolerance)


def assert_same(found: Any, expected: Any, case: str, tolerance: float = 1e-5) -> None:
    if isinstance(expected, tuple):
        assert found[:-1] == expected[:-1], case
        found, expected = found[-1], expected[-1]
    if expected is None or found is None:
        assert found is expected, case
        return
    torch.testing.assert_close(
        found, expected, rtol=tolerance, atol=tolerance, msg=lambda told: f"{case}: {told}"
    )


def both(
    shard: Shard, *args: Any, tolerance: float = 1e-5, **options: Any
) -> tuple[Training, Training]:
    """Train by both, compare, and return both."""
    theirs = train(THEIRS, shard, *args, **options)
    ours = train(OURS, shard, *args, **options)
    assert_same_training(ours, theirs, tolerance)
    return ours, theirs
