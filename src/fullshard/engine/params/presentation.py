"""Full parameters as users and modules see them, where views of the full buffer will not do."""

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
        """The makers of the objects that the module computes with; empty if views will do."""
        return self.distributions

    def is_hidden(self, index: int) -> bool:
        """True if the full parameter is another object than the one that the optimizer holds."""
        return self.distribution(index) is not None

    def packed(self, index: int, value: torch.Tensor) -> torch.Tensor:
        """A whole parameter as it is laid out; raises ValueError if it is packed in another way."""
        return value

    def saved(self, index: int, value: torch.Tensor) -> Any:
        """The value in a full state dict, of a whole parameter as it is laid out."""
        return value

    def adopt_replacement(self, index: int, new: nn.Parameter) -> None:
        """Take over the attributes, other than elements, of a parameter that replaces another."""
