"""The suite over NCCL: runs test files on ranks that share this machine's GPUs, several at a time.

    PYTHONPATH=src python3 tests/over_nccl.py
    PYTHONPATH=src python3 tests/over_nccl.py tests/engine --jobs 4 --log log.txt
    PYTHONPATH=src python3 tests/over_nccl.py --jobs 5 --together 3

A process runs a file, or a few with ``--together``, on ranks of its own (``fullshard.testing``,
backend nccl), whose start takes as long as the tests of a small file. A file is run by pytest where
that is installed, and by ``python -m fullshard.testing`` elsewhere, which skips tests that use
fixtures. Ranks on one GPU take turns of a few milliseconds, in which NCCL's kernels wait for ranks
that have none; where the machine has NVIDIA's Multi-Process Service, the program runs one of its
own, under which they compute side by side: a file took 33 s instead of 83. While it runs, programs
outside of it wait for the GPU for ever, and it for them; and a rank that is killed in the middle of
a kernel, as those of a test that fails are, takes all others with it: of many failures, believe the
first. The service takes 48 processes at most, hence the number of jobs.

Prints a line for each process, then why tests were skipped, then which tests failed; ends with
status 1 if any did, or if one ran into its time limit.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("engine", "hazards", "original", "grad", "state", "fully_shard", "captured", "optim")
#: "3 passed, 1 skipped in 2.10s" of pytest, "3 passed, 0 failed, 1 skipped in 2.10 s" of ours.
_COUNT = re.compile(r"(\d+) (passed|failed|skipped|error)")
#: A line of ours for each test.
_ENDED = re.compile(r"^(PASSED|FAILED|SKIPPED) ")
_FAILED = re.compile(r"^(?:FAILED|ERROR)\s+(\S.*)$", re.MULTILINE)
_SKIPPED_BY_PYTEST = re.compile(r"^SKIPPED \[(\d+)\] [^ ]+: (.*)$", re.MULTILINE)
_SKIPPED = re.compile(r"^SKIPPED +\S.*? \((.*)\)$", re.MULTILINE)


@dataclass(frozen=True)
class Result:
    """What became of the files that one process ran."""

    files: tuple[Path, ...]
    status: int | None
    seconds: float
    output: str

    @property
    def counts(self) -> Counter[str]:
        lines = self.output.strip().splitlines()
        if self.status is None:
            # It was killed, and has not summed up what it had run by then.
            return Counter(word.lower() for line in lines for word in _ENDED.findall(line))
        return Counter({word: int(number) for number, word in _COUNT.findall((lines or [""])[-1])})

    @property
    def passed(self) -> bool:
        # pytest's 5: no test was run, as where a file is skipped as a whole.
        return self.status in (0, 5)

    def skipped(self) -> Iterator[tuple[int, str]]:
        """How many tests were skipped for which reason."""
        for number, reason in _SKIPPED_BY_PYTEST.findall(self.output):
            yield int(number), reason
        for reason in _SKIPPED.findall(self.output):
            yield 1, reason


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    folders = [ROOT / "tests" / name for name in FOLDERS]
    parser.add_argument("paths", nargs="*", type=Path, default=folders, help="files and folders")
    parser.add_argument("--jobs", type=int, default=6, help="files that run at a time")
    parser.add_argument("--together", type=int, default=1, help="files that a process runs")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for a process")
    parser.add_argument("--until", type=float, help="start no process after this many seconds")
    parser.add_argument("--backend", choices=["nccl", "gloo"], default="nccl")
    parser.add_argument("--log", type=Path, help="append the output of all files to this one")
    given = parser.parse_args()
    began = time.monotonic()
    results = []
    with multi_process_service(), ThreadPoolExecutor(given.jobs) as pool:
        files = _files(given.paths)
        runs = [
            pool.submit(_run, tuple(files[at : at + given.together]), given, began)
            for at in range(0, len(files), given.together)
        ]
        for run in as_completed(runs):
            result = run.result()
            if result is not None:
                results.append(result)
                print(_line(result), flush=True)
                if given.log is not None:
                    with given.log.open("a") as log:
                        log.write(f"=== {_names(result)}\n{result.output}\n")
    return _summarise(results, len(runs) - len(results), time.monotonic() - began)


@contextlib.contextmanager
def multi_process_service() -> Iterator[None]:
    """Run NVIDIA's Multi-Process Service for processes started inside, if the machine has it."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        names = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
        os.environ.update(dict.fromkeys(names, folder))
        subprocess.run([control, "-d"], check=True)
        try:
            yield
        finally:
            # It does not end while a process that was killed still holds the device.
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run([control], input="quit -t 1\n", text=True, timeout=30, check=False)
            for name in names:
                del os.environ[name]


def _files(paths: Iterable[Path]) -> list[Path]:
    """In the order of the paths; of a folder, the largest first, since they take longest."""
    found: list[Path] = []
    for path in paths:
        files = path.glob("test_*.py") if path.is_dir() else [path]
        existing = [file for file in files if file.exists()]
        found += sorted(existing, key=lambda file: (-file.stat().st_size, file))
    return found


def _run(files: tuple[Path, ...], given: argparse.Namespace, began: float) -> Result | None:
    if given.until is not None and time.monotonic() - began > given.until:
        return None
    options = [*map(str, files), "--device", "cuda", "--backend", given.backend]
    if importlib.util.find_spec("pytest") is not None:
        command = ["-m", "pytest", "-q", "-rfEs", "-p", "no:cacheprovider", *options]
    else:
        command = ["-m", "fullshard.testing", *options]
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=given.limit)
    except subprocess.TimeoutExpired:
        # Its ranks end with it.
        process.kill()
        output, _ = process.communicate()
        return Result(files, None, time.monotonic() - started, output)
    return Result(files, process.returncode, time.monotonic() - started, output)


def _names(result: Result) -> str:
    return " ".join(str(file.resolve().relative_to(ROOT)) for file in result.files)


def _line(result: Result) -> str:
    counts = ", ".join(f"{number} {word}" for word, number in result.counts.items())
    ended = "ran into its time limit" if result.status is None else counts or "ran no test"
    verdict = "ok  " if result.passed else "FAIL"
    return f"{verdict} {_names(result)}: {ended} ({result.seconds:.0f} s)"


def _summarise(results: list[Result], left_out: int, seconds: float) -> int:
    reasons: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for result in results:
        total += result.counts
        for number, reason in result.skipped():
            reasons[reason] += number
    print("\nskipped:")
    for reason, number in reasons.most_common():
        print(f"{number:5} {reason}")
    failed = [result for result in results if not result.passed]
    for result in failed:
        for name in _FAILED.findall(result.output):
            print(f"FAILED {name[:200]}")
    if left_out:
        print(f"{left_out} processes were not started: the time was up")
    broken = total["failed"] + total["error"]
    print(f"{sum(len(result.files) for result in results)} files in {seconds:.0f} s")
    print(f"{total['passed']} passed, {broken} failed, {total['skipped']} skipped")
    return 1 if failed or left_out else 0


if __name__ == "__main__":
    sys.exit(main())
