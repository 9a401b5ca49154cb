"""Vital signs: charts of metrics, with a line for each bundle of runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from driftproof.report.bundles import Bundle, curves, shaded
from driftproof.report.charts import LOG, SHARE, STEPS, TITLED_STEPS, Absent, Chart, Section, band, line, spans_decades
from driftproof.report.runs import Run
from driftproof.report.series import Array, Life, together
from driftproof.runs import RETURN


@dataclass(frozen=True)
class Sign:
    """A metric that has a chart of its own.

    Attributes:
        metric: Its name.
        title: What it is.
        caption: How to read it.
        sign: −1 if what is logged is the opposite of what is meant.
        log: Whether its axis is logarithmic, if all values are positive.
        quiet: What to say instead of drawing it where it is 0 all the time.
        is_flag: Whether it is 0 or 1, so that the share of lives says more than their median.
        floor: What the axis does not go below, at first: outliers would leave no room for the rest.
    """

    metric: str
    title: str
    caption: str
    sign: int = 1
    log: bool = False
    quiet: str = ""
    is_flag: bool = False
    floor: float | None = None


EPISODES = (
    Sign("rollout/ep_len_mean", "Episode length", "Mean steps of the latest episodes."),
    Sign("rollout/success_rate", "Success rate", "Share of the latest episodes that the environment calls a success."),
)
CRITICS = (
    Sign(
        "critic/divergence",
        "How far the two critics are apart",
        "Mean of |V1 − V2|, in standard deviations of returns. Rising: they no longer agree about the world.",
    ),
    Sign("critic/correlation", "Correlation of the critics", "Of V1 and V2 over a rollout; 1 if they agree."),
    Sign(
        "train/explained_variance",
        "Explained variance",
        "Share of the variance of returns that the critics foresee; below 0, a constant would be better.",
        floor=-1.0,
    ),
    Sign("train/value_loss", "Loss of the critics", "Mean over both critics.", log=True),
    Sign(
        "critic/warning",
        "Warnings",
        "Share of agents in which a critic's gradient vanished or dwarfed the other's.",
        quiet="No critic's gradient vanished or dwarfed the other's.",
        is_flag=True,
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
        "What the controller weighs the divergence with, to keep it at its target.",
        quiet="The KL penalty was 0 all the time: the divergence stayed below its target.",
    ),
    Sign(
        "kl/stopped",
        "Updates ended early",
        "Share of agents whose update was ended by its KL divergence.",
        quiet="No update was ended early by its KL divergence.",
        is_flag=True,
    ),
    Sign(
        "train/entropy_loss",
        "Entropy",
        "Of the policy's actions. Discrete ones: near 0, it hardly explores any more; of continuous ones it may be "
        "negative, and the standard deviation says more.",
        sign=-1,
    ),
    Sign(
        "train/std",
        "Standard deviation of actions",
        "Of a continuous policy, before clipping or squashing; with gSDE, of its exploration matrix.",
    ),
    Sign("train/clip_fraction", "Clipped share", "Of samples whose probability ratio left the clip range."),
)
OPTIMIZER = (
    Sign(
        "vgs/scaling_factor",
        "VGS: factor",
        "What gradients, or steps, are multiplied by: 1 leaves them alone, less while they are mostly noise.",
    ),
    Sign("vgs/normalized_variance", "VGS: noise", "Normalised variance of gradients: 0 without noise.", log=True),
    Sign("upgd/gate_mean", "UPGD: gate", "Mean protection of weights, between 0 and 1; that of useful ones is high."),
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
QUANTILES = ("critic/quantile_p10", "critic/quantile_p50", "critic/quantile_p90")
UTILITIES = ("upgd/utility_p10", "upgd/utility_p50", "upgd/utility_p90")
SCHEDULED = ("train/learning_rate", "train/clip_range", "train/clip_range_vf", "train/ent_coef")

_DRAWN = {
    *(sign.metric for sign in (*EPISODES, *CRITICS, *POLICY, *OPTIMIZER)),
    *(RETURN, *QUANTILES, *UTILITIES, *SCHEDULED),
    *("time/iterations", "time/total_timesteps", "train/n_updates", "vgs/step_count"),  # which only count
}


def signs(
    title: str, lead: str, which: Sequence[Sign], bundles: Sequence[Bundle], first: Iterable[Chart] = ()
) -> Section | Absent:
    """A section of charts: some that are given, then one for each sign that there is data for."""
    drawn, notes = charts_of(which, bundles)
    if not (charts := [*first, *drawn]):
        return Absent(title, f"none of its metrics was logged ({which[0].metric}, …)")
    return Section(title, lead, list(charts), notes)


def charts_of(which: Sequence[Sign], bundles: Sequence[Bundle]) -> tuple[list[Chart], list[str]]:
    """A chart for each sign that there is data for, and notes about those that were 0 all the time."""
    charts, notes = [], []
    for sign in which:
        values = _values(bundles, sign.metric)
        if sign.quiet and len(values) and not values.any():
            notes.append(sign.quiet)
        else:
            charts += chart_of(sign, bundles)
    return charts, notes


def chart_of(sign: Sign, bundles: Sequence[Bundle]) -> list[Chart]:
    """Its chart, if there is anything to draw."""
    if not len(values := _values(bundles, sign.metric)):
        return []
    layout: dict[str, Any] = {**shaded(bundles), "xaxis": STEPS}
    if sign.log and spans_decades(values):
        layout["yaxis"] = LOG
    if sign.is_flag:
        layout["yaxis"] = SHARE
    if sign.floor is not None and values.min() < sign.floor:
        layout["yaxis"] = {"range": [sign.floor, max(1.05 * float(values.max()), 0.0)]}
    return [Chart(sign.title, sign.caption, curves(bundles, sign.metric, sign.sign, sign.is_flag), layout)]


def fans(runs: Sequence[Run], metrics: Sequence[str], title: str, caption: str) -> list[Chart]:
    """For each run, on one scale, three quantiles of its best member: a line, and a band between the outer two."""
    charts = []
    columns = {run.name: _columns(run.members[run.best], metrics) for run in runs}
    every = np.concatenate([values for _, each in columns.values() for values in each])
    axis = _around(every[np.isfinite(every)]) if len(runs) > 1 else {}
    for run in runs:
        x, (low, middle, high) = columns[run.name]
        if not len(x):
            continue
        whose = [*([run.name] if len(runs) > 1 else []), *([f"member {run.best}"] if run.is_population else [])]
        data = [*band(x, low, high, "@run0", opacity=0.3), line(x, middle, "median", "@run0", showlegend=False)]
        layout = {**shaded([Bundle.of(run)]), "xaxis": STEPS, "yaxis": axis}
        charts.append(Chart(f"{title}: {', '.join(whose)}" if whose else title, caption, data, layout))
    return charts


def schedules(bundles: Sequence[Bundle]) -> list[Chart]:
    """Hyper-parameters that changed while agents trained alone."""
    charts = []
    alone = [bundle for bundle in bundles if not bundle.runs[0].is_population]
    for name in SCHEDULED:
        values = _values(alone, name)
        if len(values) and values.min() < values.max():
            title = name.removeprefix("train/")
            title = f"{title}: {alone[0].name}" if len(alone) == 1 < len(bundles) else title
            charts += chart_of(Sign(name, title, "In force at each update."), alone)
    return charts


def adversarial(bundles: Sequence[Bundle]) -> list[Chart]:
    """What adversarial training logs."""
    charts = []
    for name in names(bundles, "adversarial/"):
        title = name.removeprefix("adversarial/").replace("_", " ")
        charts += chart_of(Sign(name, title, "Of adversarial training, mean of an update."), bundles)
    return charts


def others(bundles: Sequence[Bundle]) -> Section | Absent:
    """Whatever else was logged, one metric at a time."""
    title = "Other metrics"
    rest = [name for name in names(bundles) if name not in _DRAWN and not name.startswith(("drift/", "adversarial/"))]
    rest = [name for name in rest if len(_values(bundles, name))]
    if not rest:
        return Absent(title, "nothing else was logged")
    data, chosen_by = [], []
    for i, name in enumerate(rest):
        traces = curves(bundles, name)
        data += traces
        chosen_by += [i] * len(traces)
    layout = {**shaded(bundles), "xaxis": TITLED_STEPS}
    chart = Chart("Any other metric", "", data, layout, height=320, span=0, choices=rest, chosen_by=list(chosen_by))
    return Section(title, "Whatever else was logged, and has no chart above.", [chart])


def names(bundles: Sequence[Bundle], prefix: str = "") -> list[str]:
    """Of all metrics that begin like that."""
    found = {name for bundle in bundles for run in bundle.runs for name in run.metrics}
    return sorted(name for name in found if name.startswith(prefix))


def _columns(life: Life, metrics: Sequence[str]) -> tuple[Array, list[Array]]:
    """Steps at which all of these were logged, and their values."""
    columns = [life.column(name) for name in metrics]
    common = columns[0][0]
    for steps, _ in columns[1:]:
        common = np.intersect1d(common, steps)
    return common, [values[np.isin(steps, common)] for steps, values in columns]


def _around(values: Array) -> dict[str, Any]:
    """An axis that holds all of these."""
    if not len(values):
        return {}
    low, high = float(values.min()), float(values.max())
    room = 0.05 * (high - low) or 1.0
    return {"range": [low - room, high + room]}


def _values(bundles: Sequence[Bundle], metric: str) -> Array:
    """All that are finite, in no order."""
    _, values = together([life for bundle in bundles for life in bundle.lives], metric)
    return values[np.isfinite(values)]
