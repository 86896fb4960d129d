"""QLoRA as people run it: a Llama of transformers, quantised on loading, and PEFT's adapters."""

from __future__ import annotations

import copy
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.quantized.models import assert_same_states, bnb, both_ways

import fullshard
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.testing import device, ranks, run_on_ranks
from fullshard.wrap import ModuleWrapPolicy

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")


def config(kind: str) -> Any:
    if kind == "8 bits":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_quant_storage=torch.float32 if kind == "4 bits in float32" else torch.uint8,
    )


def base(folder: Path) -> None:
    """Write a model of random weights."""
    torch.manual_seed(0)
    sizes = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    transformers.LlamaForCausalLM(sizes).save_pretrained(folder)


def load(folder: Path, kind: str = "4 bits") -> Any:
    return transformers.LlamaForCausalLM.from_pretrained(
        folder, quantization_config=config(kind), device_map=str(device())
    ).train()


def with_adapters(folder: Path, kind: str = "4 bits") -> Any:
    model = load(folder, kind)
    torch.manual_seed(1)
    adapters = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights="gaussian")
    return peft.get_peft_model(model, adapters)


def shard(model: Any, how: str) -> Any:
    layer = transformers.models.llama.modeling_llama.LlamaDecoderLayer
    if how == "wrapper":
        warnings.filterwarnings("ignore")
        return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({layer}), use_orig_params=True)
    for module in list(model.modules()):
        if isinstance(module, layer):
            fullshard.fully_shard(module)
    return fullshard.fully_shard(model)


def tokens(step: int) -> torch.Tensor:
    data = torch.Generator().manual_seed(step)
    return torch.randint(64, (2, 12), generator=data).to(device())


def train(model: Any, steps: int = 3) -> list[float]:
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    losses = []
    for step in range(steps):
        loss = model(input_ids=tokens(step), labels=tokens(step)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def on_all_ranks() -> Path:
    """A folder of the first rank with the base model in it."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        base(Path(folder[0]) / "base")
    dist.barrier()
    return Path(folder[0])


@pytest.mark.parametrize("kind", ["4 bits", "4 bits in float32", "8 bits"])
@both_ways
@ranks(2)
def test_adapters_learn_bit_for_bit_what_they_learn_in_one_process(how: str, kind: str) -> None:
    folder = on_all_ranks()
    whole = with_adapters(folder / "base", kind)
    model = shard(with_adapters(folder / "base", kind), how)
    assert train(model) == train(whole)
    with fullshard.summon_full_params(model):
        assert_same_states(
            peft.get_peft_model_state_dict(whole, state_dict=model.state_dict()),
            peft.get_peft_model_state_dict(whole),
        )


@both_ways
@ranks(2)
def test_muon_steps_whole_adapters_and_goes_on_from_a_checkpoint(how: str) -> None:
    def muon(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Muon(parameters, lr=0.02)

    def is_matrix(name: str, parameter: torch.Tensor) -> bool:
        return parameter.dim() == 2

    folder = on_all_ranks()
    bare = with_adapters(folder / "base")
    expected = muon(parameter for parameter in bare.parameters() if parameter.requires_grad)
    for first in (0, 2):
        model = shard(with_adapters(folder / "base"), how)
        optimizer = fullshard.optim.whole(muon, model, select=is_matrix)
        if first:
            fullshard.load(folder / "checkpoint", model, optimizer)
        for step in (first, first + 1):
            losses = []
            for network, each in ((model, optimizer), (bare, expected)):
                loss = network(input_ids=tokens(step), labels=tokens(step)).loss
                each.zero_grad()
                loss.backward()
                each.step()
                losses.append(loss.item())
            assert losses[0] == losses[1]
        fullshard.save(folder / "checkpoint", model, optimizer)


@ranks(2)
def test_a_trained_model_is_saved_loaded_by_transformers_and_merged() -> None:
    folder = on_all_ranks()
    whole = with_adapters(folder / "base")
    model = shard(with_adapters(folder / "base"), "wrapper")
    train(whole), train(model)
    state = model.state_dict()
    adapters = peft.get_peft_model_state_dict(whole, state_dict=state)
    if dist.get_rank() == 0:
        whole.save_pretrained(folder / "adapters", state_dict=state)
        reloaded = peft.PeftModel.from_pretrained(load(folder / "base"), folder / "adapters")
        assert_same_states(peft.get_peft_model_state_dict(reloaded), adapters)
        with torch.no_grad():
            expected = whole(input_ids=tokens(9)).logits
            assert torch.equal(reloaded.train()(input_ids=tokens(9)).logits, expected)
        # Merged alike: the same packed elements, and scales.
        one, other = (each.merge_and_unload().state_dict() for each in (reloaded, whole))
        assert_same_states(one, other)
    dist.barrier()


@ranks(2)
def test_the_quantised_base_of_a_sharded_model_is_what_transformers_saves_and_loads() -> None:
    folder = on_all_ranks()
    bare, model = load(folder / "base"), shard(load(folder / "base"), "wrapper")
    model(input_ids=tokens(0))
    state = model.state_dict()
    assert_same_states(state, bare.state_dict())
    if dist.get_rank() == 0:
        bare.save_pretrained(folder / "quantised", state_dict=state)
        found = transformers.LlamaForCausalLM.from_pretrained(folder / "quantised")
        weight = found.model.layers[0].mlp.up_proj.weight
        assert isinstance(weight, bnb.nn.Params4bit)
        assert torch.equal(
            found.train()(input_ids=tokens(1)).logits, bare(input_ids=tokens(1)).logits
        )
    dist.barrier()


@both_ways
@ranks(2)
def test_adapters_are_merged_while_parameters_are_summoned(how: str) -> None:
    folder = on_all_ranks()
    whole, model = with_adapters(folder / "base"), shard(with_adapters(folder / "base"), how)
    train(whole), train(model)
    with fullshard.summon_full_params(model):
        for each in (whole, model):
            for module in each.modules():
                if isinstance(module, peft.tuners.lora.LoraLayer):
                    module.merge()
    expected = copy.deepcopy(whole)(input_ids=tokens(5)).logits
    assert torch.equal(model(input_ids=tokens(5)).logits, expected)


def save(folder: Path) -> None:
    model = shard(with_adapters(folder / "base"), "wrapper")
    train(model)
    fullshard.save(folder / "checkpoints", model, step=3)


def resume(folder: Path, how: str) -> None:
    whole, model = with_adapters(folder / "base"), with_adapters(folder / "base")
    train(whole)
    model = shard(model, how)
    assert fullshard.resume(folder / "checkpoints", model)
    assert torch.equal(model(input_ids=tokens(7)).logits, whole(input_ids=tokens(7)).logits)


@both_ways
def test_training_goes_on_with_another_number_of_ranks(tmp_path: Path, how: str) -> None:
    base(tmp_path / "base")
    run_on_ranks(2, save, tmp_path)
    run_on_ranks(3, resume, tmp_path, how)
    run_on_ranks(1, resume, tmp_path, how)
