"""The tables and the chart that benchmarks report, as text, Markdown, JSON and SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from xml.sax.saxutils import escape

__all__ = ["Chart", "Table", "cell"]


@dataclass
class Table:
    """Figures by row and column.

    Attributes:
        name: by which a page of the docs asks for it.
        title: what it shows, with the unit.
        head: the titles of the columns, that of the rows first.
        rows: as many cells each.
        figures: what it was made from, for JSON.
        chart: the same as a picture, for the one that wants it.
    """

    name: str
    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)
    chart: Chart | None = None

    def text(self) -> str:
        """For a terminal."""
        widths = [max(map(len, column)) for column in zip(self.head, *self.rows, strict=True)]
        lines = [
            "  ".join(
                [row[0].ljust(widths[0]), *(c.rjust(width) for c, width in zip(row[1:], widths[1:], strict=True))]
            ).rstrip()
            for row in (self.head, *self.rows)
        ]
        return "\n".join([self.title, *lines])

    def markdown(self) -> str:
        """For a page."""
        rule = ["---", *["---:"] * (len(self.head) - 1)]
        lines = [f"| {' | '.join(row)} |" for row in (self.head, rule, *self.rows)]
        return "\n".join([f"**{self.title}**", "", *lines])


def cell(value: float | None) -> str:
    """A figure as short as it can be told apart from the next, nothing for None."""
    if value is None:
        return ""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


@dataclass(frozen=True)
class Chart:
    """Horizontal bars on a logarithmic scale, as the figures span four orders of magnitude.

    Args:
        title: what it shows, with the unit.
        note: on which machine.
        bars: name, value and whether it is ours.
    """

    title: str
    note: str
    bars: Sequence[tuple[str, float, bool]]

    LINE = 22
    LEFT = 320
    WIDTH = 860

    def svg(self) -> str:
        """The picture: readable without colours, and with a title and a description for those who do not see it."""
        bars = sorted(self.bars, key=lambda bar: bar[1])
        low = min(value for _, value, _ in bars) / 2
        scale = (self.WIDTH - self.LEFT - 90) / math.log10(max(value for _, value, _ in bars) / low)
        height = self.LINE * len(bars) + 70
        told = "; ".join(f"{name}: {cell(value)}" for name, value, _ in bars)
        size = f'viewBox="0 0 {self.WIDTH} {height}" width="{self.WIDTH}" height="{height}"'
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title desc">',
            "<style>text { font: 13px sans-serif; fill: #1b1b1b }</style>",
            f'<title id="title">{escape(self.title)}</title>',
            f'<desc id="desc">{escape(told)}</desc>',
            f'<rect width="{self.WIDTH}" height="{height}" fill="#ffffff"/>',
            f'<text x="12" y="24" style="font-size: 15px; font-weight: bold">{escape(self.title)}</text>',
        ]
        for number, (name, value, ours) in enumerate(bars):
            y = 40 + number * self.LINE
            length = max(scale * math.log10(value / low), 1)
            weight = "bold" if ours else "normal"
            parts.append(
                f'<text x="{self.LEFT - 8}" y="{y + 14}" text-anchor="end" style="font-weight: {weight}">'
                f'{escape(name)}</text><rect x="{self.LEFT}" y="{y + 2}" width="{length:.1f}" height="{self.LINE - 6}" '
                f'fill="{"#0b5cad" if ours else "#9aa5b1"}"/><text x="{self.LEFT + length + 6:.1f}" y="{y + 14}" '
                f'style="font-weight: {weight}">{cell(value)}</text>'
            )
        parts.append(
            f'<text x="12" y="{height - 10}" style="font-size: 11px; fill: #4a4a4a">{escape(self.note)}</text></svg>'
        )
        return "\n".join(parts) + "\n"
