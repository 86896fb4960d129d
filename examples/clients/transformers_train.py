"""Hugging Face models, wrapped by layer class, and compared with the same models unwrapped.

    fullshard run --ranks 2 examples/clients/transformers_train.py

The script builds a Llama and a T5, whose embedding is shared by encoder, decoder and head, from
tiny configurations. It uses names of torch and transformers only: ``fullshard run`` replaces
torch's wrapper by fullshard's. The unwrapped model sees the batches of all ranks at once, so both
columns of losses must be equal.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.t5.modeling_t5 import T5Block

TOKENS, LENGTH, BATCH, STEPS = 64, 12, 2, 4
Batch = dict[str, torch.Tensor]


def llama() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=TOKENS,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            pad_token_id=0,
        )
    )


def t5() -> nn.Module:
    torch.manual_seed(0)
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=TOKENS,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )


MODELS = {"llama": (llama, LlamaDecoderLayer), "t5": (t5, T5Block)}


def batch(step: int, rank: int, device: torch.device) -> Batch:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(1, TOKENS, (BATCH, LENGTH), generator=generator).to(device)
    return {"input_ids": tokens, "labels": tokens.clone()}


def batches_of_all_ranks(step: int, device: torch.device) -> Batch:
    parts = [batch(step, rank, device) for rank in range(dist.get_world_size())]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def train_bare(model: nn.Module, device: torch.device) -> torch.Tensor:
    optimizer = torch.optim.AdamW(trainable(model), lr=0.01, eps=1e-4)
    losses = []
    for step in range(STEPS):
        loss = model(**batches_of_all_ranks(step, device)).loss
        loss.backward()
        nn.utils.clip_grad_norm_(trainable(model), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


def train_sharded(model: FSDP, device: torch.device) -> torch.Tensor:
    optimizer = torch.optim.AdamW(trainable(model), lr=0.01, eps=1e-4)
    losses = []
    for step in range(STEPS):
        loss = model(**batch(step, dist.get_rank(), device)).loss
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    return (mean / dist.get_world_size()).cpu()


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def compare(name: str, device: torch.device, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Train both; returns their losses, after checking that both have learned the same."""
    build, layer = MODELS[name]
    bare = build().to(device)
    sharded = FSDP(build().to(device), auto_wrap_policy=ModuleWrapPolicy({layer}), **options)
    losses = train_bare(bare, device), train_sharded(sharded, device)
    with FSDP.state_dict_type(sharded, StateDictType.FULL_STATE_DICT):
        learned = sharded.state_dict()
    torch.testing.assert_close(dict(learned), dict(bare.state_dict()), rtol=1e-4, atol=1e-5)
    with torch.no_grad(), FSDP.summon_full_params(sharded, writeback=False):
        generated = generate(sharded.module, device)
    assert torch.equal(generated, generate(bare, device))
    return losses


def generate(model: nn.Module, device: torch.device) -> torch.Tensor:
    prompt = batch(99, 0, device)["input_ids"]
    seen = torch.ones_like(prompt)
    return model.generate(prompt, attention_mask=seen, max_new_tokens=4, do_sample=False)


def main() -> None:
    dist.init_process_group("gloo")
    for name in MODELS:
        losses = torch.stack(compare(name, torch.device("cpu")), dim=1)
        for step, (bare, sharded) in enumerate(losses):
            if dist.get_rank() == 0:
                print(f"{name:5}  step {step}  bare {bare:.5f}  {FSDP.__module__} {sharded:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
