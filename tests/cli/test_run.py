"""The command line of ``fullshard run``: whose options are whose."""

from __future__ import annotations

from pathlib import Path

import pytest

from fullshard.cli.launcher.run import Invocation, read_invocation, run_program
from fullshard.cli.problems import BadInput


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train.py"], Invocation(None, (), ("train.py",))),
        (
            ["--ranks", "4", "train.py", "--ranks", "9", "-m"],
            Invocation(4, (), ("train.py", "--ranks", "9", "-m")),
        ),
        (["--ranks=4", "-m", "a.b", "x"], Invocation(4, (), ("-m", "a.b", "x"))),
        (
            ["--nnodes", "2", "--ranks", "4", "--rdzv-endpoint=host:1", "t.py", "--help"],
            Invocation(4, ("--nnodes", "2", "--rdzv-endpoint=host:1"), ("t.py", "--help")),
        ),
        (
            ["--nproc_per_node", "3", "--standalone", "t.py", "t.py"],
            Invocation(None, ("--nproc_per_node", "3", "--standalone"), ("t.py", "t.py")),
        ),
    ],
)
def test_the_words_of_a_command_line_are_told_apart(words: list[str], expected: Invocation) -> None:
    assert read_invocation(words) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["t.py", "--"], Invocation(None, (), ("t.py", "--"))),
        (
            ["--ranks", "1", "t.py", "--", "--a", "b", "--", "c"],
            Invocation(1, (), ("t.py", "--", "--a", "b", "--", "c")),
        ),
        (["t.py", "a", "--", "b"], Invocation(None, (), ("t.py", "a", "--", "b"))),
        (["--", "t.py"], Invocation(None, (), ("t.py",))),
        (
            ["--max-restarts", "1", "--", "t.py", "--", "x"],
            Invocation(None, ("--max-restarts", "1"), ("t.py", "--", "x")),
        ),
        (["-m", "a.b", "--", "x"], Invocation(None, (), ("-m", "a.b", "--", "x"))),
        (["-m", "--", "a.b", "x"], Invocation(None, (), ("-m", "a.b", "x"))),
        (["--ranks", "2", "--", "-m"], Invocation(2, (), ("-m",))),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_double_dashes_behind_the_program_are_its_own(
    words: list[str], expected: Invocation
) -> None:
    assert read_invocation(words) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--rank", "1", "t.py"], Invocation(1, (), ("t.py",))),
        (["--ra=1", "--mod", "a.b", "--mod"], Invocation(1, (), ("-m", "a.b", "--mod"))),
        (
            ["--stand", "-r", "3", "t.py", "--rank", "1"],
            Invocation(None, ("--stand", "-r", "3"), ("t.py", "--rank", "1")),
        ),
    ],
)
def test_options_may_be_abbreviated(words: list[str], expected: Invocation) -> None:
    assert read_invocation(words) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--r", "1", "train.py"], "ambiguous option: --r could match"),
        (["--mo", "a.b"], "ambiguous option: --mo could match"),
    ],
)
def test_abbreviations_of_several_options_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        read_invocation(words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--no-python", "train.sh"], "--no-python"),
        (["--ranks", "2"], "training_script"),
        (["--ranks", "two", "train.py"], "--ranks"),
    ],
)
def test_a_command_line_that_cannot_be_run_says_why(words: list[str], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        read_invocation(words)


def test_numbers_of_ranks_that_contradict_each_other_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    message = "--ranks 2 and --nproc-per-node 1 both set the number of ranks"
    with pytest.raises(BadInput, match=message):
        read_invocation(["--ranks", "2", "--nproc-per-node", "1", "t.py"])

    same = read_invocation(["--ranks", "2", "--nproc_per_node=2", "t.py", "--nproc-per-node", "1"])
    assert same.ranks == 2
    monkeypatch.setenv("PET_NPROC_PER_NODE", "1")  # a variable is for where nothing was said
    assert read_invocation(["--ranks", "2", "t.py"]).ranks == 2


def test_a_program_finds_fullshard_in_torchs_place_and_its_own_help(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    typer = pytest.importorskip("typer.testing")
    from fullshard.cli.main import app

    program = tmp_path / "program.py"
    program.write_text(
        "import sys\nfrom torch.distributed.fsdp import FullyShardedDataParallel as F\n"
        "print(F.__module__, sys.argv[1:])\n"
    )
    ended = typer.CliRunner().invoke(app, ["run", "--ranks", "1", str(program), "--help"])

    assert ended.exit_code == 0, ended.output
    assert capfd.readouterr().out.strip() == "fullshard.fsdp ['--help']"


def test_a_program_with_a_double_dash_finds_fullshard_too(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\nfrom torch.distributed.fsdp import FullyShardedDataParallel as F\n"
        "print(F.__module__, sys.argv[1:])\n"
    )

    assert run_program(["--ranks", "1", str(program), "--", "--lr", "1"]) == 0

    assert capfd.readouterr().out.strip() == "fullshard.fsdp ['--', '--lr', '1']"


def test_torch_warns_of_nothing_when_a_healthy_rank_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "WARNING")
    program = tmp_path / "program.py"
    program.write_text(
        "import time, torch\n"
        "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
        "torch.distributed.init_process_group('gloo')\n"
        "model = FSDP(torch.nn.Linear(4, 4))\n"
        "if torch.distributed.get_rank() == 1: time.sleep(2.6)\n"
        "model(torch.ones(1, 4)).sum().backward()\n"
        "torch.distributed.barrier()\n"
        "torch.distributed.destroy_process_group()\n"
    )

    assert run_program(["--ranks", "2", str(program)]) == 0

    assert capfd.readouterr().err == ""
