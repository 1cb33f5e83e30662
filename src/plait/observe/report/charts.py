"""Charts of a page: stacked bars that follow the width of the page, and a scatter plot as an SVG.

Every bar segment and every point has a tooltip.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from math import ceil, cos, floor, hypot, log10, pi, sin

from markupsafe import Markup

from plait.observe.templating import render, render_macro


@dataclass(frozen=True)
class BarSegment:
    """Segment of a stacked bar."""

    colour: str
    """CSS class of the colour."""
    title: str
    """Text of the tooltip."""
    size: float


@dataclass(frozen=True)
class Bar:
    """Stacked bar, optionally with a confidence interval of its length."""

    label: str
    segments: tuple[BarSegment, ...]
    value: str
    low: float | None = None
    high: float | None = None

    @property
    def size(self) -> float:
        """Length of all segments together."""
        return sum(segment.size for segment in self.segments)

    @property
    def end(self) -> float:
        """Upper end of the interval, or of the segments if there is no interval."""
        return self.size if self.high is None else self.high


def bars(rows: Sequence[Bar], *, limit: tuple[float, str] | None = None) -> Markup:
    """Draw bars below each other on one scale that starts at 0.

    Args:
        rows: The bars.
        limit: Position and tooltip of a line across all bars.
    """
    ends = [row.end for row in rows]
    if limit:
        ends.append(limit[0])
    # A margin of 2 % keeps the longest whisker inside of the chart.
    percent_per_unit = 100 / (max(ends) * 1.02)
    return render_macro("bars", rows, percent_per_unit, limit)


@dataclass(frozen=True)
class Dot:
    """Point of the scatter plot."""

    x: float
    y: float
    colour: str
    """CSS class of the colour."""
    title: str
    """Text of the tooltip."""
    mark: str = ""
    """Label of one or two characters. Marked points are drawn as discs over all other points."""


_WIDTH = 1000
_HEIGHT = 460
_LEFT = 70
_RIGHT = 24
_TOP = 14
_BOTTOM = 48


def plane(
    dots: Sequence[Dot], *, x_name: str, y_name: str, x_limit: tuple[float, str], title: str
) -> Markup:
    """Draw a scatter plot. The x axis starts at 0, and the y axis is logarithmic.

    Args:
        dots: The points.
        x_name: Title of the x axis.
        y_name: Title of the y axis.
        x_limit: Position and label of a vertical line. The area to its right is shaded.
        title: Description for screen readers.
    """
    # Margins keep the outermost points inside of the plot.
    right = max([dot.x for dot in dots] + [x_limit[0]]) * 1.02
    low = min(dot.y for dot in dots) / 1.08
    high = max(dot.y for dot in dots) * 1.08

    def to_x(value: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * value / right

    def to_y(value: float) -> float:
        # The y axis of an SVG points down.
        fraction = log10(value / low) / log10(high / low)
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * fraction

    plain_dots = []
    marked_dots = []
    for dot in dots:
        position = (dot, to_x(dot.x), to_y(dot.y))
        if dot.mark:
            marked_dots.append(position)
        else:
            plain_dots.append(position)

    return render(
        "plane.svg",
        width=_WIDTH,
        height=_HEIGHT,
        left=_LEFT,
        right=_WIDTH - _RIGHT,
        top=_TOP,
        bottom=_HEIGHT - _BOTTOM,
        title=title,
        x_name=x_name,
        y_name=y_name,
        edge=to_x(x_limit[0]),
        limit=x_limit[1],
        columns=[(to_x(value), value) for value in _linear_ticks(right)],
        rows=[(to_y(value), value) for value in log_ticks(low, high)],
        dots=plain_dots,
        marks=list(_place_discs(marked_dots)),
    )


def _place_discs(
    dots: Sequence[tuple[Dot, float, float]],
) -> Iterator[tuple[Dot, float, float, float, float]]:
    """Yield every marked dot with its x and y, and the x and y of the disc with its mark.

    A disc is as close to its dot as possible without overlapping an earlier disc.
    """
    occupied: list[tuple[float, float]] = []
    for dot, x, y in dots:
        for dx, dy in _offsets():
            disc_x = x + dx
            disc_y = y + dy
            is_inside = _LEFT < disc_x < _WIDTH - _RIGHT and _TOP < disc_y < _HEIGHT - _BOTTOM
            if is_inside and all(hypot(disc_x - p, disc_y - q) > 21 for p, q in occupied):
                break
        occupied.append((disc_x, disc_y))
        yield dot, x, y, disc_x, disc_y


def _offsets() -> Iterator[tuple[float, float]]:
    """Yield offsets from a point, the nearest first, without end."""
    yield 0.0, 0.0
    for ring in count(1):
        for turn in range(12):
            yield 22 * ring * cos(turn * pi / 6), 22 * ring * sin(turn * pi / 6)


def _linear_ticks(right: float) -> list[float]:
    """Return at most eleven round numbers from 0 to `right`."""
    step = 10 ** floor(log10(right / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if right / (step * factor) <= 10)
    return [index * step for index in range(floor(right / step) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return round numbers of a logarithmic axis.

    They are 1, 2 and 5 of each power of ten, or more of them if the range is short.
    """
    digits: tuple[float, ...] = (1, 2, 5)
    if high / low < 20:
        digits = (1, 1.5, 2, 3, 4, 5, 7)
    if high / low < 4:
        digits = (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9)
    powers = range(floor(log10(low)), ceil(log10(high)) + 1)
    # Parsed from text, because 2.5 * 10**-6 is not the float 2.5e-6.
    values = [float(f"{digit}e{power}") for power in powers for digit in digits]
    return [value for value in values if low <= value <= high]
