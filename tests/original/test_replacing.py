"""Parameters that the user replaces between steps, by others or by each other."""

from __future__ import annotations

import pytest
import torch
from tests.original.training import STRATEGIES, assert_same_parameters, build, inputs
from torch import nn

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import ShardingStrategy
from fullshard.testing import ranks
from fullshard.wrap import ModuleWrapPolicy


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_data_is_replaced_after_steps_and_again(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    reference = build(Model)
    model = FSDP(
        build(Model),
        sharding_strategy=strategy,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        use_orig_params=use_orig_params,
    )
    for step in range(3):
        output = model(inputs(step))
        torch.testing.assert_close(output, reference(inputs(step)))
        output.sum().backward()
        for parameter in (*model.parameters(), *reference.parameters()):
            parameter.data = parameter.data * 1.5
    assert_same_parameters(reference, model)
