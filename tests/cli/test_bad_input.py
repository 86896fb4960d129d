"""Bad input: one clear line, exit status 2, nothing written."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.state.damage import in_time

from fullshard.cli.main import main


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """Call the command in an empty folder; returns its one line, and checks what is left."""
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> str:
        before = contents(tmp_path)
        monkeypatch.setattr(sys, "argv", ["fullshard", *words])
        with pytest.raises(SystemExit) as caught:
            main()
        assert caught.value.code == 2
        assert contents(tmp_path) == before
        output, errors = capfd.readouterr()
        assert output == ""
        assert errors.count("\n") == 1, errors
        return errors

    return call


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(p): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def test_a_data_folder_without_text(refused, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()

    assert "there is no text below 'empty'" in refused("train", "--data", "empty")
    assert "'nowhere' is not a folder" in refused("train", "--data", "nowhere")


def test_a_data_folder_whose_name_cannot_be_written_down(refused) -> None:
    name = b"donn\xe9e".decode("utf-8", "surrogateescape")

    assert "data expects text in UTF-8, but got 'donn\\udce9e'" in refused("train", "--data", name)


def test_sending_less_of_what_is_not_sent(refused) -> None:
    whole = ("--strategy", "no_shard", "--all-gather", "int8")
    kept = ("--strategy", "shard_grad_op", "--secondary-shards")

    for command in ("train", "plan"):
        assert "--strategy no_shard shards none" in refused(command, *whole)
    assert "strategies that all-gather again for backward" in refused("train", *kept)


def test_a_sequence_longer_than_the_data(refused, tmp_path: Path) -> None:
    (tmp_path / "few").mkdir()
    (tmp_path / "few" / "a.txt").write_text("a few words")

    line = refused("train", "--data", "few", "--sequence", "11")

    assert "a sequence of 11 tokens is longer than the data" in line
    assert "few (1 file, 11 bytes)" in line


def test_more_ranks_than_make_sense(refused) -> None:
    assert "is not divisible by 3 ranks; use --batch 15" in refused("train", "--ranks", "3")
    assert "1024 ranks are too many" in refused(
        "train", "--ranks", "1024", "--batch", "1024", "--device", "cpu"
    )


def test_a_model_that_cannot_be(refused) -> None:
    assert "width 100 is not divisible by 3 heads" in refused(
        "train", "--width", "100", "--heads", "3"
    )
    assert "GPT has no 'Blok'; did you mean Block?" in refused("train", "--wrap", "Blok")
    assert "size=N" in refused("train", "--wrap", "size=many")
    assert "to plan your own model, use fullshard plan --model mine:build; to train it" in refused(
        "train", "--model", "mine:build"
    )


def test_a_run_that_is_there_already(refused, tmp_path: Path) -> None:
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "notes.txt").write_text("precious")

    assert "resume it with --resume" in refused("train", "--name", "mine")


def test_a_run_that_is_not_there(refused) -> None:
    assert "there is no run in runs to resume" in refused("train", "--resume")
    assert "there is no run 'mine' in runs" in refused("train", "--resume", "--name", "mine")


@pytest.mark.parametrize("file", ["config.toml", ".lock", "metrics.jsonl", ".config.toml.new"])
def test_a_run_with_a_fifo_in_the_place_of_a_file(refused, tmp_path: Path, file: str) -> None:
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    (run / "config.toml").touch()
    (run / file).unlink(missing_ok=True)
    os.mkfifo(run / file)

    with in_time():
        assert f"{file} is not a regular file" in refused("train", "--resume", "--name", "mine")
        assert f"{file} is not a regular file" in refused("train", "--resume")


def test_a_file_of_options(refused, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("lerning_rate = 1\n")

    assert "did you mean 'learning_rate'" in refused("train", "--config", "bad.toml")
    assert "there is no 'no.toml'" in refused("train", "--config", "no.toml")


def test_flags_with_values_that_cannot_be(refused) -> None:
    assert "strategy expects one of" in refused("train", "--strategy", "half_shard")
    assert "steps expects 1 or more, but got 0" in refused("train", "--steps", "0")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--steps", "many"], "steps expects a whole number, but got 'many'"),
        (["--ranks", "1.5"], "ranks expects a whole number, but got '1.5'"),
        (["--clip", ""], "clip expects a number, but got ''"),
        (["--max-restarts", "x"], "max_restarts expects a whole number, but got 'x'"),
        (["--nodes", "1e3"], "nodes expects a whole number, but got '1e3'"),
        (["--offload=maybe"], "--offload takes no value, but got '--offload=maybe'"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_flags_of_another_kind_say_what_was_given(
    refused, words: list[str], complaint: str
) -> None:
    assert complaint in refused("train", *words)


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/tmp/x", "a\nb"])
def test_names_that_lead_out_of_the_folder_of_runs(refused, name: str) -> None:
    complaint = f"name expects a folder name such as first-try, but got {name!r}"

    assert complaint in refused("train", "--name", name)
    assert complaint in refused("train", "--resume", "--name", name)


def test_flags_and_commands_that_are_not_there(refused) -> None:
    assert "there is no option '--stepz'; did you mean '--steps'?" in refused("train", "--stepz=3")
    assert "did you mean '--save-every'?" in refused("train", "--save-evry", "3")
    assert "'--config' requires an argument" in refused("train", "--config")
    assert "unexpected extra argument" in refused("train", "more")
    line = refused("trian")
    assert (
        line == "fullshard: No such command 'trian'. Did you mean 'train'? See fullshard --help\n"
    )
    assert "No such command 'dance'; see fullshard --help\n" in refused("dance")


def test_numbers_that_the_launcher_or_torch_could_do_nothing_with(refused) -> None:
    assert "--max-restarts expects 0 or more" in refused("train", "--max-restarts", "-1")
    assert "--nodes expects 1 or more" in refused("train", "--nodes", "0")
    assert "set their number with --nodes" in refused("train", "--rendezvous", "here:1")
    assert "learning_rate expects less than 2**63" in refused("train", "--learning-rate", "inf")
    assert "seed expects less than 2**63" in refused("train", "--seed", str(2**63))


def test_a_place_for_runs_that_is_none(refused, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    assert "file/run-1 cannot be written" in refused("train", "--runs", "file")


def test_programs_that_cannot_be_run(refused) -> None:
    assert "there is no 'nowhere.py'" in refused("run", "nowhere.py")
    assert "invalid int value: 'two'" in refused("run", "--ranks", "two", "x.py")
    assert "--ranks expects 1 or more, but got 0" in refused("run", "--ranks", "0", "x.py")
    assert "--no-python and --run-path are not supported" in refused("run", "--no-python", "x.sh")
    assert "Missing argument" in refused("run")


def test_programs_that_are_none(refused, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()

    assert "run expects a script or -m and a module, but there is no ''" in refused("run", "")
    assert "'.' is a folder without a __main__.py" in refused("run", ".")
    assert "'folder' is a folder without a __main__.py" in refused("run", "--ranks", "1", "folder")
    assert "-m expects the name of a module after it" in refused("run", "-m", "")
    assert "such as package.train, but got none" in refused("run", "--ranks", "2", "--", "-m")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--nproc-per-node", "foo"], "--nproc-per-node expects 1 or more, auto, cpu, or gpu"),
        (["--nproc-per-node", "xpu"], "if torch finds one, but got 'xpu'"),
        (["--nproc-per-node", "0"], "if torch finds one, but got '0'"),
        (["--nnodes", "0"], "--nnodes expects a number of machines"),
        (["--nnodes", "a:b"], "a minimum and a maximum such as 1:4, but got 'a:b'"),
        (["--nnodes", "3:2"], "but got '3:2'"),
        (["--nnodes", "1:2:3"], "but got '1:2:3'"),
        (["--max-restarts", "-1"], "--max-restarts expects 0 or more, but got -1"),
        (["--monitor-interval", "0"], "--monitor-interval expects more than 0 seconds"),
        (["--rdzv-backend", "nope"], "rejects its options: The rendezvous backend 'nope'"),
        (["--rdzv-backend", "c10d", "--rdzv-endpoint", "here:port"], "endpoint 'here:port'"),
        (["--rdzv-conf", "timeout"], "option 'timeout' must have a value"),
        (["--redirects", "9"], "rejects its options: 9 does not match"),
        (["--local-ranks-filter", "x"], "comma-separated list of integers"),
        (
            ["--log-dir", "/proc/x", "--redirects", "3"],
            "--log-dir expects a writable folder, but got '/proc/x': No such file",
        ),
        (["--log-dir", "/proc"], "writable folder, but got '/proc': No such file"),
        (["--log-dir", "x.py"], "but got 'x.py': log_dir: x.py is a file"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_options_with_which_no_rank_can_be_started(
    refused, tmp_path: Path, words: list[str], complaint: str
) -> None:
    (tmp_path / "x.py").write_text("")

    assert complaint in refused("run", *words, "x.py")


def test_several_machines_need_a_place_to_meet(refused) -> None:
    assert "--rendezvous HOST:PORT" in refused("train", "--nodes", "2")
    for place in ("machine", "machine:", ":29400", "machine:port", "machine:70000"):
        line = refused("train", "--nodes", "2", "--rendezvous", place)
        assert f"expects HOST:PORT, such as first-machine:29400, but got {place!r}" in line


def test_plans_that_cannot_be(refused) -> None:
    assert "device-memory expects a size" in refused("plan", "--device-memory", "much")
    assert "fit expects a size" in refused("plan", "--fit", "h1000")
    assert "No module named 'nowhere'" in refused("plan", "--model", "nowhere:build")
    assert "expects module:function, but got ':build'" in refused("plan", "--model", ":build")
    assert "'sys:path' is not a function but a list" in refused("plan", "--model", "sys:path")
    assert "'sys' has no 'nothing'" in refused("plan", "--model", "sys:nothing")
    assert "is not divisible by 5 ranks" in refused("plan", "--ranks", "5")
    assert "did you mean 'tiny'" in refused("plan", "--model", "tinny")


MODELS = """
import sys
from torch import nn, zeros

def raises():
    raise RuntimeError("not today.\\nAnd a second line.")

def takes(more):
    return nn.Linear(2, 2)

def number():
    return 3

def exits():
    sys.exit("enough")

def several():
    return nn.Linear(2, 2), None, None

def trains_nothing():
    return nn.ReLU()

def takes_no_tokens():
    return nn.Linear(2, 2)

def loss_raises():
    return nn.Linear(2, 2), lambda model, sequences, length: model(zeros(3)).sum()

def loss_is_constant():
    return nn.Linear(2, 2), lambda model, sequences, length: zeros(())
"""


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        ("raises", "raised: RuntimeError: not today (models_to_refuse.py, line 6)\n"),
        ("takes", "raised: TypeError: takes() missing 1 required positional argument: 'more'\n"),
        (
            "number",
            "expects a function that returns an nn.Module, or a tuple of a module and a loss ",
        ),
        ("exits", "raised: SystemExit: enough (models_to_refuse.py, line 15)\n"),
        ("several", "returned a tuple of Linear, NoneType, NoneType\n"),
        ("trains_nothing", "returned a ReLU without parameters that require gradients\n"),
        ("takes_no_tokens", "; return the model and loss(model, sequences, length)\n"),
        ("loss_raises", "(models_to_refuse.py, line 27)\n"),
        ("loss_is_constant", "but it is a tensor of shape (), without gradient\n"),
    ],
)
def test_models_that_cannot_be_planned(
    refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, complaint: str
) -> None:
    (tmp_path / "models_to_refuse.py").write_text(MODELS)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "models_to_refuse", raising=False)

    line = refused("plan", "--model", f"models_to_refuse:{function}")

    assert f"models_to_refuse:{function}" in line
    assert complaint in line


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("def build(:", "SyntaxError: invalid syntax (module_to_refuse.py, line 1)\n"),
        ("import nowhere", "No module named 'nowhere' (module_to_refuse.py, line 1)\n"),
        ("raise OSError('gone')", "OSError: gone (module_to_refuse.py, line 1)\n"),
    ],
)
def test_modules_that_cannot_be_imported_are_not_planned(
    refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, complaint: str
) -> None:
    (tmp_path / "module_to_refuse.py").write_text(text)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    importlib.invalidate_caches()

    line = refused("plan", "--model", "module_to_refuse:build")

    assert "'module_to_refuse' cannot be imported: " in line
    assert complaint in line


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("words", [["plan"], ["plan", "--help"], ["--version"]], ids=" ".join)
def test_output_that_cannot_be_written(words: list[str]) -> None:
    command = [sys.executable, "-m", "fullshard", *words]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)

    assert ended.returncode == 1
    assert ended.stderr == "fullshard: cannot write to standard output: No space left on device\n"
