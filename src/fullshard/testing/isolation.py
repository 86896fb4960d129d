"""Isolating runs from each other: every run on a rank starts in the same state."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from .device import BACKEND_VARIABLE, DEVICE_VARIABLE, device
from .protocol import LOOPBACK, Assignment, Request

# All ranks are on this machine. Its host name may not resolve, but it has a loopback interface.
_DEFAULTS = {"GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0"}


def rank_environment(assignment: Assignment, outside: dict[str, str]) -> dict[str, str]:
    """The test process's environment, with the variables that a launcher would set for a rank."""
    return (
        _DEFAULTS
        | _nccl_defaults(assignment)
        | outside
        | {
            "RANK": str(assignment.rank),
            "LOCAL_RANK": str(assignment.rank),
            "WORLD_SIZE": str(assignment.world_size),
            "LOCAL_WORLD_SIZE": str(assignment.world_size),
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(assignment.spare_port),
            "OMP_NUM_THREADS": "1",
            DEVICE_VARIABLE: assignment.device,
            BACKEND_VARIABLE: assignment.backend,
        }
    )


def _nccl_defaults(assignment: Assignment) -> dict[str, str]:
    """Environment variables that let NCCL connect ranks on this machine, also several on one GPU.

    NCCL refuses two ranks on one GPU of a host. If there are more ranks than GPUs, each rank is a
    host of its own by name, and NCCL connects them by sockets, as it does hosts.
    """
    if assignment.backend != "nccl":
        return {}
    defaults = {"NCCL_SOCKET_IFNAME": "lo"}
    if assignment.world_size > torch.cuda.device_count():
        defaults["NCCL_HOSTID"] = f"host{assignment.rank}"
    return defaults


@contextlib.contextmanager
def isolated(assignment: Assignment, request: Request) -> Iterator[None]:
    """The context in which the function of one request runs."""
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
    """Destroy the process groups that the previous run created, except the default one.

    Call this only after every rank has finished that run: when a rank destroys a process group, the
    last messages to its peers are lost.
    """
    default = dist.group.WORLD
    extra = [group for group in distributed_c10d._world.pg_map if group is not default]
    for group in extra:
        dist.destroy_process_group(group)
    if extra:
        _forget_meshes()
        # An unreachable model that is not collected yet keeps its process groups alive, each with
        # threads that wake up a hundred times a second.
        extra.clear()
        gc.collect()


_modules_kept = 0


def keep_imports() -> None:
    """Exclude the modules that earlier runs imported from garbage collection.

    Tests for leaks collect often, and would traverse all of these objects every time. Call this
    only when nothing but modules is left of those runs.
    """
    global _modules_kept
    if len(sys.modules) != _modules_kept:
        _modules_kept = len(sys.modules)
        gc.collect()
        gc.freeze()


def group_state(original: dist.ProcessGroup) -> tuple[int, int] | None:
    """The state that has to be equal on all ranks before they can be reused; see Outcome."""
    if not dist.is_initialized() or dist.group.WORLD is not original:
        return None
    return distributed_c10d._world.group_count, _sequence_number(original)


def _sequence_number(group: dist.ProcessGroup) -> int:
    """The number of collectives that all backends of ``group`` have been given."""
    backends: set[Any] = {group._get_backend(each) for each in group._device_types}
    return sum(each._get_sequence_number_for_group() for each in backends)


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
    """Clear DTensor's caches, which refer to meshes whose process groups are destroyed.

    Some are keyed by the ranks of a mesh, which the next mesh may share; all of them keep process
    groups alive. Each thread has a cache of its own, and so has autograd's thread for a GPU.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    for clear in _clearing_functions():
        clear()
    if device().type != "cpu":
        probe = torch.zeros((), device=device(), requires_grad=True)
        probe.register_hook(lambda _: _clear_sharding_prop_cache())
        probe.clone().backward()


def _clearing_functions() -> Iterator[Callable[[], Any]]:
    """Find what empties the caches of redistribution, which torch names differently by version."""
    from torch.distributed.tensor import _collective_utils, _redistribute

    owners = [_redistribute, _collective_utils, getattr(_collective_utils, "MeshTopoInfo", None)]
    for owner in owners:
        for name, value in vars(owner).items() if owner is not None else ():
            function = getattr(value, "__func__", value)
            if name == "clear_redistribute_planner_cache":
                yield value
            elif hasattr(function, "cache_clear"):
                yield function.cache_clear
