"""Charts: stacked bars as plain boxes that follow the page's width, and points in a plane as an SVG. Every part has a hover title."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from math import ceil, cos, floor, hypot, log10, pi, sin

from markupsafe import Markup

from plait.observe.report.page import join


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
    ends = [row.high if row.high is not None else row.size for row in rows] + [limit[0] if limit else 0.0]
    scale = 100 / (max(ends) * 1.02)
    line = Markup("")
    if limit is not None:
        line = Markup('<span class="limit" style="left:{}%" title="{}"></span>').format(_short(limit[0] * scale), limit[1])
    return Markup('<div class="bars">\n{}</div>\n').format(join(_bar(row, scale, line) for row in rows))


def _bar(row: Bar, scale: float, line: Markup) -> Markup:
    part = Markup('<span class="part {}" style="width:{}%" title="{}" data-size="{}"></span>')
    parts = join(part.format(p.colour, _short(p.size * scale), p.title, repr(p.size)) for p in row.parts if p.size > 0)
    interval = Markup("")
    if row.high is not None:
        low = row.size if row.low is None else row.low
        where = (_short(low * scale), _short((row.high - low) * scale))
        interval = Markup('<span class="interval" style="left:{}%;width:{}%" title="90 % interval"></span>').format(*where)
    return Markup('<div class="row"><div class="label">{}</div><div class="bar">{}{}{}</div><div class="value">{}</div></div>\n').format(
        row.label, parts, interval, line, row.value
    )


def _short(number: float) -> str:
    return f"{number:.3f}".rstrip("0").rstrip(".")


@dataclass(frozen=True)
class Dot:
    """A point in the plane."""

    x: float
    y: float
    colour: str
    title: str
    mark: str = ""
    """One or two characters; marked points are discs over all others."""


_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 1000, 460, 70, 24, 14, 48


def plane(dots: Sequence[Dot], *, x_name: str, y_name: str, x_limit: tuple[float, str], title: str) -> Markup:
    """Points by x (from 0) and y (logarithmic), with a line at `x_limit` beyond which is shaded."""
    right = max([dot.x for dot in dots] + [x_limit[0]]) * 1.02
    low, high = min(dot.y for dot in dots) / 1.08, max(dot.y for dot in dots) * 1.08

    def across(value: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * value / right

    def up(value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * log10(value / low) / log10(high / low)

    edge, bottom = across(x_limit[0]), _HEIGHT - _BOTTOM
    parts = [
        Markup('<rect class="beyond" x="{:.1f}" y="{}" width="{:.1f}" height="{}"/>').format(
            edge, _TOP, _WIDTH - _RIGHT - edge, bottom - _TOP
        ),
        *_grid(right, low, high, across, up),
        Markup('<line class="limit" x1="{0:.1f}" y1="{1}" x2="{0:.1f}" y2="{2}"/>').format(edge, _TOP, bottom),
        Markup('<text class="ink" x="{:.1f}" y="{}">{}</text>').format(edge + 6, _TOP + 14, x_limit[1]),
        Markup('<text class="muted" x="{}" y="{}" text-anchor="middle">{}</text>').format((_LEFT + _WIDTH) / 2, _HEIGHT - 8, x_name),
        Markup('<text class="muted" transform="translate(16 {}) rotate(-90)" text-anchor="middle">{}</text>').format(
            (_TOP + bottom) / 2, y_name
        ),
        *(_dot(dot, across, up) for dot in dots if not dot.mark),
        *_marks([dot for dot in dots if dot.mark], across, up),
    ]
    frame = Markup('<div class="wide"><svg class="plane" viewBox="0 0 {} {}" role="img" aria-label="{}">\n{}\n</svg></div>\n')
    return frame.format(_WIDTH, _HEIGHT, title, Markup("\n").join(parts))


def _dot(dot: Dot, across: Callable[[float], float], up: Callable[[float], float]) -> Markup:
    circle = Markup('<circle class="{}" cx="{:.1f}" cy="{:.1f}" r="4"><title>{}</title></circle>')
    return circle.format(dot.colour, across(dot.x), up(dot.y), dot.title)


def _marks(dots: Sequence[Dot], across: Callable[[float], float], up: Callable[[float], float]) -> Iterator[Markup]:
    """A disc with its mark for every marked point, moved to a free place near it where others are."""
    taken: list[tuple[float, float]] = []
    discs = []
    for dot in dots:
        x, y = across(dot.x), up(dot.y)
        place = next(
            (x + dx, y + dy)
            for dx, dy in _places()
            if _LEFT < x + dx < _WIDTH - _RIGHT
            and _TOP < y + dy < _HEIGHT - _BOTTOM
            and all(hypot(x + dx - p, y + dy - q) > 21 for p, q in taken)
        )
        taken.append(place)
        yield Markup('<line class="lead" x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"/>').format(x, y, *place)
        yield Markup('<circle class="{}" cx="{:.1f}" cy="{:.1f}" r="3"/>').format(dot.colour, x, y)
        discs.append(
            Markup('<g class="disc"><circle class="{0}" cx="{1:.1f}" cy="{2:.1f}" r="10"/><text x="{1:.1f}" y="{3:.1f}">{4}</text>').format(
                dot.colour, *place, place[1] + 4.5, dot.mark
            )
            + Markup("<title>{}</title></g>").format(dot.title)
        )
    yield from discs


def _places() -> Iterator[tuple[float, float]]:
    """Offsets from a point, the nearest first."""
    yield 0.0, 0.0
    for ring in count(1):
        for turn in range(12):
            yield 22 * ring * cos(turn * pi / 6), 22 * ring * sin(turn * pi / 6)


def _grid(right: float, low: float, high: float, across: Callable[[float], float], up: Callable[[float], float]) -> Iterator[Markup]:
    step = 10 ** floor(log10(right / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if right / (step * factor) <= 10)
    for index in range(floor(right / step) + 1):
        x = across(index * step)
        yield Markup('<line class="grid" x1="{0:.1f}" y1="{1}" x2="{0:.1f}" y2="{2}"/>').format(x, _TOP, _HEIGHT - _BOTTOM)
        yield Markup('<text class="muted" x="{:.1f}" y="{}" text-anchor="middle">{:g}</text>').format(
            x, _HEIGHT - _BOTTOM + 18, index * step
        )
    for value in ticks(low, high):
        y = up(value)
        yield Markup('<line class="grid" x1="{0}" y1="{2:.1f}" x2="{1}" y2="{2:.1f}"/>').format(_LEFT, _WIDTH - _RIGHT, y)
        yield Markup('<text class="muted" x="{}" y="{:.1f}" text-anchor="end">{:g}</text>').format(_LEFT - 8, y + 4, value)


def ticks(low: float, high: float) -> list[float]:
    """Round numbers of a logarithmic axis: 1, 2, 5 of each power of ten, or more of them over a short range."""
    digits: tuple[float, ...] = (1, 2, 5)
    if high / low < 20:
        digits = (1, 1.5, 2, 3, 4, 5, 7)
    if high / low < 4:
        digits = (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9)
    powers = range(floor(log10(low)), ceil(log10(high)) + 1)
    return [value for power in powers for digit in digits if low <= (value := float(f"{digit}e{power}")) <= high]
