"""Draws charts as small SVG files that follow the reader's light or dark scheme. Needs Python 3.10 only."""

import math
from dataclasses import dataclass
from html import escape
from pathlib import Path

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 176, 40, 52  # the legend is to the right
COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#b2182b", "#542788", "#1b7837"]
STYLE = """<style>
text { font: 12px system-ui, sans-serif; fill: #333 } .title { font-size: 14px; font-weight: 600 }
.frame { stroke: #999; fill: none } .grid { stroke: #ddd }
@media (prefers-color-scheme: dark) { text { fill: #ddd } .frame { stroke: #777 } .grid { stroke: #333 } }
</style>"""


@dataclass
class Series:
    name: str
    points: list  # of (x, y)
    line: bool = True
    dashed: bool = False


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Round numbers from `low` to `high`."""
    span = high - low
    if span <= 0:
        return [low]
    step = 10 ** math.floor(math.log10(span / count))
    step *= next(m for m in (1, 2, 5, 10) if span / (step * m) <= count)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def label(value: float) -> str:
    return f"{value:.10g}"


def svg(width: int, height: int, parts: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    return "\n".join([head, STYLE, *parts, "</svg>", ""])


def chart(path: Path, title: str, x_label: str, y_label: str, series: list[Series], *, x=None, y=None, notes=()) -> None:
    """Draws lines and points. `x` and `y` fix the range of an axis, which otherwise follows from the points; `notes` are
    (x, y, text)."""
    points = [p for s in series for p in s.points]
    x0, x1 = x or (min(p[0] for p in points), max(p[0] for p in points))
    y0, y1 = y or (min(p[1] for p in points), max(p[1] for p in points))
    if not y:
        pad = 0.06 * (y1 - y0 or abs(y1) or 1.0)
        y0, y1 = y0 - pad, y1 + pad
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def px(value: float) -> float:
        return LEFT + (value - x0) / ((x1 - x0) or 1) * (right - LEFT)

    def py(value: float) -> float:
        return bottom - (value - y0) / ((y1 - y0) or 1) * (bottom - TOP)

    parts = [f'<title>{escape(title)}</title>', f'<text class="title" x="{LEFT}" y="22">{escape(title)}</text>']
    for value in ticks(y0, y1):
        parts.append(f'<path class="grid" d="M{LEFT} {py(value):.1f}H{right}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{py(value) + 4:.1f}" text-anchor="end">{label(value)}</text>')
    for value in ticks(x0, x1):
        parts.append(f'<path class="grid" d="M{px(value):.1f} {TOP}V{bottom}"/>')
        parts.append(f'<text x="{px(value):.1f}" y="{bottom + 18}" text-anchor="middle">{label(value)}</text>')
    parts.append(f'<path class="frame" d="M{LEFT} {TOP}V{bottom}H{right}"/>')
    parts.append(f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 12}" text-anchor="middle">{escape(x_label)}</text>')
    middle = (TOP + bottom) / 2
    parts.append(
        f'<text x="16" y="{middle}" text-anchor="middle" transform="rotate(-90 16 {middle})">{escape(y_label)}</text>'
    )
    for nth, one in enumerate(series):
        colour = COLOURS[nth % len(COLOURS)]
        inside = [(a, b) for a, b in one.points if x0 <= a <= x1 and y0 <= b <= y1]
        if one.line and len(inside) > 1:
            line = " ".join(f"{px(a):.1f},{py(b):.1f}" for a, b in inside)
            dash = ' stroke-dasharray="5 4"' if one.dashed else ""
            parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.6"{dash}/>')
        if len(inside) <= 60:
            parts += [f'<circle cx="{px(a):.1f}" cy="{py(b):.1f}" r="3" fill="{colour}"/>' for a, b in inside]
        at = TOP + 10 + 18 * nth
        parts.append(f'<path d="M{right + 14} {at}h18" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{right + 38}" y="{at + 4}">{escape(one.name)}</text>')
    for a, b, text in notes:
        parts.append(f'<text x="{px(a) + 6:.1f}" y="{py(b) - 6:.1f}">{escape(text)}</text>')
    path.write_text(svg(WIDTH, HEIGHT, parts))


def heat(path: Path, title: str, x_label: str, y_label: str, rows: list[list[float]], even: float) -> None:
    """Draws a cell for each value of each row; `even` is the value of the middle shade."""
    columns = len(rows[0])
    cell = (WIDTH - LEFT - 24) / columns
    height = TOP + cell * len(rows) + BOTTOM
    parts = [f'<title>{escape(title)}</title>', f'<text class="title" x="{LEFT}" y="22">{escape(title)}</text>']
    for r, row in enumerate(rows):
        top = TOP + r * cell
        parts.append(f'<text x="{LEFT - 8}" y="{top + cell / 2 + 4:.1f}" text-anchor="end">{r}</text>')
        for c, value in enumerate(row):
            depth = min(1.0, value / (2 * even))
            x, size = LEFT + c * cell, cell - 1
            parts.append(
                f'<rect x="{x:.1f}" y="{top:.1f}" width="{size:.1f}" height="{size:.1f}" fill="{COLOURS[0]}" '
                f'fill-opacity="{0.08 + 0.92 * depth:.2f}"><title>{100 * value:.2f} %</title></rect>'
            )
    parts.append(
        f'<text x="{LEFT + cell * columns / 2}" y="{height - 20}" text-anchor="middle">{escape(x_label)}</text>'
    )
    middle = TOP + cell * len(rows) / 2
    parts.append(
        f'<text x="16" y="{middle}" text-anchor="middle" transform="rotate(-90 16 {middle})">{escape(y_label)}</text>'
    )
    path.write_text(svg(WIDTH, round(height), parts))
