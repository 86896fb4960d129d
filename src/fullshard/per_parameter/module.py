"""FSDPModule: the class, and the methods, that ``fully_shard`` adds to a module."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import nn

from ..engine.params.row_handle import RowHandle
from ..engine.runtime.untraced import untraced_itself
from ..forward_method import ForwardMethod
from ..full_parameters import UnshardHandle
from .communication import Communication
from .module_unit import ModuleUnit, unit_of
from .torchs_state import ModuleState

__all__ = ["FSDPModule", "ReplicateModule", "share_comm_ctx"]


class FSDPModule:
    """The class that ``fully_shard`` puts before a module's own class: its methods and forward."""

    _is_fullshard_unit = True
    _left_to_ancestor: frozenset[nn.Parameter] = frozenset()
    _fullshard_module_unit: ModuleUnit
    #: Where the module's own class is found among the bases.
    _orig_cls_mro_index = 2
    #: The function that made a module one of this class, and how the class made then is called.
    _fullshard_applied_by = "fully_shard"
    _fullshard_prefix = "FSDP"

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """An instance of the module's own class: what slicing a container makes is not sharded."""
        original = cls.__mro__[cls._orig_cls_mro_index]
        made = original.__new__(original, *args, **kwargs)
        made.__init__(*args, **kwargs)
        return made

    @untraced_itself
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = super().__call__  # type: ignore[misc]
        return self._fullshard_module_unit._run(run, args, kwargs, self)  # type: ignore[arg-type]

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
        for each in of.with_inner():
            for handle in each.unit.handles:
                handle.write_back()
            each.unit.forget_views()
        return converted

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As for any module; also of parameters in whose place full ones stand after forward."""
        for other in _units(self, recurse=True):
            if other.unit.shows_full or other.unit.parts is not None:
                hidden = [p for handle in other.unit.handles for p in handle.optimizer_params]
                nn.ParameterList(hidden).zero_grad(set_to_none)
        visible = [p for p in self.parameters() if p.is_leaf]  # type: ignore[attr-defined]
        nn.ParameterList(visible).zero_grad(set_to_none)

    # -- requests of the user -------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """All-gather this module's own parameters now, ahead of their use.

        With ``async_op`` the call returns at once; parameters are full after ``wait()`` of the
        handle, or in the forward, whichever comes first. To be called by all ranks.
        """
        of = self._fullshard_module_unit
        schedule = of.schedule or of.start()
        units = [each.unit for each in of.with_inner()]
        for unit in units:
            schedule.unshard(unit)
        handle = UnshardHandle(schedule, *units)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Give this module's full parameters back; changes made to them since are kept."""
        of = self._fullshard_module_unit
        if of.schedule is not None:
            for each in of.with_inner():
                of.schedule.reshard(each.unit)

    def reset_iter_state(self) -> None:
        """Reshard all modules after a step that raised, and drop gradients not yet reduced.

        The next forward does the same by itself, but keeps those gradients.
        """
        if self._fullshard_module_unit.is_root is False:
            raise RuntimeError(
                "reset_iter_state must be called on the root FSDP module, the outermost one that "
                f"fully_shard was applied to; {self._fullshard_module_unit.unit.name!r} is not"
            )
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
        """Choose whether backward reduces gradients, or adds them up unreduced and unseen."""
        for other in _units(self, recurse):
            other.unit.sync_gradients(requires_gradient_sync)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of gradients by ``factor`` in place of the number of ranks."""
        for other in _units(self, recurse=False):
            other.unit.reduction.set_divisor(factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The old name of :meth:`set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accept whether gradients are needed when the next backward is over, without effect.

        Every backward ends with all its reduces complete.
        """

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Choose whether backward sums gradients over the ranks that hold copies of the shards.

        Otherwise their sums over the shards' ranks are kept, unseen, until a backward that does.
        """
        for other in _units(self, recurse):
            if other.is_hybrid:
                other.unit.reduction.set_all_reduce(requires_all_reduce)

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: Any = None
    ) -> None:
        """Call ``hook`` with the reduced gradients of each of the module's parameter groups.

        Each call gets one flat tensor, when a backward has reduced it, on ``stream`` if one is
        given. On a CPU, and with copies of the shards on several ranks, ``stream`` is ignored.
        """
        for other in _units(self, recurse=False):
            other.unit.reduction.set_after_reduce(hook, stream)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Ask the backend for sums, which are then divided, even where it could compute means."""
        for other in _units(self, recurse=True):
            other.unit.reduction.set_sums_only(enable)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Choose the gradients of parameters that no rank used, in modules that ran.

        True: zeros. False: None. In both cases ranks may use different parameters.
        """
        for other in _units(self, recurse):
            other.unit.reduction.fill_unused(reduce_scatter_unused_params)

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Allow reduce-scatters of up to this many modules in flight, each with its own buffer."""
        if not isinstance(max_input_buffers, int) or isinstance(max_input_buffers, bool):
            raise TypeError(
                f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}"
            )
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")
        for other in _units(self, recurse):
            other.unit.reduction.set_max_in_flight(max_input_buffers)

    # -- communication ------------------------------------------------------------------------

    def set_custom_all_gather(self, comm: Any) -> None:
        """All-gather with ``comm``, which has the interface of torch's ``AllGather``.

        ``comm.allocate`` allocates the memory that it fills. None selects the engine's own
        all-gather.
        """
        for communication in _communications_at_rest(self):
            communication.gather_with(comm)

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Reduce-scatter by ``comm``, with the interface of torch's ``ReduceScatter``."""
        for communication in _communications_at_rest(self):
            communication.reduce_with(comm)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Communicate in memory that the process group's backend allocates, if it can."""
        for communication in _communications_at_rest(self):
            communication.use_backends_memory(enable)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """All-gather in memory that all ranks have mapped; over NCCL only."""
        for communication in _communications_at_rest(self):
            communication.use_symmetric_memory(backend)

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Reduce-scatter in a separate process group from all-gathers; all ranks call this."""
        for other in _units(self, recurse):
            other.communication.reduce_in_own_group(enable)

    def set_post_optim_event(self, event: Any) -> None:
        """Let the next forward all-gather after ``event``, instead of after all earlier compute."""
        self._fullshard_module_unit.gather_after(event)

    # -- residency ----------------------------------------------------------------------------

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Free full parameters between forward and backward, or keep them."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}"
            )
        for other in _units(self, recurse):
            other.set_reshard_after_forward(reshard_after_forward)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Free full parameters after backward, or keep them until some parameter changes."""
        for other in _units(self, recurse):
            other.unit.stay_after_backward(not reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Choose whether backward all-gathers the module's parameters.

        Pass False for a module whose backward does not read them, such as an embedding. This is
        not checked: a backward that does read them finds tensors without memory.
        """
        for other in _units(self, recurse=False):
            other.unit.unshard_in_backward(unshard_in_backward)

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Accept the setting without effect: the engine decides when the host waits."""

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """All-gather the ``modules``, in this order, when this one's forward begins."""
        self._fullshard_module_unit.prefetch_in_forward(_all_units(modules))

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """All-gather the ``modules``, in this order, when this one's backward begins.

        Without any, the one that ran before it in forward.
        """
        self._fullshard_module_unit.prefetch_in_backward(_all_units(modules))

    def _register_forward_method(self, method_name: str) -> None:
        """Make calls of a method run with the module's full parameters in place."""
        method = getattr(self, method_name, None)
        if not callable(method):
            raise ValueError(f"{type(self)} does not have a method {method_name}")
        setattr(self, method_name, ForwardMethod(self._fullshard_module_unit, method))

    def _get_fsdp_state(self) -> ModuleState:
        return self._fullshard_module_unit.state


class ReplicateModule(FSDPModule):
    """The class that ``replicate`` puts before a module's own class."""

    _orig_cls_mro_index = 3
    _fullshard_applied_by = "replicate"
    _fullshard_prefix = "Replicate"


def _communications_at_rest(module: FSDPModule) -> list[Communication]:
    """The communication settings of a module's units, which must be sharded."""
    of = module._fullshard_module_unit
    of.restart()
    return [each.communication for each in of.with_inner()]


def _all_units(modules: Iterable[Any]) -> list[ModuleUnit]:
    found: list[ModuleUnit] = []
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"Expects FSDPModule but got {type(module)}: {module}")
        found += module._fullshard_module_unit.with_inner()
    return found


def _units(module: Any, recurse: bool) -> list[ModuleUnit]:
    """The units of ``module`` and, with ``recurse``, those of modules below it; each once."""
    found = map(unit_of, module.modules()) if recurse else [module._fullshard_module_unit]
    units = dict.fromkeys(unit for unit in found if unit is not None)
    return [each for unit in units for each in unit.with_inner()]


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Accept that several models are to use the same streams: all units on a device do anyway."""
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"Expects list of FSDPModules but got {module}")


_classes: dict[tuple[type[FSDPModule], type[nn.Module]], type[nn.Module]] = {}


def add_class(module: nn.Module, of: ModuleUnit, kind: type[FSDPModule]) -> None:
    """Let ``module`` be one of ``kind`` as well, and a forward of it be one of its unit."""
    own = type(module)
    if (kind, own) not in _classes:
        made: Any = type(f"{kind._fullshard_prefix}{own.__name__}", (kind, own), {})
        _classes[kind, own] = made
    module.__class__ = _classes[kind, own]
    module._fullshard_module_unit = of  # type: ignore[assignment]
    module.register_forward_hook(_has_to_be_called)


def _has_to_be_called(module: nn.Module, args: Any, output: Any) -> None:
    """Do nothing, as a forward hook, which tells others that ``module`` has to be called.

    Without any, the fast path of ``nn.TransformerEncoderLayer`` computes with the parameters of
    its modules and calls none of them.
    """
