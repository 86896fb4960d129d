"""The folder of a run, with its options, metrics, checkpoints and loss curve. Rank 0 writes it.

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

#: The default folder for all runs.
DEFAULT_RUNS = Path("runs")


class RunFolder:
    """The folder of one run, and the paths of its files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        #: New options of a run that is being resumed, until its checkpoint is loaded.
        self.proposed = path / "config.proposed.toml"
        self.metrics = path / "metrics.jsonl"
        self.picture = path / "loss.png"
        self.sample = path / "sample.txt"
        self.trace = path / "trace.html"
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"
        self._lock_file = path / ".lock"
        self._held: IO[str] | None = None

    @property
    def flags(self) -> list[str]:
        """The flags with which ``fullshard train --resume`` finds this run."""
        runs = self.path.parent
        return ["--name", self.path.name, *(["--runs", str(runs)] if runs != DEFAULT_RUNS else [])]

    def values(self) -> dict[str, Any]:
        """The options in the run's ``config.toml``, which may leave some out."""
        return read_values(self.config)

    def options(self) -> Options:
        """The options to train with."""
        source = self.proposed if self.proposed.exists() else self.config
        return build_options(read_values(source), str(source))

    def check_files(self) -> None:
        """Raise ``BadInput`` if one of the run's files is not a regular file.

        Opening a FIFO, for example, would block until another process opens its other end.
        """
        replaced = (self.config, self.proposed, self.metrics)
        files = (*replaced, *map(_beside, replaced), self.picture, self.sample, self._lock_file)
        for path in files:
            if path.exists() and not path.is_file():
                raise BadInput(
                    f"{path} is not a regular file, so {self.path} cannot be resumed; remove it, "
                    "or start a new run"
                )

    def make(self) -> bool:
        """Create the folder; returns False if it exists already."""
        try:
            self.path.mkdir(parents=True)
        except OSError as error:
            if isinstance(error, FileExistsError) and os.path.lexists(self.path):
                return False
            # Also raised if a parent of the path exists but is not a folder.
            raise self._cannot_be_written(error) from None
        return True

    def write_options(self, options: Options) -> None:
        """Create the folder if it does not exist, and write the options.

        Existing options stay in force until :meth:`accept_options`.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            target = self.proposed if self.config.exists() else self.config
            _replace_text(target, to_toml(options))
        except OSError as error:
            raise self._cannot_be_written(error) from None

    def _cannot_be_written(self, error: OSError) -> BadInput:
        return BadInput(
            f"{self.path} cannot be written: {error}; choose another folder with --runs"
        )

    def lock(self) -> None:
        """Lock the folder against other runs, until :meth:`unlock` or the end of this process.

        Does nothing if the system, or the file system, has no file locks.
        """
        try:
            import fcntl
        except ImportError:
            return
        try:
            file = self._lock_file.open("w")
        except OSError as error:
            raise self._cannot_be_written(error) from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise BadInput(
                f"another process is training in {self.path}; stop it first, or choose another "
                "--name"
            ) from None
        except OSError:
            file.close()
            return
        self._held = file

    def unlock(self) -> None:
        """Release the lock of :meth:`lock`."""
        if self._held is not None:
            self._held.close()
            self._held = None

    def __getstate__(self) -> dict[str, Any]:
        """The state that is sent to other ranks, which do not hold the lock."""
        return {**vars(self), "_held": None}

    def accept_options(self) -> None:
        """Make the proposed options the run's options."""
        if self.proposed.exists():
            self.proposed.replace(self.config)

    def discard_proposed_options(self) -> None:
        """Keep the run's options as they were."""
        self.proposed.unlink(missing_ok=True)

    def newest_checkpoint(self) -> fullshard.Checkpoint | None:
        """The latest checkpoint that looks undamaged. Loading it reports those it skipped."""
        with skipped_in_silence():
            return fullshard.latest(self.checkpoints)

    def append_metrics(self, metrics: dict[str, Any]) -> None:
        """Append the metrics of a step as one line of JSON."""
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(metrics) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """Read the metrics of all steps, except a line that was cut off when a run was killed."""
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

    def drop_metrics_after(self, step: int) -> None:
        """Remove the metrics of steps after ``step``, from whose checkpoint the run resumes."""
        kept = [metrics for metrics in self.read_metrics() if metrics["step"] <= step]
        if self.metrics.exists():
            lines = "".join(json.dumps(metrics) + "\n" for metrics in kept)
            _replace_text(self.metrics, lines)


@contextlib.contextmanager
def skipped_in_silence() -> Iterator[None]:
    """Suppress warnings about damaged checkpoints, which the command prints as lines instead."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Skipped a damaged checkpoint")
        yield


def _replace_text(path: Path, text: str) -> None:
    """Replace a file atomically: if this process dies, it has the old content or the new."""
    beside = _beside(path)
    # If a link was left there, its target would be written.
    beside.unlink(missing_ok=True)
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.new")


def check_name(name: str) -> None:
    """Raise ``BadInput`` if ``name`` is not the name of a folder directly below ``--runs``."""
    if name in ("", ".", "..") or not name.isprintable() or {"/", os.sep, os.altsep} & {*name}:
        raise BadInput(
            f"name expects a folder name such as first-try, but got {name!r}; set the folder that "
            "contains it with --runs"
        )


def new_run(runs: Path, name: str | None) -> RunFolder:
    """A folder that does not exist yet, with the given name or the next free number."""
    if name is None:
        numbers = (number for number in range(1, 1_000_000))
        name = next(f"run-{n}" for n in numbers if not os.path.lexists(runs / f"run-{n}"))
    folder = RunFolder(runs / name)
    if os.path.lexists(folder.path):
        raise _exists(folder)
    return folder


def make_run(runs: Path, name: str | None) -> RunFolder:
    """Create the folder of a new run, even if other runs are started at the same time."""
    while True:
        folder = new_run(runs, name)
        if folder.make():
            return folder
        if name is not None:
            raise _exists(folder)


def _exists(folder: RunFolder) -> BadInput:
    return BadInput(
        f"{folder.path} already exists; resume it with --resume, or choose another --name"
    )


def run_named(runs: Path, name: str) -> RunFolder:
    """The folder of an existing run."""
    folder = RunFolder(runs / name)
    if not folder.config.exists():
        known = sorted(path.parent.name for path in runs.glob("*/config.toml"))
        hint = f"; existing runs: {', '.join(known[-8:])}" if known else ""
        raise BadInput(f"there is no run {name!r} in {runs} to resume{hint}")
    folder.check_files()
    return folder


def latest_run(runs: Path) -> RunFolder:
    """The run that was started or resumed last."""
    configs = sorted(runs.glob("*/config.toml"), key=lambda path: path.stat().st_mtime)
    if not configs:
        raise BadInput(f"there is no run in {runs} to resume")
    folder = RunFolder(configs[-1].parent)
    folder.check_files()
    return folder
