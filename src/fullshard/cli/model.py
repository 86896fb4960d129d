"""A complete GPT over byte tokens, in plain torch, without anything distributed.

Made to be copied: it has no options beyond those that are used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["GPT", "PRESETS", "VOCABULARY", "Block", "Size", "initialize", "next_token_loss"]

#: Tokens are bytes, so every text can be tokenized.
VOCABULARY = 256


@dataclass(frozen=True)
class Size:
    """The size of a GPT. ``width`` has to be divisible by ``heads``."""

    layers: int
    heads: int
    width: int

    def parameters(self, context: int, vocabulary: int = VOCABULARY) -> int:
        """The number of parameters in a :class:`GPT` of this size."""
        block = 12 * self.width**2 + 13 * self.width
        return self.layers * block + (2 * vocabulary + context + 2) * self.width


PRESETS = {
    "tiny": Size(layers=4, heads=4, width=128),
    "small": Size(layers=12, heads=12, width=768),
    "medium": Size(layers=24, heads=16, width=1024),
    "large": Size(layers=36, heads=20, width=1280),
    "xl": Size(layers=48, heads=25, width=1600),
    "7b": Size(layers=32, heads=32, width=4096),
    "65b": Size(layers=80, heads=64, width=8192),
}


class Attention(nn.Module):
    """Causal self-attention: every position attends to itself and to those before it."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.queries_keys_values = nn.Linear(size.width, 3 * size.width)
        self.output = nn.Linear(size.width, size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        projected = self.queries_keys_values(x).view(batch, length, 3, self.heads, -1)
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """A transformer block: attention and an MLP, each with a residual. By default, one unit."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(size.width)
        self.attention = Attention(size)
        self.linear_norm = nn.LayerNorm(size.width)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.linear_norm(x))))


class GPT(nn.Module):
    """A GPT: maps tokens (batch, length) to logits (batch, length, vocabulary)."""

    def __init__(self, size: Size, context: int, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(vocabulary, size.width)
        self.positions = nn.Embedding(context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, vocabulary, bias=False)
        self.apply(initialize)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def initialize(module: nn.Module) -> None:
    """Initialise the parameters that ``module`` itself holds, as GPT-2 does."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
    if isinstance(module, nn.LayerNorm):
        module.reset_parameters()


def next_token_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy of each token given those before it, computed in float32."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
