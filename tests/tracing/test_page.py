"""The page of a trace: what it embeds, and what a real browser makes of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fullshard.tracing.output import write
from fullshard.tracing.page import as_page, page_data
from fullshard.tracing.records import RankTrace, TraceData, What

from .browser import CHROMIUM, Page, browser
from .examples import rank_trace, record, trace_data

#: The middle of the timeline, in the window.
MIDDLE = "(b => [b.left + b.width / 2, b.top + 60])(timeline.canvas.getBoundingClientRect())"

in_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")


def example(name: str = "layers.0") -> TraceData:
    def records(late: float) -> list[object]:
        return [
            record(What.ALL_GATHER, name, 0, 10, 2**22),
            record(What.WAIT_ALL_GATHER, name, 0, 10 - late),
            record(What.FORWARD, name, 10, 40),
            record(What.BACKWARD, name, 45, 80),
            record(What.REDUCE_SCATTER, name, 80, 90, 2**22),
            record(What.WAIT_REDUCE, name, 80, 90 - late),
            record(What.OPTIMIZER, "", 91, 99),
        ]

    traces: list[RankTrace] = [rank_trace(records(late), rank) for rank, late in enumerate((0, 8))]
    return trace_data(*traces)


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with browser() as opened:
        yield opened


def opened(page: Page, folder: Path, data: TraceData, width: int = 1280, **how: bool) -> Page:
    path = folder / "trace.html"
    write(data, path)
    page.errors.clear()
    page.open(path, width, 1000, **how)
    return page


def colors(page: Page) -> dict[str, int]:
    """How many pixels of the timeline have each color."""
    found: dict[str, int] = page.run(
        """(() => {
            const canvas = document.querySelector("canvas"), counts = {};
            const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            for (let n = 0; n < data.length; n += 4) {
                if (data[n + 3] < 255) continue;
                const hex = [...data.slice(n, n + 3)].map(v => v.toString(16).padStart(2, "0"));
                const key = "#" + hex.join("");
                counts[key] = (counts[key] || 0) + 1;
            }
            return counts;
        })()"""
    )
    return found


# -- without a browser --------------------------------------------------------------------------


def test_names_that_look_like_html_stay_text() -> None:
    evil = "</script><script>alert(1)</script><!--"

    html = as_page(example(evil))

    assert html.count("</script>") == 2
    assert "<!--" not in html
    embedded = re.search(r'id="data">(.*?)</script>', html, re.DOTALL)
    assert embedded is not None
    assert json.loads(embedded[1])["units"] == [evil]


def test_the_page_needs_no_other_files() -> None:
    html = as_page(example())

    assert not re.search(r"(src|href)\s*=|@import|url\(|https?:", html)
    assert "{{" not in html


def test_the_table_says_what_was_waited_for() -> None:
    (row,) = page_data(example())["table"]

    assert row["unit"] == "layers.0"
    assert row["exposedForward"] == pytest.approx(0.010)
    assert row["exposedReduce"] == pytest.approx(0.010)
    assert row["exposed"] == pytest.approx(0.020)


# -- in a browser -------------------------------------------------------------------------------


@in_browser
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_loads_without_errors_and_fits(
    page: Page, tmp_path: Path, width: int, dark: bool
) -> None:
    opened(page, tmp_path, example(), width, dark=dark)

    assert page.errors == []
    assert page.run("document.documentElement.scrollWidth") <= width
    assert page.run("document.querySelectorAll('#units tbody tr').length") == 1
    assert page.run("document.getElementById('title').textContent") == "Model: fullshard trace"


@in_browser
def test_lanes_have_the_widths_of_what_they_show(page: Page, tmp_path: Path) -> None:
    opened(page, tmp_path, example())

    width = page.run("timeline.width")
    boxes = page.run("timeline.boxes.map(b => [data.kinds[b.item.kind], b.right - b.left])")
    forward = next(size for kind, size in boxes if kind == "forward")
    # 30 of the step's 100 milliseconds.
    assert forward == pytest.approx(0.3 * width, rel=0.02)
    painted = colors(page)
    assert painted[page.run("colors.forward")] > 1000
    assert painted[page.run("colors['wait-gather']")] > 300


@in_browser
def test_buttons_and_the_wheel_zoom(page: Page, tmp_path: Path) -> None:
    opened(page, tmp_path, example())
    length = "timeline.end - timeline.begin"
    whole = page.run(length)

    page.run("document.getElementById('zoom-in').click()")
    assert page.run(length) == pytest.approx(whole / 1.6)
    page.run("document.getElementById('zoom-out').click()")
    assert page.run(length) == pytest.approx(whole)

    x, y = page.run(MIDDLE)
    page.mouse("mouseWheel", x, y, deltaX=0, deltaY=-100, modifiers=2)
    assert page.run(length) < 0.8 * whole


@in_browser
def test_dragging_moves_in_time(page: Page, tmp_path: Path) -> None:
    opened(page, tmp_path, example())
    page.run("timeline.zoom(0.5)")
    before = page.run("timeline.begin")
    x, y = page.run(MIDDLE)

    page.mouse("mousePressed", x, y, button="left", clickCount=1)
    page.mouse("mouseMoved", x - 100, y, button="left", buttons=1)
    page.mouse("mouseReleased", x - 100, y, button="left", clickCount=1)

    assert page.run("timeline.begin") == pytest.approx(
        before + 100 * page.run("(timeline.end - timeline.begin) / timeline.width"), rel=0.05
    )


@in_browser
def test_hovering_tells_what_when_and_how_much(page: Page, tmp_path: Path) -> None:
    opened(page, tmp_path, example())
    x, y = page.run(
        """(() => {
            const box = timeline.boxes.find(b => data.kinds[b.item.kind] === "all-gather");
            const canvas = timeline.canvas.getBoundingClientRect();
            const [x, y] = [(box.left + box.right) / 2, (box.top + box.bottom) / 2];
            return [canvas.left + x, canvas.top + y];
        })()"""
    )

    page.mouse("mouseMoved", x, y)

    text = page.run("document.getElementById('tooltip').innerText")
    assert "all-gather of layers.0" in text
    assert "10.0 ms" in text
    assert "4.00 MiB" in text
    assert not page.run("document.getElementById('tooltip').hidden")


@in_browser
def test_the_straggler_is_marked(page: Page, tmp_path: Path) -> None:
    opened(page, tmp_path, example())

    assert "rank 1 (straggler)" in page.run("document.getElementById('ranks').innerText")
    assert page.run("document.querySelector('.card.warn .value').textContent") == "rank 1"


@in_browser
def test_a_click_on_a_heading_sorts_the_table(page: Page, tmp_path: Path) -> None:
    data = trace_data(
        rank_trace([record(What.FORWARD, "a", 0, 10), record(What.FORWARD, "b", 20, 50)])
    )
    opened(page, tmp_path, data)
    names = "[...document.querySelectorAll('#units tbody td:first-child')].map(c => c.textContent)"

    page.run("document.querySelectorAll('#units th')[1].click()")
    assert page.run(names) == ["b", "a"]
    page.run("document.querySelectorAll('#units th')[1].click()")
    assert page.run(names) == ["a", "b"]


@in_browser
def test_a_name_that_looks_like_html_runs_no_script(page: Page, tmp_path: Path) -> None:
    opened(page, tmp_path, example("<img src=x onerror=document.title='bad'></script>"))

    assert page.errors == []
    assert page.run("document.title") == "Model: fullshard trace"
    assert page.run("document.querySelectorAll('img').length") == 0


@in_browser
def test_a_long_trace_is_drawn_in_time(page: Page, tmp_path: Path) -> None:
    records = [record(What.FORWARD, f"layers.{n}", n * 0.02, n * 0.02 + 0.019) for n in range(5000)]
    opened(page, tmp_path, trace_data(rank_trace(records)))

    milliseconds = page.run(
        "(() => { const t = performance.now(); timeline.draw(); return performance.now() - t; })()"
    )
    assert page.errors == []
    # Zooming stays smooth; a busy machine is allowed to be slower than a frame.
    assert milliseconds < 500


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")

    write(example(), tmp_path / "trace.png")

    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")
