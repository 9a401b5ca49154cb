"""Sections about drift: what changed, what agents noticed, how fast they recovered, and what they forgot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from driftproof._text import shortlist
from driftproof.report.bundles import Bundle, common_phases, shaded, titled
from driftproof.report.charts import Absent, Chart, Section, Table, Text, Trace, label, line, number
from driftproof.report.outcomes import interval, labels
from driftproof.report.results import PhaseScore
from driftproof.report.runs import Run
from driftproof.report.series import Array, Life, plain, spread, together
from driftproof.report.signs import Sign, charts_of, names
from driftproof.runs import (
    ALARM,
    ALARMS,
    ANCHOR_MOVES,
    DRIFT_RETURN,
    LEVEL,
    PHASE,
    PHASE_RESULTS,
    RESPONSES,
    RETURN,
    TRIAL,
)

_MOST_SWITCHES = 60
_MOST_MARKS = 300
"""Limits of the number of items drawn."""
_BEFORE = 0.2
"""Share of a phase, at its end, whose mean return is the level before the next one."""
_RECOVERED = 0.9
_FALLS_WITHIN = 1 / 3
"""Share of a phase, at its beginning, within which returns of single rollouts fall because of the change."""
_SIGNS = (
    Sign(PHASE, "Phase", "Counts the changes of the world."),
    Sign(
        ALARM,
        "Alarms",
        "Share of agents that noticed a harmful change in an update.",
        quiet="No agent noticed a harmful change.",
        is_flag=True,
    ),
    Sign(ALARMS, "Alarms so far", "Harmful changes that were noticed.", quiet="No alarm was raised."),
    Sign(
        LEVEL,
        "Response",
        f"{', '.join(f'{i}: {name}' for i, name in enumerate(RESPONSES))}.",
        quiet="No agent responded to an alarm.",
    ),
    Sign(
        TRIAL,
        "Trials of earlier weights",
        "Share of agents that try their last good weights, or those which they kept from an earlier phase.",
        quiet="No agent tried earlier weights.",
        is_flag=True,
    ),
    Sign("drift/archived", "Weights kept", "Of earlier phases.", quiet="No agent kept weights of earlier phases."),
    Sign(
        "drift/rewired",
        "Weights reordered",
        "Swapped or inverted sensors and actions that were found so far.",
        quiet="No swapped or inverted sensors or actions were found.",
    ),
    Sign(
        "drift/recovered",
        "Weights taken back",
        "Times that returns fell in a world that had not changed, and the last good weights came back.",
        quiet="No agent had to take back its last good weights.",
    ),
    Sign("drift/calibration", "Calibration of the critics", "Of λ-returns among the quantiles that critics predicted."),
    Sign("drift/cusum", "Evidence of a harmful change", "CUSUM of the critics' calibration, which raises the alarm."),
    Sign(DRIFT_RETURN, "Return of each rollout", "Mean over the episodes that ended in it."),
    Sign("drift/episode_return", "Return, for the alarm", "Mean return of the latest episodes."),
    Sign(
        "drift/typical_return",
        "Typical return, for the alarm",
        "Of earlier episodes, which the latest must fall below.",
    ),
    Sign(
        ANCHOR_MOVES,
        "Shifts followed",
        "Shifts of observations that the normaliser has followed so far.",
        quiet="No shift of observations was noticed by the normaliser.",
    ),
    Sign(
        "drift/anchor_undone",
        "Shifts undone",
        "Shifts that the normaliser followed and took back, as they had not helped.",
        quiet="No shift that the normaliser followed was taken back.",
    ),
)


@dataclass(frozen=True)
class Switch:
    """What a change of phase did to the return of some agents.

    Attributes:
        phase: Number of the new phase.
        step: Last logged step before it.
        before: Return before it: mean over the end of the previous phase.
        since: Steps since then.
        returns: Returns at these.
        recovery: Steps until the return was back at 90 % of what it was before; ``None``: not until the phase ended.
    """

    phase: float
    step: float
    before: float
    since: Array
    returns: Array
    recovery: float | None


def drift(bundles: Sequence[Bundle]) -> Section | Absent:
    """What the world did, and how agents recovered from it."""
    title = "Drift"
    known = {sign.metric: sign for sign in _SIGNS}
    logged = names(bundles, "drift/")
    value = "Its value at the end of each rollout."
    others = [Sign(name, name.removeprefix("drift/"), value) for name in logged if name not in known]
    charts, notes = charts_of((*_SIGNS, *others), bundles)
    if not charts:
        return Absent(title, "no drift was logged (drift/…)")
    if any(len(life.phases()) > 1 for bundle in bundles for life in bundle.lives) and not shaded(bundles):
        notes.append("Phases are not shaded in charts: they are too many, or not the same for all.")
    parts: list[Chart | Table | Text] = []
    for bundle in bundles:
        if found := switches(bundle):
            suffix = f": {bundle.name}" if len(bundles) > 1 else ""
            parts += [_recovery_chart(found, suffix), _recovery_table(found, suffix)]
            if _metric(bundle) == RETURN:
                notes.append(
                    f"Recovery{suffix}: returns are means of the latest hundred episodes, which fall late and little; "
                    "returns of each rollout were not logged."
                )
    return Section(title, "How the environment changed, and how agents recovered.", [*parts, *charts], notes)


def switches(bundle: Bundle) -> list[Switch]:
    """Changes of phase that all agents of a bundle had at the same steps, with the median of their returns."""
    phases, metric = common_phases([bundle]), _metric(bundle)
    steps, values = together(bundle.lives, metric)
    _, returns, _ = spread(values)
    steps, returns = steps[np.isfinite(returns)], returns[np.isfinite(returns)]
    if not 1 < len(phases) <= _MOST_SWITCHES or not len(steps):
        return []
    found = []
    begins = [0.0, *(step for step, _ in phases[1:]), np.inf]
    for i, (_, phase) in enumerate(phases[1:], 1):
        earlier = (steps >= begins[i - 1]) & (steps < begins[i])
        own = (steps >= begins[i]) & (steps < begins[i + 1])
        if not earlier.any() or not own.any():
            continue
        step, end = steps[earlier][-1], returns[earlier]
        before = float(end[-max(round(_BEFORE * len(end)), 1) :].mean())
        since = steps[own] - step
        # Single rollouts are also bad by chance, long after the change.
        within = since <= (since[-1] if metric == RETURN else max(_FALLS_WITHIN * since[-1], since[0]))
        found.append(Switch(phase, step, before, since, returns[own], _recovery(since, returns[own], before, within)))
    return found


def _metric(bundle: Bundle) -> str:
    """The metric that shows recoveries best: returns of each rollout, if all agents logged them."""
    return DRIFT_RETURN if all(len(life.column(DRIFT_RETURN)[0]) for life in bundle.lives) else RETURN


def _recovery(since: Array, returns: Array, before: float, within: npt.NDArray[np.bool_]) -> float | None:
    """Steps until returns, having fallen within some of them, are back; 0 if they did not fall."""
    is_back = returns >= before - (1 - _RECOVERED) * abs(before)
    if is_back[within].all():
        return 0.0
    # Means of recent episodes fall only some time after the change.
    fell = int(np.argmin(is_back))
    return float(since[fell + int(np.argmax(is_back[fell:]))]) if is_back[fell:].any() else None


def _recovery_chart(found: Sequence[Switch], suffix: str) -> Chart:
    data = []
    for i, switch in enumerate(found):
        shade = f"@scale:{i / max(len(found) - 1, 1):.2f}"
        x, y = np.concatenate([[0.0], switch.since]), np.concatenate([[switch.before], switch.returns])
        data.append(line(x, y, f"phase {switch.phase:g}", shade))
    layout = {
        "xaxis": {"tickformat": "~s", "title": {"text": "environment steps since the change"}},
        "showlegend": True,
    }
    caption = "Return since each change of phase, from its level before; later phases have higher colours."
    return Chart(f"Recovery{suffix}", caption, data, layout, 340, span=2)


def _recovery_table(found: Sequence[Switch], suffix: str) -> Table:
    rows = []
    for switch in found:
        steps = f"> {number(switch.since[-1])}" if switch.recovery is None else number(switch.recovery)
        rows.append(
            [f"{switch.phase:g}", number(switch.step), number(switch.before), number(switch.returns.min()), steps]
        )
    caption = (
        "Steps until the return was back at 90 % of its level before; 0: it did not fall below; >: not in this phase."
    )
    head = ["phase", "from step", "return before", "lowest", "recovered after"]
    return Table(f"Recovery times{suffix}", head, rows, caption, span=1)


def marks(bundles: Sequence[Bundle]) -> list[Trace]:
    """Marks on the curves of returns: alarms, responses to them, and shifts of observations that were followed."""
    places: dict[str, list[tuple[float, float, str]]] = {}
    for bundle in bundles:
        steps, values = together(bundle.lives, RETURN)
        _, curve, _ = spread(values)
        steps, curve = steps[np.isfinite(curve)], curve[np.isfinite(curve)]
        for life in bundle.lives if len(steps) else ():
            for kind, step, text in _noticed(life):
                places.setdefault(kind, []).append((step, float(np.interp(step, steps, curve)), text))
    if sum(map(len, places.values())) > _MOST_MARKS:
        return []
    symbols = {"alarm": "triangle-down-open", "response": "diamond", "shift followed": "square"}
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": kind,
            "x": plain([step for step, _, _ in found]),
            "y": plain([value for _, value, _ in found]),
            "text": [label(text) for _, _, text in found],
            "marker": {
                "symbol": symbols[kind],
                "size": 16 if kind == "alarm" else 10,
                "color": "@accent",
                "line": {"width": 2 if kind == "alarm" else 0},
            },
            "hovertemplate": "%{text}<extra></extra>",
            "showlegend": True,
        }
        for kind, found in places.items()
    ]


def _noticed(life: Life) -> Iterator[tuple[str, float, str]]:
    """Kind, step and description of all that an agent noticed and did."""
    steps, alarms = life.column(ALARM)
    for step in steps[alarms > 0]:
        yield "alarm", step, "alarm"
    steps, levels = life.column(LEVEL)
    for i in np.flatnonzero(np.diff(levels, prepend=0.0) > 0):
        level = int(levels[i])
        yield "response", steps[i], RESPONSES[level] if level < len(RESPONSES) else f"response {level}"
    steps, trials = life.column(TRIAL)
    for i in np.flatnonzero(np.diff(trials, prepend=0.0) > 0):
        yield "response", steps[i], "tries earlier weights"
    steps, moves = life.column(ANCHOR_MOVES)
    for i in np.flatnonzero(np.diff(moves, prepend=0.0) > 0):
        yield "shift followed", steps[i], "shift of observations followed"


def forgetting(bundles: Sequence[Bundle]) -> Section | Absent:
    """Returns in every phase of the drift, as they are at the end of training."""
    title = "Forgetting"
    found = [(run, bundle.colour) for bundle in bundles for run in bundle.runs if run.phases]
    if not found:
        return Absent(title, "no run was evaluated in every phase of a drift (phases.json)")
    parts: list[Chart | Table | Text] = []
    for run, own in found:
        parts += [_phase_chart(run, own, bundles), _phase_table(run, bundles)]
    lead = "How well the agent, as it is in the end, does in every phase of the drift, earlier ones too."
    return Section(title, lead, parts, labels=labels(PHASE_RESULTS, bundles))


def _phase_chart(run: Run, own: str, bundles: Sequence[Bundle]) -> Chart:
    groups = {
        "training ended here": ([i for i, each in enumerate(run.phases) if each.is_last], "@accent", "diamond"),
        "seen in training": (
            [i for i, each in enumerate(run.phases) if each.is_seen and not each.is_last],
            own,
            "circle",
        ),
        "not seen": ([i for i, each in enumerate(run.phases) if not each.is_seen], "@muted", "circle-open"),
    }
    means = [each.score.mean for each in run.phases]
    data: list[Trace] = [
        line(np.arange(len(means), dtype=np.float64), np.array(means), "", own, width=1, showlegend=False)
    ]
    for name, (places, shade, symbol) in groups.items():
        scores = [run.phases[i].score for i in places]
        bars = {
            "array": plain([s.high - s.mean for s in scores]),
            "arrayminus": plain([s.mean - s.low for s in scores]),
        }
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": name,
                "x": places,
                "y": plain([score.mean for score in scores]),
                "text": [label(_drifted(run.phases[i])) for i in places],
                "error_y": {"type": "data", "symmetric": False, **bars, "thickness": 2, "width": 0, "color": shade},
                "marker": {"size": 12, "color": shade, "symbol": symbol},
                "hovertemplate": "%{y:.4g}<br>%{text}<extra></extra>",
                "showlegend": True,
            }
        )
    ticks = {"tickvals": list(range(len(means))), "ticktext": [shortlist(each.phases) for each in run.phases]}
    layout = {
        "hovermode": "closest",
        "xaxis": {"title": {"text": "phase"}, **ticks},
        "yaxis": {"title": {"text": "return"}},
    }
    caption = "Point: mean; bar: its interval. Phases with the same values are one point."
    return Chart(titled("Return by phase", run, bundles), caption, data, layout, 340, span=2)


def _phase_table(run: Run, bundles: Sequence[Bundle]) -> Table:
    rows = []
    for each in run.phases:
        when = " (training ended here)" if each.is_last else "" if each.is_seen else " (not seen)"
        told = f"{shortlist(each.phases)}: {_drifted(each)}{when}"
        rows.append([told, f"{number(each.score.mean)}\n{interval(each.score)}"])
    return Table(titled("Phases", run, bundles), ["phase", "return"], rows, span=1)


def _drifted(each: PhaseScore) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in each.values.items())
