"""The model that the benchmarks train: a GPT with norms before each part and an untied head.

A vocabulary of 32,000 gives the sizes that the tables name: 24 layers of width 2048 have 1.34
billion parameters, 48 of width 512 have 184 million, 16 of width 4096 have 3.5 billion and 48 of
them 9.9.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn


@dataclasses.dataclass(frozen=True)
class Size:
    """A model's size and the batch it is trained on."""

    layers: int
    width: int
    batch: int
    length: int
    heads: int
    vocabulary: int = 32_000

    def __str__(self) -> str:
        return f"{self.layers} layers, width {self.width}, batch {self.batch}x{self.length}"


SIZES = {
    "1.34B": Size(layers=24, width=2048, batch=4, length=1024, heads=16),
    "184M": Size(layers=48, width=512, batch=1, length=256, heads=8),
    "3.5B": Size(layers=16, width=4096, batch=4, length=2048, heads=32),
    "9.9B": Size(layers=48, width=4096, batch=2, length=2048, heads=32),
    "cpu": Size(layers=8, width=384, batch=2, length=128, heads=6, vocabulary=512),
    "toy": Size(layers=2, width=32, batch=2, length=8, heads=2, vocabulary=64),
}


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Takes tokens and returns the loss of guessing the next one."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def build(size: Size, device: torch.device, seed: int = 0) -> GPT:
    """The model on ``device``, the same numbers for every caller with the same seed."""
    torch.manual_seed(seed)
    with device:
        return GPT(size)


def tokens(size: Size, device: torch.device, seed: int = 1) -> torch.Tensor:
    """One batch: ``length`` inputs and the token that follows the last."""
    generator = torch.Generator().manual_seed(seed)
    shape = (size.batch, size.length + 1)
    return torch.randint(size.vocabulary, shape, generator=generator).to(device)
