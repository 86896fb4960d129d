"""Any model, any options, any number of ranks: training equals that of one process.

FULLSHARD_LONG=1 draws thousands of cases.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.random_models import HYBRID, LAYERS, Block, Case, Layer, Options, check_parity

from fullshard.testing import run_on_ranks

CASES = 2500 if os.environ.get("FULLSHARD_LONG") else 60
PLAIN = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
KEEPS = ["attribute", "private", "list", "dict"]


def layers(draw: Any, may_freeze: bool) -> tuple[Layer, ...]:
    layer = st.builds(
        Layer, st.sampled_from(sorted(LAYERS)), st.sampled_from([False, False, may_freeze])
    )
    return tuple(draw(st.lists(layer, min_size=1, max_size=3)))


def block(draw: Any, may_freeze: bool, depth: int) -> Block:
    inner = block(draw, may_freeze, depth - 1) if depth and draw(st.booleans()) else None
    return Block(
        layers(draw, may_freeze),
        wrapped=draw(st.booleans()),
        inner=inner,
        repeats=draw(st.sampled_from([1, 1, 2])),
        checkpointed=draw(st.sampled_from(["no", "no", "plain", "reentrant"])),
        shares_first_weight=draw(st.sampled_from([False, False, True])),
        output=draw(st.sampled_from(["tensor", "tuple", "dict", "view"])),
        keeps=draw(st.sampled_from(["nothing", "nothing", *KEEPS])),
    )


def is_differentiable_twice(block: Block | None) -> bool:
    """Reentrant checkpoints are not: torch refuses."""
    if block is None:
        return True
    return block.checkpointed != "reentrant" and is_differentiable_twice(block.inner)


@st.composite
def cases(draw: Any, strategies: list[str]) -> Case:
    use_orig_params = draw(st.booleans())
    options = Options(
        strategy=draw(st.sampled_from(strategies)),
        use_orig_params=use_orig_params,
        backward_prefetch=draw(st.sampled_from([None, "BACKWARD_PRE", "BACKWARD_POST"])),
        forward_prefetch=draw(st.booleans()),
        limit_all_gathers=draw(st.booleans()),
        offload=draw(st.sampled_from([False, False, True])),
    )
    # Without original parameters a unit is frozen, or unused, as a whole only.
    blocks = [
        dataclasses.replace(
            block(draw, may_freeze=use_orig_params, depth=1),
            used=draw(st.sampled_from(["all", "all", "even", "odd", "none"]))
            if use_orig_params
            else "all",
        )
        for _ in range(draw(st.integers(1, 3)))
    ]
    backwards = draw(st.sampled_from([1, 1, 2]))
    return Case(
        tuple(blocks),
        options,
        backwards=backwards,
        no_sync=backwards > 1 and draw(st.booleans()),
        evaluates=draw(st.booleans()),
        forwards=draw(st.sampled_from([1, 1, 2])),
        set_to_none=draw(st.booleans()),
        # Unused parameters have a zero gradient without original parameters: only an optimizer
        # that does nothing with a zero one, at the first step, tells no difference.
        optimizer=draw(st.sampled_from(["sgd", "adam"])) if use_orig_params else "sgd",
        freezes_later=use_orig_params and draw(st.booleans()),
        penalizes=all(map(is_differentiable_twice, blocks)) and draw(st.booleans()),
    )


@given(cases(PLAIN))
@settings(max_examples=CASES)
def test_two_ranks_train_as_one_process(case: Case) -> None:
    run_on_ranks(2, check_parity, case, timeout=20)


@given(cases(PLAIN))
@settings(max_examples=CASES * 2 // 3)
def test_three_ranks_train_as_one_process(case: Case) -> None:
    run_on_ranks(3, check_parity, case, timeout=20)


@given(cases([*PLAIN, *HYBRID]))
@settings(max_examples=CASES // 3)
def test_four_ranks_train_as_one_process(case: Case) -> None:
    run_on_ranks(4, check_parity, case, timeout=30)


@given(cases(PLAIN))
@settings(max_examples=CASES // 2)
def test_one_rank_trains_as_without_wrapping(case: Case) -> None:
    run_on_ranks(1, check_parity, case, timeout=20)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_case_that_uses_every_feature_passes(use_orig_params: bool) -> None:
    every = tuple(Layer(kind) for kind in sorted(LAYERS))
    inner = Block(every, wrapped=True, output="dict", keeps="private")
    block = Block(every, wrapped=True, inner=inner, repeats=2, checkpointed="plain", output="view")
    options = Options("FULL_SHARD", use_orig_params, "BACKWARD_PRE", True, True, True)
    case = Case((block, inner), options, backwards=2, evaluates=True, penalizes=True)

    run_on_ranks(2, check_parity, case)
