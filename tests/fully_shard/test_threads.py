"""Ranks that are threads of one process, in torch's own process group for fast tests."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.fully_shard.side_by_side import OURS, THEIRS, Block, Model, adamw, by_block
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from fullshard import FullyShardedDataParallel, summon_full_params
from fullshard.testing import device
from fullshard.wrap import ModuleWrapPolicy

distributed = pytest.importorskip("torch.testing._internal.common_distributed")

#: Made before there are threads: torch's generator of random numbers is one for all of them.
torch.manual_seed(0)
MODEL = Model()


def tokens(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randint(11, (4, 6), generator=generator)


def losses_of(model: Any, optimizer: Any, steps: int = 3) -> list[float]:
    found = []
    for step in range(steps):
        loss = model(tokens(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def train(api: Any, **options: Any) -> tuple[Any, list[float]]:
    model = copy.deepcopy(MODEL)
    by_block(**options)(api, model)
    return model, losses_of(model, adamw(model.parameters()))


class Recomputing(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.skipif(device().type != "cpu", reason="threads share one device's memory")
class TestThreads(distributed.MultiThreadedTestCase):  # type: ignore[misc, name-defined]
    @property
    def world_size(self) -> int:
        return 3

    def setUp(self) -> None:
        super().setUp()
        self._spawn_threads()

    def test_training_is_torchs(self) -> None:
        for options in ({}, {"reshard_after_forward": False}):
            (_, theirs), (_, ours) = train(THEIRS, **options), train(OURS, **options)
            assert ours == pytest.approx(theirs, rel=1e-5)

    def test_state_dicts_and_full_parameters_are_torchs(self) -> None:
        (theirs, _), (ours, _) = train(THEIRS), train(OURS)
        for name, value in theirs.state_dict().items():
            found = ours.state_dict()[name]
            if hasattr(value, "to_local"):
                value, found = value.full_tensor(), found.full_tensor()
            torch.testing.assert_close(found, value)
        with summon_full_params(ours):
            for name, parameter in theirs.named_parameters():
                torch.testing.assert_close(
                    ours.get_parameter(name).detach(), parameter.full_tensor()
                )

    def test_clipping_is_torchs(self) -> None:
        norms = []
        for api in (THEIRS, OURS):
            model = copy.deepcopy(MODEL)
            by_block()(api, model)
            model(tokens(0)).square().mean().backward()
            norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            norms.append(norm.full_tensor().item())
        assert norms[1] == pytest.approx(norms[0])

    def test_recomputation_and_accumulation_change_no_result(self) -> None:
        found = []
        for api in (THEIRS, OURS):
            model: Any = copy.deepcopy(MODEL)
            for index, block in enumerate(model.blocks):
                model.blocks[index] = Recomputing(api.fully_shard(block))
            api.fully_shard(model)
            optimizer = adamw(model.parameters())
            model.set_requires_gradient_sync(False)
            model(tokens(7)).square().mean().backward()
            model.set_requires_gradient_sync(True)
            found.append(losses_of(model, optimizer))
        assert found[1] == pytest.approx(found[0], rel=1e-5)

    def test_an_exception_leaves_a_model_that_trains(self) -> None:
        model: Any = copy.deepcopy(MODEL)
        by_block()(OURS, model)
        with pytest.raises(IndexError):
            model(torch.full((2, 2), 99))
        expected = train(OURS)[1]
        assert losses_of(model, adamw(model.parameters())) == expected

    def test_the_wrapper_trains_as_well(self) -> None:
        model = FullyShardedDataParallel(
            copy.deepcopy(MODEL),
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=True,
        )
        assert losses_of(model, adamw(model.parameters())) == pytest.approx(train(OURS)[1])


@pytest.mark.skipif(device().type != "cpu", reason="threads share one device's memory")
class TestHybridThreads(distributed.MultiThreadedTestCase):  # type: ignore[misc, name-defined]
    @property
    def world_size(self) -> int:
        return 4

    def setUp(self) -> None:
        super().setUp()
        self._spawn_threads()

    def test_copies_of_shards_train_as_torchs(self) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
        (_, theirs), (_, ours) = train(THEIRS, mesh=mesh), train(OURS, mesh=mesh)
        assert ours == pytest.approx(theirs, rel=1e-5)
