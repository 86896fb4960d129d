"""Values for the checks that models make on their inputs, which have no values on the meta device.

Models check, for example, whether any token is padding, whether sequences are packed, or whether
any number is infinite. Such checks end in ``all()`` or ``any()`` of a tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["UsualValues"]

_ANSWERS: dict[Any, bool] = {
    torch.all: True,
    torch.Tensor.all: True,
    torch.any: False,
    torch.Tensor.any: False,
}


class UsualValues(TorchFunctionMode):
    """Inside the context, ``all()`` of a meta tensor is true and ``any()`` is false.

    These are the results for ordinary inputs.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        answer = _ANSWERS.get(function)
        # With a dimension the result is a tensor for further computation, not a condition.
        if answer is not None and len(args) == 1 and not kwargs and args[0].is_meta:
            return torch.tensor(answer, device="cpu")
        return function(*args, **(kwargs or {}))
