"""A rank that fails, in each way it can, fails the test with a report; the next test passes."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fullshard.testing import RankFailure, RanksFailed, ranks, run_on_ranks
from fullshard.testing.stacks import format_stack


def failures_of(
    world_size: int, function: Callable[..., Any], **limits: float
) -> tuple[str, tuple[RankFailure, ...]]:
    """Run a function that fails, and check that the ranks can be used afterwards."""
    with pytest.raises(RanksFailed) as caught:
        run_on_ranks(world_size, function, **limits)
    assert run_on_ranks(world_size, dist.get_rank) == list(range(world_size))
    return str(caught.value), caught.value.failures


def fail_on_rank_one() -> None:
    assert dist.get_rank() != 1, "this is rank one"


def raise_everywhere() -> None:
    raise LookupError("nothing here")


def wait_for_rank_one() -> None:
    if dist.get_rank() == 1:
        raise LookupError("gone")
    dist.barrier()


def sleep_on_rank_two() -> None:
    if dist.get_rank() == 2:
        time.sleep(600)


def hold_the_interpreter_on_rank_one() -> None:
    if dist.get_rank() == 1:
        ctypes.PyDLL(None).sleep(600)


def exit_on_rank_one() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


def kill_rank_one() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def crash_on_rank_one() -> None:
    if dist.get_rank() == 1:
        ctypes.string_at(0)
    dist.barrier()


def test_an_assertion_on_one_rank_shows_that_ranks_traceback() -> None:
    report, failures = failures_of(2, fail_on_rank_one)

    assert [failure.rank for failure in failures] == [1]
    assert failures[0].kind == "raised"
    assert "fail_on_rank_one failed on rank 1 of 2" in report
    assert "--- rank 1: AssertionError: this is rank one" in report
    assert 'assert dist.get_rank() != 1, "this is rank one"' in report
    assert "--- rank 0: returned" in report


@pytest.mark.skipif(
    type(__loader__).__name__ != "AssertionRewritingHook",  # type: ignore[name-defined]
    reason="pytest explains assertions",
)
def test_an_assertion_on_a_rank_is_explained_with_its_values() -> None:
    report, _ = failures_of(2, fail_on_rank_one)

    assert "assert 1 != 1" in report


def test_an_exception_on_every_rank_is_shown_once_for_all_of_them() -> None:
    report, failures = failures_of(3, raise_everywhere)

    assert [failure.summary for failure in failures] == ["LookupError: nothing here"] * 3
    assert "--- ranks 0, 1, 2: LookupError: nothing here" in report
    assert report.count("Traceback") == 1


def test_a_rank_that_waits_for_a_failed_one_is_reported_soon_with_its_stack() -> None:
    began = time.monotonic()
    report, (waiting, failed) = failures_of(2, wait_for_rank_one, grace=1)

    assert time.monotonic() - began < 10
    assert failed.summary == "LookupError: gone"
    assert waiting.kind == "hung"
    assert "in wait_for_rank_one\n    dist.barrier()" in waiting.details
    assert "rank 0: still running 1 s after another rank had failed" in report


def test_a_rank_that_hangs_is_reported_with_its_stack() -> None:
    report, (hung,) = failures_of(3, sleep_on_rank_two, timeout=2)

    assert (hung.rank, hung.kind) == (2, "hung")
    assert "--- rank 2: still running after 2 s, the time limit" in report
    assert "in sleep_on_rank_two\n    time.sleep(600)" in hung.details
    assert "--- ranks 0, 1: returned" in report


def test_a_rank_that_hangs_while_it_holds_the_interpreter_is_reported_with_its_stack() -> None:
    _, (hung,) = failures_of(2, hold_the_interpreter_on_rank_one, timeout=2)

    assert "in hold_the_interpreter_on_rank_one\n" in hung.details


def test_every_rank_of_a_deadlock_shows_where_it_is() -> None:
    def deadlock() -> None:
        if dist.get_rank() == 0:
            dist.barrier()
        else:
            dist.recv(torch.zeros(1), src=0)

    _, (first, second) = failures_of(2, deadlock, timeout=2)

    assert "dist.barrier()" in first.details
    assert "dist.recv(torch.zeros(1), src=0)" in second.details


@pytest.mark.parametrize(
    ("function", "summary"),
    [
        (exit_on_rank_one, "its process ended with exit status 7"),
        (kill_rank_one, "its process was killed by signal 9 (SIGKILL)"),
        (crash_on_rank_one, "its process was killed by signal 11 (SIGSEGV)"),
    ],
)
def test_a_rank_that_dies_is_noticed_at_once(function: Callable[[], None], summary: str) -> None:
    began = time.monotonic()
    report, (other, died) = failures_of(2, function, grace=1)

    assert time.monotonic() - began < 10
    assert (died.rank, died.kind, died.summary) == (1, "died", summary)
    assert f"of 2: rank 1: {summary}" in report.splitlines()[0]
    assert f"in {function.__name__}" in other.details
    assert "dist.barrier()" in other.details


@pytest.mark.parametrize("function", [exit_on_rank_one, crash_on_rank_one])
def test_a_rank_that_exits_or_crashes_leaves_its_stack(function: Callable[[], None]) -> None:
    _, (_, died) = failures_of(2, function, grace=1)

    assert f"in {function.__name__}\n" in died.details


def test_a_rank_that_was_killed_from_outside_between_runs_is_replaced() -> None:
    process = run_on_ranks(2, os.getpid)[1]
    os.kill(process, signal.SIGKILL)
    time.sleep(0.2)

    assert run_on_ranks(2, dist.get_rank) == [0, 1]


def test_processes_that_a_failed_rank_had_started_are_ended() -> None:
    def start_and_fail() -> None:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        raise LookupError(child.pid)

    _, failures = failures_of(1, start_and_fail)

    child = failures[0].summary.removeprefix("LookupError: ")
    assert _is_gone(int(child))


def test_the_output_of_a_failed_rank_is_in_the_report() -> None:
    def speak() -> None:
        print("last words")
        raise LookupError

    report, _ = failures_of(1, speak)

    assert "--- output of rank 0\nlast words" in report


def test_a_value_that_cannot_be_sent_back_is_an_error_that_says_so() -> None:
    report, _ = failures_of(1, lambda: lambda: None)

    assert "the value returned on this rank, of type function, cannot be sent" in report


def test_ranks_of_which_only_some_skip_have_failed() -> None:
    def skip_on_rank_zero() -> None:
        if dist.get_rank() == 0:
            pytest.skip("only here")

    report, (skipped,) = failures_of(2, skip_on_rank_zero)

    assert (skipped.rank, skipped.summary) == (0, "skipped there, but not everywhere: only here")
    assert "--- rank 1: returned" in report


def test_the_decorator_takes_a_time_limit() -> None:
    @ranks(1, timeout=0.5)
    def sleeping() -> None:
        time.sleep(600)

    with pytest.raises(RanksFailed, match=r"still running after 0\.5 s, the time limit"):
        sleeping()


def test_a_stack_is_shown_like_a_traceback_with_the_crashed_thread_after_the_main_one() -> None:
    text = (
        "Fatal Python error: Segmentation fault\n\n"
        "Current thread 0x00000001 (most recent call first):\n"
        '  File "there.py", line 2 in crash\n\n'
        "Thread 0x00000002 (most recent call first):\n"
        '  File "here.py", line 9 in inner\n'
        '  File "here.py", line 5 in outer\n'
    )

    assert format_stack(text).splitlines() == [
        '  File "here.py", line 5, in outer',
        '  File "here.py", line 9, in inner',
        "  in another thread:",
        '  File "there.py", line 2, in crash',
    ]


def _is_gone(process: int) -> bool:
    for _ in range(100):
        try:
            with open(f"/proc/{process}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False
