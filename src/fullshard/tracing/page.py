"""A trace as one HTML page that needs nothing else: no network, no other files.

The page is ``page_files/page.html`` with its style, its script and its data in place. All numbers
are computed here; the script draws them.
"""

from __future__ import annotations

import functools
import html
import json
from importlib import resources
from typing import Any

from .advice import advise
from .analysis import (
    UnitTimes,
    rows_by_record,
    seconds_by_kind,
    segments_by_step,
    straggler,
    times_by_unit,
)
from .records import CAUSES, COLLECTIVES, RankTrace, TraceData, What
from .report import counted, duration_text, peak_of, size_text, step_seconds

_FOLDER = "page_files"
_SCRIPTS = ("timeline.js", "controls.js", "tables.js")
#: Times on the page are microseconds.
_MICROSECONDS = 1e6


def as_page(data: TraceData) -> str:
    """The whole page."""
    page = _file("page.html")
    content = {
        "title": html.escape(_title(data)),
        "style": _file("page.css"),
        "script": "".join(map(_file, _SCRIPTS)),
        "data": _embedded(page_data(data)),
    }
    for name, text in content.items():
        page = page.replace("{{" + name + "}}", text)
    return page


@functools.cache
def _file(name: str) -> str:
    return (resources.files(__package__) / _FOLDER / name).read_text(encoding="utf-8")


def _embedded(value: Any) -> str:
    """JSON that ends no script and begins no comment, wherever its strings come from."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _title(data: TraceData) -> str:
    kind = "prediction" if data.is_foretold else "trace"
    return f"{data.model}: fullshard {kind}"


def page_data(data: TraceData) -> dict[str, Any]:
    """The data that the page's script draws."""
    units = [unit.name for unit in data.units]
    numbers = {name: number for number, name in enumerate(units)}
    slow = straggler(data.summaries)
    first = data.ranks[0]
    return {
        "title": _title(data),
        "subtitle": _subtitle(data),
        "isForetold": data.is_foretold,
        "kinds": [str(what) for what in What],
        "causes": [*CAUSES.values()],
        "units": units,
        "cards": _cards(data, first),
        "ranks": [_rank(trace, numbers) for trace in data.ranks],
        "summaries": [
            {
                "rank": s.rank,
                "host": s.host,
                "step": s.step,
                "waits": s.waits,
                "busy": s.busy,
                "peak": s.peak,
            }
            for s in data.summaries
        ],
        "straggler": None if slow is None else {"rank": slow.rank, "seconds": slow.seconds},
        "shares": [
            {
                "rank": trace.rank,
                "parts": [[what.value, value] for what, value in _ordered(trace)],
            }
            for trace in data.ranks
        ],
        "advice": [
            {"units": a.units, "seconds": a.seconds, "text": a.text} for a in advise(data, first)
        ],
        "table": [_row(each) for each in times_by_unit(first)],
        "comparison": [
            [each.name, each.foretold, each.measured, each.measure] for each in data.comparison
        ],
        "facts": [[name, value] for name, value in data.facts.items()],
    }


def _subtitle(data: TraceData) -> str:
    elements = sum(unit.elements for unit in data.units)
    ranks = len(data.summaries)
    strategies = ", ".join(dict.fromkeys(unit.strategy for unit in data.units))
    size = next(
        (f"{elements / n:.3g} {w}" for n, w in ((1e9, "B"), (1e6, "M")) if elements >= n),
        f"{elements:,}",
    )
    return (
        f"{size} parameters in {counted(len(data.units), 'unit')} · {strategies} · "
        f"{counted(ranks, 'rank')} ({data.ranks[0].device}) · "
        f"{counted(len(data.ranks[0].steps), 'step')}"
    )


def _ordered(trace: RankTrace) -> list[tuple[What, float]]:
    found = seconds_by_kind(trace)
    return [(what, found[what]) for what in What if found.get(what)]


def _cards(data: TraceData, trace: RankTrace) -> list[dict[str, str]]:
    by_kind = seconds_by_kind(trace)
    whole = sum(by_kind.values()) or 1.0
    computing = sum(
        by_kind.get(what, 0.0) for what in (What.FORWARD, What.BACKWARD, What.RECOMPUTE)
    )
    waits = by_kind.get(What.WAIT_ALL_GATHER, 0.0) + by_kind.get(What.WAIT_REDUCE, 0.0)
    kind = "predicted" if data.is_foretold else f"median of {len(trace.steps)}"
    cards = [
        {"name": "step", "value": duration_text(step_seconds(trace)), "note": kind},
        {
            "name": "forward and backward",
            "value": f"{100 * computing / whole:.0f} %",
            "note": duration_text(computing),
        },
        {
            "name": "exposed communication",
            "value": f"{100 * waits / whole:.1f} %",
            "note": f"{duration_text(waits)} that compute waits",
        },
    ]
    peak = peak_of(trace)
    if peak is not None:
        counted = "" if peak.rest is not None else " without activations"
        cards.append(
            {
                "name": f"peak memory{counted}",
                "value": size_text(peak.total),
                "note": f"of which {size_text(peak.rest or 0)} activations and the rest",
            }
        )
    slow = straggler(data.summaries)
    if slow is not None:
        cards.append(
            {
                "name": "straggler",
                "value": f"rank {slow.rank}",
                "note": f"busy {duration_text(slow.seconds)} longer than the others",
            }
        )
    return cards


def _rank(trace: RankTrace, numbers: dict[str, int]) -> dict[str, Any]:
    kinds = {what: number for number, what in enumerate(What)}
    rows = rows_by_record(trace.records)

    def unit(name: str) -> int | str:
        # The program's own work has a position in the step instead of a unit.
        return numbers.get(name, name)

    return {
        "rank": trace.rank,
        "device": trace.device,
        "host": trace.host,
        "steps": [[_us(s.started), _us(s.ended)] for s in trace.steps],
        "compute": [
            [kinds[s.what], unit(s.unit), _us(s.started), _us(s.ended)]
            for found in segments_by_step(trace)
            for s in found
        ],
        "collectives": [
            [
                kinds[r.what],
                unit(r.unit),
                _us(r.issued),
                _us(r.started),
                _us(r.ended),
                r.nbytes,
                rows[id(r)],
            ]
            for r in trace.records
            if r.what in COLLECTIVES and _lies_in_steps(trace, r.started)
        ],
        "memory": [
            [_us(m.at), *[getattr(m, cause) or 0 for cause in CAUSES]]
            for m in sorted(trace.memory, key=lambda moment: moment.at)
        ],
    }


def _lies_in_steps(trace: RankTrace, moment: float) -> bool:
    return bool(trace.steps) and trace.steps[0].started <= moment <= trace.steps[-1].ended


def _us(seconds: float) -> float:
    return round(_MICROSECONDS * seconds, 1)


def _row(times: UnitTimes) -> dict[str, Any]:
    found = {
        "forward": times.forward + times.recompute,
        "backward": times.backward,
        "allGather": times.all_gather,
        "reduceScatter": times.reduce_scatter,
        "exposedForward": times.exposed_forward,
        "exposedBackward": times.exposed_backward,
        "exposedReduce": times.exposed_reduce,
        "exposed": times.exposed,
    }
    # To the nanosecond: equal units stay in their order when the table is sorted.
    return {"unit": times.unit, **{name: round(value, 9) for name, value in found.items()}}
