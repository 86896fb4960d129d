"""The pictures of docs/performance.md are drawn from the numbers that stand on the page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"
DATA = sorted((DOCS / "pictures" / "data").glob("*.json"))
#: Sizes are not in cells of their own on the page, but in headings such as "1,000" or "10 units".
NOT_MEASURED = {"sizes", "ranks", "units"}


def numbers_in(data: Any) -> list[float]:
    if isinstance(data, dict):
        return [
            n for key, value in data.items() if key not in NOT_MEASURED for n in numbers_in(value)
        ]
    if isinstance(data, list):
        return [number for value in data for number in numbers_in(value)]
    return [float(data)] if isinstance(data, int | float) else []


def numbers_on(page: Path) -> set[float]:
    cells = re.findall(r"(?<=\| )[\d,.]+(?= \|)", page.read_text(encoding="utf-8"))
    return {float(cell.replace(",", "")) for cell in cells}


@pytest.mark.parametrize("file", DATA, ids=lambda file: file.stem)
def test_every_number_of_a_picture_stands_in_a_table_of_its_page(file: Path) -> None:
    page = DOCS / ("tuning.md" if file.stem == "ladder" else "performance.md")
    drawn = numbers_in(json.loads(file.read_text(encoding="utf-8")))

    assert len(drawn) > 10
    assert not set(drawn) - numbers_on(page)


@pytest.mark.parametrize("file", DATA, ids=lambda file: file.stem)
def test_every_picture_that_has_numbers_is_there(file: Path) -> None:
    assert (DOCS / "pictures" / f"{file.stem}.png").exists()
