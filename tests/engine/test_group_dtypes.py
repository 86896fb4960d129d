"""Groups of several dtypes are gathered exactly, whichever comes first and however large."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from fullshard import FullyShardedDataParallel as FSDP
from fullshard.testing import device, ranks

DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.int64)


def values(dtype: torch.dtype, count: int) -> torch.Tensor:
    """Values that no other dtype of the four can hold."""
    if dtype.is_floating_point:
        return torch.randn(count, dtype=torch.float64).to(dtype)
    return torch.randint(2**60, (count,)) * 2 + 1


class Holder(nn.Module):
    def __init__(self, dtypes: tuple[torch.dtype, ...], count: int) -> None:
        super().__init__()
        for number, dtype in enumerate(dtypes):
            trains = dtype.is_floating_point
            weight = nn.Parameter(values(dtype, count + number), requires_grad=trains)
            self.register_parameter(f"weight{number}", weight)

    def forward(self) -> list[torch.Tensor]:
        return [weight.detach().clone() for weight in self._parameters.values()]


@pytest.mark.parametrize("dtypes", list(itertools.permutations(DTYPES, 2)))
@pytest.mark.parametrize("count", [5, 20000])
@ranks(2)
def test_parameters_of_two_dtypes_are_gathered_bit_for_bit(
    count: int, dtypes: tuple[torch.dtype, ...]
) -> None:
    torch.manual_seed(0)
    module = Holder(dtypes, count).to(device())
    expected = [weight.detach().clone() for weight in module.parameters()]
    model = FSDP(module, use_orig_params=True)
    with torch.no_grad():
        found = model()
    for weight, original in zip(found, expected, strict=True):
        assert torch.equal(weight, original)
