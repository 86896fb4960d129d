"""A stand-in for the wrapper class: what wrapping does is tested here without ranks."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn


class StandInUnit(nn.Module):
    _is_fullshard_unit = True

    def __init__(self, module: nn.Module, **arguments: Any) -> None:
        super().__init__()
        self._fsdp_wrapped_module = module
        self.arguments = arguments

    @property
    def module(self) -> nn.Module:
        return self._fsdp_wrapped_module


@pytest.fixture
def unit_class() -> type[StandInUnit]:
    return StandInUnit


@pytest.fixture
def nested_sequential() -> nn.Sequential:
    """Four linears of 30 elements each, the last two one level deeper."""
    return nn.Sequential(
        nn.Linear(5, 5), nn.Linear(5, 5), nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    )
