"""The options of a training run: one dataclass behind the TOML file and the flags.

Each option is defined once, with its help text and bounds. ``option_files.py`` reads and writes
files, ``flags.py`` generates flags.
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
    """An option. ``planned`` ones change the memory of a step, so ``plan`` has them, too."""
    facts = {"help": help, "minimum": minimum, "choices": tuple(choices), "planned": planned}
    return dataclasses.field(default=default, metadata={**facts, "group": group})


_model = functools.partial(_option, group="Model")
_data = functools.partial(_option, group="Data")
_optimizer = functools.partial(_option, group="Optimizer")
_sharding = functools.partial(_option, group="Sharding")
_folder = functools.partial(_option, group="Output")

#: Parameter counts for a vocabulary of bytes and the default sequence length.
_PRESET_TEXTS = [f"{name} ({rounded(size.parameters(128))})" for name, size in PRESETS.items()]
#: Values from earlier versions that were renamed: (option, old value) to new value.
_FORMER_VALUES: dict[tuple[str, Any], Any] = {("model", "70b"): "65b"}


@dataclass(frozen=True)
class Options:
    """The options of ``fullshard train`` and ``fullshard plan``."""

    model: str = _model(
        "tiny",
        f"Preset (parameters): {', '.join(_PRESET_TEXTS)}.",
        choices=[*PRESETS],
        planned=True,
    )
    layers: int = _model(0, "Number of layers; 0: the preset's.", minimum=0, planned=True)
    heads: int = _model(0, "Number of attention heads; 0: the preset's.", minimum=0, planned=True)
    width: int = _model(0, "Width of the embeddings; 0: the preset's.", minimum=0, planned=True)

    data: str = _data("", "Folder with text files; default: Python's standard library.")
    sequence: int = _data(128, "Tokens (bytes) per sequence.", minimum=1, planned=True)
    batch: int = _data(16, "Sequences per step, over all ranks.", minimum=1, planned=True)
    accumulate: int = _data(
        1, "Backward passes per step (gradient accumulation).", minimum=1, planned=True
    )
    seed: int = _data(0, "Seed for the parameters and the order of the data.", minimum=0)

    optimizer: str = _optimizer(
        "adamw",
        "Optimizer: adamw; muon, for matrices inside layers, and AdamW for the rest.",
        choices=["adamw", "muon"],
        planned=True,
    )
    steps: int = _optimizer(500, "Total number of steps.", minimum=1)
    learning_rate: float = _optimizer(3e-3, "Peak learning rate.", minimum=0)
    warmup: int = _optimizer(20, "Warm-up steps, up to the peak learning rate.", minimum=0)
    schedule: str = _optimizer(
        "cosine",
        "Learning rate after warm-up: cosine, linear, constant.",
        choices=["cosine", "linear", "constant"],
    )
    final_fraction: float = _optimizer(
        0.1, "Final learning rate, as a fraction of the peak.", minimum=0
    )
    weight_decay: float = _optimizer(0.1, "Weight decay.", minimum=0)
    clip: float = _optimizer(1.0, "Maximum gradient norm; 0 turns clipping off.", minimum=0)

    ranks: int = _sharding(
        0, "Ranks on this machine; 0: one per GPU, or 2 without a GPU.", minimum=0, planned=True
    )
    device: str = _sharding(
        "auto", "Device: auto, cpu, cuda.", choices=["auto", "cpu", "cuda"], planned=True
    )
    strategy: str = _sharding(
        "full_shard",
        "Sharding strategy: full_shard, shard_grad_op, no_shard, hybrid_shard.",
        choices=["full_shard", "shard_grad_op", "no_shard", "hybrid_shard"],
        planned=True,
    )
    wrap: str = _sharding(
        "Block",
        "Modules to wrap: class names, size=N (N parameters or more), or none.",
        planned=True,
    )
    precision: str = _sharding(
        "float32",
        "Compute dtype, float32 or bfloat16; shards stay in float32.",
        choices=["float32", "bfloat16"],
        planned=True,
    )
    offload: bool = _sharding(
        False, "Keep shards and optimizer state in host memory.", planned=True
    )
    checkpoint_activations: bool = _sharding(
        False, "Recompute the activations of each unit in backward.", planned=True
    )

    all_gather: str = _sharding(
        "full",
        "Format of all-gathered parameters: full, int8, float8.",
        choices=["full", "int8", "float8"],
        planned=True,
    )
    reduce: str = _sharding(
        "full",
        "Format of gradients on the wire: full, bfloat16, int8, float8.",
        choices=["full", "bfloat16", "int8", "float8"],
        planned=True,
    )
    secondary_shards: bool = _sharding(
        False, "Keep secondary shards on each machine, for backward's all-gathers."
    )

    capture: bool = _sharding(
        False, "Run steps as a CUDA graph, with one launch each; for small models on GPUs."
    )

    log_every: int = _folder(10, "Steps between lines of metrics.", minimum=1)
    save_every: int = _folder(100, "Steps between checkpoints; 0: only at the end.", minimum=0)
    keep: int = _folder(2, "Number of checkpoints to keep.", minimum=1)
    trace: int = _folder(
        0, "Steps to trace (fullshard.trace), from the fifth on; 0: none.", minimum=0
    )
    sample: int = _folder(200, "Bytes of text to sample at the end.", minimum=0)

    def size(self) -> Size:
        """The size of the preset, overridden by the sizes that were given."""
        preset = PRESETS[self.model]
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(Size)}
        return dataclasses.replace(preset, **{name: n for name, n in given.items() if n})


_FIELDS = {field.name: field for field in dataclasses.fields(Options)}


def build_options(values: Mapping[str, Any], source: str) -> Options:
    """Make options from names and values, and check them. ``source`` names their origin."""
    return Options(**{name: checked_value(name, value, source) for name, value in values.items()})


def checked_value(name: str, value: Any, source: str) -> Any:
    """Return ``value`` if the option ``name`` exists and accepts it; otherwise ``BadInput``."""
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
    """Return True if ``text`` can be written to a file.

    Python represents bytes of a command line that are not valid UTF-8 as surrogates.
    """
    return not any("\ud800" <= character <= "\udfff" for character in text)


def wrong_kind(source: str, name: str, kind: type, value: Any) -> str:
    """The message about a value that is not of the option's type, ``kind``."""
    # On the command line every value is text, so its type says nothing; in a file it does.
    found = "" if source == COMMAND_LINE else f" of type {type(value).__name__}"
    return f"{source}: {name} expects {_KINDS[kind]}, but got {value!r}{found}"


#: The ``source`` of options that were given as flags.
COMMAND_LINE = "command line"
#: Numbers from here on do not fit in a tensor, and infinity cannot be written as JSON.
_TOO_LARGE: Any = 2**63
_KINDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def nearest(given: str, known: Sequence[str]) -> str:
    """The end of a message about an unknown name: the most similar known name, or all of them."""
    return _meant(given, known) or f"; expected one of {', '.join(known)}"


def _meant(given: str, known: Sequence[str]) -> str:
    alike = {name.replace("-", "_"): name for name in known}
    close = difflib.get_close_matches(given.replace("-", "_"), alike, n=1, cutoff=0.5)
    return f"; did you mean {alike[close[0]]!r}?" if close else ""
