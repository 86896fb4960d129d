"""A rank that fails, ends, hangs or is stopped: every other rank says for whom it waits, and where.

Each case is a program of its own on real processes, without a launcher: nobody ends the others. The
first rank provides the store at which ranks meet, so that its faults are the hardest to tell.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest

LONG = bool(os.environ.get("FULLSHARD_LONG"))
#: Seconds within which all ranks are told.
LIMIT = 10.0


def _load_benchmark() -> Any:
    file = Path(__file__).parents[2] / "benchmarks" / "faults.py"
    spec = importlib.util.spec_from_file_location("faults", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["faults"] = module
    spec.loader.exec_module(module)
    return module


faults = _load_benchmark()


def cases(*short: tuple[int, int]) -> Any:
    """Numbers of ranks, and the rank at fault; more of them in long runs."""
    every = [(ranks, rank) for ranks in (2, 4) for rank in (0, -1)]
    if not LONG and not short:
        return pytest.mark.skip("slow: runs in make test-long")
    return pytest.mark.parametrize(("ranks", "rank"), every if LONG else short)


def others(fault: str, ranks: int, rank: int, **options: Any) -> list[Any]:
    """What became of the ranks that did nothing wrong."""
    outcomes = faults.run(faults.Case(fault, "gloo", ranks, "none", rank, **options))
    return [outcome for outcome in outcomes if outcome.rank != rank % ranks]


def assert_told(outcome: Any, *parts: str) -> None:
    assert outcome.told is not None, outcome
    assert outcome.told < LIMIT, outcome
    for part in parts:
        assert part in outcome.first_error, outcome


@cases((2, 0))
def test_a_skipped_unit_is_named_on_all_ranks_that_end_at_once(ranks: int, rank: int) -> None:
    outcomes = faults.run(faults.Case("skip", "gloo", ranks, "none", rank, leave_at_once=True))
    for outcome in outcomes:
        assert_told(outcome, "RanksDisagreeError", "layers.1", "layers.2", f"{rank % ranks}: ")


@cases((2, -1))
def test_an_exception_on_one_rank_is_told_to_all_others(ranks: int, rank: int) -> None:
    for outcome in others("exception", ranks, rank):
        assert_told(outcome, "RankLostError", f"Rank {rank % ranks} is gone", "of unit 'layers.0'")
        assert_told(outcome, "ended with ValueError: this rank's own data")


@cases((2, 0))
def test_an_exception_before_the_first_operation_is_told_to_all_others(
    ranks: int, rank: int
) -> None:
    """Ranks do not know each other's mailboxes yet: the store has to tell, if it is not gone."""
    for outcome in others("exception", ranks, rank, step=0):
        assert_told(outcome, "RankLostError", f"Rank {rank % ranks} is gone", "forward of unit")
        assert_told(outcome, "ended with ValueError: this rank's own data")


@cases((2, 0))
def test_a_rank_that_is_killed_is_named_on_all_others(ranks: int, rank: int) -> None:
    for outcome in others("kill", ranks, rank):
        assert_told(outcome, "RankLostError", f"Rank {rank % ranks} is gone", "of unit 'layers.0'")


@cases((2, -1))
def test_a_rank_that_is_killed_before_the_first_operation_is_named(ranks: int, rank: int) -> None:
    """Where the ranks share a host; else, ranks that do not know each other can only wait."""
    for outcome in others("kill", ranks, rank, step=0):
        assert_told(outcome, "RankLostError", f"Rank {rank % ranks} is gone", "forward of unit")


@cases()
def test_a_rank_that_leaves_the_training_loop_early_is_named_on_all_others(
    ranks: int, rank: int
) -> None:
    for outcome in others("leave", ranks, rank):
        assert_told(outcome, "RankLostError", f"Rank {rank % ranks} is gone", "of unit 'layers.0'")


@pytest.mark.parametrize("fault", ["hang", "stop"])
@cases()
def test_a_rank_that_hangs_or_is_stopped_is_named_and_waited_for(
    ranks: int, rank: int, fault: str
) -> None:
    for outcome in others(fault, ranks, rank):
        assert outcome.status == 0, outcome
        assert outcome.steps == 6, outcome
        assert f"s for rank {rank % ranks}, and is at the run of unit 'layers.0'" in outcome.warning
        assert outcome.warned < LIMIT
        where = "faulty_training.py:" if fault == "hang" else "alive and does not answer"
        assert where in outcome.warning
