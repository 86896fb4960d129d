"""Resuming a run: whether steps are left, and how changed options affect the learning rate."""

from __future__ import annotations

import math
import shlex

from ..options import Options
from ..problems import BadInput
from .optimization import learning_rate
from .run_folder import RunFolder

__all__ = ["check_steps", "nothing_left", "resumption_in_words"]


def check_steps(folder: RunFolder, options: Options, done: int) -> None:
    """Raise ``BadInput`` if the run's checkpoint is past the last step: steps cannot be undone."""
    if options.steps < done:
        raise BadInput(
            f"{folder.path} is already at step {done}, past --steps {options.steps}; pass more "
            f"than {done} steps to resume it, or start a new run"
        )


def nothing_left(folder: RunFolder, before: Options, options: Options, done: int) -> str | None:
    """The message for a run that is finished; None if anything is left to do.

    That is the case if steps are left, if the run ended after its last checkpoint but before it
    wrote its sample, or if a sample of another length is requested.
    """
    if done < options.steps or not folder.sample.exists() or before.sample != options.sample:
        return None
    longer = shlex.join(["fullshard", "train", "--resume", *folder.flags])
    return (
        f"{folder.path} is finished, at step {done} of {done}: there is nothing to do. To train it "
        f"further, pass more steps: {longer} --steps {2 * done}"
    )


def resumption_in_words(before: Options, options: Options, done: int) -> dict[str, str]:
    """Describe where a run resumes, and the jump of its learning rate if options changed.

    A run that is extended follows the schedule of the longer run from here on, as if it had been
    started with it. If the learning rate has already decayed, it rises again.
    """
    if not done:
        return {}
    rows = {"resuming": f"after step {done:,}"}
    expected, rate = learning_rate(before, done + 1), learning_rate(options, done + 1)
    if math.isclose(expected, rate, rel_tol=1e-6):
        return rows
    last = learning_rate(before, done)
    why = "by the new options"
    if before.steps != options.steps and options.schedule != "constant":
        ends = f"ends at step {options.steps:,}, not {before.steps:,}"
        why = f"the {options.schedule} schedule now {ends}"
    if math.isclose(last, rate, rel_tol=1e-3):
        rows["rate"] = f"stays at {rate:.3g}: {why}"
    elif rate < last:
        rows["rate"] = f"down from {last:.3g} to {rate:.3g}: {why}"
    else:
        keeping = f"--schedule constant --learning-rate {last:.3g}"
        rows["rate"] = f"up from {last:.3g} to {rate:.3g}: {why}\n{'':9} (to keep it: {keeping})"
    return rows
