"""What one run changes on a rank does not reach the next one."""

import os
import random
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fullshard.testing import device, run_on_ranks


def draw_numbers() -> tuple[float, float]:
    return torch.rand(()).item(), random.random()


def change_torch() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    torch.set_default_device("meta")


def torch_settings() -> tuple[torch.dtype, bool, int, str]:
    made = torch.zeros(1)
    return made.dtype, torch.is_grad_enabled(), torch.get_num_threads(), made.device.type


def create_groups() -> None:
    dist.new_group([0])
    dist.new_group([0, 1])


def sum_over_a_mesh() -> float:
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("rows", "columns"))
    ones = DTensor.from_local(torch.ones(2, device=device()), mesh["rows"], [Shard(0)])
    return ones.sum().full_tensor().item()  # type: ignore[attr-defined]


def redistribute_over_a_mesh() -> None:
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("rows", "columns"))
    whole = torch.ones(4, 4, device=device())
    rows: Any = distribute_tensor(whole, mesh["columns"], [Shard(0)])
    (rows + rows).redistribute(placements=[Replicate()])


def number_of_gloo_loops() -> int:
    names = (each.read_text() for each in Path("/proc/self/task").glob("*/comm"))
    return sum(name.startswith("gloo_tcp_loop") for name in names)


def number_of_groups() -> int:
    return len(distributed_c10d._world.pg_map)


def test_every_run_draws_the_same_random_numbers() -> None:
    assert run_on_ranks(2, draw_numbers) == run_on_ranks(2, draw_numbers)


def test_settings_of_torch_are_reset() -> None:
    run_on_ranks(2, change_torch)

    assert run_on_ranks(2, torch_settings) == [(torch.float32, True, 1, "cpu")] * 2


def test_environment_variables_and_the_working_folder_are_those_of_the_test(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_on_ranks(2, lambda: os.environ.update(LEFT_BEHIND="yes"))
    monkeypatch.setenv("FROM_THE_TEST", "value")
    monkeypatch.chdir(tmp_path)

    def look() -> tuple[str | None, str | None, str]:
        return os.environ.get("LEFT_BEHIND"), os.environ.get("FROM_THE_TEST"), os.getcwd()

    assert run_on_ranks(2, look) == [(None, "value", str(tmp_path))] * 2


def test_warning_filters_are_restored() -> None:
    run_on_ranks(1, lambda: warnings.simplefilter("error"))

    assert run_on_ranks(1, lambda: warnings.warn("only a warning", stacklevel=1)) == [None]


def test_process_groups_that_a_run_created_are_destroyed() -> None:
    run_on_ranks(2, create_groups)

    assert run_on_ranks(2, number_of_groups) == [1, 1]


def test_ranks_that_issued_different_collectives_are_replaced() -> None:
    def one_sided() -> int:
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(1), async_op=True)
        return os.getpid()

    before = run_on_ranks(2, one_sided)
    after = run_on_ranks(2, os.getpid)

    assert set(before).isdisjoint(after)


def test_ranks_whose_default_group_a_run_destroyed_are_replaced() -> None:
    run_on_ranks(2, dist.destroy_process_group)

    assert run_on_ranks(2, dist.get_world_size) == [2, 2]


def test_code_that_reads_torchruns_environment_can_make_its_own_group() -> None:
    def start_again() -> float:
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        number = torch.ones(())
        dist.all_reduce(number)
        return number.item()

    assert run_on_ranks(3, start_again) == [3.0] * 3
    assert run_on_ranks(3, start_again) == [3.0] * 3


def test_a_mesh_of_the_same_ranks_is_not_taken_for_that_of_the_run_before() -> None:
    assert run_on_ranks(4, sum_over_a_mesh) == [4.0] * 4
    assert run_on_ranks(4, sum_over_a_mesh) == [4.0] * 4


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_groups_of_meshes_end_with_the_run_although_torch_caches_plans_over_them() -> None:
    """Each that is left has a thread that wakes up a hundred times a second."""
    before = run_on_ranks(4, number_of_gloo_loops)

    run_on_ranks(4, redistribute_over_a_mesh)

    assert run_on_ranks(4, number_of_gloo_loops) == before
