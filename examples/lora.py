"""LoRA: train small adapters inside a frozen model. Run it with: python examples/lora.py

The base model is in bfloat16 and frozen; every linear of a block gets an adapter in float32. Each
block is one unit: fullshard flattens frozen and trainable parameters separately, so gradients and
optimizer state exist for the adapters only. The script then fine-tunes the whole model, and prints
the memory that both take on a rank.
"""

import argparse
import tempfile
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard import FullyShardedDataParallel as FSDP
from fullshard.wrap import ModuleWrapPolicy

TOKENS, WIDTH, HEADS, LAYERS, CONTEXT, BATCH = 64, 256, 4, 4, 32, 8


# -- the model ------------------------------------------------------------------------------------


class Block(nn.Module):
    """A transformer block: attention and an MLP, each with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, width // HEADS)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A small decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(TOKENS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# -- LoRA -----------------------------------------------------------------------------------------


class LoRA(nn.Module):
    """A frozen linear plus a trainable product of two small matrices, which starts at zero."""

    def __init__(self, base: nn.Linear, rank: int = 8, scale: float = 2.0) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        adapted = F.linear(F.linear(x.float(), self.a), self.b)
        return self.base(x) + (self.scale * adapted).to(x.dtype)


def add_adapters(model: GPT) -> None:
    model.requires_grad_(False)
    for block in model.blocks:
        for name, module in list(block.named_children()):
            if isinstance(module, nn.Linear):
                setattr(block, name, LoRA(module))


# -- training -------------------------------------------------------------------------------------


def build(lora: bool) -> FSDP:
    torch.manual_seed(0)  # the same parameters on every rank
    model = GPT().to(torch.bfloat16)
    if lora:
        add_adapters(model)
    # torch's message warns of gradient memory for frozen parameters, which fullshard does not use.
    warnings.filterwarnings("ignore", message=".*both parameters with requires_grad=True and False")
    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True)


def batch_of(data: torch.Generator) -> torch.Tensor:
    """Sequences in which every token is determined by the one before it."""
    tokens = torch.randint(TOKENS, (BATCH, 1), generator=data)
    for _ in range(CONTEXT):
        tokens = torch.cat([tokens, (5 * tokens[:, -1:] + 3) % TOKENS], dim=1)
    return tokens


def train(lora: bool, steps: int) -> dict[str, int]:
    model = build(lora)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=5e-3 if lora else 5e-4)
    data = torch.Generator().manual_seed(dist.get_rank())  # other data on every rank
    watch = FullBuffers(model)
    for step in range(1, steps + 1):
        tokens = batch_of(data)
        # Measuring slows a step down, so only the last step is measured.
        with watch if step == steps else torch.enable_grad():
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and (step == 1 or step % 10 == 0):
            name = "LoRA" if lora else "full fine-tuning"
            print(f"{name:16}  step {step:3}  loss {loss.item():.3f}", flush=True)
    state = [t for entry in optimizer.state.values() for t in entry.values() if t.dim()]
    return {
        "trainable parameters, whole model": sum_over_ranks(sum(p.numel() for p in trainable)),
        "parameter shards": size_of(model.parameters()),
        "gradients": size_of(p.grad for p in trainable),
        "optimizer state": size_of(state),
        "full buffers, at their peak": watch.peak,
    }


# -- measuring ------------------------------------------------------------------------------------


def size_of(tensors: Any) -> int:
    """The bytes of the storages behind ``tensors``, each counted once."""
    storages = [t.untyped_storage() for t in tensors if t is not None]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def sum_over_ranks(number: int) -> int:
    total = torch.tensor(number)
    dist.all_reduce(total)
    return int(total)


class FullBuffers(TorchDispatchMode):
    """Measures unsharded parameters and unreduced gradients at every operation.

    Units have no public attribute for that, so this reads the sizes of their buffers.
    """

    def __init__(self, model: FSDP) -> None:
        super().__init__()
        self.peak = 0
        self._units = [m._unit for m in FSDP.fsdp_modules(model)]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        buffers = [b for u in self._units for h in u.handles for b in h.full_buffers.values()]
        self.peak = max(self.peak, sum(b.flat.untyped_storage().nbytes() for b in buffers))
        return function(*args, **(kwargs or {}))


# -- two runs and a table -------------------------------------------------------------------------


def main_on_rank(rank: int, world_size: int, steps: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    lora, full = train(lora=True, steps=steps), train(lora=False, steps=steps)
    if rank == 0:
        heading = f"per rank, of {world_size}"
        print(f"\n{heading:34}{'LoRA':>12}{'full fine-tuning':>18}{'ratio':>8}")
        for row in lora:
            texts = [in_words(row, column[row]) for column in (lora, full)]
            print(f"{row:34}{texts[0]:>12}{texts[1]:>18}{lora[row] / full[row]:>8.2f}")
    dist.destroy_process_group()


def in_words(row: str, number: int) -> str:
    return f"{number:,}" if row.startswith("trainable") else f"{number / 1024:,.0f} KiB"


def main() -> None:
    parser = argparse.ArgumentParser(description="LoRA against full fine-tuning, on the CPU")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (given.ranks, given.steps, f"file://{folder}/rendezvous")
        processes.spawn(main_on_rank, args=arguments, nprocs=given.ranks)


if __name__ == "__main__":
    main()
