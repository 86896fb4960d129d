"""``fullshard.load``, ``resume`` and ``latest``: find a checkpoint and load it."""

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

from ...engine.comm.disagreement import RankLostError, RanksDisagreeError
from . import folder as folders
from .content import (
    Targets,
    agree_to,
    check_optimizers,
    check_same_model,
    explaining_failures,
    optimizers_in,
    put_back,
    sharded_state,
    states_for,
)
from .errors import CheckpointError, DamagedCheckpoint
from .group import CheckpointGroup, explain
from .inspection import check_data_files, read_manifest
from .manifest import Manifest
from .names import MANIFEST
from .plain import decode
from .saving import wait_for_running_save
from .storage import Reader


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found: its folder, the step it was saved at, and its extra data.

    ``skipped`` has the reason why each newer checkpoint was skipped, that of the newest first.
    """

    path: Path
    step: int
    extra: dict[str, Any]
    skipped: tuple[str, ...] = ()


def latest(path: str | os.PathLike[str]) -> Checkpoint | None:
    """Return the newest whole checkpoint in the folder ``path``, or None if it has none.

    Needs no ranks and no model. Damaged checkpoints are skipped with a warning, as far as the
    damage is found without reading all tensors; :func:`load` and :func:`resume` check their bytes.
    Raises :class:`CheckpointError` if there are checkpoints and none is whole, or if all that the
    index lists are missing.
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

    All ranks call this. The number of ranks, the wrapping, the strategy and ``use_orig_params``
    may differ from those at saving. Raises FileNotFoundError if there is no checkpoint, and
    :class:`CheckpointError` if it is damaged, with the file's name, or of another model. All data
    is checked before the model changes. :func:`resume` skips damaged checkpoints instead.

    >>> checkpoint = fullshard.load("checkpoints", model, optimizer)
    >>> start = checkpoint.step + 1
    """
    loading = _Loading(model, optimizer)
    found = loading.ranks.on_first_rank(lambda: folders.candidates(Path(path)))
    if not found:
        raise FileNotFoundError(f"There is no checkpoint in {path}")
    try:
        return loading.load(found[0])
    except DamagedCheckpoint as damage:
        if len(found) == 1:
            raise
        raise DamagedCheckpoint(
            f"{damage}. fullshard.resume goes on from the newest whole checkpoint",
            advises=True,
        ) from None


def resume(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Any = None,
) -> Checkpoint | None:
    """Load the newest whole checkpoint in the folder ``path``; return None if it has none.

    All ranks call this, as :func:`load`. They skip a damaged checkpoint together, also if the
    damage is found while its tensors are read: the first rank warns, and ``skipped`` of the result
    has the reason. Later saves do not remove a damaged checkpoint. Raises :class:`CheckpointError`
    with all reasons if no checkpoint is whole. Also raises it if a checkpoint is of another model,
    without trying older ones.

    >>> checkpoint = fullshard.resume("checkpoints", model, optimizer)
    >>> start = checkpoint.step + 1 if checkpoint else 1
    """
    loading = _Loading(model, optimizer)
    skipped: dict[Path, DamagedCheckpoint] = {}
    for candidate in loading.ranks.on_first_rank(lambda: folders.candidates(Path(path))):
        try:
            found = loading.load(candidate)
        except DamagedCheckpoint as damage:
            # All ranks raise the same error, and try the next checkpoint together.
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
    """Loads checkpoints into one model and its optimizers, on all ranks.

    All ranks raise the same error if something is wrong with a checkpoint. They do so before the
    model changes, unless the model or an optimizer itself refuses to load its state.
    """

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        wait_for_running_save()
        agree_to("load a checkpoint", model)
        self.ranks = CheckpointGroup("load a checkpoint", model)
        self._model = model
        self._optimizers = optimizers_in(optimizer)

    def load(self, checkpoint: Path) -> Checkpoint:
        with explaining_failures(self._model):
            return self._load(checkpoint)

    def _load(self, checkpoint: Path) -> Checkpoint:
        ranks, model, optimizers = self.ranks, self._model, self._optimizers
        # In a step of its own: if one rank cannot read the manifest, the others must not enter the
        # model's collectives.
        manifest = ranks.on_all_ranks(lambda: _inspect(checkpoint, ranks.rank))

        def prepare() -> tuple[dict[str, Any], Any, Any]:
            own = sharded_state(model)
            check_same_model(own, manifest, str(checkpoint))
            targets = Targets(own, manifest, checkpoint)
            state = decode(manifest.content["model"], targets.tensor)
            saved = manifest.content["optimizers"] if optimizers else []
            states = decode(saved, targets.tensor)
            return targets.tensors, state, _states_for(model, optimizers, states, checkpoint)

        tensors, state, states = ranks.on_all_ranks(prepare)
        _read(Reader(checkpoint, manifest), ranks, tensors)
        extra = ranks.on_all_ranks(lambda: _read_extra(checkpoint, manifest))

        # In a step of its own, too: the optimizer of one rank alone may not fit.
        ranks.on_all_ranks(
            lambda: _attempt(checkpoint, check_optimizers, model, optimizers, states)
        )
        ranks.on_all_ranks(lambda: _attempt(checkpoint, put_back, model, optimizers, state, states))
        return Checkpoint(checkpoint, manifest.step, extra)


def _attempt(checkpoint: Path, function: Callable[..., None], *arguments: Any) -> None:
    """Call ``function``; raise its error as a CheckpointError that names the checkpoint."""
    try:
        function(*arguments)
    except (RanksDisagreeError, RankLostError):
        raise
    except Exception as error:
        # The model's and the optimizers' own methods may raise anything.
        raise CheckpointError(
            f"{checkpoint} does not fit the model or its optimizers. "
            f"{type(error).__name__}: {error}"
        ) from error


def _inspect(checkpoint: Path, rank: int) -> Manifest:
    """Read the manifest; the first rank also checks the data files.

    If every rank checked every file, a shared file system would be slow.
    """
    if rank == 0:
        manifest = read_manifest(checkpoint)
        check_data_files(checkpoint, manifest)
        return manifest
    if not os.path.lexists(checkpoint / MANIFEST):
        # If the first rank does not find it either, all ranks raise the first rank's error.
        raise CheckpointError(
            f"{checkpoint / MANIFEST} is there on the first rank, but not on rank {rank}. Pass a "
            "folder that all ranks can reach",
            advises=True,
        )
    return read_manifest(checkpoint)


def _warn_of(skipped: Sequence[DamagedCheckpoint], found: Path) -> None:
    for damage in skipped:
        warnings.warn(
            f"Skipped a damaged checkpoint, which stays where it is: {damage}. The newest whole "
            f"checkpoint is {found}",
            stacklevel=3,
        )


def _none_whole(path: Path, damages: Sequence[DamagedCheckpoint]) -> CheckpointError:
    reasons = "; ".join(map(str, damages))
    return CheckpointError(
        f"No checkpoint in {path} is whole: {reasons}. Restore one of them, or start again in "
        "another folder",
        advises=True,
    )


def _states_for(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], saved: list[Any], found: Path
) -> list[Any]:
    states = states_for(model, optimizers, saved)
    if states is None:
        raise CheckpointError(
            f"{found} was saved with {len(saved)} optimizers, but {len(optimizers)} are to be "
            "loaded, and they have other parameters"
        )
    return states


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
    """Read the extra data in this process, without communication."""
    reader = Reader(found, manifest)
    extra: dict[str, Any] = decode(manifest.content["extra"], reader.read_full)
    return extra
