"""``fullshard.load``, ``resume`` and ``latest``: finding a checkpoint and reading it back."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from . import folder as folders
from .content import (
    Targets,
    agree_to,
    check_optimizers,
    check_same_model,
    optimizers_in,
    put_back,
    sharded_state,
)
from .errors import CheckpointError, DamagedCheckpoint
from .group import CheckpointGroup, explain
from .inspection import check_data_files, read_manifest
from .manifest import Manifest
from .names import MANIFEST
from .plain import put_together
from .saving import wait_for_running_save
from .storage import Reader


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found: where it is, when it was saved, and what came with it.

    ``skipped`` says of each newer one, the newest first, why it could not be taken.
    """

    path: Path
    step: int
    extra: dict[str, Any]
    skipped: tuple[str, ...] = ()


def latest(path: str | os.PathLike[str]) -> Checkpoint | None:
    """The newest whole checkpoint in the folder ``path``, or None; needs no ranks and no model.

    Damaged ones are passed over with a warning, as far as damage shows without reading all
    tensors: their bytes are checked by :func:`load` and :func:`resume`. Raises
    :class:`CheckpointError` if none is whole, or if all that the index lists are gone.
    """
    skipped: list[DamagedCheckpoint] = []
    for candidate in folders.candidates(Path(path)):
        try:
            manifest = read_manifest(candidate)
            check_data_files(candidate, manifest)
            extra = _read_extra(candidate, manifest)
        except DamagedCheckpoint as damage:
            skipped.append(damage)
            continue
        _warn_of(skipped, candidate)
        return Checkpoint(candidate, manifest.step, extra, tuple(map(str, skipped)))
    if skipped:
        raise _none_whole(Path(path), skipped)
    return None


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Any = None,
) -> Checkpoint:
    """Load the newest checkpoint in the folder ``path``, or the checkpoint that ``path`` is.

    To be called by all ranks. The number of ranks, the wrapping, the strategy and
    ``use_orig_params`` may be others than at saving. Raises FileNotFoundError if there is none,
    and :class:`CheckpointError` if it is damaged, with the file's name, or another model's; what
    is loaded is checked before the model changes. :func:`resume` takes an older one instead.

    >>> checkpoint = fullshard.load("checkpoints", model, optimizer)
    >>> start = checkpoint.step + 1
    """
    loading = _Loading(model, optimizer)
    found = loading.ranks.first_decides(lambda: folders.candidates(Path(path)))
    if not found:
        raise FileNotFoundError(f"There is no checkpoint in {path}")
    try:
        return loading.load(found[0])
    except DamagedCheckpoint as damage:
        if len(found) == 1:
            raise
        raise DamagedCheckpoint(
            f"{damage}. fullshard.resume goes on from the newest checkpoint that is whole",
            advises=True,
        ) from None


def resume(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Any = None,
) -> Checkpoint | None:
    """Load the newest whole checkpoint in the folder ``path``; None if there are none at all.

    To be called by all ranks, as :func:`load`. A checkpoint that turns out to be damaged, also
    while its tensors are read, is passed over by all ranks together: the first one warns, and
    ``skipped`` of what is returned says why. It stays where it is, whatever is saved later. Raises
    :class:`CheckpointError` if none is whole, with the reason of each, or if a checkpoint is
    another model's: then older ones are not tried.

    >>> checkpoint = fullshard.resume("checkpoints", model, optimizer)
    >>> start = checkpoint.step + 1 if checkpoint else 1
    """
    loading = _Loading(model, optimizer)
    skipped: dict[Path, DamagedCheckpoint] = {}
    for candidate in loading.ranks.first_decides(lambda: folders.candidates(Path(path))):
        try:
            found = loading.load(candidate)
        except DamagedCheckpoint as damage:
            # The same on all ranks, which go on to the next one together.
            skipped[candidate] = damage
            continue
        if loading.ranks.rank == 0:
            _warn_of(list(skipped.values()), candidate)
            folders.remove_note(candidate)
            for damaged, reason in skipped.items():
                folders.note_damage(damaged, str(reason))
        return dataclasses.replace(found, skipped=tuple(map(str, skipped.values())))
    if skipped:
        raise _none_whole(Path(path), list(skipped.values()))
    return None


class _Loading:
    """All ranks, about to load a checkpoint into one model and its optimizers.

    Whatever is wrong with a checkpoint is raised on all ranks, with the same error, and but for
    what a model or an optimizer itself refuses to load, before anything changes.
    """

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        wait_for_running_save()
        agree_to("load a checkpoint", model)
        self.ranks = CheckpointGroup()
        self._model = model
        self._optimizers = optimizers_in(optimizer)

    def load(self, checkpoint: Path) -> Checkpoint:
        ranks, model, optimizers = self.ranks, self._model, self._optimizers
        # By itself: a rank that cannot read it must not leave the others in the model's
        # collectives.
        manifest = ranks.each(lambda: _inspect(checkpoint, ranks.rank))

        def prepare() -> tuple[dict[str, Any], Any, Any]:
            own = sharded_state(model)
            check_same_model(own, manifest, str(checkpoint))
            _check_optimizers(optimizers, manifest, checkpoint)
            targets = Targets(own, manifest, checkpoint)
            state = put_together(manifest.content["model"], targets.tensor)
            saved = manifest.content["optimizers"] if optimizers else []
            return targets.tensors, state, put_together(saved, targets.tensor)

        tensors, state, states = ranks.each(prepare)
        _read(Reader(checkpoint, manifest), ranks, tensors)
        extra = ranks.each(lambda: _read_extra(checkpoint, manifest))

        # By itself, as the manifest: the optimizer of one rank alone may be another.
        ranks.each(lambda: _fitting(checkpoint, check_optimizers, model, optimizers, states))
        ranks.each(lambda: _fitting(checkpoint, put_back, model, optimizers, state, states))
        return Checkpoint(checkpoint, manifest.step, extra)


def _fitting(checkpoint: Path, function: Callable[..., None], *arguments: Any) -> None:
    try:
        function(*arguments)
    except Exception as error:
        # From the model's and the optimizers' own methods, which may raise anything.
        raise CheckpointError(
            f"{checkpoint} does not fit the model or its optimizers. "
            f"{type(error).__name__}: {error}"
        ) from error


def _inspect(checkpoint: Path, rank: int) -> Manifest:
    """Read the manifest; the first rank looks at the data files as well.

    One look for each file, and not one of each rank, is what a shared file system is asked for.
    """
    if rank == 0:
        manifest = read_manifest(checkpoint)
        check_data_files(checkpoint, manifest)
        return manifest
    if not os.path.lexists(checkpoint / MANIFEST):
        # Where it is missing for the first rank as well, that is what all ranks raise.
        raise CheckpointError(
            f"{checkpoint / MANIFEST} is there for the first rank, but not for rank {rank}: give a "
            "folder that all ranks reach",
            advises=True,
        )
    return read_manifest(checkpoint)


def _warn_of(skipped: Sequence[DamagedCheckpoint], found: Path) -> None:
    for damage in skipped:
        warnings.warn(
            f"Skipped a damaged checkpoint, which stays where it is: {damage}. The newest whole "
            f"one is {found}",
            stacklevel=3,
        )


def _none_whole(path: Path, damages: Sequence[DamagedCheckpoint]) -> CheckpointError:
    reasons = "; ".join(map(str, damages))
    return CheckpointError(
        f"No checkpoint in {path} is whole: {reasons}. Bring a whole one back, or begin anew in "
        "another folder",
        advises=True,
    )


def _check_optimizers(
    optimizers: list[torch.optim.Optimizer], manifest: Manifest, found: Path
) -> None:
    saved = len(manifest.content["optimizers"])
    if optimizers and len(optimizers) != saved:
        raise CheckpointError(
            f"{found} was saved with {saved} optimizers, and {len(optimizers)} are to be loaded"
        )


def _read(reader: Reader, ranks: CheckpointGroup, tensors: dict[str, Any]) -> None:
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
