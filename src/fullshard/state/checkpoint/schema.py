"""Validates the content of a checkpoint's JSON files; works on values alone and opens no file.

A checksum shows that a file is as it was written, not that its content is valid. After this
validation no further checks are needed: every key is there, every value has its type, every tensor
is covered by its chunks exactly once, and no two chunks share bytes, so that loading a checkpoint
never takes more memory than its files take on disk.
"""

from __future__ import annotations

import itertools
import math
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from .manifest import Chunk, Extent, Manifest, Table
from .names import is_data_name, step_and_turn
from .plain import DEEPEST, dtype_named

#: The limit of sizes and byte offsets in torch.
_MOST = 2**62
#: dtypes whose values torch cannot copy.
_NOT_COPIED = re.compile(r"q.*|bit|u?int[1-7]")
_NOT_FINITE = ("inf", "-inf", "nan")


class Malformed(ValueError):
    """A value is not valid; the message says where it is, what was expected, and what it is."""


def index_from(body: Any) -> list[str]:
    """Validate an index; return the names of its checkpoints."""
    names = _list(body, "the index")
    before: set[str] = set()
    for place, name in enumerate(names):
        if not isinstance(name, str) or step_and_turn(name) is None:
            _refuse(f"entry {place}", "the name of a checkpoint", name)
        if name in before:
            _refuse(f"entry {place}", "a name that is not listed twice", name)
        before.add(name)
    return names


def manifest_from(body: Any) -> Manifest:
    """Validate a manifest; return what :func:`~.manifest.write_manifest` was given."""
    parts = _with_keys(body, "the manifest", ("step", "ranks", "content", "tensors"))
    tensors = {
        name: _table(table, name) for name, table in _dict(parts["tensors"], "tensors").items()
    }
    _check_bytes_are_apart(tensors)
    content = _with_keys(parts["content"], "content", ("model", "optimizers", "extra"))
    _check_content(content, tensors)
    step = parts["step"]
    if type(step) is not int or step < 0:
        _refuse("step", "a whole number of at least 0", step)
    return Manifest(step, _number(parts["ranks"], "ranks"), content, tensors)


def bytes_needed(manifest: Manifest) -> dict[str, int]:
    """The minimal size of each data file."""
    needed: dict[str, int] = {}
    for chunk in _chunks(manifest.tensors):
        extent = chunk.extent
        end = extent.offset + extent.nbytes
        needed[extent.file] = max(end, needed.get(extent.file, 0))
    return needed


# -- tensors --------------------------------------------------------------------------------------


def _table(data: Any, name: str) -> Table:
    parts = _with_keys(data, name, ("dtype", "shape", "chunks"))
    dtype = _dtype(parts["dtype"], f"the dtype of {name}")
    if _NOT_COPIED.fullmatch(parts["dtype"]):
        _refuse(f"the dtype of {name}", "one whose values can be copied", parts["dtype"])
    shape = _numbers(parts["shape"], f"the shape of {name}")
    # torch computes strides from the sizes, also of tensors without elements.
    if math.prod(max(1, size) for size in shape) >= _MOST:
        _refuse(f"the shape of {name}", f"fewer than {_MOST} elements", shape)
    chunks = tuple(_chunk(chunk, name) for chunk in _list(parts["chunks"], f"chunks of {name}"))
    table = Table(dtype, shape, chunks)
    _check_cover(name, table)
    return table


def _chunk(data: Any, name: str) -> Chunk:
    where = f"a chunk of {name}"
    if not isinstance(data, list) or len(data) != 6:
        _refuse(where, "[starts, sizes, file, offset, bytes, checksum]", data)
    starts, sizes, file, offset, nbytes, crc32 = data
    if not isinstance(file, str) or not is_data_name(file):
        _refuse(f"the file of {where}", "one such as rank-00000.bin", file)
    extent = Extent(
        file,
        _number(offset, f"the offset of {where}"),
        _number(nbytes, f"the bytes of {where}"),
        _number(crc32, f"the checksum of {where}"),
    )
    return Chunk(
        _numbers(starts, f"starts of {where}"), _numbers(sizes, f"sizes of {where}"), extent
    )


def _check_cover(name: str, table: Table) -> None:
    """Refuse chunks that do not cover the tensor, which would leave uninitialised memory in it."""
    for chunk in table.chunks:
        if not len(chunk.starts) == len(chunk.sizes) == len(table.shape) or any(
            start + size > full
            for start, size, full in zip(chunk.starts, chunk.sizes, table.shape, strict=True)
        ):
            _refuse(f"a chunk of {name}", f"a part of its shape {table.shape}", chunk)
        if chunk.extent.nbytes != math.prod(chunk.sizes) * table.dtype.itemsize:
            _refuse(f"a chunk of {name}", "the number of bytes of its elements", chunk)
    filled = [chunk for chunk in table.chunks if math.prod(chunk.sizes)]
    if sum(math.prod(chunk.sizes) for chunk in filled) != math.prod(table.shape):
        raise Malformed(f"the chunks of {name} do not cover its shape {table.shape}")
    if table.shape and _any_overlap(filled, len(table.shape)):
        raise Malformed(f"chunks of {name} overlap, and others are missing")


def _any_overlap(chunks: Sequence[Chunk], dims: int) -> bool:
    """True if two chunks have an element in common.

    Compares only chunks that overlap in the dimension along which most chunks are separate.
    """
    dim = max(range(dims), key=lambda dim: len({chunk.starts[dim] for chunk in chunks}))
    near: list[Chunk] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.starts[dim]):
        near = [o for o in near if o.starts[dim] + o.sizes[dim] > chunk.starts[dim]]
        if any(_overlap(chunk, other) for other in near):
            return True
        near.append(chunk)
    return False


def _overlap(one: Chunk, other: Chunk) -> bool:
    sides = zip(one.starts, one.sizes, other.starts, other.sizes, strict=True)
    return all(a < b + b_size and b < a + a_size for a, a_size, b, b_size in sides)


def _check_bytes_are_apart(tensors: Mapping[str, Table]) -> None:
    extents = sorted(
        (e.file, e.offset, e.nbytes) for e in (c.extent for c in _chunks(tensors)) if e.nbytes
    )
    for (file, offset, nbytes), (next_file, next_offset, _) in itertools.pairwise(extents):
        if file == next_file and offset + nbytes > next_offset:
            raise Malformed(f"two chunks share bytes of {file}, at {next_offset}")


def _chunks(tensors: Mapping[str, Table]) -> Iterable[Chunk]:
    return itertools.chain.from_iterable(table.chunks for table in tensors.values())


# -- content: plain data that refers to tensors by name -------------------------------------------


def _check_content(content: Mapping[str, Any], tensors: Mapping[str, Table]) -> None:
    _check_names(content["model"], "/model")
    for place, optimizer in enumerate(_list(content["optimizers"], "/optimizers")):
        where = f"/optimizers/{place}"
        if "state" not in _dict(optimizer, where):
            _refuse(where, "a dict with the key 'state'", optimizer)
        _check_names(optimizer["state"], f"{where}/state")
    extra = _dict(content["extra"], "/extra")
    if len(extra) == 1 and next(iter(extra)).startswith("$") and "$dict" not in extra:
        _refuse("/extra", "a dict", extra)
    plain = _Plain(tensors)
    for name, part in content.items():
        plain.check(part, f"/{name}", 0)


def _check_names(data: Any, where: str) -> None:
    """Refuse everything but a dict, in either of its encodings, with names as keys."""
    if set(_dict(data, where)) == {"$dict"}:
        for pair in _list(data["$dict"], where):
            if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], str):
                _refuse(where, "pairs of a name and a value", pair)
    elif any(key.startswith("$") for key in data):
        _refuse(where, "a dict with names as keys", data)


class _Plain:
    """Validates data for :func:`~.plain.decode`."""

    def __init__(self, tensors: Mapping[str, Table]) -> None:
        self._tensors = tensors
        self._used: set[str] = set()
        self._special: dict[str, Callable[[Any, str, int], None]] = {
            "$tensor": self._check_tensor,
            "$tuple": self._check_items,
            "$dict": self._check_pairs,
            "$float": _check_float,
            "$complex": _check_complex,
            "$bytes": _check_bytes,
            "$dtype": _check_dtype,
        }

    def check(self, data: Any, where: str, depth: int) -> None:
        if depth > DEEPEST:
            _refuse(where, f"at most {DEEPEST} levels", data)
        if isinstance(data, list):
            self._check_items(data, where, depth)
        elif isinstance(data, dict):
            if any(key.startswith("$") for key in data):
                self._check_special(data, where, depth)
            else:
                for key, item in data.items():
                    self.check(item, f"{where}/{key}", depth + 1)

    def _check_special(self, data: dict[str, Any], where: str, depth: int) -> None:
        ((kind, content), *others) = data.items()
        if others or kind not in self._special:
            _refuse(where, f"one of {', '.join(self._special)} alone", data)
        self._special[kind](content, where, depth)

    def _check_items(self, content: Any, where: str, depth: int) -> None:
        for place, item in enumerate(_list(content, where)):
            self.check(item, f"{where}/{place}", depth + 1)

    def _check_pairs(self, content: Any, where: str, depth: int) -> None:
        for pair in _list(content, where):
            if not isinstance(pair, list) or len(pair) != 2:
                _refuse(where, "pairs of a key and a value", pair)
            key, item = pair
            self.check(key, f"a key of {where}", depth + 1)
            if not _is_hashable(key):
                _refuse(f"a key of {where}", "a hashable value", key)
            self.check(item, where, depth + 1)

    def _check_tensor(self, content: Any, where: str, depth: int) -> None:
        if not isinstance(content, str) or content not in self._tensors:
            _refuse(where, "the name of one of the tensors", content)
        if content in self._used:
            _refuse(where, "a tensor that is referred to once", content)
        self._used.add(content)


def _is_hashable(key: Any) -> bool:
    """True for a valid encoded key that is not a list or dict, nor a tuple that contains one."""
    if isinstance(key, dict) and "$tuple" in key:
        return all(map(_is_hashable, key["$tuple"]))
    return not isinstance(key, list) and not (
        isinstance(key, dict) and ("$dict" in key or not any(k.startswith("$") for k in key))
    )


def _check_float(content: Any, where: str, depth: int) -> None:
    if content not in _NOT_FINITE:
        _refuse(where, f"one of {', '.join(_NOT_FINITE)}", content)


def _check_complex(content: Any, where: str, depth: int) -> None:
    parts = _list(content, where)
    if len(parts) != 2 or not all(isinstance(part, float) for part in parts):
        _refuse(where, "two floating-point numbers", content)


def _check_bytes(content: Any, where: str, depth: int) -> None:
    if not isinstance(content, str) or not re.fullmatch(r"(?:[0-9a-f]{2})*", content):
        _refuse(where, "pairs of hexadecimal digits", content)


def _check_dtype(content: Any, where: str, depth: int) -> None:
    _dtype(content, where)


# -- types ----------------------------------------------------------------------------------------


def _dtype(name: Any, where: str) -> torch.dtype:
    try:
        return dtype_named(name)
    except ValueError:
        _refuse(where, "a dtype of this version of torch", name)


def _with_keys(data: Any, where: str, keys: tuple[str, ...]) -> dict[str, Any]:
    if set(_dict(data, where)) != set(keys):
        _refuse(where, f"a dict with the keys {', '.join(keys)}", data)
    return dict(data)


def _dict(data: Any, where: str) -> dict[str, Any]:
    return data if isinstance(data, dict) else _refuse(where, "a dict", data)


def _list(data: Any, where: str) -> list[Any]:
    return data if isinstance(data, list) else _refuse(where, "a list", data)


def _numbers(data: Any, where: str) -> tuple[int, ...]:
    return tuple(_number(number, where) for number in _list(data, where))


def _number(data: Any, where: str) -> int:
    """Validate a non-negative integer; ``True`` is not one."""
    if type(data) is not int or not 0 <= data < _MOST:
        _refuse(where, "a whole number of at least 0", data)
    return data


def _refuse(where: str, expected: str, given: Any) -> NoReturn:
    raise Malformed(f"{where}: expected {expected}, but it is {reprlib.repr(given)}")
