"""A run's folder: its options, its metrics, its checkpoints, its picture. Rank 0 writes here.

runs/NAME/config.toml  metrics.jsonl  loss.png  sample.txt  checkpoints/  tensorboard/
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import fullshard

from ..option_files import read_values, to_toml
from ..options import Options, build_options
from ..problems import BadInput

__all__ = [
    "DEFAULT_RUNS",
    "RunFolder",
    "check_name",
    "latest_run",
    "make_run",
    "new_run",
    "run_named",
    "skipped_in_silence",
]

#: The folder of all runs, where none is named.
DEFAULT_RUNS = Path("runs")


class RunFolder:
    """One run's folder and the names inside it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        #: Options of a run that is to continue, until its checkpoint is loaded.
        self.proposed = path / "config.proposed.toml"
        self.metrics = path / "metrics.jsonl"
        self.picture = path / "loss.png"
        self.sample = path / "sample.txt"
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"
        self._lock = path / ".lock"
        self._held: IO[str] | None = None

    @property
    def flags(self) -> list[str]:
        """What leads ``fullshard train --resume`` here."""
        runs = self.path.parent
        return ["--name", self.path.name, *(["--runs", str(runs)] if runs != DEFAULT_RUNS else [])]

    def values(self) -> dict[str, Any]:
        """The options that the run was started with, as they were written down."""
        return read_values(self.config)

    def options(self) -> Options:
        """The options to train with."""
        source = self.proposed if self.proposed.exists() else self.config
        return build_options(read_values(source), str(source))

    def check_files(self) -> None:
        """Refuse a folder in which something else stands in the place of a file.

        Opening a FIFO would wait for somebody at its other end.
        """
        replaced = (self.config, self.proposed, self.metrics)
        files = (*replaced, *map(_beside, replaced), self.picture, self.sample, self._lock)
        for path in files:
            if path.exists() and not path.is_file():
                raise BadInput(
                    f"{path} is no regular file, so {self.path} cannot be continued; remove it, or "
                    "start a new run"
                )

    def make(self) -> bool:
        """Make the folder; False if it is there, by now."""
        try:
            self.path.mkdir(parents=True)
        except OSError as error:
            if isinstance(error, FileExistsError) and os.path.lexists(self.path):
                return False
            # Also where something that is no folder has the name of one above it.
            raise self._cannot_be_written(error) from None
        return True

    def write_options(self, options: Options) -> None:
        """Make the folder, if it is not there, and write the options down.

        Those that another run left stay until :meth:`accept_options`.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            target = self.proposed if self.config.exists() else self.config
            _replace_text(target, to_toml(options))
        except OSError as error:
            raise self._cannot_be_written(error) from None

    def _cannot_be_written(self, error: OSError) -> BadInput:
        return BadInput(f"{self.path} cannot be written: {error}; choose other --runs")

    def hold(self) -> None:
        """Refuse others that would train here, until :meth:`let_go` or the end of this process.

        Where the system, or the file system, has no such locks, nobody is refused.
        """
        try:
            import fcntl
        except ImportError:
            return
        try:
            file = self._lock.open("w")
        except OSError as error:
            raise self._cannot_be_written(error) from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise BadInput(
                f"another run is training in {self.path} at this moment; end it first, or choose "
                "another --name"
            ) from None
        except OSError:
            file.close()
            return
        self._held = file

    def let_go(self) -> None:
        """Let others train here."""
        if self._held is not None:
            self._held.close()
            self._held = None

    def __getstate__(self) -> dict[str, Any]:
        """For other ranks, which hold nothing."""
        return {**vars(self), "_held": None}

    def accept_options(self) -> None:
        """Let the proposed options be the run's."""
        if self.proposed.exists():
            self.proposed.replace(self.config)

    def forget_proposed_options(self) -> None:
        """Let the run's options stay what they were."""
        self.proposed.unlink(missing_ok=True)

    def newest_checkpoint(self) -> fullshard.Checkpoint | None:
        """The newest checkpoint that looks whole. Which are skipped is said when it is loaded."""
        with skipped_in_silence():
            return fullshard.latest(self.checkpoints)

    def append_metrics(self, metrics: dict[str, Any]) -> None:
        """One line of JSON."""
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(metrics) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """All lines that are whole; a kill may have cut one."""
        if not self.metrics.exists():
            return []
        found = []
        for line in self.metrics.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                metrics = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(metrics, dict) and "step" in metrics:
                found.append(metrics)
        return found

    def forget_metrics_after(self, step: int) -> None:
        """Drop what the run wrote after the checkpoint that it continues from."""
        kept = [metrics for metrics in self.read_metrics() if metrics["step"] <= step]
        if self.metrics.exists():
            lines = "".join(json.dumps(metrics) + "\n" for metrics in kept)
            _replace_text(self.metrics, lines)


@contextlib.contextmanager
def skipped_in_silence() -> Iterator[None]:
    """Without warnings of damaged checkpoints that are skipped: a line says it instead."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Skipped a damaged checkpoint")
        yield


def _replace_text(path: Path, text: str) -> None:
    """Write a file that is there as it was, or as it will be, whenever this process dies."""
    beside = _beside(path)
    # A link that was left there would be written through.
    beside.unlink(missing_ok=True)
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.new")


def check_name(name: str) -> None:
    """Refuse a name that would lead out of the folder of all runs, or nowhere."""
    if name in ("", ".", "..") or not name.isprintable() or {"/", os.sep, os.altsep} & {*name}:
        raise BadInput(
            f"name expects the name of one folder, such as first-try, but got {name!r}; "
            "--runs says where it is"
        )


def new_run(runs: Path, name: str | None) -> RunFolder:
    """A folder that is not there yet: of that name, or of the next free number."""
    if name is None:
        numbers = (number for number in range(1, 1_000_000))
        name = next(f"run-{n}" for n in numbers if not os.path.lexists(runs / f"run-{n}"))
    folder = RunFolder(runs / name)
    if os.path.lexists(folder.path):
        raise _is_there(folder)
    return folder


def make_run(runs: Path, name: str | None) -> RunFolder:
    """Make a new run's folder, which no other run has made at the same time."""
    while True:
        folder = new_run(runs, name)
        if folder.make():
            return folder
        if name is not None:
            raise _is_there(folder)


def _is_there(folder: RunFolder) -> BadInput:
    return BadInput(
        f"{folder.path} is there already; continue it with --resume, or choose another --name"
    )


def run_named(runs: Path, name: str) -> RunFolder:
    """The folder of a run that was started before."""
    folder = RunFolder(runs / name)
    if not folder.config.exists():
        known = sorted(path.parent.name for path in runs.glob("*/config.toml"))
        hint = f"; there are {', '.join(known[-8:])}" if known else ""
        raise BadInput(f"there is no run {name!r} in {runs} to resume{hint}")
    folder.check_files()
    return folder


def latest_run(runs: Path) -> RunFolder:
    """The run that was started, or continued, last."""
    configs = sorted(runs.glob("*/config.toml"), key=lambda path: path.stat().st_mtime)
    if not configs:
        raise BadInput(f"there is no run in {runs} to resume")
    folder = RunFolder(configs[-1].parent)
    folder.check_files()
    return folder
