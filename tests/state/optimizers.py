"""Optimizers with their unwrapped counterparts, and what to compare their state by."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tests.original.training import average_gradients, build, loss_of, train_step
from torch import nn

from fullshard import (
    FullOptimStateDictConfig,
    LocalOptimStateDictConfig,
    ShardedOptimStateDictConfig,
    StateDictType,
)
from fullshard import FullyShardedDataParallel as FSDP

Make = Callable[[nn.Module], torch.optim.Optimizer]

#: Every type of optimizer state dict.
OPTIM_KINDS: dict[str, tuple[StateDictType, Any]] = {
    "full": (StateDictType.FULL_STATE_DICT, FullOptimStateDictConfig(offload_to_cpu=False)),
    "full on the first rank": (
        StateDictType.FULL_STATE_DICT,
        FullOptimStateDictConfig(rank0_only=True),
    ),
    "sharded": (StateDictType.SHARDED_STATE_DICT, ShardedOptimStateDictConfig()),
    "dtensor": (StateDictType.SHARDED_STATE_DICT, ShardedOptimStateDictConfig(_use_dtensor=True)),
    "local": (StateDictType.LOCAL_STATE_DICT, LocalOptimStateDictConfig()),
}


@contextlib.contextmanager
def optim_kind(model: nn.Module, name: str) -> Iterator[None]:
    kind, config = OPTIM_KINDS[name]
    with FSDP.state_dict_type(model, kind, None, config):
        yield


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups with different hyperparameters, the second one's first in the model."""
    slow = [p for name, p in model.named_parameters() if name.startswith("embed")]
    return torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if not any(p is q for q in slow)]},
            {"params": slow, "lr": 0.003, "weight_decay": 0.3},
        ],
        lr=0.02,
        amsgrad=True,
    )


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.02)


def trained(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, bare: bool = False
) -> float:
    """Train; returns the last loss."""
    loss = torch.zeros(())
    for step in steps:
        optimizer.zero_grad()
        loss = train_step(model, step)
        if bare:
            average_gradients(model)
        optimizer.step()
    return loss.item()


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The whole state on every rank, independent of the optimizer."""
    with optim_kind(model, "full"):
        return copy.deepcopy(FSDP.optim_state_dict(model, optimizer))


def bare_reference(
    make_model: Callable[[], nn.Module], make: Make, steps: range
) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    """An unwrapped model trained on the same data, its optimizer, and its state by names.

    The names are looked up here, not by what is tested.
    """
    bare = build(make_model)
    optimizer = make(bare)
    trained(bare, optimizer, steps, bare=True)
    return bare, optimizer, state_by_names(bare, optimizer)


def state_by_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = [
        {**{k: v for k, v in g.items() if k != "params"}, "params": [names[p] for p in g["params"]]}
        for g in optimizer.param_groups
    ]
    return {
        "state": {names[p]: dict(s) for p, s in optimizer.state.items() if s},
        "param_groups": groups,
    }


def assert_same_optim_state(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Names, groups, entries, dtypes, shapes and every bit."""
    assert_same_groups(found, expected)
    assert found["state"].keys() == expected["state"].keys()
    for name, state in expected["state"].items():
        assert found["state"][name].keys() == state.keys(), name
        for key, value in state.items():
            other = found["state"][name][key]
            if not isinstance(value, torch.Tensor):
                assert other == value, (name, key)
                continue
            assert (other.dtype, other.shape) == (value.dtype, value.shape), (name, key)
            assert torch.equal(other.cpu(), value.cpu()), (name, key)


def assert_close_optim_state(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """As above, up to what sums over ranks in another order come to."""
    assert_same_groups(found, expected)
    assert found["state"].keys() == expected["state"].keys()
    for name, state in expected["state"].items():
        assert found["state"][name].keys() == state.keys(), name
        for key, value in state.items():
            other = found["state"][name][key]
            torch.testing.assert_close(
                other,
                value,
                check_device=False,
                msg=lambda m, n=name, k=key: f"{n} {k}: {m}",  # type: ignore[misc]
            )


def assert_same_groups(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Hyperparameters and the members of each group, in whichever order they lie."""

    def plain(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**group, "params": sorted(group["params"])} for group in groups]

    assert plain(found["param_groups"]) == plain(expected["param_groups"])


def next_loss_and_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: int, bare: bool = False
) -> tuple[float, float]:
    """The loss of a training step, and the one after it."""
    loss = trained(model, optimizer, range(step, step + 1), bare)
    with torch.no_grad():
        return loss, loss_of(model, step + 1).item()
