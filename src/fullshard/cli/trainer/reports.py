"""Reporting the progress of a run: output, metrics and the loss curve. Rank 0 reports.

Terminals get a progress bar (``live_bar.py``); files and pipes get plain lines.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from fullshard.wrap.description import Description
from fullshard.wrap.render import size_text

from ..data import Text
from ..options import Options
from ..output import Output
from ..planner.memory import Parts, Prediction
from ..words import counted
from .run_folder import RunFolder
from .tensorboard import TensorBoard

__all__ = ["Progress", "Reporter", "draw_losses", "reporter_for"]


#: The final loss is the mean over so many steps, because that of a single batch is noisy.
_AVERAGED = 20


@dataclass(frozen=True)
class Progress:
    """A completed step. ``memory`` is the peak of the largest rank, once it is measured."""

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    seconds: float
    memory: int | None


class Reporter:
    """A reporter that does nothing, for ranks other than 0."""

    def introduce(
        self,
        text: Text,
        ranks: int,
        resumption: Mapping[str, str],
        units: Description,
        predicted: Prediction,
    ) -> None:
        """Print the model, the data and the predicted memory before training starts."""

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def step(self, progress: Progress) -> None:
        """Report a completed step."""

    def saved(self, step: int) -> None:
        """Report a saved checkpoint."""

    def traced(self, summary: str) -> None:
        """Report what was traced."""

    def not_traced(self, first: int) -> None:
        """Report that the run ended before the ``first`` step that is traced."""

    def runs_eagerly(self, reason: str) -> None:
        """Report why steps are not captured although --capture was given."""

    def stopped(self, step: int) -> None:
        """Report that the run stops before its last step."""

    def finish(self, sample: str) -> None:
        """Report the end of the run."""


def reporter_for(rank: int, options: Options, folder: RunFolder) -> Reporter:
    """The reporter for a rank: a bar for terminals, lines for files and pipes."""
    if rank != 0:
        return Reporter()
    output = Output()
    # A dumb terminal cannot redraw a line, so it would show no bar until the end.
    if output.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown"):
        from .live_bar import BarReporter

        return BarReporter(options, folder, output)
    return LineReporter(options, folder, output)


class LineReporter(Reporter):
    """Writes metrics to the run's folder, and prints them as lines."""

    def __init__(self, options: Options, folder: RunFolder, output: Output) -> None:
        self.options = options
        self.folder = folder
        self.output = output
        self.predicted: Prediction | None = None
        self._tensorboard = TensorBoard(folder.tensorboard)
        self._seconds: float | None = None
        self._started = time.perf_counter()
        self._steps_here = 0
        self._losses: list[float] = []

    # -- before -----------------------------------------------------------------------------------

    def introduce(
        self,
        text: Text,
        ranks: int,
        resumption: Mapping[str, str],
        units: Description,
        predicted: Prediction,
    ) -> None:
        self.predicted = predicted
        rows = {
            **_in_words(self.options, ranks, units),
            "memory": f"{size_text(predicted.total)} per rank predicted",
            "": "\n".ljust(11).join(_parts_in_words(predicted.peak)),
            "data": text.description,
            "folder": str(self.folder.path),
            **resumption,
        }
        self.write("\n".join(f"{name:9} {value}" for name, value in rows.items()) + "\n")

    # -- during -----------------------------------------------------------------------------------

    def step(self, progress: Progress) -> None:
        self._steps_here += 1
        self._losses.append(progress.loss)
        self._smooth(progress.seconds)
        if self._is_logged(progress.step):
            self.log(progress)

    def log(self, progress: Progress) -> None:
        """Write the metrics of a step, and print them."""
        self._record(progress)
        self.write(
            f"step {progress.step:>{len(str(self.options.steps))}}/{self.options.steps}"
            f"  loss {progress.loss:.3f}  norm {progress.gradient_norm:.2f}"
            f"  {self.tokens_per_second:,.0f} tokens/s  memory {self.memory_text(progress)}"
            f"  left {duration_text(self.seconds_left(progress.step))}"
        )

    def saved(self, step: int) -> None:
        self.write(f"saved step {step} in {self.folder.checkpoints}")

    def traced(self, summary: str) -> None:
        self.write(summary)
        self.write(f"trace in {self.folder.trace}, and for Perfetto beside it")

    def not_traced(self, first: int) -> None:
        self.write(
            f"no trace: step {first} of a run is the first that is traced; this one ended before"
        )

    def runs_eagerly(self, reason: str) -> None:
        self.write(f"not captured, steps run eagerly: {reason}")

    def _is_logged(self, step: int) -> bool:
        return step % self.options.log_every == 0 or step in (1, self.options.steps)

    def _record(self, progress: Progress) -> None:
        metrics = {
            "step": progress.step,
            "loss": progress.loss,
            "gradient_norm": progress.gradient_norm,
            "learning_rate": progress.learning_rate,
            "tokens_per_second": round(self.tokens_per_second, 1),
            "memory_bytes": progress.memory,
            "memory_bytes_predicted": self.predicted.total if self.predicted else None,
        }
        self.folder.append_metrics(metrics)
        self._tensorboard.add(metrics, progress.step)

    def _smooth(self, seconds: float) -> None:
        # The first steps are slower, because they make one-time allocations, and one is measured.
        if self._seconds is None or self._steps_here <= 4:
            self._seconds = seconds
        else:
            self._seconds = 0.9 * self._seconds + 0.1 * seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second over all ranks, smoothed over the last steps."""
        return self.options.batch * self.options.sequence / (self._seconds or 1.0)

    def seconds_left(self, step: int) -> float:
        """The estimated seconds until the last step."""
        return (self.options.steps - step) * (self._seconds or 0.0)

    def memory_text(self, progress: Progress) -> str:
        """The measured memory, and the predicted memory."""
        predicted = size_text(self.predicted.total) if self.predicted else "?"
        measured = "-" if progress.memory is None else size_text(progress.memory)
        return f"{measured} (predicted {predicted})"

    # -- after ------------------------------------------------------------------------------------

    def stopped(self, step: int) -> None:
        self._close()
        self.write(
            f"Stopped after step {step}, which is saved. Resume with: "
            f"fullshard train --resume {shlex.join(self.folder.flags)}"
        )

    def finish(self, sample: str) -> None:
        self.folder.sample.write_text(sample, encoding="utf-8")
        undrawn = self._close()
        elapsed = duration_text(time.perf_counter() - self._started)
        if self._losses:
            first, last = self._first_loss(), self._losses[-_AVERAGED:]
            mean = sum(last) / len(last)
            steps = counted(len(last), "step").removeprefix("1 ")
            self.write(f"\nloss      {first:.3f} at first, {mean:.3f} over the last {steps}")
        self.write(f"time      {elapsed}")
        self.write(f"picture   {f'none: {undrawn}' if undrawn else self.folder.picture}")
        self.write(f"metrics   {self.folder.metrics}")
        self.write("sample")
        self.write("\n".join(f"  {line}" for line in _printable(sample).split("\n")))

    def _close(self) -> str:
        """Draw the loss curve; returns the reason if that failed, else an empty string."""
        self._tensorboard.close()
        return draw_losses(self.folder.read_metrics(), self.folder.picture)

    def _first_loss(self) -> float:
        """The loss of the first step whose metrics are known."""
        known = [metrics["loss"] for metrics in self.folder.read_metrics() if "loss" in metrics]
        return float(next(iter([*known, *self._losses])))

    def write(self, text: str) -> None:
        """Print a line and flush, so that a log file can be followed."""
        print(text, file=self.output, flush=True)


def _in_words(options: Options, ranks: int, units: Description) -> dict[str, str]:
    """Describe the model, the units, the ranks and the steps."""
    size = options.size()
    largest = max(unit.gathered_bytes for unit in units.units)
    device = "GPU" if options.device != "cpu" and torch.cuda.is_available() else "CPU"
    how = [options.strategy, options.precision]
    how += ["offload"] if options.offload else []
    how += ["activation checkpointing"] if options.checkpoint_activations else []
    how += [f"all-gather in {options.all_gather}"] if options.all_gather != "full" else []
    how += [f"reduce in {options.reduce}"] if options.reduce != "full" else []
    how += ["secondary shards"] if options.secondary_shards else []
    how += ["captured steps"] if options.capture else []
    passes = f", {options.accumulate} backward passes each" if options.accumulate > 1 else ""
    return {
        "model": f"GPT of {units.elements:,} parameters: {counted(size.layers, 'layer')}, "
        f"{counted(size.heads, 'head')}, width {size.width}",
        "units": f"{len(units.units)}, the largest takes {size_text(largest)} unsharded",
        "ranks": f"{ranks} ({device}), {', '.join(how)}",
        "steps": f"{options.steps:,} of {options.batch} x {options.sequence} tokens{passes}",
    }


def _parts_in_words(predicted: Parts) -> list[str]:
    """Describe the predicted memory in two lines that are short enough for any terminal."""
    gradients = predicted.gradients + predicted.whole_gradients
    return [
        f"shards {size_text(predicted.shards)}, gradients {size_text(gradients)}, "
        f"optimizer {size_text(predicted.optimizer)},",
        f"unsharded parameters {size_text(predicted.full_parameters)}, "
        f"activations {size_text(predicted.activations)}",
    ]


def _printable(text: str) -> str:
    """Replace control characters, which a model may write and a terminal would obey."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def duration_text(seconds: float) -> str:
    """Format a duration, with hours if there are any: 1:02:03, 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def draw_losses(metrics: list[dict[str, Any]], path: Path) -> str:
    """Draw loss and learning rate over steps.

    Returns the reason if that failed, else an empty string: no error of matplotlib's may end a run.
    """
    if not metrics:
        return "there are no metrics"
    try:
        _draw(metrics, path)
    except ModuleNotFoundError as missing:
        return f"{missing.name} is not installed"
    except Exception as problem:
        first_line = str(problem).strip().partition("\n")[0]
        return f"matplotlib failed with {type(problem).__name__}: {first_line}"
    return ""


def _draw(metrics: list[dict[str, Any]], path: Path) -> None:
    # Imported here because it takes a while, which the command's help should not.
    from matplotlib.figure import Figure

    steps = [line["step"] for line in metrics]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, [line["loss"] for line in metrics], color="tab:blue", label="loss")
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    # The name of a run may contain dollar signs, which would start a formula.
    axes.set_title(path.parent.name, parse_math=False)
    axes.grid(alpha=0.3)
    rates = axes.twinx()
    rates.plot(
        steps, [line["learning_rate"] for line in metrics], color="tab:gray", alpha=0.6, ls="--"
    )
    rates.set_ylabel("learning rate (dashed)")
    rates.set_ylim(bottom=0)
    figure.savefig(path, dpi=120)
