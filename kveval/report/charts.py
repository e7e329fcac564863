"""Geometry of the two charts: where each mark goes, in the units of an SVG view box. The template draws them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kveval.report import wording
from kveval.units import format_tokens

if TYPE_CHECKING:
    from kveval.report.model import Report
    from kveval.stats.divergence import PplRatio
    from kveval.stats.retention import Retention

WIDTH, HEIGHT = 480, 300
LEFT, RIGHT, TOP, BOTTOM = 72, 14, 14, 46
# Shapes around (0, 0): with the line's dashes they tell the arms apart without colour.
MARKERS = (
    "M-4.5,0a4.5,4.5 0 1,0 9,0a4.5,4.5 0 1,0 -9,0",
    "M-4,-4H4V4H-4Z",
    "M0,-5.5L5,4H-5Z",
    "M0,-5.5L5.5,0L0,5.5L-5.5,0Z",
    "M0,5.5L5,-4H-5Z",
    "M-5,-1.6H-1.6V-5H1.6V-1.6H5V1.6H1.6V5H-1.6V1.6H-5Z",
)
COLORS = 6  # series colours in the template
DASHES = ("", "7 4", "2 3", "9 3 2 3", "4 2", "1 4")


@dataclass(frozen=True)
class Mark:
    """A point with its interval (``low`` and ``high`` are y coordinates; equal to ``y`` where there is none)."""

    x: float
    y: float
    low: float
    high: float
    text: str


@dataclass(frozen=True)
class Series:
    """The marks of one arm, in the colour of its number."""

    name: str
    color: int
    marker: str
    dash: str
    marks: tuple[Mark, ...]

    @property
    def line(self) -> str:
        """Points of a polyline."""
        return " ".join(f"{mark.x:.1f},{mark.y:.1f}" for mark in self.marks)


@dataclass(frozen=True)
class Tick:
    """A labelled place on an axis, in view box coordinates."""

    at: float
    text: str


@dataclass(frozen=True)
class Chart:
    """A drawing with its axes, and the words that stand in for it."""

    title: str
    description: str  # read aloud in place of the drawing
    x_title: str
    y_title: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    series: tuple[Series, ...]
    lines: tuple[Tick, ...] = ()  # horizontal rules with a name: a margin, the baseline
    joined: bool = True  # a line through the marks of a series


@dataclass(frozen=True)
class Scale:
    """Data to view box along y; ``log`` for ratios that span more than a doubling."""

    low: float
    high: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(at)
        return HEIGHT - BOTTOM - (at - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def ticks(self) -> list[float]:
        """About five round values."""
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            steps = (1,) if len(decades) > 4 else (1, 2, 5)
            return [step * 10.0**d for d in decades for step in steps if self.low <= step * 10.0**d <= self.high]
        step = _round_step((self.high - self.low) / 4)
        first = math.ceil(self.low / step - 1e-9)
        return [round(index * step, 12) for index in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if rough <= factor * power * (1 + 1e-9))


def retention_chart(report: Report) -> Chart | None:
    """Retention over length, one line for each candidate; None when nothing is known."""
    lengths = sorted({row.length for arm in report.candidates for row in arm.by_length})
    known = [
        (index, [row for row in arm.by_length if math.isfinite(row.retention.estimate)])
        for index, arm in enumerate(report.candidates)
    ]
    values = [value for _, rows in known for row in rows for value in _ends(row.retention)]
    if not values:
        return None
    margin = [report.margin] if report.margin is not None else []
    scale = _linear(min([*values, *margin]), max([1.0, *values]))
    step = (WIDTH - LEFT - RIGHT) / len(lengths)
    series = []
    for index, rows in known:
        dodge = (index - (len(known) - 1) / 2) * min(9.0, step / (len(known) + 1))
        marks = []
        for row in rows:
            kept = row.retention
            text = f"{format_tokens(row.length)}: {wording.percent(kept.estimate)}"
            span = wording.span(kept.low, kept.high, wording.percent)
            x = LEFT + step * (lengths.index(row.length) + 0.5) + dodge
            marks.append(_mark(x, kept.estimate, kept.low, kept.high, scale, f"{text} ({span})" if span else text))
        series.append(_series(report.candidates[index].name, index, marks))
    return Chart(
        title="Recall retention over length",
        description="The numbers are in the table of recall retention by length.",
        x_title="tokens before the question",
        y_title="retention",
        x_ticks=tuple(Tick(LEFT + step * (i + 0.5), format_tokens(length)) for i, length in enumerate(lengths)),
        y_ticks=tuple(Tick(scale(value), f"{value * 100:g} %") for value in scale.ticks()),
        series=tuple(series),
        lines=tuple(Tick(scale(value), f"asked for: {wording.percent(value)}") for value in margin),
    )


def cost_chart(report: Report) -> Chart | None:
    """PPL ratio over the bytes of a stream relative to the baseline; None when no candidate has both."""
    base = report.baseline.footprint
    found = []
    for index, arm in enumerate(report.candidates):
        if base and arm.footprint and arm.divergence and math.isfinite(arm.divergence.ppl.estimate):
            found.append((index, arm, arm.footprint.stored_bytes / base.stored_bytes, arm.divergence.ppl))
    if not found:
        return None
    values = [value for *_, ppl in found for value in _ends(ppl) if value > 0]
    scale = _ratio_scale(min([1.0, *values]), max([1.0, *values]))
    widest = max([1.0, *(share for _, _, share, _ in found)]) * 1.05

    def across(share: float) -> float:
        return LEFT + share / widest * (WIDTH - LEFT - RIGHT)

    series = []
    for index, arm, share, ppl in found:
        text = f"{wording.percent(share)} of the bytes, PPL ratio {wording.number(ppl.estimate)}"
        series.append(_series(arm.name, index, [_mark(across(share), ppl.estimate, ppl.low, ppl.high, scale, text)]))
    return Chart(
        title="PPL ratio over bytes",
        description="The numbers are in the first table.",
        x_title=f"bytes of a stream, relative to {report.baseline.name}",
        y_title="PPL ratio",
        x_ticks=tuple(Tick(across(share), f"{share * 100:g} %") for share in _shares(widest)),
        y_ticks=tuple(Tick(scale(value), f"{value:g}") for value in scale.ticks()),
        series=tuple(series),
        lines=(Tick(scale(1.0), report.baseline.name),),
        joined=False,
    )


def _shares(widest: float) -> list[float]:
    step = 0.25 if widest < 2 else _round_step(widest / 4)
    return [index * step for index in range(int(widest / step) + 1)]


def _ends(measured: Retention | PplRatio) -> list[float]:
    return [value for value in (measured.low, measured.high, measured.estimate) if math.isfinite(value)]


def _linear(low: float, high: float) -> Scale:
    """Room above and below; never so narrow that noise fills the chart."""
    room = max(0.08 * (high - low), 0.01)
    return Scale(max(0.0, low - room), high + room)


def _ratio_scale(low: float, high: float) -> Scale:
    if high / low > 2:
        return Scale(low / 1.2, high * 1.2, log=True)
    room = max(0.1 * (high - low), 0.002)
    return Scale(low - room, high + room)


def _mark(x: float, value: float, low: float, high: float, scale: Scale, text: str) -> Mark:
    ends = [scale(end) if math.isfinite(end) and (end > 0 or not scale.log) else scale(value) for end in (low, high)]
    return Mark(x, scale(value), ends[0], ends[1], text)


def _series(name: str, index: int, marks: list[Mark]) -> Series:
    return Series(name, index % COLORS, MARKERS[index % len(MARKERS)], DASHES[index % len(DASHES)], tuple(marks))
