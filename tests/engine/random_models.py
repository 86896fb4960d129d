"""Models drawn at random, with the options to wrap and train them, and the check of parity.

Everything drawn is plain data that travels to the ranks; modules are made of it there. The module
stays free of hypothesis, which ranks need not import.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tests.engine.models import generator
from tests.engine.parity import History, adam, full_parameters, sgd
from torch import nn
from torch.utils.checkpoint import checkpoint

from fullshard import BackwardPrefetch, CPUOffload, FullyShardedDataParallel, ShardingStrategy
from fullshard.engine.runtime.autograd import in_backward
from fullshard.testing import device
from fullshard.wrap import CustomPolicy

WIDTH = 4
HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


@dataclass(frozen=True)
class Layer:
    """One layer of a block: what it is, and whether it trains."""

    kind: str
    frozen: bool = False


@dataclass(frozen=True)
class Block:
    """Layers in a row, with an inner block before them or none."""

    layers: tuple[Layer, ...]
    wrapped: bool
    inner: Block | None = None
    repeats: int = 1
    checkpointed: str = "no"
    shares_first_weight: bool = False
    #: "all" steps, "none" of them, or those of "even" or "odd" number use this block.
    used: str = "all"
    #: Outputs are returned inside of a tuple, a dict, as they are, or as a view that the caller
    #: changes in place.
    output: str = "tensor"
    #: Where it keeps a loss of its own: nowhere, in an attribute, a private one, a list or a dict.
    keeps: str = "nothing"


@dataclass(frozen=True)
class Options:
    strategy: str
    use_orig_params: bool
    backward_prefetch: str | None
    forward_prefetch: bool
    limit_all_gathers: bool
    offload: bool


@dataclass(frozen=True)
class Case:
    blocks: tuple[Block, ...]
    options: Options
    #: What each step does: backwards, whether all but the last are in no_sync, eval before it.
    backwards: int = 1
    no_sync: bool = False
    evaluates: bool = False
    forwards: int = 1
    set_to_none: bool = True
    optimizer: str = "sgd"
    steps: int = 2
    freezes_later: bool = False
    #: Whether the gradient of the inputs is a part of the loss.
    penalizes: bool = False


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(0.9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Nothing(nn.Module):
    """A parameter without elements, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.empty.sum()


class Wide(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, WIDTH, bias=False))


LAYERS: dict[str, Any] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "bare linear": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "scale": Scale,
    "nothing": Nothing,
    "wide": Wide,
    "tanh": nn.Tanh,
}


class BlockModule(nn.Module):
    def __init__(self, block: Block, make_child: Any, common: nn.Linear) -> None:
        super().__init__()
        self.block = block
        self.inner = None if block.inner is None else make_child(block.inner, common)
        self.layers = nn.ModuleList(LAYERS[layer.kind]() for layer in block.layers)
        for layer, module in zip(block.layers, self.layers, strict=True):
            if layer.frozen:
                module.requires_grad_(False)
            elif block.shares_first_weight and layer.kind == "linear":
                module.weight = common.weight
        self.kept: Any = None
        self._kept: Any = None

    def forget(self) -> None:
        self.kept = self._kept = None

    def keep(self, loss: torch.Tensor) -> None:
        if in_backward():
            # Computed again by a checkpoint, with another graph: not to be taken for the first.
            return
        if self.block.keeps == "private":
            self._kept = loss
        elif self.block.keeps != "nothing":
            self.kept = {"attribute": loss, "list": [loss], "dict": {"x": loss}}[self.block.keeps]

    def losses(self) -> list[torch.Tensor]:
        found = [unpacked(kept) for kept in (self.kept, self._kept) if kept is not None]
        self.forget()
        return found

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        if self.inner is not None:
            x = unpacked(self.inner(x))
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x: torch.Tensor) -> Any:
        for _ in range(self.block.repeats):
            if self.block.checkpointed == "no" or not torch.is_grad_enabled():
                x = self._run(x)
            else:
                x = checkpoint(self._run, x, use_reentrant=self.block.checkpointed == "reentrant")
        view = torch.cat([x, x], dim=1)[:, :WIDTH] if self.block.output == "view" else x
        if self.block.keeps != "nothing":
            # Computed last, so that autograd comes to it first.
            self.keep(self.layers[0](x).square().mean())
        outputs = {"tuple": (x, None), "dict": {"x": x, "n": 1}}
        return outputs.get(self.block.output, view)


def unpacked(output: Any) -> torch.Tensor:
    if isinstance(output, torch.Tensor):
        if output._is_view():
            output[:, :2] *= 1.5
        return output
    return output["x"] if isinstance(output, dict) else output[0]


class RandomModel(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.common = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            BlockModule(block, self._child, self.common) for block in case.blocks
        )
        every = (module for module in self.modules() if isinstance(module, BlockModule))
        # As they are, also when they are wrapped.
        self.all_blocks = tuple(every)

    def losses(self) -> list[torch.Tensor]:
        """What the blocks that ran have kept."""
        return [loss for block in self.all_blocks for loss in block.losses()]

    def _child(self, block: Block, common: nn.Linear) -> BlockModule:
        return BlockModule(block, self._child, common)

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        x = self.common(x)
        for block, module in zip(self.case.blocks, self.blocks, strict=True):
            if block.used in ("all", ("even", "odd")[step % 2]):
                x = x + unpacked(module(x))
        return x.square().mean()


def make(case: Case) -> RandomModel:
    torch.manual_seed(7)
    return RandomModel(case).to(device(), torch.float64)


def data(rank: int, step: int, turn: int) -> torch.Tensor:
    drawn = torch.randn(3, WIDTH, generator=generator(rank, 50 * step + turn))
    # It needs a gradient: reentrant checkpoints ask for that.
    return drawn.to(device(), torch.float64).requires_grad_()


def optimizer_for(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    return (sgd if case.optimizer == "sgd" else adam)(model.parameters())


def expected_history(case: Case, size: int) -> History:
    """One process, without communication."""
    model, history = make(case), History()
    optimizer = optimizer_for(case, model)
    for step in range(case.steps):
        _maybe_freeze(case, model, step)
        optimizer.zero_grad(set_to_none=case.set_to_none)
        for turn in range(case.backwards):
            losses = [_loss(case, model, rank, step, turn) for rank in range(size)]
            torch.stack(losses).mean().backward()
        optimizer.step()
        history.add(losses[dist.get_rank()], full_parameters(model))
    return history


def _loss(case: Case, model: Any, rank: int, step: int, turn: int) -> torch.Tensor:
    model.losses()
    total = torch.zeros((), dtype=torch.float64, device=device())
    for n in range(case.forwards):
        x = data(rank, step, 10 * turn + n)
        loss = model(x, step)
        if case.penalizes:
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = loss + gradient.square().mean()
        total = total + loss + sum(model.losses())
    return total


def _maybe_freeze(case: Case, model: Any, step: int) -> None:
    if case.freezes_later and step == 1:
        for name, parameter in model.named_parameters():
            if "bias" in name:
                parameter.requires_grad_(False)


def found_history(case: Case) -> History:
    model, history = wrapped(case), History()
    optimizer, rank = optimizer_for(case, model), dist.get_rank()
    for step in range(case.steps):
        _maybe_freeze(case, model, step)
        if case.evaluates:
            with torch.no_grad():
                model(data(rank, step, 5), step)
        optimizer.zero_grad(set_to_none=case.set_to_none)
        for turn in range(case.backwards):
            local = case.no_sync and turn + 1 < case.backwards
            with model.no_sync() if local else contextlib.nullcontext():
                loss = _loss(case, model, rank, step, turn)
                loss.backward()
        optimizer.step()
        history.add(loss, full_parameters(model))
    return history


def wrapped(case: Case) -> Any:
    options = case.options
    arguments: dict[str, Any] = {
        "sharding_strategy": ShardingStrategy[options.strategy],
        "use_orig_params": options.use_orig_params,
        "backward_prefetch": (
            BackwardPrefetch[options.backward_prefetch] if options.backward_prefetch else None
        ),
        "forward_prefetch": options.forward_prefetch,
        "limit_all_gathers": options.limit_all_gathers,
        "cpu_offload": CPUOffload(options.offload),
    }
    if options.strategy in HYBRID:
        arguments["process_group"] = _pair_of_groups()

    def decide(module: nn.Module) -> bool:
        return isinstance(module, BlockModule) and module.block.wrapped

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = make(case)
        return FullyShardedDataParallel(model, auto_wrap_policy=CustomPolicy(decide), **arguments)


def _pair_of_groups() -> Any:
    size, rank = dist.get_world_size(), dist.get_rank()
    shards = [dist.new_group([first, first + 1]) for first in range(0, size, 2)][rank // 2]
    copies = [dist.new_group(list(range(local, size, 2))) for local in range(2)][rank % 2]
    return shards, copies


def check_parity(case: Case) -> None:
    """Runs on every rank."""
    expected = expected_history(copy.deepcopy(case), dist.get_world_size())
    found_history(case).assert_close(expected, case)
