"""A model for tests of tensor parallelism together with sharding, and ways to parallelize it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.engine.models import TrainingModel, generator, make
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import ShardingStrategy
from fullshard.testing import backend, device
from fullshard.wrap import ModuleWrapPolicy


class Block(nn.Module):
    """A residual block; the halves of its linears are odd, and so are their shards."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Tokens(TrainingModel):
    """Tokens in, numbers out; beside parameters to parallelize there is one that is not."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.first = Block()
        self.second = Block()
        self.head = nn.Linear(6, 10 if tied else 4)
        self.gain = nn.Parameter(torch.linspace(0.5, 2, self.head.out_features))
        if tied:
            self.tie()

    def tie(self) -> None:
        self.head.weight = self.embedding.weight

    def get_input(self, rank: int, step: int = 0) -> tuple[Any, ...]:
        return (torch.randint(10, (3, 4), generator=generator(rank, step)).to(device()),)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(self.embedding(tokens)))) * self.gain


def _tensor_parallel(block: str) -> dict[str, Any]:
    return {f"{block}.up": ColwiseParallel(), f"{block}.down": RowwiseParallel()}


def _sequence_parallel(block: str) -> dict[str, Any]:
    """Between its linears a block's tokens, not its features, are spread: norms are copies."""
    return {
        block: PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True
        ),
        f"{block}.norm": SequenceParallel(),
        f"{block}.up": ColwiseParallel(input_layouts=Shard(1)),
        f"{block}.down": RowwiseParallel(output_layouts=Shard(1)),
    }


def plan(kind: str) -> dict[str, Any]:
    """What to parallelize; new objects, since they are attached to modules."""
    of_block = {"tensor": _tensor_parallel, "sequence": _sequence_parallel}[kind]
    return {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        **of_block("first"),
        **of_block("second"),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }


def mesh_of(*shape: int) -> DeviceMesh:
    """(tp), (dp, tp), or (copies, dp, tp)."""
    if device().type != "cpu" and backend() == "gloo":
        pytest.skip("DTensor's own collectives of GPU tensors over gloo end the process")
    names = ("copies", "dp", "tp")[-len(shape) :]
    return init_device_mesh(device().type, shape, mesh_dim_names=names)


def parallelized(mesh: DeviceMesh, kind: str = "tensor", **options: Any) -> Tokens:
    """The model of :func:`make`, its parameters spread over the mesh's last dimension."""
    model = make(Tokens, **options)
    parallelize_module(model, mesh["tp"], plan(kind))
    if options.get("tied"):
        # To parallelize a module is to give it parameters of its own.
        model.tie()
    if kind == "sequence":
        whole = PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
        for block in (model.first, model.second):
            parallelize_module(block, mesh["tp"], whole)
    return model


def sharded(
    mesh: DeviceMesh,
    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD,
    kind: str = "tensor",
    blocks: bool = True,
    **options: Any,
) -> FSDP:
    """The parallelized model, sharded over the mesh's other dimensions."""
    names = ("copies", "dp") if "HYBRID" in strategy.name else "dp"
    return FSDP(
        options.pop("model", None) or parallelized(mesh, kind),
        device_mesh=mesh[names],
        sharding_strategy=strategy,
        auto_wrap_policy=ModuleWrapPolicy({Block}) if blocks else None,
        **{"use_orig_params": True, **options},
    )


class Uneven(nn.Module):
    """Parts of different sizes, one of them empty, cut along both dimensions; returns a number."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(7, 3))
        self.columns = nn.Parameter(torch.randn(5, 3))
        self.single = nn.Parameter(torch.randn(1, 5))
        self.bias = nn.Parameter(torch.randn(9))
        self.plain = nn.Parameter(torch.randn(3, 2))

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        found = (self.rows, self.columns, self.single, self.bias, self.plain)
        wholes = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in found)
        return factor * sum(whole.square().sum() for whole in wholes)


def uneven(sharded_over: tuple[int, int] | None = None, **options: Any) -> Any:
    """The model with the same values on every rank, parallelized and sharded if asked for."""
    torch.manual_seed(3)
    model = Uneven().to(device())
    if sharded_over is None:
        return model
    mesh = mesh_of(*sharded_over)
    for name, dimension in (("rows", 0), ("columns", 1), ("single", 0), ("bias", 0)):
        parameter = getattr(model, name)
        spread = distribute_tensor(parameter.detach(), mesh["tp"], [Shard(dimension)])
        setattr(model, name, nn.Parameter(spread))
    return FSDP(model, device_mesh=mesh["dp"], **{"use_orig_params": True, **options})
