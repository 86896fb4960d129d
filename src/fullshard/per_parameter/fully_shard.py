"""``fully_shard``: from a module, or several, to a unit whose parameters are DTensors."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..api import BackwardPrefetch, Communication, MixedPrecision
from ..engine.comm.collectives import group_for
from ..engine.comm.neighbours import neighbours_in
from ..engine.comm.process_groups import ProcessGroups
from ..engine.init.build import encodings_of, group_parameters, managed_parameters, mark_managed
from ..engine.init.communication import check_kind, checked_communication
from ..engine.init.packing import PLAIN, pack
from ..engine.init.validation import check_modules
from ..engine.params.extended_handle import ExtendedRowHandle, is_extended
from ..engine.params.handle import FlatParamHandle
from ..engine.params.locations import find_locations, own_modules
from ..engine.params.packed import Packing
from ..engine.params.packed_handle import PackedRowHandle
from ..engine.params.row_handle import RowHandle
from ..engine.params.tensor_parallel import Distribution, localize
from ..engine.runtime.parts import FewRanks
from ..engine.runtime.policy import UnitOptions
from ..engine.runtime.unit import Unit
from ..wrap import is_unit
from .arguments import modules_in, resharding_of
from .clipping import watch_clipping
from .meshes import DataParallelMesh, mesh_of_shards
from .module import FSDPModule, add_class
from .module_unit import ModuleUnit, strategy_for
from .optimizers import watch_steps
from .placements import PlacementOf, Share, named, shares_of
from .policies import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy
from .spmd import DimensionsOfMesh, check_parameters, dimensions_of
from .torchs_state import ModuleState

__all__ = ["fully_shard"]

#: By parameter, as it was before it was sharded, the unit that shards it now.
_users: Any = WeakTensorKeyDictionary()


def fully_shard(
    module: Any,
    *,
    mesh: Any = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementOf | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (a constant)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008 (a constant)
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    communication: Communication | None = None,
) -> Any:
    """Shard the parameters of ``module``, in place, over the ranks of ``mesh``.

    Applied bottom-up: each call takes the parameters that no call on a submodule has taken, and
    all-gathers them together, around the module's forward and backward. A list of modules is one
    such unit. Between, parameters are DTensors of which every rank holds rows (``Shard(0)``), and
    so are gradients and the values of a state dict.

    >>> model = Net()
    >>> blocks = [fully_shard(module) for module in model.modules() if isinstance(module, Block)]
    >>> model = fully_shard(model)
    >>> optimizer = torch.optim.AdamW(model.parameters())

    The arguments are those of ``torch.distributed.fsdp.fully_shard``, and ``communication``, by
    which ranks send each other less (:class:`fullshard.Communication`).
    """
    return Application(
        name="fully_shard",
        kind=FSDPModule,
        default_mesh=mesh_of_shards,
        mesh=mesh,
        dims=dp_mesh_dims,
        reshard_after_forward=reshard_after_forward,
        placement_of=shard_placement_fn,
        precision=mp_policy,
        offload=offload_policy,
        ignored=frozenset(ignored_params or ()),
        communication=communication,
    ).to(module)


def state_of(module: nn.Module) -> ModuleState | None:
    """The state of a module that ``fully_shard`` or ``replicate`` was applied to, or None."""
    return module._get_fsdp_state() if isinstance(module, FSDPModule) else None


#: Torch's ``fully_shard`` has this attribute, and so has its ``replicate``.
fully_shard.state = state_of  # type: ignore[attr-defined]


@dataclasses.dataclass(frozen=True)
class Application:
    """One call of ``fully_shard`` or ``replicate``: what was asked for.

    ``kind`` is the class that modules gain, and ``default_mesh`` reads a mesh without ``dims``.
    """

    name: str
    kind: type[FSDPModule]
    default_mesh: Callable[[Any], DataParallelMesh]
    mesh: Any
    dims: DataParallelMeshDims | None
    reshard_after_forward: bool | int | None
    placement_of: PlacementOf | None
    precision: MixedPrecisionPolicy
    offload: OffloadPolicy
    ignored: Collection[nn.Parameter]
    communication: Communication | None = None

    def to(self, module: Any) -> Any:
        """Make a unit of the module, or of the modules in a list, and return it or the list."""
        modules = modules_in(module, self.name)
        data_parallel = self._data_parallel()
        root: Any = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
        everything = [m for m in root.modules() if len(modules) == 1 or m is not root]
        check_modules(root, everything)
        own = own_modules(root, is_unit)
        parameters = managed_parameters(root, own, self.ignored, ())
        shares = shares_of(root, parameters, data_parallel, self.placement_of)
        names = named(root, parameters)
        resharding = [
            resharding_of(self._few_after_forward(share.mesh), share.mesh) for share in shares
        ]
        of: ModuleUnit | None = None
        for share, (reshards, few) in reversed([*zip(shares, resharding, strict=True)]):
            unit = self._unit(root, modules, share, reshards is not False, few)
            of = ModuleUnit(unit, modules, self.precision, reshards, share.mesh, few, inner=of)
            of.show_sharded_in_state_dicts()
        assert of is not None
        for each in modules:
            add_class(each, of, self.kind)
        if self.kind is FSDPModule:
            mark_managed(own)
        for name, parameter in names:
            of.note_other_user(name, _users.get(parameter))
            _users[parameter] = weakref.ref(of)
        watch_steps()
        watch_clipping()
        return module

    def _few_after_forward(self, data_parallel: DataParallelMesh) -> bool | int | None:
        """The number of ranks that share parameters after forward, if ``secondary_shards`` asks."""
        given = self.communication
        if given is not None:
            check_kind(given)
        asked = False if given is None else given.secondary_shards
        if given is None or not asked:
            return self.reshard_after_forward
        if self.reshard_after_forward not in (None, True):
            raise ValueError(
                f"secondary_shards={asked} says to how many ranks a forward leaves parameters, and "
                f"so does reshard_after_forward={self.reshard_after_forward}: leave one of them out"
            )
        if data_parallel.shard_size == 1:
            return self.reshard_after_forward
        few = neighbours_in(data_parallel.groups.shards, asked)
        return self.reshard_after_forward if few is None else int(few.size())

    def _data_parallel(self) -> DataParallelMesh:
        if self.dims is None:
            return self.default_mesh(self.mesh)
        return dimensions_of(self.mesh, self.dims)

    def _unit(
        self,
        root: nn.Module,
        modules: Sequence[nn.Module],
        share: Share,
        reshards: bool,
        few: FewRanks | None,
    ) -> Unit:
        data_parallel = share.mesh
        device = data_parallel.device()
        parameters, packings = _pack(root, share.parameters, self.precision.param_dtype)
        _move_states(modules, parameters, self.ignored, device)
        parameters, distributions = self._localize(root, parameters, data_parallel)
        dims = share.dims(root, parameters)
        self._check_extended(root, parameters, dims, few)
        precision = self.precision
        options = UnitOptions(
            strategy=strategy_for(reshards, data_parallel.is_hybrid),
            mixed_precision=MixedPrecision(precision.param_dtype, precision.reduce_dtype),
            backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
            forward_prefetch=False,
            limit_all_gathers=True,
            use_orig_params=True,
        )
        if self.communication is not None:
            shards = data_parallel.groups.shards
            checked = checked_communication(self.communication, options, shards)
            options = dataclasses.replace(options, communication=checked)
        offloads = isinstance(self.offload, CPUOffloadPolicy) or (
            type(self.offload).__name__ == "CPUOffloadPolicy"
        )
        handles = _handles(
            root,
            parameters,
            dims,
            distributions,
            packings,
            data_parallel,
            device,
            offloads,
            options,
            precision,
        )
        groups = data_parallel.groups
        shards = group_for(groups.shards, device)
        copies = None if groups.copies is None else group_for(groups.copies, device)
        name = type(modules[0]).__name__
        return Unit(name, root, handles, shards, copies, device, options)

    def _check_extended(
        self,
        root: nn.Module,
        parameters: list[nn.Parameter],
        dims: dict[nn.Parameter, int],
        few: FewRanks | None,
    ) -> None:
        """Refuse what cannot be done with tensor subclasses that say what is all-gathered."""
        for path, parameter in named(root, parameters):
            if is_extended(parameter) and (few is not None or dims[parameter] != 0):
                asked = f"reshard_after_forward={self.reshard_after_forward}"
                raise NotImplementedError(
                    f"Parameter {path!r} is a {type(parameter).__name__}, which decides what is "
                    f"all-gathered of it: it can be sharded along dim 0 only, and {asked} has to "
                    "be True, False or None"
                )

    def _localize(
        self,
        root: nn.Module,
        parameters: list[nn.Parameter],
        data_parallel: DataParallelMesh,
    ) -> tuple[list[nn.Parameter], dict[nn.Parameter, Distribution]]:
        if not isinstance(data_parallel, DimensionsOfMesh):
            return localize(root, parameters, data_parallel.groups)
        assert self.dims is not None
        check_parameters(named(root, parameters), data_parallel, self.dims)
        # The mesh of the parameters has the dimensions that they are sharded over, too.
        nobody = ProcessGroups(None, None)
        return localize(root, parameters, nobody, unreduced=data_parallel.reduced)


def _move_states(
    modules: Sequence[nn.Module],
    parameters: Iterable[nn.Parameter],
    ignored: Collection[nn.Parameter],
    device: torch.device,
) -> None:
    """Move parameters and buffers to where the module computes; what is on meta stays there."""
    with torch.no_grad():
        for parameter in parameters:
            if parameter.device != device and not parameter.is_meta:
                parameter.data = parameter.data.to(device)
        for module in (sub for each in modules for sub in each.modules()):
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != device and not buffer.is_meta:
                    module._buffers[name] = buffer.to(device)


def _pack(
    root: nn.Module, parameters: list[nn.Parameter], param_dtype: torch.dtype | None
) -> tuple[list[nn.Parameter], dict[nn.Parameter, Packing]]:
    """Prepare packed parameters; those that say themselves what is all-gathered are left."""
    if PLAIN.issuperset(map(type, parameters)):
        return parameters, {}
    return pack(root, parameters, param_dtype, leave=_shards_itself)


def _shards_itself(parameter: nn.Parameter) -> bool:
    """True if a parameter's class can be cut by rows and says what is all-gathered of them.

    A trainable parameter's class is trusted. torchao's NF4Tensor says what is all-gathered, but
    cannot be cut anywhere.
    """
    if not is_extended(parameter):
        return False
    try:
        parameter.detach().narrow(0, 0, min(1, len(parameter)))
    except NotImplementedError:
        return parameter.requires_grad
    return True


def _handles(
    root: nn.Module,
    parameters: list[nn.Parameter],
    dims: dict[nn.Parameter, int],
    distributions: dict[nn.Parameter, Distribution],
    packings: dict[nn.Parameter, Packing],
    data_parallel: DataParallelMesh,
    device: torch.device,
    offloads: bool,
    options: UnitOptions,
    policy: MixedPrecisionPolicy,
) -> list[FlatParamHandle]:
    places = find_locations(root, parameters)
    communication, ranks = options.communication, data_parallel.shard_size
    extended = [parameter for parameter in parameters if is_extended(parameter)]
    plain = [parameter for parameter in parameters if not is_extended(parameter)]
    make_extended = functools.partial(
        ExtendedRowHandle, mesh=data_parallel.mesh_of_gathers, policy=policy
    )
    make_packed = functools.partial(PackedRowHandle, packings=packings)
    grouped = group_parameters(plain, True, packings, communication)
    groups: list[tuple[Any, list[nn.Parameter]]] = [
        *((make_packed if group[0] in packings else RowHandle, group) for group in grouped),
        *((make_extended, group) for group in group_parameters(extended, use_orig_params=True)),
    ]
    return [
        make(
            group,
            root,
            device,
            options.strategy,
            offloads,
            (policy.param_dtype, policy.reduce_dtype),
            data_parallel.groups.shards,
            places=places,
            shardings=[data_parallel.sharding(p, dims[p], distributions.get(p)) for p in group],
            distributions=distributions,
            encodings=communication and encodings_of(group, communication, ranks, packings),
        )
        for make, group in groups
    ]
