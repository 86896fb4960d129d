"""State dicts of every type bring back every bit, whatever was sharded and wrapped how."""

from __future__ import annotations

import pytest
from tests.original.training import Net, adam, assert_at_rest, build, loss_of, train_step
from tests.state.models import (
    KINDS,
    LONG,
    WRAPPINGS,
    assert_same_state,
    copied,
    kind,
    next_loss,
    other,
    settings,
    wipe,
    wrapped,
)

from fullshard import ShardingStrategy
from fullshard.testing import run_on_ranks


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize(("world_size", "strategy"), settings(1, 2, 3, 4))
def test_a_state_dict_of_any_type_brings_a_trained_model_back(
    world_size: int, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    def round_trips() -> None:
        model = wrapped(build(Net), strategy, "blocks", use_orig_params=use_orig_params)
        train_step(model, 0)
        adam(model).step()
        expected, loss = copied(model.state_dict()), next_loss(model)
        for name in KINDS:
            with kind(model, name):
                state = copied(model.state_dict())
                wipe(model)
                model.load_state_dict(state)
            if model.world_size > 1:
                assert_at_rest(model)
            assert_same_state(model.state_dict(), expected)
            assert next_loss(model) == loss

    run_on_ranks(world_size, round_trips)


@pytest.mark.parametrize(
    ("world_size", "use_orig_params"),
    [(2, False), (4, True), *([(2, True), (4, False)] if LONG else [])],
)
def test_a_state_dict_moves_to_another_wrapping_strategy_and_flattening(
    world_size: int, use_orig_params: bool
) -> None:
    def move() -> None:
        strategies = (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD)
        bare = build(Net)
        source = wrapped(bare, strategies[0], "blocks", use_orig_params=use_orig_params)
        for wrapping in WRAPPINGS:
            for strategy in strategies:
                target = wrapped(
                    other(Net), strategy, wrapping, use_orig_params=not use_orig_params
                )
                for name in (name for name in KINDS if name != "local"):
                    wipe(target)
                    with kind(source, name), kind(target, name):
                        target.load_state_dict(source.state_dict())
                    assert_same_state(target.state_dict(), dict(bare.state_dict()))
                    assert next_loss(target) == next_loss(source)

    run_on_ranks(world_size, move)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_full_state_dict_loads_into_the_bare_model_and_back(use_orig_params: bool) -> None:
    def there_and_back() -> None:
        bare, stranger = build(Net), other(Net)
        model = wrapped(
            bare, ShardingStrategy.FULL_SHARD, "blocks", use_orig_params=use_orig_params
        )
        stranger.load_state_dict(model.state_dict())
        assert_same_state(dict(stranger.state_dict()), dict(bare.state_dict()))
        wipe(model)
        model.load_state_dict(stranger.state_dict())
        assert loss_of(model, 1).item() == loss_of(bare, 1).item()

    run_on_ranks(3, there_and_back)
