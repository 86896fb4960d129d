"""What the documents name exists: tests, files they link to, and files in backquotes."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import fullshard

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

each_document = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT))
)


@each_document
def test_tests_that_a_document_names_exist(document: Path) -> None:
    named = re.findall(r"(tests/[\w/]+\.py)::(\w+)", document.read_text(encoding="utf-8"))
    for file, name in named:
        assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE), (file, name)


def test_tests_are_named_in_pages_for_maintainers_only() -> None:
    pages = [page for page in (ROOT / "docs").rglob("*.md") if "maintainers" not in page.parts]

    assert len(pages) > 20
    for page in pages:
        assert not re.findall(r"tests/[\w/]+\.py::\w+", page.read_text(encoding="utf-8")), page


@each_document
def test_files_that_a_document_links_to_exist(document: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]*)(#[^)]*)?\)", document.read_text(encoding="utf-8"))
    for target, anchor in links:
        file = document.parent / target if target else document
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor[1:] in [as_anchor(heading) for heading in headings], anchor


def test_pages_that_the_index_for_language_models_links_to_exist() -> None:
    index = (ROOT / "docs" / "llms.txt").read_text(encoding="utf-8")
    linked = re.findall(r"\]\(([^)]+)\)", index)

    assert len(linked) > 20
    for page in linked:
        assert (ROOT / "docs" / page).exists(), page


def test_every_page_of_the_site_is_in_the_index_for_language_models() -> None:
    index = (ROOT / "docs" / "llms.txt").read_text(encoding="utf-8")
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = set(re.findall(r": ([\w/-]+\.md)$", site, re.MULTILINE)) - {"index.md"}

    assert len(pages) > 30
    assert pages - set(re.findall(r"\]\(([^)]+)\)", index)) == set()


def test_the_index_on_the_site_links_to_the_pages_of_the_site(tmp_path: Path) -> None:
    shutil.copy(ROOT / "docs" / "llms.txt", tmp_path)
    hooks = runpy.run_path(str(ROOT / "docs" / "_site" / "links.py"))

    hooks["on_post_build"](SimpleNamespace(site_dir=tmp_path, site_url="https://a.org/b/"))

    index = (tmp_path / "llms.txt").read_text(encoding="utf-8")
    assert "](https://a.org/b/recipes/lora/)" in index
    assert ".md)" not in index


def test_every_public_name_is_in_the_reference_once() -> None:
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs/reference").glob("*.md")]
    described = re.findall(r"^::: fullshard\.(\w+)$", "\n".join(pages), re.MULTILINE)

    assert len(described) == len(set(described))
    # fullshard.optim is a module, whose names have a page of their own.
    assert set(fullshard.__all__) - set(described) == {"optim"}


def as_anchor(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


@each_document
def test_scripts_that_a_document_runs_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for script in re.findall(r"((?:examples|benchmarks|tests)/[\w/]+\.py)", text):
        if script != "tests/test_step.py":  # an example of a report
            assert (ROOT / script).exists(), script


def _words(text: str) -> str:
    """Text without what differs between a message and the source that makes it."""
    text = re.sub(r"\{[^{}]*\}", " ", re.sub(r'["\']\s*\n\s*f?["\']', "", text))
    return re.sub(r"\s+", " ", text)


def _explained() -> list[str]:
    """The messages in the first cells of the tables of docs/troubleshooting.md."""
    document = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    cells = re.findall(r'^\| ("[^|]*") \|', document, re.MULTILINE)
    return [message for cell in cells for message in re.findall(r'"([^"]*)"', cell)]


def _parts(message: str) -> list[str]:
    return [_words(part) for part in (part.strip(" .:") for part in message.split("…")) if part]


#: Messages of torch's that the page explains as well.
OF_TORCH = {"mat2 must be a matrix, got 1-D tensor"}


def test_messages_that_troubleshooting_explains_are_raised() -> None:
    sources = [file.read_text(encoding="utf-8") for file in (ROOT / "src").rglob("*.py")]
    code = _words("\n".join(sources))

    assert len(_explained()) > 200
    for message in _explained():
        for part in _parts(message):
            assert part in code or message in OF_TORCH, f"{part!r} of {message!r}"


def _python_programs(document: Path) -> list[str]:
    """Blocks, each with those that it continues (see tests/test_document_programs.py)."""
    programs: list[str] = []
    text = document.read_text(encoding="utf-8")
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        before = programs[-1] if block.startswith("# Continues ") else ""
        programs.append(before + block)
    return programs


@each_document
def test_python_in_a_document_imports_what_it_uses_or_says_what_it_continues(
    document: Path,
) -> None:
    for program in _python_programs(document):
        checked = subprocess.run(
            [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "-"],
            input=program,
            capture_output=True,
            text=True,
        )
        assert not re.findall(r"Undefined name `(\w+)`", checked.stdout), program
