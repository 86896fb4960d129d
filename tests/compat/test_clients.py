"""The libraries in examples/clients train on fullshard as the bare model does.

What an example does is called here on ranks of the tests, which import the libraries once.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.compat.installed import installed

from fullshard import BackwardPrefetch, ShardingStrategy
from fullshard.testing import device, ranks

# Looked for and not imported: only the ranks need them.
for needed in ("transformers", "peft", "accelerate", "lightning"):
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is missing: install the extra 'clients'", allow_module_level=True)

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


def started_by_a_launcher() -> None:
    """Without this Lightning takes its process for the only one, and starts others."""
    os.environ["TORCHELASTIC_RUN_ID"] = "test"


@ranks(2)
def test_lightnings_strategy_trains(tmp_path: Path) -> None:
    started_by_a_launcher()
    with installed():
        _, model = example("lightning_train").train(
            device().type == "cpu", str(tmp_path), "sharded"
        )

    assert len(model.losses) == 40
    assert model.losses[-1] < model.losses[0] / 10


@pytest.mark.parametrize("state", ["sharded", "full"])
@ranks(2)
def test_lightnings_strategy_goes_on_from_a_checkpoint(tmp_path: Path, state: str) -> None:
    started_by_a_launcher()
    on_cpu = device().type == "cpu"
    with installed():
        client = example("lightning_train")
        first, model = client.train(on_cpu, str(tmp_path), state)
        other = client.go_on(first, on_cpu, str(tmp_path), state)

    assert len(other.losses) == 20
    assert max(other.losses) < model.losses[0] / 10
