"""Curves as files: a page that needs nothing else (SVG inside), or a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from rlbuffer.errors import RlbufferError
from rlbuffer.state.text import printable
from rlbuffer_cli.render.chart import legend
from rlbuffer_cli.render.curves import Curve, bounds

COLOURS_OF_CURVES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Told apart by those who see colours differently, too (Okabe and Ito 2008)."""
CHART_WIDTH, PLOT_PIXELS = 900, 420
LEFT, TOP, LEGEND_LINE = 70, 40, 20
"""Pixels."""
GRID_LINES = 5


def write_chart(curves: Sequence[Curve], title: str, file: Path) -> None:
    """Writes ``.html`` or ``.png``; a file that is there is replaced.

    Raises:
        RlbufferError: Pillow is not installed, or the file cannot be written.
    """
    try:
        if file.suffix == ".html":
            file.write_text("".join(_page(curves, title)), encoding="utf-8")
        else:
            _picture(curves, title, file)
    except OSError as error:
        raise RlbufferError(f"cannot write {file}: {error.strerror or error}") from None


def _size(curves: Sequence[Curve]) -> tuple[int, int]:
    return CHART_WIDTH, TOP + PLOT_PIXELS + LEGEND_LINE * (len(curves) + 3)


def _lines(curves: Sequence[Curve]) -> Iterator[list[tuple[float, float]]]:
    """The points of each curve in pixels."""
    first, last, low, high = bounds(curves)
    across = (CHART_WIDTH - LEFT - 20) / (last - first)
    for curve in curves:
        yield [
            (LEFT + (step - first) * across, TOP + (high - value) / (high - low) * PLOT_PIXELS)
            for step, value in curve.points
        ]


def _grid(curves: Sequence[Curve]) -> Iterator[tuple[float, str]]:
    """Height in pixels and value of each line of the grid."""
    _, _, low, high = bounds(curves)
    for number in range(GRID_LINES):
        share = number / (GRID_LINES - 1)
        yield TOP + share * PLOT_PIXELS, f"{high - share * (high - low):.4g}"


def _page(curves: Sequence[Curve], title: str) -> Iterator[str]:
    first, last, _, _ = bounds(curves)
    width, height = _size(curves)
    name = escape(printable(title))
    yield f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{name}</title></head><body>\n'
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
    yield f'font-size="13" style="max-width:{width}px;background:#fff"><text x="{LEFT}" y="22" font-size="16">{name}'
    yield "</text>\n"
    for y, label in _grid(curves):
        yield f'<line x1="{LEFT}" x2="{width - 20}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>\n'
    foot = TOP + PLOT_PIXELS + LEGEND_LINE
    yield f'<text x="{LEFT}" y="{foot}">step {first}</text>'
    yield f'<text x="{width - 20}" y="{foot}" text-anchor="end">{last}</text>\n'
    for number, (curve, points) in enumerate(zip(curves, _lines(curves), strict=True)):
        colour = COLOURS_OF_CURVES[number % len(COLOURS_OF_CURVES)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        yield f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{path}"/>\n'
        y = foot + LEGEND_LINE * (number + 1)
        yield f'<text x="{LEFT}" y="{y}" fill="{colour}">{escape(legend(curve))}</text>\n'
    yield "</svg></body></html>\n"


def _picture(curves: Sequence[Curve], title: str, file: Path) -> None:
    try:
        from PIL import Image, ImageDraw
    except ImportError:
        raise RlbufferError(f"{file} needs the module PIL: pip install 'rlbuffer[plot]', or write .html") from None
    first, last, _, _ = bounds(curves)
    width, height = _size(curves)
    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    draw.text((LEFT, 10), printable(title), fill="black")
    for y, label in _grid(curves):
        draw.line([(LEFT, y), (width - 20, y)], fill="#dddddd")
        draw.text((5, y - 6), label, fill="black")
    foot = TOP + PLOT_PIXELS + 6
    draw.text((LEFT, foot), f"step {first}", fill="black")
    draw.text((width - 20 - 7 * len(str(last)), foot), str(last), fill="black")
    for number, (curve, points) in enumerate(zip(curves, _lines(curves), strict=True)):
        colour = COLOURS_OF_CURVES[number % len(COLOURS_OF_CURVES)]
        draw.line(points if len(points) > 1 else [points[0], points[0]], fill=colour, width=2)
        draw.text((LEFT, foot + LEGEND_LINE * (number + 1)), legend(curve), fill=colour)
    image.save(file, format="PNG")
