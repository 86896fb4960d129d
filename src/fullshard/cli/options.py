"""Everything that a training run can be told: one dataclass behind the TOML file and the flags.

A field is written down once, with its help and its bounds. ``option_files.py`` reads and writes
files, ``flags.py`` makes flags.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .model import PRESETS, Size
from .problems import BadInput
from .words import rounded

__all__ = ["COMMAND_LINE", "Options", "build_options", "checked_value", "nearest", "wrong_kind"]


def _option(
    default: Any,
    help: str,
    *,
    minimum: float | None = None,
    choices: Sequence[str] = (),
    planned: bool = False,
    group: str,
) -> Any:
    """A field: ``planned`` ones change the memory that a step takes, so ``plan`` has them too."""
    facts = {"help": help, "minimum": minimum, "choices": tuple(choices), "planned": planned}
    return dataclasses.field(default=default, metadata={**facts, "group": group})


_model = functools.partial(_option, group="Model")
_data = functools.partial(_option, group="Data")
_optimizer = functools.partial(_option, group="Optimizer")
_sharding = functools.partial(_option, group="Sharding")
_folder = functools.partial(_option, group="Output")

#: Parameters are counted with bytes as the vocabulary, and the default length of a sequence.
_PRESET_TEXTS = [f"{name} ({rounded(size.parameters(128))})" for name, size in PRESETS.items()]
#: Values that options had in earlier versions, by what they are now.
_FORMER_VALUES: dict[tuple[str, Any], Any] = {("model", "70b"): "65b"}


@dataclass(frozen=True)
class Options:
    """What to train, on what, and how."""

    model: str = _model(
        "tiny",
        f"Preset, with its parameters: {', '.join(_PRESET_TEXTS)}.",
        choices=[*PRESETS],
        planned=True,
    )
    layers: int = _model(0, "Layers, if not the preset's.", minimum=0, planned=True)
    heads: int = _model(0, "Attention heads, if not the preset's.", minimum=0, planned=True)
    width: int = _model(0, "Width, if not the preset's.", minimum=0, planned=True)

    data: str = _data("", "Folder with text files; without one, Python's own sources.")
    sequence: int = _data(128, "Tokens (bytes) in a sequence.", minimum=1, planned=True)
    batch: int = _data(16, "Sequences per step, over all ranks.", minimum=1, planned=True)
    accumulate: int = _data(1, "Backward passes per step.", minimum=1, planned=True)
    seed: int = _data(0, "Seed of the parameters and the order of data.", minimum=0)

    steps: int = _optimizer(500, "Steps in total.", minimum=1)
    learning_rate: float = _optimizer(3e-3, "Peak learning rate.", minimum=0)
    warmup: int = _optimizer(20, "Steps until the learning rate is at its peak.", minimum=0)
    schedule: str = _optimizer(
        "cosine",
        "After warm-up: cosine, linear, constant.",
        choices=["cosine", "linear", "constant"],
    )
    final_fraction: float = _optimizer(
        0.1, "Learning rate at the end, as a fraction of the peak.", minimum=0
    )
    weight_decay: float = _optimizer(0.1, "AdamW's weight decay.", minimum=0)
    clip: float = _optimizer(1.0, "Largest gradient norm; 0 does not clip.", minimum=0)

    ranks: int = _sharding(
        0, "Ranks on this machine; 0: one per GPU, else 2.", minimum=0, planned=True
    )
    device: str = _sharding(
        "auto", "auto, cpu, cuda.", choices=["auto", "cpu", "cuda"], planned=True
    )
    strategy: str = _sharding(
        "full_shard",
        "full_shard, shard_grad_op, no_shard, hybrid_shard.",
        choices=["full_shard", "shard_grad_op", "no_shard", "hybrid_shard"],
        planned=True,
    )
    wrap: str = _sharding(
        "Block",
        "What becomes a unit: classes by name, size=N for N parameters, or none.",
        planned=True,
    )
    precision: str = _sharding(
        "float32",
        "Compute in float32 or bfloat16; shards stay in float32.",
        choices=["float32", "bfloat16"],
        planned=True,
    )
    offload: bool = _sharding(False, "Keep shards and optimizer in host memory.", planned=True)
    checkpoint_activations: bool = _sharding(
        False, "Recompute the units' activations in backward.", planned=True
    )

    log_every: int = _folder(10, "Steps between lines of metrics.", minimum=1)
    save_every: int = _folder(100, "Steps between checkpoints; 0: only at the end.", minimum=0)
    keep: int = _folder(2, "Checkpoints to keep.", minimum=1)
    sample: int = _folder(200, "Bytes of text to sample at the end.", minimum=0)

    def size(self) -> Size:
        """The preset, with what was given in its place."""
        preset = PRESETS[self.model]
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(Size)}
        return dataclasses.replace(preset, **{name: n for name, n in given.items() if n})


_FIELDS = {field.name: field for field in dataclasses.fields(Options)}


def build_options(values: Mapping[str, Any], source: str) -> Options:
    """Options from names and values, all checked. ``source`` says where they were written."""
    return Options(**{name: checked_value(name, value, source) for name, value in values.items()})


def checked_value(name: str, value: Any, source: str) -> Any:
    """``value`` if the option ``name`` exists and may have it."""
    field = _FIELDS.get(name)
    if field is None:
        raise BadInput(f"{source}: there is no option {name!r}{nearest(name, [*_FIELDS])}")
    kind: type = type(field.default)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise BadInput(wrong_kind(source, name, kind, value))
    if kind is str and not _is_utf8(str(value)):
        raise BadInput(f"{source}: {name} expects text in UTF-8, but got {value!r}")
    value = _FORMER_VALUES.get((name, value), value)
    choices, minimum = field.metadata["choices"], field.metadata["minimum"]
    if choices and value not in choices:
        raise BadInput(
            f"{source}: {name} expects one of {', '.join(choices)}, but got {value!r}"
            f"{_meant(str(value), choices)}"
        )
    if minimum is not None and not value >= minimum:
        raise BadInput(f"{source}: {name} expects {minimum:g} or more, but got {value!r}")
    if minimum is not None and not value < _TOO_LARGE:
        raise BadInput(f"{source}: {name} expects less than 2**63, but got {value!r}")
    return value


def _is_utf8(text: str) -> bool:
    """Whether a file can hold ``text``; Python has surrogates where a command line is no UTF-8."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def wrong_kind(source: str, name: str, kind: type, value: Any) -> str:
    """What is said about a value that is not of the option's ``kind``."""
    # Each word of a command line is a text; in a file it matters that it was one.
    found = "" if source == COMMAND_LINE else f" of type {type(value).__name__}"
    return f"{source}: {name} expects {_KINDS[kind]}, but got {value!r}{found}"


#: The source of what was given as flags.
COMMAND_LINE = "command line"
#: Numbers from here on fit into no tensor, nor does infinity into a file of metrics.
_TOO_LARGE: Any = 2**63
_KINDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def nearest(given: str, known: Sequence[str]) -> str:
    """The end of a sentence about an unknown name: the one that was meant, probably, or all."""
    return _meant(given, known) or f"; there are {', '.join(known)}"


def _meant(given: str, known: Sequence[str]) -> str:
    alike = {name.replace("-", "_"): name for name in known}
    close = difflib.get_close_matches(given.replace("-", "_"), alike, n=1, cutoff=0.5)
    return f"; did you mean {alike[close[0]]!r}?" if close else ""
