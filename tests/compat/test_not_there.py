"""What programs for torch's wrapper may do and fullshard does not: it says so, and what to do."""

from __future__ import annotations

import pytest
import torch
from tests.compat.installed import installed
from torch import nn

from fullshard import FullyShardedDataParallel
from fullshard.testing import device, ranks


def test_extensions_of_torchs_engine_are_refused() -> None:
    from torch.distributed.fsdp import _fsdp_extensions

    with installed(), pytest.raises(NotImplementedError, match="_set_fsdp_extensions"):
        _fsdp_extensions._set_fsdp_extensions(object())


@ranks(2)
def test_gradients_of_flat_parameters_are_not_shown_in_full() -> None:
    model = FullyShardedDataParallel(nn.Linear(2, 2).to(device()))
    model(torch.rand(1, 2, device=device())).sum().backward()

    with (
        pytest.raises(NotImplementedError, match="use_orig_params=True"),
        FullyShardedDataParallel.summon_full_params(model, with_grads=True),
    ):
        pass
