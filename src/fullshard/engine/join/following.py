"""A rank without data follows the others' step: it lends its shards and takes its gradients.

Note: waits are followed, too
    Between hosts, a rank passes on to its neighbours what it received when it waits for an
    all-gather (``across_hosts.py``), and its neighbours wait for that. So a rank without data waits
    where the others do: one that waited at once would wait for a neighbour that first reduces, with
    it. It keeps parts of full parameters where the others do, from which their backward gathers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..grads.reduction import settle_all
from ..grads.user_hooks import run_hooks_of_all
from ..runtime.forward import Schedule
from ..runtime.unit import Unit
from .joining import Joining, Word


class Follower:
    """Carries out the instructions of other ranks on the units below a root, see ``joining.py``.

    ``obey`` is called with instructions that are not the engine's.
    """

    def __init__(
        self,
        schedule: Schedule,
        obey: Callable[[str, Any], None],
    ) -> None:
        self._schedule = schedule
        self._obey = obey
        self._reduced: dict[Unit, None] = {}

    def follow(self, joining: Joining) -> None:
        """Take part in one step of the ranks that have data."""
        self._schedule.rest()
        for unit in self._schedule.units:
            unit.write_back()
        try:
            joining.hear_step(self._do)
            for unit in self._schedule.units:
                # What others keep from step to step.
                unit.reshard()
        finally:
            # Of a backward that did not come to its end.
            for unit in self._reduced:
                unit.reduction.drop()
            self._reduced = {}

    def _do(self, word: Word, unit: Unit | None) -> None:
        if word.verb == "finish":
            self._finish()
        elif unit is None:
            self._obey(word.verb, word.detail)
        elif word.verb == "begin":
            unit.streams.gather_after_compute()
            unit.agree_on_pass(word.detail)
        elif word.verb == "run":
            unit.agree_to_run()
        elif word.verb == "gather":
            unit.reshard()
            unit.start_unshard(word.detail)
        elif word.verb == "await":
            unit.finish_unshard()
            if unit.parts is None:
                unit.reshard()
        elif word.verb == "keep parts":
            unit.reshard_to_parts()
        elif word.verb == "reshard":
            unit.reshard()
        elif word.verb == "drop parts":
            unit.drop_parts()
        elif word.verb == "reduce":
            self._reduced[unit] = None
            with torch.no_grad():
                unit.reduction.stage([[None] * len(h.layout.slots) for h in unit.handles])
                unit.reduction.reduce()
        else:
            raise AssertionError(f"No such word: {word}")

    def _finish(self) -> None:
        reduced, self._reduced = [unit.reduction for unit in self._reduced], {}
        units = self._schedule.units
        with torch.no_grad():
            streams = self._schedule.root.streams
            streams.compute_after_reduces()
            if any(unit.offloads for unit in units):
                streams.host_after_reduces()
            settle_all(reduced)
        run_hooks_of_all(reduced)
