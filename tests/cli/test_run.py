"""The command line of ``fullshard run``: whose options are whose."""

from __future__ import annotations

from pathlib import Path

import pytest

from fullshard.cli.problems import BadInput
from fullshard.cli.run import Invocation, read_invocation


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
