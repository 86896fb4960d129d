"""Subclasses of the engine's classes that record what the overridden methods do.

``recorder.py`` says how objects get these classes. A method here makes a mark, calls the method
that it overrides, and makes another mark; nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar

import torch

from ..engine.comm.collectives import Group
from ..engine.encoding.encodings import Encoding
from ..engine.grads import gradients as flow
from ..engine.grads.reduction import Reduction
from ..engine.runtime.autograd import in_backward
from ..engine.runtime.backward import Backward
from ..engine.runtime.forward import Schedule
from ..engine.runtime.unit import State, Unit
from ..engine.runtime.untraced import untraced
from .recorder import Collective, Recorder
from .records import What

Answer = TypeVar("Answer")


def attachments(recorder: Recorder) -> Iterator[tuple[Any, Any]]:
    """The objects of a recorder's model that record, with what their class is extended by."""
    groups: dict[int, Group] = {}
    for unit in recorder.units:
        yield unit, TracedUnit
        yield unit.reduction, TracedReduction
        for group in unit.groups:
            groups[id(group)] = group
    for schedule in recorder.schedules:
        yield schedule, TracedSchedule
        yield schedule._backward, TracedBackward
    for group in groups.values():
        yield group, TracedGroup


class TracedUnit(Unit):
    """Records all-gathers, the waits for them, and the time of resharding."""

    recorder: ClassVar[Recorder]
    is_shared: ClassVar[bool] = False

    def _fill(self, buffers: Any) -> None:
        recorder, started = self.recorder, self.recorder.mark()
        with recorder.issuing_for(What.ALL_GATHER, self):
            super()._fill(buffers)
        recorder.add_work(self, started)
        recorder.meter.note_unsharded(self)

    def finish_unshard(self) -> None:
        if self.state is not State.UNSHARDING:
            return
        recorder, begun = self.recorder, self.recorder.begin()
        super().finish_unshard()
        ended = recorder.add(What.WAIT_ALL_GATHER, self, *begun)
        recorder.meter.note_unsharded(self)
        recorder.meter.sample_causes(ended)
        gather = recorder.gathers.pop(self, None)
        if gather is not None:
            gather.was_awaited(ended)

    def _copy_out(self) -> None:
        started = self.recorder.mark()
        super()._copy_out()
        self.recorder.add_work(self, started, What.COPY)

    def reshard(self, late: bool = False) -> None:
        if self.state is State.SHARDED:
            super().reshard(late)
            return
        recorder, started = self.recorder, self.recorder.mark()
        super().reshard(late)
        recorder.add_work(self, started, What.RESHARD)
        recorder.meter.note_resharded(self)


class TracedReduction(Reduction):
    """Records copies of gradients, and the work after they are reduced."""

    recorder: ClassVar[Recorder]
    is_shared: ClassVar[bool] = False

    def stage(self, gradients: Any) -> None:
        recorder, begun = self.recorder, self.recorder.begin()
        super().stage(gradients)
        recorder.meter.note_reducing(self._unit)
        recorder.meter.sample(recorder.add(What.COPY, self._unit, *begun))

    def _start(self, item: flow.ReduceInput) -> flow.Reducing:
        recorder, started = self.recorder, self.recorder.mark()
        with recorder.issuing_for(What.REDUCE_SCATTER, self._unit):
            reducing = super()._start(item)
        recorder.add_work(self._unit, started)
        recorder.meter.note_reducing(self._unit, beside=reducing.sum.nbytes)
        return reducing

    def _finish(self, reducing: flow.Reducing) -> torch.Tensor | None:
        with self.recorder.issuing_for(What.REDUCE_SCATTER, self._unit):
            return super()._finish(reducing)

    def reduce(self) -> None:
        started = self.recorder.mark()
        super().reduce()
        self._note_delivered(started)

    def finish(self) -> None:
        started = self.recorder.mark()
        super().finish()
        self._note_delivered(started)

    def take_in(self) -> None:
        recorder, begun = self.recorder, self.recorder.begin()
        super().take_in()
        recorder.add(What.WAIT_REDUCE, self._unit, *begun)

    def settle(self) -> None:
        started = self.recorder.mark()
        super().settle()
        self._note_delivered(started)

    def drop(self) -> None:
        super().drop()
        self.recorder.meter.note_reducing(self._unit)

    def _note_delivered(self, started: Any) -> None:
        recorder = self.recorder
        recorder.add_work(self._unit, started)
        recorder.meter.note_reducing(self._unit)
        recorder.meter.note_gradients(self._unit)


class TracedSchedule(Schedule):
    """Records forwards."""

    recorder: ClassVar[Recorder]
    is_shared: ClassVar[bool] = False

    @untraced
    def begin_forward(self, unit: Unit, full_precision: bool, inputs: Any) -> Any:
        recorder, recomputes = self.recorder, in_backward()
        if self.depth == 0 and not recomputes:
            recorder.begin_pass()
            if not isinstance(self, TracedSchedule):
                # Recording ended with the last step, and this object has its own class again.
                return self.begin_forward(unit, full_precision, inputs)
        started = recorder.mark()
        call = super().begin_forward(unit, full_precision, inputs)
        recorder.add_work(unit, started)
        recorder.begin_forward(unit, recomputes)
        return call

    @untraced
    def end_forward(self, unit: Unit, output: Any, call: Any, runs_again: bool = False) -> Any:
        recorder = self.recorder
        recorder.end_forward(unit)
        started = recorder.mark()
        output = super().end_forward(unit, output, call, runs_again)
        recorder.add_work(unit, started)
        return output

    @untraced
    def abandon(self, unit: Unit, depth: int) -> None:
        self.recorder.end_forward(unit)
        super().abandon(unit, depth)


class TracedBackward(Backward):
    """Records backwards."""

    recorder: ClassVar[Recorder]
    is_shared: ClassVar[bool] = False

    @untraced
    def on_output_gradient(self, unit: Unit, *others: Any) -> None:
        recorder, started = self.recorder, self.recorder.mark()
        super().on_output_gradient(unit, *others)
        recorder.add_work(unit, started)
        recorder.begin_backward(unit)

    def _take_gradients(self, unit: Unit, gradients: Any) -> None:
        recorder = self.recorder
        recorder.end_backward(unit)
        started = recorder.mark()
        super()._take_gradients(unit, gradients)
        recorder.add_work(unit, started)

    def _close(self, unit: Unit) -> None:
        self.recorder.end_backward(unit)
        super()._close(unit)

    def _finish(self) -> None:
        recorder = self.recorder
        recorder.end_all_backwards()
        begun = recorder.begin()
        super()._finish()
        what = What.WAIT_REDUCE if recorder.runs_ahead else What.ENGINE
        recorder.meter.sample(recorder.add(what, recorder.units[0], *begun))


class TracedGroup(Group):
    """Records the collectives of traced units; those of other units pass through.

    Models on the same ranks share a group, and each of them may have its trace.
    """

    recorders: ClassVar[list[Recorder]]
    is_shared: ClassVar[bool] = True

    @property
    def _issuing(self) -> Recorder | None:
        """The recorder of the unit that is about to issue something; None if it has none."""
        return next((each for each in self.recorders if each.issuing is not None), None)

    def gather(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], unit: str
    ) -> list[Any]:
        recorder = self._issuing
        if recorder is None:
            return super().gather(outputs, inputs, unit)
        begun = recorder.begin()
        works = super().gather(outputs, inputs, unit)
        recorder.issue(works, begun, _nbytes(outputs), (*outputs, *inputs))
        return works

    def start_reduce_scatter(
        self, output: torch.Tensor, full: torch.Tensor, unit: str, mean: bool = False
    ) -> Callable[[], None]:
        start = functools.partial(super().start_reduce_scatter, output, full, unit, mean)
        return self._reduce(start, full.nbytes, full, output)

    def start_encoded_reduce(
        self,
        output: torch.Tensor,
        full: torch.Tensor,
        present: torch.Tensor,
        encoding: Encoding,
        unit: str,
    ) -> Callable[[], torch.Tensor]:
        sent = output, full, present, encoding, unit
        start = functools.partial(super().start_encoded_reduce, *sent)
        return self._reduce(start, self.size * encoding.nbytes(output.numel()), full, output)

    def start_all_reduce(
        self, tensor: torch.Tensor, unit: str, verb: str = "all-reduce", mean: bool = False
    ) -> Callable[[], None]:
        start = functools.partial(super().start_all_reduce, tensor, unit, verb, mean)
        return self._reduce(start, tensor.nbytes, tensor)

    def _reduce(
        self, start: Callable[[], Callable[[], Answer]], nbytes: int, *tensors: torch.Tensor
    ) -> Callable[[], Answer]:
        recorder = self._issuing
        if recorder is None or recorder.issuing is None or self.size == 1:
            return start()
        unit, begun = recorder.issuing[1], recorder.begin()
        finish = start()
        collective = recorder.issue(_works_in(finish), begun, nbytes, tensors)
        return functools.partial(_finish_reduce, recorder, unit, collective, finish)


def _finish_reduce(
    recorder: Recorder, unit: Unit, collective: Collective, finish: Callable[[], Answer]
) -> Answer:
    started = recorder.mark()
    answer = finish()
    recorder.add_work(unit, started, What.WAIT_REDUCE)
    collective.was_awaited(recorder.mark())
    return answer


def _nbytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum([tensor.nbytes for tensor in tensors])


def _works_in(finish: Callable[[], object]) -> list[Any]:
    """The collectives that a call of ``finish`` would wait for, as far as it shows them."""
    arguments = getattr(finish, "args", ())
    return [each for each in arguments if hasattr(each, "wait") or hasattr(each, "work")]
