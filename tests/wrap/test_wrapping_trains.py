"""Random module graphs with random policies: wrapped, a step is the unwrapped model's step.

FULLSHARD_LONG=1 draws thousands of cases.
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.wrap.random_trees import Case, Node, Weight, check_one_step

from fullshard.testing import run_on_ranks

CASES = 3000 if os.environ.get("FULLSHARD_LONG") else 100


def numbers(draw: Any, below: int, at_least: int = 0, at_most: int = 3) -> tuple[int, ...]:
    found = st.lists(st.integers(0, below - 1), min_size=at_least, max_size=at_most, unique=True)
    return tuple(draw(found))


@st.composite
def cases(draw: Any) -> Case:
    count = draw(st.integers(1, 7))
    use_orig_params = draw(st.booleans())
    kinds = ["First", "Second", "Second", "list"]
    nodes = [Node("First")] + [
        Node(draw(st.sampled_from(kinds)), numbers(draw, index, at_least=1, at_most=2))
        for index in range(1, count)
    ]
    callable_ones = [index for index, node in enumerate(nodes) if node.kind != "list"]
    # Without original parameters a unit is frozen as a whole only, or refused.
    trainable = st.booleans() if use_orig_params else st.just(True)
    holders = st.lists(st.sampled_from(callable_ones), min_size=1, max_size=3)
    weights = draw(
        st.lists(
            st.builds(Weight, st.integers(0, 9), holders.map(tuple), trainable),
            min_size=1,
            max_size=7,
        )
    )
    ignores = draw(st.sampled_from(["nothing", "nothing", "modules", "weights"]))
    below = range(1, count)
    return Case(
        tuple(nodes),
        tuple(weights),
        policy=draw(st.sampled_from(["class", "every", "custom", "size", "or", "function"])),
        picked=tuple(draw(st.lists(st.sampled_from(callable_ones), unique=True))),
        minimum=draw(st.integers(0, 20)),
        ignored_modules=(
            tuple(draw(st.lists(st.sampled_from(below), max_size=2, unique=True)))
            if below and ignores == "modules"
            else ()
        ),
        ignored_weights=(numbers(draw, len(weights), at_most=2) if ignores == "weights" else ()),
        strategy=draw(st.sampled_from(["FULL_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])),
        use_orig_params=use_orig_params,
    )


@given(cases())
@settings(max_examples=CASES)
def test_a_step_of_the_wrapped_model_is_that_of_the_unwrapped_one(case: Case) -> None:
    run_on_ranks(2, check_one_step, case, timeout=20)


def test_a_graph_with_shared_modules_tied_weights_and_ignored_ones_trains() -> None:
    nodes = (
        Node("First"),
        Node("Second", (0,)),
        Node("list", (0,)),
        Node("Second", (1, 2)),
        Node("First", (2,)),
    )
    weights = (Weight(5, (1, 4)), Weight(7, (3,)), Weight(3, (0,)), Weight(4, (4,)))
    for ignored in ((), (2,)):
        for policy in ("every", "class", "size"):
            for use_orig_params in (False, True):
                case = Case(
                    nodes,
                    weights,
                    policy,
                    ignored_weights=ignored,
                    minimum=4,
                    use_orig_params=use_orig_params,
                )
                run_on_ranks(2, check_one_step, case)
