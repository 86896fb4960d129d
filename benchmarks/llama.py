"""A Llama of Hugging Face's transformers, where it is installed: 22 layers of width 2048."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from rows import SkipRow
from torch import nn

SIZE = "Hugging Face Llama, 22 layers, width 2048, batch 4x1024"
_BATCH, _LENGTH, _VOCABULARY = 4, 1024, 32_000


class WithLoss(nn.Module):
    """Takes tokens and returns the loss of guessing the next one."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return loss


def _transformers() -> Any:
    if importlib.util.find_spec("transformers") is None:
        raise SkipRow("transformers is not installed")
    import transformers

    return transformers


def build(device: torch.device) -> nn.Module:
    transformers = _transformers()
    config = transformers.LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        vocab_size=_VOCABULARY,
        max_position_embeddings=2048,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    with device:
        return WithLoss(transformers.LlamaForCausalLM(config))


def unit() -> type[nn.Module]:
    _transformers()
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    layer: type[nn.Module] = LlamaDecoderLayer
    return layer


def tokens(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(_VOCABULARY, (_BATCH, _LENGTH), generator=generator).to(device)
