"""Tensor subclasses that decide what is all-gathered of them work as under torch's fully_shard."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.fully_shard.side_by_side import (
    OURS,
    THEIRS,
    assert_same_training,
    skip_without_collectives_of_dtensors,
    train,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._pytree import tree_map

import fullshard
from fullshard.testing import ranks

#: What the subclasses were called with, in order.
CALLS: list[Any] = []


class Quantized(torch.Tensor):
    """Rows in full precision, of which ranks exchange integers and a scale for each rank."""

    _rows: torch.Tensor

    @staticmethod
    def __new__(cls: Any, rows: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(
            cls, rows.shape, strides=rows.stride(), dtype=rows.dtype, device=rows.device
        )
        made._rows = rows
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_rows"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, meta: None, size: Any, stride: Any) -> Any:
        return cls(inner["_rows"])

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{type(self).__name__}({self._rows})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        def inner(value: Any) -> Any:
            return value._rows if isinstance(value, Quantized) else value

        found = function(*tree_map(inner, args), **tree_map(inner, kwargs or {}))
        if function.overloadpacket is torch.ops.aten.copy_:
            return args[0]
        return tree_map(lambda v: cls(v) if isinstance(v, torch.Tensor) else v, found)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        given = (mesh.ndim, mesh.size(), mesh.mesh_dim_names, outer_size, tuple(outer_stride))
        CALLS.append((type(self).__name__, *given, isinstance(module, nn.Linear), mp_policy))
        scale = self._rows.abs().max().clamp(min=1e-6).reshape(1) / 127
        return ((self._rows / scale).round().to(torch.int8), scale), ("rows", len(self._rows))

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: Any,
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Any = None,
    ) -> Any:
        kinds = [(tuple(given.shape), given.dtype) for given in all_gather_outputs]
        CALLS.append((kinds, metadata, param_dtype, None if out is None else tuple(out.shape)))
        integers, scales = all_gather_outputs
        by_rank = integers.view(len(scales), -1, *integers.shape[1:])
        whole = (by_rank * scales.view(-1, 1, 1)).flatten(0, 1).to(param_dtype)
        if out is None:
            return whole, (whole,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(whole)
        return None


class Scaled(torch.Tensor):
    """A full parameter that stays integers, with their scale, and computes with their product.

    As torchao's: attributes have slots, and what autograd saves for a linear layer's backward is
    another object, with the scale of the forward.
    """

    __slots__ = ("_integers", "_kind", "_scale")
    _integers: torch.Tensor
    _scale: torch.Tensor
    _kind: torch.dtype

    @staticmethod
    def __new__(cls: Any, integers: torch.Tensor, scale: torch.Tensor, kind: torch.dtype) -> Any:
        made = torch.Tensor._make_wrapper_subclass(
            cls, integers.shape, strides=integers.stride(), dtype=kind, device=integers.device
        )
        made._integers, made._scale, made._kind = integers, scale, kind
        return made

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["_integers", "_scale"], self._kind

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, kind: torch.dtype, size: Any, stride: Any) -> Any:
        return cls(inner["_integers"], inner["_scale"], kind)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Scaled({self._integers}, {self._scale})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if function.overloadpacket in (torch.ops.aten.detach, torch.ops.aten.as_strided):
            given = args[0]
            return cls(given._integers, given._scale, given._kind)
        if function.overloadpacket is torch.ops.aten.t:
            return cls(args[0]._integers.t(), args[0]._scale, args[0]._kind)

        def whole(value: Any) -> Any:
            if not isinstance(value, Scaled):
                return value
            return value._integers.to(value._kind) * value._scale.to(value._kind)

        return function(*tree_map(whole, args), **tree_map(whole, kwargs or {}))


class QuantizedThroughout(Quantized):
    """The same, but full parameters stay integers; all ranks have one scale."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        CALLS.append((type(self).__name__, mesh.ndim, mesh.size()))
        largest = self._rows.abs().max()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group())
        scale = largest.clamp(min=1e-6) / 127
        return ((self._rows / scale).round().to(torch.int8),), scale

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: Any,
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Any = None,
    ) -> Any:
        (integers,) = all_gather_outputs
        CALLS.append(
            (integers.dtype, param_dtype, None if out is None else isinstance(out, Scaled))
        )
        if out is None:
            return Scaled(integers, metadata, param_dtype), (integers,)
        assert out._integers.data_ptr() == integers.data_ptr()
        out._scale = metadata
        return None


class Whole(Quantized):
    """Rows that are all-gathered as they are: the result is the full parameter."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        CALLS.append((type(self).__name__, mesh.ndim, mesh.size()))
        return (self._rows.to(mp_policy.param_dtype or self._rows.dtype),), None

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: Any,
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Any = None,
    ) -> Any:
        (whole,) = all_gather_outputs
        CALLS.append((whole.dtype, param_dtype, None if out is None else tuple(out.shape)))
        return (whole, (whole,)) if out is None else None


def build(kind: type[Quantized]) -> nn.Module:
    torch.manual_seed(6)
    model = nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    for layer in (model[1], model[3]):
        layer.weight = nn.Parameter(kind(layer.weight.detach()))
    return model


@pytest.mark.parametrize("kind", [Quantized, QuantizedThroughout, Whole])
@pytest.mark.parametrize("low", [False, True])
@ranks(2)
def test_training_and_calls_are_torchs(kind: type[Quantized], low: bool) -> None:
    trained, calls = [], []
    for api in (THEIRS, OURS):

        def shard(api: Any, model: Any) -> None:
            dtype = torch.bfloat16 if low else None
            policy = api.MixedPrecisionPolicy(param_dtype=dtype)
            for layer in (model[1], model[3]):
                api.fully_shard(layer, mp_policy=policy, reshard_after_forward=True)
            api.fully_shard(model, mp_policy=policy)

        CALLS.clear()
        trained.append(train(api, shard, make=lambda: build(kind), steps=3))
        calls.append([without_policy(call) for call in CALLS])
        weight: Any = trained[-1].model.get_parameter("1.weight")
        assert isinstance(weight, DTensor)
        assert type(weight._local_tensor) is kind
        assert type(weight.grad) is type(None)

    theirs, ours = trained
    for training in trained:
        # Their local parts are objects that cannot be compared as tensors.
        training.parameters = [{n: plain(p) for n, p in s.items()} for s in training.parameters]
    assert_same_training(ours, theirs, 2e-2 if low else 1e-5)
    # A host all-gathers ahead, in an order of its own, and begins backward with what it has.
    assert {str(call) for call in calls[1]} == {str(call) for call in calls[0]}
    assert any("True" in str(call[-1]) or call[-1] == (8, 4) for call in calls[1])


@pytest.mark.filterwarnings("ignore")
@ranks(2)
def test_weights_that_torchao_all_gathers_in_float8_train_as_under_torchs() -> None:
    skip_without_collectives_of_dtensors()
    float8 = pytest.importorskip("torchao.float8", reason="install the extra 'quantized'")
    config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    losses: list[list[float]] = []
    for api in (THEIRS, OURS):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        float8.convert_to_float8_training(model, config=config)
        api.fully_shard(model[0])
        api.fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        found: list[float] = []
        for step in range(4):
            generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
            loss = model(torch.randn(16, 16, generator=generator)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step > 0:
                float8.precompute_float8_dynamic_scale_for_fsdp(model)
            found.append(loss.item())
        losses.append(found)

    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=0)


@pytest.mark.filterwarnings("ignore")
@ranks(4)
def test_float8_and_tensor_parallelism_train_together_as_under_torchs() -> None:
    float8 = pytest.importorskip("torchao.float8", reason="install the extra 'quantized'")
    parallel = importlib.import_module("torchao.float8.float8_tensor_parallel")
    styles = {"0": parallel.Float8ColwiseParallel(), "2": parallel.Float8RowwiseParallel()}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    losses: list[list[float]] = []
    for api in (THEIRS, OURS):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        float8.convert_to_float8_training(model, config=config)
        parallelize_module(model, mesh["tp"], styles)
        api.fully_shard(model[0], mesh=mesh["dp"])
        api.fully_shard(model, mesh=mesh["dp"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found: list[float] = []
        for step in range(3):
            generator = torch.Generator().manual_seed(2 * step + mesh["dp"].get_local_rank())
            loss = model(torch.randn(16, 16, generator=generator)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        losses.append(found)

    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=0)


def plain(told: Any) -> Any:
    local = told[-1]
    return (*told[:-1], local._rows if isinstance(local, Quantized) else local)


def without_policy(call: Any) -> Any:
    """Policies are of different classes, and scales of different values."""
    return call[:-1] if len(call) > 5 else call


@ranks(4)
def test_subclasses_are_told_the_mesh_of_the_shards_alone() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    told = []
    for api in (THEIRS, OURS):
        CALLS.clear()
        model: Any = build(Quantized)
        api.fully_shard(model, mesh=mesh)
        model(torch.arange(4)).sum().backward()
        told.append(CALLS[0][1:4])

    assert told[0] == told[1] == (1, 2, ("shard",))


@ranks(2)
def test_options_of_communication_are_for_the_other_parameters() -> None:
    losses = []
    for given in (None, fullshard.Communication(torch.int8, torch.int8, min_numel=0)):
        CALLS.clear()
        model: Any = build(Quantized)
        fullshard.fully_shard(model, communication=given)
        loss = model(torch.arange(4)).square().sum()
        loss.backward()
        losses.append(loss.detach())
        gathers = [call for call in CALLS if call[0] == "Quantized"]
        # The embedding is encoded by us, the two linears by their own weights.
        assert len(gathers) == 2

    torch.testing.assert_close(losses[1], losses[0], rtol=0.05, atol=1e-3)
    assert not torch.equal(losses[1], losses[0])


@ranks(2)
def test_memory_of_full_parameters_comes_and_goes() -> None:
    for kind in (Quantized, QuantizedThroughout):
        model: Any = build(kind)
        fullshard.fully_shard(model[1])
        fullshard.fully_shard(model[3])
        fullshard.fully_shard(model)
        for _ in "ab":
            model(torch.arange(4)).sum().backward()
        for layer in (model[1], model[3]):
            for handle in layer._fullshard_module_unit.unit.handles:
                for buffer in handle.full_buffers.values():
                    assert not buffer.is_allocated
                    for view in buffer.views:
                        parts = [view]
                        if isinstance(view, Scaled):
                            parts = [view._integers]
                        assert [p.untyped_storage().nbytes() for p in parts] == [0]


@ranks(2)
def test_what_does_not_fit_is_refused_with_torchs_words() -> None:
    class Odd(Quantized):
        def fsdp_pre_all_gather(self, mesh: Any, size: Any) -> Any:  # type: ignore[override]
            raise AssertionError("not called")

    messages = []
    for api in (THEIRS, OURS):
        model: Any = build(Odd)
        api.fully_shard(model)
        with pytest.raises(AssertionError) as caught:
            model(torch.arange(4))
        messages.append(str(caught.value).splitlines())

    assert messages[0][0] == messages[1][0]
    assert messages[0][1] == messages[1][1]


@ranks(2)
def test_other_shapes_than_before_are_refused() -> None:
    class Changing(Quantized):
        calls = 0

        def fsdp_pre_all_gather(self, *args: Any) -> Any:
            Changing.calls += 1
            (integers, scale), metadata = super().fsdp_pre_all_gather(*args)
            return (integers.to(torch.int16 if Changing.calls > 2 else torch.int8), scale), metadata

    # So that the number of arguments is that of the one it calls.
    Changing.fsdp_pre_all_gather.__signature__ = inspect.signature(  # type: ignore[attr-defined]
        Quantized.fsdp_pre_all_gather
    )
    model: Any = build(Changing)
    fullshard.fully_shard(model)

    model(torch.arange(4)).sum().backward()
    with pytest.raises(RuntimeError, match=r"Changing.fsdp_pre_all_gather .*torch.int16"):
        model(torch.arange(4))


@ranks(4)
def test_reshard_to_a_few_ranks_is_refused() -> None:
    model: Any = build(Quantized)

    with pytest.raises(NotImplementedError, match=r"1\.weight.*reshard_after_forward=2"):
        fullshard.fully_shard(model, reshard_after_forward=2)
