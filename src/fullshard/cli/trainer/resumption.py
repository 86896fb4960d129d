"""What continuing a run means: whether anything is left to do, and what changes from here on."""

from __future__ import annotations

import math
import shlex

from ..options import Options
from ..problems import BadInput
from .rates import learning_rate
from .run_folder import RunFolder

__all__ = ["check_steps", "nothing_left", "resumption_in_words"]


def check_steps(folder: RunFolder, options: Options, done: int) -> None:
    """Refuse a last step that is behind the checkpoint: steps cannot be taken back."""
    if options.steps < done:
        raise BadInput(
            f"{folder.path} is at step {done} already, past the last one that was asked for, "
            f"--steps {options.steps}; give more than {done} to continue it, or start a new run"
        )


def nothing_left(folder: RunFolder, before: Options, options: Options, done: int) -> str | None:
    """What to say of a run that has made all its steps, and of which nothing else is wanted.

    A run that ended after its last checkpoint and before its sample still has to write it; and a
    sample of another length may be asked for. Then, and where steps are left, this is None.
    """
    if done < options.steps or not folder.sample.exists() or before.sample != options.sample:
        return None
    longer = shlex.join(["fullshard", "train", "--resume", *folder.flags])
    return (
        f"{folder.path} is finished, at step {done} of {done}: there is nothing to do. To train it "
        f"further, give more steps: {longer} --steps {2 * done}"
    )


def resumption_in_words(before: Options, options: Options, done: int) -> dict[str, str]:
    """Where a run continues, and by how much its learning rate jumps there if options changed.

    A run that is extended follows the schedule of the longer run from here on, as if it had been
    started with it. Where the old schedule has decayed, the rate goes up again.
    """
    if not done:
        return {}
    rows = {"resuming": f"after step {done:,}"}
    expected, rate = learning_rate(before, done + 1), learning_rate(options, done + 1)
    if math.isclose(expected, rate, rel_tol=1e-6):
        return rows
    last = learning_rate(before, done)
    why = "as the options say now"
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
