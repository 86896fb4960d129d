"""Attributes of torch's wrapper that programs read: the same values, from both, side by side."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from tests.compat.installed import installed
from torch import nn

import fullshard
from fullshard import MixedPrecision, ShardingStrategy
from fullshard.grad import hooks
from fullshard.testing import device, ranks

OPTIONS: dict[str, dict[str, Any]] = {
    "flat": {"use_orig_params": False},
    "original": {"use_orig_params": True},
    "bfloat16": {"param_dtype": torch.bfloat16},
}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 7)
        self.second = nn.Linear(3, 7)
        self.second.weight = self.first.weight
        self.norm = nn.LayerNorm(7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(x) + self.second(x))


def build(wrapper: Callable[..., Any], option: str) -> Any:
    """A root around a nested unit, as a program for torch's wrapper builds it, after a step."""
    options = dict(OPTIONS[option])
    dtype = options.pop("param_dtype", None)
    if dtype is not None:
        # Each implementation is given its own class.
        api = torch.distributed.fsdp
        options["mixed_precision"] = api.MixedPrecision(param_dtype=dtype)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), Tied(), nn.Linear(7, 2)).to(device())
    model[1] = wrapper(model[1], device_id=device().type, **options)
    model = wrapper(model, device_id=device().type, **options)
    model(torch.ones(2, 5, device=device())).sum().backward()
    return model


def plain(value: Any) -> Any:
    """What can be compared of a value: of a tensor its form, of a named tuple its names."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, value.untyped_storage().size()
    if isinstance(value, nn.Module):
        return type(value).__name__
    if isinstance(value, torch.dtype | torch.Size | str | int | None):
        return value
    if isinstance(value, set | frozenset):
        return sorted(map(plain, value))
    return [plain(item) for item in value]


FLAT_PARAMETER = [
    "_contiguities",
    "_fqns",
    "_fsdp_flattened",
    "_is_padding_mask",
    "_local_shard",
    "_modules",
    "_num_params",
    "_numels",
    "_numels_with_padding",
    "_padded_unsharded_size",
    "_param_extensions",
    "_param_infos",
    "_shapes",
    "_shard_numel_padded",
    "_sharded_size",
    "_shared_param_infos",
    "_strides",
    "_unpadded_unsharded_size",
]
HANDLE = [
    "_aligned_numel",
    "_fqns_in_shard",
    "_fwd_bwd_param_dtype",
    "_keep_low_precision_grads",
    "_offload_params",
    "_orig_param_dtype",
    "_reduce_dtype",
    "_use_orig_params",
    "_uses_param_mixed_precision",
    "_uses_reduce_mixed_precision",
    "rank",
    "uses_sharded_strategy",
    "world_size",
]
PIECE = [
    "in_shard",
    "offset_in_shard",
    "numel_in_shard",
    "intra_param_start_idx",
    "intra_param_end_idx",
]


def describe(model: Any) -> dict[str, Any]:
    """Everything that is compared, by a name that says what it is."""
    found: dict[str, Any] = {
        "parameters": [name for name, _ in model.named_parameters()],
        "prefixed": [name for name, _ in model.named_parameters(prefix="a")],
        "nested": [name for name, _ in model.module[1].named_parameters()],
    }
    for number, unit in enumerate(type(model).fsdp_modules(model)):
        flat, handle = unit._flat_param, unit._handle
        found[f"{number} params"] = len(unit.params), unit.params[0] is flat
        for name in FLAT_PARAMETER:
            found[f"{number} flat {name}"] = plain(getattr(flat, name))
        for name in ("_full_param_padded", "_full_prec_full_param_padded", "_mp_shard"):
            tensor = getattr(flat, name, None)
            found[f"{number} flat {name}"] = tensor if tensor is None else plain(tensor)
        for name in HANDLE:
            found[f"{number} handle {name}"] = plain(getattr(handle, name))
        found[f"{number} modules"] = plain(handle._get_modules())
        found[f"{number} names"] = list(handle.param_module_names())
        found[f"{number} shared names"] = list(handle.shared_param_module_names())
        found[f"{number} offsets"] = handle._get_flat_param_offsets()
        found[f"{number} pieces"] = [
            [getattr(piece, name) for name in PIECE] for piece in flat._shard_param_infos
        ]
        found[f"{number} available"] = unit._device_handle.is_available()
        found[f"{number} module"] = [
            type(module).__name__ for module in unit._fully_sharded_module_to_handle
        ]
    with type(model).summon_full_params(model):
        found["summoned"] = [name for name, _ in model.named_parameters()]
    return found


@pytest.mark.parametrize("option", OPTIONS)
@ranks(2)
def test_half_private_attributes_have_the_values_that_torch_has(option: str) -> None:
    expected = describe(build(torch.distributed.fsdp.FullyShardedDataParallel, option))
    with installed():
        ours = torch.distributed.fsdp.FullyShardedDataParallel
        assert ours is fullshard.FullyShardedDataParallel
        found = describe(build(ours, option))

    for what, value in expected.items():
        assert found[what] == value, what


@ranks(2)
def test_a_filter_by_torchs_names_selects_what_it_selects_in_torch() -> None:
    def select(wrapper: Any) -> list[list[str]]:
        model = build(wrapper, "original")
        named = list(model.named_parameters())
        head = [n for n, _ in named if n.startswith("_fsdp_wrapped_module.2")]
        body = [n for n, _ in named if not n.startswith("_fsdp_wrapped_module.2")]
        return [head, body]

    expected = select(torch.distributed.fsdp.FullyShardedDataParallel)
    with installed():
        assert select(torch.distributed.fsdp.FullyShardedDataParallel) == expected
    # Imported natively, names are those of the unwrapped model.
    assert select(fullshard.FullyShardedDataParallel)[0] == []


@ranks(2)
def test_names_of_buffers_are_torchs_except_in_summon_full_params() -> None:
    def names(wrapper: Any) -> list[list[str]]:
        inner = wrapper(nn.BatchNorm1d(3).to(device()), device_id=device().type)
        model = wrapper(nn.Sequential(inner), device_id=device().type)
        found = [[name for name, _ in model.named_buffers()]]
        with type(model).summon_full_params(model):
            found.append([name for name, _ in model.named_buffers()])
        return found

    expected = names(torch.distributed.fsdp.FullyShardedDataParallel)
    with installed():
        assert names(torch.distributed.fsdp.FullyShardedDataParallel) == expected


@ranks(2)
def test_the_attributes_go_with_uninstall_and_are_only_on_flat_parameters() -> None:
    with installed():
        model = build(fullshard.FullyShardedDataParallel, "flat")
        flat = model._flat_param
        with pytest.raises(AttributeError, match="not a flat parameter"):
            _ = nn.Parameter(torch.ones(2))._local_shard  # type: ignore[attr-defined]
        assert model.params == [flat]
        flat_copy = pickle.loads(pickle.dumps(flat))
        assert not hasattr(flat_copy, "_local_shard")
        assert copy.deepcopy(model)._flat_param._numels_with_padding == flat._numels_with_padding

    assert not hasattr(flat, "_local_shard")
    assert not hasattr(nn.Parameter, "_local_shard")
    assert not hasattr(model._handle, "uses_sharded_strategy")
    with pytest.raises(AttributeError):
        _ = model.params
    with pytest.raises(AttributeError):
        model._comm_hook = None


@ranks(2)
def test_a_wrapped_module_keeps_an_attribute_of_such_a_name_natively() -> None:
    class HasParams(nn.Linear):
        params = "the module's own"

    assert fullshard.FullyShardedDataParallel(HasParams(2, 2).to(device())).params == (
        "the module's own"
    )


@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(2)
def test_a_unit_is_unsharded_ahead_and_waited_for_by_torchs_private_names(
    use_orig_params: bool,
) -> None:
    with installed():
        wrapper = torch.distributed.fsdp.FullyShardedDataParallel
        torch.manual_seed(0)
        bare = nn.Linear(5, 3).to(device())
        expected = bare.weight.detach().clone()
        model = wrapper(copy.deepcopy(bare), use_orig_params=use_orig_params)

        handle = model._unshard(async_op=True)
        handle.wait()
        assert torch.equal(model.module.weight, expected)
        model._handle._use_unsharded_views(as_params=False)
        assert torch.equal(model.module.weight, expected)
        model._reshard()
        assert model._flat_param._full_param_padded.untyped_storage().size() == 0
        with pytest.raises(AssertionError, match="Expects tensor to be unsharded with size"):
            model._handle._use_unsharded_views(as_params=False)
        assert model._unshard() is None
        x = torch.ones(2, 5, device=device())
        assert torch.equal(model(x), bare(x))


@ranks(2)
def test_the_order_of_execution_is_told_as_torch_tells_it() -> None:
    def order(wrapper: Any) -> tuple[Any, ...]:
        data = build(wrapper, "flat")._exec_order_data
        handles = [list(handle.flat_param._fqns) for handle in data.handles_pre_forward_order]
        everything = [list(handle.flat_param._fqns) for handle in data.all_handles]
        return handles, everything, data.rank, data.world_size, data.is_first_iter

    expected = order(torch.distributed.fsdp.FullyShardedDataParallel)
    with installed():
        assert order(torch.distributed.fsdp.FullyShardedDataParallel) == expected


@ranks(2)
def test_a_hook_is_set_on_one_unit_and_its_gradients_alone_pass_through_it() -> None:
    def fill(state: float, gradient: torch.Tensor, shard: torch.Tensor) -> None:
        shard.fill_(state)

    def gradients(wrapper: Any) -> list[list[float]]:
        torch.manual_seed(0)
        inner = wrapper(nn.Linear(3, 3).to(device()), device_id=device().type)
        model = wrapper(nn.Sequential(inner, nn.Linear(3, 3).to(device())), device_id=device().type)
        assert model.check_is_root()
        inner._comm_hook = fill
        inner._comm_hook_state = 7.0
        assert (inner._comm_hook, inner._comm_hook_state) == (fill, 7.0)
        with pytest.raises(AssertionError, match="communication hook is already registered"):
            model.register_comm_hook(None, fill)
        model._comm_hook = None
        model(torch.ones(2, 3, device=device())).sum().backward()
        return [unit.params[0].grad.tolist() for unit in type(model).fsdp_modules(model)]

    expected = gradients(torch.distributed.fsdp.FullyShardedDataParallel)
    with installed():
        found = gradients(torch.distributed.fsdp.FullyShardedDataParallel)
    assert set(found[1]) == {7.0}
    assert found == expected


@ranks(2)
def test_any_hook_is_registered_and_a_unit_that_cannot_call_it_says_so() -> None:
    def for_sharded(state: object, gradient: torch.Tensor, shard: torch.Tensor) -> None:
        shard.copy_(gradient[: shard.numel()])

    with installed():
        wrapper = torch.distributed.fsdp.FullyShardedDataParallel
        no_shard = torch.distributed.fsdp.ShardingStrategy.NO_SHARD
        inner = wrapper(nn.Linear(3, 3).to(device()))
        # The root has no parameters, and so never calls the hook.
        model = wrapper(nn.Sequential(inner), sharding_strategy=no_shard)
        model.register_comm_hook("state", for_sharded)
        assert {(unit._comm_hook, unit._comm_hook_state) for unit in (model, inner)} == {
            (for_sharded, "state")
        }
        model(torch.ones(2, 3, device=device())).sum().backward()

        whole = wrapper(nn.Linear(3, 3).to(device()), sharding_strategy=no_shard)
        whole.register_comm_hook("state", for_sharded)
        with pytest.raises(TypeError, match=r"hook\(state, gradient\), as unit .*NO_SHARD"):
            whole(torch.ones(2, 3, device=device())).sum().backward()


@ranks(2)
def test_a_hook_of_torchs_is_shown_as_it_was_registered() -> None:
    from torch.distributed.algorithms._comm_hooks import default_hooks

    with installed():
        model = build(torch.distributed.fsdp.FullyShardedDataParallel, "flat")
        state = hooks.DefaultState(dist.group.WORLD)
        model.register_comm_hook(state, default_hooks.reduce_scatter_hook)
        for unit in type(model).fsdp_modules(model):
            assert unit._comm_hook is default_hooks.reduce_scatter_hook
        model(torch.ones(2, 5, device=device())).sum().backward()


@ranks(2)
def test_natively_a_hook_that_fits_some_units_is_taken() -> None:
    def for_sharded(state: object, gradient: torch.Tensor, shard: torch.Tensor) -> None: ...

    inner = fullshard.FullyShardedDataParallel(nn.Linear(3, 3).to(device()))
    model = fullshard.FullyShardedDataParallel(
        nn.Sequential(inner, nn.Linear(3, 3).to(device())),
        sharding_strategy=ShardingStrategy.NO_SHARD,
        mixed_precision=MixedPrecision(),
    )

    model.register_comm_hook(None, for_sharded)

    assert model._comm_hook is inner._comm_hook is for_sharded
