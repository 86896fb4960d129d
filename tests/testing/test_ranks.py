"""Functions run on ranks: how many, with which arguments, and what comes back."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fullshard.testing import RankPool, device, ranks, run_on_ranks


@dataclass(frozen=True)
class Place:
    rank: int
    world_size: int


def place() -> Place:
    return Place(dist.get_rank(), dist.get_world_size())


def sum_over_ranks(number: float) -> float:
    total = torch.tensor(number, device=device())
    dist.all_reduce(total)
    return total.item()


def threads_of_this_rank() -> int:
    return torch.get_num_threads()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_every_rank_of_a_world_runs_the_function_and_its_value_reaches_the_test(
    world_size: int,
) -> None:
    values = run_on_ranks(world_size, place)

    assert values == [Place(rank, world_size) for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_ranks_talk_to_each_other(world_size: int) -> None:
    assert run_on_ranks(world_size, sum_over_ranks, 2.0) == [2.0 * world_size] * world_size


@pytest.mark.parametrize("factor", [1, 3])
@pytest.mark.parametrize("size", [0, 5])
@ranks(2)
def test_a_test_on_ranks_can_be_parametrised(size: int, factor: int) -> None:
    numbers = torch.full((size,), factor, device=device())
    dist.all_reduce(numbers)
    assert numbers.tolist() == [2 * factor] * size


@ranks(2)
def test_a_test_on_ranks_can_use_fixtures_that_pickle(tmp_path: Path) -> None:
    (tmp_path / str(dist.get_rank())).touch()
    dist.barrier()
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]


def test_lambdas_and_local_functions_carry_what_they_close_over() -> None:
    offset = 10

    def shifted(number: int, *, by: int = offset) -> int:
        return number + by

    assert run_on_ranks(2, lambda: shifted(dist.get_rank())) == [10, 11]


def test_tensors_travel_both_ways() -> None:
    given_tensor = torch.arange(6.0).reshape(2, 3)

    doubled = run_on_ranks(2, lambda tensor: tensor * 2, given_tensor)

    assert all(torch.equal(tensor, given_tensor + given_tensor) for tensor in doubled)


def test_a_rank_has_one_thread() -> None:
    assert run_on_ranks(2, threads_of_this_rank) == [1, 1]


def test_ranks_are_processes_of_their_own_that_stay_for_the_next_run() -> None:
    first = run_on_ranks(2, os.getpid)
    second = run_on_ranks(2, os.getpid)

    assert first == second
    assert len({os.getpid(), *first}) == 3


def test_a_run_on_two_ranks_costs_milliseconds() -> None:
    run_on_ranks(2, place)
    began = time.perf_counter()
    for _ in range(50):
        run_on_ranks(2, place)

    assert (time.perf_counter() - began) / 50 < 0.05


def test_what_a_rank_prints_is_shown_by_the_test_with_its_number(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_on_ranks(2, lambda: print("hello from", dist.get_rank()))

    assert capsys.readouterr().out == "[rank 0] hello from 0\n[rank 1] hello from 1\n"


def test_a_function_that_skips_on_every_rank_skips_the_test() -> None:
    with pytest.raises(pytest.skip.Exception, match="not today"):
        run_on_ranks(2, lambda: pytest.skip("not today"))


def test_a_pool_of_ones_own_ends_its_ranks_when_it_is_closed() -> None:
    with RankPool(2) as pool:
        processes = pool.run(os.getpid)

    assert not any(Path(f"/proc/{process}").exists() for process in processes)
