"""``fullshard plan``: prints a table of the memory that training would take on each rank."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from fullshard.tracing.output import write
from fullshard.tracing.records import TraceData
from fullshard.wrap.description import Description, Layout
from fullshard.wrap.render import size_text

from ..checks import check_batch, check_communication, check_size
from ..model import VOCABULARY
from ..options import COMMAND_LINE, Options, build_options
from ..problems import BadInput
from ..words import counted
from .device_memory import bytes_of_device
from .fit import Question, best_that_fit, candidates_of
from .machine import Machine
from .memory import Prediction, predict
from .own_model import own_subject, repeated_class, step_errors_as_bad_input
from .prediction import gpt_subject, rehearse
from .timing import (
    Timing,
    fit_table,
    fit_text,
    foretold_trace,
    machine_for,
    network_text,
    nothing_fits_text,
    time_text,
)

__all__ = ["DOES_NOT_FIT", "plan"]

#: The exit status for scripts if the device does not have enough memory.
DOES_NOT_FIT = 3
#: The fraction of device memory for tensors; contexts, libraries and fragmentation take the rest.
_USABLE = 0.9


def plan(
    values: Mapping[str, Any],
    device_memory: str | None = None,
    vocabulary: int | None = None,
    api: str = "wrapper",
    timing: Timing = Timing(),  # noqa: B008 (frozen)
) -> int:
    """Print the table, and whether the model fits; returns the exit status, 3 if it does not."""
    layout = _layout(api)
    if timing.fit is not None and device_memory is not None:
        raise BadInput(
            "--fit and --device-memory both give a device's memory; leave --device-memory out"
        )
    option = "fit" if timing.fit is not None else "device-memory"
    device_memory = timing.fit if timing.fit is not None else device_memory
    limit = None if device_memory is None else bytes_of_device(device_memory, option)
    if timing.picture is not None and timing.picture.suffix not in (".html", ".json", ".png"):
        raise BadInput(f"--picture expects .html, .json or .png, but got {str(timing.picture)!r}")
    model = values.get("model", "")
    is_own = ":" in model
    known = {name: value for name, value in values.items() if name != "model" or not is_own}
    options = build_options(known, COMMAND_LINE)
    ranks = options.ranks or torch.cuda.device_count() or 2
    if timing.fit is None or "batch" in values:
        check_batch(options, ranks)
    check_communication(options)
    if is_own:
        _check_no_sizes(model, values, vocabulary)
        make_subject = functools.partial(own_subject, model)
    else:
        check_size(options)
        vocabulary = checked_vocabulary(vocabulary)
        make_subject = functools.partial(gpt_subject, options, vocabulary)
    subject = make_subject()
    chooses_wrap = is_own and "wrap" not in values
    if chooses_wrap:
        options = dataclasses.replace(options, wrap=repeated_class(subject.model) or "none")
    device = torch.device(_device_kind(options, device_memory, timing.machine))
    machine = machine_for(timing, device, device_memory) if timing.is_asked_for else None
    console = Console(highlight=False, soft_wrap=True)
    with step_errors_as_bad_input(model) if is_own else contextlib.nullcontext():
        if timing.fit is not None and machine is not None and limit is not None:
            usable = int(limit * _USABLE)
            question = Question(
                make_subject, options, values, ranks, device, machine, usable, layout
            )
            candidates = [*candidates_of(question)]
            found = best_that_fit(question, candidates)
            if not found:
                console.print(nothing_fits_text(question, candidates, timing.fit))
                return DOES_NOT_FIT
            console.print(fit_text(question, found[0], timing.fit))
            console.print(fit_table(question, found))
            options, subject, chooses_wrap = found[0].options, make_subject(), False
        seconds_of = None if machine is None else machine.seconds_of
        step = rehearse(subject, options, ranks, device, layout, seconds_of)
    predicted = predict(step.sizes, step.moments, step.facts)
    console.print(_heading(options, ranks, device, step.description, vocabulary, api))
    if chooses_wrap:
        console.print(_chosen_wrap(options.wrap))
    _print_memory(console, predicted)
    if machine is not None:
        data = foretold_trace(step, options, machine)
        _print_time(console, data, machine, timing)
    if limit is None:
        return 0
    console.print(_verdict(predicted.total, limit, str(device_memory)))
    return 0 if predicted.total <= limit else DOES_NOT_FIT


def _print_memory(console: Console, predicted: Prediction) -> None:
    console.print(_table(predicted))
    console.print(f"Memory peaks {predicted.when}.")
    if predicted.host:
        console.print(f"Host memory: {size_text(predicted.host)} per rank.")


def _print_time(console: Console, data: TraceData, machine: Machine, timing: Timing) -> None:
    console.print(time_text(data, machine))
    assumed = network_text(timing, machine, len(data.summaries))
    if assumed is not None:
        console.print(assumed)
    if timing.picture is not None:
        try:
            write(data, timing.picture)
        except OSError as problem:
            raise BadInput(f"--picture {timing.picture} cannot be written: {problem}") from None
        console.print(f"Timeline in {timing.picture}.")


def _layout(api: str) -> Layout:
    """The layout by which the units of an API share their parameters."""
    layouts: dict[str, Layout] = {"wrapper": "flat", "fully_shard": "rows"}
    if api not in layouts:
        raise BadInput(f"api expects wrapper or fully_shard, but got {api!r}")
    return layouts[api]


def checked_vocabulary(given: int | None) -> int:
    """The vocabulary size of a preset; by default that of bytes."""
    if given is None:
        return VOCABULARY
    if not 1 <= given < 2**31:
        raise BadInput(f"vocabulary expects 1 or more tokens, less than 2**31, but got {given}")
    return given


def _check_no_sizes(model: str, values: Mapping[str, Any], vocabulary: int | None) -> None:
    """Raise ``BadInput`` for options that change a preset, if the model is the user's own."""
    given = [name for name in ("layers", "heads", "width") if values.get(name)]
    given += ["vocabulary"] if vocabulary is not None else []
    if given:
        raise BadInput(
            f"--{given[0]} changes a preset, but {model!r} is a model of your own; leave "
            f"--{given[0]} out, and set it in your function"
        )


def _device_kind(options: Options, device_memory: str | None, machine: str | None) -> str:
    """The type of device to plan for: that of ``--machine``; ``--device-memory`` implies a GPU."""
    if options.device != "auto":
        return options.device
    if machine is not None:
        return "cpu" if machine.lower() == "cpu" else "cuda"
    return "cuda" if device_memory or torch.cuda.is_available() else "cpu"


def _heading(
    options: Options,
    ranks: int,
    device: torch.device,
    units: Description,
    vocabulary: int | None,
    api: str,
) -> str:
    extras = [
        *(["fully_shard"] if api == "fully_shard" else []),
        *(["offload"] if options.offload else []),
        *(["activation checkpointing"] if options.checkpoint_activations else []),
        *([f"all-gather in {options.all_gather}"] if options.all_gather != "full" else []),
        *([f"reduce in {options.reduce}"] if options.reduce != "full" else []),
    ]
    tokens = f" (vocabulary {vocabulary:,})" if vocabulary is not None else ""
    return (
        f"{units.model_class} of {counted(units.elements, 'parameter')}{tokens} in "
        f"{counted(len(units.units), 'unit')}, on {counted(ranks, 'rank')} ({device.type}): "
        + ", ".join([options.strategy, options.precision, *extras])
        + f"; {options.batch} x {options.sequence} tokens per step"
        + (f" in {options.accumulate} passes" if options.accumulate > 1 else "")
    )


def _chosen_wrap(wrap: str) -> str:
    chosen = (
        "no module class is repeated, so the model is one unit"
        if wrap == "none"
        else f"each {wrap} is a unit"
    )
    return f"Without --wrap, {chosen}; to change that: --wrap CLASS,CLASS, size=N or none."


_ROWS = {
    "shards": "parameter shards",
    "gradients": "gradient shards",
    "optimizer": "optimizer state",
    "full_parameters": "unsharded parameters",
    "whole_gradients": "unreduced gradients",
    "activations": "activations",
}


def _table(predicted: Prediction) -> Table:
    table = Table(show_footer=True)
    table.add_column("memory per rank", footer="total")
    table.add_column("at the peak", footer=size_text(predicted.total), justify="right")
    table.add_column("share", footer="100 %", justify="right")
    table.add_column("at most", justify="right")
    for name, row in _ROWS.items():
        size, largest = getattr(predicted.peak, name), getattr(predicted.at_most, name)
        part = f"{100 * size / predicted.total:.0f} %"
        table.add_row(row, size_text(size), part, size_text(largest))
    return table


def _verdict(total: int, limit: int, name: str) -> str:
    usable = int(limit * _USABLE)
    compared = f"{size_text(total)} of {size_text(limit)} ({100 * total / limit:.0f} %)"
    if total <= usable:
        return f"Fits {name}: {compared}."
    if total <= limit:
        return f"Barely fits {name}: {compared}; libraries and fragmentation take about a tenth."
    return f"Does not fit {name}: {compared}."
