"""The unit behind each module that ``fully_shard`` was applied to, and its forward.

The engine does the work; this runs a module's forward as a forward of its unit, and makes the
outermost module that is called the root of all units below it. A module whose parameters are shared
over several meshes has a unit for each; they run one inside the other.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from ..api import ShardingStrategy
from ..engine.init.validation import check_one_device, note_places
from ..engine.params.locations import clean_tensor_name
from ..engine.params.replacements import parameter_at
from ..engine.params.row_sharding import copyable
from ..engine.params.tensor_parallel import is_distributed
from ..engine.runtime.forward import Schedule
from ..engine.runtime.parts import FewRanks
from ..engine.runtime.precision import cast_floating, cast_inputs, move
from ..engine.runtime.unit import Unit
from ..engine.runtime.untraced import untraced, untraced_itself
from .communication import Communication
from .torchs_state import ModuleState

if TYPE_CHECKING:
    from .meshes import DataParallelMesh
    from .policies import MixedPrecisionPolicy


class ModuleUnit:
    """The unit of one module, or of several that were given to ``fully_shard`` together.

    ``inner`` is that of the same modules' parameters on another mesh.
    """

    def __init__(
        self,
        unit: Unit,
        modules: list[nn.Module],
        precision: MixedPrecisionPolicy,
        reshard_after_forward: bool | None,
        mesh: DataParallelMesh,
        few: FewRanks | None = None,
        inner: ModuleUnit | None = None,
    ) -> None:
        if few is not None:
            unit.keep_parts(few)
        self.unit = unit
        self.modules = modules
        self.inner = inner
        self.mesh = mesh
        self.precision = precision
        self.is_hybrid = mesh.is_hybrid
        #: The user's choice; None: decided when the outermost module is known.
        self._reshards_after_forward = reshard_after_forward
        self.schedule: Schedule | None = None
        self.is_root: bool | None = None
        #: The module's name below the root, once that is known.
        self.path: str | None = None
        self.communication = Communication(unit, mesh.ranks)
        self.state = ModuleState(self)
        self._gather_after: Any = None
        #: Parameters that another unit sharded before this one, by name, and that unit.
        self._other_users: dict[str, weakref.ref[ModuleUnit]] = {}
        #: The modules that have yet to run, of several, in the pass of that number.
        self._to_run: set[nn.Module] = set()
        self._pass = 0
        #: What the user had prefetched when this unit's forward, or backward, begins.
        self._prefetched_in_forward: list[ModuleUnit] = []

    # -- a forward ----------------------------------------------------------------------------

    @untraced_itself
    def _run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Any,
        module: nn.Module | None = None,
    ) -> Any:
        """Call ``function`` with full parameters in place; ``module`` if it is one's forward."""
        schedule = self.schedule or self.start()
        unit, depth = self.unit, schedule.depth
        if self._gather_after is not None and depth == 0:
            event, self._gather_after = self._gather_after, None
            schedule.gather_after(event)
        try:
            if self._adapts_inputs:
                args, kwargs = self._adapt_inputs(args, kwargs)
            call = schedule.begin_forward(unit, False, (args, kwargs))
            if self._prefetched_in_forward:
                self._prefetch(schedule)
            if self.inner is None:
                output = function(*args, **kwargs)
            else:
                output = self.inner._run(function, args, kwargs, module)
            follow = len(self.modules) > 1 and self._others_follow(module, schedule.passes)
            output = schedule.end_forward(unit, output, call, follow)
        except BaseException as error:
            self._abandon(schedule, depth, error, (args, kwargs))
            raise
        if self.precision.output_dtype is not None:
            output = cast_floating(output, self.precision.output_dtype)
        return output

    def _others_follow(self, module: nn.Module | None, number: int) -> bool:
        """True if ``module`` has run, and others of the unit have not yet in pass ``number``."""
        if module is None:
            return False
        if self._pass != number or not self._to_run:
            self._pass, self._to_run = number, {*self.modules}
        self._to_run.discard(module)
        return bool(self._to_run)

    def gather_after(self, event: Any) -> None:
        """Let the next pass all-gather after ``event``, instead of after all earlier compute."""
        self._gather_after = event

    @property
    def _adapts_inputs(self) -> bool:
        return self.precision.param_dtype is not None or self.unit.device.type != "cpu"

    @untraced
    def _adapt_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Move inputs to the unit's device, and cast them, as its precision says."""
        unit, precision = self.unit, self.precision
        if self.is_root and unit.device.type != "cpu":
            args, kwargs = move((args, kwargs), unit.device)
        if precision.param_dtype is not None and precision.cast_forward_inputs:
            args, kwargs = cast_inputs(args, kwargs, precision.param_dtype)
        return args, kwargs

    @untraced
    def _prefetch(self, schedule: Schedule) -> None:
        for other in self._prefetched_in_forward:
            schedule.unshard(other.unit)

    @untraced
    def _abandon(self, schedule: Schedule, depth: int, error: BaseException, inputs: Any) -> None:
        schedule.abandon(self.unit, depth)
        note_places(error, self.unit, inputs)

    def note_other_user(self, name: str, other: weakref.ref[ModuleUnit] | None) -> None:
        """Remember that the parameter was sharded by another unit as well, if it was."""
        if other is not None:
            self._other_users[name] = other

    # -- the root -----------------------------------------------------------------------------

    def with_inner(self) -> Iterator[ModuleUnit]:
        """The units of the same modules: this one, and those inside of it."""
        found: ModuleUnit | None = self
        while found is not None:
            yield found
            found = found.inner

    def below(self) -> Iterator[tuple[str, ModuleUnit]]:
        """This unit and the units of modules below its own, each once, with their paths."""
        seen: set[ModuleUnit] = set()
        for module in self.modules:
            for path, submodule in module.named_modules():
                found = unit_of(submodule)
                if found is not None and found not in seen:
                    for each in found.with_inner():
                        seen.add(each)
                        yield path, each

    @untraced
    def start(self) -> Schedule:
        """Become the root of the units below, at the first forward."""
        everything = list(self.below())
        for _, other in everything:
            other.restart()
        outermost = {*self.with_inner()}
        of_modules = {unit_of(other.modules[0]) for _, other in everything}
        for path, other in everything:
            other.path = clean_tensor_name(f"{path}.")[:-1] if path else ""
            name = other.path or f"(root) {type(other.modules[0]).__name__}"
            if other not in of_modules:
                name += f" over {other.mesh.mesh.mesh_dim_names or tuple(other.mesh.mesh.shape)}"
            other.unit.start_training(name, {})
            other._check_unshared(path, everything)
            check_materialized(other)
        units = [other.unit for _, other in everything]
        check_one_device(unit for unit in units if unit.handles)
        for _, other in everything:
            other.is_root = other in outermost
            other._settle_strategy()
        schedule = Schedule(self.unit, units)
        for _, other in everything:
            other.schedule = schedule
        return schedule

    def _check_unshared(self, path: str, everything: list[tuple[str, ModuleUnit]]) -> None:
        """Refuse (ValueError) parameters that two units of a model would each train by itself."""
        units = {other for _, other in everything}
        for name, other in self._other_users.items():
            if other() in units:
                full = clean_tensor_name(f"{path}.{name}" if path else name)
                raise ValueError(
                    f"Parameter {full!r} is shared with a parameter already managed by another "
                    "FSDP group. For shared/tied parameters, use "
                    "fully_shard([module_a, module_b]) to place them in the same FSDP group."
                )

    # -- options ------------------------------------------------------------------------------

    def prefetch_in_forward(self, others: list[ModuleUnit]) -> None:
        """All-gather ``others`` whenever this unit's forward begins."""
        self._prefetched_in_forward = others

    def prefetch_in_backward(self, others: list[ModuleUnit]) -> None:
        """Have ``others`` all-gathered when backward reaches this unit; if empty, the next one."""
        chosen = [other.unit for other in others] or None
        for each in self.with_inner():
            each.unit.prefetch_when_reached(chosen)

    def set_reshard_after_forward(self, reshards: bool) -> None:
        self.unit.keep_parts(None)
        self._reshards_after_forward = reshards
        self._settle_strategy()

    def _settle_strategy(self) -> None:
        """Decide whether the unit is resharded after forward; by default, a root is not."""
        reshards = self._reshards_after_forward
        if reshards is None:
            reshards = not self.is_root
        strategy = strategy_for(reshards, self.is_hybrid)
        if strategy is not self.unit.options.strategy:
            self.unit.set_options(dataclasses.replace(self.unit.options, strategy=strategy))

    def show_sharded_in_state_dicts(self) -> None:
        """Have state dicts of the unit's modules, saved or loaded, find sharded parameters."""
        owners = (place.module for h in self.unit.handles for found in h.places for place in found)
        for module in dict.fromkeys(owners):
            module.register_state_dict_pre_hook(self._reshard_if_idle)
            module.register_load_state_dict_pre_hook(self._reshard_if_idle)
            module.register_state_dict_post_hook(_let_values_be_copied)

    def _reshard_if_idle(self, *_: Any) -> None:
        unit = self.unit
        shows_other = unit.shows_full or (unit.parts is not None and bool(unit.parts.held))
        if shows_other and self.schedule is not None and self.schedule.is_idle:
            self.schedule.reshard(unit)

    def restart(self) -> None:
        """Bring all units of the step's schedule back to sharded."""
        if self.schedule is not None:
            self.schedule.rest()


def strategy_for(reshards_after_forward: bool, is_hybrid: bool) -> ShardingStrategy:
    """The engine's name for these two answers."""
    if is_hybrid:
        kept = ShardingStrategy._HYBRID_SHARD_ZERO2
        return ShardingStrategy.HYBRID_SHARD if reshards_after_forward else kept
    kept = ShardingStrategy.SHARD_GRAD_OP
    return ShardingStrategy.FULL_SHARD if reshards_after_forward else kept


def _let_values_be_copied(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any
) -> None:
    """Make ``copy.deepcopy`` of a state dict work: see ``at_start``."""
    for name, parameter in module._parameters.items():
        value = state.get(prefix + name)
        if value is not None and value is not parameter and is_distributed(value):
            state[prefix + name] = copyable(value)


def unit_of(module: nn.Module) -> ModuleUnit | None:
    """The unit of a module that ``fully_shard`` was applied to."""
    found: ModuleUnit | None = module.__dict__.get("_fullshard_module_unit")
    return found


def check_materialized(of: ModuleUnit) -> None:
    """Refuse (RuntimeError) to train parameters that are on the meta device."""
    names: list[str] = []
    for handle in of.unit.handles:
        first = [places[0] for places in handle.places]
        names += [place.path for place in first if parameter_at(place).is_meta]
    if names:
        raise RuntimeError(
            "FSDP parameters should be materialized from meta device before training, but the "
            f"following were still on meta device: {names}\nFor example, call "
            "module.to_empty(device) to materialize to device and call module.reset_parameters() "
            "on each module to initialize values."
        )
    for handle in of.unit.handles:
        handle.write_back()
