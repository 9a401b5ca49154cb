"""Sections about populations: lineage, what it led to, hyper-parameters, failures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from driftproof.report.bundles import Bundle
from driftproof.report.charts import Absent, Chart, Section, Table, Text, Trace, label, line, number
from driftproof.report.lineage import hyperparam_changes, lineage
from driftproof.report.runs import Run
from driftproof.report.series import column, plain
from driftproof.report.signs import schedules

_MOST_FAILURES = 30


def population(bundles: Sequence[Bundle]) -> Section | Absent:
    """Who took over from whom, and how it went."""
    title = "Population"
    found = [(run, bundle.colour) for bundle in bundles for run in bundle.runs if run.events]
    if not found:
        return Absent(title, "no run has records of a population (population.json)")
    parts: list[Chart | Table | Text] = []
    several = len(bundles) > 1
    parts += [lineage(run, f"Lineage: {run.name}" if several else "Lineage", len(found) == 1) for run, _ in found]
    for metric, heading, caption in (
        ("population/best_performance", "Best and mean performance", "Line: the best member's; dotted: the mean."),
        (
            "population/exploit_success_rate",
            "Take-overs that helped",
            "Share after which the member did better than before.",
        ),
        ("population/diversity/performance", "Diversity of performance", "Standard deviation over members."),
    ):
        if chart := _chart(found, metric, heading, caption):
            parts.append(chart)
    parts += _diversity(found)
    parts += [table for run, _ in found if (table := _failures(run, several))]
    return Section(title, "Members train side by side; those that do badly take over from those that do well.", parts)


def hyperparams(bundles: Sequence[Bundle]) -> Section | Absent:
    """How hyper-parameters moved."""
    title = "Hyper-parameters"
    runs = [run for bundle in bundles for run in bundle.runs if run.events]
    names = sorted({name for run in runs for event in run.events for name in event.hyperparams})
    parts: list[Chart | Table | Text] = []
    for name in names:
        having = [run for run in runs if any(name in event.hyperparams for event in run.events)]
        whole = [value for run in having for event in run.events if _is_number(value := event.hyperparams.get(name))]
        for run in having:
            parts.append(_schedule(run, name, f"{name}: {run.name}" if len(bundles) > 1 else name, whole))
    parts += schedules(bundles)
    if not parts:
        return Absent(title, "none changed while agents trained")
    lead = (
        "What each member trained with, from its start or its latest take-over on." if runs else "Those that changed."
    )
    return Section(title, lead, parts)


def _schedule(run: Run, name: str, title: str, whole: Sequence[float]) -> Chart:
    """Steps of a hyper-parameter, a line for each member, on an axis for all runs."""
    rank = {member: i for i, member in enumerate(run.ranking)}
    data: list[Trace] = []
    for member in sorted(run.members, key=lambda member: -rank[member]):
        updates, values = hyperparam_changes(run, member, name)
        if not updates:
            continue
        steps = [update * run.steps_per_update for update in updates]
        end = run.members[member][-1]["step"]
        is_best = member == run.best
        shade = 1 - rank[member] / max(len(rank) - 1, 1)
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": plain([*steps, max(end, steps[-1])]),
                "y": [value if _is_number(value) else label(str(value)) for value in [*values, values[-1]]],
                "name": f"member {member}",
                "line": {
                    "shape": "hv",
                    "width": 3 if is_best else 1.5,
                    "color": "@accent" if is_best else f"@scale:{shade:.3g}",
                },
                "hovertemplate": "%{y:.4g} from step %{x:,}",
                "showlegend": False,
            }
        )
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": "environment steps"}, "tickformat": "~s"},
        "hovermode": "closest",
    }
    if whole:
        low, high = min(whole), max(whole)
        is_log = low > 0 and high > 20 * low
        ends = np.log10([low, high]) if is_log else np.array([low, high], dtype=float)
        margin = 0.06 * (ends[1] - ends[0]) or 0.5
        layout["yaxis"] = {"type": "log" if is_log else "linear", "range": plain([ends[0] - margin, ends[1] + margin])}
    caption = f"A line for each member, the stronger the better it did in the end; orange: member {run.best}, the best."
    return Chart(title, caption, data, layout)


def _chart(found: Sequence[tuple[Run, str]], metric: str, title: str, caption: str) -> Chart | None:
    data = []
    for run, colour in found:
        x, y = column(run.population, metric)
        if len(x):
            data.append(line(x, y, run.name, colour, showlegend=len(found) > 1))
        if metric == "population/best_performance":
            x, y = column(run.population, "population/mean_performance")
            if len(x):
                data.append(line(x, y, f"{run.name}: mean", colour, dash="dot", showlegend=False))
    return Chart(title, caption, data, _UPDATES) if data else None


_UPDATES = {"xaxis": {"title": {"text": "updates, all members together"}, "tickformat": "~s"}}


def _diversity(found: Sequence[tuple[Run, str]]) -> list[Chart]:
    """Of hyper-parameters, a chart for each run."""
    charts = []
    prefix = "population/diversity/"
    for run, _ in found:
        names = sorted(
            {name for row in run.population for name in row if name.startswith(prefix)} - {f"{prefix}performance"}
        )
        data = [
            line(*column(run.population, name), name.removeprefix(prefix), f"@run{i % 8}")
            for i, name in enumerate(names)
        ]
        if data:
            title = "Diversity of hyper-parameters"
            caption = "Standard deviation over members, in units of the range. Near 0, all train with the same."
            charts.append(
                Chart(
                    f"{title}: {run.name}" if len(found) > 1 else title, caption, data, {**_UPDATES, "showlegend": True}
                )
            )
    return charts


def _failures(run: Run, several: bool) -> Table | None:
    failed = [event for event in run.events if event.kind in ("restart", "replace", "undo")]
    if not failed:
        return None
    what = {"restart": "began again", "replace": "was replaced", "undo": "kept its own parameters"}
    rows = [
        [str(e.member), number(e.step), what[e.kind], e.detail or f"a clone of member {e.donor}"]
        for e in failed[-_MOST_FAILURES:]
    ]
    caption = (
        f"{len(failed)} in all" + (f", the last {_MOST_FAILURES} of them" if len(failed) > _MOST_FAILURES else "") + "."
    )
    title = "Failures and restarts"
    return Table(
        f"{title}: {run.name}" if several else title,
        ["member", "update", "what happened", "why"],
        rows,
        caption,
        texts=0,
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
