"""Vital signs: charts of metrics, a line for each bundle of runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from driftproof.report.bundles import Bundle, curves, shaded
from driftproof.report.charts import Absent, Chart, Section, line
from driftproof.report.charts import band as band_between
from driftproof.report.runs import RETURN, Run
from driftproof.report.series import column, phases, together


@dataclass(frozen=True)
class Sign:
    """A metric that has a chart of its own.

    Attributes:
        metric: Its name.
        title: What it is.
        caption: How to read it.
        sign: −1 if what is logged is the opposite of what is meant.
        quiet: What to say instead of drawing it where it is 0 all the time.
        log: Whether its axis is logarithmic, if all values are positive.
    """

    metric: str
    title: str
    caption: str
    sign: int = 1
    quiet: str = ""
    log: bool = False


LEARNING = (
    Sign("rollout/ep_len_mean", "Episode length", "Mean steps of the latest episodes."),
    Sign("rollout/success_rate", "Success rate", "Share of the latest episodes that the environment calls a success."),
)
CRITICS = (
    Sign(
        "critic/divergence",
        "How far the two critics are apart",
        "Mean of |V1 − V2|, in standard deviations of returns. Rising: the critics no longer agree about the world.",
    ),
    Sign("critic/correlation", "Correlation of the critics", "Of V1 and V2 over a rollout; 1 if they agree."),
    Sign(
        "train/explained_variance",
        "Explained variance",
        "Share of the variance of returns that the critics foresee; below 0, a constant would be better.",
    ),
    Sign("train/value_loss", "Loss of the critics", "Mean over both critics.", log=True),
    Sign(
        "critic/warning",
        "Warnings",
        "1 where a critic's gradient vanished or dwarfed the other's.",
        quiet="No critic's gradient vanished or dwarfed the other's.",
    ),
    Sign(
        "critic/saturated",
        "Returns beyond the atoms",
        "Share of returns outside a categorical head's support.",
        quiet="No return lay outside the categorical heads' support.",
    ),
)
POLICY = (
    Sign("train/approx_kl", "KL divergence", "Of an update's policy from the one that played, estimated."),
    Sign("kl/exact", "KL divergence, exact", "Of an update's policy from the one that played."),
    Sign(
        "kl/penalty_coef",
        "KL penalty",
        "The coefficient that the controller moves so that the divergence meets its target.",
    ),
    Sign(
        "kl/stopped",
        "Updates ended early",
        "1 where the KL divergence ended an update.",
        quiet="No update was ended early by its KL divergence.",
    ),
    Sign("train/entropy_loss", "Entropy", "Of the policy's actions. Near 0, it hardly explores any more.", sign=-1),
    Sign("train/std", "Standard deviation of actions", "Of a continuous policy, before clipping or squashing."),
    Sign("train/clip_fraction", "Clipped share", "Of samples whose probability ratio left the clip range."),
)
OPTIMIZER = (
    Sign(
        "vgs/scaling_factor",
        "VGS: factor",
        "What gradients are multiplied by: 1 leaves them alone, less while they are mostly noise.",
    ),
    Sign(
        "vgs/normalized_variance",
        "VGS: normalised variance",
        "Of gradients over time, over their squared mean.",
        log=True,
    ),
    Sign("upgd/gate_mean", "UPGD: mean gate", "Mean protection of weights, from 0, free to change, to 1, kept."),
    Sign("upgd/gate_std", "UPGD: spread of the gate", "Near 0, the gate tells no weight from another."),
    Sign("upgd/noise_to_direction", "UPGD: noise", "Norm of the noise over the norm of the step's direction."),
    Sign("train/grad_norm", "Norm of gradients", "Before scaling and clipping; mean of an update.", log=True),
    Sign(
        "train/skipped_minibatches",
        "Skipped minibatches",
        "Whose loss or gradient was not finite.",
        quiet="No minibatch was skipped: all losses and gradients were finite.",
    ),
)
QUANTILES = tuple(f"critic/quantile_p{percent}" for percent in (10, 50, 90))
UTILITIES = tuple(f"upgd/utility_p{percent}" for percent in (10, 50, 90))

_SCHEDULED = ("train/learning_rate", "train/clip_range", "train/clip_range_vf", "train/ent_coef")
DRAWN = {sign.metric for sign in (*LEARNING, *CRITICS, *POLICY, *OPTIMIZER)} | {
    RETURN,
    *QUANTILES,
    *UTILITIES,
    *_SCHEDULED,
}
"""Metrics that have their place on the page."""
_COUNTERS = {"time/iterations", "time/total_timesteps", "train/n_updates", "vgs/step_count", "drift/phase"}
_STEPS = {"title": {"text": "environment steps"}, "tickformat": "~s"}


def learning(bundles: Sequence[Bundle]) -> Section | Absent:
    """Returns, and what else tells how well agents do."""
    title = "Learning"
    data = curves(bundles, RETURN)
    if not data:
        return Absent(title, f"no return was logged ({RETURN}): no episode has ended yet")
    for bundle in bundles:
        if len(bundle.runs) == 1 and bundle.runs[0].is_population:
            run = bundle.runs[0]
            x, y = column(run.members[run.best], RETURN)
            name = (
                f"{run.name}: best in the end, member {run.best}"
                if len(bundles) > 1
                else f"best in the end, member {run.best}"
            )
            data.append(line(x, y, name, bundle.colour, width=1.5, dash="dot"))
    several = any(len(bundle.lives) > 1 for bundle in bundles)
    caption = "Mean return of the latest episodes."
    if several:
        caption += " Line: median; band: the middle 80 % of members, or of runs that differ in their seed only."
    layout = shaded(bundles, numbered=True)
    if layout:
        caption += " Shaded: every other phase of the drift, with its number."
    layout |= {"xaxis": _STEPS, "showlegend": len(data) > 1}
    if several and len(bundles) == 1:
        data[-2] |= {"showlegend": True, "name": "median"} if bundles[0].runs[0].is_population else {}
    returns = Chart("Return", caption, data, layout, height=380, wide=True)
    more = [chart for sign in LEARNING if (chart := _chart(sign, bundles)) is not None]
    return Section(title, "How well the agents do, as they learn.", [returns, *more])


def drift(bundles: Sequence[Bundle]) -> Section | Absent:
    """What the world did."""
    title = "Drift"
    names = _names(bundles, "drift/")
    if not names:
        return Absent(title, "no drift was logged (drift/…)")
    charts = []
    for name in names:
        caption = (
            "What number of phase the world is in."
            if name == "drift/phase"
            else "Its value in the world, as it was at the end of each rollout."
        )
        chart = _chart(Sign(name, name.removeprefix("drift/"), caption), bundles)
        charts += [chart] if chart else []
    notes = []
    if "drift/phase" in names and not shaded(bundles):
        count = max(len(phases(rows)) for bundle in bundles for rows in bundle.lives)
        notes.append(
            "There was one phase only."
            if count < 2
            else "Phases are not shaded: they are too many, or not the same for all."
        )
    return Section(title, "How the world changed meanwhile.", list(charts), notes)


def signs(
    title: str, lead: str, which: Sequence[Sign], bundles: Sequence[Bundle], more: Sequence[Chart] = ()
) -> Section | Absent:
    """A section of charts, one for each sign that there is data for."""
    charts, notes = list(more), []
    for sign in which:
        _, values = together([rows for bundle in bundles for rows in bundle.lives], sign.metric)
        if sign.quiet and values.size and not np.nan_to_num(values).any():
            notes.append(sign.quiet)
        elif (chart := _chart(sign, bundles)) is not None:
            charts.append(chart)
    if not charts:
        return Absent(title, f"none of its metrics was logged ({which[0].metric}, …)")
    return Section(title, lead, list(charts), notes)


def fans(runs: Sequence[Run], metrics: Sequence[str], title: str, caption: str) -> list[Chart]:
    """For each run, three quantiles of its best member: a line, and a band between the outer two."""
    charts = []
    for run in runs:
        rows = run.members[run.best]
        (x, low), (_, middle), (_, high) = (column(rows, name) for name in metrics)
        if not len(x) or not len(x) == len(middle) == len(high):
            continue
        whose = f"member {run.best}" if run.is_population else ""
        where = " · ".join(part for part in (run.name if len(runs) > 1 else "", whose) if part)
        data = [*band_between(x, low, high, "@run0"), line(x, middle, "median", "@run0", showlegend=False)]
        layout = {**_shaded_run(run), "xaxis": _STEPS}
        charts.append(Chart(f"{title}: {where}" if where else title, caption, data, layout))
    return charts


def others(bundles: Sequence[Bundle]) -> Section | Absent:
    """Whatever else was logged, one metric at a time."""
    title = "Other metrics"
    names = [
        n for n in _names(bundles, "") if n not in DRAWN | _COUNTERS and not n.startswith(("drift/", "adversarial/"))
    ]
    if not names:
        return Absent(title, "nothing else was logged")
    data, chosen_by = [], []
    for i, name in enumerate(names):
        traces = curves(bundles, name)
        data += traces
        chosen_by += [i] * len(traces)
    layout = {**shaded(bundles), "xaxis": _STEPS}
    chart = Chart("Any other metric", "Choose which.", data, layout, 320, True, names, chosen_by)
    return Section(title, "Whatever else was logged, and has no chart above.", [chart])


def schedules(bundles: Sequence[Bundle]) -> list[Chart]:
    """Hyper-parameters that changed while agents trained alone."""
    charts = []
    alone = [bundle for bundle in bundles if not bundle.runs[0].is_population]
    for name in _SCHEDULED:
        _, values = together([rows for bundle in alone for rows in bundle.lives], name)
        if values.size and np.nanmin(values) < np.nanmax(values):
            chart = _chart(Sign(name, name.removeprefix("train/"), "In force at each update."), alone)
            charts += [chart] if chart else []
    return charts


def adversarial(bundles: Sequence[Bundle]) -> list[Chart]:
    """What adversarial training logs."""
    named = [
        Sign(name, name.removeprefix("adversarial/").replace("_", " "), "Of adversarial training.")
        for name in _names(bundles, "adversarial/")
    ]
    return [chart for sign in named if (chart := _chart(sign, bundles)) is not None]


def _chart(sign: Sign, bundles: Sequence[Bundle]) -> Chart | None:
    data = curves(bundles, sign.metric, sign.sign)
    if not data:
        return None
    values = [y for trace in data for y in trace["y"] if y is not None]
    if not values:
        return None
    layout: dict[str, Any] = {**shaded(bundles), "xaxis": _STEPS}
    if sign.log and min(values) > 0:
        layout["yaxis"] = {"type": "log"}
    return Chart(sign.title, sign.caption, data, layout)


def _shaded_run(run: Run) -> dict[str, Any]:
    return shaded([Bundle(run.name, "", [run], list(run.members.values()))])


def _names(bundles: Sequence[Bundle], prefix: str) -> list[str]:
    return sorted(
        {name for bundle in bundles for run in bundle.runs for name in run.metrics if name.startswith(prefix)}
    )
