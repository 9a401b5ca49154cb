"""Sections about what agents can do in the end: evaluation against baselines, returns under attack."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from driftproof.report.bundles import Bundle, titled
from driftproof.report.charts import Absent, Chart, Section, Table, Text, Trace, band, colour, label, line, number
from driftproof.report.results import Score
from driftproof.report.runs import Run
from driftproof.report.series import plain
from driftproof.report.signs import adversarial
from driftproof.runs import ATTACK_RESULTS, EVALUATION

_POINTS = 200
"""Episodes of one row, at most."""
_ROW = 54
"""Pixels."""


def evaluation(bundles: Sequence[Bundle]) -> Section | Absent:
    """Agents and baselines in one picture."""
    title = "Evaluation"
    found = [(run, bundle.colour) for bundle in bundles for run in bundle.runs if run.evaluation]
    if not found:
        return Absent(title, "no run was evaluated (evaluation.json)")
    rows = []
    for run, own in found:
        for i, score in enumerate(run.evaluation):
            name = titled(score.name, run, bundles)
            rows.append((name, score, own if i == 0 else "@muted", run.labels[EVALUATION].word))
    data = [trace for place, (_, score, own, _) in enumerate(rows) for trace in _row(place, score, own)]
    layout = {
        "hovermode": "closest",
        "xaxis": {"title": {"text": "return"}},
        "yaxis": {"range": [len(rows) - 0.5, -0.7], "showgrid": False, "zeroline": False, "showticklabels": False},
        "annotations": [_above(place, name) for place, (name, *_) in enumerate(rows)],
        "margin": {"l": 12},
    }
    caption = "Large point: mean; bar: its interval; small points: episodes."
    chart = Chart("Return against baselines", caption, data, layout, _ROW * len(rows) + 90, span=2)
    # One run's label is above.
    last = ["on"] if len(found) > 1 else []
    table = Table(
        "In numbers",
        ["who", "return", "interval", "episodes", *last],
        [
            [name, number(s.mean), interval(s), number(s.episodes), *([word] if last else [])]
            for name, s, _, word in rows
        ],
        span=1,
    )
    lead = "How well the agent does when it only plays, next to simple ways to play."
    notes = list(dict.fromkeys(f"Interval: {run.evaluation[0].note}." for run, _ in found if run.evaluation[0].note))
    return Section(title, lead, [chart, table], notes, labels=labels(EVALUATION, bundles))


def labels(file: str, bundles: Sequence[Bundle]) -> list[str]:
    """What the results in files of this name were obtained on, for each run."""
    found = [(run, run.labels[file]) for bundle in bundles for run in bundle.runs if file in run.labels]
    return [f"{run.name}: {label.text}" if len(found) > 1 else label.text for run, label in found]


def robustness(bundles: Sequence[Bundle]) -> Section | Absent:
    """Returns under attack, and what adversarial training logged."""
    title = "Robustness"
    runs = [run for bundle in bundles for run in bundle.runs if run.attacks]
    training = adversarial(bundles)
    if not runs and not training:
        return Absent(title, "no run was evaluated under attack (attacks.json)")
    parts: list[Chart | Table | Text] = []
    for run in runs:
        parts += [_attack_chart(run, bundles), _attack_table(run, bundles)]
    columns = 2 if runs else 0
    lead = "How the agent does when what it sees is moved."
    return Section(title, lead, [*parts, *training], columns=columns, labels=labels(ATTACK_RESULTS, bundles))


def _above(place: int, name: str) -> dict[str, Any]:
    """A name above its row: beside it, a long one would leave no room for the points."""
    at = {"x": 0, "xref": "paper", "xanchor": "left", "y": place - 0.28, "yref": "y", "yanchor": "bottom"}
    return {**at, "text": label(name), "showarrow": False, "font": {"size": 12, "color": "@ink"}}


def _row(place: int, score: Score, own: str) -> list[Trace]:
    """A score as a line of its own."""
    returns = np.sort(np.array(score.returns))
    shown = returns[np.linspace(0, len(returns) - 1, min(len(returns), _POINTS)).round().astype(int)]
    episodes: Trace = {
        "type": "scatter",
        "mode": "markers",
        "x": plain(shown),
        # A little apart, in a way that is the same every time.
        "y": plain(place + 0.4 * (np.arange(len(shown)) * 0.618034 % 1 - 0.5)),
        "marker": {"size": 5, "color": f"{own}/0.35"},
        "hovertemplate": "%{x:.4g}<extra></extra>",
        "showlegend": False,
    }
    ends = np.array([[score.high - score.mean], [score.mean - score.low]])
    mean: Trace = {
        "type": "scatter",
        "mode": "markers",
        "x": plain([score.mean]),
        "y": [place],
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": plain(ends[0]),
            "arrayminus": plain(ends[1]),
            "thickness": 3,
            "width": 0,
            "color": own,
        },
        "marker": {"size": 13, "color": own, "line": {"width": 2, "color": "@surface"}},
        "hovertemplate": "mean %{x:.5g}<extra></extra>",
        "showlegend": False,
    }
    return [episodes, mean] if len(shown) else [mean]


def _attack_chart(run: Run, bundles: Sequence[Bundle]) -> Chart:
    clean = [score for score in run.attacks if score.epsilon == 0]
    names = list(dict.fromkeys(score.name for score in run.attacks if score.epsilon > 0))
    data: list[Trace] = []
    for i, name in enumerate(names):
        scores = sorted((s for s in run.attacks if s.name == name and s.epsilon > 0), key=lambda s: s.epsilon)
        columns = [(s.epsilon, s.low, s.mean, s.high) for s in (*clean[:1], *scores)]
        x, low, middle, high = np.array(columns).T
        own = colour(i)
        data += band(x, low, high, own, legendgroup=own)
        data.append(line(x, middle, name, own, mode="lines+markers", legendgroup=own))
    if clean:
        far = max((score.epsilon for score in run.attacks), default=0) or 1.0
        level = np.full(2, clean[0].mean)
        data.append(line(np.array([0.0, far]), level, "clean", "@ink", width=1, dash="dash"))
    layout = {"xaxis": {"title": {"text": "radius of the attack, ε"}}, "showlegend": True}
    title = titled("Return under attack", run, bundles)
    return Chart(title, "Line: mean return; band: its interval; dashed: nobody attacks.", data, layout, 340)


def _attack_table(run: Run, bundles: Sequence[Bundle]) -> Table:
    """A row for each attack, a column for each radius."""
    radii = sorted({score.epsilon for score in run.attacks})
    by_place = {(score.name, score.epsilon): score for score in run.attacks}
    rows = []
    for name in dict.fromkeys(score.name for score in run.attacks):
        scores = [by_place.get((name, radius)) for radius in radii]
        rows.append([name, *("" if s is None else f"{number(s.mean)}\n{interval(s)}" for s in scores)])
    caption = "Mean return and its interval, for each radius ε."
    head = ["attack", *(f"ε = {number(radius)}" for radius in radii)]
    return Table(titled("Attacks", run, bundles), head, rows, caption, span=1)


def interval(score: Score) -> str:
    """The interval of a mean as text; a dash if it is unknown."""
    return (
        "–"
        if math.isnan(score.low) or score.low == score.high == score.mean
        else f"{number(score.low, 3)} to {number(score.high, 3)}"
    )
