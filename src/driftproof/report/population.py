"""Sections about populations: lineage, what it led to, hyper-parameters, failures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from driftproof.report.bundles import Bundle, titled
from driftproof.report.charts import (
    LOG,
    STEPS,
    Absent,
    Chart,
    Section,
    Table,
    Text,
    Trace,
    colour,
    label,
    line,
    number,
    spans_decades,
)
from driftproof.report.counterfactual import beaten, outcomes
from driftproof.report.lineage import hyperparam_changes, lineage
from driftproof.report.runs import Run
from driftproof.report.series import plain
from driftproof.report.signs import schedules

_UPDATES = {"xaxis": {"tickformat": "~s", "title": {"text": "updates, all members together"}}}
_DIVERSITY = "population/diversity/"
_MOST_FAILURES = 30


def population(bundles: Sequence[Bundle]) -> Section | Absent:
    """Lineage, performance and failures of populations."""
    title = "Population"
    found = [(run, bundle.colour) for bundle in bundles for run in bundle.runs if run.events]
    if not found:
        return Absent(title, "no run has records of a population (population.json)")
    parts: list[Chart | Table | Text] = []
    parts += [lineage(run, titled("Lineage", run, bundles), 0 if len(found) == 1 else 1) for run, _ in found]
    parts += _course(
        found,
        "Performance",
        "Line: the mean of all members; dotted: the best one.",
        "population/mean_performance",
        "population/best_performance",
    )
    parts += [chart for run, own in found for chart in _takeovers(run, own, bundles)]
    parts += _course(found, "Diversity of performance", "Standard deviation over members.", f"{_DIVERSITY}performance")
    parts += [chart for run, _ in found for chart in _diversity(run, bundles)]
    parts += [table for run, _ in found for table in _failures(run, bundles)]
    lead = "Members train side by side; those that do badly take over from those that do well."
    return Section(title, lead, parts, columns=min(len(found), 4) if len(found) > 1 else 0)


def hyperparams(bundles: Sequence[Bundle]) -> Section | Absent:
    """Hyper-parameters over training."""
    title = "Hyper-parameters"
    runs = [run for bundle in bundles for run in bundle.runs if run.events]
    parts: list[Chart | Table | Text] = []
    for name in sorted({name for run in runs for event in run.events for name in event.hyperparams}):
        every = [event.hyperparams[name] for run in runs for event in run.events if name in event.hyperparams]
        axis = _axis(every)
        for run in runs:
            if any(name in event.hyperparams for event in run.events):
                parts.append(Chart(titled(name, run, bundles), "", _schedules(run, name), axis))
    parts += schedules(bundles)
    if not parts:
        return Absent(title, "none changed while agents trained")
    lead = "What was in force."
    if runs:
        lead = (
            "What members trained with: a line for each, the stronger the better it did in the end, and orange for the "
            "best. A schedule, where there is one, multiplies these values."
        )
    return Section(title, lead, parts, columns=min(len(runs), 4) if len(runs) > 1 else 0)


def _schedules(run: Run, name: str) -> list[Trace]:
    """A line for each member, the best one's on top."""
    rank = {member: i for i, member in enumerate(run.ranking)}
    traces = []
    for member in reversed(run.ranking):
        updates, values = hyperparam_changes(run, member, name)
        if not updates:
            continue
        steps = [update * run.steps_per_update for update in updates]
        is_best = member == run.best
        strength = 1 - 0.7 * rank[member] / max(len(rank) - 1, 1)
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": plain([*steps, max(run.members[member].end, steps[-1])]),
                "y": [plain([x])[0] if _is_number(x) else label(str(x)) for x in [*values, values[-1]]],
                "name": f"member {member}",
                "line": {
                    "shape": "hv",
                    "width": 3 if is_best else 1.5,
                    "color": "@accent" if is_best else f"@scale:{strength:.3g}",
                },
                "hovertemplate": "%{y:.4~g} from step %{x:,}",
                "showlegend": False,
            }
        )
    return traces


def _axis(values: Sequence[Any]) -> dict[str, Any]:
    """Of a hyper-parameter, the same for all runs."""
    layout: dict[str, Any] = {"xaxis": STEPS, "hovermode": "closest"}
    if all(_is_number(value) and np.isfinite(value) for value in values):
        is_log = spans_decades(values)
        low, high = np.log10([min(values), max(values)]) if is_log else (min(values), max(values))
        room = 0.06 * (high - low) or 0.5
        layout["yaxis"] = {**(LOG if is_log else {}), "range": plain([low - room, high + room])}
    return layout


def _course(
    found: Sequence[tuple[Run, str]],
    title: str,
    caption: str,
    metric: str,
    dotted: str = "",
) -> list[Chart]:
    """One or two metrics of populations, if there are any."""
    data = []
    for run, own in found:
        for name, dash in ((metric, "solid"), (dotted, "dot")):
            x, y = run.population.column(name)
            if len(x):
                data.append(line(x, y, run.name, own, dash=dash, showlegend=len(found) > 1 and dash == "solid"))
    return [Chart(title, caption, data, _UPDATES)] if data else []


def _takeovers(run: Run, own: str, bundles: Sequence[Bundle]) -> list[Chart]:
    """Returns after take-overs, against what the members' own trends predicted."""
    if not (found := outcomes(run)):
        return []
    predicted, actual = [each.predicted for each in found], [each.actual for each in found]
    ends = [min(*predicted, *actual), max(*predicted, *actual)]
    points: Trace = {
        "type": "scatter",
        "mode": "markers",
        "x": plain(predicted),
        "y": plain(actual),
        "marker": {"size": 9, "color": f"{own}/0.6"},
        "text": [f"at step {each.step:,.0f}" for each in found],
        "hovertemplate": "%{y:.4g} instead of %{x:.4g}<br>%{text}<extra></extra>",
        "showlegend": False,
    }
    equal = line(np.array(ends), np.array(ends), "as predicted", "@muted", width=1, dash="dash", showlegend=False)
    judged = beaten(run)
    caption = (
        f"Return some updates later, against the straight line through the member's own returns before: {sum(judged)} "
        f"of {len(judged)} did better (above the dashed line). A trend is no proof: weak members also recover by "
        "themselves."
    )
    layout = {
        "hovermode": "closest",
        "xaxis": {"title": {"text": "predicted by its own trend"}},
        "yaxis": {"title": {"text": "return"}},
    }
    return [Chart(titled("Take-overs", run, bundles), caption, [equal, points], layout)]


def _diversity(run: Run, bundles: Sequence[Bundle]) -> list[Chart]:
    """Of hyper-parameters, a line for each."""
    logged = {name for name in run.population.metrics if name.startswith(_DIVERSITY)}
    names = sorted(logged - {f"{_DIVERSITY}performance"})
    if not names:
        return []
    data = [
        line(*run.population.column(name), name.removeprefix(_DIVERSITY), colour(i), showlegend=True)
        for i, name in enumerate(names)
    ]
    caption = "Standard deviation over members, in units of the range. Near 0, all train with the same."
    return [Chart(titled("Diversity of hyper-parameters", run, bundles), caption, data, _UPDATES)]


def _failures(run: Run, bundles: Sequence[Bundle]) -> list[Table]:
    """What went wrong, what is alike in one row."""
    said = {"restart": "began again", "replace": "was replaced", "undo": "kept its own parameters"}
    rows: dict[tuple[str, str, str], list[str]] = {}
    for event in run.events:
        if event.kind in said:
            why = event.detail or f"became a clone of member {event.donor}"
            rows.setdefault((str(event.member), said[event.kind], why), []).append(number(event.step))
    if not rows:
        return []
    last = list(rows.items())[-_MOST_FAILURES:]
    cells = [[member, what, f"{len(steps)}×", _shortened(steps), why] for (member, what, why), steps in last]
    head = ["member", "what happened", "how often", "at update", "why"]
    caption = f"The last {_MOST_FAILURES} of {len(rows)} kinds." if len(rows) > _MOST_FAILURES else ""
    return [Table(titled("Failures and restarts", run, bundles), head, cells, caption, is_text=True)]


def _shortened(steps: Sequence[str]) -> str:
    return ", ".join(steps if len(steps) <= 6 else [*steps[:3], "…", *steps[-2:]])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
