"""Writing metrics for TensorBoard, if it is installed. Its errors never end a run."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["TensorBoard"]


class TensorBoard:
    """Writes TensorBoard files, and stops writing after the first error."""

    def __init__(self, folder: Path) -> None:
        self._writer: Any = None
        # Not just ImportError: with an incompatible numpy or protobuf, it raises other errors.
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
        """Flush and close the files."""
        if self._writer is not None:
            with contextlib.suppress(Exception):
                self._writer.close()
