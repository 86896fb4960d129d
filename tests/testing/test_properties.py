"""Generated cases: hypothesis together with ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.testing import RankPool, RankSetupError, device, ranks, run_on_ranks


@given(st.lists(st.integers(-1000, 1000), min_size=1, max_size=8))
@ranks(2)
def test_given_above_ranks_sends_each_example_to_every_rank(numbers: list[int]) -> None:
    total = torch.tensor(numbers, device=device())
    dist.all_reduce(total)
    assert total.tolist() == [2 * number for number in numbers]


@settings(max_examples=25)
@given(st.integers(1, 4), st.integers(-8, 8))
def test_run_on_ranks_works_inside_given(world_size: int, number: int) -> None:
    def multiplied() -> int:
        total = torch.tensor(number, device=device())
        dist.all_reduce(total)
        return int(total)

    assert run_on_ranks(world_size, multiplied) == [number * world_size] * world_size


def test_given_below_ranks_is_refused() -> None:
    with pytest.raises(RankSetupError, match="put @given above @ranks"):

        @ranks(2)
        @given(st.integers())
        def test(number: int) -> None: ...


@given(st.one_of(st.integers(max_value=0), st.integers(min_value=65), st.text(), st.floats()))
def test_every_wrong_number_of_ranks_is_refused_in_one_line(given_number: Any) -> None:
    with pytest.raises(RankSetupError) as caught:
        RankPool(given_number)

    assert len(str(caught.value).splitlines()) == 1
