"""``summon_full_params``: a unit's full parameters, in full precision, for as long as a context.

While summoned, a unit shows real ``nn.Parameter`` objects under the original names: the very
objects the optimizer holds where original parameters are used, new ones otherwise.
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
from ...engine.params.tensor_parallel import as_shown, local_part
from ...engine.runtime.forward import Schedule
from ...engine.runtime.unit import Unit
from .gathering import gather_shards, in_buffer_order, store_own_part, whole_views


@contextlib.contextmanager
def summon(
    units: Sequence[tuple[Unit, Schedule | None]],
    *,
    writeback: bool,
    rank0_only: bool,
    offload_to_cpu: bool,
    with_grads: bool,
) -> Generator[None, None, None]:
    """Show full parameters of ``units``; what is changed inside is kept if ``writeback``."""
    _check(units, writeback, rank0_only, offload_to_cpu, with_grads)
    # A stack dismisses every unit, also if what is shown by one of them cannot be kept.
    with contextlib.ExitStack() as summoned:
        for device in {unit.device for unit, _ in units}:
            summoned.callback(streams_for(device).settle)
        for unit, schedule in units:
            summoned.enter_context(unit.being_summoned())
            if unit.handles:
                assert schedule is not None
                schedule.rest(unit)
                visible = unit.shards.rank == 0 or not rank0_only
                shown = _Summoned(unit, visible, offload_to_cpu, with_grads)
                summoned.callback(shown.dismiss, writeback)
                unit.mark_summoned(True, everywhere=not rank0_only)
        yield


class _Summoned:
    """One unit while its full parameters are shown."""

    def __init__(self, unit: Unit, visible: bool, to_cpu: bool, with_grads: bool) -> None:
        self._unit = unit
        unit.write_back()
        unit.shards.begin_pass("summon", unit.name)
        unit.start_unshard(full_precision=True)
        unit.finish_unshard()
        unit.mark_summoned(True, everywhere=False)
        self._parts: list[_Part] = []
        if visible:
            with torch.no_grad():
                self._parts = [
                    _Part(handle, buffer, to_cpu)
                    for handle, buffer in zip(unit.handles, unit.full_buffers, strict=True)
                ]
        if with_grads:
            for position, handle in enumerate(unit.handles):
                gradients = _whole_gradients(unit, handle)
                if visible:
                    self._parts[position].show_gradients(gradients)
        copied = to_cpu and unit.device.type != "cpu"
        if copied or not visible:
            unit.reshard()

    def dismiss(self, writeback: bool) -> None:
        try:
            with torch.no_grad(), contextlib.ExitStack() as taken_back:
                for part in self._parts:
                    taken_back.callback(part.take_back, writeback)
        finally:
            self._unit.mark_summoned(False, everywhere=False)
            self._unit.reshard()


class _Part:
    """One group of a summoned unit."""

    def __init__(self, handle: FlatParamHandle, buffer: FullBuffer, to_cpu: bool) -> None:
        self._handle = handle
        flat, views = buffer.flat, buffer.views
        if to_cpu and flat.device.type != "cpu":
            flat = flat.to("cpu")
            views = whole_views(handle, flat)
        self._views = views
        if handle.use_orig_params:
            self._parameters = list(handle.params)
            for parameter, view in zip(handle.params, views, strict=True):
                parameter.data = view
            self._show_distributed()
            # Programs ask the flat parameter, which has alignment and padding here, for its size.
            handle.flat_param.data = flat
        else:
            trains = handle.flat_param.requires_grad
            shown = as_shown(views, handle.distributions)
            self._parameters = [nn.Parameter(view, requires_grad=trains) for view in shown]
            self._register(self._parameters)
            # Who holds the flat parameter sees, and changes, the same full values.
            handle.flat_param.data = flat[: handle.layout.numel]
        self._reduced = [p.grad for p in handle.params] if handle.use_orig_params else []
        #: The parameters that are shown with a gradient, by index.
        self._with_gradient: set[int] = set()

    def _show_distributed(self) -> None:
        """Show DTensors in place of plain parameters that hold local parts."""
        for index, distribution in enumerate(self._handle.distributions):
            if distribution is not None:
                plain = self._parameters[index]
                shown = nn.Parameter(distribution.assemble(plain), plain.requires_grad)
                self._parameters[index] = shown
                for place in self._handle.places[index]:
                    place.module._parameters[place.name] = shown

    def _register(self, parameters: Sequence[nn.Parameter]) -> None:
        """Show separate parameters in place of the one flat parameter."""
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
        self._gradients_shown = True

    _gradients_shown = False

    def take_back(self, writeback: bool) -> None:
        found: list[nn.Parameter | None] = [*self._parameters]
        if writeback:
            found = [self._standing(index) for index in range(len(found))]
        try:
            if self._gradients_shown:
                self._take_gradients(found, writeback)
            if writeback:
                self._store(found)
        finally:
            self._hide(found)

    def _standing(self, index: int) -> nn.Parameter | None:
        """What stands where a parameter was shown; of a shared one, what replaced it anywhere."""
        places = self._handle.places[index]
        here = [place.module._parameters.get(place.name) for place in places]
        shown = self._parameters[index]
        return next((p for p in here if p is not None and p is not shown), here[0])

    def _hide(self, found: Sequence[nn.Parameter | None]) -> None:
        """Show this rank's part again."""
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
        """The parameter that stays when ``shown`` goes: itself, or the plain one of a DTensor."""
        return self._handle.params[index] if self._handle.distribution(index) else shown

    def _store(self, found: Sequence[nn.Parameter | None]) -> None:
        """Copy this rank's part of the full parameters into the shard."""
        handle = self._handle
        for index, piece in enumerate(handle.pieces):
            for place in handle.places[index]:
                parameter_at(place)  # Refuses that it was removed.
            parameter = found[index]
            assert parameter is not None
            if not handle.use_orig_params:
                refuse_tie(handle.places[index][0], self._parameters[index], parameter)
            local = local_part(parameter)
            # On ranks without a piece of it as well: those that go on would wait for the others.
            check_shape("parameter", handle.places[index][0], self._views[index], local)
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

    def _own_gradient(self, index: int, whole: torch.Tensor) -> torch.Tensor | None:
        """This rank's part of a gradient, in place of the old one; None where it has no part."""
        piece = self._handle.pieces[index]
        flat = in_buffer_order(self._handle.layout.slots[index], whole)
        part = flat[piece.start : piece.start + piece.numel]
        old = self._reduced[index]
        if old is not None:
            return old.copy_(part)
        if not piece.in_shard or (index in self._with_gradient and not part.any()):
            # Zeros were shown for the part of a rank without a gradient: it still has none.
            return None
        return part.clone()


def _whole_gradients(unit: Unit, handle: FlatParamHandle) -> list[torch.Tensor | None]:
    """Every parameter's gradient over all ranks; None where no rank has one.

    Zeros stand for the parts of ranks that have none. All ranks gather, also those without any.
    """
    slots = handle.layout.slots
    if not handle.is_sharded:
        return [p.grad for p in handle.params]
    shard = torch.zeros(handle.layout.shard_numel, dtype=handle.dtypes.shard, device=handle.device)
    present = torch.zeros(len(slots), device=handle.device)
    for index, (parameter, piece) in enumerate(zip(handle.params, handle.pieces, strict=True)):
        if parameter.grad is not None:
            shard[piece.offset : piece.offset + piece.numel].copy_(parameter.grad)
            present[index] = 1
    (full,) = gather_shards(unit, [handle], [shard])
    unit.shards.all_reduce(present, unit.name)
    views = whole_views(handle, full)
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
            "so that changes could not reach the other ranks' shards. Pass writeback=False, or "
            "rank0_only=False"
        )
    if with_grads and (writeback and offload_to_cpu):
        raise NotImplementedError(
            "with_grads=True with offload_to_cpu=True needs writeback=False: gradients copied to "
            "the host are not copied back"
        )
    if offload_to_cpu and not rank0_only and any(u.device.type != "cpu" for u, _ in units):
        warnings.warn(
            "offload_to_cpu=True and rank0_only=False copies all full parameters to the host's "
            "memory once per rank; rank0_only=True may be what you want",
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
                f"(unit {unit.name!r} is inside another summon_full_params, whose options decide "
                "what is shown and kept)"
            )
        if with_grads and not unit.options.use_orig_params and unit.handles:
            raise NotImplementedError(
                f"with_grads=True, use_orig_params=False, offload_to_cpu={offload_to_cpu} is not "
                "supported yet: gradients are shown in full by use_orig_params=True"
            )
        if with_grads and any(handle.keeps_local_gradients for handle in unit.handles):
            raise RuntimeError(
                f"Unit {unit.name!r} holds unreduced gradients (no_sync); run a backward outside "
                "no_sync() before asking for full gradients"
            )
