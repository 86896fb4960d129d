"""The methods that fully_shard gives a module do what torch's do, and errors are torch's."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.fully_shard.side_by_side import (
    OURS,
    THEIRS,
    Model,
    both,
    build,
    by_block,
    forward_loss,
    told,
    train,
    whole,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import fullshard
from fullshard.per_parameter import meshes
from fullshard.testing import device, ranks


def prepare(api: Any, **options: Any) -> Any:
    model = build()
    by_block(**options)(api, model)
    return model


@ranks(2)
def test_unshard_shows_full_parameters_until_reshard() -> None:
    for api in (THEIRS, OURS):
        model = prepare(api)
        block = model.blocks[0]
        expected = whole(block.up.weight)

        block.unshard()
        assert not isinstance(block.up.weight, DTensor)
        torch.testing.assert_close(block.up.weight.detach().cpu(), expected.detach())
        assert isinstance(model.blocks[1].up.weight, DTensor)
        block.reshard()
        assert isinstance(block.up.weight, DTensor)
        handle = block.unshard(async_op=True)
        handle.wait()
        assert not isinstance(block.up.weight, DTensor)
        loss = forward_loss(model, 0)
        loss.backward()
        assert isinstance(block.up.weight, DTensor)
    assert isinstance(handle, fullshard.UnshardHandle)


@ranks(2)
def test_prefetching_on_the_users_word_changes_no_result() -> None:
    def shard(api: Any, model: Any) -> None:
        by_block()(api, model)
        first, second, third = model.blocks
        model.set_modules_to_forward_prefetch([first, second])
        first.set_modules_to_forward_prefetch([second, third])
        third.set_modules_to_backward_prefetch([second, first])

    both(shard)


@ranks(2)
def test_the_gradient_divide_factor_takes_the_place_of_the_number_of_ranks() -> None:
    for factor in (1.0, 6.0):

        def shard(api: Any, model: Any, factor: float = factor) -> None:
            by_block()(api, model)
            for module in model.modules():
                if isinstance(module, api.FSDPModule):
                    # Without, torch asks gloo for what it cannot do.
                    module.set_force_sum_reduction_for_comms(True)
                    module.set_gradient_divide_factor(factor)

        both(shard, steps=2)


@ranks(2)
def test_parameters_may_stay_unsharded_after_backward() -> None:
    def accumulate(api: Any, model: Any, step: int) -> torch.Tensor:
        model.set_reshard_after_backward(False)
        model.set_is_last_backward(False)
        forward_loss(model, step).backward()
        model.set_reshard_after_backward(True)
        model.set_is_last_backward(True)
        loss = forward_loss(model, step + 7)
        loss.backward()
        return loss

    # Torch shows full parameters in between; gradients and parameters are compared afterwards.
    both(by_block(), step_with=accumulate)


@ranks(2)
def test_resharding_after_forward_can_be_switched() -> None:
    def switch(api: Any, model: Any, step: int) -> torch.Tensor:
        model.set_reshard_after_forward(step % 2 == 0, recurse=True)
        loss = forward_loss(model, step)
        assert isinstance(model.blocks[0].up.weight, DTensor) == (step % 2 == 0)
        loss.backward()
        return loss

    both(by_block(), step_with=switch)


@ranks(2)
def test_a_hook_sees_reduced_gradients() -> None:
    def shard(api: Any, model: Any) -> None:
        by_block()(api, model)
        for module in model.modules():
            if isinstance(module, api.FSDPModule):
                module.set_all_reduce_hook(lambda reduced: reduced.mul_(2.0))

    both(shard)


@ranks(2)
def test_a_hook_sees_zeros_between_gradients() -> None:
    sums: dict[Any, list[float]] = {}
    for api in (THEIRS, OURS):
        model: Any = build()
        by_block()(api, model)
        found = sums[api] = []
        for block in model.blocks:
            block.set_all_reduce_hook(lambda reduced, found=found: found.append(reduced.sum()))
        # What memory held before must not be seen.
        _ = [torch.full((n,), float("nan")) for n in range(1, 400)]
        forward_loss(model, 0).backward()

    torch.testing.assert_close(sums[OURS], sums[THEIRS])


@ranks(2)
def test_a_registered_method_runs_with_full_parameters() -> None:
    class Method(Model):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.blocks[0](self.embed(x)))

    outputs = []
    for api in (THEIRS, OURS):
        torch.manual_seed(0)
        model: Any = Method()
        by_block()(api, model)
        api.register_fsdp_forward_method(model, "features")
        output = model.features(torch.arange(11))
        output.sum().backward()
        outputs.append((output.detach(), told(model.head.weight.grad)[-1]))

    torch.testing.assert_close(outputs[1], outputs[0])


@ranks(2)
def test_mixed_precision_is_torchs() -> None:
    for options in (
        {"param_dtype": torch.bfloat16},
        {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
        {"param_dtype": torch.bfloat16, "output_dtype": torch.float32},
        {"reduce_dtype": torch.float64},
    ):

        def shard(api: Any, model: Any, options: Any = options) -> None:
            within = {**options, "output_dtype": None}
            for block in model.blocks:
                api.fully_shard(block, mp_policy=api.MixedPrecisionPolicy(**within))
            api.fully_shard(model, mp_policy=api.MixedPrecisionPolicy(**options))

        ours, theirs = both(shard, tolerance=2e-2)
        dtypes = [m.model(torch.arange(11)).dtype for m in (ours, theirs)]
        assert dtypes[0] == dtypes[1]


@ranks(2)
def test_offloading_on_a_host_changes_nothing() -> None:
    def shard(api: Any, model: Any) -> None:
        by_block(offload_policy=api.CPUOffloadPolicy(pin_memory=False))(api, model)

    both(shard)


@ranks(4)
def test_hybrid_sharding_is_torchs() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    ours, _ = both(by_block(mesh=mesh))

    assert ours.model.head.weight.placements == (Replicate(), Shard(0))

    def accumulate(api: Any, model: Any, step: int) -> torch.Tensor:
        model.set_requires_all_reduce(False)
        forward_loss(model, step).backward()
        model.set_requires_all_reduce(True)
        loss = forward_loss(model, step + 7)
        loss.backward()
        return loss

    both(by_block(mesh=mesh, reshard_after_forward=False), step_with=accumulate)


class Wide(nn.Module):
    """Named as tensor parallelism wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8)) for _ in "ab"
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return hidden


@ranks(4)
def test_tensor_parallelism_is_a_further_dimension_of_the_mesh() -> None:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def make() -> nn.Module:
        torch.manual_seed(4)
        return Wide()

    def shard(api: Any, model: Any) -> None:
        for block in model.blocks:
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(block, mesh["tp"], plan)
            api.fully_shard(block, mesh=mesh["dp"])
        api.fully_shard(model, mesh=mesh["dp"])

    def step_with(api: Any, model: Any, step: int) -> torch.Tensor:
        # The same data on ranks that share a part of the model.
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank() // 2)
        loss = model(torch.randint(11, (3, 4), generator=generator)).square().mean()
        loss.backward()
        return loss

    both(shard, make=make, step_with=step_with)


@ranks(4)
def test_a_model_after_another_finds_its_own_mesh_and_one_tensor_parallel_rank_cuts_nothing() -> (
    None
):
    """DTensor's operations return parts of an earlier mesh that compare equal."""
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    found: list[list[Any]] = []
    for api in (THEIRS, OURS):
        placed: list[Any] = []
        for shape in ((1, 2, 2), (2, 1, 2), (2, 2, 1)):
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards", "tp"))
            model = nn.Sequential(nn.Linear(4, 8))
            parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
            api.fully_shard(model, mesh=mesh["copies", "shards"])
            for parameter in model.parameters():
                dtensor: Any = parameter
                placed.append((dtensor.device_mesh, dtensor.placements, dtensor.to_local().shape))
        found.append(placed)

    assert found[1] == found[0]


@ranks(2)
def test_a_model_on_the_meta_device_is_sharded_then_made() -> None:
    trained = train(THEIRS, by_block(), steps=1)
    state = trained.model.state_dict()
    for assign in (False, True):
        with torch.device("meta"):
            model: Any = Model()
        by_block()(OURS, model)
        assert model.head.weight.is_meta
        with pytest.raises(RuntimeError, match=r"materialized from meta device.*head.weight"):
            model(torch.arange(3))
        if assign:
            # What torch's own sharded model holds, as it is.
            model.load_state_dict(copy.deepcopy(state), assign=True)
        else:
            model.to_empty(device=device())
            model.load_state_dict(state)
        trained.model.zero_grad()
        expected, found = forward_loss(trained.model, 3), forward_loss(model, 3)
        expected.backward()
        found.backward()
        torch.testing.assert_close(found, expected)
        assert told(model.head.weight.grad)[3] == told(trained.model.head.weight.grad)[3]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = whole(model.head.weight).clone()
        optimizer.step()
        assert not torch.equal(whole(model.head.weight), before)
        after = forward_loss(model, 3)
        assert after.item() != found.item()


@ranks(2)
def test_parameters_that_a_state_dict_did_not_have_are_named_as_under_torchs() -> None:
    state = train(THEIRS, by_block(), steps=1).model.state_dict()
    messages: list[str] = []
    for api in (THEIRS, OURS):
        with torch.device("meta"):
            model: Any = Model()
        by_block()(api, model)
        missing = {name: value for name, value in state.items() if "head.weight" not in name}
        model.load_state_dict(copy.deepcopy(missing), assign=True, strict=False)
        with pytest.raises(RuntimeError) as caught:
            model(torch.arange(3))
        messages.append(str(caught.value))

    assert "following were still on meta device: ['head.weight']" in messages[0]
    assert messages[1] == messages[0]


@ranks(2)
def test_parameters_that_are_replaced_or_converted_are_taken_up_again() -> None:
    model = prepare(OURS)
    other = build().to(device())
    with torch.no_grad():
        other.head.weight.mul_(3.0)
    model.head.weight = nn.Parameter(other.head.weight.detach().clone())

    torch.testing.assert_close(forward_loss(model, 0).item(), forward_loss(other, 0).item())
    assert isinstance(model.head.weight, DTensor) or model.head.weight.grad_fn is not None
    model.reshard()
    assert isinstance(model.head.weight, DTensor)
    model.to(torch.float64)
    assert model.blocks[0].up.weight.dtype is torch.float64
    loss = forward_loss(model, 0)
    loss.backward()
    assert model.head.weight.grad.dtype is torch.float64
    model.head.weight = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(RuntimeError, match=r"'head.weight'.*\(2, 2\).*\(3, 5\)"):
        model(torch.arange(3))


REFUSED: list[tuple[str, Callable[[Any], Any]]] = [
    ("a list", lambda api: api.fully_shard(nn.ModuleList([nn.Linear(2, 2)]))),
    ("a dict", lambda api: api.fully_shard(nn.ModuleDict({"a": nn.Linear(2, 2)}))),
    ("twice", lambda api: api.fully_shard(api.fully_shard(nn.Linear(2, 2)))),
    ("int", lambda api: api.fully_shard(nn.Linear(2, 2), reshard_after_forward=3)),
    ("zero", lambda api: api.fully_shard(nn.Linear(2, 2), reshard_after_forward=0)),
    ("str", lambda api: api.fully_shard(nn.Linear(2, 2), reshard_after_forward="x")),
    ("dim", lambda api: api.fully_shard(nn.Linear(3, 4), shard_placement_fn=lambda p: Shard(-1))),
    ("copy", lambda api: copy.deepcopy(api.fully_shard(nn.Linear(2, 2)))),
    ("mesh", lambda api: api.fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1, 2)))),
    (
        "prefetch",
        lambda api: api.fully_shard(nn.Linear(2, 2)).set_modules_to_forward_prefetch([nn.Tanh()]),
    ),
    ("switch", lambda api: api.fully_shard(nn.Linear(2, 2)).set_reshard_after_forward(2)),
    ("share", lambda api: api.share_comm_ctx([nn.Tanh()])),
    ("method", lambda api: api.register_fsdp_forward_method(api.fully_shard(nn.Tanh()), "nope")),
    (
        "backward prefetch",
        lambda api: api.fully_shard(nn.Linear(2, 2)).set_modules_to_backward_prefetch([nn.Tanh()]),
    ),
]
if hasattr(THEIRS.FSDPModule, "set_reduce_scatter_max_input_buffers"):
    REFUSED += [
        (
            f"{count!r} buffers",
            functools.partial(
                lambda count, api: api.fully_shard(
                    nn.Linear(2, 2)
                ).set_reduce_scatter_max_input_buffers(count),
                count,
            ),
        )
        for count in (0, 1.5, True)
    ]


@ranks(2)
def test_what_torch_refuses_is_refused_with_its_error() -> None:
    for name, call in REFUSED:
        errors: list[Exception] = []
        for api in (THEIRS, OURS):
            with pytest.raises(Exception) as caught:
                call(api)
            errors.append(caught.value)
        assert type(errors[1]) is type(errors[0]), name
        first = str(errors[0]).splitlines()[0].split(" (world")[0].split(": torch.Size")[0]
        first = first.rpartition("'> ")[2]
        assert first in str(errors[1]), (name, errors)


@ranks(2)
def test_every_method_of_torchs_class_is_there() -> None:
    names = {name for name in dir(THEIRS.FSDPModule) if not name.startswith("__")}

    assert names <= set(dir(fullshard.FSDPModule))


@ranks(2)
def test_a_step_that_raised_is_reset() -> None:
    model = prepare(OURS)
    model.set_requires_gradient_sync(False)
    forward_loss(model, 0).backward()
    model.set_requires_gradient_sync(True)

    model.reset_iter_state()
    forward_loss(model, 1).backward()

    expected = train(THEIRS, by_block(), steps=1)
    other = prepare(THEIRS)
    forward_loss(other, 1).backward()
    torch.testing.assert_close(told(model.head.weight.grad)[-1], told(other.head.weight.grad)[-1])
    assert len(expected.losses) == 1


@ranks(2)
def test_a_build_of_torch_for_gpus_shards_on_the_host_where_there_is_no_gpu() -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator here")

    def built_for_gpus(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "current_accelerator", built_for_gpus)
        patch.setattr(meshes, "_over_all", {})
        model = fullshard.fully_shard(build())

    parameter = next(model.parameters())
    assert isinstance(parameter, DTensor)
    assert parameter.device_mesh.device_type == "cpu"
