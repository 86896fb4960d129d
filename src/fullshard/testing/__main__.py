"""``python -m fullshard.testing``: run test modules without pytest.

It is for machines that have torch and nothing else, such as a borrowed GPU. It skips modules that
need hypothesis and tests that use fixtures, and prints a line for each.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from . import pytest_stand_in
from .collection import Case, cases_of, load_module, test_files
from .device import (
    BACKEND_VARIABLE,
    BACKENDS,
    DEVICE_TYPES,
    DEVICE_VARIABLE,
    backend,
    chosen_device_type,
    require_device,
)
from .errors import RankSetupError, RanksFailed
from .session import close_session, current_session


def main(arguments: list[str]) -> int:
    """Run the tests named by the arguments; returns the exit status."""
    options = _parser().parse_args(arguments)
    if options.device is not None:
        os.environ[DEVICE_VARIABLE] = options.device
    if options.backend is not None:
        os.environ[BACKEND_VARIABLE] = options.backend
    try:
        importlib.import_module("pytest")
    except ImportError:
        pytest_stand_in.install()
    _let_cases_take_their_time()
    # As with python -m pytest, tests may import from the working directory.
    sys.path.insert(0, os.getcwd())
    results: Counter[str] = Counter()
    began = time.monotonic()
    try:
        files = test_files(options.paths)
        require_device(chosen_device_type())
        backend()
        current_session()
        for file in files:
            _run_file(file, options.keyword, results)
    except RankSetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted")
        results["interrupted"] += 1
    finally:
        close_session()
    print(
        f"{results['passed']} passed, {results['failed']} failed, {results['skipped']} skipped "
        f"in {time.monotonic() - began:.2f} s"
    )
    if not results:
        missing = "no tests found: pass test files or folders of test files"
        if options.keyword:
            missing = f"no name of a test contains {options.keyword!r}: pass another -k"
        print(f"error: {missing}", file=sys.stderr)
        return 2
    return 1 if results["failed"] or results["interrupted"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fullshard.testing", description=__doc__)
    parser.add_argument("paths", nargs="+", type=Path, help="test files, or folders of test files")
    parser.add_argument("--device", choices=DEVICE_TYPES, help="the device of the ranks")
    parser.add_argument("--backend", choices=BACKENDS, help="the backend of their collectives")
    parser.add_argument(
        "-k", dest="keyword", default="", help="run only tests whose name contains this"
    )
    return parser


def _let_cases_take_their_time() -> None:
    """Turn off hypothesis's deadline, which the first case would miss: it starts the ranks."""
    try:
        hypothesis = importlib.import_module("hypothesis")
    except ImportError:
        return
    hypothesis.settings.register_profile("ranks", deadline=None)
    hypothesis.settings.load_profile("ranks")


def _run_file(file: Path, keyword: str, results: Counter[str]) -> None:
    try:
        cases = list(cases_of(load_module(file)))
    except ModuleNotFoundError as error:
        if error.name != "hypothesis":
            _report(results, "failed", str(file), details=traceback.format_exc())
        else:
            _report(results, "skipped", str(file), "hypothesis is not installed")
        return
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        if type(error).__name__ == "Skipped":
            _report(results, "skipped", str(file), str(error))
        else:
            _report(results, "failed", str(file), details=traceback.format_exc())
        return
    for case in cases:
        name = f"{file}::{case.name}"
        if keyword in name:
            _run_case(name, case, results)


def _run_case(name: str, case: Case, results: Counter[str]) -> None:
    if case.skip_reason is not None:
        _report(results, "skipped", name, case.skip_reason)
        return
    began = time.monotonic()
    result, reason, details = "passed", "", ""
    try:
        with tempfile.TemporaryDirectory() as directory:
            fixtures = {fixture: Path(directory) for fixture in case.fixtures}
            case.function(**case.arguments, **fixtures)
    except (RanksFailed, RankSetupError) as error:
        result, details = "failed", str(error)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        if type(error).__name__ in ("Skipped", "SkipTest"):
            result, reason = "skipped", str(error)
        else:
            result, details = "failed", traceback.format_exc()
    _report(results, result, name, reason or f"{time.monotonic() - began:.2f} s", details)


def _report(
    results: Counter[str], result: str, name: str, remark: str = "", details: str = ""
) -> None:
    results[result] += 1
    print(f"{result.upper():8}{name}" + (f" ({remark})" if remark else ""), flush=True)
    if details:
        print(details.rstrip(), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
