"""Giving every run on a rank the same start: what a run changed does not reach the next one."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import sys
import warnings
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from .device import device
from .protocol import LOOPBACK, Assignment, Request

# Ranks are on one machine; its name may not resolve, its loopback interface is there.
_DEFAULTS = {"GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0"}


def rank_environment(assignment: Assignment, outside: dict[str, str]) -> dict[str, str]:
    """The environment outside of the ranks with what a launcher would set for each of them."""
    return (
        _DEFAULTS
        | outside
        | {
            "RANK": str(assignment.rank),
            "LOCAL_RANK": str(assignment.rank),
            "WORLD_SIZE": str(assignment.world_size),
            "LOCAL_WORLD_SIZE": str(assignment.world_size),
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(assignment.spare_port),
            "OMP_NUM_THREADS": "1",
            "FULLSHARD_TEST_DEVICE": assignment.device,
        }
    )


@contextlib.contextmanager
def isolated(assignment: Assignment, request: Request) -> Iterator[None]:
    """Run one request's function inside this."""
    _set_environment(rank_environment(assignment, request.environment))
    os.chdir(request.working_directory)
    sys.path[:] = request.import_path
    _reset_torch()
    _forget_meshes()
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    with warnings.catch_warnings():
        yield


def destroy_extra_groups() -> None:
    """Destroy the process groups that the previous run created beside the default one.

    Only to be called when every rank has finished that run: a group that one rank destroys
    takes the last messages to its peers with it.
    """
    default = dist.group.WORLD
    extra = [group for group in distributed_c10d._world.pg_map if group is not default]
    for group in extra:
        dist.destroy_process_group(group)
    if extra:
        # A model that is unreachable but not collected holds its groups, whose threads wake up a
        # hundred times a second each.
        extra.clear()
        gc.collect()


_modules_kept = 0


def keep_imports() -> None:
    """Have the garbage collector leave alone what earlier runs imported: it is there for good.

    Collections are frequent in tests of what is left behind, and would look at all of it.
    Only to be called when nothing but modules is left of those runs.
    """
    global _modules_kept
    if len(sys.modules) != _modules_kept:
        _modules_kept = len(sys.modules)
        gc.collect()
        gc.freeze()


def group_state(original: dist.ProcessGroup) -> tuple[int, int] | None:
    """What has to agree between ranks before they can be used again; see Outcome."""
    if not dist.is_initialized() or dist.group.WORLD is not original:
        return None
    return distributed_c10d._world.group_count, _sequence_number(original)


def _sequence_number(group: dist.ProcessGroup) -> int:
    return group._get_sequence_number_for_group()  # type: ignore[attr-defined]


def _set_environment(wanted: dict[str, str]) -> None:
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _reset_torch() -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.manual_seed(0)


def _forget_meshes() -> None:
    """Drop what DTensors remember of operations on meshes whose groups are destroyed.

    They look it up by the ranks of a mesh, which may be those of the next one. Every thread
    remembers for itself: on a GPU, autograd has one of its own.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    if device().type != "cpu":
        probe = torch.zeros((), device=device(), requires_grad=True)
        probe.register_hook(lambda _: _clear_sharding_prop_cache())
        probe.clone().backward()
