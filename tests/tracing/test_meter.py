"""Memory by cause, from what an allocator says."""

from __future__ import annotations

import time

import pytest
import torch

from fullshard.tracing import meter
from fullshard.tracing.allocator import InUse, counter_of
from fullshard.tracing.meter import Meter


def totals(said: list[InUse], monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, int]]:
    """When how much was in use, by an allocator that says this when the meter is made, and then at
    each second.
    """
    answers = iter(said)
    monkeypatch.setattr(meter, "counter_of", lambda _: lambda: next(answers))
    forgotten: list[torch.device] = []
    monkeypatch.setattr(meter, "forget_peak", forgotten.append)
    made = Meter([], torch.device("cuda"))
    assert forgotten == [torch.device("cuda")]
    for second in range(len(said) - 1):
        made.sample(float(second))
    return [(moment.at, moment.total) for moment in made.memory(float)]


def test_a_peak_between_two_samples_lasts_from_the_first_to_the_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = [InUse(10, 50), InUse(20, 50), InUse(30, 90), InUse(25, 90)]

    assert totals(said, monkeypatch) == [(0.0, 10), (0.0, 80), (1.0, 20), (2.0, 15)]


def test_peaks_from_before_the_trace_are_not_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    said = [InUse(10, 90), InUse(20, 90), InUse(30, 90)]

    assert totals(said, monkeypatch) == [(0.0, 10), (1.0, 20)]


def test_peaks_that_were_reset_count_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    said = [InUse(10, 90), InUse(20, 20), InUse(30, 60)]

    assert totals(said, monkeypatch) == [(0.0, 10), (0.0, 50), (1.0, 20)]


def test_an_allocator_that_counts_slowly_is_not_asked_any_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = 0

    def slow() -> InUse:
        nonlocal asked
        asked += 1
        until = time.thread_time() + 2e-3
        while time.thread_time() < until:
            pass
        return InUse(10 * asked)

    monkeypatch.setattr(meter, "counter_of", lambda _: slow)
    made = Meter([], torch.device("cpu"))
    for second in range(50):
        made.sample(float(second))

    # The first one was asked what there is beside the model.
    totals = [moment.total for moment in made.memory(float)]
    assert 3 <= asked < 20
    assert totals == [*range(10, 10 * asked, 10), *[10 * (asked - 1)] * (51 - asked)]


def test_the_host_keeps_no_peak() -> None:
    count = counter_of(torch.device("cpu"))

    if count is not None:
        assert count().now > 0
        assert count().most == 0
