"""The pytest plugin: options for device and backend, and ending the ranks with the session.

Use it with ``pytest_plugins = ["fullshard.testing.pytest_plugin"]`` in the conftest.py of your
tests' top folder. Tests that use ranks run without it too, on the device and over the backend that
the environment variables FULLSHARD_TEST_DEVICE and FULLSHARD_TEST_BACKEND name.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest
from _pytest._code.code import ReprFileLocation, TerminalRepr
from _pytest._io import TerminalWriter

from .decorator import is_test_on_ranks
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


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options --device and --backend."""
    parser.addoption(
        "--device",
        choices=DEVICE_TYPES,
        help="the device of the ranks (default: cpu); ranks share the available GPUs",
    )
    parser.addoption(
        "--backend",
        choices=BACKENDS,
        help="the backend of the ranks' collectives on their device (default: gloo)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Check the device and the backend before any test runs."""
    if config.option.device is not None:
        os.environ[DEVICE_VARIABLE] = config.option.device
    if config.option.backend is not None:
        os.environ[BACKEND_VARIABLE] = config.option.backend
    try:
        require_device(chosen_device_type())
        backend()
    except RankSetupError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_collection(session: pytest.Session) -> None:
    """Start the nursery, so that it imports torch while tests are being collected."""
    if session.config.option.collectonly:
        return
    try:
        current_session()
    except RankSetupError as error:
        raise pytest.UsageError(str(error)) from None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show only the report of the ranks if a test made by ``ranks`` failed."""
    report = yield
    error = call.excinfo.value if call.excinfo is not None else None
    if isinstance(error, RanksFailed) and is_test_on_ranks(getattr(item, "function", None)):
        path, line, _ = item.location
        report.longrepr = _RanksReport(str(error), path, (line or 0) + 1)
    return report


class _RanksReport(TerminalRepr):
    def __init__(self, text: str, path: str, line: int) -> None:
        self.text = text
        self.reprcrash = ReprFileLocation(path, line, text.splitlines()[0])

    def toterminal(self, writer: TerminalWriter) -> None:
        for text_line in self.text.splitlines():
            writer.line(text_line, red=text_line.startswith("---"))


def pytest_unconfigure() -> None:
    """End all ranks; also reached after Ctrl-C."""
    close_session()
