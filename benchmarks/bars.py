"""What is promised, as data, and whether a table keeps it."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from typing import Any

Row = Mapping[str, Any]
Table = Mapping[str, Row]


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


def quotient(row: Row, other: Row, column: str) -> float:
    """How many times ``other``'s value ``row`` has."""
    ratio: float = row[column] / other[column]
    return ratio


def median_by_round(row: Row, other: Row, column: str) -> float:
    """The same, as the median over rounds in which both had a turn.

    Neighbours share what else the machine does: a busy minute, or a slow one, is in both.
    """
    pairs = zip(row["rounds"], other["rounds"], strict=True)
    return statistics.median(one[column] / another[column] for one, another in pairs)


def judge(
    bars: tuple[Bar, ...], table: Table, compare: Callable[[Row, Row, str], float] = quotient
) -> list[dict[str, Any]]:
    """The ratio that each bar is about; bars whose rows were not measured are left out."""
    verdicts = []
    for bar in bars:
        others = [other for other in bar.others if table.get(other, {}).get(bar.column)]
        if bar.row not in table or not others or table[bar.row].get(bar.column) is None:
            continue
        ratios = {other: compare(table[bar.row], table[other], bar.column) for other in others}
        nearest = max(ratios, key=lambda other: ratios[other])
        ratio = ratios[nearest]
        verdicts.append(
            {
                "row": bar.row,
                "column": bar.column,
                "against": nearest,
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
