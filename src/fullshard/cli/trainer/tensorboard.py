"""Metrics for TensorBoard, where it is installed and works. Whatever it raises ends no training."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["TensorBoard"]


class TensorBoard:
    """A writer of TensorBoard's files, which gives up after the first failure."""

    def __init__(self, folder: Path) -> None:
        self._writer: Any = None
        # Not only without it: with another numpy or protobuf than it wants, its import raises much.
        with contextlib.suppress(Exception):
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder))

    def add(self, metrics: Mapping[str, float | None], step: int) -> None:
        """Write the metrics of a step."""
        if self._writer is None:
            return
        try:
            for name, value in metrics.items():
                if name != "step" and value is not None:
                    self._writer.add_scalar(name, value, step)
        except Exception:
            self._writer = None

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            with contextlib.suppress(Exception):
                self._writer.close()
