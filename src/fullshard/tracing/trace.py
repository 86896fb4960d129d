"""``fullshard.trace``: the context around the traced steps, and its results."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..engine.runtime.forward import Schedule
from ..engine.runtime.unit import Unit
from . import report
from .alignment import aligned
from .analysis import summarized
from .output import check_suffix, write
from .recorder import Recorder, units_of
from .records import Foretold, RankSummary, RankTrace, Record, TraceData
from .traced import attachments

#: How many ranks are shown in detail; of all others a summary is kept.
_DETAILED = 8

Path_ = str | Path


def trace(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    path: Path_ | Sequence[Path_] | None = None,
    *,
    steps: int | None = None,
) -> Trace:
    """Record what the engine does in the steps inside of a context, on every rank.

    All ranks that train ``model`` enter and leave the context together. The first of them writes
    ``path``: an HTML page (``.html``), a trace for Perfetto (``.json``), a picture (``.png``), or
    several of them. A step ends with its optimizer's step, or with its backward if no optimizer
    steps. With ``steps``, recording ends after as many, though the context may last longer: pass
    ``optimizer`` then if backwards are accumulated, so that the first step is one.

    >>> with fullshard.trace(model, optimizer, path="trace.html") as trace:
    ...     for batch in batches:
    ...         model(batch).sum().backward()
    ...         optimizer.step()
    >>> len(trace.data.ranks[0].steps)
    2
    """
    paths = [path] if isinstance(path, str | Path) else list(path or ())
    for each in paths:
        check_suffix(Path(each))
    if steps is not None and steps < 1:
        raise ValueError(f"fullshard.trace expects 1 step or more, but got steps={steps}")
    if isinstance(optimizer, torch.optim.Optimizer):
        optimizer = [optimizer]
    find = functools.partial(units_of, model)
    return Trace(find, list(optimizer or ()), list(map(Path, paths)), steps)


class Trace:
    """A trace that is being recorded, or was. Made by :func:`trace`."""

    def __init__(
        self,
        find: Callable[[], Sequence[tuple[Unit, Schedule | None]]],
        optimizers: Sequence[torch.optim.Optimizer],
        paths: Sequence[Path],
        steps: int | None,
    ) -> None:
        self._find = find
        self._optimizers = optimizers
        self._paths = paths
        self._steps = steps
        self._recorder: Recorder | None = None
        self._data: TraceData | None = None
        self._own: RankTrace | None = None
        self._foretold: Sequence[Foretold] = ()
        self._facts: dict[str, str] = {}

    # -- the context ----------------------------------------------------------------------------

    def __enter__(self) -> Trace:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.stop()
        else:
            # Other ranks may not reach the exchange of records.
            self._let_go()

    def start(self) -> None:
        """Begin to record; :meth:`stop` ends it. As a context, the trace calls both itself."""
        if self._recorder is not None or self._data is not None:
            raise RuntimeError("This trace has been started before: make another one")
        recorder = Recorder(self._find())
        for optimizer in self._optimizers:
            recorder.meter.note_standing_optimizer(optimizer)
        recorder.call_after_steps(self._count_step)
        recorder.attach(attachments(recorder))
        self._recorder = recorder

    def stop(self) -> None:
        """End recording, share what the ranks recorded, and write it; nothing if it has ended."""
        recorder = self._recorder
        if recorder is None:
            return
        recorder.end()
        self._let_go()
        self._share(recorder)

    def _let_go(self) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.detach()

    def _count_step(self) -> None:
        recorder = self._recorder
        if recorder is not None and recorder.steps_ended == self._steps:
            self._let_go()
            self._share(recorder)

    def _share(self, recorder: Recorder) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        own = recorder.trace(rank)
        root = recorder.units[0]
        groups = [group for group in (root.shards, root.copies) if group and group.size > 1]

        def of_all(value: Any) -> list[Any]:
            values = [value]
            for group in groups:
                lists = group.gather_objects(values, f"trace of {root.name}")
                values = [each for found in lists for each in found]
            return values

        summaries: list[RankSummary] = sorted(of_all(summarized(own)), key=lambda s: s.rank)
        chosen = detailed_ranks(summaries, _DETAILED)
        found = of_all(own if rank in chosen else None)
        traces = sorted((each for each in found if each is not None), key=lambda t: t.rank)
        self._own = own
        self._data = TraceData(
            type(root.module).__name__.removeprefix("FSDP"),
            recorder.unit_facts(),
            aligned(traces),
            summaries,
            comparison=report.compared(self._foretold, own),
            facts={"torch": torch.__version__, **self._facts},
        )
        if rank == summaries[0].rank and self._paths:
            self._save_or_warn()

    def _save_or_warn(self) -> None:
        """Write the trace; training goes on if that is not possible."""
        try:
            self.save(*self._paths)
        except RuntimeError as no_step:
            warnings.warn(str(no_step), stacklevel=4)
        except OSError as error:
            warnings.warn(
                f"fullshard.trace could not write what it recorded ({error}): write it elsewhere "
                "with save() of the trace",
                stacklevel=4,
            )

    # -- what was recorded ----------------------------------------------------------------------

    def foretell(self, numbers: Sequence[Foretold], facts: Mapping[str, str] | None = None) -> None:
        """Show ``numbers`` beside what is measured, and ``facts`` about the run."""
        self._foretold = numbers
        self._facts.update(facts or {})

    @property
    def is_recording(self) -> bool:
        """True from the beginning of the recording to its end."""
        return self._recorder is not None

    @property
    def steps_recorded(self) -> int:
        """The number of steps that have ended so far, that of the last optimizer step included."""
        if self._recorder is None:
            return 0 if self._own is None else len(self._own.steps)
        return self._recorder.steps_ended + self._recorder.has_step_behind

    @property
    def data(self) -> TraceData:
        """The whole trace: up to eight ranks in detail, the slowest among them; all in short."""
        if self._data is None:
            raise RuntimeError("This trace has nothing recorded yet: leave its context first")
        return self._data

    @property
    def records(self) -> Sequence[Record]:
        """This rank's records, in the order in which they were issued."""
        _ = self.data
        assert self._own is not None
        return self._own.records

    def summary(self) -> str:
        """A few lines of text: the time of a step by activity, and advice about waits."""
        return report.in_text(self.data)

    def save(self, *paths: Path_) -> None:
        """Write the trace as a page (``.html``), for Perfetto (``.json``), or a picture."""
        if not any(trace.steps for trace in self.data.ranks):
            raise RuntimeError(
                f"fullshard.trace recorded no step of {self.data.model}, so nothing was written: "
                "no backward of it ended in the context, or steps were replayed by a CUDA graph, "
                "in which no Python runs"
            )
        for path in paths:
            write(self.data, Path(path))


def detailed_ranks(summaries: Sequence[RankSummary], limit: int) -> set[int]:
    """The ranks to show in detail: first and last, busiest and idlest, and others evenly."""
    ranks = [each.rank for each in summaries]
    if len(ranks) <= limit:
        return set(ranks)
    by_busy = sorted(summaries, key=lambda each: each.busy)
    chosen = dict.fromkeys([ranks[0], by_busy[-1].rank, by_busy[0].rank, ranks[-1]])
    every = len(ranks) / limit
    for rank in [ranks[int(every * position)] for position in range(limit)]:
        if len(chosen) < limit:
            chosen[rank] = None
    return set(chosen)
