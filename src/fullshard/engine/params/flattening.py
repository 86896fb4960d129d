"""Copies original parameters into one flat buffer, or into a rank's shard of it."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from ..comm.streams import streams_for
from .layout import Layout, Piece

_DTYPE = operator.attrgetter("dtype")
_REQUIRES_GRAD = operator.attrgetter("requires_grad")


def check_uniform(params: Sequence[nn.Parameter], names: Sequence[str], original: bool) -> None:
    """Refuse parameters that cannot lie in one buffer; ``original``: with ``use_orig_params``."""
    if len(set(map(_DTYPE, params))) > 1:
        examples: dict[torch.dtype, str] = {}
        for parameter, name in zip(params, names, strict=True):
            examples.setdefault(parameter.dtype, repr(name))
        raise ValueError(
            f"Must flatten tensors with uniform dtype but got {' and '.join(map(str, examples))} "
            f"({', '.join(examples.values())}). Pass use_orig_params=True, which gives the "
            "parameters of each dtype a flat buffer of their own, or convert them to one dtype"
        )
    if original:
        return
    if len(set(map(_REQUIRES_GRAD, params))) > 1:
        raise ValueError(
            "Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`: "
            "wrap the frozen parameters on their own, or pass use_orig_params=True"
        )
    if not params[0].dtype.is_floating_point and not params[0].dtype.is_complex:
        raise ValueError(
            f"Cannot flatten integer dtype tensors: {names[0]!r} is {params[0].dtype}. Pass "
            "use_orig_params=True, or leave it out (ignored_states=)"
        )


def flat_strides(parameters: Iterable[torch.Tensor]) -> list[tuple[int, ...]]:
    """The strides of views of flattened parameters."""
    return [p.stride() if p.is_contiguous() else flat_stride(p) for p in parameters]


def flat_stride(parameter: torch.Tensor) -> tuple[int, ...]:
    """The stride of the view of a flattened parameter; channels_last is kept."""
    for dimensions, memory_format in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if (
            parameter.dim() == dimensions
            and parameter.is_contiguous(memory_format=memory_format)
            and not parameter.is_contiguous()
        ):
            return parameter.stride()
    if parameter.is_contiguous():
        return parameter.stride()
    return torch.empty(parameter.shape, device="meta").stride()


def flattened(params: Sequence[nn.Parameter], layout: Layout) -> torch.Tensor:
    """The whole buffer, filled from the original parameters."""
    first = params[0]
    with torch.no_grad():
        flat = torch.zeros(layout.padded_numel, dtype=first.dtype, device=first.device)
        for slot, parameter in zip(layout.slots, params, strict=True):
            flat.as_strided(slot.shape, slot.stride, slot.offset).copy_(parameter)
    return flat


def cut_own_shard(
    params: Sequence[nn.Parameter], layout: Layout, pieces: Sequence[Piece]
) -> torch.Tensor:
    """A rank's shard, filled directly: building the whole buffer first would double the memory."""
    first = params[0]
    shard = streams_for(first.device).lasting_zeros(layout.shard_numel, first.dtype)
    for slot, piece, parameter in zip(layout.slots, pieces, params, strict=True):
        if piece.numel:
            dense = parameter.detach()
            if dense.stride() != slot.stride:
                dense = dense.contiguous()
            elements = dense.as_strided((slot.numel,), (1,), dense.storage_offset())
            mine = elements[piece.start : piece.start + piece.numel]
            shard[piece.offset : piece.offset + piece.numel] = mine
    return shard


def cuts(pieces: Sequence[Piece], shard_numel: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Sizes that cut a shard at its pieces' ends, and which part belongs to which parameter."""
    sizes: list[int] = []
    positions: list[tuple[int, int]] = []
    position = 0
    for index, piece in enumerate(pieces):
        if piece.in_shard:
            if piece.offset > position:
                sizes.append(piece.offset - position)
            positions.append((index, len(sizes)))
            sizes.append(piece.numel)
            position = piece.offset + piece.numel
    if shard_numel > position:
        sizes.append(shard_numel - position)
    return sizes, positions
