"""Models and ways to shard them, for tests of what ranks send encoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

import fullshard
from fullshard import Communication, FullyShardedDataParallel, ShardingStrategy
from fullshard.testing import device
from fullshard.wrap import ModuleWrapPolicy

#: All that is not a vector is encoded, in blocks that several small parameters share.
INT8 = Communication(torch.int8, torch.int8, min_numel=0)
APIS = ("wrapper", "fully_shard")


class Block(nn.Module):
    """Weights that do not divide evenly, a bias and a norm; ``skipped`` is used if it is told."""

    def __init__(self, width: int = 13) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.skipped = nn.Linear(width, width, bias=False)
        self.down = nn.Linear(2 * width + 1, width)
        self.uses_skipped = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(x)
        if self.uses_skipped:
            hidden = hidden + self.skipped(hidden)
        return x + self.down(torch.tanh(self.up(hidden)))


def build(layers: int = 3, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """The same model on every rank and at every call."""
    torch.manual_seed(7)
    return nn.Sequential(*[Block() for _ in range(layers)]).to(device(), dtype)


def shard(api: str, model: Any, communication: Communication | None, **options: Any) -> Any:
    """The model, sharded block by block; ``options`` are those of the wrapper."""
    if api == "wrapper":
        policy = ModuleWrapPolicy({Block})
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=policy,
            use_orig_params=True,
            communication=communication,
            **options,
        )
    given: dict[str, Any] = {"communication": communication}
    precision = options.pop("mixed_precision", None)
    if precision is not None:
        dtypes = precision.param_dtype, precision.reduce_dtype
        given["mp_policy"] = fullshard.MixedPrecisionPolicy(*dtypes)
    if options.pop("sharding_strategy", None) is ShardingStrategy.SHARD_GRAD_OP:
        given["reshard_after_forward"] = False
    assert not options
    for block in model:
        fullshard.fully_shard(block, **given)
    return fullshard.fully_shard(model, **given)


def batch(step: int = 0, rank: int | None = None) -> torch.Tensor:
    """Inputs that differ between ranks and steps."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(5, 13, generator=generator).to(device())


def loss_of(model: Any, step: int = 0, rank: int | None = None) -> torch.Tensor:
    """The loss of one rank's batch."""
    inputs = batch(step, rank).to(next(model.parameters()).dtype)
    return (model(inputs) - inputs.flip(1)).square().sum()


def whole(value: Any) -> torch.Tensor:
    """A parameter or gradient that every rank has a part of, whole."""
    found = value.full_tensor() if hasattr(value, "full_tensor") else value
    return found.detach().clone()


def parameters_of(model: Any) -> dict[str, torch.Tensor]:
    """Copies of the full parameters."""
    with fullshard.summon_full_params(model, writeback=False):
        return {name: whole(p) for name, p in model.named_parameters()}


def gradients_of(model: Any) -> dict[str, torch.Tensor | None]:
    """Copies of the full gradients; None where there is none on any rank."""
    if not isinstance(model, FullyShardedDataParallel):
        named = model.named_parameters()
        return {name: None if p.grad is None else whole(p.grad) for name, p in named}
    with fullshard.summon_full_params(model, writeback=False, with_grads=True):
        return {
            name: None if p.grad is None else whole(p.grad) for name, p in model.named_parameters()
        }


def step_alone(model: nn.Module, ranks: int, step: int = 0) -> list[dict[str, torch.Tensor]]:
    """The gradients of each rank's batch, computed on one process."""
    found = []
    for rank in range(ranks):
        model.zero_grad()
        loss_of(model, step, rank).backward()
        found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    return found


def assert_uneven_batches_train_as_one_process(model: Any, batches: Sequence[int]) -> None:
    """Train ``model``, which :func:`build` made, on so many batches on each rank, inside Join."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    with Join([model], optimizer=optimizer):
        for step in range(batches[dist.get_rank()]):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()

    expected, before = build(), build()
    reference = torch.optim.SGD(expected.parameters(), lr=1e-3)
    for step in range(max(batches)):
        active = [rank for rank, count in enumerate(batches) if step < count]
        losses = torch.stack([loss_of(expected, step, rank) for rank in active])
        (losses.sum() / len(batches)).backward()
        reference.step()
        reference.zero_grad()
    for name, parameter in parameters_of(model).items():
        exact = expected.get_parameter(name)
        change = (exact - before.get_parameter(name)).norm()
        assert (parameter.view_as(exact) - exact).norm() < 0.05 * change + 1e-6, name
