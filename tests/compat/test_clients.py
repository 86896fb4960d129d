"""The libraries in examples/clients train on fullshard as the bare model does.

What an example does is called here on ranks of the tests, which import the libraries once.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.compat.installed import installed

from fullshard import BackwardPrefetch, ShardingStrategy
from fullshard.testing import device, ranks

for needed in ("transformers", "peft", "accelerate"):
    pytest.importorskip(needed, reason="install the extra 'clients'")

CLIENTS = Path(__file__).resolve().parents[2] / "examples" / "clients"
pytestmark = pytest.mark.filterwarnings("ignore")


def example(name: str) -> Any:
    """An example as it is under ``fullshard run``: its torch names are fullshard's."""
    sys.path.insert(0, str(CLIENTS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(CLIENTS))


def assert_same_losses(losses: tuple[torch.Tensor, torch.Tensor]) -> None:
    bare, sharded = losses
    assert len(bare) >= 4
    torch.testing.assert_close(sharded, bare, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_orig_params": True, "forward_prefetch": True},
        {
            "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP,
            "backward_prefetch": BackwardPrefetch.BACKWARD_POST,
        },
    ],
    ids=["default", "original parameters", "gradients only"],
)
@pytest.mark.parametrize("model", ["llama", "t5"])
@ranks(2)
def test_models_of_transformers_train_and_generate_as_the_bare_model(
    model: str, options: dict[str, Any]
) -> None:
    with installed():
        assert_same_losses(example("transformers_train").compare(model, device(), **options))


@pytest.mark.parametrize("way", ["layers", "PEFT's policy"])
@ranks(2)
def test_adapters_of_peft_learn_as_in_the_bare_model(way: str) -> None:
    with installed(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_same_losses(example("peft_lora").compare(way, device()))


@pytest.mark.parametrize("state", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
@ranks(2)
def test_accelerate_trains_clips_saves_and_loads(state: str) -> None:
    with installed(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        client = example("accelerate_train")
        from accelerate.state import AcceleratorState, PartialState

        accelerator = client.make_accelerator(device().type == "cpu", "no", state)
        try:
            sharded = client.train(accelerator)
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            PartialState._reset_state()
        bare = client.train_bare(client.llama().to(device()), device())
    assert_same_losses((bare, sharded))
