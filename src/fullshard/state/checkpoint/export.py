"""``fullshard.export_safetensors``: writes a model's parameters for other tools."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import torch
from torch import nn

from ...api import FullStateDictConfig, StateDictType
from ..model.methods import StateDicts
from ..model.sharded_tensors import is_sharded
from .group import CheckpointGroup
from .saving import wait_for_running_save
from .storage import as_in_memory

#: The usual maximal size of safetensors files.
FILE_BYTES = 5_000_000_000
_INDEX = "model.safetensors.index.json"
#: The names of the files of an export.
_EXPORTED = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|" + re.escape(_INDEX))


def export_safetensors(
    path: str | os.PathLike[str], model: nn.Module, *, file_bytes: int = FILE_BYTES
) -> list[Path]:
    """Write the full parameters and buffers of ``model`` as safetensors; return the files.

    All ranks call this; the first one writes, from host memory. ``path`` is a file whose name ends
    in ``.safetensors``, or a folder. In a folder this writes ``model.safetensors``, or several
    files with an index if the model has more than ``file_bytes``, and removes an earlier export.
    It requires the ``safetensors`` package, which ``fullshard[safetensors]`` installs.

    >>> fullshard.export_safetensors("exported", model)
    [PosixPath('exported/model.safetensors')]
    """
    wait_for_running_save()
    ranks = CheckpointGroup("export a checkpoint", model)
    ranks.on_all_ranks(_require_package)
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with StateDicts.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        state = model.state_dict()
    return ranks.on_first_rank(lambda: _write(Path(path), _plain(state), file_bytes))


def _require_package() -> None:
    try:
        import safetensors.torch  # noqa: F401
    except ImportError:
        raise ValueError(
            "export_safetensors requires the safetensors package. Install fullshard[safetensors]"
        ) from None


def _plain(state: dict[str, object]) -> dict[str, torch.Tensor]:
    """Tensors that share no memory, as the format requires; shared parameters are copied."""
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"{name} is a {type(value).__name__}, and safetensors files contain only tensors. "
                "Remove it from the model's state dict (get_extra_state)"
            )
        if hasattr(value, "__tensor_flatten__") and not is_sharded(value):
            raise TypeError(
                f"{name} is of class {type(value).__name__}, which wraps several tensors, and "
                "safetensors files contain only plain ones. Save the full state dict with "
                "torch.save, or a checkpoint with fullshard.save"
            )
        tensor = as_in_memory(value)
        storage = tensor.untyped_storage()
        shares = storage.data_ptr() in seen or storage.nbytes() != tensor.nbytes
        seen.add(storage.data_ptr())
        tensors[name] = tensor.clone() if shares and tensor.numel() else tensor
    return tensors


def _write(path: Path, tensors: dict[str, torch.Tensor], file_bytes: int) -> list[Path]:
    if path.suffix == ".safetensors":
        path.parent.mkdir(parents=True, exist_ok=True)
        return [_write_file(path, tensors)]
    path.mkdir(parents=True, exist_ok=True)
    parts = _split(tensors, file_bytes)
    if len(parts) == 1:
        files = [_write_file(path / "model.safetensors", tensors)]
        _remove_others(path, {file.name for file in files})
        return files
    names = [f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors" for i in range(len(parts))]
    files = [_write_file(path / name, part) for name, part in zip(names, parts, strict=True)]
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {key: name for name, part in zip(names, parts, strict=True) for key in part},
    }
    beside = path / f".{_INDEX}.new"
    beside.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    os.replace(beside, path / _INDEX)
    _remove_others(path, {_INDEX, *names})
    return files


def _remove_others(folder: Path, written: set[str]) -> None:
    """Remove the files of an earlier export, which readers might prefer to the new ones."""
    for entry in folder.iterdir():
        if _EXPORTED.fullmatch(entry.name) and entry.name not in written:
            entry.unlink()


def _write_file(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    from safetensors.torch import save_file

    beside = path.with_name(f".{path.name}.new")
    save_file(tensors, beside, metadata={"format": "pt"})
    os.replace(beside, path)
    return path


def _split(tensors: dict[str, torch.Tensor], limit: int) -> list[dict[str, torch.Tensor]]:
    parts: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if parts[-1] and size + tensor.nbytes > limit:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += tensor.nbytes
    return parts
