"""replicate does what torch's does: gradients are averaged, nothing is sharded."""

from __future__ import annotations

import copy
import importlib
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.compat.installed import installed
from tests.fully_shard.side_by_side import OURS, assert_same_training, build, forward_loss, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import fullshard
from fullshard.testing import ranks

HOME = "torch.distributed._composable.replicate_with_fsdp"


def torchs() -> Any:
    """Torch's counterpart of our package, for what the tests use."""
    home = pytest.importorskip(HOME)
    package = importlib.import_module("torch.distributed.fsdp")
    return types.SimpleNamespace(
        replicate=home.replicate,
        ReplicateModule=home.ReplicateModule,
        FSDPModule=package.FSDPModule,
        MixedPrecisionPolicy=package.MixedPrecisionPolicy,
        fully_shard=package.fully_shard,
    )


def by_block(api: Any, model: Any, **options: Any) -> None:
    for block in model.blocks:
        api.replicate(block, **options)
    api.replicate(model, **options)


@ranks(2)
def test_training_is_torchs() -> None:
    theirs, ours = train(torchs(), by_block), train(OURS, by_block)

    assert_same_training(ours, theirs)
    weight: Any = ours.model.head.weight
    assert weight.placements == (Replicate(),)
    assert weight.device_mesh.mesh_dim_names == ("replicate",)


@ranks(2)
def test_mixed_precision_and_accumulation_are_torchs() -> None:
    def lowered(api: Any, model: Any) -> None:
        by_block(api, model, mp_policy=api.MixedPrecisionPolicy(param_dtype=torch.bfloat16))

    assert_same_training(train(OURS, lowered), train(torchs(), lowered), 2e-2)

    for method in ("set_requires_gradient_sync", "set_requires_all_reduce"):

        def accumulate(api: Any, model: Any, step: int, method: str = method) -> torch.Tensor:
            getattr(model, method)(False)
            forward_loss(model, step + 5).backward()
            assert model.head.weight.grad is None
            getattr(model, method)(True)
            loss = forward_loss(model, step)
            loss.backward()
            return loss

        ours = train(OURS, by_block, step_with=accumulate)
        assert_same_training(ours, train(torchs(), by_block, step_with=accumulate))


@ranks(2)
def test_what_the_module_is_and_shows_is_torchs() -> None:
    seen: list[Any] = []
    for api in (torchs(), OURS):
        model: Any = build()
        by_block(api, model)
        loss = forward_loss(model, 0)
        between = [isinstance(p, DTensor) for p in model.parameters()]
        loss.backward()
        after = [isinstance(p, DTensor) for p in model.parameters()]
        bases = [base.__name__ for base in type(model).__mro__]
        sums: list[float] = []
        model.set_all_reduce_hook(lambda reduced, sums=sums: sums.append(reduced.sum().item()))
        forward_loss(model, 1).backward()
        model.blocks[0].unshard()
        unsharded = isinstance(model.blocks[0].up.weight, DTensor)
        model.blocks[0].reshard()
        assert isinstance(model, api.ReplicateModule)
        assert isinstance(model, api.FSDPModule)
        seen.append((between, after, bases, len(sums), unsharded, model._orig_cls_mro_index))

    assert seen[0] == seen[1]


@ranks(4)
def test_a_part_of_a_mesh_and_units_of_both_kinds_train() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))

    def partly(api: Any, model: Any) -> None:
        by_block(api, model, mesh=mesh["a"])

    assert_same_training(train(OURS, partly), train(torchs(), partly))

    def both(api: Any, model: Any) -> None:
        for block in model.blocks:
            api.replicate(block)
        api.fully_shard(model)

    assert_same_training(train(OURS, both), train(torchs(), both))


@ranks(2)
def test_what_torch_refuses_is_refused_with_its_words() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    for call in (
        lambda api: api.replicate(nn.ModuleList([nn.Linear(2, 2)])),
        lambda api: api.replicate(api.replicate(nn.Linear(2, 2))),
        lambda api: api.replicate(nn.Linear(2, 2), mesh=mesh),
        lambda api: copy.deepcopy(api.replicate(nn.Linear(2, 2))),
    ):
        errors: list[Exception] = []
        for api in (torchs(), OURS):
            with pytest.raises(Exception) as caught:
                call(api)
            errors.append(caught.value)
        assert type(errors[1]) is type(errors[0])
        assert str(errors[0]).splitlines()[0] in str(errors[1])


@ranks(2)
def test_programs_find_it_in_torchs_place() -> None:
    with installed():
        home = importlib.import_module(HOME)
        assert home.replicate is fullshard.replicate
        assert home.ReplicateModule is fullshard.ReplicateModule
        model = home.replicate(nn.Linear(2, 2))
        model(torch.full((1, 2), float(dist.get_rank()))).sum().backward()
        torch.testing.assert_close(model.weight.grad.to_local(), torch.full((2, 2), 0.5))
    assert home.replicate is not fullshard.replicate
