"""The table of features names all that torch's wrapper has, and tests that exist."""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import inspect
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
import torch.distributed.fsdp as torchs
import torch.distributed.fsdp.wrap as torchs_wrap
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from fullshard.testing import ranks

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "maintainers" / "features.md"
EXAMPLE = ROOT / "docs" / "hooks.md"
#: Options of the other wrapper in torch's package.
OF_FULLY_SHARD = (
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
)


class Row(NamedTuple):
    section: str
    feature: str
    promise: str
    shown_by: str


@functools.cache
def rows() -> list[Row]:
    found, section, in_table = [], "", False
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = line[3:]
        elif line.startswith("| feature |"):
            in_table = True
        elif not line.startswith("|"):
            in_table = False
        elif in_table and not line.startswith("|---"):
            found.append(Row(section, *line.strip("| ").split(" | ")))
    return found


@functools.cache
def names_in(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def arguments(function: object) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def option_classes() -> list[type]:
    classes = [getattr(torchs, name) for name in torchs.__all__ if name not in OF_FULLY_SHARD]
    return [c for c in classes if inspect.isclass(c)]


def promised() -> list[tuple[str, str]]:
    """(section, name) of all that torch has."""
    wrapper = torchs.FullyShardedDataParallel
    found = [("Constructor arguments", name) for name in arguments(wrapper.__init__)]
    found += [("Methods", name) for name in vars(wrapper) if not name.startswith("_")]
    found += [
        ("Methods", f"summon_full_params`, `{name}")
        for name in arguments(wrapper.summon_full_params)
        if name != "module"
    ]
    for option in option_classes():
        names: list[str] = []
        if issubclass(option, enum.Enum):
            names = [member.name for member in option]
        elif dataclasses.is_dataclass(option):
            names = [field.name for field in dataclasses.fields(option)]
        found += [("Options and their values", f"{option.__name__}.{name}") for name in names]
    found += [("Wrapping", name) for name in torchs_wrap.__all__]
    found += [("`ShardedGradScaler`", name) for name in arguments(ShardedGradScaler.__init__)]
    return found


@pytest.mark.parametrize(("section", "name"), promised(), ids=lambda value: value.strip("`"))
def test_everything_that_torch_has_is_in_the_table(section: str, name: str) -> None:
    features = [row.feature for row in rows() if row.section == section]
    assert any(feature.startswith(f"`{name}`") for feature in features)


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.feature.replace("`", ""))
def test_every_feature_is_shown_by_tests_that_exist(row: Row) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row.shown_by)
    assert named
    assert row.shown_by == ", ".join(f"`{file}::{name}`" for file, name in named)
    for file, name in named:
        assert name.startswith("test_")
        assert name in names_in(file), f"{file}::{name}"


@ranks(2)
def test_the_example_of_the_page_runs() -> None:
    block = re.search(r"```python\n(.*?)```", EXAMPLE.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    names: dict[str, Any] = {}
    dist.destroy_process_group()  # the example makes its own

    exec(block.group(1), names)

    assert names["loss"].isfinite()
    assert names["scaler"].get_scale() == 2.0**10


def test_nothing_is_left_partly_done() -> None:
    assert "partly" not in DOCUMENT.read_text(encoding="utf-8").lower()
    assert len(rows()) > 100
