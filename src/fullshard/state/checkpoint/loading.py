"""``fullshard.load`` and ``fullshard.latest``: finding a checkpoint and reading it back."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from . import folder as folders
from .content import Targets, agree_to, check_same_model, optimizers_in, put_back, sharded_state
from .errors import CheckpointError
from .manifest import MANIFEST, Manifest, read_manifest
from .plain import put_together
from .saving import wait_for_running_save
from .storage import Reader
from .together import Ranks, explain


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found: where it is, when it was saved, and what came with it."""

    path: Path
    step: int
    extra: dict[str, Any]


def latest(path: str | os.PathLike[str]) -> Checkpoint | None:
    """The checkpoint that :func:`load` would load, or None; needs no ranks and no model.

    Raises :class:`CheckpointError` if it is damaged, or if all that the index lists are gone.
    """
    found = folders.find(Path(path))
    if found is None:
        return None
    manifest = read_manifest(found)
    return Checkpoint(found, manifest.step, _read_extra(found, manifest))


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Any = None,
) -> Checkpoint:
    """Load the newest checkpoint in the folder ``path``, or the checkpoint that ``path`` is.

    To be called by all ranks. The number of ranks, the wrapping, the strategy and
    ``use_orig_params`` may be others than at saving. Raises FileNotFoundError if there is none,
    and :class:`CheckpointError` if it is damaged, with the file's name, or another model's; what
    is loaded is checked before the model changes.

    >>> checkpoint = fullshard.load("checkpoints", model, optimizer)  # doctest: +SKIP
    >>> start = checkpoint.step + 1  # doctest: +SKIP
    """
    wait_for_running_save()
    agree_to("load a checkpoint", model)
    ranks = Ranks()
    optimizers = optimizers_in(optimizer)
    found = ranks.first_decides(lambda: _find(Path(path)))
    # By itself: a rank that cannot read it must not leave the others in the model's collectives.
    manifest = ranks.each(lambda: _read_manifest(found, ranks.rank))

    def prepare() -> tuple[Targets, Reader]:
        own = sharded_state(model)
        check_same_model(own, manifest, str(found))
        _check_optimizers(optimizers, manifest, found)
        return Targets(own, manifest), Reader(found, manifest)

    targets, reader = ranks.each(prepare)
    state = put_together(manifest.content["model"], targets.tensor)
    states = put_together(manifest.content["optimizers"], targets.tensor) if optimizers else []
    _read(reader, ranks, targets.tensors)
    extra = ranks.each(lambda: _read_extra(found, manifest))
    ranks.each(lambda: put_back(model, optimizers, state, states))
    return Checkpoint(found, manifest.step, extra)


def _find(path: Path) -> Path:
    found = folders.find(path)
    if found is None:
        raise FileNotFoundError(f"There is no checkpoint in {path}")
    return found


def _read_manifest(found: Path, rank: int) -> Manifest:
    try:
        return read_manifest(found)
    except FileNotFoundError:
        raise CheckpointError(
            f"{found / MANIFEST} is there for the first rank, but not for rank {rank}: give a "
            "folder that all ranks reach"
        ) from None


def _check_optimizers(
    optimizers: list[torch.optim.Optimizer], manifest: Manifest, found: Path
) -> None:
    saved = len(manifest.content["optimizers"])
    if optimizers and len(optimizers) != saved:
        raise CheckpointError(
            f"{found} was saved with {saved} optimizers, and {len(optimizers)} are to be loaded"
        )


def _read(reader: Reader, ranks: Ranks, tensors: dict[str, Any]) -> None:
    try:
        with ranks.checkpointing():
            dcp.load(
                tensors,
                storage_reader=reader,
                planner=dcp.DefaultLoadPlanner(flatten_state_dict=False),
                process_group=ranks.group,
                no_dist=ranks.group is None,
            )
    except CheckpointException as failure:
        raise explain(failure) from None


def _read_extra(found: Path, manifest: Manifest) -> dict[str, Any]:
    """The extra data, read by this process alone."""
    reader = Reader(found, manifest)
    extra: dict[str, Any] = put_together(manifest.content["extra"], reader.read_whole)
    return extra
