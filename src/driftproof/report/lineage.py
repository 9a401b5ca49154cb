"""Chart of a population's lineage: exploits and performance of all members over time."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from driftproof.pbt import Event
from driftproof.report.charts import TITLED_STEPS, Chart, Trace, label, number, spans_decades
from driftproof.report.runs import Run
from driftproof.report.series import Array, plain
from driftproof.runs import RETURN

_CELLS = 240
"""Largest number of cells of a member's lane."""
_LANE = 18
"""Height of a lane in pixels, with many members."""
_BROAD_LANE = 28
"""Height of a lane in pixels, with few members."""
_CURVE = 16
"""Points of a curve from one lane to another."""
_LABELS = 64
"""Largest number of lanes with a label each."""
_LONGEST_DESCENT = 2_000
"""Largest number of exploits that a lineage is followed back over."""
_MOST_SEARCHED = 30
"""Hyper-parameters that lanes can be coloured by."""
_MOST_CELLS = 2_000_000
"""Largest number of cells of all colourings together."""


@dataclass(frozen=True)
class Stay:
    """A period in which a lineage's parameters were in one member."""

    member: int
    begin: int
    """In updates."""
    end: int


def takeovers(events: Sequence[Event]) -> list[Event]:
    """Exploits that were not undone."""
    taken: list[Event] = []
    for event in events:
        if event.kind in ("exploit", "replace") and event.donor is not None:
            taken.append(event)
        elif event.kind == "undo":
            undone = next((i for i in reversed(range(len(taken))) if taken[i].member == event.member), None)
            if undone is not None:
                del taken[undone]
    return taken


class _Taken:
    """Exploits by member, so that following a lineage visits each once."""

    def __init__(self, taken: Sequence[Event]) -> None:
        self._taken = taken
        self._by_member: dict[int, list[int]] = {}
        for index, event in enumerate(taken):
            self._by_member.setdefault(event.member, []).append(index)

    def back(self, member: int, end: int) -> Iterator[Stay]:
        """Whose parameters a member has in the end, newest first, as far back as a picture can show."""
        until, before, is_first = end, len(self._taken), True
        for _ in range(_LONGEST_DESCENT):
            # What a donor gave is what it had before it took over anything at that same update.
            mine = self._by_member.get(member, [])
            place = bisect.bisect_left(mine, before) - 1
            while place >= 0 and not is_first and self._taken[mine[place]].step >= until:
                place -= 1
            if place < 0:
                break
            before, is_first = mine[place], False
            event = self._taken[before]
            yield Stay(member, event.step, until)
            assert event.donor is not None
            member, until = event.donor, event.step if event.donor_step is None else event.donor_step
        yield Stay(member, 0, until)


def descent(taken: Sequence[Event], member: int, end: int) -> list[Stay]:
    """Whose parameters a member has in the end, oldest first: through whom they came, and from when to when."""
    return list(_Taken(taken).back(member, end))[::-1]


def order(run: Run, taken: Sequence[Event]) -> list[int]:
    """Order of members such that relatives are neighbours, the best member's family first."""
    by_member = _Taken(taken)
    paths = {m: [stay.member for stay in by_member.back(m, _updates(run, m))][::-1] for m in run.members}
    rank = {member: i for i, member in enumerate(run.ranking)}
    family: dict[int, int] = {}
    for member, path in paths.items():
        family[path[0]] = min(rank[member], family.get(path[0], len(rank)))
    return sorted(paths, key=lambda m: (family[paths[m][0]], paths[m]))


def lineage(run: Run, title: str, span: int) -> Chart:
    """The picture: a lane for each member, coloured by how well it does, and a curve for each take-over."""
    taken = takeovers(run.events)
    members = order(run, taken)
    lanes = {member: i for i, member in enumerate(members)}
    cells = _Cells(run, members)
    colourings = [("return", _returns(run, members, cells.edges))]
    colourings += [(name, _hyperparams(run, members, name, cells.edges)) for name in _searched(run)]
    colourings = [(name, values) for name, values in colourings if np.isfinite(values).any()]
    lanes_drawn = [cells.trace(name, values) for name, values in colourings]
    over_them = [*_curves(run, taken, lanes), *_best_path(run, taken, lanes), *_marks(run, taken, lanes)]
    caption = (
        "A lane for each member; families are neighbours, the best one's on top. A curve begins where a member gave "
        "its parameters and ends where another took over. Orange: how the parameters of member "
        f"{run.best}, the best in the end, came about."
    )
    height = (_LANE if len(members) > 12 else _BROAD_LANE) * max(len(members), 4) + 130
    return Chart(
        title,
        caption,
        [*lanes_drawn, *over_them],
        _layout(members),
        height,
        span,
        choices=[name for name, _ in colourings],
        chosen_by=[*range(len(lanes_drawn)), *[None] * len(over_them)],
    )


class _Cells:
    """The lanes' grid: one column for each update, or for several if there are many."""

    def __init__(self, run: Run, members: Sequence[int]) -> None:
        self.members = members
        updates = max(1, *(_updates(run, member) for member in members))
        room = _MOST_CELLS // (len(members) * (1 + len(_searched(run))))
        cells = min(updates, _CELLS, max(room, 8))
        self.edges = np.unique(np.linspace(0, updates, cells + 1).round()) * run.steps_per_update

    def trace(self, name: str, values: Array) -> Trace:
        """Lanes coloured by these values ``[lanes, cells]``."""
        finite = values[np.isfinite(values)]
        scale, ticks = values, {}
        if spans_decades(finite):
            scale = np.log10(values)
            at = np.geomspace(finite.min(), finite.max(), 4)
            ticks = {"tickvals": plain(np.log10(at)), "ticktext": [f"{x:.2g}" for x in at]}
        return {
            "type": "heatmap",
            "x": plain(self.edges),
            "y": list(range(len(values))),
            "z": plain(scale),
            "customdata": plain(values),
            "ygap": 5,
            "hoverongaps": False,
            "colorscale": [[i / 4, f"@scale:{i / 4}"] for i in range(5)],
            "colorbar": {
                "title": {"text": label(name), "side": "top"},
                "orientation": "h",
                "thickness": 8,
                "len": 0.5,
                "x": 0,
                "xanchor": "left",
                "y": 1,
                "yanchor": "bottom",
                "outlinewidth": 0,
                "nticks": 5,
                **ticks,
            },
            "text": [[str(member)] * (len(self.edges) - 1) for member in self.members],
            "hovertemplate": "member %{text} at step %{x:,}: %{customdata:.4~g}<extra></extra>",
            "showlegend": False,
        }


def _returns(run: Run, members: Sequence[int], edges: Array) -> Array:
    """Mean returns in each cell ``[lanes, cells]``; NaN where none was logged."""
    result = np.full((len(members), len(edges) - 1), math.nan)
    for row, member in zip(result, members, strict=True):
        steps, values = run.members[member].column(RETURN)
        steps, values = steps[np.isfinite(values)], values[np.isfinite(values)]
        # A row of metrics is what an agent had measured by its step.
        place = np.clip(np.searchsorted(edges, steps, side="left") - 1, 0, len(row) - 1)
        counts = np.bincount(place, minlength=len(row))
        sums = np.bincount(place, weights=values, minlength=len(row))
        row[counts > 0] = sums[counts > 0] / counts[counts > 0]
    return result


def hyperparam_changes(run: Run, member: int, name: str) -> tuple[list[int], list[Any]]:
    """Updates from which on a member had a value of a hyper-parameter, and these values."""
    mine = [event for event in run.events if event.member == member and name in event.hyperparams]
    return [event.step for event in mine], [event.hyperparams[name] for event in mine]


def _hyperparams(run: Run, members: Sequence[int], name: str, edges: Array) -> Array:
    result = np.full((len(members), len(edges) - 1), math.nan)
    for row, member in zip(result, members, strict=True):
        updates, values = hyperparam_changes(run, member, name)
        last = _updates(run, member) * run.steps_per_update
        for update, value in zip(updates, values, strict=True):
            if isinstance(value, int | float):
                row[(edges[:-1] >= update * run.steps_per_update) & (edges[:-1] < last)] = value
    return result


def _searched(run: Run) -> list[str]:
    return sorted({name for event in run.events for name in event.hyperparams})[:_MOST_SEARCHED]


def _updates(run: Run, member: int) -> int:
    return run.members[member].end // run.steps_per_update


def _curves(run: Run, taken: Sequence[Event], lanes: dict[int, int]) -> list[Trace]:
    """All take-overs as one line with gaps, above a halo that keeps it apart from what is below."""
    x: list[float | None] = []
    y: list[float | None] = []
    for event in taken:
        if event.donor in lanes and event.member in lanes:
            curve_x, curve_y = _curve(run, event, lanes)
            x += [*curve_x, None]
            y += [*curve_y, None]
    style = {"type": "scatter", "mode": "lines", "x": x, "y": y, "hoverinfo": "skip", "showlegend": False}
    return [
        {**style, "line": {"color": "@surface/0.75", "width": 3}},
        {**style, "line": {"color": "@ink/0.75", "width": 1}},
    ]


def _curve(run: Run, event: Event, lanes: dict[int, int]) -> tuple[list[float], list[float]]:
    """From the donor's lane to the taker's, which it reaches a little later: else all of one update would coincide."""
    assert event.donor is not None
    given = event.step if event.donor_step is None else event.donor_step
    begin, end = given * run.steps_per_update, (event.step + _reach(run)) * run.steps_per_update
    share = np.linspace(0, 1, _CURVE)
    smooth = share**2 * (3 - 2 * share)
    low, high = lanes[event.donor], lanes[event.member]
    return plain(begin + (end - begin) * share), plain(low + (high - low) * smooth)


def _reach(run: Run) -> float:
    """Updates from a decision to where its curve arrives: less than until the next one."""
    steps = sorted({event.step for event in run.events if event.step})
    gaps = [b - a for a, b in zip([0, *steps], steps, strict=False)]
    return 0.6 * (float(np.median(gaps)) if gaps else 1.0)


def _best_path(run: Run, taken: Sequence[Event], lanes: dict[int, int]) -> list[Trace]:
    """The lineage of the best member's parameters."""
    x: list[float] = []
    y: list[float] = []
    stays = descent(taken, run.best, _updates(run, run.best))
    if any(stay.member not in lanes for stay in stays):
        return []
    for i, stay in enumerate(stays):
        if i:
            event = Event("exploit", stay.member, stay.begin, donor=stays[i - 1].member, donor_step=stays[i - 1].end)
            curve_x, curve_y = _curve(run, event, lanes)
            x += curve_x
            y += curve_y
        else:
            x, y = [0.0], [float(lanes[stay.member])]
        if i == len(stays) - 1:
            x.append(float(stay.end * run.steps_per_update))
            y.append(float(lanes[stay.member]))
    style = {"type": "scatter", "mode": "lines", "x": x, "y": y, "hoverinfo": "skip", "showlegend": False}
    return [
        {**style, "line": {"color": "@surface", "width": 5}},
        {**style, "line": {"color": "@accent", "width": 2.5}},
    ]


def _marks(run: Run, taken: Sequence[Event], lanes: dict[int, int]) -> list[Trace]:
    """A point at every take-over, mutation and restart, which tells what happened."""
    groups = {
        "take-over": ([e for e in taken if e.kind == "exploit"], "circle", "@ink"),
        "replaced": ([e for e in taken if e.kind == "replace"], "square", "@accent"),
        "mutation": ([e for e in run.events if e.kind == "explore"], "diamond", "@ink"),
        "undone": ([e for e in run.events if e.kind == "undo"], "circle-x", "@muted"),
        "restart": ([e for e in run.events if e.kind == "restart"], "x", "@accent"),
    }
    reach = _reach(run)
    traces = []
    for name, (events, symbol, colour) in groups.items():
        events = [event for event in events if event.member in lanes]
        if events:
            later = reach if name in ("take-over", "replaced") else 0
            traces.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "x": plain([(event.step + later) * run.steps_per_update for event in events]),
                    "y": [lanes[event.member] for event in events],
                    "text": [_description(event) for event in events],
                    "hovertemplate": "%{text}<extra></extra>",
                    "name": name,
                    "showlegend": True,
                    "marker": {"symbol": symbol, "size": 7, "color": colour, "line": {"width": 1, "color": "@surface"}},
                }
            )
    return traces


def _description(event: Event) -> str:
    what = {
        "exploit": f"member {event.member} took over from {event.donor}",
        "replace": f"member {event.member}, lost, goes on as a clone of {event.donor}",
        "explore": f"member {event.member} mutated",
        "undo": f"member {event.member} could not take over from {event.donor}",
        "restart": f"member {event.member} began again",
    }[event.kind]
    changes = [f"{label(name)}: {_value(old)} → {_value(new)}" for name, (old, new) in event.mutated.items()]
    return "<br>".join([f"update {event.step}: {what}", *changes, *([label(event.detail)] if event.detail else [])])


def _value(value: Any) -> str:
    return number(value) if isinstance(value, int | float) else label(str(value))


def _layout(members: Sequence[int]) -> dict[str, Any]:
    every = -(-len(members) // _LABELS)
    return {
        "margin": {"t": 68},
        "hovermode": "closest",
        "xaxis": {**TITLED_STEPS, "showgrid": False, "zeroline": False},
        "yaxis": {
            "title": {"text": "member"},
            "autorange": False,
            "range": [len(members) - 0.4, -0.6],
            "showgrid": False,
            "tickvals": list(range(0, len(members), every)),
            "ticktext": [str(m) for m in members[::every]],
            "zeroline": False,
            "ticks": "",
        },
        "legend": {"orientation": "h", "x": 1, "xanchor": "right", "y": 1, "yanchor": "bottom"},
    }
