"""The page of a trace: what it embeds, and what a real browser makes of it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fullshard.tracing.output import write
from fullshard.tracing.page import as_page, page_data
from fullshard.tracing.picture import drawn_kinds
from fullshard.tracing.records import Memory, RankTrace, Step, TraceData, What

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

    width = page.run("timeline.plotWidth")
    boxes = page.run("timeline.boxes.map(b => [data.kinds[b.item.kind], b.right - b.left])")
    forward = next(size for kind, size in boxes if kind == "forward")
    # 30 of the step's 100 milliseconds.
    assert forward == pytest.approx(0.3 * width, rel=0.01)
    painted = colors(page)
    assert painted[page.run("colors.forward")] > 1000
    assert painted[page.run("colors['wait-gather']")] > 300


@in_browser
def test_collectives_that_overlap_in_time_do_not_overlap_on_the_page(
    page: Page, tmp_path: Path
) -> None:
    spans = [record(What.ALL_GATHER, str(n), n * 5, 60 + n) for n in range(3)]
    opened(page, tmp_path, trace_data(rank_trace([*spans, record(What.FORWARD, "0", 0, 100)])))

    boxes = page.run(
        """timeline.boxes.filter(b => data.kinds[b.item.kind] === "all-gather")
            .map(b => [b.top, b.bottom])"""
    )
    assert len(boxes) == 3
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(sorted(boxes)))


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

    # What was under the pointer still is.
    assert page.run("timeline.begin") > before
    assert page.run(f"timeline.x({before})") == pytest.approx(page.run("timeline.left") - 100)


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
def test_hovering_the_memory_tells_its_causes_and_marks_the_moment(
    page: Page, tmp_path: Path
) -> None:
    opened(page, tmp_path, example())
    x, y = page.run(
        """(b => [b.left + timeline.x(75e3), b.top + timeline.memoryTop() + 100])(
            timeline.canvas.getBoundingClientRect())"""
    )

    page.mouse("mouseMoved", x, y)

    text = page.run("document.getElementById('tooltip').innerText")
    assert text.startswith("memory 24 bytes at 50.0 ms")
    assert "optimizer state: 8 bytes" in text
    cursor = page.run("document.getElementById('cursor').getBoundingClientRect().left")
    assert cursor == pytest.approx(x, abs=1)


@in_browser
def test_a_tap_describes_until_the_next_tap_elsewhere(page: Page, tmp_path: Path) -> None:
    opened(page, tmp_path, example(), width=390)
    x, y = page.run(
        """(b => [b.left + timeline.x(25e3), b.top + timeline.boxes[0].top + 8])(
            timeline.canvas.getBoundingClientRect())"""
    )

    page.tap(x, y)
    assert "forward of layers.0" in page.run("document.getElementById('tooltip').innerText")
    assert not page.run("document.getElementById('tooltip').hidden")
    page.tap(30, 30)
    assert page.run("document.getElementById('tooltip').hidden")


@in_browser
def test_two_fingers_zoom(page: Page, tmp_path: Path) -> None:
    opened(page, tmp_path, example(), width=390)
    page.run("timeline.canvas.scrollIntoView({block: 'center'})")
    x, y = page.run(MIDDLE)
    whole = page.run("timeline.end - timeline.begin")

    page.touch("touchStart", (x - 20, y), (x + 20, y))
    page.touch("touchMove", (x - 60, y), (x + 60, y))
    page.touch("touchEnd")

    assert page.run("timeline.end - timeline.begin") == pytest.approx(whole / 3, rel=0.05)


@in_browser
def test_a_click_shows_one_unit_alone_and_not_those_whose_names_begin_alike(
    page: Page, tmp_path: Path
) -> None:
    spans = [record(What.FORWARD, f"layers.{n}", n * 10, n * 10 + 9) for n in (1, 10)]
    opened(page, tmp_path, trace_data(rank_trace(spans, until=110)))
    x, y = page.run(
        """(b => [b.left + timeline.x(14e3), b.top + timeline.boxes[0].top + 8])(
            timeline.canvas.getBoundingClientRect())"""
    )
    faded = "[0, 1].map(unit => Boolean(timeline.isFaded(unit)))"

    page.mouse("mousePressed", x, y, button="left", clickCount=1)
    page.mouse("mouseReleased", x, y, button="left", clickCount=1)
    assert page.run(faded) == [False, True]
    page.run("timeline.want('layers.1')")  # typed, it is part of both names
    assert page.run(faded) == [False, False]


@in_browser
def test_keys_move_and_zoom(page: Page, tmp_path: Path) -> None:
    opened(page, tmp_path, example())
    page.run("timeline.canvas.focus()")
    begin, length = page.run("timeline.begin"), page.run("timeline.end - timeline.begin")

    page.key("ArrowUp")
    assert page.run("timeline.end - timeline.begin") == pytest.approx(0.8 * length)
    page.key("ArrowRight")
    assert page.run("timeline.begin") == pytest.approx(begin + 0.18 * length)
    page.key("Home")
    assert page.run("timeline.end - timeline.begin") == pytest.approx(length)


@in_browser
def test_of_many_steps_one_is_chosen_from_a_list(page: Page, tmp_path: Path) -> None:
    steps = [Step(n + 1, n * 0.1, (n + 1) * 0.1) for n in range(20)]
    trace = dataclasses.replace(
        rank_trace([record(What.FORWARD, "a", n * 100 + 10, n * 100 + 90) for n in range(20)]),
        steps=steps,
    )
    opened(page, tmp_path, trace_data(trace))
    assert page.run("timeline.stepChoice.selectedOptions[0].text") == "step 20"

    page.run(
        "timeline.stepChoice.value = 3; timeline.stepChoice.dispatchEvent(new Event('change'))"
    )

    assert page.run("[timeline.begin, timeline.end]") == [200_000, 300_000]
    page.run("timeline.zoom(0.5)")
    assert page.run("timeline.stepChoice.selectedOptions[0].text") == "a part"


@in_browser
@pytest.mark.parametrize("dark", [False, True])
def test_words_on_bars_can_be_read(page: Page, tmp_path: Path, dark: bool) -> None:
    opened(page, tmp_path, example(), dark=dark)

    found: dict[str, list[str]] = page.run(
        "Object.fromEntries(Object.values(KIND_COLORS).map(n => [n, [colors[n], wordColors[n]]]))"
    )
    # WCAG asks for 4.5 for words, 3 for large ones.
    assert {name: 1 for name, pair in found.items() if contrast(*pair) < 4} == {}


def contrast(one: str, other: str) -> float:
    def luminance(color: str) -> float:
        parts = [int(color[n : n + 2], 16) / 255 for n in (1, 3, 5)]
        red, green, blue = (
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dark, bright = sorted(map(luminance, (one, other)))
    return (bright + 0.05) / (dark + 0.05)


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


@in_browser
def test_a_trace_of_a_whole_day_is_shown(page: Page, tmp_path: Path) -> None:
    """More moments and steps than a function may have arguments."""
    count = 200_000
    trace = dataclasses.replace(
        rank_trace([]),
        steps=[Step(n, n * 1e-3, (n + 1) * 1e-3) for n in range(20_000)],
        memory=[Memory(n * 1e-4, 4, 8, 0, 0, 0, n % 7) for n in range(count)],
    )
    opened(page, tmp_path, trace_data(trace))
    page.run("timeline.show(timeline.low, timeline.high)")

    assert page.errors == []
    assert page.run("timeline.visibleMoments(data.ranks[0]).length") < 4000


def test_the_legend_of_a_picture_names_what_any_rank_did() -> None:
    whole = rank_trace([record(What.FORWARD, "a", 0, 100)])
    part = rank_trace([record(What.FORWARD, "a", 50, 100)], rank=1)

    assert drawn_kinds([whole, part], whole.steps[0]) == [What.FORWARD, What.OUTSIDE]


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")

    write(example(), tmp_path / "trace.png")

    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")
