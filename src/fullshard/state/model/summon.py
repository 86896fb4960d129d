"""``summon_full_params``: unshards units, in full precision, for the duration of a context.

Inside the context a unit registers full ``nn.Parameter`` objects under the original names. With
``use_orig_params=True`` these are the objects that the optimizer holds, otherwise new ones, as they
are in place of DTensors.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import nn

from ...engine.comm.streams import streams_for
from ...engine.grads.gradients import set_gradient
from ...engine.params.buffers import FullBuffer
from ...engine.params.handle import FlatParamHandle
from ...engine.params.replacements import check_shape, note_shown, parameter_at, refuse_tie
from ...engine.params.row_handle import RowHandle
from ...engine.params.tensor_parallel import as_shown, local_part
from ...engine.runtime.forward import Schedule
from ...engine.runtime.unit import Unit
from .gathering import full_views, gather_shards, in_buffer_order, store_own_part
from .summoned_rows import SummonedRows
from .units import steps_of


def summon_full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> contextlib.AbstractContextManager[None]:
    """Inside the context ``module`` has its full parameters, under their original names.

    It is sharded by wrappers or by :func:`fully_shard`, as a whole or in parts; all ranks call
    this. Changes made inside are kept if ``writeback``; with ``rank0_only`` the other ranks keep
    seeing their shards; ``with_grads`` shows full gradients too. Without ``recurse`` only the
    module's own unit has full parameters, not those of modules below it.

    >>> with fullshard.summon_full_params(model), torch.no_grad():
    ...     norm = model.head.weight.norm()
    """
    return summon(
        steps_of(module, recurse=recurse),
        writeback=writeback,
        rank0_only=rank0_only,
        offload_to_cpu=offload_to_cpu,
        with_grads=with_grads,
    )


@contextlib.contextmanager
def summon(
    units: Sequence[tuple[Unit, Schedule | None]],
    *,
    writeback: bool,
    rank0_only: bool,
    offload_to_cpu: bool,
    with_grads: bool,
) -> Generator[None, None, None]:
    """Show the full parameters of ``units``; with ``writeback`` keep the changes made inside."""
    _check(units, writeback, rank0_only, offload_to_cpu, with_grads)
    # The stack reshards every unit, even if the changes to one of them cannot be written back.
    with contextlib.ExitStack() as summoned:
        for device in {unit.device for unit, _ in units}:
            summoned.callback(streams_for(device).settle)
        for unit, schedule in units:
            summoned.enter_context(unit.being_summoned())
            if unit.handles:
                assert schedule is not None
                schedule.rest(unit)
                visible = unit.shards.rank == 0 or not rank0_only
                summoned_unit = _SummonedUnit(unit, visible, offload_to_cpu, with_grads)
                summoned.callback(summoned_unit.reshard, writeback)
                unit.mark_summoned(True, everywhere=not rank0_only)
        yield


class _SummonedUnit:
    """One unit while its full parameters are shown."""

    def __init__(self, unit: Unit, visible: bool, to_cpu: bool, with_grads: bool) -> None:
        self._unit = unit
        unit.write_back()
        unit.shards.begin_pass("summon", unit.name)
        unit.start_unshard(full_precision=True)
        unit.finish_unshard()
        unit.mark_summoned(True, everywhere=False)
        self._groups: list[_SummonedGroup | SummonedRows] = []
        if visible:
            with torch.no_grad():
                self._groups = [
                    _show_full(handle, buffer, to_cpu)
                    for handle, buffer in zip(unit.handles, unit.full_buffers, strict=True)
                ]
        if with_grads:
            for position, handle in enumerate(unit.handles):
                gradients = _full_gradients(unit, handle)
                if visible:
                    self._groups[position].show_gradients(gradients)
        copied = to_cpu and unit.device.type != "cpu"
        if copied or not visible:
            unit.reshard()

    def reshard(self, writeback: bool) -> None:
        try:
            with torch.no_grad(), contextlib.ExitStack() as stack:
                for group in self._groups:
                    stack.callback(group.reshard, writeback)
        finally:
            self._unit.mark_summoned(False, everywhere=False)
            self._unit.reshard()


def _show_full(
    handle: FlatParamHandle, buffer: FullBuffer, to_cpu: bool
) -> _SummonedGroup | SummonedRows:
    if isinstance(handle, RowHandle):
        return SummonedRows(handle, buffer, to_cpu)
    return _SummonedGroup(handle, buffer, to_cpu)


class _SummonedGroup:
    """One group of a summoned unit, whose parameters are parts of a flat one."""

    def __init__(self, handle: FlatParamHandle, buffer: FullBuffer, to_cpu: bool) -> None:
        self._handle = handle
        flat, views = buffer.flat, buffer.views
        if to_cpu and flat.device.type != "cpu":
            flat = flat.to("cpu")
            views = full_views(handle, flat)
        self._views = views
        if handle.use_orig_params:
            self._parameters = list(handle.params)
            for parameter, view in zip(handle.params, views, strict=True):
                parameter.data = view
            self._show_hidden()
            # Programs read the flat parameter's size, which includes alignment and padding here.
            handle.flat_param.data = flat
        else:
            trains = handle.flat_param.requires_grad
            shown = as_shown(views, handle.presentations())
            self._parameters = [nn.Parameter(view, requires_grad=trains) for view in shown]
            self._register(self._parameters)
            # Code that holds the flat parameter sees, and changes, the same full values.
            handle.flat_param.data = flat[: handle.layout.numel]
        self._reduced = [p.grad for p in handle.params] if handle.use_orig_params else []
        #: The parameters that are shown with a gradient, by index.
        self._with_gradient: set[int] = set()
        self._shows_gradients = False

    def _show_hidden(self) -> None:
        """Register DTensors, and objects that wrap others, in place of plain parameters."""
        for index, presentation in enumerate(self._handle.presentations()):
            if self._handle.is_hidden(index):
                plain = self._parameters[index]
                shown = nn.Parameter(presentation.assemble(plain), plain.requires_grad)
                self._parameters[index] = shown
                for place in self._handle.places[index]:
                    place.module._parameters[place.name] = shown

    def _register(self, parameters: Sequence[nn.Parameter]) -> None:
        """Register the original parameters in place of the flat parameter."""
        handle = self._handle
        del handle.module._parameters["_flat_param"]
        for places, parameter in zip(handle.places, parameters, strict=True):
            for place in places:
                place.module.__dict__.pop(place.name, None)
                place.module._parameters[place.name] = parameter
            note_shown(parameter, places[0])

    def show_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        for index, (parameter, gradient) in enumerate(
            zip(self._parameters, gradients, strict=True)
        ):
            parameter.grad = None
            if gradient is not None:
                self._with_gradient.add(index)
                gradient = gradient.to(parameter.device)
                distribution = self._handle.distribution(index)
                if distribution is not None:
                    gradient = distribution.assemble(gradient)
                set_gradient(parameter, gradient)
        self._shows_gradients = True

    def reshard(self, writeback: bool) -> None:
        found: list[nn.Parameter | None] = [*self._parameters]
        if writeback:
            found = [self._registered(index) for index in range(len(found))]
        try:
            if self._shows_gradients:
                self._take_gradients(found, writeback)
            if writeback:
                self._store(found)
        finally:
            self._hide(found)

    def _registered(self, index: int) -> nn.Parameter | None:
        """The parameter that is registered now; a replacement in any of a shared one's places."""
        places = self._handle.places[index]
        here = [place.module._parameters.get(place.name) for place in places]
        shown = self._parameters[index]
        return next((p for p in here if p is not None and p is not shown), here[0])

    def _hide(self, found: Sequence[nn.Parameter | None]) -> None:
        """Register this rank's sharded parameters again."""
        handle = self._handle
        if handle.use_orig_params:
            for index, parameter in enumerate(found):
                if parameter is not None:
                    handle.params[index] = self._kept(index, parameter)
                    handle.params[index].requires_grad_(parameter.requires_grad)
        else:
            for place in (place for places in handle.places for place in places):
                place.module._parameters.pop(place.name, None)
            handle.module._parameters["_flat_param"] = handle.flat_param
        handle.flat_param.data = handle.shard_tensor
        handle.rebind()

    def _kept(self, index: int, shown: nn.Parameter) -> nn.Parameter:
        """The parameter to keep for ``shown``: itself, or the plain one behind a DTensor."""
        return self._handle.params[index] if self._handle.is_hidden(index) else shown

    def _store(self, found: Sequence[nn.Parameter | None]) -> None:
        """Copy this rank's part of the full parameters into the shard."""
        handle = self._handle
        for index, piece in enumerate(handle.pieces):
            for place in handle.places[index]:
                parameter_at(place)  # Raises an error if it was removed.
            parameter = found[index]
            assert parameter is not None
            if not handle.use_orig_params:
                refuse_tie(handle.places[index][0], self._parameters[index], parameter)
            local = handle.packed(index, local_part(parameter))
            # Also on ranks without a piece of the parameter, so that all ranks raise the error:
            # those that went on would wait for the others in the next collective.
            check_shape("parameter", handle.places[index][0], self._views[index], local)
            if parameter is not self._parameters[index]:
                handle.adopt_replacement(index, parameter)
            if piece.in_shard:
                store_own_part(handle, index, local)

    def _take_gradients(self, found: Sequence[nn.Parameter | None], writeback: bool) -> None:
        handle = self._handle
        for index, parameter in enumerate(found):
            if parameter is None:
                continue
            gradient, parameter.grad = parameter.grad, None
            if not writeback:
                gradient = self._reduced[index]
            elif gradient is not None and handle.is_sharded:
                gradient = self._own_gradient(index, local_part(gradient))
            if gradient is not None:
                set_gradient(self._kept(index, parameter), local_part(gradient))

    def _own_gradient(self, index: int, full: torch.Tensor) -> torch.Tensor | None:
        """This rank's part of a gradient, copied into the old one; None if it has no part."""
        piece = self._handle.pieces[index]
        flat = in_buffer_order(self._handle.layout.slots[index], full)
        part = flat[piece.start : piece.start + piece.numel]
        old = self._reduced[index]
        if old is not None:
            return old.copy_(part)
        if not piece.in_shard or (index in self._with_gradient and not part.any()):
            # The full gradient showed zeros for a rank without a gradient, which still has none.
            return None
        return part.clone()


def _full_gradients(unit: Unit, handle: FlatParamHandle) -> list[torch.Tensor | None]:
    """All-gather each parameter's gradient; None if no rank has one.

    It is zero in the parts of ranks that have none. All ranks call this, also those without any.
    """
    slots = handle.layout.slots
    if not handle.is_sharded:
        return [p.grad for p in handle.params]
    rows = handle if isinstance(handle, RowHandle) else None
    shard = torch.zeros(handle.layout.shard_numel, dtype=handle.dtypes.shard, device=handle.device)
    present = torch.zeros(len(slots), device=handle.device)
    for index, (parameter, piece) in enumerate(zip(handle.params, handle.pieces, strict=True)):
        if parameter.grad is not None:
            local = parameter.grad if rows is None else rows.local_gradient(parameter).reshape(-1)
            shard[piece.offset : piece.offset + piece.numel].copy_(local)
            present[index] = 1
    (full,) = gather_shards(unit, [handle], [shard])
    unit.shards.all_reduce(present, unit.name)
    views = full_views(handle, full) if rows is None else rows.from_all_ranks(full)
    return [view if some else None for view, some in zip(views, present.tolist(), strict=True)]


def _check(
    units: Sequence[tuple[Unit, Any]],
    writeback: bool,
    rank0_only: bool,
    offload_to_cpu: bool,
    with_grads: bool,
) -> None:
    if writeback and rank0_only:
        raise NotImplementedError(
            "writeback=True and rank0_only=True is not supported: only rank 0 has full parameters, "
            "so changes could not be written to the other ranks' shards. Pass writeback=False or "
            "rank0_only=False"
        )
    if with_grads and (writeback and offload_to_cpu):
        raise NotImplementedError(
            "with_grads=True with offload_to_cpu=True requires writeback=False: gradients in host "
            "memory are not copied back"
        )
    if offload_to_cpu and not rank0_only and any(u.device.type != "cpu" for u, _ in units):
        warnings.warn(
            "offload_to_cpu=True with rank0_only=False copies the full parameters to host memory "
            "once per rank. Consider rank0_only=True",
            UserWarning,
            stacklevel=4,
        )
    for unit, schedule in units:
        if schedule is not None and not schedule.wait_until_idle():
            raise AssertionError(
                "Cannot manually unshard parameters during forward/backward "
                f"(unit {unit.name!r} is in the middle of a step)"
            )
        if unit.summoned:
            raise AssertionError(
                "Cannot manually unshard parameters when already unsharding parameters "
                f"(unit {unit.name!r} is inside another summon_full_params context, whose options "
                "apply)"
            )
        if with_grads and not unit.options.use_orig_params and unit.handles:
            raise NotImplementedError(
                f"with_grads=True, use_orig_params=False, offload_to_cpu={offload_to_cpu} is not "
                "supported yet. Wrap the model with use_orig_params=True to see full gradients"
            )
        if with_grads and any(handle.keeps_local_gradients for handle in unit.handles):
            raise RuntimeError(
                f"Unit {unit.name!r} holds unreduced gradients of a backward inside no_sync(). Run "
                "a backward outside no_sync() before using with_grads=True"
            )
