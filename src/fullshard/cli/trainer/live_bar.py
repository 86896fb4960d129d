"""A progress bar for terminals."""

from __future__ import annotations

from types import TracebackType
from typing import IO, cast

from rich.console import Console, ConsoleDimensions
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as RichProgress

from ..options import Options
from ..output import Output
from .reports import LineReporter, Progress, duration_text
from .run_folder import RunFolder

__all__ = ["BarReporter"]


#: Terminals with at least so many columns show "(predicted ...)" in full.
_WIDE = 100


class _NarrowConsole(Console):
    """A console that leaves the last columns of the terminal free.

    The terminal echoes a typed ^C there. On a full line the echo would wrap to the next line, and
    the bar would be drawn a second time.
    """

    @property
    def size(self) -> ConsoleDimensions:
        whole = super().size
        return whole._replace(width=max(1, whole.width - 2 * len("^C")))

    @size.setter
    def size(self, new_size: tuple[int, int]) -> None:
        raise AttributeError("the terminal decides")


class BarReporter(LineReporter):
    """Shows a progress bar during training, and prints everything else above it."""

    def __init__(self, options: Options, folder: RunFolder, output: Output) -> None:
        super().__init__(options, folder, output)
        self._console = _NarrowConsole(file=cast(IO[str], output), highlight=False)
        self._bar = RichProgress(
            TextColumn("{task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[numbers]}"),
            console=self._console,
            expand=True,
        )
        self._task = self._bar.add_task("", total=options.steps, numbers="starting")

    def __enter__(self) -> BarReporter:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def step(self, progress: Progress) -> None:
        super().step(progress)
        memory = self.memory_text(progress)
        if self._console.width < _WIDE:
            memory = memory.replace(" (predicted ", "/").rstrip(")")
        numbers = (
            f"[bold]loss {progress.loss:.3f}[/]  norm {progress.gradient_norm:.2f}"
            f"  {self.tokens_per_second:,.0f} tok/s  {memory}"
            f"  {duration_text(self.seconds_left(progress.step))} left"
        )
        self._bar.update(self._task, completed=progress.step, numbers=numbers)

    def log(self, progress: Progress) -> None:
        self._record(progress)

    def saved(self, step: int) -> None:
        self.write(
            f"step {step:>{len(str(self.options.steps))}}  loss {self._losses[-1]:.3f}  saved"
        )

    def write(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)
