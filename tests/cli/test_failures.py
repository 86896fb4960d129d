"""What is told of ranks that failed: the reason first, and no more than a terminal has lines."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from fullshard.cli.launcher.launch import launch


def script(folder: Path, text: str) -> str:
    file = folder / "program.py"
    file.write_text(text)
    return str(file)


def test_a_failed_rank_is_told_of_by_its_error_and_then_by_the_errors_note(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = """
error = RuntimeError("the error")
error.add_note("What to do about it.\\nAnd more.")
raise error
"""
    assert launch(1, [], [script(tmp_path, text)]) == 1

    first, *rest = capfd.readouterr().err.splitlines()
    assert first == "Rank 0 failed first: RuntimeError: the error (note: What to do about it.)"
    assert rest[-3:] == ["RuntimeError: the error", "What to do about it.", "And more."]


#: Rank 0 fails deep down, for a reason with a cause, and with a message as torch's C++ code writes.
FAIL_AT_LENGTH = """
import os, time

def deep(depth):
    if depth:
        deep(depth - 1) if depth % 2 else deeper(depth)
    raise OSError("the root")

def deeper(depth):
    deep(depth - 1)

frames = "".join(f"frame #{n}: void of(int) + 0x1 (0x7f in libc10.so)\\n" for n in range(40))
if os.environ["RANK"] != "0":
    time.sleep(60)
try:
    deep(20)
except OSError as error:
    raise RuntimeError(
        "[pair.cc:1] closed\\n"
        f"Exception raised from read at a.cpp:1 (most recent call first):\\n{frames}"
    ) from error
"""


def test_a_failure_of_many_lines_is_shortened_between_its_reason_with_the_rest_in_a_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch(2, [], [script(tmp_path, FAIL_AT_LENGTH)]) == 1

    lines = capfd.readouterr().err.splitlines()
    reason = "Rank 0 failed first: RuntimeError: [pair.cc:1] closed"
    assert lines[0] == lines[-1] == reason
    assert lines[1] == "Traceback (most recent call last):"
    assert "Caused by OSError: the root" in lines
    assert "Rank 1 failed after it: killed by SIGTERM" in lines
    assert len(lines) < 25
    assert not any("frame #" in line for line in lines)
    (log,) = re.findall(r"^The full tracebacks of all ranks are in (.*)$", "\n".join(lines), re.M)
    content = Path(log).read_text()
    assert content.count("frame #") == 40
    assert content.count("in deeper") == 10


@pytest.mark.parametrize("calls", [1, 30])
def test_where_nothing_can_be_logged_a_failure_is_shown_in_full(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], calls: int
) -> None:
    text = f"""
import os, sys
def deep(depth):
    if depth:
        return (deep if depth % 2 else deeper)(depth - 1)
    raise OSError("the root")
def deeper(depth):
    deep(depth)
logs = os.path.dirname(os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"]))
os.mkdir(os.path.join(logs, "failures.log"))
deep({calls})
"""
    assert launch(1, [], [script(tmp_path, text)]) == 1

    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "Rank 0 failed first: OSError: the root"
    assert lines[-1] == "OSError: the root"
    assert sum("in deep" in line for line in lines) >= calls


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a rank dies in another way")
def test_a_killed_rank_is_told_of_without_the_frames_of_torchs_own_code(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = """
import os, torch.distributed as dist
dist.init_process_group("gloo")
store = dist.distributed_c10d._get_default_store()
dist.barrier()
if os.environ["RANK"] == "0":
    os.kill(os.getpid(), 9)
store.get("nothing")  # rank 0 hosts the store
"""
    assert launch(3, [], [script(tmp_path, text)]) == 137

    printed = capfd.readouterr().err
    assert printed.startswith("Rank 0 failed first: killed by SIGKILL")
    assert len(printed.splitlines()) <= 4
    assert "frame #" not in printed
