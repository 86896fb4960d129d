"""What the benchmarks compare, one entry per row: a bare model and the ways to shard it.

Every row trains the same model with the same precision: compute in ``compute``, shards and
reduction in fp32, fused AdamW. The bare model is in ``compute`` altogether: no fp32 copy.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class SkipRow(Exception):
    """Why a row cannot be measured here."""


Build = Callable[[nn.Module, type[nn.Module], torch.dtype], nn.Module]


def bare(model: nn.Module, unit: type[nn.Module], compute: torch.dtype) -> nn.Module:
    return model.to(compute)


def data_parallel(model: nn.Module, unit: type[nn.Module], compute: torch.dtype) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model.to(compute))


def fsdp1(model: nn.Module, unit: type[nn.Module], compute: torch.dtype) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    device = next(model.parameters()).device
    if device.type == "cpu":
        raise SkipRow("torch's FSDP1 does not train on CPUs")
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({unit}),
        mixed_precision=MixedPrecision(param_dtype=compute, reduce_dtype=torch.float32),
        device_id=device,
        use_orig_params=True,
    )


def fsdp2(model: nn.Module, unit: type[nn.Module], compute: torch.dtype) -> nn.Module:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = DeviceMesh.from_group(dist.group.WORLD, next(model.parameters()).device.type)
    precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for module in model.modules():
        if isinstance(module, unit):
            fully_shard(module, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    return model


def megatron_fsdp(model: nn.Module, unit: type[nn.Module], compute: torch.dtype) -> nn.Module:
    if importlib.util.find_spec("megatron_fsdp") is None:
        raise SkipRow("megatron-fsdp is not installed")
    from megatron_fsdp import fully_shard_model
    from torch.distributed.device_mesh import DeviceMesh

    device = next(model.parameters()).device
    mesh = DeviceMesh.from_group(dist.group.WORLD, device.type, mesh_dim_names=("shards",))
    # It has no fp32 shards unless told so, and takes the compute precision from the model.
    return fully_shard_model(
        model.to(compute),
        fsdp_unit_modules=[unit],
        device_mesh=mesh,
        dp_shard_dim="shards",
        zero_dp_strategy=3,
        preserve_fp32_weights=True,
        grad_reduce_in_fp32=True,
    )


def fullshard(
    model: nn.Module,
    unit: type[nn.Module],
    compute: torch.dtype,
    strategy: str = "FULL_SHARD",
) -> nn.Module:
    from fullshard import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
    from fullshard.wrap import ModuleWrapPolicy

    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({unit}),
        sharding_strategy=ShardingStrategy[strategy],
        mixed_precision=MixedPrecision(param_dtype=compute, reduce_dtype=torch.float32),
        use_orig_params=True,
    )


def fullshard_grad_op(model: nn.Module, unit: type[nn.Module], compute: torch.dtype) -> nn.Module:
    return fullshard(model, unit, compute, strategy="SHARD_GRAD_OP")


ROWS: dict[str, Build] = {
    "bare": bare,
    "DDP": data_parallel,
    "FSDP1": fsdp1,
    "FSDP2": fsdp2,
    "Megatron-FSDP": megatron_fsdp,
    "fullshard": fullshard,
    "fullshard SHARD_GRAD_OP": fullshard_grad_op,
}


class Training:
    """One row's model and optimizer; a step is forward, backward, update."""

    def __init__(
        self,
        row: str,
        model: nn.Module,
        unit: type[nn.Module],
        batch: torch.Tensor,
        compute: torch.dtype,
    ) -> None:
        with warnings.catch_warnings():
            # With one rank, FSDP says that it does not shard; that is what is measured.
            warnings.filterwarnings("ignore", message=".*switching to use `NO_SHARD`")
            self.model = ROWS[row](model, unit, compute)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.batch = batch

    def step(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(self.batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def local(tensor: Any) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def bytes_of(tensors: Iterable[Any]) -> int:
    """Memory of the storages below ``tensors``, each counted once."""
    storages = {local(t).untyped_storage() for t in tensors if isinstance(t, torch.Tensor)}
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())
