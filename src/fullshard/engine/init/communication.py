"""Communication options: checks before anything is changed, and the ranks of secondary shards."""

from __future__ import annotations

from typing import Any

from ...api import Communication
from ..comm.collectives import group_for
from ..comm.neighbours import neighbours_in
from ..runtime.parts import FewRanks
from ..runtime.policy import UnitOptions
from ..runtime.unit import Unit


def check_kind(given: Any) -> None:
    """Raise TypeError unless ``given`` is a :class:`Communication`."""
    if not isinstance(given, Communication):
        raise TypeError(
            f"communication expects a fullshard.Communication, but got {given!r} of type "
            f"{type(given).__name__}"
        )


def checked_communication(
    given: Communication, options: UnitOptions, shards: Any
) -> Communication | None:
    """The communication options for a unit; None if one rank has nothing to communicate.

    All ranks of the process group ``shards`` call this.
    """
    check_kind(given)
    if shards.size() == 1 and not options.is_sharded:
        return None
    if not options.is_sharded:
        raise ValueError(
            f"communication={given!r} is for sharded parameters, but {options.strategy} shards "
            "none: nothing is all-gathered, and gradients are all-reduced. Choose a strategy that "
            "shards, or leave communication out"
        )
    if given.encodes and not options.use_orig_params:
        raise ValueError(
            "all_gather_dtype and reduce_dtype need use_orig_params=True: without it a unit's "
            "parameters are one flat parameter, in which norms and biases could not be left in "
            "full precision"
        )
    if given.secondary_shards and options.keeps_full_after_forward:
        raise ValueError(
            f"secondary_shards={given.secondary_shards} is for strategies that reshard after "
            f"forward, but {options.strategy} keeps full parameters for the backward: choose "
            "FULL_SHARD or HYBRID_SHARD, or leave secondary_shards out"
        )
    if given.secondary_shards and shards.size() > 1:
        # Raises if the ranks cannot be grouped in this way.
        neighbours_in(shards, given.secondary_shards)
    return given


def share_secondary_shards(unit: Unit) -> None:
    """Have a unit in the flat layout keep secondary shards, if its options say so.

    All ranks that share it call this. Nothing changes if it keeps some already.
    """
    given, shards = unit.options.communication, unit.shards
    if given is None or not given.secondary_shards or shards.size == 1 or unit.parts is not None:
        return
    few = neighbours_in(shards.group, given.secondary_shards)
    if few is not None:
        unit.keep_parts(FewRanks(group_for(few, unit.device), None))
