"""The time that ``fullshard plan`` foretells, and the combination that it finds."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.marks import in_long_runs
from torch import nn

from fullshard.cli.options import Options
from fullshard.cli.planner.fit import (
    Candidate,
    Question,
    best_that_fit,
    between,
    candidates_of,
    rates_of,
)
from fullshard.cli.planner.machine import MACHINES, Machine, machine_named, rate_of
from fullshard.cli.planner.plan import plan as show_plan
from fullshard.cli.planner.prediction import (
    Rehearsal,
    Subject,
    gpt_subject,
    predict_memory,
    rehearse,
)
from fullshard.cli.planner.step_time import simulate
from fullshard.cli.planner.timing import Timing
from fullshard.cli.problems import BadInput
from fullshard.tracing.analysis import segments
from fullshard.tracing.records import COLLECTIVES, RankTrace, What
from fullshard.wrap.description import Layout

H200 = MACHINES["h200"]
#: Collectives that return at once, as in benchmarks/step.py.
FREE = dataclasses.replace(H200, network=math.inf, latency=0.0)


def benchmark_model(name: str) -> tuple[Subject, Any]:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
    try:
        import gpt
    finally:
        del sys.path[0]
    size = gpt.SIZES[name]

    def loss(model: nn.Module, sequences: int, length: int) -> torch.Tensor:
        return model(torch.empty(sequences, length + 1, dtype=torch.long, device="meta"))

    with torch.device("meta"):
        return Subject(gpt.GPT(size), loss), size


def foretold(
    name: str,
    ranks: int,
    machine: Machine,
    strategy: str = "full_shard",
    precision: str = "bfloat16",
    layout: Layout = "flat",
) -> RankTrace:
    subject, size = benchmark_model(name)
    options = Options(
        batch=size.batch * ranks, sequence=size.length, precision=precision, strategy=strategy
    )
    device = torch.device("cpu" if machine.name == "cpu" else "cuda")
    found = rehearse(subject, options, ranks, device, layout, machine.seconds_of)
    return timed(found, options, machine)


def timed(found: Rehearsal, options: Options, machine: Machine) -> RankTrace:
    rates = rates_of(options, machine)
    return simulate(found.sizes, found.moments, found.facts, rates)


@pytest.mark.parametrize(
    ("name", "ranks", "measured"),
    [("1.34B", 8, 61.3), ("1.34B", 64, 60.4), ("184M", 64, 100.1), ("3.5B", 64, 246.1)],
)
def test_steps_with_free_collectives_take_what_was_measured_on_an_h200(
    name: str, ranks: int, measured: float
) -> None:
    """The rows of docs/performance.md, in milliseconds."""
    assert 1e3 * foretold(name, ranks, FREE).steps[0].seconds == pytest.approx(measured, rel=0.2)


@pytest.mark.parametrize(
    ("name", "ranks", "measured"), [("1.34B", 8, 65.9), ("1.34B", 64, 63.9), ("184M", 64, 90.6)]
)
def test_steps_of_fully_shard_take_what_was_measured(
    name: str, ranks: int, measured: float
) -> None:
    found = foretold(name, ranks, FREE, layout="rows")

    assert 1e3 * found.steps[0].seconds == pytest.approx(measured, rel=0.2)


def test_a_single_rank_takes_what_was_measured() -> None:
    assert 1e3 * foretold("1.34B", 1, FREE).steps[0].seconds == pytest.approx(79.3, rel=0.2)


@pytest.mark.parametrize(
    ("bandwidth", "measured"),
    [(800, 382.1), (400, 386.2), (200, 435.8), (100, 825.9), (50, 1612.4)],
)
def test_steps_over_a_network_take_what_was_measured(bandwidth: float, measured: float) -> None:
    machine = dataclasses.replace(H200, network=bandwidth * 1e9)

    assert 1e3 * foretold("9.9B", 64, machine).steps[0].seconds == pytest.approx(measured, rel=0.2)


@pytest.mark.parametrize(
    ("ranks", "strategy", "measured"),
    [
        (2, "full_shard", 406),
        (2, "shard_grad_op", 381),
        (4, "full_shard", 818),
        (4, "shard_grad_op", 768),
    ],
)
def test_steps_of_a_cpu_take_what_was_measured(ranks: int, strategy: str, measured: float) -> None:
    known = MACHINES["cpu"]
    # They shared two cores.
    rate = known.flops * 2 / ranks
    machine = dataclasses.replace(known, flops=rate, float32_flops=rate)

    found = foretold("cpu", ranks, machine, strategy, "float32")

    assert 1e3 * found.steps[0].seconds == pytest.approx(measured, rel=0.2)


# -- what a simulated step consists of ----------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_a_simulated_step_is_in_order(device: str, strategy: str) -> None:
    options = Options(layers=4, batch=8, strategy=strategy)
    machine = MACHINES["cpu" if device == "cpu" else "a100"]
    found = rehearse(
        gpt_subject(options), options, 2, torch.device(device), seconds_of=machine.seconds_of
    )

    trace = timed(found, options, machine)

    (step,) = trace.steps
    assert all(r.issued <= r.started <= r.ended <= step.ended + 1e-9 for r in trace.records)
    for kind in COLLECTIVES:
        carried = sorted((r.started, r.ended) for r in trace.records if r.what is kind)
        assert all(a[1] <= b[0] + 1e-12 for a, b in itertools.pairwise(carried))
    reduced = [r.unit for r in trace.records if r.what is What.REDUCE_SCATTER]
    assert sorted(reduced) == sorted(unit.path for unit in found.sizes)
    gathered = [r.unit for r in trace.records if r.what is What.ALL_GATHER]
    # Under SHARD_GRAD_OP once; FULL_SHARD gathers all but those that backward begins with twice.
    times = 1 if strategy == "shard_grad_op" else 2
    assert max(gathered.count(unit) for unit in gathered) == times
    whole = sum(segment.seconds for segment in segments(trace.records, step))
    assert whole == pytest.approx(step.seconds)


def test_the_memory_of_a_simulated_step_peaks_where_plan_says() -> None:
    options = Options(model="small", batch=8)
    device = torch.device("cuda")
    _, predicted = predict_memory(gpt_subject(options), options, 2, device)
    found = rehearse(
        gpt_subject(options), options, 2, device, seconds_of=MACHINES["a100"].seconds_of
    )

    trace = timed(found, options, MACHINES["a100"])

    assert max(moment.total for moment in trace.memory) == predicted.total


def test_a_slower_network_never_makes_a_step_faster() -> None:
    seconds = [
        foretold("1.34B", 8, dataclasses.replace(H200, network=rate * 1e9)).steps[0].seconds
        for rate in (400, 100, 25, 5)
    ]

    assert seconds == sorted(seconds)
    # At 5 GB/s nothing but the network counts: two all-gathers of bf16 and a reduce of fp32.
    assert seconds[-1] > 7 / 8 * 1.34e9 * (2 + 2 + 4) / 5e9 * 0.9


def test_a_host_that_is_slower_than_its_device_stretches_what_units_compute() -> None:
    """In a step that ran, a unit lasts until its last kernel, however late that was launched."""
    quick = dataclasses.replace(H200, per_operation=0.0, per_unit=0.0, network=math.inf, latency=0)
    slow = dataclasses.replace(quick, per_operation=1e-3)

    device_bound, host_bound = foretold("184M", 8, quick), foretold("184M", 8, slow)

    (step,) = host_bound.steps
    assert step.seconds > 5 * device_bound.steps[0].seconds
    shares = Counter[What]()
    for segment in segments(host_bound.records, step):
        shares[segment.what] += segment.seconds / step.seconds
    assert shares[What.FORWARD] + shares[What.BACKWARD] > 0.95
    assert shares[What.OUTSIDE] < 0.02


# -- the fastest that fits ----------------------------------------------------------------------


def question(usable: int, **given: Any) -> Question:
    options = Options(**{"model": "small", "precision": "bfloat16", "sequence": 256, **given})
    return Question(
        lambda: gpt_subject(options),
        options,
        given,
        8,
        torch.device("cuda"),
        MACHINES["a100"],
        usable,
    )


@pytest.mark.parametrize(
    ("asked", "kinds"),
    [
        # Offload to the host is none on a host.
        ({"device": torch.device("cpu")}, {("full_shard", False), ("shard_grad_op", False)}),
        # One rank shards nothing.
        ({"ranks": 1}, {("full_shard", False), ("full_shard", True)}),
    ],
)
def test_combinations_that_are_the_same_are_tried_once(
    asked: dict[str, Any], kinds: set[tuple[str, bool]]
) -> None:
    tried = [*candidates_of(dataclasses.replace(question(2**40, batch=8), **asked))]

    assert {(each.options.strategy, each.options.offload) for each in tried} == kinds
    assert {o.strategy for o in options_of(tried) if o.wrap == "none"} == {"full_shard"}
    wrapped = [(o.strategy, o.offload, o.wrap, o.checkpoint_activations) for o in options_of(tried)]
    assert len(set(wrapped)) == len(wrapped)
    assert not any(o.wrap == "none" and o.checkpoint_activations for o in options_of(tried))


def options_of(candidates: list[Candidate]) -> list[Options]:
    return [each.options for each in candidates]


@in_long_runs
def test_what_is_found_fits_and_is_faster_than_what_was_passed_over() -> None:
    found = best_that_fit(question(4 * 2**30))

    assert found
    assert all(candidate.memory <= 4 * 2**30 for candidate in found)
    best = found[0]
    assert all(other.sequences_per_second <= best.sequences_per_second for other in found[1:])
    # What was foretold for the winner is what planning it alone says.
    _, alone = predict_memory(gpt_subject(best.options), best.options, 8, torch.device("cuda"))
    assert best.memory == alone.total


@in_long_runs
def test_with_more_memory_nothing_gets_slower() -> None:
    def speed(gib: float) -> float:
        found: list[Candidate] = best_that_fit(question(int(gib * 2**30)))
        return found[0].sequences_per_second

    assert speed(2) <= speed(8) <= speed(40)


@in_long_runs
def test_options_that_are_given_stay_as_they_are() -> None:
    found = best_that_fit(question(8 * 2**30, strategy="shard_grad_op", batch=16))

    assert {candidate.options.strategy for candidate in found} == {"shard_grad_op"}
    assert {candidate.options.batch for candidate in found} == {16}


def test_nothing_is_found_where_nothing_fits() -> None:
    assert best_that_fit(question(2**20)) == []


@pytest.mark.parametrize("sequences", [8, 64])
def test_passes_of_other_batches_are_close_to_what_running_them_finds(sequences: int) -> None:
    def moments(count: int) -> Any:
        options = Options(model="small", batch=2 * count, precision="bfloat16", sequence=1024)
        machine = MACHINES["a100"]
        device = torch.device("cuda")
        subject = gpt_subject(options)
        return rehearse(subject, options, 2, device, seconds_of=machine.seconds_of).moments

    guessed = between(moments(4), moments(16), (sequences - 4) / (16 - 4))
    found = moments(sequences)

    assert [(m.event, m.unit) for m in guessed] == [(m.event, m.unit) for m in found]
    peak = max(m.peak_tensors for m in found)
    assert max(m.peak_tensors for m in guessed) == pytest.approx(peak, rel=0.05)
    assert guessed[-1].seconds == pytest.approx(found[-1].seconds, rel=0.05)


# -- the command --------------------------------------------------------------------------------


def plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fullshard", "plan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_plan_draws_the_step(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"

    done = plan("--model", "small", "--ranks", "16", "--batch", "16", "--device", "cuda",
                "--machine", "a100", "--bandwidth", "25GB/s", "--picture", str(page))  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert re.search(r"A step takes about .* on a100 with a network of 25 GB/s", done.stdout)
    embedded = re.search(r'id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert embedded is not None
    drawn = json.loads(embedded[1])
    assert drawn["isForetold"]
    assert len(drawn["ranks"]) == 1
    assert len(drawn["summaries"]) == 16
    assert len(drawn["table"]) == 13


@pytest.mark.parametrize(
    ("ranks", "bandwidth", "is_said"), [(8, None, False), (16, None, True), (16, "50G", False)]
)
def test_plan_says_when_it_takes_the_links_of_a_host_for_the_network_between_hosts(
    ranks: int, bandwidth: str | None, is_said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    timing = Timing(machine="h100", bandwidth=bandwidth)

    assert show_plan({"ranks": ranks, "batch": 16, "device": "cuda"}, timing=timing) == 0

    assert ("such as --bandwidth 50G" in capsys.readouterr().out) == is_said


@pytest.mark.parametrize(("machine", "device"), [("H200", "cuda"), ("cpu", "cpu")])
def test_a_machine_that_is_named_is_planned_for(
    machine: str, device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show_plan({"ranks": 2, "layers": 1}, timing=Timing(machine=machine)) == 0

    assert f"on 2 ranks ({device}): " in capsys.readouterr().out


def test_a_picture_that_cannot_be_written_is_bad_input() -> None:
    with pytest.raises(BadInput, match=r"--picture /proc/no/plan\.html cannot be written"):
        show_plan({"ranks": 2, "layers": 1}, timing=Timing(picture=Path("/proc/no/plan.html")))


def test_plan_finds_the_fastest_that_fits() -> None:
    done = plan("--model", "small", "--ranks", "8", "--fit", "a100-40g")

    assert done.returncode == 0, done.stderr
    assert "The fastest that fits a100-40g: " in done.stdout
    assert "tokens/s on 8 ranks of a100" in done.stdout
    assert "Fits a100-40g" in done.stdout


def test_plan_says_that_nothing_fits() -> None:
    done = plan("--model", "xl", "--ranks", "2", "--fit", "100MiB")

    assert done.returncode == 3
    assert "No combination fits 100MiB on 2 ranks" in done.stdout
    assert "a single unit is larger" in done.stdout


def test_plan_says_what_comes_closest() -> None:
    done = plan("--model", "tiny", "--ranks", "2", "--fit", "4MiB", "--device", "cuda")

    assert done.returncode == 3
    least = re.search(
        r"the least is ([\d.]+) MiB \(.*, 1 sequence per rank and pass\)", done.stdout
    )
    assert least is not None
    assert 0.9 * 4 < float(least[1]) < 40


@in_long_runs
def test_the_fastest_of_a_model_of_70_billion_is_found_in_30_seconds_of_one_core() -> None:
    options = Options(model="65b", precision="bfloat16", sequence=2048)
    asked = Question(
        lambda: gpt_subject(options, 32_000),
        options,
        {},
        64,
        torch.device("cuda"),
        MACHINES["h100"],
        int(0.9 * 80 * 2**30),
    )
    # Where coverage is measured, it takes more time than what it measures.
    tracer = sys.gettrace()
    sys.settrace(None)
    before = time.process_time()
    try:
        found = best_that_fit(asked)
    finally:
        taken = time.process_time() - before
        sys.settrace(tracer)

    assert taken < 30
    assert found[0].options.checkpoint_activations


@pytest.mark.parametrize(
    ("timing", "device_memory", "message"),
    [
        (Timing(picture=Path("plan.txt")), None, "--picture expects .html, .json or .png"),
        (Timing(machine="abacus"), None, "machine expects one of h200"),
        (Timing(bandwidth="fast"), None, "bandwidth expects a rate"),
        (Timing(fit="80GiB"), "80GiB", "leave --device-memory out"),
    ],
)
def test_bad_input_is_explained(timing: Timing, device_memory: str | None, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        show_plan({}, device_memory, timing=timing)


@pytest.mark.parametrize(
    ("text", "rate"), [("400G", 4e11), ("50GB/s", 5e10), ("300T", 3e14), ("1.5 P", 1.5e15)]
)
def test_rates_are_read_with_their_units(text: str, rate: float) -> None:
    assert rate_of("flops", text) == pytest.approx(rate)


def test_a_machine_with_another_speed_keeps_the_ratio_of_its_precisions() -> None:
    found = machine_named("h200", flops="420T", bandwidth="50G")

    assert found.flops == pytest.approx(420e12)
    assert found.float32_flops == pytest.approx(H200.float32_flops / 2)
    assert found.network == pytest.approx(50e9)
    with pytest.raises(BadInput):
        rate_of("flops", "0T")
