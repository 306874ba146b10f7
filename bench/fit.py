"""Where a growing quantity stops being a straight line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy

# How far a point may lie from the line, as a part of its own value.
TOLERANCE = 0.10
FEWEST = 3  # two points are always on a line

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    """y = start + slope * x through the first points, up to `until`."""

    start: float
    slope: float
    until: float
    beyond: tuple[float, float] | None  # the first point off the line

    def at(self, x: float) -> float:
        return self.start + self.slope * x


def straight(points: Points) -> Line | None:
    """The line through as many of the first points as lie on one; None if no three do."""
    ordered = sorted(points)
    for count in range(len(ordered), FEWEST - 1, -1):
        x, y = numpy.array(ordered[:count]).T
        # Relative errors: each point is weighted by its own value.
        slope, start = numpy.polyfit(x, y, 1, w=1 / y)
        if (abs(start + slope * x - y) <= TOLERANCE * y).all():
            beyond = ordered[count] if count < len(ordered) else None
            return Line(float(start), float(slope), float(x[-1]), beyond)
    return None
