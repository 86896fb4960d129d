"""Small models for training tests: each knows its inputs and its loss, and starts from a seed.

``make`` builds one in float64, in which a different order of additions shows at 1e-16: parity
can be asked for at 1e-9.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fullshard.testing import device


def make(
    kind: type[TrainingModel],
    dtype: torch.dtype = torch.float64,
    place: torch.device | None = None,
    **arguments: Any,
) -> Any:
    """A model with the same values on every rank and at every call."""
    torch.manual_seed(1234)
    return kind(**arguments).to(device() if place is None else place, dtype)


class TrainingModel(nn.Module):
    """A module with data of its own: other data on every rank and at every step."""

    shape: tuple[int, ...] = (4, 5)

    def get_input(self, rank: int, step: int = 0) -> tuple[Any, ...]:
        return (self.random(self.shape, rank, step),)

    def get_loss(self, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        return output.double().square().mean()

    def random(self, shape: tuple[int, ...], rank: int, step: int) -> torch.Tensor:
        dtype = next(p.dtype for p in self.parameters() if p.is_floating_point())
        return torch.randn(shape, generator=generator(rank, step)).to(device(), dtype)


def generator(rank: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(100 * step + rank)


class NestedLinears(TrainingModel):
    """Linears of odd sizes, two levels deep: no shard boundary falls on a parameter's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(5, 7),
            nn.Tanh(),
            nn.Sequential(nn.Linear(7, 11, bias=False), nn.Tanh(), nn.Linear(11, 3)),
            nn.LayerNorm(3),
            nn.Linear(3, 3),
        )
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * self.scale


class TiedLinears(TrainingModel):
    """One weight used by two modules in different branches of the tree."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(5, 5), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Linear(5, 3))
        self.second[0].weight = self.first[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class SharedTransformer(TrainingModel):
    """An encoder-decoder whose output layer shares the embedding's weight.

    ``norm`` adds a batch norm and ``frozen`` stops the training of part of the parameters.
    """

    tokens, width, batch = 13, 8, 3

    def __init__(self, norm: bool = True, frozen: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(self.tokens, self.width)
        self.transformer = nn.Transformer(
            self.width, 2, 1, 1, dim_feedforward=10, dropout=0.0, activation="gelu"
        )
        self.norm = nn.BatchNorm1d(self.batch) if norm else nn.Identity()
        self.head = nn.Linear(self.width, self.tokens)
        self.head.weight = self.embedding.weight
        self.register_buffer("offset", torch.ones(self.width))
        if frozen:
            for name, parameter in self.named_parameters():
                parameter.requires_grad = "linear1" not in name and "norm1" not in name

    def get_input(self, rank: int, step: int = 0) -> tuple[Any, ...]:
        source, target = (
            torch.randint(self.tokens, (length, self.batch), generator=generator(rank, step))
            for length in (4, 5)
        )
        return source.to(device()), target.to(device())

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(source) + self.offset
        hidden = self.norm(hidden)
        return self.head(self.transformer(hidden, self.embedding(target)))

    def get_loss(self, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), inputs[1].flatten())


class ConvNet(TrainingModel):
    """Convolutions with channels_last weights, batch norm, and an odd number of classes."""

    shape = (2, 3, 6, 6)

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 5, 3),
            nn.BatchNorm2d(5),
            nn.ReLU(),
            nn.Conv2d(5, 4, 3, bias=False),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.head = nn.Linear(4, 3)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


class Experts(TrainingModel):
    """Every token goes to one of three experts; an expert may get none, and runs all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(5, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(-1)
        chosen = weights.argmax(-1)
        output = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mine = chosen == index
            output[mine] = expert(x[mine]) * weights[mine, index, None]
        return output


class Recurrent(TrainingModel):
    """An LSTM, which computes with a list of weights of its own, and returns nested tuples."""

    shape = (3, 2, 5)

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 3, num_layers=2)
        self.head = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output, (hidden, _) = self.lstm(x)
        return self.head(output + hidden[-1])


class WithEmptyParameters(TrainingModel):
    """Parameters of no elements first, last and in between; one of them is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.empty(0))
        self.linear = nn.Linear(5, 3)
        self.between = nn.Parameter(torch.empty(3, 0))
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 0))
        self.unused = nn.Parameter(torch.empty(0, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x) + self.first.sum()
        hidden = torch.cat([hidden, hidden @ self.between], dim=-1)
        return self.inner[0](hidden) + self.inner[1](hidden).sum()


class Tiny(TrainingModel):
    """Two elements: on more ranks than that, some own nothing."""

    shape = (3, 1)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)
