"""What cannot work is refused in one line that says what to do."""

import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.marks import in_long_runs
from tests.testing.processes import MarkedProcess, needs_pytest, run_python

from fullshard.testing import RankPool, RankSetupError, device, ranks, run_on_ranks

CONFTEST = 'pytest_plugins = ["fullshard.testing.pytest_plugin"]\n'
TEST = """
from fullshard.testing import ranks

@ranks(2)
def test_it() -> None: pass
"""

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@pytest.mark.parametrize("given_number", [0, -1, "two", 10_000, 2.0, True, None])
@pytest.mark.parametrize("entry", [ranks, RankPool, lambda number: run_on_ranks(number, int)])
def test_a_wrong_number_of_ranks_is_refused(entry: Any, given_number: Any) -> None:
    with pytest.raises(RankSetupError) as caught:
        entry(given_number)

    assert str(caught.value) == (
        f"the number of ranks is {given_number!r}, expected a whole number from 1 to 64: "
        "correct the number"
    )


@pytest.mark.parametrize("seconds", [0, -1, "long", True, float("inf"), float("nan")])
def test_a_wrong_time_limit_is_refused(seconds: Any) -> None:
    with pytest.raises(RankSetupError, match="expected a number of seconds above 0"):
        run_on_ranks(1, int, timeout=seconds)


def test_arguments_that_pickle_does_not_know_are_refused() -> None:
    with pytest.raises(RankSetupError, match="cannot be sent to the ranks with these arguments"):
        run_on_ranks(1, int, threading.Lock())


def test_a_local_function_that_refers_to_itself_is_refused() -> None:
    def countdown(number: int) -> int:
        return countdown(number - 1) if number else 0

    with pytest.raises(RankSetupError, match="define it at the top level of its file"):
        run_on_ranks(1, countdown, 3)


def test_ranks_cannot_be_asked_for_on_a_rank() -> None:
    def ask() -> str:
        with pytest.raises(RankSetupError) as caught:
            run_on_ranks(2, int)
        return str(caught.value)

    assert run_on_ranks(1, ask)[0].startswith("ranks were requested on a rank")


def test_an_unknown_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULLSHARD_TEST_DEVICE", "abacus")

    with pytest.raises(RankSetupError, match="'abacus', expected 'cpu' or 'cuda'"):
        device()


def test_an_unknown_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULLSHARD_TEST_BACKEND", "pigeons")

    with pytest.raises(RankSetupError, match="'pigeons', expected 'gloo' or 'nccl'"):
        run_on_ranks(1, int)


def test_nccl_is_refused_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULLSHARD_TEST_BACKEND", "nccl")
    monkeypatch.setenv("FULLSHARD_TEST_DEVICE", "cpu")

    with pytest.raises(RankSetupError, match="add --device cuda, or set FULLSHARD_TEST_DEVICE"):
        run_on_ranks(1, int)


@no_gpu
def test_a_missing_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULLSHARD_TEST_DEVICE", "cuda")

    with pytest.raises(RankSetupError, match="torch finds no usable GPU on this machine"):
        run_on_ranks(1, int)


@no_gpu
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["-m", "pytest"], marks=(needs_pytest, in_long_runs)),
        ["-m", "fullshard.testing"],
    ],
)
def test_asking_for_a_missing_gpu_ends_the_command_with_one_line(
    tmp_path: Path, command: list[str]
) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TEST)

    status, output = run_python([*command, "--device", "cuda", "test_it.py"], tmp_path)

    assert status != 0
    lines = output.strip().splitlines()
    assert len(lines) == 1
    assert "the test device is 'cuda', but torch finds no usable GPU" in lines[0]


def test_a_port_in_use_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TEST)
    with socket.create_server(("127.0.0.1", 0)) as occupant:
        port = occupant.getsockname()[1]

        status, output = run_python(
            ["-m", "fullshard.testing", "test_it.py"], tmp_path, FULLSHARD_TEST_PORT=str(port)
        )

    assert status != 0
    assert f"error: port {port} cannot be used for the ranks' store" in output
    assert "Traceback" not in output


def test_a_port_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TEST)
    command = ["-m", "fullshard.testing", "test_it.py"]
    processes = {
        port: MarkedProcess(command, tmp_path, {"FULLSHARD_TEST_PORT": port})
        for port in ("http", "-1", "65536")
    }

    for port, process in processes.items():
        output = process.finish()
        assert process.process.returncode != 0
        assert f"FULLSHARD_TEST_PORT is '{port}', expected a port number" in output
