"""``fullshard plan``: the memory that training would take, as a table, on a machine without any."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from fullshard.wrap.description import Description
from fullshard.wrap.render import size_text

from .checks import check_batch, check_size
from .memory import Prediction
from .options import COMMAND_LINE, Options, build_options
from .own_model import own_subject, repeated_class, step_told
from .prediction import gpt_subject, predict_memory
from .problems import BadInput

__all__ = ["DEVICES", "bytes_of_device", "plan"]

_GIB = 1024**3

#: What devices have, as their makers say.
DEVICES = {
    "a10": 24 * _GIB,
    "a100-40g": 40 * _GIB,
    "a100-80g": 80 * _GIB,
    "b200": 180 * _GIB,
    "h100": 80 * _GIB,
    "h200": 141 * _GIB,
    "l4": 24 * _GIB,
    "l40s": 48 * _GIB,
    "mi300x": 192 * _GIB,
    "rtx4090": 24 * _GIB,
    "t4": 16 * _GIB,
    "v100": 32 * _GIB,
}
#: What is left for tensors: contexts, libraries and gaps between allocations take the rest.
_USABLE = 0.9


def plan(values: Mapping[str, Any], device_memory: str | None) -> None:
    """Print the table, and whether it fits."""
    limit = bytes_of_device(device_memory) if device_memory is not None else None
    model = values.get("model", "")
    is_own = ":" in model
    known = {name: value for name, value in values.items() if name != "model" or not is_own}
    options = build_options(known, COMMAND_LINE)
    ranks = options.ranks or torch.cuda.device_count() or 2
    check_batch(options, ranks)
    if is_own:
        subject = own_subject(model)
    else:
        check_size(options)
        subject = gpt_subject(options)
    chooses_wrap = is_own and "wrap" not in values
    if chooses_wrap:
        options = dataclasses.replace(options, wrap=repeated_class(subject.model) or "none")
    device = torch.device(_device_kind(options, device_memory))
    with step_told(model) if is_own else contextlib.nullcontext():
        units, predicted = predict_memory(subject, options, ranks, device)
    console = Console(highlight=False, soft_wrap=True)
    console.print(_heading(options, ranks, device, units))
    if chooses_wrap:
        console.print(_chosen_wrap(options.wrap))
    console.print(_table(predicted))
    console.print(f"The peak is {predicted.when}.")
    if predicted.host:
        console.print(f"Host memory: {size_text(predicted.host)} per rank.")
    if limit is not None:
        console.print(_verdict(predicted.total, limit, str(device_memory)))


def bytes_of_device(text: str) -> int:
    """A device by its name, or a size such as 80GiB.

    >>> bytes_of_device("24 GiB") == bytes_of_device("l4")
    True
    """
    if text.lower() in DEVICES:
        return DEVICES[text.lower()]
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", text.strip().lower())
    if not found:
        raise BadInput(
            f"device-memory expects a size such as 80GiB or one of {', '.join(DEVICES)}, "
            f"but got {text!r}"
        )
    number, unit, binary = found.groups()
    base = 1024 if binary else 1000
    return int(float(number) * base ** " kmgt".index(unit or " "))


def _device_kind(options: Options, device_memory: str | None) -> str:
    """Where a device is named, a GPU is meant."""
    if options.device != "auto":
        return options.device
    return "cuda" if device_memory or torch.cuda.is_available() else "cpu"


def _heading(options: Options, ranks: int, device: torch.device, units: Description) -> str:
    extras = [
        *(["offload"] if options.offload else []),
        *(["activation checkpointing"] if options.checkpoint_activations else []),
    ]
    return (
        f"{units.model_class} of {units.elements:,} parameters in {len(units.units)} units, on "
        f"{ranks} rank{'s' * (ranks > 1)} ({device.type}): "
        + ", ".join([options.strategy, options.precision, *extras])
        + f"; {options.batch} x {options.sequence} tokens per step"
        + (f" in {options.accumulate} passes" if options.accumulate > 1 else "")
    )


def _chosen_wrap(wrap: str) -> str:
    chosen = "nothing is repeated, so it is one unit" if wrap == "none" else f"a unit is a {wrap}"
    return f"Without --wrap, {chosen}; others: --wrap CLASS,CLASS or --wrap size=N or --wrap none."


_ROWS = {
    "shards": "parameter shards",
    "gradients": "gradient shards",
    "optimizer": "optimizer state",
    "full_parameters": "full parameters",
    "whole_gradients": "gradients until reduced",
    "activations": "activations",
}


def _table(predicted: Prediction) -> Table:
    table = Table(show_footer=True)
    table.add_column("memory per rank", footer="together")
    table.add_column("at the peak", footer=size_text(predicted.total), justify="right")
    table.add_column("part", footer="100 %", justify="right")
    table.add_column("each at most", justify="right")
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
        return f"Hardly fits {name}: {compared}; libraries and fragments take about a tenth."
    return f"Does not fit {name}: {compared}."
