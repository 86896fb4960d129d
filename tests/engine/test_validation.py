"""What cannot be sharded is refused with its path; what may differ between units trains."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from typing import Any

import pytest
import torch
from tests.original.training import (
    Block,
    Net,
    blocks_policy,
    build,
    compare_models,
    inputs,
    train_step,
)
from torch import nn

from fullshard import BackwardPrefetch, CPUOffload, ShardingStrategy
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.testing import device, ranks
from fullshard.wrap import ModuleWrapPolicy


class Holder(nn.Module):
    """Another module at the path ``parts.odd``."""

    def __init__(self, odd: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.parts = nn.ModuleDict({"odd": odd})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts["odd"](self.linear(x))


def holder(odd: nn.Module) -> nn.Module:
    return Holder(odd).to(device())


with_and_without_policy = pytest.mark.parametrize(
    "policy", [None, ModuleWrapPolicy({nn.Linear})], ids=["one unit", "policy"]
)


@with_and_without_policy
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@ranks(2)
def test_script_modules_are_refused(policy: Any) -> None:
    module = holder(torch.jit.script(nn.Linear(5, 5)))

    with pytest.raises(TypeError, match=r"'parts.odd', of type RecursiveScriptModule"):
        FSDP(module, auto_wrap_policy=policy)

    model = FSDP(module, ignored_modules=[module.parts["odd"]], auto_wrap_policy=policy)
    train_step(model, 0)


@ranks(2)
def test_lazy_modules_are_refused_until_they_have_run() -> None:
    module = holder(nn.LazyLinear(3))

    with pytest.raises(ValueError, match=r"'parts.odd.weight' has no shape yet"):
        FSDP(module)

    module(inputs(0))
    train_step(FSDP(module), 0)


@ranks(2)
def test_sparse_parameters_are_refused() -> None:
    module = holder(nn.Linear(5, 5))
    odd = module.parts["odd"]
    odd.weight = nn.Parameter(odd.weight.detach().to_sparse())

    with pytest.raises(ValueError, match=r"'parts.odd.weight' has the layout torch.sparse_coo"):
        FSDP(module)


@pytest.mark.parametrize(
    "container", [lambda m: nn.ModuleList([m]), lambda m: nn.ModuleDict({"a": m})]
)
@ranks(2)
def test_containers_that_are_never_called_are_warned_about(container: Any) -> None:
    message = "FSDP will not all-gather parameters for containers that do not implement forward"

    with pytest.warns(UserWarning, match=message) as caught:
        FSDP(container(nn.Linear(3, 3).to(device())))

    assert sum(message in str(warning.message) for warning in caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FSDP(nn.Sequential(nn.Linear(3, 3)).to(device()))


@ranks(2)
def test_data_parallel_modules_inside_of_a_unit_train() -> None:
    class Replicated(Net):
        def __init__(self) -> None:
            super().__init__()
            devices = [] if device().type == "cpu" else [device()]
            self.head = nn.DataParallel(self.head.to(device()), device_ids=devices)

    compare_models(build(Replicated), FSDP(build(Replicated), auto_wrap_policy=blocks_policy()))


@ranks(2)
def test_parameters_on_two_devices_are_refused_by_name() -> None:
    if device().type == "cpu":
        pytest.skip("needs a device beside the host")
    module = holder(nn.Linear(5, 5))
    module.parts["odd"].cpu()

    with pytest.raises(RuntimeError, match=r"single device modules .*'parts.odd.weight' on cpu"):
        FSDP(module)


@ranks(2)
def test_units_that_were_moved_apart_are_refused_by_name() -> None:
    model = FSDP(build(Net), auto_wrap_policy=blocks_policy())
    model.blocks[1].to("meta")

    with pytest.raises(ValueError, match=r"one homogeneous value for compute_device .*'blocks.1'"):
        train_step(model, 0)


@ranks(2)
def test_a_device_that_the_machine_lacks_is_named() -> None:
    missing = torch.device("xpu" if device().type == "cuda" else "cuda", 3)

    with pytest.raises(RuntimeError, match=rf"device_id asks for {missing}, but torch finds no"):
        FSDP(nn.Linear(3, 3), device_id=missing)


@ranks(2)
def test_a_device_other_than_the_models_is_refused() -> None:
    if device().type == "cpu":
        pytest.skip("needs a device beside the host")

    with pytest.raises(ValueError, match=r"Inconsistent compute device and `device_id` on rank"):
        FSDP(nn.Linear(3, 3).to(device()), device_id=torch.device("cpu"))


@ranks(2)
def test_an_error_about_devices_says_what_is_in_the_wrong_place() -> None:
    module = holder(nn.Linear(5, 3))
    module.parts["odd"].to("meta")
    model = FSDP(module, ignored_modules=[module.parts["odd"]])

    with pytest.raises(RuntimeError) as caught:
        train_step(model, 0)
    assert "unmanaged parameter 'parts.odd.weight' on meta" in caught.value.__notes__[0]
    assert "'(root) Holder' computes on" in caught.value.__notes__[0]

    module.parts["odd"] = nn.Identity()
    train_step(model, 0)


@ranks(2)
def test_inputs_in_the_wrong_place_are_told_once() -> None:
    if device().type != "cpu":
        pytest.skip("there, inputs are moved to where the model computes")
    model = FSDP(build(Net), auto_wrap_policy=ModuleWrapPolicy({nn.Linear, Block}))

    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(2, 5, device="meta"))

    assert len(caught.value.__notes__) == 1
    assert "an input on meta" in caught.value.__notes__[0]


class Buffered(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.offset)


@pytest.mark.parametrize("offload", [False, True])
@ranks(2)
def test_inputs_and_buffers_are_moved_to_where_the_model_computes(offload: bool) -> None:
    bare = build(Buffered)
    model = FSDP(
        copy.deepcopy(bare).cpu(),
        auto_wrap_policy=blocks_policy(),
        device_id=None if offload else device(),
        cpu_offload=CPUOffload(offload_params=offload),
        use_orig_params=True,
    )

    output = model(inputs(0).cpu())

    assert output.device.type == device().type
    assert model.offset.device.type == device().type
    torch.testing.assert_close(output, bare(inputs(0)))


@ranks(2)
def test_a_root_without_parameters_computes_where_its_units_do() -> None:
    bare = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))

    model = FSDP(bare, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))

    assert model.compute_device == torch.device("cpu")
    assert model(torch.ones(2, 5)).device == torch.device("cpu")


#: Pairs of values, for the root and for a nested unit, of every argument that may differ.
DIFFERING: dict[str, tuple[Any, Any]] = {
    "use_orig_params": (False, True),
    "limit_all_gathers": (True, False),
    "forward_prefetch": (True, False),
    "backward_prefetch": (BackwardPrefetch.BACKWARD_POST, None),
    "sharding_strategy": (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD),
    "cpu_offload": (CPUOffload(offload_params=False), CPUOffload(offload_params=True)),
}


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("argument", DIFFERING)
@ranks(2)
def test_units_may_differ_in_every_option(argument: str, swapped: bool) -> None:
    if argument == "cpu_offload" and device().type != "cpu":
        pytest.skip("an optimizer with parameters on two devices is another matter")
    outer, inner = DIFFERING[argument][:: -1 if swapped else 1]
    bare = build(Net)
    model = copy.deepcopy(bare)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = FSDP(block, **{argument: inner if index != 1 else outer})

    compare_models(bare, FSDP(model, **{argument: outer}))


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize("use_orig_params", [True, False])
@ranks(2)
def test_parameters_used_outside_of_their_unit_are_named(use_orig_params: bool) -> None:
    policy = ModuleWrapPolicy({nn.Linear})
    model = FSDP(build(Attending), auto_wrap_policy=policy, use_orig_params=use_orig_params)
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(2, 1, 8, device=device()))
    (note,) = caught.value.__notes__
    assert "'attention.out_proj'" in note
    assert "let the module that uses it be the unit" in note


@ranks(2)
def test_an_error_about_other_shapes_is_left_as_it_is() -> None:
    model = FSDP(build(Net), auto_wrap_policy=blocks_policy(), use_orig_params=True)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        model(torch.ones(2, 987, device=device()))
    assert not hasattr(caught.value, "__notes__")


class Refusing(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a user's own word about 1-D tensors")


@dataclasses.dataclass(frozen=True)
class Frozen(RuntimeError):
    code: int


@ranks(2)
def test_an_error_that_takes_no_notes_comes_out_as_it_is() -> None:
    class Raising(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise Frozen(3)

    model = FSDP(build(lambda: nn.Sequential(nn.Linear(4, 4), Raising())))
    with pytest.raises(Frozen):
        model(torch.ones(2, 4, device=device()))


@ranks(2)
def test_an_error_inside_a_unit_is_not_blamed_on_others_that_rest() -> None:
    model = FSDP(
        build(lambda: nn.Sequential(Refusing(4, 4), nn.Linear(4, 4))),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
    )
    with pytest.raises(RuntimeError, match="own word") as caught:
        model(torch.ones(2, 4, device=device()))
    assert not hasattr(caught.value, "__notes__")
