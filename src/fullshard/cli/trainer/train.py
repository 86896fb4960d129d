"""``fullshard train``: checks a command line and starts the ranks, which run ``training.py``."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fullshard
from fullshard import StopRequest

from ..checks import check_ranks, check_run
from ..launcher.launch import default_ranks, launch
from ..model import PRESETS
from ..option_files import read_values
from ..options import COMMAND_LINE, Options, build_options, checked_value
from ..output import Output
from ..problems import BadInput
from ..words import counted
from .resumption import check_steps, nothing_left
from .run_folder import (
    DEFAULT_RUNS,
    RunFolder,
    check_name,
    latest_run,
    make_run,
    new_run,
    run_named,
)
from .training import main as train_on_rank
from .training import model_facts, start_rank, train, unusable, was_restarted

__all__ = ["Request", "run_training"]

#: Seconds that ranks have to save a checkpoint after Ctrl-C, before they are killed.
_SECONDS_TO_SAVE = 60
#: Seconds that rank 0 waits until the other ranks have received its last message.
_SECONDS_TO_HEAR = 10


@dataclass(frozen=True)
class Request:
    """A command line of ``fullshard train``. ``flags`` are the options that it sets."""

    flags: Mapping[str, Any]
    config: Path | None = None
    name: str | None = None
    runs: Path = DEFAULT_RUNS
    resume: bool = False
    max_restarts: int = 0
    nodes: int = 1
    rendezvous: str | None = None


def run_training(request: Request) -> int:
    """Carry out the request; returns the exit status."""
    if request.name is not None:
        check_name(request.name)
    if "RANK" in os.environ:
        return train_as_rank(request)
    check_counts(request)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_SECONDS_TO_SAVE))
    launcher_options = ["--max-restarts", str(request.max_restarts)]
    if request.nodes > 1:
        return launch_on_several_machines(request, launcher_options)
    finished = nothing_to_do(request)
    if finished is not None:
        print(finished, file=Output(), flush=True)
        return 0
    options, folder = prepare(request, ranks=None)
    command = ["-m", train_on_rank.__module__, str(folder.path)]
    command += ["--resume"] if request.resume else []
    ranks = ranks_here(options)
    print(f"fullshard train: starting {counted(ranks, 'rank')}", file=Output(), flush=True)
    try:
        return launch(ranks, launcher_options, command)
    finally:
        folder.discard_proposed_options()
        folder.unlock()


def check_counts(request: Request) -> None:
    """Raise ``BadInput`` if the options for the launcher are invalid or contradict each other."""
    if request.max_restarts < 0:
        raise BadInput(f"--max-restarts expects 0 or more, but got {request.max_restarts}")
    if request.nodes < 1:
        raise BadInput(f"--nodes expects 1 or more, but got {request.nodes}")
    if request.nodes > 1 and request.rendezvous is None:
        raise BadInput(
            f"--nodes {request.nodes} needs an address at which the machines meet; pass that of "
            "one of them as --rendezvous HOST:PORT"
        )
    if request.nodes == 1 and request.rendezvous is not None:
        raise BadInput("--rendezvous is for several machines; set their number with --nodes")
    if request.rendezvous is not None and not _is_endpoint(request.rendezvous):
        raise BadInput(
            f"--rendezvous expects HOST:PORT, such as first-machine:29400, but got "
            f"{request.rendezvous!r}"
        )


def _is_endpoint(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host.strip()) and port.isascii() and port.isdigit() and 0 < int(port) < 2**16


def launch_on_several_machines(request: Request, launcher_options: list[str]) -> int:
    """Start this machine's ranks, which read the command line again after the rendezvous.

    Until then no machine knows which of them has rank 0, so none can prepare the run's folder.
    """
    ranks = build_options(given_values(request), COMMAND_LINE).ranks
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", str(request.rendezvous)]
    command = ["-m", "fullshard.cli.on_rank", *sys.argv[1:]]
    return launch(
        ranks or default_ranks(),
        [*launcher_options, "--nnodes", str(request.nodes), *rendezvous],
        command,
    )


def train_as_rank(request: Request) -> int:
    """Train on ranks that are running already; returns the rank's exit status.

    That is under ``torchrun``, or on several machines. Rank 0 prepares the folder and informs the
    others; bad input is raised on all of them, because no machine shows another's output.
    """
    start_rank(build_options(given_values(request), COMMAND_LINE))
    told: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            told = [nothing_to_do(request) or prepare(request, dist.get_world_size())]
        except BadInput as problem:
            told = [problem]
    dist.broadcast_object_list(told)
    if isinstance(told[0], BadInput):
        _leave_together()
        raise told[0]
    if isinstance(told[0], str):
        if dist.get_rank() == 0:
            print(told[0], file=Output(), flush=True)
        _leave_together()
        return 0
    options, folder = told[0]
    with StopRequest() as stop:
        train(options, folder, goes_on(request), stop)
    dist.destroy_process_group()
    return stop.exit_status


def _leave_together() -> None:
    """Destroy the process group once all ranks have received the last message.

    The process must not simply exit: a gloo thread may still hold what it sent, and would abort the
    program. Nor may rank 0 destroy the group at once: messages that have not been received yet
    would be lost with it.
    """
    store, heard = dist.distributed_c10d._get_default_store(), "fullshard/heard"
    count = store.add(heard, 1)
    if dist.get_rank() == 0:
        deadline = time.monotonic() + _SECONDS_TO_HEAR
        while count < dist.get_world_size() and time.monotonic() < deadline:
            time.sleep(0.01)
            count = store.add(heard, 0)
    dist.destroy_process_group()


def prepare(request: Request, ranks: int | None) -> tuple[Options, RunFolder]:
    """Check the options, then create the run's folder and lock it.

    ``ranks`` is the number of ranks on all machines, if it is known.
    """
    options, folder = resolve(request)
    if ranks is None:
        ranks = ranks_here(options)
        check_ranks(ranks, device_kind(options))
    check_run(options, ranks)
    if not goes_on(request):
        folder = make_run(request.runs, request.name)
    folder.lock()
    folder.write_options(options)
    return options, folder


def nothing_to_do(request: Request) -> str | None:
    """The message for a run that is to be resumed but is finished; None for all other runs."""
    if not request.resume:
        return None
    options, folder = resolve(request)
    saved = folder.newest_checkpoint()
    if saved is None:
        return None
    before = build_options(folder.values(), str(folder.config))
    return nothing_left(folder, before, options, saved.step)


def goes_on(request: Request) -> bool:
    """Return True if an earlier run is resumed."""
    return request.resume or was_restarted()


def resolve(request: Request) -> tuple[Options, RunFolder]:
    """The options, merged from all sources, and the folder of the run.

    Flags override the TOML file, which overrides the options of a run that is resumed.
    """
    given = given_values(request)
    if not goes_on(request):
        return build_options(given, COMMAND_LINE), new_run(request.runs, request.name)
    folder = run_named(request.runs, request.name) if request.name else latest_run(request.runs)
    options = build_options({**folder.values(), **given}, COMMAND_LINE)
    check_same_model(folder, options)
    return options, folder


def given_values(request: Request) -> dict[str, Any]:
    """The options in the TOML file, overridden by the flags."""
    model = request.flags.get("model", "")
    if ":" in model:
        raise BadInput(
            f"train expects a preset ({', '.join(PRESETS)}), but got --model {model}; to plan your "
            f"own model, use fullshard plan --model {model}; to train it, write a program and "
            "start it with fullshard run"
        )
    flags = {n: checked_value(n, v, COMMAND_LINE) for n, v in request.flags.items()}
    return {**(read_values(request.config) if request.config else {}), **flags}


def check_same_model(folder: RunFolder, options: Options) -> None:
    """Raise ``BadInput`` if the run's latest checkpoint is of a model with other sizes."""
    try:
        saved = folder.newest_checkpoint()
    except fullshard.CheckpointError as problem:
        raise unusable(problem) from None
    if saved is None:
        return
    for name, wanted in model_facts(options).items():
        found = saved.extra.get(name)
        if found != wanted:
            raise BadInput(
                f"{saved.path} is a checkpoint of another model: its {name} is {found}, but "
                f"--{name} {wanted} was given; leave --{name} out, or start a new run"
            )
    check_steps(folder, options, saved.step)


def ranks_here(options: Options) -> int:
    """The number of ranks on this machine."""
    return options.ranks or (default_ranks() if device_kind(options) == "cuda" else 2)


def device_kind(options: Options) -> str:
    """The type of device on which ranks compute: ``cpu`` or ``cuda``."""
    if options.device != "auto":
        return options.device
    return "cuda" if torch.cuda.is_available() else "cpu"
