"""The models of torch's own FSDP tests under torch's wrapper and under fullshard, side by side.

Each is built, trained, saved, summoned and clipped by the same lines, which use torch's names.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from tests.compat.installed import installed

from fullshard.testing import device, ranks

pytest.importorskip("expecttest")  # torch's test models import it

MODELS = ["TransformerWithSharedParams", "NestedWrappedModule", "AlwaysWrapNestedWrappedModule"]
STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]


def build(name: str, **options: Any) -> Any:
    from torch.testing._internal import common_fsdp

    wrapper = torch.distributed.fsdp.FullyShardedDataParallel
    arguments = {"device_id": device().type, **options}
    on_cpu = common_fsdp.DEVICE_TYPE == "cpu"
    modes = common_fsdp.DEVICEInitMode
    model = getattr(common_fsdp, name).init(
        dist.group.WORLD,
        common_fsdp.FSDPInitMode.RECURSIVE,
        modes.DEVICE_NEVER if on_cpu else modes.DEVICE_BEFORE,
        arguments,
        deterministic=True,
    )
    return model if isinstance(model, wrapper) else wrapper(model, **arguments)


def backward(model: Any) -> float:
    given = model.module.get_input(device())
    loss = model.module.get_loss(given, model(*given))
    model.module.run_backward(loss)
    return loss.item()


def gradients(model: Any) -> dict[str, Any]:
    return {
        name: None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }


def pieces(value: Any) -> Any:
    """A value of a state dict, of a sharded one what this rank has of it."""
    if hasattr(value, "local_shards"):
        return [value.size(), *(shard.tensor for shard in value.local_shards())]
    return value.clone() if isinstance(value, torch.Tensor) else value


def observe(name: str, strategy: str, use_orig_params: bool) -> dict[str, Any]:
    fsdp = torch.distributed.fsdp
    kinds = fsdp.StateDictType
    chosen = getattr(fsdp.ShardingStrategy, strategy)
    model = build(name, sharding_strategy=chosen, use_orig_params=use_orig_params)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    seen: dict[str, Any] = {"text": str(model), "losses": []}
    for _ in range(3):
        optimizer.zero_grad()
        seen["losses"].append(backward(model))
        optimizer.step()
    seen["gradients"] = gradients(model)
    seen["shapes"] = {n: (p.shape, p.requires_grad) for n, p in model.named_parameters()}
    seen["full"] = copy.deepcopy(dict(model.state_dict()))
    if strategy != "NO_SHARD":
        # Without sharding, torch gives whole tensors.
        with type(model).state_dict_type(model, kinds.SHARDED_STATE_DICT):
            sharded = model.state_dict()
            seen["sharded"] = {key: pieces(value) for key, value in sharded.items()}
            seen["loaded"] = str(model.load_state_dict(sharded))
    if not use_orig_params:
        # With original parameters torch 2.13 on a CPU gives exp_avg_sq for exp_avg.
        state = type(model).full_optim_state_dict(model, optimizer, rank0_only=False)
        seen["optimizer"] = {
            key: {what: pieces(value) for what, value in of_parameter.items()}
            for key, of_parameter in state["state"].items()
        }
        seen["scattered"] = type(model).scatter_full_optim_state_dict(state, model)["state"]
    seen["norm"] = model.clip_grad_norm_(0.1)
    seen["clipped"] = gradients(model)
    for recurse in (True, False):
        with type(model).summon_full_params(model, recurse=recurse, writeback=False):
            found = {n: p.detach().clone() for n, p in model.named_parameters()}
            units = type(model).fsdp_modules(model)
            sizes = [u._flat_param.shape for u in units if u._flat_param is not None]
        seen[f"summoned, recurse={recurse}"] = found
        if strategy != "NO_SHARD":
            seen[f"sizes, recurse={recurse}"] = sizes
    model.zero_grad()
    with model.no_sync():
        backward(model)
        seen["local gradients"] = gradients(model)
    backward(model)
    seen["accumulated gradients"] = gradients(model)
    seen["evaluated"] = model.eval()(*model.module.get_input(device())).detach()
    return seen


def assert_same(found: Any, expected: Any, where: str) -> None:
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, msg=lambda text: f"{where}: {text}")
    elif isinstance(expected, dict):
        assert set(found) == set(expected), where
        for key, value in expected.items():
            assert_same(found[key], value, f"{where}/{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for index, value in enumerate(expected):
            assert_same(found[index], value, f"{where}/{index}")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected), where
    else:
        assert found == expected, where


CASES = list(itertools.product(MODELS, STRATEGIES, [False, True]))


@pytest.mark.parametrize(("name", "strategy", "use_orig_params"), CASES)
@ranks(2)
def test_what_programs_see_of_torchs_test_models_is_what_they_see_in_torch(
    name: str, strategy: str, use_orig_params: bool
) -> None:
    expected = observe(name, strategy, use_orig_params)
    with installed():
        found = observe(name, strategy, use_orig_params)

    assert_same(found, expected, "")
