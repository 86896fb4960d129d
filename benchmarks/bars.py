"""What is promised, as data, and whether a table keeps it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

Table = Mapping[str, Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Bar:
    """``row`` has at most ``limit`` times the ``column`` of the lowest of ``others``."""

    column: str
    limit: float
    others: tuple[str, ...]
    row: str = "fullshard"


def at_most(limit: float, *others: str, column: str = "step ms", row: str = "fullshard") -> Bar:
    return Bar(column, limit, others, row)


def faster_by(factor: float, *others: str) -> Bar:
    return Bar("step ms", 1 / factor, others)


def judge(bars: tuple[Bar, ...], table: Table) -> list[dict[str, Any]]:
    """The ratio that each bar is about; bars whose rows were not measured are left out."""
    verdicts = []
    for bar in bars:
        others = {
            other: table[other][bar.column]
            for other in bar.others
            if table.get(other, {}).get(bar.column)
        }
        if bar.row not in table or not others or table[bar.row].get(bar.column) is None:
            continue
        lowest = min(others, key=lambda other: others[other])
        ratio = table[bar.row][bar.column] / others[lowest]
        verdicts.append(
            {
                "row": bar.row,
                "column": bar.column,
                "against": lowest,
                "ratio": ratio,
                "limit": bar.limit,
                "pass": ratio <= bar.limit,
            }
        )
    return verdicts


def show_verdicts(verdicts: list[dict[str, Any]]) -> None:
    for verdict in verdicts:
        word = "pass" if verdict["pass"] else "MISS"
        print(
            f"  {word}  {verdict['row']}: {verdict['column']} {verdict['ratio']:.2f} x "
            f"{verdict['against']} (bar {verdict['limit']:.2f})"
        )


def show_table(columns: list[str], table: Table) -> None:
    """Plain text, numbers with one decimal (two below ten)."""
    width = max(len(row) for row in table) + 2
    print(" " * width + "".join(f"{column:>17}" for column in columns))
    for row, values in table.items():
        print(f"{row:{width}}" + "".join(f"{_cell(values.get(c)):>17}" for c in columns))


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}" if abs(value) < 10 else f"{value:,.1f}"
    return "-" if value is None else str(value)
