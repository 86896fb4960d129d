"""Text that a trained model writes."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["sample_text"]


@torch.no_grad()
def sample_text(
    model: nn.Module, prompt: bytes, length: int, context: int, device: torch.device
) -> str:
    """Continue ``prompt`` by ``length`` bytes. All ranks call it, and all get the same text."""
    generator = torch.Generator(device).manual_seed(0)
    tokens = torch.tensor([list(prompt)], device=device)
    for _ in range(length):
        logits = model(tokens[:, -context:])[0, -1].float()
        # Less than 1: somewhat more of what is likely.
        chances = torch.softmax(logits / 0.8, dim=-1)
        following = torch.multinomial(chances, 1, generator=generator)
        tokens = torch.cat([tokens, following[None]], dim=1)
    return bytes(tokens[0].tolist()).decode("utf-8", errors="replace")
