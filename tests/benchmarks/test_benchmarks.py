"""Every benchmark runs at toy size on a CPU, prints its table and writes what it says it writes."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS: dict[str, list[str]] = {
    "step": ["--cases", "toy@1", "--compute", "float32", "--rounds", "3", "--steps", "1"],
    "cpu_collectives": ["--ranks", "2", "--model", "toy", "--rounds", "2", "--steps", "1"],
    "profile_step": ["--case", "toy@8", "--steps", "2"],
    "overlap": ["--case", "toy@8", "--bandwidths", "0.01", "--rounds", "1", "--steps", "2"],
    "whole_tensors": [
        *("--cases", "toy@2", "--networks", "0", "0.01", "--rounds", "2", "--steps", "1"),
        *("--seconds", "0"),
    ],
    "trace": [
        # Steps long enough that what is outside of units is little.
        *("--case", "cpu", "--simulate", "64", "--bandwidth", "1", "--rounds", "1", "--steps", "2"),
        *("--warmup", "1"),
    ],
    "growth": [
        *("--units", "2", "4", "--parameters", "1", "2", "--ranks", "8", "16"),
        *("--rounds", "2", "--steps", "1"),
    ],
}
ROWS = {
    "step": ["bare", "FSDP1", "FSDP2", "fullshard", "fullshard fully_shard"],
    "overlap": ["FSDP2", "fullshard", "fullshard int8"],
    "growth": ["bare", "fullshard"],
}
ON_CPU = {"step", "profile_step", "overlap", "growth", "trace"}


#: Added to a version that takes its turns beside this one: it lacks what came later.
EARLIER = """
print('the other version is imported', flush=True)
_make = FullyShardedDataParallel.__init__
def _of_earlier(self, *args, **options):
    is_ours = 'auto_wrap_policy' not in options
    assert is_ours or 'communication' not in options, 'there was no such option'
    _make(self, *args, **options)
FullyShardedDataParallel.__init__ = _of_earlier
"""


def start(program: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(ROOT / "benchmarks" / f"{program}.py"), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, Any]]:
    """What each program printed and wrote; they run side by side, since most of it is imports."""
    folder = tmp_path_factory.mktemp("results")
    running = {}
    for program, arguments in PROGRAMS.items():
        rows = ["--rows", *ROWS[program]] if program in ROWS else []
        device = ["--device", "cpu"] if program in ON_CPU else []
        file = str(folder / f"{program}.json")
        running[program] = start(program, *arguments, *rows, *device, "--json", file)
    found = {}
    for program, process in running.items():
        printed, _ = process.communicate(timeout=240)
        assert process.returncode == 0, printed
        found[program] = (printed, json.loads((folder / f"{program}.json").read_text()))
    return found


def test_every_row_of_the_step_table_computes_the_bare_model_s_losses(results: Any) -> None:
    printed, written = results["step"]
    rows = written["cases"][0]["rows"]

    assert set(rows) == {"bare", "FSDP2", "fullshard", "fullshard fully_shard"}
    for row in rows.values():
        assert row["losses"] == pytest.approx(rows["bare"]["losses"], rel=1e-6)
    assert len(set(rows["bare"]["losses"])) > 1, "nothing was learned"
    assert "torch's FSDP1 does not train on CPUs" in printed


def test_one_rank_issues_no_collective(results: Any) -> None:
    _, written = results["step"]

    assert written["cases"][0]["rows"]["fullshard"]["collectives"] == 0


def test_the_step_table_has_a_verdict_for_each_bar(results: Any) -> None:
    printed, written = results["step"]
    verdicts = written["cases"][0]["bars"]

    assert [(v["column"], v["against"]) for v in verdicts] == [
        ("step ms", "bare"),
        ("collectives", "(count)"),
    ]
    rows = written["cases"][0]["rows"]
    times = [[turn["step ms"] for turn in rows[row]["rounds"]] for row in ("fullshard", "bare")]
    ratio = statistics.median(ours / bare for ours, bare in zip(*times, strict=True))
    assert verdicts[0]["ratio"] == pytest.approx(ratio)
    assert verdicts[0]["pass"] == (ratio <= 1.15)
    assert printed.count("pass") + printed.count("MISS") == len(verdicts)


def test_real_ranks_compute_the_bare_model_s_losses_in_every_row(results: Any) -> None:
    _, written = results["cpu_collectives"]
    rows = written["runs"][0]["rows"]

    ours = {"fullshard", "fullshard SHARD_GRAD_OP", "fullshard fully_shard"}
    assert set(rows) == {"bare", "DDP", "FSDP2", *ours}
    for row in rows.values():
        assert row["losses"] == pytest.approx(rows["bare"]["losses"], rel=1e-5)
        assert row["x bare"] > 0


def test_sharded_rows_hold_less_memory_than_a_whole_model(results: Any) -> None:
    _, written = results["cpu_collectives"]
    run = written["runs"][0]
    rows, parameters = run["rows"], run["parameters MiB"]

    # Parameters and two states of AdamW for each, whole or in two halves; alignment adds a little.
    assert rows["bare"]["held MiB"] >= 3 * parameters
    assert rows["fullshard"]["held MiB"] < rows["bare"]["held MiB"] - 1.4 * parameters


def test_the_profile_accounts_for_the_whole_step(results: Any) -> None:
    _, written = results["profile_step"]
    phases = written["phases"]

    assert written["missing"] == []
    # Three units: a host keeps the root's and the two last ones' for backward.
    assert phases["unshard: all-gather"]["calls"] == 3
    assert phases["reduce: collective"]["calls"] == 3
    clocked = sum(phase["ms"] for phase in phases.values())
    assert 0.5 * written["mean clocked ms"] < clocked <= written["mean clocked ms"]


def test_both_sides_of_the_overlap_table_send_the_same_bytes_in_a_collective(results: Any) -> None:
    _, written = results["overlap"]
    rows = written["bandwidths"]["0.01"]["rows"]

    assert set(rows) == {"FSDP2", "fullshard", "fullshard int8"}
    ours, theirs, encoded = rows["fullshard"], rows["FSDP2"], rows["fullshard int8"]
    assert encoded["communication ms"] < ours["communication ms"]
    # On a host the two last units are gathered once, not twice: of a block of width 32 in bfloat16,
    # seven eighths come from the other ranks.
    assert (ours["collectives"], theirs["collectives"]) == (6, 8)
    block = (12 * 32 + 13) * 32 * 2
    gather = 0.02 + 1e3 * block * 7 / 8 / 0.01e9
    total = ours["communication ms"] + 2 * gather
    assert total == pytest.approx(theirs["communication ms"], rel=0.02)
    for row in rows.values():
        # On one line of work nothing ends before all collectives have.
        assert row["step ms"] >= row["communication ms"]


def test_growth_has_a_time_for_every_size_and_row(results: Any) -> None:
    _, written = results["growth"]

    assert [sweep["sweep"] for sweep in written["sweeps"]] == ["units", "parameters", "ranks"]
    for sweep in written["sweeps"]:
        assert set(sweep["rows"]) == {"bare", "fullshard"}
        for values in sweep["rows"].values():
            for column, times in values.items():
                assert len(times) == len(sweep["sizes"])
                assert all(map(math.isfinite, times))
                # The garbage collector may have had nothing to do.
                assert min(times) > 0 or column == "collector ms"


def test_pictures_are_drawn_from_what_was_written(results: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    names = {
        "step": "step",
        "cpu_collectives": "cpu",
        "profile_step": "profile",
        "overlap": "overlap",
        "growth": "growth",
    }
    arguments = ["--folder", str(tmp_path)]
    for program, name in names.items():
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(results[program][1]))
        arguments += [f"--{name}", str(file)]

    process = start("plots", *arguments)
    printed, _ = process.communicate(timeout=120)

    assert process.returncode == 0, printed
    for name in names.values():
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_pictures_of_the_documents_are_drawn_from_their_data(tmp_path: Path) -> None:
    data = ROOT / "docs" / "pictures" / "data"
    process = start("plots", "--data", str(data), "--folder", str(tmp_path))
    printed, _ = process.communicate(timeout=120)

    assert process.returncode == 0, printed
    assert {file.stem for file in tmp_path.glob("*.png")} == {file.stem for file in data.iterdir()}


def test_another_version_of_fullshard_takes_turns_in_the_step_table(tmp_path: Path) -> None:
    source = tmp_path / "src"
    shutil.copytree(ROOT / "src" / "fullshard", source / "fullshard")
    earlier = source / "fullshard" / "fsdp.py"
    earlier.write_text(earlier.read_text() + EARLIER)
    options = ["--cases", "toy@8", "--rows", "fullshard", "--rounds", "1", "--steps", "1"]
    process = start("step", *options, "--device", "cpu", "--before", str(source))
    printed, _ = process.communicate(timeout=240)

    assert process.returncode == 0, printed
    assert printed.count("the other version is imported") == 1
    assert "fullshard before" in printed
    assert "not measured" not in printed


def test_programs_for_a_gpu_know_the_options_that_they_are_given() -> None:
    printed, _ = start("on_gpu", "--list").communicate(timeout=60)
    commands = re.findall(r"^  \S+ +\d+ s +(\S+\.py)(.*)", printed, re.MULTILINE)

    assert len(commands) == len(re.findall(r"^  ", printed, re.MULTILINE)) > 10
    for program, options in commands:
        source = (ROOT / program).read_text()
        for option in re.findall(r"--[a-z-]+", options):
            assert f'"{option}"' in source, f"{program} has no {option}"


def test_a_program_for_a_gpu_for_which_no_time_is_left_does_not_begin(tmp_path: Path) -> None:
    process = start("on_gpu", "--only", "profile", "--seconds", "1", "--folder", str(tmp_path))
    printed, _ = process.communicate(timeout=60)

    assert process.returncode == 1
    assert "profile" in printed
    assert "not run: the time was up" in printed


def test_a_trace_of_one_of_many_ranks_says_what_it_cost_and_saw(results: Any) -> None:
    printed, written = results["trace"]

    assert "GPT in 9 units on 64 ranks" in printed
    assert written["ranks"] == 64
    assert written["cost"] > 0
    assert 0.9 < written["accounted for"] <= 1
    assert written["of the profiler's"] is None, "there are no kernels on a CPU"


def test_parts_for_a_gpu_fit_into_their_time_and_leave_nothing_out() -> None:
    printed, _ = start("on_gpu", "--list").communicate(timeout=60)
    parts = re.findall(r"^(\S+): (\d+) s$", printed, re.MULTILINE)

    assert len(parts) > 1
    assert all(int(seconds) <= 560 for _, seconds in parts)


def test_optimizers_of_whole_tensors_are_compared_over_every_network(results: Any) -> None:
    printed, written = results["whole_tensors"]
    assert "toy@2, collectives that return at once" in printed
    # One for each network, though there is no time for any.
    assert printed.count("(1 of 2 rounds: the time was up)") == 2
    found = written["results"]["toy@2"]
    assert set(found) == {"0.0", "0.01"}
    for rows in found.values():
        assert list(rows) == ["none", "AdamW", "Muon whole", "Muon gathered", "Muon by hand"]
        for values in rows.values():
            assert values["step ms"] > 0
    assert {"exposed ms"} <= set(found["0.01"]["Muon whole"])


@pytest.mark.skipif(not os.environ.get("FULLSHARD_LONG"), reason="six ranks: only in long runs")
def test_runs_with_and_without_encoding_are_compared_and_not_repeated(tmp_path: Path) -> None:
    small = ["--steps", "20", "--seeds", "0", "--set", "layers=1", "width=32", "sample=4"]
    words = [*small, "--jobs", "3", "--runs", str(tmp_path), "--json", str(tmp_path / "it.json")]

    first, _ = start("learning", *words).communicate(timeout=240)
    again, _ = start("learning", *words).communicate(timeout=60)
    read, _ = start("learning", "--read", str(tmp_path / "it.json")).communicate(timeout=60)

    assert "int8 all-gather and reduce" in first
    assert first == again == read
    rows = json.loads((tmp_path / "it.json").read_text())["rows"]
    assert len({row["loss"] for row in rows.values()}) == 3
