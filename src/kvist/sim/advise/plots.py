"""Line charts as inline SVG: no library, no script, colours from the page's style sheet."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_WIDTH, _HEIGHT = 720, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 20, 20, 92
_LEGEND_PX = 175


@dataclass(frozen=True, slots=True)
class Series:
    """A line; `look` 0-3 chooses its colour and dashes. `steps` draws it as stairs."""

    name: str
    points: Sequence[tuple[float, float]]
    look: int
    steps: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line with a name."""

    name: str
    x: float


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis; `spell` writes a tick."""

    label: str
    spell: Callable[[float], str]
    log: bool = False
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class _Scale:
    low: float
    high: float
    start: float
    end: float
    log: bool

    def at(self, value: float) -> float:
        low, high = (math.log(v) if self.log else v for v in (self.low, self.high))
        value = math.log(max(value, self.low)) if self.log else value
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        if not self.log:
            return [self.low + i * (self.high - self.low) / 5 for i in range(6)]
        first, last = math.log10(self.low), math.log10(self.high)
        factors = (1, 2, 5) if last - first < 2.5 else (1,)
        exponents = range(math.floor(first), math.ceil(last) + 1)
        found = [f * 10.0**e for e in exponents for f in factors]
        inside = [t for t in found if self.low * 0.999 <= t <= self.high * 1.001]
        return inside or [self.low, self.high]


def line_chart(
    title: str, text: str, series: Sequence[Series], x: Axis, y: Axis, marks: Sequence[Mark] = ()
) -> str:
    """An SVG of `series`; `text` says in words what it shows, for those who cannot see it."""
    points = [p for s in series for p in s.points] or [(0.0, 0.0)]
    marked = [m.x for m in marks]
    across = _scale(x, [p[0] for p in points] + marked, _LEFT, _WIDTH - _RIGHT)
    down = _scale(y, [p[1] for p in points], _HEIGHT - _BOTTOM, _TOP)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{_escaped(title)}">',
        f"<title>{_escaped(title)}</title><desc>{_escaped(text)}</desc>",
        *_grid(across, down, x, y),
        *(_mark(mark, across, place) for place, mark in enumerate(marks)),
        *(_line(one, across, down) for one in series),
        *_legend(series),
        "</svg>",
    ]
    return "\n".join(parts)


def _scale(axis: Axis, values: Sequence[float], start: float, end: float) -> _Scale:
    usable = [v for v in values if math.isfinite(v) and (v > 0 or not axis.log)] or [1.0]
    low = min(usable) if axis.low is None else axis.low
    high = max(usable) if axis.high is None else axis.high
    if axis.log:
        low = max(low, high * 1e-6)
    if high <= low:
        high = low * 2 if low > 0 else low + 1
    return _Scale(low, high, start, end, axis.log)


def _grid(across: _Scale, down: _Scale, x: Axis, y: Axis) -> list[str]:
    bottom = _HEIGHT - _BOTTOM
    parts = []
    for tick in across.ticks():
        at = across.at(tick)
        parts.append(f'<path class="grid" d="M{at:.1f} {_TOP}V{bottom}"/>')
        parts.append(_text(at, bottom + 18, x.spell(tick), "middle"))
    for tick in down.ticks():
        at = down.at(tick)
        parts.append(f'<path class="grid" d="M{_LEFT} {at:.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(_text(_LEFT - 8, at + 4, y.spell(tick), "end"))
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, bottom + 40, x.label, "middle"))
    middle = (_TOP + bottom) / 2
    parts.append(
        f'<text x="16" y="{middle}" text-anchor="middle" transform="rotate(-90 16 {middle})">'
        f"{_escaped(y.label)}</text>"
    )
    return parts


def _line(series: Series, across: _Scale, down: _Scale) -> str:
    places = [(across.at(px), down.at(py)) for px, py in series.points]
    if not places:
        return ""
    path = f"M{places[0][0]:.1f} {places[0][1]:.1f}"
    for px, py in places[1:]:
        path += f"V{py:.1f}H{px:.1f}" if series.steps else f"L{px:.1f} {py:.1f}"
    dots = "".join(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3"/>' for px, py in places)
    few = len(places) <= 16 and not series.steps
    return f'<g class="s{series.look}"><path d="{path}"/>{dots if few else ""}</g>'


def _mark(mark: Mark, across: _Scale, place: int) -> str:
    at = across.at(mark.x)
    left = at > _WIDTH - _RIGHT - 110
    text = _text(
        at + (-5 if left else 5), _TOP + 12 + 14 * place, mark.name, "end" if left else "start"
    )
    return f'<path class="mark" d="M{at:.1f} {_TOP}V{_HEIGHT - _BOTTOM}"/>{text}'


def _legend(series: Sequence[Series]) -> list[str]:
    parts = []
    for place, one in enumerate(series):
        left, top = _LEFT + _LEGEND_PX * place, _HEIGHT - 22
        parts.append(f'<g class="s{one.look}"><path d="M{left} {top}h26"/></g>')
        parts.append(_text(left + 32, top + 4, one.name, "start"))
    return parts


def _text(x: float, y: float, content: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{_escaped(content)}</text>'


def _escaped(text: str) -> str:
    return html.escape(text, quote=True)
