"""Training a model, and comparing what happened with what happened to another one.

The two references share no code with fullshard: ``DistributedDataParallel``, and one process that
computes every rank's loss itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fullshard import FullyShardedDataParallel

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    """With weight decay, so that a zero gradient is not the same as none."""
    # Adam divides by the size of the gradient plus eps: where a gradient is nothing but rounding
    # errors, a small eps would make them as large as a step, and orders of summation differ.
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, eps=1e-4)


@dataclass
class History:
    """What a training went through, on this rank."""

    losses: list[torch.Tensor] = field(default_factory=list)
    parameters: list[dict[str, torch.Tensor]] = field(default_factory=list)

    def add(self, loss: torch.Tensor, parameters: dict[str, torch.Tensor]) -> None:
        self.losses.append(loss.detach().cpu().clone())
        self.parameters.append(parameters)

    def assert_close(self, other: History, case: object, tolerance: float = 1e-9) -> None:
        """Compare with ``other``, the expected one, step by step."""
        assert len(self.losses) == len(other.losses)
        for step, (loss, expected) in enumerate(zip(self.losses, other.losses, strict=True)):
            close(loss, expected, f"loss at step {step} of {case}", tolerance)
            assert_same(
                self.parameters[step], other.parameters[step], f"step {step} of {case}", tolerance
            )


def assert_same(
    found: dict[str, torch.Tensor],
    expected: dict[str, torch.Tensor],
    case: object,
    tolerance: float = 1e-9,
) -> None:
    """Compare named tensors, by name, and the names themselves."""
    assert list(found) == list(expected), case
    for name, tensor in found.items():
        close(tensor, expected[name], f"{name}, {case}", tolerance)


def close(found: torch.Tensor, expected: torch.Tensor, case: str, tolerance: float) -> None:
    torch.testing.assert_close(
        found, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{case}: {text}"
    )


def full_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the full parameters, under the names they have in the unwrapped model."""
    if isinstance(model, DistributedDataParallel):
        model = model.module
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        # On the host and contiguous: only values are compared.
        return {
            name: whole(parameter).cpu().clone(memory_format=torch.contiguous_format)
            for name, parameter in model.named_parameters()
        }


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter, or all of one that is spread over ranks by tensor parallelism."""
    parameter = parameter.detach()
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def train(
    model: Any,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    steps: int = 3,
    set_to_none: bool = True,
    rank: int | None = None,
) -> History:
    """Train on a rank's data; clear gradients before forward or before backward in turn."""
    rank = dist.get_rank() if rank is None else rank
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    history, module = History(), model.module
    for step in range(steps):
        inputs = module.get_input(rank, step)
        if step % 2 == 0:
            clear(optimizers, set_to_none)
        loss = module.get_loss(inputs, model(*inputs))
        if step % 2 == 1:
            clear(optimizers, set_to_none)
        loss.backward()
        for each in optimizers:
            each.step()
        history.add(loss, full_parameters(model))
    return history


def clear(optimizers: Iterable[torch.optim.Optimizer], set_to_none: bool) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=set_to_none)


def train_with_ddp(
    module: nn.Module,
    make_optimizer: MakeOptimizer = sgd,
    steps: int = 3,
    set_to_none: bool = True,
    unused: bool = False,
) -> History:
    model = DistributedDataParallel(module, find_unused_parameters=unused)
    return train(model, make_optimizer(module.parameters()), steps, set_to_none)


def train_alone(
    module: Any,
    make_optimizer: MakeOptimizer = sgd,
    steps: int = 3,
    set_to_none: bool = True,
    world_size: int | None = None,
    rank: int | None = None,
) -> History:
    """One process on the whole batch: the mean of every rank's loss, without communication."""
    size = world_size or dist.get_world_size()
    rank = dist.get_rank() if rank is None else rank
    optimizer, history = make_optimizer(module.parameters()), History()
    for step in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        batches = [module.get_input(rank, step) for rank in range(size)]
        losses = [module.get_loss(inputs, module(*inputs)) for inputs in batches]
        torch.stack(losses).mean().backward()
        optimizer.step()
        history.add(losses[rank], full_parameters(module))
    return history
