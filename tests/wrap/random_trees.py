"""Module graphs drawn at random that can be trained, with what to wrap in them and how.

Everything drawn is plain data that travels to the ranks; modules are made of it there. The module
stays free of hypothesis, which ranks need not import.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import ShardingStrategy
from fullshard.testing import device
from fullshard.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    _or_policy,
    size_based_auto_wrap_policy,
)


@dataclass(frozen=True)
class Node:
    """A module: its class, and the earlier ones below which it hangs (two: it is shared)."""

    kind: str
    parents: tuple[int, ...] = ()


@dataclass(frozen=True)
class Weight:
    """A parameter and the modules that hold it (several: it is tied)."""

    numel: int
    holders: tuple[int, ...]
    trainable: bool = True


@dataclass(frozen=True)
class Case:
    nodes: tuple[Node, ...]
    weights: tuple[Weight, ...]
    #: A kind of policy, and numbers of modules or a minimum of elements for it.
    policy: str
    picked: tuple[int, ...] = ()
    minimum: int = 0
    #: Numbers of the modules, or else of the weights, to ignore.
    ignored_modules: tuple[int, ...] = ()
    ignored_weights: tuple[int, ...] = ()
    strategy: str = "FULL_SHARD"
    use_orig_params: bool = True


class First(nn.Module):
    """Computes with its own parameters, then runs its children in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.names:
            weight = getattr(self, name)
            scale = weight.sum() + 2 * weight[::2].sum()
            x = x + torch.tanh(x * scale)
        return run_all(self, x)


class Second(First):
    pass


def run_all(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Run the children of ``module``; a list of modules is not called, but what is in it."""
    for child in module.children():
        x = run_all(child, x) if isinstance(child, nn.ModuleList) else child(x)
    return x


KINDS: dict[str, type[nn.Module]] = {"First": First, "Second": Second, "list": nn.ModuleList}


@dataclass
class Built:
    root: Any
    nodes: list[Any]
    weights: list[nn.Parameter]


def build(case: Case) -> Built:
    """The model of ``case``, the same at every call and on every rank."""
    generator = torch.Generator().manual_seed(11)
    nodes: list[Any] = [KINDS[node.kind]() for node in case.nodes]
    for index, node in enumerate(case.nodes):
        for parent in node.parents:
            nodes[parent].add_module(str(len(nodes[parent]._modules)), nodes[index])
    weights = []
    for number, weight in enumerate(case.weights):
        values = torch.randn(weight.numel, generator=generator, dtype=torch.float64)
        parameter = nn.Parameter(values.to(device()), requires_grad=weight.trainable)
        for holder in dict.fromkeys(weight.holders):
            nodes[holder].register_parameter(f"weight{number}", parameter)
            nodes[holder].names.append(f"weight{number}")
        weights.append(parameter)
    return Built(nodes[0], nodes, weights)


def policy_of(case: Case, built: Built) -> Any:
    """The policy, which wraps no list: those are never called."""
    picked = {built.nodes[index] for index in case.picked}
    size = functools.partial(size_based_auto_wrap_policy, min_num_params=case.minimum)
    policies: dict[str, Any] = {
        "class": ModuleWrapPolicy({Second}),
        "every": ModuleWrapPolicy({First}),
        "custom": CustomPolicy(lambda module: module in picked),
        "size": size,
        "or": functools.partial(_or_policy, policies=[size, ModuleWrapPolicy({Second})]),
        "function": lambda module, recurse, nonwrapped_numel: recurse or module in picked,
    }
    return policies[case.policy]


def wrapped(case: Case, built: Built) -> FSDP:
    ignored: dict[str, Any] = {}
    if case.ignored_modules:
        ignored["ignored_modules"] = [built.nodes[index] for index in case.ignored_modules]
    elif case.ignored_weights:
        ignored["ignored_states"] = [built.weights[index] for index in case.ignored_weights]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FSDP(
            built.root,
            sharding_strategy=ShardingStrategy[case.strategy],
            auto_wrap_policy=policy_of(case, built),
            use_orig_params=case.use_orig_params,
            **ignored,
        )


def data() -> torch.Tensor:
    generator = torch.Generator().manual_seed(12)
    return torch.randn(4, 3, generator=generator, dtype=torch.float64).to(device())


def step(model: nn.Module, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One forward and backward; the loss, and the gradient of the inputs."""
    inputs.requires_grad_()
    loss = model(inputs).square().mean()
    loss.backward()
    assert inputs.grad is not None
    return loss.detach(), inputs.grad


def average_by_hand(parameters: list[nn.Parameter]) -> None:
    """What no unit manages is left to the user."""
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def check_one_step(case: Case) -> None:
    """Wrap and train one step on half of the batch: the bare model's step on all of it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    bare, built = build(case).root, build(case)
    model = wrapped(case, built)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (bare, model)]
    loss, gradient = step(bare, data())
    own_loss, own_gradient = step(model, data().chunk(size)[rank])
    average_by_hand([w for w in built.weights if w in model._ignored_params])
    for optimizer in optimizers:
        optimizer.step()

    total = own_loss.clone()
    dist.all_reduce(total)
    close(total / size, loss, f"loss of {case}")
    # Each rank's loss is a mean over half of the rows.
    close(own_gradient / size, gradient.chunk(size)[rank], f"gradient of the input of {case}")
    with FSDP.summon_full_params(model, writeback=False):
        found = dict(model.named_parameters(remove_duplicate=False))
        expected = dict(bare.named_parameters(remove_duplicate=False))
        assert found.keys() == expected.keys()
        for name, parameter in expected.items():
            close(found[name].detach(), parameter.detach(), f"{name} of {case}")


def close(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(
        found, expected, rtol=1e-9, atol=1e-9, msg=lambda text: f"{what}: {text}"
    )
