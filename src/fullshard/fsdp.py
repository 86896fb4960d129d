"""FullyShardedDataParallel: the constructor, forward, and thin public methods.

What the wrapper does is decided in ``wrap``, carried out by ``engine``, and shown by ``state``.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.join import Joinable

from .api import (
    BackwardPrefetch,
    Communication,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    adopt,
)
from .construction import Initial, Material, construct_unit
from .engine.comm.process_groups import ProcessGroups, resolve_groups, strategy_for
from .engine.init.communication import checked_communication, share_secondary_shards
from .engine.init.optimizer_warnings import watch_optimizers, watching
from .engine.init.packing import PLAIN, packings_of
from .engine.init.validation import check_modules, check_one_device, note_pieces, note_places
from .engine.params.handle import _FSDP_USE_FULL_PREC_IN_EVAL
from .engine.params.locations import WRAPPED_MODULE, clean_tensor_name, own_modules
from .engine.runtime.forward import Schedule
from .engine.runtime.policy import UnitOptions
from .engine.runtime.precision import UNCHANGED_BUFFERS, BufferPrecision, cast_floating
from .engine.runtime.untraced import untraced, untraced_itself
from .forward_method import register_fsdp_forward_method
from .full_parameters import FullParameters
from .gradient_methods import GradientMethods
from .input_precision import InputPrecision
from .introspection import Introspection
from .state.model.deferred_init import check_initializable
from .state.model.methods import StateDicts
from .state.optim.methods import OptimStateDicts
from .uneven import UnevenInputs
from .wrap import (
    collector_paused,
    find_norms_needing_full_precision,
    is_unit,
    needs_full_precision,
    resolve_ignored,
    warn_of_full_precision,
    wrap_submodules,
)
from .wrapped_module import WrappedModule

__all__ = ["FullyShardedDataParallel"]


class FullyShardedDataParallel(
    WrappedModule,
    InputPrecision,
    GradientMethods,
    StateDicts,
    OptimStateDicts,
    UnevenInputs,
    FullParameters,
    Introspection,
):
    """Shards a module's parameters, gradients and optimizer state over data-parallel ranks.

    >>> model = FullyShardedDataParallel(Net(), auto_wrap_policy=ModuleWrapPolicy({Block}))
    >>> optimizer = torch.optim.AdamW(model.parameters())

    The arguments are those of ``torch.distributed.fsdp.FullyShardedDataParallel``, and
    ``communication``, by which ranks send each other less (:class:`Communication`). Runs on any
    device that the process group's backend reaches; a model on the CPU computes on the CPU.
    """

    _is_fullshard_unit = True

    _is_root: bool | None
    #: The wrapper that was constructed around this one.
    _enclosing: weakref.ref[FullyShardedDataParallel] | None

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | str | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: Any = None,
        *,
        communication: Communication | None = None,
        _left_to_ancestor: Collection[nn.Parameter] = (),
        _exempt: bool = False,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"module expects an nn.Module, but got {module!r} of type {type(module).__name__}"
            )
        if isinstance(module, FullyShardedDataParallel):
            raise ValueError(
                f"The module is wrapped already: it is a unit around {type(module.module).__name__}"
            )
        super().__init__()
        strategy = adopt(
            sharding_strategy or ShardingStrategy.FULL_SHARD, ShardingStrategy, "sharding_strategy"
        )
        precision = adopt(mixed_precision or MixedPrecision(), MixedPrecision, "mixed_precision")
        offload = adopt(cpu_offload or CPUOffload(), CPUOffload, "cpu_offload")
        if backward_prefetch is not None:
            backward_prefetch = adopt(backward_prefetch, BackwardPrefetch, "backward_prefetch")
        groups = resolve_groups(process_group, device_mesh, strategy)
        strategy = strategy_for(strategy, groups)
        if strategy is ShardingStrategy.NO_SHARD:
            groups = ProcessGroups(groups.shards, None)
        lowers = precision.param_dtype is not None
        if lowers and not _exempt and needs_full_precision(module, precision):
            warn_of_full_precision({"(root)": module}, precision)
            precision, _exempt, lowers = MixedPrecision(), True, False
        ignored = resolve_ignored(module, ignored_modules, ignored_states)
        # Not one by one: __setattr__ handles the user's assignments.
        self.__dict__.update(
            mixed_precision=precision,
            cpu_offload=offload,
            _left_to_ancestor=frozenset(_left_to_ancestor),
            _exempt=_exempt,
            _ignored_modules=ignored.modules,
            _ignored_params=ignored.parameters,
            _ignored_buffer_names=ignored.buffer_names,
            _full_precision_in_eval=os.environ.get(_FSDP_USE_FULL_PREC_IN_EVAL) == "1",
            _schedule=None,
            _is_root=None,
            _enclosing=None,
        )
        options = UnitOptions(
            strategy,
            precision,
            backward_prefetch,
            forward_prefetch,
            limit_all_gathers,
            use_orig_params,
        )
        if communication is not None:
            communication = checked_communication(communication, options, groups.shards)
            options = dataclasses.replace(options, communication=communication)
        initial = Initial(device_id, param_init_fn, sync_module_states)
        if auto_wrap_policy is None:
            if lowers and not _exempt:
                self._wrap_norms_in_full_precision(module, groups, options, initial)
            self._build(module, groups, options, initial)
        else:
            with collector_paused():
                below = [m for m in module.modules() if m not in ignored.modules]
                check_modules(module, below)
                check_initializable(module, below, None, param_init_fn)
                managed = [p for p in module.parameters() if p not in ignored.parameters]
                if not PLAIN.issuperset(map(type, managed)):
                    packings_of(module, managed)
                shared = self._shared_arguments(groups, options, initial)
                wrap_submodules(module, auto_wrap_policy, type(self), shared, ignored)
                self._build(module, groups, options, initial)
        if device_mesh is not None:
            self._keep_mesh(device_mesh, filter(is_unit, module.modules()))
        # Not add_module, which would ask the module, through the wrapper, for this name.
        self._modules[WRAPPED_MODULE] = module

    def _shared_arguments(
        self, groups: ProcessGroups, options: UnitOptions, initial: Initial
    ) -> dict[str, Any]:
        """The arguments that units which this one makes below itself are constructed with."""
        return {
            "process_group": groups.argument,
            "sharding_strategy": options.strategy,
            "cpu_offload": self.cpu_offload,
            "backward_prefetch": options.backward_prefetch,
            "mixed_precision": options.mixed_precision,
            "param_init_fn": initial.param_init_fn,
            "device_id": initial.device_id,
            "sync_module_states": initial.sync_module_states,
            "forward_prefetch": options.forward_prefetch,
            "limit_all_gathers": options.limit_all_gathers,
            "use_orig_params": options.use_orig_params,
            "communication": options.communication,
        }

    def _wrap_norms_in_full_precision(
        self,
        module: nn.Module,
        groups: ProcessGroups,
        options: UnitOptions,
        initial: Initial,
    ) -> None:
        """Wrap norms on their own that could not run in this unit's precision (see ``wrap``)."""
        arguments = self._shared_arguments(groups, options, initial)
        norms = find_norms_needing_full_precision(
            module, self.mixed_precision, self._ignored_modules
        )
        if norms:
            named = {norm.path: norm.module for norm in norms}
            warn_of_full_precision(named, self.mixed_precision)
        for norm in norms:
            ignored = [p for p in norm.module.parameters() if p in self._ignored_params]
            own = {"mixed_precision": None, "_exempt": True, "ignored_states": ignored}
            left = {"_left_to_ancestor": self._left_to_ancestor}
            norm.replace_by(type(self)(norm.module, **{**arguments, **own, **left}))

    def _build(
        self,
        module: nn.Module,
        groups: ProcessGroups,
        options: UnitOptions,
        initial: Initial,
    ) -> None:
        everything = own_modules(module, is_unit)
        below: list[Any] = [*filter(is_unit, module.modules())]
        nested = [
            child
            for m in everything
            for child in m._modules.values()
            if isinstance(child, FullyShardedDataParallel)
        ]
        for wrapper in nested:
            wrapper.__dict__["_enclosing"] = weakref.ref(self)
        modules = [m for m in everything if m not in self._ignored_modules]
        material = Material(
            module,
            everything,
            modules,
            self._ignored_params | self._left_to_ancestor,
            frozenset().union(*[w._left_to_ancestor for w in below]),
            [w._unit for w in nested],
        )
        unit, order = construct_unit(material, groups, options, self.cpu_offload, initial)
        lowered = self.mixed_precision.buffer_dtype
        precision = BufferPrecision(modules, lowered) if lowered is not None else UNCHANGED_BUFFERS
        self.__dict__.update(_unit=unit, _buffer_precision=precision)
        self._keep_state(modules, order, below)
        if not watching:
            watch_optimizers(unit)

    # -- a step ---------------------------------------------------------------------------------

    @untraced_itself
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module with full parameters in place."""
        # Not self.module, a frame of its own to Dynamo.
        module: Any = self._modules[WRAPPED_MODULE]
        return self._run(module, args, kwargs)

    @untraced_itself
    def _run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        schedule = self._schedule or self._start()
        unit, depth, full_precision = self._unit, schedule.depth, False
        try:
            if self._adapts_inputs:
                full_precision = self._full_precision_in_eval and not self.training
                args, kwargs = self._adapt_inputs(full_precision, args, kwargs)
            call = schedule.begin_forward(unit, full_precision, (args, kwargs))
            output = schedule.end_forward(unit, function(*args, **kwargs), call)
        except BaseException as error:
            self._abandon(schedule, depth, error, (args, kwargs))
            raise
        if self._outside_dtype is not None:
            output = cast_floating(output, self._outside_dtype)
        return output

    @untraced
    def _abandon(self, schedule: Schedule, depth: int, error: BaseException, inputs: Any) -> None:
        schedule.abandon(self._unit, depth)
        note_places(error, self._unit, inputs)
        note_pieces(error, (other._unit for other in self.fsdp_modules(self.module)))

    @untraced
    def _start(self) -> Schedule:
        """Become the root of the units below, at the first forward."""
        modules = self.fsdp_modules(self)
        for name, other in self.named_modules():
            if isinstance(other, FullyShardedDataParallel):
                other._unit.start_training(_unit_name(name, other), other._forward_pre_hooks)
        units = [other._unit for other in modules]
        check_one_device(unit for unit in units if unit.handles)
        for unit in units:
            if unit.options.communication is not None:
                # Copies and pickles come without secondary shards.
                share_secondary_shards(unit)
        for other in modules:
            if other._schedule is not None:
                other._schedule.rest()
        schedule = Schedule(self._unit, units)
        for other in modules:
            other._schedule = schedule
            other._is_root = other is self
            other._adapts_inputs = other._changes_precision_or_place
        return schedule

    def _outermost(self) -> FullyShardedDataParallel:
        """The wrapper that will be the root, as far as it is known from construction."""
        wrapper = self
        while wrapper._enclosing is not None:
            outer = wrapper._enclosing()
            if outer is None or not any(module is wrapper for module in outer.modules()):
                break
            wrapper = outer
        return wrapper

    def register_forward_method(self, method_name: str) -> None:
        """Make a method of the wrapped module unshard parameters as ``forward`` does.

        >>> model.register_forward_method("generate")
        """
        register_fsdp_forward_method(self, method_name)

    # -- public methods -------------------------------------------------------------------------

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """The wrappers in ``module``, itself included; with ``root_only`` the outermost ones."""
        found = [m for m in module.modules() if isinstance(m, FullyShardedDataParallel)]
        if not root_only:
            return found
        nested = {inner for outer in found for inner in outer.module.modules()}
        return [m for m in found if m not in nested]

    def check_is_root(self) -> bool:
        """True if this wrapper is the outermost one of its model."""
        if self._outermost() is not self:
            return False
        if self._is_root is None:
            self._start()
        return bool(self._is_root)

    # -- moving, copying, saving ------------------------------------------------------------------

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        if self._schedule is not None:
            self._schedule.rest()
        super()._apply(fn, recurse)
        for handle in self._unit.handles:
            handle.converted(fn)
            if not handle.offload:
                self._unit.set_device(handle.device)
        if not self._unit.handles:
            self._unit.set_device(fn(torch.empty(0, device=self._unit.device)).device)
        self._unit.forget_views()
        self._adapts_inputs = self._changes_precision_or_place
        return self

    def __getstate__(self) -> dict[str, Any]:
        if self._schedule is not None:
            self._schedule.rest()
        return {
            **self.__dict__,
            "_schedule": None,
            "_is_root": None,
            "_enclosing": None,
            "_joined": None,
        }


def _show_public_arguments(function: Any) -> None:
    """Hide the private arguments of the wrapping code from ``help`` and ``inspect``."""
    signature = inspect.signature(function)
    public = [p for name, p in signature.parameters.items() if not name.startswith("_")]
    function.__signature__ = signature.replace(parameters=public)


_show_public_arguments(FullyShardedDataParallel.__init__)
# Not a base class: its metaclass would make every isinstance() of a wrapper slower.
Joinable.register(FullyShardedDataParallel)


def _unit_name(path: str, wrapper: FullyShardedDataParallel) -> str:
    return clean_tensor_name(f"{path}.")[:-1] if path else f"(root) {type(wrapper.module).__name__}"
