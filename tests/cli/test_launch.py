"""Ranks for a command: what they see, how failures and Ctrl-C are told, several machines."""

from __future__ import annotations

import json
import os
import py_compile
import re
import signal
import subprocess
import sys
import time
import zipapp
from pathlib import Path

import pytest
from tests.marks import in_long_runs

from fullshard.cli.launcher import early_ends, rendezvous, restarts
from fullshard.cli.launcher.launch import default_ranks, launch, threads_per_rank
from fullshard.ports import reserve_port

# Programs that do not import torch start within a tenth of a second.
REPORT = """
import json, os, pickle, sys
from pathlib import Path

class Local:
    pass

assert type(pickle.loads(pickle.dumps(Local()))) is Local
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS", "TORCHELASTIC_RESTART_COUNT")
facts = {name: os.environ.get(name) for name in names}
facts.update(argv=sys.argv, file=__file__, name=__name__, path=sys.path[0])
facts.update(called=os.environ.get("CALLED"), torch="torch" in sys.modules)
Path(os.environ["REPORTS"], os.environ["RANK"]).write_text(json.dumps(facts))
"""
#: Rank 1 fails; rank 0 fails because of it, a moment later, and is the first to have ended.
FAIL = """
import os, sys, time
from pathlib import Path
mark = Path(os.environ["REPORTS"], "failed")

def deep():
    mark.touch()
    raise ValueError("the cause")

if os.environ["RANK"] == "1":
    try:
        deep()
    finally:
        import atexit
        atexit.register(time.sleep, 1.5)
while not mark.exists():
    time.sleep(0.01)
time.sleep(0.2)
raise RuntimeError("a consequence")
"""
FAIL_ONCE = """
import os
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise OSError("once")
"""
#: What a program can see of ``__main__``; the last of it when its last line has been run.
MAIN = """
import atexit, inspect, json, multiprocessing, os, pickle, sys, threading
from pathlib import Path

class Local:
    pass

def typed(x: int):
    pass

def name_in_child():
    return __name__, Local.__module__

def pickled():
    return type(pickle.loads(pickle.dumps(Local()))) is Local

def thread():
    threading.main_thread().join()
    facts.update(in_thread=pickled(), still=vars(sys.modules["__main__"]) is globals())

def finish():
    facts.update(at_exit=pickled())
    Path(os.environ["REPORTS"], os.environ["RANK"]).write_text(json.dumps(facts))

if __name__ == "__main__":
    facts = {name: str(globals()[name]) for name in ("__cached__", "__doc__", "__file__")}
    facts.update(package=__package__, spec=__spec__ and __spec__.name, argv=sys.argv)
    facts.update(loader=[type(__loader__).__name__, __loader__.path], builtins=str(__builtins__))
    facts.update(annotation=str(typed.__annotations__["x"]))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        facts.update(child=pool.apply(name_in_child))
    os.chdir("/")
    facts.update(source=inspect.getsource(pickled))
    atexit.register(finish)
    threading.Thread(target=thread).start()
"""
#: Who asks for the port of the ranks before they listen there does not get it; the ranks do.
MEET = """
import os, socket
import torch.distributed as dist
from pathlib import Path

port = int(os.environ["MASTER_PORT"])
if os.environ["RANK"] == "0":
    with socket.socket() as other:
        try:
            other.bind(("127.0.0.1", port))
        except OSError:
            Path(os.environ["REPORTS"], "held-" + os.environ["TORCHELASTIC_RESTART_COUNT"]).touch()
dist.init_process_group("gloo")
# Who leaves before the other has seen it connect makes the other fail.
dist.barrier()
dist.destroy_process_group()
"""
#: For a launcher that meets others as torch's do, though none comes.
MAYBE_ANOTHER = ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
MAYBE_ANOTHER += ["--rdzv-conf", "last_call_timeout=1"]
#: A launcher in a process of its own: ranks, launcher options, program.
START = """
import sys
from fullshard.cli.launcher.launch import launch
ranks, *options, program = sys.argv[1:]
sys.exit(launch(int(ranks), options, [program]))
"""


@pytest.fixture
def reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REPORTS", str(tmp_path))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return tmp_path


def script(folder: Path, text: str) -> str:
    file = folder / "program.py"
    file.write_text(text)
    return str(file)


def read(reports: Path, ranks: int) -> list[dict[str, object]]:
    return [json.loads((reports / str(rank)).read_text()) for rank in range(ranks)]


def test_a_script_runs_on_every_rank_as_python_itself_would_run_it(reports: Path) -> None:
    program = script(reports, REPORT)

    status = launch(3, [], [program, "--steps", "2", "--ranks", "x"])

    assert status == 0
    for rank, facts in enumerate(read(reports, 3)):
        assert facts["RANK"] == facts["LOCAL_RANK"] == str(rank)
        assert facts["WORLD_SIZE"] == "3"
        assert facts["argv"] == [program, "--steps", "2", "--ranks", "x"]
        assert facts["file"] == program
        assert facts["name"] == "__main__"
        assert facts["path"] == str(reports)
        assert facts["OMP_NUM_THREADS"] == str(threads_per_rank(3))
        assert not facts["torch"]
    assert "OMP_NUM_THREADS" not in os.environ


@pytest.mark.parametrize(
    "command",
    [["program.py", "x"], ["./folder/../program.py"], ["-m", "program"], ["-m", "folder.program"]],
    ids=" ".join,
)
def test_main_is_as_under_python_itself_and_stays_when_the_program_has_ended(
    reports: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.chdir(reports)
    script(reports, MAIN)
    (reports / "folder").mkdir()
    (reports / "folder" / "__init__.py").touch()
    (reports / "folder" / "program.py").write_text(MAIN)
    environment = {**os.environ, "RANK": "alone"}
    subprocess.run([sys.executable, *command], env=environment, check=True, timeout=60)
    expected = json.loads((reports / "alone").read_text())
    assert [expected[fact] for fact in ("in_thread", "still", "at_exit")] == [True] * 3

    assert launch(1, [], command) == 0

    assert read(reports, 1) == [expected]


def test_folders_archives_and_compiled_scripts_run_too(reports: Path) -> None:
    for number, name in enumerate(["folder", "archive.zip", "compiled.pyc"]):
        text = REPORT.replace('["RANK"]', f'["RANK"] + "-{number}"')
        (reports / "folder").mkdir(exist_ok=True)
        main = reports / "folder" / "__main__.py"
        main.write_text(text)
        zipapp.create_archive(reports / "folder", reports / "archive.zip")
        py_compile.compile(str(main), str(reports / "compiled.pyc"))

        assert launch(1, [], [str(reports / name), "x"]) == 0

        facts = json.loads((reports / f"0-{number}").read_text())
        assert facts["argv"] == [str(reports / name), "x"]
        assert facts["name"] == "__main__"


def test_a_module_runs_from_the_working_folder_after_what_is_called_before_it(
    reports: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(reports, REPORT)
    (reports / "first.py").write_text("import os\ndef call(): os.environ['CALLED'] = 'yes'\n")
    monkeypatch.chdir(reports)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")

    status = launch(1, [], ["-m", "program", "one"], before=["first:call"])

    (facts,) = read(reports, 1)
    assert status == 0
    assert facts["called"] == "yes"
    assert facts["OMP_NUM_THREADS"] == "7"
    assert facts["argv"] == [str(reports / "program.py"), "one"]


def test_the_rank_that_failed_first_is_shown_first_with_its_traceback(
    reports: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status = launch(2, [], [script(reports, FAIL)])

    printed = capfd.readouterr().err
    assert status == 1
    assert printed.startswith("Rank 1 failed first: ValueError: the cause\nTraceback")
    assert "in deep" in printed
    assert "rank.py" not in printed  # nor anything else that is not the program's
    assert "runpy" not in printed
    assert printed.rstrip().endswith("Rank 0 failed after it: RuntimeError: a consequence")


@pytest.mark.parametrize("text", ["def f(:\n", "x = '\n", "  x = 1\n"])
def test_a_script_that_cannot_be_read_is_shown_as_python_itself_would_show_it(
    reports: Path, capfd: pytest.CaptureFixture[str], text: str
) -> None:
    program = script(reports, text)
    alone = subprocess.run([sys.executable, program], capture_output=True, text=True)

    assert launch(1, [], [program]) == 1

    first, _, rest = capfd.readouterr().err.partition("\n")
    assert rest == alone.stderr
    assert first == f"Rank 0 failed first: {rest.splitlines()[-1]}"


@pytest.mark.parametrize(
    ("ending", "status", "message"),
    [
        ("sys.exit(3)", 3, "sys.exit(3)"),
        ("os.kill(os.getpid(), 9)", 137, "killed by SIGKILL"),
    ],
)
def test_other_ends_of_a_rank_are_told_and_end_the_others(
    reports: Path, capfd: pytest.CaptureFixture[str], ending: str, status: int, message: str
) -> None:
    text = f"import os, sys, time\nif os.environ['RANK'] == '1': {ending}\ntime.sleep(60)\n"
    started = time.monotonic()

    assert launch(2, [], [script(reports, text)]) == status

    assert time.monotonic() - started < 30
    assert capfd.readouterr().err.startswith(f"Rank 1 failed first: {message}")


def test_a_rank_that_does_not_end_when_another_failed_is_killed_soon(
    reports: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stubborn = """
import os, signal, sys, time
from pathlib import Path
ready = Path(os.environ["REPORTS"], "ready")
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
    sys.exit(0)
if os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready.touch()
    time.sleep(60)
while not ready.exists():
    time.sleep(0.01)
sys.exit(3)
"""
    started = time.monotonic()

    assert launch(2, ["--max-restarts", "1"], [script(reports, stubborn)]) == 0

    assert time.monotonic() - started < 20  # torch would wait for 30 s
    assert capfd.readouterr().err == (
        "Rank 1 failed first: sys.exit(3)\n"
        "Rank 0 failed after it: did not stop on SIGTERM, and was killed\n"
        "Starting again; 0 more restarts after this.\n"
    )


def test_a_failed_attempt_is_told_when_it_fails_and_started_again(
    reports: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch(1, ["--max-restarts", "1"], [script(reports, FAIL_ONCE + REPORT)]) == 0

    assert read(reports, 1)[0]["TORCHELASTIC_RESTART_COUNT"] == "1"
    printed = capfd.readouterr().err
    assert printed.startswith("Rank 0 failed first: OSError: once\nTraceback")
    assert printed.count("Traceback") == 1
    assert printed.endswith("Starting again; 0 more restarts after this.\n")


def test_restarts_that_are_left_are_counted(
    reports: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch(1, ["--max-restarts", "2"], [script(reports, "raise OSError('always')")]) == 1

    told = [line for line in capfd.readouterr().err.splitlines() if "Starting again" in line]
    assert told == [
        "Starting again; 1 more restart after this.",
        "Starting again; 0 more restarts after this.",
    ]


def test_bad_input_that_ranks_find_is_told_in_one_line_and_tried_once(
    reports: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(reports)
    # What ``fullshard train --nodes`` starts: rank 0 finds out, and tells the others.
    command = [
        "-m",
        "fullshard.cli.on_rank",
        "train",
        "--device",
        "cpu",
        "--data",
        "nowhere",
    ]

    assert launch(2, ["--max-restarts", "3"], command) == 2

    expected = "data expects a folder with text files, but 'nowhere' is not a folder"
    assert capfd.readouterr() == ("", f"fullshard: {expected}\n")
    assert [*reports.iterdir()] == []


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere ports cannot be held")
@pytest.mark.parametrize(
    "meeting",
    [[], pytest.param(MAYBE_ANOTHER, marks=in_long_runs)],
    ids=["one machine", "maybe another"],
)
def test_nobody_else_is_given_the_port_at_which_ranks_will_meet(
    reports: Path, meeting: list[str]
) -> None:
    program = script(reports, MEET + FAIL_ONCE)

    assert launch(2, [*meeting, "--max-restarts", "1"], [program]) == 0

    assert sorted(path.name for path in reports.glob("held-*")) == ["held-0", "held-1"]


def test_a_torch_that_chooses_ports_in_another_way_starts_ranks_all_the_same(
    reports: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_FREE_PORT", "another_way")

    assert launch(1, MAYBE_ANOTHER, [script(reports, REPORT)]) == 0

    assert read(reports, 1)[0]["RANK"] == "0"


@pytest.mark.parametrize("missing", ["_monitor_workers", "_remaining_restarts", "_pcontext"])
def test_a_torch_whose_agent_is_another_starts_ranks_again_all_the_same(
    reports: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    missing: str,
) -> None:
    names = {
        "_LOOKS": "_monitor_workers",
        "_RESTARTS": "_remaining_restarts",
        "_RANKS": "_pcontext",
    }
    for constant, name in names.items():
        monkeypatch.setattr(restarts, constant, "_other" if name == missing else name)

    assert launch(1, ["--max-restarts", "1"], [script(reports, FAIL_ONCE + REPORT)]) == 0

    assert read(reports, 1)[0]["TORCHELASTIC_RESTART_COUNT"] == "1"
    told = "Starting again" in capfd.readouterr().err
    assert told == (missing == "_pcontext")


@pytest.mark.parametrize("options", [[], ["--log-dir", os.devnull]], ids=" ".join)
def test_what_the_launcher_raises_after_it_started_ranks_is_no_bad_input(
    reports: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    def look(*_: object) -> None:
        raise ValueError("the launcher's own")

    monkeypatch.setattr(restarts.LocalElasticAgent, "_monitor_workers", look)

    with pytest.raises(ValueError, match="the launcher's own"):
        launch(1, options, [script(reports, REPORT)])


def test_ctrl_c_ends_every_rank_and_shows_where_one_was(reports: Path) -> None:
    text = """
import os, sys, time
from pathlib import Path
def waits():
    Path(os.environ["REPORTS"], os.environ["RANK"] + ".pid").write_text(str(os.getpid()))
    time.sleep(100)
waits()
"""
    launcher = subprocess.Popen(
        [sys.executable, "-c", START, "2", script(reports, text)], stderr=subprocess.PIPE, text=True
    )
    files = [reports / f"{rank}.pid" for rank in range(2)]
    deadline = time.monotonic() + 60
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.05)

    launcher.send_signal(signal.SIGINT)
    _, printed = launcher.communicate(timeout=60)

    assert launcher.returncode == 130
    assert printed.startswith("Stopped by SIGINT; all ranks were ended.")
    assert "in waits" in printed
    for file in files:
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)


@pytest.mark.parametrize("program", ["import slow", "def main():\n    import slow\nmain()"])
@pytest.mark.parametrize("before", [[], ["slow:call"]])
def test_ctrl_c_while_ranks_import_shows_nothing_of_what_they_import(
    reports: Path, before: list[str], program: str
) -> None:
    importing = """
import os, time
from pathlib import Path
Path(os.environ["REPORTS"], os.environ["RANK"]).touch()
time.sleep(100)
"""
    (reports / "slow.py").write_text(importing)
    start = f"""
import sys
from fullshard.cli.launcher.launch import launch
sys.exit(launch(2, [], sys.argv[1:], before={before}))
"""
    launcher = subprocess.Popen(
        [sys.executable, "-c", start, script(reports, program)],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not all((reports / str(rank)).exists() for rank in range(2)):
        assert time.monotonic() < deadline
        time.sleep(0.05)

    os.killpg(launcher.pid, signal.SIGINT)  # as a terminal does
    _, printed = launcher.communicate(timeout=60)

    assert launcher.returncode == 130
    first, *rest = printed.splitlines()
    assert first == "Stopped by SIGINT; all ranks were ended."
    assert "slow.py" not in printed
    assert ("import slow" in printed) == (not before)
    assert rest[0].endswith("failed first: KeyboardInterrupt")


def test_after_ctrl_c_no_thread_of_torchs_launcher_complains(reports: Path) -> None:
    """One that looks at the rendezvous while it is let go of would have to wait for itself."""
    start = """
import sys, threading, time
from pathlib import Path
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from fullshard.cli.launcher.launch import launch
ended = threading.Event()
def look(reference):
    rendezvous = reference()
    Path(sys.argv[1], "looks").touch()
    ended.wait()
DynamicRendezvousHandler._keep_alive_weak = staticmethod(look)
meeting = ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
times = ["--rdzv-conf", "keep_alive_interval=1,last_call_timeout=1"]
status = launch(1, [*meeting, *times], [sys.argv[2]])
ended.set()
time.sleep(0.5)
sys.exit(status)
"""
    launcher = subprocess.Popen(
        [
            sys.executable,
            "-c",
            start,
            str(reports),
            script(reports, "import time; time.sleep(100)"),
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (reports / "looks").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)

    launcher.send_signal(signal.SIGINT)
    _, printed = launcher.communicate(timeout=60)

    assert launcher.returncode == 130
    assert "cannot join current thread" not in printed


def test_two_machines_meet_through_torchruns_own_options(reports: Path) -> None:
    program = script(reports, REPORT)
    with reserve_port("") as reserved:
        place = f"localhost:{reserved.getsockname()[1]}"
        options = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", place]
        other = subprocess.Popen([sys.executable, "-c", START, "1", *options, program])

        assert launch(1, options, [program]) == 0

        assert other.wait(timeout=120) == 0
    assert [facts["WORLD_SIZE"] for facts in read(reports, 2)] == ["2", "2"]
    assert [facts["LOCAL_RANK"] for facts in read(reports, 2)] == ["0", "0"]


@pytest.mark.parametrize(
    ("ranks", "command", "message"),
    [(0, ["x.py"], "ranks expects at least 1, but got 0"), (2, [], "got an empty one")],
)
def test_what_cannot_be_launched_is_refused(ranks: int, command: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        launch(ranks, [], command)


@pytest.mark.parametrize("options", [["other.py"], ["--standalone", "other.py", "more"]])
def test_no_other_program_is_launched_in_the_place_of_what_ranks_do_first(
    options: list[str],
) -> None:
    message = "launcher_options expects torchrun's options without a program, but got 'other.py' in"
    with pytest.raises(ValueError, match=re.escape(message)):
        launch(1, options, ["program.py"])


@pytest.mark.parametrize("variable", ["PET_MODULE", "PET_NO_PYTHON", "PET_RUN_PATH"])
def test_variables_of_torchrun_do_not_change_how_ranks_begin(
    reports: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "1")

    assert launch(1, [], [script(reports, REPORT), "--", "x"]) == 0

    (facts,) = read(reports, 1)
    assert facts["name"] == "__main__"
    assert facts["argv"] == [str(reports / "program.py"), "--", "x"]


def test_threads_are_shared_out_and_never_none() -> None:
    cores = len(os.sched_getaffinity(0))
    assert threads_per_rank(1) == cores
    assert threads_per_rank(10 * cores) == 1
    assert default_ranks() >= 1


def test_ranks_that_end_long_before_others_are_told_of_once(
    reports: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(early_ends, "_SECONDS_IDLE", 0.3)
    text = "import os, time\nif os.environ['RANK'] == '0': time.sleep(2.5)"
    assert launch(3, [], [script(reports, text)]) == 0
    printed = capfd.readouterr().err
    assert printed.startswith("Ranks 1, 2 ended ")
    assert (
        printed.count("without an error. Still running, but idle: rank 0. A rank that waits") == 1
    )


def test_a_rank_that_computes_on_when_the_others_have_ended_is_told_of_much_later(
    reports: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(early_ends, "_SECONDS_IDLE", 0.5)
    text = """
import os, time
end = time.monotonic() + 3
while os.environ["RANK"] == "0" and time.monotonic() < end:
    pass
"""
    program = script(reports, text)
    assert launch(2, [], [program]) == 0
    assert capfd.readouterr().err == ""

    monkeypatch.setattr(early_ends, "_SECONDS_APART", 1.0)
    assert launch(2, [], [program]) == 0
    assert (
        capfd.readouterr().err.count("without an error. Still running: rank 0. A rank that waits")
        == 1
    )


def test_under_nohup_a_terminal_may_close(reports: Path) -> None:
    text = """
import os, time
from pathlib import Path
reports = Path(os.environ["REPORTS"])
(reports / os.environ["RANK"]).touch()
while not (reports / "leave").exists():
    time.sleep(0.01)
"""
    start = f"import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n{START}"
    launcher = subprocess.Popen([sys.executable, "-c", start, "2", script(reports, text)])
    end = time.monotonic() + 60
    while not all((reports / str(rank)).exists() for rank in range(2)):
        assert time.monotonic() < end
        time.sleep(0.05)
    launcher.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    (reports / "leave").touch()
    assert launcher.wait(60) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends processes with their parent")
def test_ranks_end_with_a_launcher_that_is_killed(reports: Path) -> None:
    text = """
import os, time
from pathlib import Path
Path(os.environ["REPORTS"], os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(600)
"""
    launcher = subprocess.Popen([sys.executable, "-c", START, "2", script(reports, text)])
    files = [reports / str(rank) for rank in range(2)]
    end = time.monotonic() + 60
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < end
        time.sleep(0.05)
    ranks = [int(file.read_text()) for file in files]
    assert all(map(runs, ranks))

    launcher.kill()
    launcher.wait()

    end = time.monotonic() + 10
    while any(map(runs, ranks)):
        assert time.monotonic() < end
        time.sleep(0.05)


def runs(process: int) -> bool:
    """Whether it is there, and not just waiting to be buried."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
