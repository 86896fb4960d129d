"""Replaces the engine's collectives, process groups or memory of one unit by the user's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from ..engine.comm.collectives import group_for
from ..engine.comm.custom import BackendMemory, Memory, SymmetricMemory
from ..engine.comm.process_groups import group_among
from ..engine.params.row_handle import RowHandle
from ..engine.runtime.unit import Unit

MakeMemory = Callable[[], Memory]


class Communication:
    """Collectives, groups and memory of one unit's all-gathers and reduce-scatters.

    Its methods are for between steps, while the unit is sharded.
    """

    def __init__(self, unit: Unit, ranks_by_shards: Sequence[Sequence[int]]) -> None:
        self._unit = unit
        self._ranks_by_shards = ranks_by_shards
        self._gather: Any = None
        self._reduce: Any = None
        #: Make what gives memory for gathers and reduces, one for each group of parameters.
        self._gather_memory: MakeMemory | None = None
        self._reduce_memory: MakeMemory | None = None

    def gather_with(self, comm: Any) -> None:
        """All-gather by ``comm``, in memory that it gives; by the engine's own if it is None."""
        self._check_not_encoded("set_custom_all_gather()")
        self._gather = comm
        self._gather_memory = None if comm is None else lambda: comm
        self._unit.gather_with(comm)
        self._share_memory()

    def reduce_with(self, comm: Any) -> None:
        """Reduce-scatter likewise."""
        self._check_not_encoded("set_custom_reduce_scatter()")
        self._reduce = comm
        self._reduce_memory = None if comm is None else lambda: comm
        self._unit.reduction.set_comm(comm)
        self._share_memory()

    def use_backends_memory(self, enabled: bool) -> None:
        """Communicate in memory of the process group's backend, if it has an allocator."""
        self._check_own("set_allocate_memory_from_process_group()")
        shards = self._unit.shards
        make = (lambda: BackendMemory(shards)) if enabled else None
        self._gather_memory = self._reduce_memory = make
        self._share_memory()

    def use_symmetric_memory(self, backend: str) -> None:
        """All-gather in memory that all ranks have mapped, which NCCL alone does."""
        self._check_own("set_symm_mem()")
        if backend != "NCCL":
            raise ValueError(f'set_symm_mem_for_comm takes the backend "NCCL", but got {backend!r}')
        unit = self._unit
        found = _backend_of(unit)
        if found != "nccl":
            raise RuntimeError(
                f"set_symm_mem_for_comm needs a process group whose backend is NCCL, but that of "
                f"unit {unit.name!r} on {unit.device} is {found}: leave the call out, or pass a "
                "mesh of GPUs over NCCL"
            )
        import torch.distributed._symmetric_memory as symmetric

        symmetric.set_backend("NCCL")
        self._gather_memory = lambda: SymmetricMemory(unit.shards)
        self._share_memory()

    def reduce_in_own_group(self, enabled: bool) -> None:
        """Reduce over a separate process group, apart from all-gathers; all ranks call this."""
        own = None
        if enabled and self._unit.shards.size > 1:
            like = self._unit.shards.group
            among = group_among(self._ranks_by_shards, like, "reduces")
            own = group_for(among, self._unit.device)
        self._unit.reduction.set_group(own)

    def _check_not_encoded(self, call: str) -> None:
        given = self._unit.options.communication
        if given is not None and given.encodes:
            raise NotImplementedError(
                f"{call} of unit {self._unit.name!r}, which has communication={given!r}: "
                "encoded communication uses the engine's own collectives and memory. Leave one of "
                "them out"
            )

    def _check_own(self, call: str) -> None:
        self._check_not_encoded(call)
        for what, comm in ("all gather", self._gather), ("reduce scatter", self._reduce):
            if comm is not None:
                raise AssertionError(
                    f"cannot call {call} when {what} comm is custom: {type(comm).__name__}"
                )

    def _share_memory(self) -> None:
        makes = self._gather_memory, self._reduce_memory
        for handle in self._unit.handles:
            if isinstance(handle, RowHandle):
                gathers, reduces = (None if make is None else make() for make in makes)
                handle.take_memory_from(gathers, reduces)
        self._unit.forget_views()


def _backend_of(unit: Unit) -> str:
    group = unit.shards.group
    if not isinstance(group, dist.ProcessGroup):
        return "none"
    name: str = group._get_backend(unit.device).name()
    return name.lower()
