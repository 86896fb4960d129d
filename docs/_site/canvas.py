"""An SVG picture for light and for dark pages: shapes, words, and a panel behind them.

The panel follows the reader's system, as the words on it do; so both fit together even if the page
around the picture was switched to the other scheme.
"""

from __future__ import annotations

from pathlib import Path

PICTURES = Path(__file__).resolve().parent.parent / "pictures"
STYLE = """
  .panel { fill: #ffffff; stroke: #cfd8dc }
  text { font: 14px system-ui, sans-serif; fill: #263238 }
  .small { font-size: 12px; fill: #546e7a }
  .on { fill: #ffffff; font-size: 12px }
  .shard { fill: #00796b } .rest { fill: #80cbc4 } .compute { fill: #37474f }
  .warm { fill: #ef8e38 } .warmlight { fill: #ffcc8f } .gray { fill: #b0bec5 }
  .frame { fill: none; stroke: #78909c; stroke-width: 1.5 }
  .line { fill: none; stroke: #78909c; stroke-width: 1 }
  .cut { fill: none; stroke: #c62828; stroke-width: 2.5 }
  @media (prefers-color-scheme: dark) {
    .panel { fill: #1c262b; stroke: #37474f }
    text { fill: #eceff1 } .small { fill: #b0bec5 } .on { fill: #ffffff }
    .compute { fill: #607d8b } .gray { fill: #546e7a } .cut { stroke: #ff8a80 }
  }
"""


class Canvas:
    """A picture under construction."""

    def __init__(self, width: int, height: int, title: str, style: str = "") -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">\n'
            f"<title>{title}</title>\n<style>{STYLE}{style}</style>"
        ]
        self.rect(0.5, 0.5, width - 1, height - 1, "panel", 'rx="6"')

    def rect(
        self, x: float, y: float, width: float, height: float, kind: str, more: str = ""
    ) -> None:
        """Draw a rectangle of a ``kind`` that the style knows."""
        box = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self._parts.append(f'<rect class="{kind}" {box} {more}/>')

    def text(
        self, x: float, y: float, words: str, kind: str = "", anchor: str = "start", more: str = ""
    ) -> None:
        """Write ``words`` that begin, end, or have their middle, at ``x``."""
        place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}"'
        self._parts.append(f'<text class="{kind}" {place} {more}>{words}</text>')

    def line(self, points: list[tuple[float, float]], kind: str = "line") -> None:
        """Draw a line through ``points``."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._parts.append(f'<polyline class="{kind}" points="{path}"/>')

    def save(self, name: str) -> None:
        """Write the picture among the others."""
        (PICTURES / name).write_text("\n".join([*self._parts, "</svg>\n"]), encoding="utf-8")
