"""What the engine has process groups do."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from tests.engine.traffic import counted_traffic

from fullshard.engine.comm import gloo
from fullshard.engine.comm.collectives import group_for
from fullshard.testing import backend, device, ranks

#: Bytes of one rank's piece of each tensor: below and above what gloo may be given in copies.
SMALL, LARGE = 480, 48_000
DTYPES = [torch.float64, torch.bfloat16, torch.complex64, torch.bool]


def _check_gather(
    nbytes: int, *, at_a_time: int, dtypes: Sequence[torch.dtype] = tuple(DTYPES)
) -> None:
    """Gather tensors of all dtypes, several times before the first one is waited for."""
    group = group_for(dist.group.WORLD)
    pieces, outputs = [], []
    for turn in range(at_a_time):
        numbers = [nbytes // dtype.itemsize for dtype in dtypes]
        pieces.append(
            [
                torch.full([n], group.rank + turn, device=device()).to(dtype)
                for n, dtype in zip(numbers, dtypes, strict=True)
            ]
        )
        outputs.append([piece.new_empty(group.size * len(piece)) for piece in pieces[-1]])

    started = [
        group.gather(filled, given, "a unit") for filled, given in zip(outputs, pieces, strict=True)
    ]
    for operations in started:
        group.wait(*operations)

    for turn, filled in enumerate(outputs):
        for output in filled:
            each = output.view(group.size, -1).cpu()
            expected = torch.arange(turn, group.size + turn).to(output.dtype)
            assert torch.equal(each, expected.unsqueeze(1).expand_as(each)), (turn, output.dtype)


@pytest.mark.parametrize("name", [None, "cpu:gloo", "gloo"])
@ranks(2)
def test_gloo_is_recognised_however_the_process_group_was_asked_for(name: str | None) -> None:
    dist.destroy_process_group()
    dist.init_process_group(name)

    assert isinstance(group_for(dist.group.WORLD, torch.device("cpu")), gloo.GlooGroup)
    dist.barrier()


@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
@ranks(2)
def test_tensors_of_all_dtypes_are_gathered_several_times_at_once(nbytes: int) -> None:
    _check_gather(nbytes, at_a_time=8)


@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
@ranks(5)
def test_tensors_of_all_dtypes_are_gathered_on_more_ranks(nbytes: int) -> None:
    _check_gather(nbytes, at_a_time=2)


@pytest.mark.parametrize("nbytes", [SMALL, 3 * LARGE])
@ranks(3)
def test_one_tensor_is_gathered_in_every_way(nbytes: int) -> None:
    for broadcasting_ranks in (8, 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gloo, "_BROADCASTING_RANKS", broadcasting_ranks)
            _check_gather(nbytes, at_a_time=3, dtypes=[torch.float32])


@pytest.mark.skipif(backend() != "gloo", reason="the defect is gloo's")
@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
@ranks(2)
def test_gloo_is_not_asked_for_its_coalesced_gather(nbytes: int) -> None:
    # Several at a time corrupt the heap, which ends the process, but not each time.
    with counted_traffic() as traffic:
        _check_gather(nbytes, at_a_time=1)

    assert traffic.launches
    assert not [name for name in traffic.launches if "coalesced" in name]
