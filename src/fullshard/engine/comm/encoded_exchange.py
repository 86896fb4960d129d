"""The parts of gradients that ranks send each other encoded, with a byte for each parameter.

A message is the encoded part, then a byte for each parameter of the group: whether the gradients
that the part was made of include one of it.
"""

from __future__ import annotations

import torch

from ..encoding.encodings import Encoding


class EncodedParts:
    """Messages about parts of ``numel`` numbers, one in each row."""

    def __init__(self, encoding: Encoding, numel: int, present: torch.Tensor) -> None:
        self._encoding = encoding
        self._present = present
        self._nbytes = encoding.nbytes(numel)
        #: Bytes of a message; the next one begins where vector loads want it.
        self.width = -(-(self._nbytes + present.numel()) // 16) * 16

    def empty(self, count: int) -> torch.Tensor:
        """Memory for the messages of ``count`` parts."""
        return torch.empty(count, self.width, dtype=torch.uint8, device=self._present.device)

    def encode(self, parts: torch.Tensor, messages: torch.Tensor) -> None:
        """Write the messages about ``parts``."""
        if len(parts):
            self._encoding.encode(parts, messages[:, : self._nbytes])
            self._flags_of(messages).copy_(self._present)

    def add(
        self, messages: torch.Tensor, total: torch.Tensor, present: torch.Tensor
    ) -> torch.Tensor:
        """Decode ``messages`` and add them to ``total``; returns which parameters are present in
        any.
        """
        self._encoding.add(messages[:, : self._nbytes], total)
        return torch.maximum(self._flags_of(messages).amax(0), present)

    def _flags_of(self, messages: torch.Tensor) -> torch.Tensor:
        return messages[:, self._nbytes : self._nbytes + self._present.numel()]
