"""The few parts of SVG that the report's pictures need: safe text, scales, ticks, lines, a frame with axes.

Colours are classes and variables of the page's style sheet, so that one picture serves light and dark.
"""

from __future__ import annotations

import dataclasses
import html
import math
import unicodedata
from collections.abc import Callable, Iterable, Sequence

Point = tuple[float, float]

WIDTH = 960
LEFT, RIGHT, TOP, BOTTOM = 58, 18, 30, 34
POINTS_MAX = 1500
"""Points of one line; more are thinned out, extremes kept."""
CHARACTERS_MAX = 20_000
LABEL_CHARACTER_PX = 6.2
"""Width of a character of a label at a mark, rather too much than too little."""
LABEL_GAP_PX = 4
_BIDI = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def safe(text: object) -> str:
    """Escape text for HTML and SVG, attributes included; characters that hide or reorder others become U+FFFD."""
    cut = str(text)[:CHARACTERS_MAX]
    return html.escape("".join("\ufffd" if _hides(character) else character for character in cut), quote=True)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """From values to pixels, linear or logarithmic."""

    low: float
    high: float
    from_px: float
    to_px: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        """Return the pixel of a value; what lies outside is drawn at the border."""
        low, high = self._of(self.low), self._of(self.high)
        share = 0.5 if high <= low else (self._of(min(max(value, self.low), self.high)) - low) / (high - low)
        return self.from_px + share * (self.to_px - self.from_px)

    def _of(self, value: float) -> float:
        return math.log10(value) if self.logarithmic else value

    def ticks(self, most: int = 7) -> list[float]:
        """Return round values within the scale."""
        return log_ticks(self.low, self.high, most) if self.logarithmic else linear_ticks(self.low, self.high, most)


def linear_ticks(low: float, high: float, most: int) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten, at most ``most`` of them."""
    if not high > low:
        return [low]
    raw = (high - low) / max(1, most - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)][:most]


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """Return powers of ten, with 2 and 5 between them where there is room; round values where there are too few."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    inside: list[float] = []
    for factors in ((1, 2, 5), (1, 3), (1,)):
        ticks = [factor * 10.0**decade for decade in decades for factor in factors]
        inside = [tick for tick in ticks if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
        if len(inside) <= most:
            break
    return inside[:: max(1, math.ceil(len(inside) / most))] if len(inside) > 2 else linear_ticks(low, high, most)


def short_number(value: float) -> str:
    """Write a number in as few characters as an axis allows: ``12.5k``, ``0.02``."""
    if not math.isfinite(value):
        return str(value)
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.3g}{unit}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def thin(points: Sequence[Point], most: int = POINTS_MAX) -> list[Point]:
    """Keep of many points the lowest and the highest of each bucket, in order, so that no spike is lost."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(len(points) / (most // 2))
    kept: list[Point] = []
    for start in range(0, len(points), size):
        bucket = points[start : start + size]
        ends = {min(bucket, key=lambda point: point[1]), max(bucket, key=lambda point: point[1])}
        kept += sorted(ends)
    return kept


def line(points: Iterable[Point], classes: str, *, title: str = "") -> str:
    """Draw a line through points [pixels]."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline class="{safe(classes)}" points="{path}">{_title(title)}</polyline>' if path else ""


def area(points: Sequence[Point], classes: str, *, base_px: float) -> str:
    """Fill between a line and a base [pixels]."""
    if not points:
        return ""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return (
        f'<polygon class="{safe(classes)}" points="{points[0][0]:.1f},{base_px:.1f} {path} '
        f'{points[-1][0]:.1f},{base_px:.1f}"/>'
    )


def bar(x: float, y: float, width: float, height: float, classes: str, *, title: str = "") -> str:
    """Draw a rectangle with slightly round corners."""
    place = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}"'
    return f'<rect class="{safe(classes)}" {place} rx="2">{_title(title)}</rect>'


def rule(x: float, y: float, to_y: float, classes: str, *, title: str = "") -> str:
    """Draw a vertical line."""
    return (
        f'<line class="{safe(classes)}" x1="{x:.1f}" x2="{x:.1f}" y1="{y:.1f}" y2="{to_y:.1f}">{_title(title)}</line>'
    )


def dot(x: float, y: float, classes: str, *, title: str = "") -> str:
    """Draw a dot."""
    return f'<circle class="{safe(classes)}" cx="{x:.1f}" cy="{y:.1f}" r="4">{_title(title)}</circle>'


def label(x: float, y: float, text: str, classes: str = "", *, anchor: str = "start") -> str:
    """Write text."""
    return f'<text class="{safe(classes)}" x="{x:.1f}" y="{y:.1f}" text-anchor="{safe(anchor)}">{safe(text)}</text>'


def labels(marks: Sequence[tuple[float, str]], *, y: float, to_px: float, row_px: float = 13, rows: int = 4) -> str:
    """Write labels to the right of marks [pixels], in rows from ``y`` on, none over another.

    A label that would leave the picture at ``to_px`` is to the left of its mark; one that finds no room is left
    out, since marks have titles.
    """
    taken: list[list[tuple[float, float]]] = [[] for _ in range(rows)]
    parts = []
    for x, text in marks:
        width = len(text) * LABEL_CHARACTER_PX
        is_right = x + LABEL_GAP_PX + width <= to_px
        left = x + LABEL_GAP_PX if is_right else x - LABEL_GAP_PX - width
        for row, spans in enumerate(taken):
            if all(left >= end + LABEL_GAP_PX or left + width + LABEL_GAP_PX <= start for start, end in spans):
                spans.append((left, left + width))
                parts.append(label(left, y + row * row_px, text, "mark"))
                break
    return "".join(parts)


def frame(
    x: Scale,
    y: Scale,
    *,
    write_x: Callable[[float], str] | None = short_number,
    write_y: Callable[[float], str] = short_number,
    name_x: str,
    name_y: str,
) -> str:
    """Draw a grid with its numbers and the axes' names; without ``write_x`` the caller writes that axis."""
    parts = []
    for tick in y.ticks(8 if y.logarithmic else 6):
        at = y(tick)
        parts.append(f'<line class="grid" x1="{x.from_px}" x2="{x.to_px}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(label(x.from_px - 8, at + 4, write_y(tick), "tick", anchor="end"))
    if write_x is not None:
        parts += [label(x(tick), y.from_px + 18, write_x(tick), "tick", anchor="middle") for tick in x.ticks(10)]
    parts.append(label(x.to_px, y.from_px + 32, name_x, "name", anchor="end"))
    parts.append(label(x.from_px - 8, y.to_px - 14, name_y, "name", anchor="start"))
    return "".join(parts)


def picture(parts: Iterable[str], *, height: int, says: str) -> str:
    """Put parts into one picture, with words for those who do not see it."""
    name = f'aria-label="{safe(says)}"'
    return (
        f'<div class="chart" tabindex="0" role="group" {name}><svg viewBox="0 0 {WIDTH} {height}" role="img" {name}>'
        f"{''.join(parts)}</svg></div>"
    )


def _title(text: str) -> str:
    return f"<title>{safe(text)}</title>" if text else ""


def _hides(character: str) -> bool:
    if character in "\n\t":
        return False
    return character in _BIDI or unicodedata.category(character) in {"Cc", "Cs"}
