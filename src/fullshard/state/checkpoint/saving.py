"""``fullshard.save``: writes a checkpoint that is either complete or not there."""

from __future__ import annotations

import contextlib
import operator
import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from ...engine.params.tensor_parallel import is_distributed, local_part
from ..model.sharded_tensors import is_sharded
from . import folder as folders
from .content import agree_to, explaining_failures, optimizers_in, state_of
from .errors import CheckpointError
from .group import CheckpointGroup, explain
from .manifest import Manifest, Table, write_manifest
from .plain import Tensors, encode
from .storage import Writer

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


class SaveHandle:
    """A checkpoint that is being written, possibly in the background."""

    def __init__(self, work: Callable[[], Path], asynchronous: bool) -> None:
        self._work = work
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if asynchronous:
            self._thread = threading.Thread(target=self._run, name="fullshard.save")
            self._thread.start()
        else:
            self._run()

    def _run(self) -> None:
        try:
            self._path = self._work()
        except BaseException as error:
            self._error = error
            if self._thread is not None:
                warnings.warn(f"Saving in the background failed: {error}", stacklevel=1)
        finally:
            del self._work

    def done(self) -> bool:
        """Return True when the checkpoint is complete, or saving has failed."""
        return self._thread is None or not self._thread.is_alive()

    def join(self) -> None:
        """Wait until the checkpoint is complete, or saving has failed."""
        if self._thread is not None:
            self._thread.join()

    def wait(self) -> Path:
        """Wait for the checkpoint and return its folder; raise the error if saving failed."""
        self.join()
        if self._error is not None:
            raise self._error
        assert self._path is not None
        return self._path


#: The save that may still be running. There is one at a time, so that checkpoints keep order.
_running: SaveHandle | None = None


def wait_for_running_save() -> None:
    """Wait for a save in the background, because all saves use the same process group.

    Its error is not raised here, but by its handle and by the next save.
    """
    if _running is not None:
        _running.join()


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    step: int = 0,
    extra: Mapping[str, Any] | None = None,
    keep_last: int | None = None,
    asynchronous: bool = False,
) -> SaveHandle:
    """Save a checkpoint of ``model`` and ``optimizer`` in the folder ``path``.

    All ranks call this, with a folder that all of them can reach. The folder contains one
    checkpoint per ``step``; :func:`load` loads the one that was saved last. Every rank writes its
    own shards. If a process dies at any moment, the previous checkpoint stays complete.

    ``optimizer`` may be a sequence of optimizers. ``extra`` is plain data that may contain tensors
    (numbers, strings, lists, tuples, dicts), such as a learning-rate scheduler's state dict; that
    of the first rank is saved. ``keep_last=n`` removes all but the last n checkpoints. With
    ``asynchronous`` the state is copied to host memory before the call returns, and is written in
    the background. ``wait()`` of the returned handle, or the next save, raises its error.

    >>> handle = fullshard.save("checkpoints", model, optimizer, step=100)
    """
    global _running
    try:
        step = operator.index(step)
    except TypeError:
        raise TypeError(
            f"step expects a whole number, but got {step!r} of type {type(step).__name__}"
        ) from None
    if step < 0:
        raise ValueError(f"step expects a number of at least 0, but got {step}")
    if keep_last is not None and keep_last < 1:
        raise ValueError(f"keep_last expects at least 1, or None to keep all, but got {keep_last}")
    previous, _running = _running, None
    if previous is not None:
        previous.wait()
    agree_to("save a checkpoint", model)
    ranks = CheckpointGroup("save a checkpoint", model)
    tensors: Tensors = {}

    def collect() -> Any:
        state = state_of(model, optimizer)
        given = _checked(extra) if ranks.rank == 0 else {}
        return {
            **encode(state, "", tensors),
            "extra": encode(given, "/extra", tensors, may_be_sharded=False),
        }

    with explaining_failures(model):
        content = ranks.on_all_ranks(collect)
    if ranks.rank != 0:
        # Unsharded values, such as running statistics, may differ between ranks: save the first's.
        tensors = {name: value for name, value in tensors.items() if is_sharded(value)}
    if asynchronous:
        _detach_from_training(tensors, model, optimizers_in(optimizer))

    # Resolved now: the program may change its working folder before the background save ends.
    folder = Path(path).absolute()

    def write() -> Path:
        manifest = Manifest(step, ranks.size, content, {})
        with explanation:
            partial = ranks.on_first_rank(lambda: folders.begin(folder, step))
            return _write(partial, ranks, manifest, tensors, keep_last)

    # Made now: the thread that writes does not hold the model.
    explanation = contextlib.nullcontext() if asynchronous else explaining_failures(model)
    if asynchronous:
        ranks.work_in_background()
    handle = SaveHandle(write, asynchronous)
    if asynchronous:
        _running = handle
    else:
        handle.wait()
    return handle


def _checked(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    if extra is not None and not isinstance(extra, Mapping):
        raise TypeError(f"extra expects a dict, but got {extra!r} of type {type(extra).__name__}")
    return dict(extra or {})


def _write(
    partial: Path,
    ranks: CheckpointGroup,
    manifest: Manifest,
    tensors: Tensors,
    keep_last: int | None,
) -> Path:
    final = folders.final_place(partial)

    def complete(tables: dict[str, Table]) -> None:
        write_manifest(partial, Manifest(manifest.step, manifest.ranks, manifest.content, tables))
        folders.commit(partial, keep_last)

    writer = Writer(partial, ranks.rank, complete)
    try:
        with ranks.checkpointing():
            dcp.save(
                tensors,
                storage_writer=writer,
                planner=dcp.DefaultSavePlanner(flatten_state_dict=False),
                process_group=ranks.group,
                no_dist=ranks.group is None,
            )
    except CheckpointException as failure:
        if ranks.rank == 0:
            folders.discard(partial)
        error = explain(failure)
        raise CheckpointError(f"The checkpoint {final} could not be written. {error}") from failure
    return final


def _detach_from_training(
    tensors: Tensors, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Copy all tensors that share memory with the model; the units' are copies already.

    DTensors that no unit manages share memory with the model if it is in host memory, as those
    that ``fully_shard`` made do, and the state of their optimizers.
    """
    states = (state for each in optimizers for state in each.state.values())
    values = (value for state in states for value in state.values())
    found = (value for value in values if isinstance(value, torch.Tensor))
    in_use = {_memory_of(tensor) for tensor in (*model.parameters(), *model.buffers(), *found)}
    for name, value in tensors.items():
        if is_distributed(value):
            if _memory_of(value) in in_use:
                tensors[name] = value.detach().clone()
        elif not is_sharded(value):
            tensors[name] = value.detach().to("cpu", copy=True)


def _memory_of(tensor: torch.Tensor) -> int:
    return local_part(tensor).untyped_storage().data_ptr()
