"""Drawings as inline SVG: bars along an axis, with names for who cannot see them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from flowgpu.render import one_line

WIDTH = 960.0
LABELS = 190.0
"""Width of the column of names."""
VALUES = 190.0
"""Width of the column of numbers."""
ROW, BAR = 22.0, 14.0
LETTER = 6.6
"""Width of a letter, about."""


def text(value: str) -> str:
    """What is anyone's, as it may stand in a page."""
    return escape(one_line(value))


def ticks(end: float, most: int = 8) -> list[float]:
    """Round numbers from 0 to `end`."""
    if end <= 0:
        return [0.0]
    rough = end / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(n * power for n in (1, 2, 5, 10) if n * power >= rough * (1 - 1e-9))
    return [n * step for n in range(math.floor(end / step + 1e-9) + 1)]


class Drawing:
    """A drawing of rows below each other, which grows as rows are added."""

    def __init__(self, key: str, title: str, described: str) -> None:
        """`key` is of this drawing alone in its page; the others are read to who cannot see it."""
        self._key, self._title, self._described = key, title, described
        self._parts: list[str] = []
        self.height = 8.0

    def label(self, x: float, y: float, what: str, kind: str = "", end: bool = False) -> None:
        """Write `what`, from x on or up to it."""
        anchor = ' text-anchor="end"' if end else ""
        style = f' class="{kind}"' if kind else ""
        self._parts.append(f'<text x="{x:.1f}" y="{y:.1f}"{anchor}{style}>{text(what)}</text>')

    def bar(self, x: float, y: float, width: float, height: float, kind: str, tip: str) -> None:
        """A rectangle; `tip` is shown under the pointer."""
        place = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 1.5):.1f}" height="{height:.1f}"'
        self._parts.append(f'<rect {place} class="{kind}"><title>{text(tip)}</title></rect>')

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        """A straight line."""
        ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
        self._parts.append(f'<line {ends} class="{kind}"/>')

    def path(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        """Lines from point to point."""
        where = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(f'<polyline points="{where}" class="{kind}"/>')

    def dot(self, x: float, y: float, kind: str, tip: str) -> None:
        """A point; `tip` is shown under the pointer."""
        where = f'cx="{x:.1f}" cy="{y:.1f}" r="4"'
        self._parts.append(f'<circle {where} class="{kind}"><title>{text(tip)}</title></circle>')

    def row(self, name: str, value: str) -> float:
        """Begin a row; gives the y of its bar."""
        y = self.height
        self.label(LABELS - 10, y + BAR - 3, shorten(name, LABELS - 10), end=True)
        if value:
            self.label(WIDTH - VALUES + 10, y + BAR - 3, value, "value")
        self.height += ROW
        return y

    def heading(self, name: str) -> None:
        """A name over the rows that follow."""
        self.height += 4
        self.label(0, self.height + BAR - 3, name, "heading")
        self.height += ROW - 2

    def under(self, parts: Drawing) -> None:
        """Lay another one's parts under those of this."""
        self._parts = parts._parts + self._parts

    def html(self) -> str:
        """The element."""
        key, size = self._key, f"0 0 {WIDTH:.0f} {self.height + 6:.0f}"
        return (
            f'<svg viewBox="{size}" role="img" aria-labelledby="{key}-t {key}-d">'
            f'<title id="{key}-t">{text(self._title)}</title>'
            f'<desc id="{key}-d">{text(self._described)}</desc>{"".join(self._parts)}</svg>'
        )


def shorten(name: str, width: float) -> str:
    """`name`, or as much of it as fits."""
    most = int(width / LETTER)
    return name if len(name) <= most else name[: most - 1] + "…"
