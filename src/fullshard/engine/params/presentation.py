"""What whole parameters are to users and modules, where that is not how they are laid out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .tensor_parallel import Distribution, Distributions


class Presentation:
    """The part of a handle that knows plain and tensor-parallel parameters.

    ``packed_handle.py`` has that of parameters whose classes pack their elements.
    """

    #: How tensor parallelism distributed each parameter; empty where it distributed none.
    distributions: Distributions = ()

    def distribution(self, index: int) -> Distribution | None:
        """The distribution that tensor parallelism gave a parameter; None if it gave none."""
        return self.distributions[index] if self.distributions else None

    def presentations(self) -> Sequence[Any]:
        """What makes the objects that the module computes with; empty where views will do."""
        return self.distributions

    def is_hidden(self, index: int) -> bool:
        """True if another object than the optimizer's parameter is shown in full."""
        return self.distribution(index) is not None

    def packed(self, index: int, value: torch.Tensor) -> torch.Tensor:
        """What is laid out of a whole parameter; raises ValueError if it is packed otherwise."""
        return value

    def saved(self, index: int, value: torch.Tensor) -> Any:
        """What a full state dict has for a whole parameter, given as it is laid out."""
        return value

    def adopt_replacement(self, index: int, new: nn.Parameter) -> None:
        """Take over what a whole parameter, put in place of another one, has beside elements."""
