"""Charts: stacked bars as plain boxes that follow the page's width, and points in a plane as an
SVG. Every part has a hover title.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from math import ceil, cos, floor, hypot, log10, pi, sin

from markupsafe import Markup

from plait.observe.templating import part, render


@dataclass(frozen=True)
class Part:
    """A part of a stacked bar."""

    colour: str
    """A CSS class."""
    title: str
    size: float


@dataclass(frozen=True)
class Bar:
    """A stacked bar, with the interval of its whole where there is one."""

    label: str
    parts: tuple[Part, ...]
    value: str
    low: float | None = None
    high: float | None = None

    @property
    def size(self) -> float:
        """Of all parts."""
        return sum(part.size for part in self.parts)


def bars(rows: Sequence[Bar], *, limit: tuple[float, str] | None = None) -> Markup:
    """Bars under each other on one scale from 0; `limit` is a line across them, with its name."""
    ends = [row.high if row.high is not None else row.size for row in rows] + [
        limit[0] if limit else 0.0
    ]
    return part("bars", rows, 100 / (max(ends) * 1.02), limit)


@dataclass(frozen=True)
class Dot:
    """A point in the plane."""

    x: float
    y: float
    colour: str
    title: str
    mark: str = ""
    """One or two characters; marked points are discs over all others."""


_WIDTH = 1000
_HEIGHT = 460
_LEFT = 70
_RIGHT = 24
_TOP = 14
_BOTTOM = 48


def plane(
    dots: Sequence[Dot], *, x_name: str, y_name: str, x_limit: tuple[float, str], title: str
) -> Markup:
    """Points by x (from 0) and y (logarithmic), with a line at `x_limit` beyond which is shaded."""
    right = max([dot.x for dot in dots] + [x_limit[0]]) * 1.02
    low = min(dot.y for dot in dots) / 1.08
    high = max(dot.y for dot in dots) * 1.08

    def across(value: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * value / right

    def up(value: float) -> float:
        return (
            _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * log10(value / low) / log10(high / low)
        )

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
        edge=across(x_limit[0]),
        limit=x_limit[1],
        columns=[(across(value), value) for value in _columns(right)],
        rows=[(up(value), value) for value in ticks(low, high)],
        dots=[(dot, across(dot.x), up(dot.y)) for dot in dots if not dot.mark],
        marks=list(_marks([(dot, across(dot.x), up(dot.y)) for dot in dots if dot.mark])),
    )


def _marks(
    dots: Sequence[tuple[Dot, float, float]],
) -> Iterator[tuple[Dot, float, float, float, float]]:
    """Every marked point (dot, x, y) with a free place near it for the disc with its mark."""
    taken: list[tuple[float, float]] = []
    for dot, x, y in dots:
        place = next(
            (x + dx, y + dy)
            for dx, dy in _places()
            if _LEFT < x + dx < _WIDTH - _RIGHT
            and _TOP < y + dy < _HEIGHT - _BOTTOM
            and all(hypot(x + dx - p, y + dy - q) > 21 for p, q in taken)
        )
        taken.append(place)
        yield dot, x, y, *place


def _places() -> Iterator[tuple[float, float]]:
    """Offsets from a point, the nearest first."""
    yield 0.0, 0.0
    for ring in count(1):
        for turn in range(12):
            yield 22 * ring * cos(turn * pi / 6), 22 * ring * sin(turn * pi / 6)


def _columns(right: float) -> list[float]:
    """Round numbers from 0 to `right`, at most eleven."""
    step = 10 ** floor(log10(right / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if right / (step * factor) <= 10)
    return [index * step for index in range(floor(right / step) + 1)]


def ticks(low: float, high: float) -> list[float]:
    """Round numbers of a logarithmic axis: 1, 2, 5 of each power of ten, or more of them over a
    short range.
    """
    digits: tuple[float, ...] = (1, 2, 5)
    if high / low < 20:
        digits = (1, 1.5, 2, 3, 4, 5, 7)
    if high / low < 4:
        digits = (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9)
    powers = range(floor(log10(low)), ceil(log10(high)) + 1)
    return [
        value
        for power in powers
        for digit in digits
        if low <= (value := float(f"{digit}e{power}")) <= high
    ]
