"""Writes and reads the tensors of torch.distributed.checkpoint as raw bytes, without pickle."""

from __future__ import annotations

import ctypes
import math
import os
import zlib
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    StorageReader,
    StorageWriter,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from .errors import CheckpointError, DamagedCheckpoint
from .manifest import Chunk, Extent, Manifest, Table, tables
from .names import data_name
from .regular_files import opened


class Writer(StorageWriter):
    """Writes this rank's chunks one after another into its own file in ``folder``.

    When every rank has written its file, the coordinator rank calls ``finished`` with the tables of
    all tensors.
    """

    def __init__(
        self, folder: Path, rank: int, finished: Callable[[dict[str, Table]], None]
    ) -> None:
        self._folder = folder
        self._file = data_name(rank)
        self._finished = finished

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        if plan.items:
            with open(self._folder / self._file, "wb") as file:
                for item in plan.items:
                    tensor = planner.resolve_data(item)
                    assert isinstance(tensor, torch.Tensor)
                    tensor = as_in_memory(tensor)
                    data = _bytes_of(tensor)
                    extent = Extent(self._file, file.tell(), len(data), zlib.crc32(data))
                    file.write(data)
                    results.append(WriteResult(item.index, len(data), extent))
                file.flush()
                os.fsync(file.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        extents = {r.index: r.storage_data for written in results for r in written}
        self._finished(tables(metadata, extents))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


class Reader(StorageReader):
    """Reads chunks of a checkpoint, and compares each with its checksum."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._tensors = manifest.tensors
        self._metadata = manifest.metadata()

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        chunks: dict[MetadataIndex, Chunk] = self._metadata.storage_data

        def place(item: ReadItem) -> tuple[str, int, str]:
            extent = chunks[item.storage_index].extent
            return extent.file, extent.offset, item.storage_index.fqn

        for (_, _, name), items in groupby(sorted(plan.items, key=place), key=place):
            chunk: torch.Tensor | None = None
            for item in items:
                if chunk is None:
                    chunk = self._read(name, chunks[item.storage_index])
                source = chunk
                for dim, (start, length) in enumerate(
                    zip(item.storage_offsets, item.lengths, strict=True)
                ):
                    source = source.narrow(dim, start, length)
                target = planner.resolve_tensor(item).detach()
                target.copy_(source)
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def read_full(self, name: str) -> torch.Tensor:
        """Read one full tensor in this process, without communication."""
        table = self._tensors[name]
        full = empty(self._folder, name, table)
        for chunk in table.chunks:
            part = full
            for dim, (start, size) in enumerate(zip(chunk.starts, chunk.sizes, strict=True)):
                part = part.narrow(dim, start, size)
            part.copy_(self._read(name, chunk))
        return full

    def _read(self, name: str, chunk: Chunk) -> torch.Tensor:
        dtype = self._tensors[name].dtype
        data = _read_extent(self._folder, chunk.extent, name)
        if not data:
            return torch.empty(chunk.sizes, dtype=dtype)
        return torch.frombuffer(data, dtype=dtype).view(chunk.sizes)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


def empty(checkpoint: Path, name: str, table: Table) -> torch.Tensor:
    """Allocate a full tensor in host memory; raise CheckpointError if that is not possible."""
    try:
        return torch.empty(table.shape, dtype=table.dtype)
    except (RuntimeError, MemoryError):
        nbytes = math.prod(table.shape) * table.dtype.itemsize
        what = f"{name} of shape {table.shape}"
        raise _no_memory(checkpoint, what, nbytes) from None


def _no_memory(path: Path, what: str, nbytes: int) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be loaded: {what} needs {nbytes / 2**30:.1f} GiB of host memory, which "
        "cannot be allocated on this machine"
    )


def _read_extent(folder: Path, extent: Extent, name: str) -> bytearray:
    """Read a chunk's bytes; raise DamagedCheckpoint, with the file's name, if they changed."""
    path = folder / extent.file
    end = extent.offset + extent.nbytes
    try:
        with opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            # Never allocate more than the file's size, whatever the manifest says.
            data = bytearray(extent.nbytes if end <= size else 0)
            file.seek(extent.offset)
            count = file.readinto(data)  # type: ignore[attr-defined]
    except OSError as error:
        raise DamagedCheckpoint(
            f"{path}, which contains a part of {name}, cannot be read: {error}"
        ) from None
    except MemoryError:
        raise _no_memory(path, f"a part of {name}", extent.nbytes) from None
    if count != extent.nbytes:
        raise DamagedCheckpoint(
            f"{path} is damaged: it ends after {size} bytes, but a part of {name} is expected at "
            f"bytes {extent.offset} to {end}"
        )
    if zlib.crc32(data) != extent.crc32:
        raise DamagedCheckpoint(
            f"{path} is damaged: bytes {extent.offset} to {end}, a part of {name}, do not match "
            "their checksum"
        )
    return data


def as_in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous host tensor of the same values, with conjugation and negation applied."""
    return tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()


def _bytes_of(tensor: torch.Tensor) -> Any:
    """The memory of a contiguous host tensor, not copied: valid as long as the tensor exists."""
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return b""
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B")
