"""Which units' full parameters are there, or on their way; and how each of them goes again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..api import BackwardPrefetch
from .progress import Progress
from .unit import State, Unit


class Residents:
    """Gathers units and shelves them, on the word of the forward and of the backward."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.progress = {unit: Progress() for unit in units}
        #: Whether a backward is running; ``backward.py`` says so.
        self.in_backward = False
        #: The units that are not sharded, in the order in which they were gathered.
        self._out: dict[Unit, None] = {}
        self._kept_versions: dict[Unit, list[int]] = {}

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._out

    def all(self) -> list[Unit]:
        """A copy, to be shelved from."""
        return [*self._out]

    def gather(self, unit: Unit, exact: bool) -> None:
        """Have a unit's full parameters now, in the shards' precision if ``exact``."""
        if unit.exact != exact and unit.state is not State.SHARDED:
            self.shelve(unit)
        progress = self.progress[unit]
        if progress.outdated:
            progress.outdated = False
            unit.fill_again()
        unit.start_gather(exact)
        unit.finish_gather()
        progress.prefetched = progress.kept = progress.awaits_backward = False
        progress.asked_for = progress.versions = None
        self._out[unit] = None

    def prefetch(self, unit: Unit, exact: bool) -> None:
        """Begin to gather a unit that will probably be next."""
        if unit.state is State.SHARDED:
            unit.start_gather(exact)
            progress = self.progress[unit]
            progress.prefetched, progress.versions = True, None
            self._out[unit] = None

    def drop_outdated(self, unit: Unit) -> None:
        """Shelve a unit that awaits backward if its parameters were changed in the meantime."""
        progress = self.progress[unit]
        if progress.awaits_backward and not progress.pinned and self.was_changed(unit):
            self.shelve(unit)

    def was_changed(self, unit: Unit) -> bool:
        """Whether a unit's parameters were changed in place since their versions were noted."""
        versions = self.progress[unit].versions
        return versions is not None and versions != unit.versions()

    def drop_prefetched(self) -> None:
        """Shelve the units that were gathered on a guess and not used."""
        for unit in self.all():
            if self.progress[unit].prefetched:
                self.shelve(unit)

    def abandon(self, unit: Unit) -> None:
        """Shelve a unit whose full parameters the user may have changed after forward."""
        try:
            if unit.shows_full:
                unit.keep_changes()
        finally:
            self.shelve(unit)

    def shelve(self, unit: Unit) -> None:
        """Back to sharded: what every unit is outside of its compute."""
        progress = self.progress[unit]
        progress.prefetched = progress.kept = progress.awaits_backward = False
        progress.pinned = progress.outdated = False
        progress.asked_for = None
        self._out.pop(unit, None)
        unit.show_sharded()
        options = unit.options
        prefetches = options.backward_prefetch is BackwardPrefetch.BACKWARD_PRE
        unit.release(late=not (prefetches if self.in_backward else options.forward_prefetch))

    def begin_pass(self) -> None:
        """Of what was gathered before, leave what is still right.

        The rest was gathered for a backward that has not come, and parameters may have changed.
        """
        kept, self._kept_versions = self._kept_versions, {}
        changed = bool(kept) and kept != self._versions()
        for unit in self.all():
            progress = self.progress[unit]
            if progress.asked_for is not None:
                stays = progress.asked_for == unit.versions()
            else:
                stays = (progress.kept or progress.pinned) and not changed
            if stays and not unit.shows_full:
                unit.finish_gather()
                stays = not unit.write_back()
            if not stays:
                self.abandon(unit)
            elif progress.kept and kept:
                progress.versions = kept[unit]
            # Its memory is what a pending backward will read.
            progress.outdated = progress.pinned

    def end_backward(self, pins: Callable[[Progress], bool]) -> None:
        """Shelve everything but what a following backward is promised, which ``pins`` tells."""
        for unit in self.all():
            progress = self.progress[unit]
            progress.close()
            progress.held = False
            if progress.active:
                # A backward inside a forward: the unit is needed until that ends.
                continue
            if pins(progress) and not progress.prefetched:
                progress.pinned = True
                unit.show_sharded()
            elif not progress.kept:
                self.shelve(unit)
        self._kept_versions = self._versions() if self._out else {}

    def _versions(self) -> dict[Unit, list[int]]:
        """Counts of in-place changes to the parameters, by which kept full ones are checked."""
        return {unit: unit.versions() for unit in self.progress}
