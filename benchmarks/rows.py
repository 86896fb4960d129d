"""What the benchmarks compare, one entry per row: a bare model and the ways to shard it.

Every row trains the same model with the same precision: compute in ``compute``, shards and
reduction in fp32, fused AdamW. The bare model is in ``compute`` altogether: no fp32 copy.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import groups
import torch
import torch.distributed as dist
from torch import nn


class SkipRow(Exception):
    """Why a row cannot be measured here."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is the same for all rows: a unit's class, the precision of compute, the group."""

    unit: type[nn.Module]
    compute: torch.dtype
    group: Any = None

    @property
    def precision(self) -> dict[str, Any]:
        """Arguments of every row's class for mixed precision; empty where nothing is mixed."""
        if self.compute is torch.float32:
            return {}
        return {"param_dtype": self.compute, "reduce_dtype": torch.float32}


Build = Callable[[nn.Module, Setting], nn.Module]


def bare(model: nn.Module, setting: Setting) -> nn.Module:
    return model.to(setting.compute)


def data_parallel(model: nn.Module, setting: Setting) -> nn.Module:
    return nn.parallel.DistributedDataParallel(
        model.to(setting.compute), process_group=setting.group
    )


def fsdp1(model: nn.Module, setting: Setting) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    device = next(model.parameters()).device
    if device.type == "cpu":
        raise SkipRow("torch's FSDP1 does not train on CPUs")
    return FullyShardedDataParallel(
        model,
        process_group=setting.group,
        auto_wrap_policy=ModuleWrapPolicy({setting.unit}),
        mixed_precision=MixedPrecision(**setting.precision),
        device_id=device,
        use_orig_params=True,
    )


def fsdp2(model: nn.Module, setting: Setting) -> nn.Module:
    import torch.distributed.fsdp

    return by_unit(torch.distributed.fsdp, model, setting)


def fullshards_fully_shard(model: nn.Module, setting: Setting) -> nn.Module:
    import fullshard

    return by_unit(fullshard, model, setting)


def by_unit(api: Any, model: nn.Module, setting: Setting) -> nn.Module:
    """Apply ``api.fully_shard`` to each unit, then to the model."""
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh.from_group(
        setting.group or dist.group.WORLD,  # type: ignore[arg-type]
        next(model.parameters()).device.type,
    )
    precision = api.MixedPrecisionPolicy(**setting.precision)
    for module in model.modules():
        if isinstance(module, setting.unit):
            api.fully_shard(module, mesh=mesh, mp_policy=precision)
    api.fully_shard(model, mesh=mesh, mp_policy=precision)
    return model


def megatron_fsdp(model: nn.Module, setting: Setting) -> nn.Module:
    if importlib.util.find_spec("megatron_fsdp") is None:
        raise SkipRow("megatron-fsdp is not installed")
    from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model

    device = next(model.parameters()).device
    mesh = _with_a_trivial_dimension(setting.group or dist.group.WORLD, device)
    # It takes the compute precision from the model; the others are fp32 only if it is told so.
    return fully_shard_model(
        model.to(setting.compute),
        device_mesh=mesh,
        dp_shard_dim="shards",
        tp_dim="alone",
        fsdp_unit_modules=[setting.unit],
        zero_dp_strategy=3,
        device=device,
        # For checkpoints ranks tell each other which parts they have; one that plays all cannot.
        preproc_state_dict_for_dcp_ckpt=False,
        mixed_precision_policy=MixedPrecisionPolicy(
            main_params_dtype=torch.float32,
            main_grads_dtype=torch.float32,
            grad_comm_dtype=torch.float32,
        ),
    )


def _with_a_trivial_dimension(group: Any, device: torch.device) -> Any:
    """A mesh of the group's ranks, and of one rank in a dimension that Megatron-FSDP asks for."""
    from torch.distributed.device_mesh import DeviceMesh

    alone = groups.group_of_one(dist.get_rank())
    return DeviceMesh.from_group(
        [group, alone],
        device.type,
        mesh=torch.arange(group.size()).view(-1, 1),
        mesh_dim_names=("shards", "alone"),
    )


def megatron_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    from megatron_fsdp import fully_shard_optimizer

    return fully_shard_optimizer(optimizer, preproc_state_dict_for_dcp_ckpt=False)


def fullshard(
    model: nn.Module, setting: Setting, strategy: str = "FULL_SHARD", communication: Any = None
) -> nn.Module:
    from fullshard import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
    from fullshard.wrap import ModuleWrapPolicy

    return FullyShardedDataParallel(
        model,
        process_group=setting.group,
        auto_wrap_policy=ModuleWrapPolicy({setting.unit}),
        sharding_strategy=ShardingStrategy[strategy],
        mixed_precision=MixedPrecision(**setting.precision),
        use_orig_params=True,
        # Earlier versions, which are measured beside this one, do not have this option.
        **({} if communication is None else {"communication": communication}),
    )


def fullshard_communicating(**options: Any) -> Build:
    """A row that communicates as these options of ``fullshard.Communication`` say."""

    def build(model: nn.Module, setting: Setting) -> nn.Module:
        from fullshard import Communication

        return fullshard(model, setting, communication=Communication(**options))

    return build


INT8 = {"all_gather_dtype": torch.int8, "reduce_dtype": torch.int8}


def fullshard_grad_op(model: nn.Module, setting: Setting) -> nn.Module:
    return fullshard(model, setting, strategy="SHARD_GRAD_OP")


def fullshard_hybrid(model: nn.Module, setting: Setting) -> nn.Module:
    return fullshard(model, setting, strategy="HYBRID_SHARD")


ROWS: dict[str, Build] = {
    "bare": bare,
    "DDP": data_parallel,
    "FSDP1": fsdp1,
    "FSDP2": fsdp2,
    "Megatron-FSDP": megatron_fsdp,
    "fullshard": fullshard,
    "fullshard fully_shard": fullshards_fully_shard,
    "fullshard SHARD_GRAD_OP": fullshard_grad_op,
    "fullshard HYBRID_SHARD": fullshard_hybrid,
    "fullshard int8 gather": fullshard_communicating(all_gather_dtype=torch.int8),
    "fullshard int8": fullshard_communicating(**INT8),
    "fullshard secondary shards": fullshard_communicating(secondary_shards=True),
    "fullshard int8, secondary shards": fullshard_communicating(**INT8, secondary_shards=True),
}

#: What a row does to the optimizer of its model, if anything.
OPTIMIZERS: dict[str, Callable[[torch.optim.Optimizer], torch.optim.Optimizer]] = {
    "Megatron-FSDP": megatron_optimizer,
}


class Training:
    """One row's model and optimizer; a step is forward, backward, update."""

    def __init__(
        self,
        row: str,
        model: nn.Module,
        batch: torch.Tensor,
        setting: Setting,
        counts_on_device: bool = False,
    ) -> None:
        with warnings.catch_warnings():
            # With one rank, FSDP says that it does not shard; that is what is measured.
            warnings.filterwarnings("ignore", message=".*switching to use `NO_SHARD`")
            self.model = ROWS[row](model, setting)
        optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-4, fused=True, capturable=counts_on_device
        )
        self.optimizer = OPTIMIZERS[row](optimizer) if row in OPTIMIZERS else optimizer
        self.batch = batch

    def step(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(self.batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class CapturedTraining:
    """A :class:`Training` whose step becomes one CUDA graph, by ``torch.cuda.graph`` itself."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._side = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._loss = torch.empty(())

    def step(self) -> torch.Tensor:
        """An eager step, on the side stream that captures need, or a replay."""
        if self._graph is not None:
            self._graph.replay()
            return self._loss
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            loss = self._training.step()
        torch.cuda.current_stream().wait_stream(self._side)
        return loss

    def capture(self) -> None:
        """Replay from now on; captured again, the graph has the memory of the one before."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, self._pool, self._side):
            self._loss = self._training.step()
        graph.replay()
        torch.cuda.synchronize()
        self._graph = graph
        torch.cuda.empty_cache()


class FullshardCapturedTraining:
    """The same with what ``fullshard.capture`` captures and replays with, for a fixed batch."""

    def __init__(self, training: Training) -> None:
        from fullshard.captured.graphs import Recorder, StepGraph

        self._training = training
        self._recorder = Recorder(torch.device("cuda", torch.cuda.current_device()))
        self._graph: StepGraph | None = None

    def step(self) -> torch.Tensor:
        """An eager step or a replay."""
        if self._graph is None:
            return self._recorder.run(self._training.step)
        return self._graph.replay([])

    def capture(self) -> None:
        """Replay from now on; captured again, the graph has the memory of the one before."""
        parameters = list(self._training.model.parameters())
        graph = self._recorder.capture(lambda _: self._training.step(), [], parameters)
        graph.replay([])
        torch.cuda.synchronize()
        graph.settle()
        before, self._graph = self._graph, graph
        if before is not None:
            before.drop()
        torch.cuda.empty_cache()
