"""An inline SVG of error against position, log scale: noise floor as an area, bound as a dashed line, rows beyond it marked.

Everything in the SVG is a number or a literal of this module, so nothing needs escaping. Colours are the page's classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.records import Record
from reports.text import figure

__all__ = ["error_plot"]

_WIDTH, _HEIGHT = 640, 190
_BEYOND_ALL = 1e300  # drawn at the top edge, as is what is not a number
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 72, 14, 24


@dataclass(frozen=True)
class _Point:
    position: float
    error: float
    noise: float
    bound: float

    @property
    def beyond(self) -> bool:
        return not self.error <= self.bound

    @property
    def excess(self) -> float:
        """How far beyond the bound, for choosing the worst; a NaN is worst of all."""
        if math.isnan(self.error):
            return math.inf
        return self.error / self.bound if self.bound > 0 else (math.inf if self.error > 0 else 0.0)


def error_plot(record: Record, points: int = 96) -> str:
    """SVG text, or "" where the record has no series to draw.

    Rows of several schedules or sequences share the axis: at each position (or at each of at most `points` steps) the row
    that is furthest beyond its bound is drawn.
    """
    worst = _worst_by_position(record, points)
    values = [v for p in worst for v in (p.error, p.noise, p.bound) if 0 < v < _BEYOND_ALL]
    if not worst or not values:
        return ""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    low = max(low, high - 16)
    high = max(high, low + 1)
    first, last = worst[0].position, max(worst[-1].position, worst[0].position + 1)

    def x(position: float) -> int:
        return round(_LEFT + (position - first) / (last - first) * (_WIDTH - _LEFT - _RIGHT))

    def y(value: float) -> int:
        if math.isnan(value) or value >= _BEYOND_ALL:
            return _TOP
        level = math.log10(value) if value > 0 else low
        share = (min(max(level, low), high) - low) / (high - low)
        return round(_HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM))

    def path(values: Sequence[float]) -> str:
        return "M" + "L".join(f"{x(point.position)} {y(value)}" for point, value in zip(worst, values, strict=True))

    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    step = max(1, math.ceil((high - low) / 5))
    grid = "".join(
        f'<path d="M{_LEFT} {y(10.0**level)}H{right}"/>'
        f'<text x="{_LEFT - 6}" y="{y(10.0**level) + 4}" class="e">1e{level}</text>'
        for level in range(low, high + 1, step)
    )
    ticks = "".join(f'<text x="{x(p)}" y="{_HEIGHT - 8}" class="m">{p:.0f}</text>' for p in _round_positions(first, last))
    noise = path([point.noise for point in worst])
    dots = "".join(f'<circle cx="{x(p.position)}" cy="{y(p.error)}" r="2.5"/>' for p in worst if p.beyond)
    end = worst[-1]
    label_bound, label_noise = _apart(y(end.bound), y(end.noise))
    parts = [
        f'<svg class="plot" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{_description(record, worst)}">',
        f'<g class="g">{grid}{ticks}</g>',
        f'<path class="n" d="{noise}V{bottom}H{x(first)}Z"/>',
        f'<path class="b" d="{path([point.bound for point in worst])}"/>',
        f'<path class="r" d="{path([point.error for point in worst])}"/>' if len(worst) > 1 else "",
        f'<circle class="r" cx="{x(end.position)}" cy="{y(end.error)}" r="2.5"/>' if len(worst) == 1 else "",
        f'<g class="d">{dots}</g>' if dots else "",
        _first_bad(record, x, first, last, bottom),
        f'<text class="b" x="{right + 6}" y="{label_bound + 4}">bound</text>',
        f'<text class="n" x="{right + 6}" y="{label_noise + 4}">noise</text>',
        f'<text class="m" x="{right + 14}" y="{_HEIGHT - 8}" style="text-anchor:start">position</text></svg>',
    ]
    return "".join(parts)


def _worst_by_position(record: Record, points: int) -> list[_Point]:
    columns = [record.series.get(name, []) for name in ("position", "error", "noise", "bound")]
    length = min(map(len, columns))
    by_position: dict[float, _Point] = {}
    for index in range(length):
        position, error, noise, bound = (math.nan if column[index] is None else float(column[index]) for column in columns)
        if math.isfinite(position) and abs(position) < 1e9:
            _keep_worst(by_position, position, _Point(position, error, noise, bound))
    if len(by_position) <= points:
        return [by_position[position] for position in sorted(by_position)]
    first, last = min(by_position), max(by_position)
    binned: dict[float, _Point] = {}
    for position, point in by_position.items():
        _keep_worst(binned, math.floor((position - first) / (last - first) * (points - 1)), point)
    return sorted(binned.values(), key=lambda point: point.position)


def _keep_worst(chosen: dict[float, _Point], key: float, point: _Point) -> None:
    if key not in chosen or point.excess > chosen[key].excess:
        chosen[key] = point


def _round_positions(first: float, last: float) -> list[int]:
    """About six positions at steps of 1, 2 or 5 times a power of ten."""
    power = 10 ** math.floor(math.log10(max((last - first) / 6, 1)))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor * 7 >= last - first)
    return list(range(math.ceil(first / step) * step, math.floor(last) + 1, step))


def _first_bad(record: Record, x: Callable[[float], int], first: float, last: float, bottom: int) -> str:
    position = record.first_bad_position
    if position is None or not first <= position <= last:
        return ""
    anchor = "end" if (position - first) / (last - first) > 0.7 else "start"
    dx = -5 if anchor == "end" else 5
    return (
        f'<path class="f" d="M{x(position)} {_TOP - 8}V{bottom}"/>'
        f'<text class="f" x="{x(position) + dx}" y="{_TOP}" style="text-anchor:{anchor}">first bad: {position}</text>'
    )


def _apart(bound: int, noise: int, gap: int = 13) -> tuple[int, int]:
    """Two label heights at least a line apart; the bound is the upper one."""
    if noise - bound >= gap:
        return bound, noise
    middle = (bound + noise) // 2
    return middle - gap // 2, middle - gap // 2 + gap


def _description(record: Record, worst: Sequence[_Point]) -> str:
    beyond = sum(point.beyond for point in worst)
    bad = f", first bad position {record.first_bad_position}" if record.first_bad_position is not None else ""
    return (
        f"Error by position, {worst[0].position:.0f} to {worst[-1].position:.0f}: at most {figure(record.max_abs)}, "
        f"noise floor {figure(record.noise_max)}; {beyond} of {len(worst)} drawn rows beyond the bound{bad}"
    )
