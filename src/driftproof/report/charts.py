"""Parts of a page, and the traces that charts are made of.

Figures are plotly's, as plain values. Where plotly wants a colour, ``"@name"`` stands for the page's CSS variable
``--name``, ``"@name/0.2"`` for the same with that opacity, and ``"@scale:0.7"`` for a place on its scale from low to
high, so that a chart has the page's light or dark colours.
"""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from driftproof._text import printable
from driftproof.report.series import Array, plain, thin

Trace: TypeAlias = dict[str, Any]

RUN_COLOURS = 8
"""Number of colours for runs, which are reused for more runs."""
STEPS = {"tickformat": "~s", "hoverformat": ","}
"""A horizontal axis of environment steps, without a title."""
TITLED_STEPS = {**STEPS, "title": {"text": "environment steps"}}
SHARE = {"tickformat": ".0%", "range": [-0.03, 1.03]}
LOG = {"type": "log", "dtick": 1, "tickformat": "~g"}
_LABEL = 48
"""Largest number of characters of a name in a chart."""
_MOST_SHADED = 60
"""Largest number of phases that are shaded."""
_MOST_NUMBERED = 12


@dataclass(frozen=True)
class Chart:
    """A figure with its title and how to read it, in plain text.

    Attributes:
        title: What it shows.
        caption: How to read it.
        data: Traces.
        layout: Layout in addition to that of all figures.
        height: In pixels.
        span: Number of columns of the page that it takes; 0: all.
        choices: Names of a selection, if only some traces are drawn at a time.
        chosen_by: For every trace, the choice that shows it; ``None``: always shown. Empty without choices.
    """

    title: str
    caption: str
    data: list[Trace]
    layout: dict[str, Any] = field(default_factory=dict)
    height: int = 280
    span: int = 1
    choices: list[str] = field(default_factory=list)
    chosen_by: list[int | None] = field(default_factory=list)

    def figure(self) -> dict[str, Any]:
        """The figure for the page's script."""
        return {
            "data": self.data,
            "layout": self.layout,
            "choices": self.choices,
            "chosenBy": self.chosen_by,
        }


@dataclass(frozen=True)
class Table:
    """Rows of plain text.

    Attributes:
        title: What it shows.
        head: Names of columns.
        rows: Cells, of one or more lines. The first column names; the others are numbers.
        caption: How to read it.
        is_text: Whether all columns are text.
        span: How many columns of the page it takes; 0: all.
    """

    title: str
    head: list[str]
    rows: list[list[str]]
    caption: str = ""
    is_text: bool = False
    span: int = 0


@dataclass(frozen=True)
class Text:
    """Long text of a run, in a collapsible block."""

    title: str
    text: str


@dataclass(frozen=True)
class Section:
    """A part of the page under one heading.

    Attributes:
        title: The heading.
        lead: What it is about.
        parts: What is in it.
        notes: Below.
        columns: Of charts, where the page is wide; 0: as they fit.
        labels: What its numbers were obtained on.
    """

    title: str
    lead: str
    parts: list[Chart | Table | Text]
    notes: list[str] = field(default_factory=list)
    columns: int = 0
    labels: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Absent:
    """A section without data, and the reason."""

    title: str
    reason: str


def label(text: str) -> str:
    """Untrusted text, escaped for plotly."""
    # plotly renders text between dollar signs as a formula.
    return html.escape(printable(text, _LABEL), quote=False).replace("$", "&#36;")


def colour(index: int) -> str:
    return f"@run{index % RUN_COLOURS}"


def line(x: Array, y: Array, name: str, colour: str, **more: Any) -> Trace:
    """A line, thinned; ``name`` is untrusted text. ``width``, ``dash`` and ``shape`` are those of the line."""
    x, y = thin(np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64))
    style = {key: more.pop(key) for key in ("width", "dash", "shape") if key in more}
    # A single point needs a marker.
    is_point = int(np.isfinite(y).sum()) == 1
    return {
        "type": "scatter",
        "mode": "lines+markers" if is_point else "lines",
        "x": plain(x),
        "y": plain(y),
        "name": label(name),
        "line": {"color": colour, "width": 2, **style},
        "hovertemplate": "%{y:.4g}",
        **more,
    }


def band(x: Array, low: Array, high: Array, colour: str, opacity: float = 0.18, **more: Any) -> list[Trace]:
    """The band between two lines, as two traces."""
    known = np.isfinite(low) & np.isfinite(high)
    edges = [thin(x[known], edge[known]) for edge in (low, high)]
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "x": plain(edge_x),
            "y": plain(edge_y),
            "line": {"width": 0, "color": colour},
            "hoverinfo": "skip",
            "showlegend": False,
            **({"fill": "tonexty", "fillcolor": f"{colour}/{opacity}"} if i else {}),
            **more,
        }
        for i, (edge_x, edge_y) in enumerate(edges)
    ]


def shading(phases: Sequence[tuple[float, float]], end: float, *, numbered: bool = False) -> dict[str, Any]:
    """A layout with every other phase of a drift shaded."""
    if not 1 < len(phases) <= _MOST_SHADED:
        return {}
    starts = [0.0, *(step for step, _ in phases[1:]), end]
    shapes, numbers = [], []
    for i, (start, stop) in enumerate(itertools.pairwise(starts)):
        if i % 2:
            shapes.append(
                {
                    "type": "rect",
                    "xref": "x",
                    "yref": "paper",
                    "x0": start,
                    "x1": stop,
                    "y0": 0,
                    "y1": 1,
                    "fillcolor": "@phase",
                    "line": {"width": 0},
                    "layer": "below",
                }
            )
        place = {"x": (start + stop) / 2, "y": 1, "xref": "x", "yref": "paper", "yanchor": "top", "showarrow": False}
        numbers.append({**place, "text": f"{phases[i][1]:g}", "font": {"size": 11, "color": "@muted"}})
    shown = numbers if numbered and len(phases) <= _MOST_NUMBERED else []
    return {"shapes": shapes, "annotations": shown}


def spans_decades(values: npt.ArrayLike) -> bool:
    """Whether a logarithmic axis suits these values better."""
    low, high = float(np.min(values)), float(np.max(values))
    return low > 0 and high > 20 * low


def number(x: float | None, digits: int = 4) -> str:
    """A number with this many digits, or all digits of an integer."""
    if x is None or not math.isfinite(x):
        return "–"
    if float(x).is_integer() and abs(x) < 1e15:
        return f"{int(x):,}"
    if abs(x) >= 10**digits:
        return f"{x:,.0f}"
    return f"{x:.{digits}g}"
