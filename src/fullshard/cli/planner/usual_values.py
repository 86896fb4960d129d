"""Answers to what models ask about values while they run on the meta device, where there are none.

Models check their inputs: whether all tokens are real and none is padding, whether sequences are
packed, whether any number is infinite. Such checks end in ``all()`` or ``any()`` over a tensor.
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

    That is the usual case of a check in a forward: nothing is special about the inputs.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        answer = _ANSWERS.get(function)
        # With a dimension the result is a tensor of answers, which is computed with, not asked.
        if answer is not None and len(args) == 1 and not kwargs and args[0].is_meta:
            return torch.tensor(answer, device="cpu")
        return function(*args, **(kwargs or {}))
