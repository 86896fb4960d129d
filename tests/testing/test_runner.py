"""The runner for machines without pytest: ``python -m fullshard.testing``."""

from pathlib import Path

from tests.marks import in_long_runs
from tests.testing.processes import MarkedProcess, run_python

# Makes the modules impossible to import, as on a machine that has torch and nothing else;
# Python imports a module of this name at its start.
SITE_CUSTOMIZE = """
import sys
from importlib.abc import MetaPathFinder

class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("pytest", "_pytest", "hypothesis"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""

TESTS = """
import warnings
import pytest
import torch.distributed as dist
from fullshard.testing import ranks, run_on_ranks

@pytest.mark.parametrize(("left", "right"), [(1, 2), pytest.param(3, 4, id="named")])
@pytest.mark.parametrize("size", [5, 6])
@ranks(2)
def test_parametrised(left, right, size): assert left < right < size

def test_values(): assert run_on_ranks(2, dist.get_rank) == [0, 1]

@ranks(2)
def test_raises():
    with pytest.raises(ValueError, match="wrong"):
        raise ValueError("this is wrong")
    with pytest.warns(UserWarning, match="careful"):
        warnings.warn("be careful")
    assert 0.1 + 0.2 == pytest.approx(0.3)

@pytest.mark.skipif(True, reason="never")
def test_skipped_by_mark(): assert False

@ranks(2)
def test_skipped_on_ranks(): pytest.skip("not now")

def test_with_fixture(monkeypatch: pytest.MonkeyPatch): assert False

def test_with_folder(tmp_path): assert tmp_path.is_dir()
"""


FAILING = """
from fullshard.testing import ranks

@ranks(2)
def test_wrong(): raise LookupError("lost")

def test_right(): pass
"""


def run_tests(folder: Path, modules: dict[str, str], *options: str) -> tuple[int, str]:
    for name, text in modules.items():
        (folder / name).write_text(text)
    (folder / "sitecustomize.py").write_text(SITE_CUSTOMIZE)
    return run_python(["-m", "fullshard.testing", ".", *options], folder)


def test_test_modules_run_without_pytest(tmp_path: Path) -> None:
    modules = {"test_it.py": TESTS, "test_generated.py": "import hypothesis\n"}

    status, output = run_tests(tmp_path, modules)

    assert status == 0, output
    assert "7 passed, 0 failed, 4 skipped in " in output
    assert "PASSED  test_it.py::test_parametrised[5-named]" in output
    assert "SKIPPED test_it.py::test_skipped_on_ranks (not now)" in output
    assert "test_with_fixture (it uses monkeypatch, and fixtures need pytest)" in output
    assert "SKIPPED test_generated.py (hypothesis is not installed)" in output


def test_a_failure_is_reported_and_makes_the_exit_status_one(tmp_path: Path) -> None:
    status, output = run_tests(tmp_path, {"test_it.py": FAILING})

    assert status == 1
    assert "--- ranks 0, 1: LookupError: lost" in output
    assert "1 passed, 1 failed, 0 skipped" in output


@in_long_runs
def test_a_keyword_selects_tests(tmp_path: Path) -> None:
    _, output = run_tests(tmp_path, {"test_it.py": TESTS}, "-k", "named")

    assert "2 passed, 0 failed, 0 skipped" in output


def test_a_module_that_cannot_be_imported_fails(tmp_path: Path) -> None:
    status, output = run_tests(tmp_path, {"test_it.py": "import there_is_no_such_module\n"})

    assert status == 1
    assert "FAILED  test_it.py" in output


def test_wrong_paths_end_with_one_line(tmp_path: Path) -> None:
    expected = {
        "nowhere.py": "error: nowhere.py does not exist: pass a test file or a folder with tests",
        ".": "error: no tests found: pass test files or folders of test files",
    }
    processes = {
        path: MarkedProcess(["-m", "fullshard.testing", path], tmp_path, {}) for path in expected
    }

    for path, process in processes.items():
        output = process.finish()
        assert process.process.returncode == 2
        assert output.strip().splitlines()[-1] == expected[path]


def test_a_keyword_that_no_test_has_is_named(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_one() -> None:\n    pass\n")
    process = MarkedProcess(["-m", "fullshard.testing", "test_it.py", "-k", "two"], tmp_path, {})

    output = process.finish()
    assert process.process.returncode == 2
    expected = "error: no name of a test contains 'two': pass another -k"
    assert output.strip().splitlines()[-1] == expected
