"""The states of saved optimizers, divided anew by names of parameters among other optimizers.

``fullshard.optim.whole`` makes one optimizer of two, which the unwrapped model has on their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..optim.params import OriginalParam
from ..optim.save import CONVERTED


def divided(
    saved: Sequence[Mapping[str, Any]], members: Sequence[Sequence[OriginalParam]]
) -> list[dict[str, Any]] | None:
    """A state for each optimizer, which has these ``members``, of those of other optimizers.

    None if the optimizers do not have the saved parameters, each of them once.
    """
    homes: dict[str, int] = {}
    for position, originals in enumerate(members):
        for original in originals:
            homes.update(dict.fromkeys(original.names, position))
    names = [name for each in saved for group in each["param_groups"] for name in group["params"]]
    is_saved = dict.fromkeys(names, True)
    originals = [original for each in members for original in each]
    if (
        len(is_saved) != len(names)
        or len(originals) != len(names)
        or not all(name in homes for name in names)
        or not all(original.find(is_saved) for original in originals)
    ):
        return None
    others = {k: v for each in saved for k, v in each.items() if k not in CONVERTED}
    found = [{"state": {}, "param_groups": [], **others} for _ in members]
    for each in saved:
        for name, state in each["state"].items():
            if name in homes:
                found[homes[name]]["state"][name] = state
        for group in each["param_groups"]:
            for position in dict.fromkeys(homes[name] for name in group["params"]):
                chosen = [name for name in group["params"] if homes[name] == position]
                found[position]["param_groups"].append({**group, "params": chosen})
    return found
