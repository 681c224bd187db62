"""Drawings as plain SVG text, readable on light and dark pages, without a drawing library.

A :class:`Drawing` collects shapes by the names of their colours; its style sheet has each colour for both kinds of
page. Every drawing has a title and a description, which browsers show and screen readers read.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

COLOURS: Mapping[str, tuple[str, str]] = {
    "paper": ("#ffffff", "#171b22"),
    "ink": ("#1d2430", "#e6e9ef"),
    "soft": ("#5d6778", "#a0a9b8"),
    "line": ("#d9dee7", "#3a4250"),
    "plain": ("#97a3b3", "#6d7a8f"),
    "accent": ("#1f6fb2", "#5aa5e6"),
    "second": ("#b8590d", "#f0944a"),
    "third": ("#2f7d41", "#66bf78"),
    "fourth": ("#7a4aa5", "#b891de"),
    "fifth": ("#a8323f", "#ef7d88"),
}
"""Name of a colour -> on a light page, on a dark page. "paper" is the background, also of text on a filled shape."""
SERIES = ("accent", "second", "third", "fourth", "fifth", "soft")
"""Colours of the lines of a chart, in this order."""
DASHES = "4 3"


def _style() -> str:
    """Return the style sheet; each rule names ``svg``, so that a page's own rules and these do not meet."""

    def rules(dark: int) -> str:
        return "".join(
            f"svg .{name}{{fill:{colours[dark]}}}svg .{name}-line{{fill:none;stroke:{colours[dark]}}}"
            for name, colours in COLOURS.items()
        )

    return f"{rules(0)}@media(prefers-color-scheme:dark){{{rules(1)}}}"


def text_width(text: str, size: float) -> float:
    """Estimate the width of a text in a sans-serif font of a size, in the same unit; most fonts are narrower."""
    narrow, wide = " .,:;'!|ijlft()[]-", "mwMW@%"
    return size * sum(0.34 if c in narrow else 0.92 if c in wide else 0.7 if c.isupper() else 0.57 for c in text)


class Drawing:
    """Shapes on a sheet of paper; y grows downwards.

    Args:
        width: of the sheet, in pixels where it is shown in its own size.
        height: of the sheet.
        title: what the picture is, a few words.
        description: what it shows, for those who cannot see it; empty = the title says it.
    """

    def __init__(self, width: float, height: float, title: str, description: str = "") -> None:
        self.width, self.height = width, height
        self.title, self.description = title, description
        self._parts: list[str] = []

    def rectangle(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        colour: str,
        *,
        corner: float = 0,
        dashed: bool = False,
        opacity: float = 1,
    ) -> None:
        """Add a rectangle by its upper left corner, filled in a colour, or an outline for ``"NAME-line"``."""
        shape = f'x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" height="{_number(height)}"'
        corners = f' rx="{_number(corner)}"' if corner else ""
        faint = f' opacity="{opacity:.2f}"' if opacity < 1 else ""
        self._parts.append(f'<rect {shape}{corners} class="{colour}"{_dashes(dashed)}{faint}/>')

    def circle(self, x: float, y: float, radius: float, colour: str, title: str = "") -> None:
        """Add a filled circle; a browser shows its title under the pointer."""
        name = f"<title>{html.escape(title)}</title>" if title else ""
        centre = f'cx="{_number(x)}" cy="{_number(y)}" r="{_number(radius)}"'
        self._parts.append(f'<circle {centre} class="{colour}">{name}</circle>')

    def line(
        self, points: Sequence[tuple[float, float]], colour: str, *, thick: float = 1, dashed: bool = False
    ) -> None:
        """Add a line through points, given as (x, y)."""
        joined = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
        self._parts.append(
            f'<polyline points="{joined}" class="{colour}-line" stroke-width="{_number(thick)}"{_dashes(dashed)}/>'
        )

    def arrow(self, x: float, y: float, to_x: float, to_y: float, colour: str = "soft") -> None:
        """Add a horizontal or vertical arrow from one point to another."""
        self.line([(x, y), (to_x, to_y)], colour, thick=1.5)
        forward = 1 if to_x > x or to_y > y else -1
        head = [(-6 * forward, -4), (0, 0), (-6 * forward, 4)]  # along and across the arrow
        turned = [(along, across) if y == to_y else (across, along) for along, across in head]
        self.line([(to_x + right, to_y + down) for right, down in turned], colour, thick=1.5)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        colour: str = "ink",
        *,
        size: float = 13,
        anchor: str = "start",
        bold: bool = False,
        upright: bool = False,
    ) -> None:
        """Add a line of text.

        Args:
            x: of the anchor.
            y: of the line that letters stand on.
            text: any characters.
            colour: of the letters.
            size: of the font.
            anchor: "start", "middle" or "end" of the text is at x.
            bold: thick letters.
            upright: turned, so that it is read from below.
        """
        more = f' text-anchor="{anchor}"' if anchor != "start" else ""
        more += ' font-weight="600"' if bold else ""
        more += f' transform="rotate(-90 {_number(x)} {_number(y)})"' if upright else ""
        place = f'x="{_number(x)}" y="{_number(y)}" font-size="{_number(size)}"'
        self._parts.append(f'<text {place} class="{colour}"{more}>{html.escape(text)}</text>')

    def render(self, *, standalone: bool = False) -> str:
        """Return the drawing as an ``<svg>`` element.

        Args:
            standalone: it is a file of its own, with the namespace that one needs and paper below the shapes.
        """
        space = ' xmlns="http://www.w3.org/2000/svg"' if standalone else ""
        width, height = _number(self.width), _number(self.height)
        size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        paper = f'<rect width="{width}" height="{height}" rx="8" class="paper"/>'
        description = f"<desc>{html.escape(self.description)}</desc>" if self.description else ""
        head = [
            f'<svg{space} {size} role="img" font-family="system-ui, sans-serif">',
            f"<title>{html.escape(self.title)}</title>{description}",
            f"<style>{_style()}</style>",
            *([paper] if standalone else []),
        ]
        return "\n".join([*head, *self._parts, "</svg>\n"])


def _number(value: float) -> str:
    """Write a length with at most one digit after the point: "12", "12.5"."""
    return f"{round(value, 1) + 0.0:.1f}".removesuffix(".0")


def _dashes(dashed: bool) -> str:
    return f' stroke-dasharray="{DASHES}"' if dashed else ""
