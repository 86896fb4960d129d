"""FSDPModule: what a module gains by ``fully_shard``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import nn

from ..engine.params.row_handle import RowHandle
from ..engine.runtime.untraced import untraced_itself
from ..forward_method import ForwardMethod
from ..fsdp import UnshardHandle
from .module_unit import ModuleUnit, unit_of

__all__ = ["FSDPModule", "share_comm_ctx"]


class FSDPModule:
    """The class that ``fully_shard`` puts before a module's own class: its methods and forward."""

    _is_fullshard_unit = True
    _left_to_ancestor: frozenset[nn.Parameter] = frozenset()
    _fullshard_module_unit: ModuleUnit
    #: Where the module's own class is found among the bases.
    _orig_cls_mro_index = 2

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """An instance of the module's own class: what slicing a container makes is not sharded."""
        original = cls.__mro__[cls._orig_cls_mro_index]
        made = original.__new__(original, *args, **kwargs)
        made.__init__(*args, **kwargs)
        return made

    @untraced_itself
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._fullshard_module_unit._run(super().__call__, args, kwargs)  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise AssertionError(
            "FSDP does not support deepcopy. Please use state dict for serialization."
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "A module that fully_shard was applied to cannot be pickled: its parameters are parts "
            "of ones that other processes have. Save a state dict (torch.distributed.checkpoint)"
        )

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Follow what moves or converts all parameters: ``to``, ``to_empty``, ``half``."""
        of = self._fullshard_module_unit
        if of.unit.summoned:
            raise RuntimeError(
                f"{type(self).__name__} cannot be moved or converted inside summon_full_params: "
                "its parameters are others there. Leave the context first"
            )
        of.restart()
        converted = super()._apply(*args, **kwargs)  # type: ignore[misc]
        for handle in of.unit.handles:
            handle.write_back()
        of.unit.forget_views()
        return converted

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As for any module; also of parameters in whose place full ones stand after forward."""
        for other in _units(self, recurse=True):
            if other.unit.shows_full:
                hidden = [p for handle in other.unit.handles for p in handle.optimizer_params]
                nn.ParameterList(hidden).zero_grad(set_to_none)
        visible = [p for p in self.parameters() if p.is_leaf]  # type: ignore[attr-defined]
        nn.ParameterList(visible).zero_grad(set_to_none)

    # -- on the user's word -------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """All-gather this module's own parameters now, ahead of their use.

        With ``async_op`` the call returns at once; parameters are full after ``wait()`` of the
        handle, or in the forward, whichever comes first. To be called by all ranks.
        """
        of = self._fullshard_module_unit
        schedule = of.schedule or of.start()
        schedule.unshard(of.unit)
        handle = UnshardHandle(schedule, of.unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Give this module's full parameters back; changes made to them since are kept."""
        of = self._fullshard_module_unit
        if of.schedule is not None:
            of.schedule.reshard(of.unit)

    def reset_iter_state(self) -> None:
        """Forget a step that raised, its gradients that were not reduced yet included.

        The next forward does so by itself but for those gradients.
        """
        self._fullshard_module_unit.restart()
        for other in _units(self, recurse=True):
            for handle in other.unit.handles:
                if isinstance(handle, RowHandle):
                    handle.take_unreduced()
                    handle.show_local_gradients(False)
            other.unit.reduction.drop_partial_sums()

    # -- gradients ----------------------------------------------------------------------------

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether a backward reduces gradients. Otherwise they are summed up, whole, unseen."""
        for other in _units(self, recurse):
            other.unit.sync_gradients(requires_gradient_sync)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of gradients by ``factor`` in place of the number of ranks."""
        unit = self._fullshard_module_unit.unit
        unit.reduction.set_rescale(unit.world_size / factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The old name of :meth:`set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether gradients are needed when the next backward is over.

        They are there in any case: every backward ends with its reduces done.
        """

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether a backward sums gradients over the ranks that hold copies of the shards.

        Otherwise their sums over the shards' ranks are kept, unseen, until one does.
        """
        for other in _units(self, recurse):
            if other.is_hybrid:
                other.unit.reduction.set_all_reduce(requires_all_reduce)

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: Any = None
    ) -> None:
        """Call ``hook`` with the module's reduced gradients, flat, after each backward of it."""
        if stream is not None:
            raise _not_built("set_all_reduce_hook(stream=)", "leave stream out")
        self._fullshard_module_unit.unit.reduction.set_after_reduce(hook)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Have the backend make sums, which are then divided, also where it could make means."""
        for other in _units(self, recurse=True):
            other.unit.reduction.set_sums_only(enable)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Whether ranks may use different parameters. They may in any case."""

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """How many buffers may be reduced from at a time. The engine never has more than two."""
        if not isinstance(max_input_buffers, int) or max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")

    # -- communication ------------------------------------------------------------------------

    def set_custom_all_gather(self, comm: Any) -> NoReturn:
        """Not built: the engine's own collectives are used."""
        raise _not_built("set_custom_all_gather", "the engine's own all-gather is used")

    def set_custom_reduce_scatter(self, comm: Any) -> NoReturn:
        """Not built: the engine's own collectives are used."""
        raise _not_built("set_custom_reduce_scatter", "the engine's own reduce-scatter is used")

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Not built, where it is asked for."""
        if enable:
            raise _not_built(
                "set_allocate_memory_from_process_group_for_comm(True)", "leave it out"
            )

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> NoReturn:
        """Not built."""
        raise _not_built("set_symm_mem_for_comm", "leave it out")

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Not built, where it is asked for: all collectives of a module use the mesh's groups."""
        if enable:
            raise _not_built("set_separate_reduce_scatter_group(True)", "leave it out")

    def set_post_optim_event(self, event: Any) -> None:
        """Let the next forward all-gather after ``event``, at which the optimizer has stepped."""
        self._fullshard_module_unit.gather_after(event)

    # -- residency ----------------------------------------------------------------------------

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether full parameters are freed between forward and backward."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}"
            )
        for other in _units(self, recurse):
            other.set_reshard_after_forward(reshard_after_forward)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Whether full parameters are freed after backward, or stay until some change."""
        for other in _units(self, recurse):
            other.unit.stay_after_backward(not reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backward needs the full parameters.

        A hint that saves an all-gather; this engine does not take it, and all-gathers.
        """

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Whether all-gathers wait for nothing on the host. They do not in any case."""

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """All-gather the ``modules``, in this order, when this one's forward begins."""
        self._fullshard_module_unit.forward_prefetch = _all_units(modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """All-gather the ``modules``, in this order, when this one's backward begins."""
        of = self._fullshard_module_unit
        of.backward_prefetch = _all_units(modules)
        of.unit.prefetch_when_reached([other.unit for other in of.backward_prefetch])

    def _register_forward_method(self, method_name: str) -> None:
        """Let calls of a method run with the module's full parameters in place."""
        method = getattr(self, method_name, None)
        if not callable(method):
            raise ValueError(f"{type(self)} does not have a method {method_name}")
        setattr(self, method_name, ForwardMethod(self._fullshard_module_unit, method))

    def _get_fsdp_state(self) -> ModuleUnit:
        return self._fullshard_module_unit


def _all_units(modules: Iterable[Any]) -> list[ModuleUnit]:
    found: list[ModuleUnit] = []
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"Expects FSDPModule but got {type(module)}: {module}")
        found.append(module._fullshard_module_unit)
    return found


def _units(module: Any, recurse: bool) -> list[ModuleUnit]:
    """The unit of ``module`` and, with ``recurse``, those of modules below it; each once."""
    if not recurse:
        return [module._fullshard_module_unit]
    found = (unit_of(submodule) for submodule in module.modules())
    return list(dict.fromkeys(unit for unit in found if unit is not None))


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Let the units of several models use the same streams. All units on a device do."""
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"Expects list of FSDPModules but got {module}")


def _not_built(what: str, instead: str) -> NotImplementedError:
    return NotImplementedError(f"fullshard's fully_shard has no {what} yet: {instead}")


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def add_class(module: nn.Module, of: ModuleUnit) -> None:
    """Let ``module`` be an :class:`FSDPModule`, and a forward of it be one of its unit."""
    own = type(module)
    if own not in _classes:
        made: Any = type(f"FSDP{own.__name__}", (FSDPModule, own), {})
        _classes[own] = made
    module.__class__ = _classes[own]
    module._fullshard_module_unit = of  # type: ignore[assignment]
