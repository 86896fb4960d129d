"""Names, order, dtypes and memory of state dicts, wherever and whenever they are asked for."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.original.training import Block, Net, blocks_policy, build, inputs, loss_of, train_step
from tests.state.models import (
    KINDS,
    LONG,
    STRATEGIES,
    Odd,
    assert_same_state,
    copied,
    kind,
    other,
    wipe,
    wrapped,
)
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fullshard import (
    CPUOffload,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.testing import device, ranks

FULL_SHARD = ShardingStrategy.FULL_SHARD
SOME = (FULL_SHARD, ShardingStrategy.NO_SHARD)
HALF = MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize("wrapping", ["one unit", "blocks"])
@pytest.mark.parametrize(
    ("mixed_precision", "strategy"),
    [(None, strategy) for strategy in STRATEGIES]
    + [(HALF, strategy) for strategy in (STRATEGIES if LONG else SOME)],
)
@ranks(4)
def test_odd_parameters_and_buffers_are_saved_as_in_the_bare_model(
    mixed_precision: MixedPrecision | None, strategy: ShardingStrategy, wrapping: str
) -> None:
    bare = build(Odd)
    model = wrapped(bare, strategy, wrapping, use_orig_params=True, mixed_precision=mixed_precision)
    assert_same_state(model.state_dict(), dict(bare.state_dict()))
    if mixed_precision is None or strategy is FULL_SHARD:
        for name in KINDS:
            with kind(model, name):
                state = copied(model.state_dict())
                wipe(model)
                model.load_state_dict(state)
            assert_same_state(model.state_dict(), dict(bare.state_dict()))
    assert model.state_dict()["conv.weight"].is_contiguous(memory_format=torch.channels_last)


@ranks(2)
def test_buffers_come_and_go_in_the_dtype_they_were_registered_in() -> None:
    bare = build(Odd)
    model = wrapped(bare, FULL_SHARD, "blocks", use_orig_params=True, mixed_precision=HALF)
    loss_of(model, 0)
    state = model.state_dict()
    assert model.table.dtype is torch.bfloat16
    assert {n: v.dtype for n, v in state.items()} == {
        n: v.dtype for n, v in bare.state_dict().items()
    }
    model.load_state_dict(bare.state_dict())
    assert torch.equal(model.state_dict()["table"], bare.table)


@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(2)
def test_every_name_of_a_shared_parameter_is_there_and_order_survives_ignored_ones(
    use_orig_params: bool,
) -> None:
    bare = build(Odd)
    sharded = copy.deepcopy(bare)
    ignored = [sharded.gain, sharded.frozen, sharded.embed.bias, sharded.block.up.weight]
    model = FSDP(
        sharded,
        ignored_states=ignored,
        auto_wrap_policy=blocks_policy(),
        use_orig_params=use_orig_params,
    )
    state = model.state_dict()
    assert_same_state(state, dict(bare.state_dict()))
    assert state["tied.weight"].data_ptr() == state["embed.weight"].data_ptr()
    assert state["embed.bias"].data_ptr() == sharded.embed.bias.data_ptr()
    wipe(model)
    model.load_state_dict(bare.state_dict())
    assert_same_state(model.state_dict(), dict(bare.state_dict()))


class Tied(nn.Module):
    """Two blocks that share a parameter, which therefore belongs to the unit around both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.second.up.bias = self.first.up.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(2)
def test_a_parameter_shared_across_units_is_saved_from_any_of_them(use_orig_params: bool) -> None:
    bare = build(Tied)
    model = wrapped(bare, FULL_SHARD, "blocks", use_orig_params=use_orig_params)
    assert_same_state(model.state_dict(), dict(bare.state_dict()))
    assert_same_state(model.module.second.state_dict(), dict(bare.second.state_dict()))
    wipe(model)
    model.module.first.load_state_dict(bare.first.state_dict())
    assert_same_state(model.module.first.state_dict(), dict(bare.first.state_dict()))


class Outer(nn.Module):
    """Not wrapped itself."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.inner = inner
        self.tail = nn.Linear(2, 2)


@pytest.mark.parametrize("name", [name for name in KINDS if name != "local"])
@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(2)
def test_any_module_in_or_around_a_unit_can_be_saved_and_loaded(
    use_orig_params: bool, name: str
) -> None:
    bare = Outer(build(Net))
    model = copy.deepcopy(bare)
    model.inner = wrapped(bare.inner, FULL_SHARD, "blocks", use_orig_params=use_orig_params)
    for path in ("", "inner", "inner.blocks.1", "inner.blocks", "inner.head", "inner.blocks.0.up"):
        part, expected = model.get_submodule(path), bare.get_submodule(path)
        wipe(model)
        with kind(model, "full"):
            part.load_state_dict(expected.state_dict())
        with kind(model, name):
            part.load_state_dict(part.state_dict())
            assert list(part.state_dict()) == list(expected.state_dict())
        assert_same_state(part.state_dict(), dict(expected.state_dict()))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(2)
def test_saving_between_forward_and_backward_disturbs_neither(
    use_orig_params: bool, strategy: ShardingStrategy
) -> None:
    bare = build(Net)
    model, undisturbed = (
        wrapped(bare, strategy, "blocks", use_orig_params=use_orig_params) for _ in range(2)
    )
    loss = loss_of(model, 0)
    for name in KINDS:
        with kind(model, name):
            model.state_dict()
    assert_same_state(model.state_dict(), dict(bare.state_dict()))
    loss.backward()
    train_step(undisturbed, 0)
    for one, two in zip(model.parameters(), undisturbed.parameters(), strict=True):
        assert (one.grad is None) == (two.grad is None)
        assert one.grad is None or torch.equal(one.grad, two.grad)


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_loading_replaces_full_parameters_that_a_strategy_keeps(
    strategy: ShardingStrategy,
) -> None:
    bare = other(Net)
    model = wrapped(build(Net), strategy, "blocks", use_orig_params=True)
    with model.no_sync():
        train_step(model, 0)
    loss_of(model, 0)
    model.load_state_dict(bare.state_dict())
    assert loss_of(model, 1).item() == loss_of(bare, 1).item()


@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(2)
def test_in_eval_and_under_no_grad_a_state_dict_is_the_same(use_orig_params: bool) -> None:
    bare = build(Net)
    model = wrapped(bare, FULL_SHARD, "blocks", use_orig_params=use_orig_params).eval()
    with torch.no_grad():
        loss_of(model, 0)
        state = model.state_dict()
        model.load_state_dict(state)
    assert_same_state(state, dict(bare.state_dict()))
    assert not any(value.requires_grad for value in state.values())


@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(2)
def test_inside_summon_a_state_dict_has_what_is_shown_and_loading_changes_it(
    use_orig_params: bool,
) -> None:
    bare = build(Net)
    model = wrapped(bare, FULL_SHARD, "blocks", use_orig_params=use_orig_params)
    with FSDP.summon_full_params(model), torch.no_grad():
        model.head.bias.fill_(2)
        bare.head.bias.fill_(2)
        assert_same_state(model.state_dict(), dict(bare.state_dict()))
        stranger = other(Net)
        model.load_state_dict(stranger.state_dict())
        assert torch.equal(model.head.weight, stranger.head.weight)
    assert_same_state(model.state_dict(), dict(stranger.state_dict()))
    with FSDP.summon_full_params(model, rank0_only=True, writeback=False):
        assert_same_state(model.state_dict(), dict(stranger.state_dict()))
    with (
        FSDP.summon_full_params(model),
        kind(model, "sharded"),
        pytest.raises(RuntimeError, match=r"sharded.*summon_full_params"),
    ):
        model.load_state_dict(model.state_dict())


@ranks(2)
def test_what_hooks_of_the_user_see_is_the_bare_models() -> None:
    seen: list[tuple[int, ...]] = []

    def look(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        seen.append(tuple(state[f"{prefix}weight"].shape))

    bare = build(Net)
    bare.head._register_state_dict_hook(look)
    model = wrapped(bare, FULL_SHARD, "blocks")
    model.state_dict()
    assert seen == [(3, 7)]


@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(2)
def test_a_hook_registered_after_wrapping_may_rename_and_change_what_is_loaded(
    use_orig_params: bool,
) -> None:
    def from_an_older_version(
        module: nn.Module, state: dict[str, Any], prefix: str, *_: Any
    ) -> None:
        state[f"{prefix}weight"] = state.pop(f"{prefix}kernel") + 1

    bare = build(Net)
    model = wrapped(bare, FULL_SHARD, "blocks", use_orig_params=use_orig_params)
    older = dict(bare.state_dict())
    older["head.kernel"] = older.pop("head.weight") - 1
    model.module.head.register_load_state_dict_pre_hook(from_an_older_version)
    for part in (model, model.module):
        wipe(model)
        part.load_state_dict(older)
        found = model.state_dict()
        torch.testing.assert_close(found["head.weight"], bare.head.weight.detach())
        assert torch.equal(found["blocks.1.up.weight"], bare.blocks[1].up.weight)


@ranks(2)
def test_what_is_registered_on_a_wrapper_is_saved_and_loaded() -> None:
    model = wrapped(build(Net), FULL_SHARD, "blocks")
    model.register_buffer("outer", torch.ones(2, device=device()))
    model.module.blocks[1].register_parameter("inner", nn.Parameter(torch.ones(3)))
    for name in KINDS:
        with kind(model, name):
            state = copied(model.state_dict())
            assert state["outer"].tolist() == [1, 1]
            assert state["blocks.1.inner"].tolist() == [1, 1, 1]
            model.outer.fill_(2)
            model.load_state_dict(state)
            assert model.outer.tolist() == [1, 1]


@ranks(1)
def test_a_hook_may_answer_with_another_state_dict() -> None:
    model = wrapped(build(Net), ShardingStrategy.NO_SHARD, "blocks")

    def upper(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> Any:
        return {name.upper(): value for name, value in state.items()}

    expected = [name.upper() for name in model.state_dict()]
    model._register_state_dict_hook(upper)
    assert list(model.state_dict()) == expected


@ranks(2)
def test_an_exception_in_the_middle_leaves_nothing_behind() -> None:
    bare = build(Net)
    model = wrapped(bare, FULL_SHARD, "one unit")

    def fail(*_: Any) -> None:
        raise KeyError("on purpose")

    hook = model.module.blocks[1].register_state_dict_pre_hook(fail)
    for part in (model, model.module.blocks):
        with pytest.raises(KeyError):
            part.state_dict()
    hook.remove()
    with torch.no_grad():
        model._flat_param.add_(1)
        for parameter in bare.parameters():
            parameter.add_(1)
    for prefix in ("2.", ""):
        expected = dict(bare.blocks[2].state_dict(prefix=prefix))
        assert_same_state(model.module.blocks[2].state_dict(prefix=prefix), expected)
    assert_same_state(model.state_dict(), dict(bare.state_dict()))


def parts_of(model: Any) -> list[nn.Module]:
    """Where a state dict of a model may begin, its second block inside of each."""
    net = getattr(model, "module", model)
    return [model, net, net.blocks, net.blocks[1]]


@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(2)
def test_a_hook_may_ask_for_another_state_dict_in_the_middle_of_one(use_orig_params: bool) -> None:
    bare = build(Net)
    model = wrapped(bare, FULL_SHARD, "one unit", use_orig_params=use_orig_params)
    others = [*zip(parts_of(model), parts_of(bare), strict=True), (model.module.head, bare.head)]
    asked: list[tuple[nn.Module, nn.Module]] = []

    def ask(*_: Any) -> None:
        while asked:
            inner, reference = asked.pop()
            assert_same_state(inner.state_dict(), dict(reference.state_dict()))

    model.module.blocks[1].register_state_dict_pre_hook(ask)
    for part, reference in zip(parts_of(model), parts_of(bare), strict=True):
        for pair in others:
            asked.append(pair)
            assert_same_state(part.state_dict(), dict(reference.state_dict()))


@ranks(2)
def test_a_state_dict_goes_on_after_another_one_inside_was_broken_off() -> None:
    bare = build(Net)
    model = wrapped(bare, FULL_SHARD, "one unit")
    asked: list[nn.Module] = []

    def ask_in_vain(*_: Any) -> None:
        if not asked:
            raise KeyError("on purpose")
        with pytest.raises(KeyError):
            asked.pop().state_dict()

    model.module.blocks[1].register_state_dict_pre_hook(ask_in_vain)
    for part, reference in zip(parts_of(model), parts_of(bare), strict=True):
        for inner in parts_of(model):
            asked[:] = [inner]
            assert_same_state(part.state_dict(), dict(reference.state_dict()))


@ranks(2)
def test_copies_and_pickles_save_their_own_parameters() -> None:
    bare = build(Net)
    model = wrapped(bare, FULL_SHARD, "blocks")
    model.state_dict()
    twins = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    wipe(model)
    for twin in twins:
        assert_same_state(twin.state_dict(), dict(bare.state_dict()))
        assert_same_state(twin.module.head.state_dict(), dict(bare.head.state_dict()))


@ranks(2)
def test_versions_of_modules_are_those_of_the_bare_model() -> None:
    bare = build(Odd)
    model = wrapped(bare, FULL_SHARD, "blocks", use_orig_params=True)
    state = model.state_dict()
    assert state._metadata == bare.state_dict()._metadata  # type: ignore[attr-defined]
    assert state._metadata["norm"]["version"] == 2  # type: ignore[attr-defined]
    del state["norm.num_batches_tracked"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"norm.num_batches_tracked"'):
        model.load_state_dict(state)


@ranks(2)
def test_a_state_dict_outlives_the_model_and_does_not_follow_it() -> None:
    bare = build(Net)
    for strategy in (FULL_SHARD, ShardingStrategy.NO_SHARD):
        model = wrapped(bare, strategy, "blocks", use_orig_params=True)
        state = model.state_dict()
        wipe(model)
        del model
        assert_same_state(state, dict(bare.state_dict()))


@ranks(3)
def test_offloaded_parameters_are_saved_and_loaded() -> None:
    bare = build(Net)
    model = wrapped(
        bare, FULL_SHARD, "blocks", cpu_offload=CPUOffload(True), device_id=device().index
    )
    for name in KINDS:
        with kind(model, name):
            state = copied(model.state_dict())
            wipe(model)
            model.load_state_dict(state)
        assert_same_state(model.state_dict(), dict(bare.state_dict()))


@ranks(4)
def test_rank0_only_leaves_other_ranks_without_anything() -> None:
    bare = build(Odd)
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    for strategy in STRATEGIES:
        model = wrapped(bare, strategy, "blocks", use_orig_params=True)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
            for part, expected in ((model, bare), (model.module.conv, bare.conv)):
                state = part.state_dict()
                if dist.get_rank() == 0:
                    assert_same_state(state, dict(expected.state_dict()))
                    assert all(value.device.type == "cpu" for value in state.values())
                else:
                    assert state == {}


@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(2)
def test_activation_checkpoint_wrappers_do_not_show(use_orig_params: bool) -> None:
    bare = build(Net)
    for inside in (False, True):
        sharded = copy.deepcopy(bare)
        for index, block in enumerate(sharded.blocks):
            unit: nn.Module = checkpoint_wrapper(block) if inside else block
            unit = FSDP(unit, use_orig_params=use_orig_params)
            sharded.blocks[index] = unit if inside else checkpoint_wrapper(unit)
        model = FSDP(sharded, use_orig_params=use_orig_params)
        state = model.state_dict()
        assert sorted(state) == sorted(bare.state_dict())
        wipe(model)
        model.load_state_dict(bare.state_dict())
        assert loss_of(model, 0).item() == loss_of(bare, 0).item()


@ranks(2)
def test_a_state_dict_in_the_middle_of_a_step_is_refused() -> None:
    model = wrapped(build(Net), FULL_SHARD, "blocks")

    def save(*_: Any) -> None:
        with pytest.raises(RuntimeError, match="in the middle of a forward"):
            model.state_dict()

    model.module.head.register_forward_hook(save)
    model(inputs(0))
