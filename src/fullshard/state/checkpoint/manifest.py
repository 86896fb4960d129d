"""What a checkpoint holds and where: its manifest, written into one file with its own checksum.

It is read in ``inspection.py``.
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

from .checksummed import write_sealed
from .names import MANIFEST
from .plain import dtype_name


@dataclasses.dataclass(frozen=True)
class Extent:
    """Where a chunk's bytes lie, and their checksum."""

    file: str
    offset: int
    nbytes: int
    crc32: int


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A box of a tensor: its first element's place, its sizes, and its bytes."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    extent: Extent


@dataclasses.dataclass(frozen=True)
class Table:
    """One tensor: what it is, and the chunks that make it up."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint but the bytes of its tensors.

    ``content`` is plain data in which tensors stand by name, see ``plain.py``.
    """

    step: int
    ranks: int
    content: dict[str, Any]
    tensors: dict[str, Table]

    def metadata(self) -> Metadata:
        """The same for torch.distributed.checkpoint."""
        described: dict[str, Any] = {}
        found: dict[MetadataIndex, Chunk] = {}
        for name, table in self.tensors.items():
            chunks = []
            for chunk in table.chunks:
                starts = torch.Size(chunk.starts)
                chunks.append(ChunkStorageMetadata(starts, torch.Size(chunk.sizes)))
                place = MetadataIndex(name, starts)
                if place not in found or chunk.extent.nbytes:
                    # Several may begin at one place, of which one at most has elements.
                    found[place] = chunk
            properties = TensorProperties(dtype=table.dtype)
            described[name] = TensorStorageMetadata(properties, torch.Size(table.shape), chunks)
        return Metadata(described, storage_data=found)


def tables(metadata: Metadata, extents: dict[MetadataIndex, Extent]) -> dict[str, Table]:
    """What torch.distributed.checkpoint planned and what was then written, per tensor."""
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
    """Write the manifest and see it safely on the disk."""
    described = {name: _table_to_json(table) for name, table in manifest.tensors.items()}
    write_sealed(folder / MANIFEST, {**vars(manifest), "tensors": described})


def _table_to_json(table: Table) -> dict[str, Any]:
    chunks = [
        [chunk.starts, chunk.sizes, *dataclasses.astuple(chunk.extent)] for chunk in table.chunks
    ]
    return {"dtype": dtype_name(table.dtype), "shape": table.shape, "chunks": chunks}
