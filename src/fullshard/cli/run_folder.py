"""A run's folder: its options, its metrics, its checkpoints, its picture. Rank 0 writes here.

runs/NAME/config.toml  metrics.jsonl  loss.png  sample.txt  checkpoints/  tensorboard/
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from .option_files import read_values, to_toml
from .options import Options, build_options
from .problems import BadInput

__all__ = ["RunFolder", "check_name", "latest_run", "new_run", "run_named"]


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

    def values(self) -> dict[str, Any]:
        """The options that the run was started with, as they were written down."""
        return read_values(self.config)

    def options(self) -> Options:
        """The options to train with."""
        source = self.proposed if self.proposed.exists() else self.config
        return build_options(read_values(source), str(source))

    def write_options(self, options: Options) -> None:
        """Make the folder, if it is not there, and write the options down.

        Those that another run left stay until :meth:`accept_options`.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            target = self.proposed if self.config.exists() else self.config
            target.write_text(to_toml(options), encoding="utf-8")
        except OSError as error:
            raise BadInput(f"{self.path} cannot be written: {error}; choose other --runs") from None

    def accept_options(self) -> None:
        """Let the proposed options be the run's."""
        if self.proposed.exists():
            self.proposed.replace(self.config)

    def forget_proposed_options(self) -> None:
        """Let the run's options stay what they were."""
        self.proposed.unlink(missing_ok=True)

    def append_metrics(self, metrics: dict[str, Any]) -> None:
        """One line of JSON."""
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(metrics) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """All lines that are whole; a kill may have cut the last one."""
        if not self.metrics.exists():
            return []
        found = []
        for line in self.metrics.read_text(encoding="utf-8").splitlines():
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return found

    def forget_metrics_after(self, step: int) -> None:
        """Drop what the run wrote after the checkpoint that it continues from."""
        kept = [metrics for metrics in self.read_metrics() if metrics["step"] <= step]
        if self.metrics.exists():
            lines = "".join(json.dumps(metrics) + "\n" for metrics in kept)
            self.metrics.write_text(lines, encoding="utf-8")


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
        name = next(f"run-{n}" for n in numbers if not (runs / f"run-{n}").exists())
    folder = RunFolder(runs / name)
    if folder.path.exists():
        raise BadInput(
            f"{folder.path} is there already; continue it with --resume, or choose another --name"
        )
    return folder


def run_named(runs: Path, name: str) -> RunFolder:
    """The folder of a run that was started before."""
    folder = RunFolder(runs / name)
    if not folder.config.exists():
        known = sorted(path.parent.name for path in runs.glob("*/config.toml"))
        hint = f"; there are {', '.join(known[-8:])}" if known else ""
        raise BadInput(f"there is no run {name!r} in {runs} to resume{hint}")
    return folder


def latest_run(runs: Path) -> RunFolder:
    """The run that was started, or continued, last."""
    configs = sorted(runs.glob("*/config.toml"), key=lambda path: path.stat().st_mtime)
    if not configs:
        raise BadInput(f"there is no run in {runs} to resume")
    return RunFolder(configs[-1].parent)
