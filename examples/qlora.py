"""QLoRA: train PEFT's adapters beside 4-bit weights that ranks share. Run: python examples/qlora.py

A small Llama of random weights, with no download, is quantised by bitsandbytes as transformers does
it. Two ranks share its packed weights; each layer is one unit. The script compares the losses with
those of one process, prints the bytes that a rank holds, and saves the adapters. At the end one
process loads them beside the quantised model, computes the same, and merges them. Needs the extras
'quantized' and 'clients'.
"""

import argparse
import logging
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import nn

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import fully_shard, summon_full_params
from fullshard.wrap import ModuleWrapPolicy

try:
    import bitsandbytes  # noqa: F401 (transformers uses it)
    import peft
    import transformers
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer
except ImportError as missing:
    sys.exit(print(f"needs the extras 'quantized' and 'clients': {missing}"))

TOKENS, CONTEXT, BATCH = 64, 32, 8
CONFIG = transformers.LlamaConfig(
    vocab_size=TOKENS,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
)
QUANTIZED = transformers.BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.float32,
)


# -- the model ------------------------------------------------------------------------------------


def write_base(folder: Path) -> None:
    """Write the model to fine-tune, as if it came from a hub."""
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(CONFIG).save_pretrained(folder)


def quantized(folder: Path) -> Any:
    model = transformers.LlamaForCausalLM.from_pretrained(
        folder, quantization_config=QUANTIZED, device_map="cpu"
    )
    return model.train()


def with_adapters(folder: Path) -> Any:
    model = quantized(folder)
    torch.manual_seed(1)  # the same adapters on every rank
    adapters = peft.LoraConfig(r=8, target_modules="all-linear", init_lora_weights="gaussian")
    return peft.get_peft_model(model, adapters)


def shard(model: nn.Module, way: str) -> nn.Module:
    if way == "wrapper":
        # torch's message warns of gradient memory for frozen parameters, which fullshard does not
        # use.
        warnings.filterwarnings("ignore", message=".*both parameters with requires_grad.*")
        policy = ModuleWrapPolicy({LlamaDecoderLayer})
        return FSDP(model, auto_wrap_policy=policy, use_orig_params=True)
    for module in list(model.modules()):
        if isinstance(module, LlamaDecoderLayer):
            fully_shard(module)
    return fully_shard(model)


# -- training -------------------------------------------------------------------------------------


def batch_of(data: torch.Generator) -> torch.Tensor:
    """Sequences in which every token is determined by the one before it."""
    tokens = torch.randint(TOKENS, (BATCH, 1), generator=data)
    for _ in range(CONTEXT - 1):
        tokens = torch.cat([tokens, (5 * tokens[:, -1:] + 3) % TOKENS], dim=1)
    return tokens


def train(model: nn.Module, steps: int) -> list[float]:
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    data = torch.Generator().manual_seed(0)  # the same on every rank, to compare with one process
    losses = []
    for _ in range(steps):
        tokens = batch_of(data)
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def bytes_of(model: nn.Module, trainable: bool) -> int:
    """The bytes of the storages behind a model's parameters, each counted once."""
    found = [p for p in model.parameters() if p.requires_grad == trainable]
    storages = [getattr(p, "_local_tensor", p).untyped_storage() for p in found]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def train_on_rank(rank: int, world_size: int, steps: int, folder: Path) -> None:
    torch.set_num_threads(1)
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    expected = train(whole := with_adapters(folder / "base"), steps)
    for way in ("wrapper", "fully_shard"):
        model = shard(with_adapters(folder / "base"), way)
        losses = train(model, steps)
        if rank == 0:
            print(f"{way:12} loss {losses[0]:.4f} ... {losses[-1]:.4f}  ", end="")
            print("as in one process" if losses == expected else f"one process: {expected[-1]:.4f}")
            for what, trainable in (("quantised and frozen", False), ("adapters", True)):
                ours, all_ = bytes_of(model, trainable), bytes_of(whole, trainable)
                print(f"{'':12} {what:22} {ours / 1024:7.0f} KiB per rank, of {all_ / 1024:.0f}")
    with summon_full_params(model, writeback=False):
        if rank == 0:
            learned = peft.get_peft_model_state_dict(whole, state_dict=model.state_dict())
            torch.save(learned, folder / "adapters.pt")
    dist.destroy_process_group()


# -- afterwards, in one process -------------------------------------------------------------------


def merge(folder: Path) -> None:
    model = with_adapters(folder / "base")
    peft.set_peft_model_state_dict(model, torch.load(folder / "adapters.pt"))
    tokens = batch_of(torch.Generator().manual_seed(7))
    with torch.no_grad():
        beside = model(input_ids=tokens, labels=tokens).loss
        merged = model.merge_and_unload()
        loss = merged(input_ids=tokens, labels=tokens).loss
    print(f"reloaded     loss {beside:.4f}, and merged into 4 bits {loss:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="QLoRA on the CPU")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message="Merge lora module to 4-bit")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_base(folder / "base")
        arguments = (given.ranks, given.steps, folder)
        # Forks: the libraries are imported once.
        processes.start_processes(
            train_on_rank, args=arguments, nprocs=given.ranks, start_method="fork"
        )
        merge(folder)


if __name__ == "__main__":
    main()
