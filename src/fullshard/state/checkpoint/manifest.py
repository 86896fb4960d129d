"""A checkpoint's manifest: its tensors and where their chunks are stored, and all other data.

``inspection.py`` reads it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from .checksummed import write_checksummed
from .names import MANIFEST
from .plain import dtype_name


@dataclasses.dataclass(frozen=True)
class Extent:
    """The location of a chunk's bytes in a file, and their checksum."""

    file: str
    offset: int
    nbytes: int
    crc32: int


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A rectangular part of a tensor: its first index, its sizes and its bytes."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    extent: Extent


@dataclasses.dataclass(frozen=True)
class Table:
    """One tensor: its dtype and shape, and the chunks that it consists of."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Everything in a checkpoint except the bytes of its tensors.

    ``content`` is plain data that refers to tensors by name: see ``plain.py``.
    """

    step: int
    ranks: int
    content: dict[str, Any]
    tensors: dict[str, Table]

    def metadata(self) -> Metadata:
        """The metadata of the tensors for torch.distributed.checkpoint."""
        described: dict[str, Any] = {}
        found: dict[MetadataIndex, Chunk] = {}
        for name, table in self.tensors.items():
            chunks = []
            for chunk in table.chunks:
                starts = torch.Size(chunk.starts)
                chunks.append(ChunkStorageMetadata(starts, torch.Size(chunk.sizes)))
                place = MetadataIndex(name, starts)
                if place not in found or chunk.extent.nbytes:
                    # Several chunks may start at the same index, but only one of them has elements.
                    found[place] = chunk
            properties = TensorProperties(dtype=table.dtype)
            described[name] = TensorStorageMetadata(properties, torch.Size(table.shape), chunks)
        return Metadata(described, storage_data=found)


def tables(metadata: Metadata, extents: dict[MetadataIndex, Extent]) -> dict[str, Table]:
    """Each tensor's table, from the plan of torch.distributed.checkpoint and what was written."""
    found: dict[str, Table] = {}
    for name, described in metadata.state_dict_metadata.items():
        assert isinstance(described, TensorStorageMetadata)
        chunks = [
            Chunk(tuple(c.offsets), tuple(c.sizes), extents[MetadataIndex(name, c.offsets)])
            for c in described.chunks
        ]
        dtype = described.properties.dtype
        found[name] = Table(dtype, tuple(described.size), tuple(chunks))
    return found


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, and sync it to disk."""
    described = {name: _table_to_json(table) for name, table in manifest.tensors.items()}
    write_checksummed(folder / MANIFEST, {**vars(manifest), "tensors": described})


def _table_to_json(table: Table) -> dict[str, Any]:
    chunks = [
        [chunk.starts, chunk.sizes, *dataclasses.astuple(chunk.extent)] for chunk in table.chunks
    ]
    return {"dtype": dtype_name(table.dtype), "shape": table.shape, "chunks": chunks}
