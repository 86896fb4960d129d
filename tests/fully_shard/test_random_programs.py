"""Any program for ``fully_shard`` does the same on torch's and on fullshard's.

FULLSHARD_LONG=1 draws many more of them.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fully_shard.random_programs import BLOCKS, Program, Step, check_same

from fullshard.testing import run_on_ranks

CASES = 600 if os.environ.get("FULLSHARD_LONG") else 8
INDICES = st.integers(0, BLOCKS - 1)
FROZEN = ("blocks.0.up.weight", "blocks.1.norm.weight", "embed.weight", "blocks.2.down.weight")


@st.composite
def steps(draw: Any, may_repeat: bool) -> Step:
    backwards = draw(st.sampled_from([1, 1, 2]))
    locally = backwards > 1 and draw(st.booleans())
    # Torch's cannot accumulate gradients of modules that did not run.
    order = (
        st.permutations(range(BLOCKS))
        if locally
        else st.lists(INDICES, max_size=4, unique=not may_repeat)
    )
    return Step(
        order=tuple(draw(order)),
        backwards=backwards,
        accumulates_locally=locally,
        evaluates_before=draw(st.booleans()),
        unshards=tuple(draw(st.lists(INDICES, max_size=2, unique=True))),
        reshards=draw(st.booleans()),
        clips=draw(st.booleans()),
        changes_parameters=draw(st.booleans()),
        reloads_state=draw(st.booleans()),
        set_to_none=draw(st.booleans()),
    )


@st.composite
def programs(draw: Any, world_size: int) -> Program:
    is_hybrid = world_size == 4 and draw(st.booleans())
    few = [2] if world_size == 4 and not is_hybrid else []
    groups = draw(
        st.sampled_from([(), ((0,), (1,), (2,)), ((0, 1), (2,)), ((1,),), ((0,), (2,)), ((0, 2),)])
    )
    checkpointed = draw(st.sampled_from(["no", "no", "plain", "reentrant"]))
    # Where a checkpointed module runs twice, torch's stay unsharded after a backward.
    step = steps(may_repeat=checkpointed == "no")
    return Program(
        groups=groups,
        reshard_after_forward=draw(st.sampled_from([None, True, False, *few])),
        steps=tuple(draw(st.lists(step, min_size=1, max_size=3))),
        param_dtype=draw(st.sampled_from([None, None, "bfloat16"])),
        reduce_dtype=draw(st.sampled_from([None, "float32"])),
        cast_forward_inputs=draw(st.booleans()),
        frozen=tuple(draw(st.lists(st.sampled_from(FROZEN), max_size=2, unique=True))),
        checkpointed=checkpointed,
        # Tied across two modules that are sharded apart, weights are no longer tied under torch's.
        ties=groups in ((), ((0, 1), (2,))) and draw(st.booleans()),
        adam=draw(st.booleans()),
        keeps_between_backwards=draw(st.booleans()),
        prefetches=draw(st.booleans()),
        is_hybrid=is_hybrid,
    )


@pytest.mark.parametrize("world_size", [2, 3, 4])
@settings(max_examples=CASES)
@given(data=st.data())
def test_any_program_does_the_same_under_torchs_fully_shard(world_size: int, data: Any) -> None:
    run_on_ranks(world_size, check_same, data.draw(programs(world_size)))
