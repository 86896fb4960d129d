"""When units are unsharded, when they are resharded, and when gradients are reduced: properties."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard import BackwardPrefetch, MixedPrecision, ShardingStrategy
from fullshard.engine.runtime.policy import AfterForward, Policy, UnitOptions, policy_for

HOST, ACCELERATOR = policy_for("cpu"), policy_for("cuda")
FREEING = (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)
KEEPING = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)

policies = st.sampled_from([HOST, ACCELERATOR])
units = st.builds(
    UnitOptions,
    st.sampled_from(ShardingStrategy),
    st.just(MixedPrecision()),
    st.sampled_from([None, *BackwardPrefetch]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
forwards_left = st.one_of(st.none(), st.integers(1, 50))


def unit(strategy: ShardingStrategy, prefetch: BackwardPrefetch | None = None) -> UnitOptions:
    return UnitOptions(strategy, MixedPrecision(), prefetch, False, True, True)


@given(policies, units)
def test_whoever_asks_for_prefetching_gets_it_in_forward_and_in_backward(
    policy: Policy, options: UnitOptions
) -> None:
    plan = policy.plan(options)

    if options.forward_prefetch:
        assert plan.prefetches_in_training
        assert plan.prefetches_in_evaluation
    wanted = options.backward_prefetch
    assert plan.prefetches_before_backward is (wanted is BackwardPrefetch.BACKWARD_PRE)
    assert plan.prefetches_after_backward is (wanted is BackwardPrefetch.BACKWARD_POST)


@given(units)
def test_an_accelerator_prefetches_in_forward_only_if_it_is_asked_to(options: UnitOptions) -> None:
    plan = ACCELERATOR.plan(options)

    assert plan.prefetches_in_training is options.forward_prefetch
    assert plan.prefetches_in_evaluation is options.forward_prefetch


@given(units)
def test_a_host_prefetches_unasked_only_what_takes_no_more_memory(options: UnitOptions) -> None:
    plan = HOST.plan(options)
    ahead_in_backward = options.backward_prefetch is BackwardPrefetch.BACKWARD_PRE
    stays_anyway = options.strategy in KEEPING

    if not (options.forward_prefetch or ahead_in_backward):
        assert not plan.prefetches_in_evaluation
        assert plan.prefetches_in_training is stays_anyway


@given(policies, st.integers(0, 50), st.booleans(), st.booleans())
def test_one_unit_is_gathered_ahead_or_on_a_host_all_that_stay(
    policy: Policy, left: int, is_first: bool, keeps_all: bool
) -> None:
    ahead = policy.units_ahead(left, is_first=is_first, keeps_all=keeps_all)

    everything = policy is HOST and is_first and keeps_all
    assert ahead == (left if everything else min(1, left))


@given(policies, units, forwards_left, st.booleans(), st.booleans())
def test_after_forward_memory_goes_exactly_where_the_strategy_frees_it(
    policy: Policy,
    options: UnitOptions,
    left: int | None,
    is_outermost: bool,
    holds_copy: bool,
) -> None:
    decision = policy.plan(options).after_forward(
        is_outermost=is_outermost, forwards_left=left, holds_copy=holds_copy
    )

    if options.strategy in KEEPING and not holds_copy:
        assert decision is AfterForward.SHOW
    elif options.strategy is ShardingStrategy.NO_SHARD and not holds_copy:
        assert decision is AfterForward.HIDE
    elif is_outermost:
        # Backward begins with it.
        assert decision is AfterForward.HIDE
    elif left is None or left > 2:
        assert decision is AfterForward.RESHARD
    else:
        assert decision is not AfterForward.SHOW


@pytest.mark.parametrize(("strategy", "prefetch"), [*itertools.product(FREEING, BackwardPrefetch)])
def test_a_host_keeps_the_two_units_with_which_backward_begins_if_it_gathers_ahead_there(
    strategy: ShardingStrategy, prefetch: BackwardPrefetch
) -> None:
    def kept(policy: Policy) -> list[int]:
        plan = policy.plan(unit(strategy, prefetch))
        hidden = [
            plan.after_forward(is_outermost=False, forwards_left=left, holds_copy=False)
            is AfterForward.HIDE
            for left in range(1, 6)
        ]
        return [left for left, is_hidden in enumerate(hidden, 1) if is_hidden]

    early = prefetch is BackwardPrefetch.BACKWARD_PRE
    assert kept(HOST) == ([1, 2] if early else [])
    assert kept(ACCELERATOR) == []


@given(units)
def test_memory_is_given_back_late_on_accelerators_that_do_not_gather_ahead(
    options: UnitOptions,
) -> None:
    on_host, on_accelerator = HOST.plan(options), ACCELERATOR.plan(options)

    assert not on_host.releases_late_in_forward
    assert not on_host.releases_late_in_backward
    assert on_accelerator.releases_late_in_forward is not options.forward_prefetch
    early = options.backward_prefetch is BackwardPrefetch.BACKWARD_PRE
    assert on_accelerator.releases_late_in_backward is not early


@given(st.booleans(), st.integers(0, 4), st.integers(0, 50))
def test_backward_prefetches_the_units_that_ran_just_before(
    runs_ahead: bool, ahead: int, position: int
) -> None:
    policy = Policy(runs_ahead, units_ahead_in_backward=ahead)

    positions = list(policy.positions_ahead_in_backward(position))

    assert positions == list(reversed(range(position)))[:ahead]


def test_backward_prefetches_one_unit_on_every_device() -> None:
    assert HOST.units_ahead_in_backward == ACCELERATOR.units_ahead_in_backward == 1


@given(policies, units)
def test_only_copies_of_whole_shards_wait_until_the_loss_has_gone(
    policy: Policy, options: UnitOptions
) -> None:
    assert policy.may_prefetch_in_backward(options, is_first=False)
    at_first = policy.may_prefetch_in_backward(options, is_first=True)
    assert at_first is (options.strategy is not ShardingStrategy.NO_SHARD)


@given(units)
def test_a_host_reduces_behind_compute_where_full_parameters_stay(options: UnitOptions) -> None:
    assert ACCELERATOR.plan(options).reduces_behind_compute
    assert HOST.plan(options).reduces_behind_compute is (options.strategy not in FREEING)


def test_a_host_carries_reduces_out_later_and_waits_for_what_it_gathers_ahead() -> None:
    assert ACCELERATOR.reduces_at_once
    assert not HOST.reduces_at_once
    assert HOST.waits_for_prefetch
    assert not ACCELERATOR.waits_for_prefetch
    assert HOST.checks_for_changes
    assert not ACCELERATOR.checks_for_changes
