"""Tables and picture of drift_suite.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import common
import drift_statistics as statistics
import numpy as np
from drift_methods import METHODS
from drift_scenarios import GROUPS, ITERATION, SCENARIOS, WORLDS
from drift_statistics import Entry, Interval, Summary, average
from learning import write_out

PUBLISHED: dict[str, tuple[float, float, float, float]] = {
    "published: oracle, new at every switch": (299.9, -125.7, 1.1, -322.6),
    "published: PPO": (61.8, -372.7, -499.4, -346.6),
    "published: TRAC": (217.4, -166.6, -58.1, -400.0),
    "published: weight clipping": (154.3, -118.8, -58.6, -267.9),
    "published: L2 init": (266.1, -134.0, -6.7, -369.4),
    "published: C-CHAIN (told of switches)": (160.4, -119.2, -16.7, -245.7),
}
"""Means of six seeds by environment, in the order of WORLDS; https://arxiv.org/abs/2506.00592."""
COLOURS = {
    "sb3": "#8a8f98",
    "sb3-vecnormalize": "#3c6e9f",
    "sb3-oracle": "#c5a880",
    "ours": "#7fb69e",
    "oracle": "#d4a017",
    "kit": "#0b6e4f",
    "kit-memory": "#8e5572",
}
"""Methods that are drawn."""

Groups = dict[str, dict[str, list[Summary]]]
"""Summaries by scenario and label."""


def grouped(entries: Sequence[Entry], tasks: int | None, kept: Sequence[Summary] = ()) -> tuple[Groups, list[str]]:
    """Summaries of runs with enough whole tasks; and what was left out, in words.

    Args:
        entries: All runs.
        tasks: Only the first tasks count; None: all.
        kept: Summaries of runs whose files are elsewhere.
    """
    summaries = list(kept)
    left_out: dict[tuple[str, str], int] = {}
    for entry in entries:
        scenario = entry["scenario"]
        if scenario not in SCENARIOS:
            continue
        wanted = min(entry["settings"]["tasks"], tasks or entry["settings"]["tasks"])
        if statistics.tasks_of(entry) < wanted:
            left_out[scenario, entry["label"]] = left_out.get((scenario, entry["label"]), 0) + 1
            continue
        summaries.append(statistics.summarize(entry, wanted))
    groups: Groups = {}
    for run in sorted(summaries, key=lambda run: (place_of(run.label), run.seed)):
        groups.setdefault(run.scenario, {}).setdefault(run.label, []).append(run)
    words = [f"{scenario}, {label}: {count}" for (scenario, label), count in left_out.items()]
    return {name: groups[name] for name in SCENARIOS if name in groups}, words


def place_of(label: str) -> tuple[int, str]:
    """To sort labels by: methods in their order, then others by name."""
    return (list(METHODS).index(label) if label in METHODS else len(METHODS), label)


def labels_of(groups: Groups) -> list[str]:
    return sorted({label for labels in groups.values() for label in labels}, key=place_of)


def lengths(labels: Mapping[str, Sequence[Summary]], scenario: str) -> str:
    """Tasks of a scenario in words, and what they are of the full length."""
    full = SCENARIOS[scenario]
    found = sorted({(len(run.by_task), run.iterations) for runs in labels.values() for run in runs})
    words = []
    for tasks, iterations in found:
        text = (
            f"{tasks} tasks of {iterations * ITERATION:,} steps" if tasks > 1 else f"{iterations * ITERATION:,} steps"
        )
        if (tasks, iterations) != (full.tasks, full.iterations):
            text += f" (in full {full.tasks} of {full.task_steps:,})"
        words.append(text)
    return " and ".join(words) + (": LENGTHS DIFFER BETWEEN RUNS" if len(found) > 1 else "")


def number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"


def written(interval: Interval | None) -> str:
    if interval is None:
        return "-"
    middle, low, high = map(number, interval)
    return f"{middle} [{low}, {high}]" if low != high else middle


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"


def title_of(label: str) -> str:
    return METHODS[label].title if label in METHODS else label


COLUMNS: dict[str, Callable[[list[Summary]], str]] = {
    "online, published": lambda runs: written(average(runs, lambda run: run.published)),
    "online, plain": lambda runs: written(average(runs, lambda run: run.plain)),
    "first task": lambda runs: written(average(runs, lambda run: run.first)),
    "last task": lambda runs: written(average(runs, lambda run: run.last)),
    "last minus first": lambda runs: written(average(runs, lambda run: run.change)),
    "steps to 90%": lambda runs: written(average(runs, lambda run: run.steps_to_level)),
    "never at 90%": lambda runs: percent(statistics.mean(run.censored for run in runs)),
    "end of A": lambda runs: written(average(runs, lambda run: run.end_of_a)),
    "return to A": lambda runs: written(average(runs, lambda run: run.return_to_a)),
    "collapsed": lambda runs: percent(statistics.mean(run.collapsed for run in runs)),
    "alarm's delay": lambda runs: delays(runs),
    "false alarms in 500 updates": lambda runs: false_alarms(runs),
    "steps/s": lambda runs: f"{np.median([run.speed for run in runs]):,.0f}",
}


def delays(runs: Sequence[Summary]) -> str:
    """Median, with missed switches as late ones, and how many were found."""
    found = [delay for run in runs for delay in run.delays or []]
    if not found:
        return "-"
    median = np.median([np.inf if delay is None else delay for delay in found])
    return f"{median:g} ({sum(delay is not None for delay in found)} of {len(found)})"


def false_alarms(runs: Sequence[Summary]) -> str:
    updates = sum(run.quiet_updates or 0 for run in runs)
    return f"{500 * sum(run.false_alarms or 0 for run in runs) / updates:.2f}" if updates else "-"


def detector_table(groups: Groups) -> str | None:
    """Delays and false alarms by group of scenarios, and of all."""
    rows = []
    for label in labels_of(groups):
        of_kind: dict[str, list[Summary]] = {}
        for name, labels in groups.items():
            runs = [run for run in labels.get(label, []) if run.delays is not None]
            if runs:
                of_kind.setdefault(SCENARIOS[name].group, []).extend(runs)
        every = [run for runs in of_kind.values() for run in runs]
        for kind, runs in {**of_kind, "all": every}.items() if every else ():
            rows.append([title_of(label), kind, str(len(runs)), delays(runs), false_alarms(runs)])
    heads = ["", "scenarios", "runs", "median delay after harmful switches, updates (found)", "false in 500 updates"]
    return common.show_table("Alarms", heads, rows) if rows else None


def scenario_table(name: str, labels: Mapping[str, list[Summary]], length: str) -> str:
    """All metrics of a scenario; columns that say nothing here are left out."""
    rows = {label: {column: write(runs) for column, write in COLUMNS.items()} for label, runs in labels.items()}
    shown = [column for column in COLUMNS if any(row[column] != "-" for row in rows.values())]
    if not SCENARIOS[name].cut:
        shown.remove("online, published")
    if SCENARIOS[name].tasks == 1:
        shown = [column for column in shown if column not in ("first task", "last task", "last minus first")]
    has_oracle = "oracle" in labels
    lines = []
    for label, runs in labels.items():
        versus = [written(statistics.paired(runs, labels["oracle"])) if label != "oracle" else ""] if has_oracle else []
        lines.append([label, str(len(runs)), *(rows[label][column] for column in shown), *versus])
    heads = ["", "seeds", *shown, *(["plain minus oracle, paired"] if has_oracle else [])]
    return common.show_table(f"{SCENARIOS[name].title}: {length}", heads, lines)


def continual_table(groups: Groups) -> str | None:
    """Published counting by environment, and the sum."""
    names = [f"continual-{name}" for name in WORLDS]
    labels = [label for label in groups.get(names[0], {}) if any(label in groups.get(name, {}) for name in names)]
    if not labels:
        return None
    rows = []
    for label in labels:
        runs = [groups.get(name, {}).get(label, []) for name in names]
        values = [[run.published for run in each if run.published is not None] for each in runs]
        row = [written(average(each, lambda run: run.published)) for each in runs]
        whole = all(values)
        row.append(written(statistics.stratified(values, statistics.sum_of_iqms)) if whole else "-")
        row.append(number(sum(map(float, map(np.mean, values)))) if whole else "-")
        rows.append([title_of(label), *row, percent(statistics.mean(run.collapsed for each in runs for run in each))])
    rows += [[name, *map(number, values), "", number(sum(values)), ""] for name, values in PUBLISHED.items()]
    heads = ["", *(WORLDS[name].id for name in WORLDS), "sum", "sum of means", "collapsed"]
    return common.show_table("Continual Gym Control, online return in the published counting", heads, rows)


def overview_table(groups: Groups) -> str | None:
    """Normalised online return by group of scenarios: 0 is a random policy, 1 a trained agent without drift."""
    kinds = [kind for kind in GROUPS if any(SCENARIOS[name].group == kind for name in groups)]
    labels = labels_of(groups)
    if not labels:
        return None
    rows = []
    for label in labels:
        row = []
        for kind in kinds:
            wanted = [name for name in groups if SCENARIOS[name].group == kind]
            runs = [groups[name].get(label, []) for name in wanted]
            values = [[run.normalized for run in each if run.normalized is not None] for each in runs]
            values = [each for each in values if each]
            text = written(statistics.stratified(values, statistics.iqm_of_all)) if values else "-"
            row.append(text + (f", {len(values)} of {len(wanted)} scenarios" if 0 < len(values) < len(wanted) else ""))
        rows.append([title_of(label), *row])
    return common.show_table("Online return, 0: random policy, 1: trained without drift", ["", *kinds], rows)


def dynamics_table(groups: Groups, ours: str = "kit", theirs: str = "sb3-vecnormalize") -> str | None:
    """Where VecNormalize loses more than 10% of its stationary level, the kit should win; elsewhere, have 97% of it."""
    rows = []
    for name, labels in groups.items():
        scenario = SCENARIOS[name]
        stationary = [
            key for key in groups if SCENARIOS[key].group == "stationary" and SCENARIOS[key].world is scenario.world
        ]
        if scenario.group not in ("dynamics", "mujoco") or ours not in labels or theirs not in labels:
            continue
        reference = groups[stationary[0]].get(theirs) if stationary else None
        if not reference:
            continue
        # The second half: as long as a task, after as long a time of learning.
        level = statistics.mean(statistics.mean(run.curve[len(run.curve) // 2 :]) for run in reference)
        own, other = (statistics.mean(mean_after_first(run) for run in labels[label]) for label in (ours, theirs))
        if level is None or own is None or other is None:
            continue
        full = statistics.share(scenario, level)
        loss = 1 - statistics.share(scenario, other) / full
        ratio = statistics.share(scenario, own) / max(statistics.share(scenario, other), 1e-9)
        verdict = "yes" if ratio > (1.0 if loss > 0.1 else 0.97) else "NO"
        rows.append([scenario.title, number(level), number(other), percent(loss), number(own), percent(ratio), verdict])
    if not rows:
        return None
    heads = ["", "VecNormalize, stationary", "drifting", "loss", "driftproof, drifting", "relative", "as required"]
    return common.show_table("Dynamics: after the first task, against SB3 PPO with VecNormalize", heads, rows)


def mean_after_first(run: Summary) -> float | None:
    return statistics.mean(run.by_task[1:] or run.by_task)


def legend(groups: Groups) -> str:
    """What the labels stand for, with their settings, and where they were run."""
    runs = all_of(groups)
    settings = {run.label: run.settings for run in runs}
    lines = []
    for label in labels_of(groups):
        own = {k: v for k, v in settings[label].items() if k != "method"}
        method = METHODS.get(settings[label]["method"])
        lines.append(f"- {label}: {method.title if method else '?'}. {write_out(own)}")
    machines = sorted({run.machine for run in runs})
    return "\n".join(["### Methods", "", *lines, "", f"Runs were made on: {'; '.join(machines)}.", ""])


def all_of(groups: Groups) -> list[Summary]:
    return [run for labels in groups.values() for each in labels.values() for run in each]


def report(
    entries: Sequence[Entry], tasks: int | None = None, kept: Sequence[Summary] = ()
) -> tuple[list[str], Groups]:
    """All tables, printed, and in Markdown; and the summaries that they are made of."""
    groups, left_out = grouped(entries, tasks, kept)
    tables = (continual_table(groups), overview_table(groups), dynamics_table(groups), detector_table(groups))
    sections = [table for table in tables if table]
    sections += [scenario_table(name, labels, lengths(labels, name)) for name, labels in groups.items()]
    if groups:
        sections.append(legend(groups))
    if left_out:
        sections.append("Cut off before the last task, and left out: " + "; ".join(left_out) + ".\n")
    return sections, groups


def write_json(path: Path, groups: Groups) -> None:
    """One run a line."""
    path.write_text("[\n" + ",\n".join(json.dumps(asdict(run)) for run in all_of(groups)) + "\n]\n")


def read_json(path: Path) -> list[Summary]:
    """What ``write_json`` wrote; nothing if there is no file."""
    return [Summary(**run) for run in json.loads(path.read_text())] if path.exists() else []


def plot(groups: Groups, path: Path) -> None:
    """Returns over time: IQM over seeds and its interval, with lines where tasks begin."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    names = [name for name, labels in groups.items() if set(labels) & set(COLOURS)]
    if not names:
        return
    columns = min(4, len(names))
    rows = -(-len(names) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(4.6 * columns, 3.1 * rows), squeeze=False)
    for axes in grid.flat[len(names) :]:
        axes.set_axis_off()
    for axes, name in zip(grid.flat, names, strict=False):
        for label, runs in groups[name].items():
            shortest = min(len(run.curve) for run in runs)
            curves = np.array([run.curve[:shortest] for run in runs], float)
            known = ~np.isnan(curves).any(0)
            if label not in COLOURS or not known.any():
                continue
            tasks = len(runs[0].by_task)
            x = (np.arange(shortest) + 0.5) * tasks / shortest + 1
            middle, low, high = statistics.iqm_interval(curves[:, known])
            axes.plot(x[known], middle, color=COLOURS[label], linewidth=1.6, label=title_of(label))
            axes.fill_between(x[known], low, high, color=COLOURS[label], alpha=0.15, linewidth=0)
        for task in range(2, max(len(run.by_task) for runs in groups[name].values() for run in runs) + 1):
            axes.axvline(task, color=common.COLOURS["ink"], linewidth=0.3)
        axes.set_title(SCENARIOS[name].title, loc="left", fontsize=9)
        axes.set_xlabel("task")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
    handles = {text: line for axes in grid.flat for line, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=4, frameon=False)
    figure.tight_layout(rect=(0, 0.6 / (3.1 * rows), 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)
    common.console.print(f"picture: {path}")
