"""The statistics of drift_suite.py, from the returns of every iteration that its runs keep.

- Online return, published counting: mean over iterations of the mean return of episodes that ended in an iteration,
  those that were cut at its end included. Plain: whole episodes within one task; mean over the iterations in which
  some ended, then over tasks. Iterations are equally long, so a time of many short episodes counts as its length.
- Level: of a trained agent where nothing drifts, and of a random policy (drift_scenarios.py). 90% and 10% are shares
  of the way from the second to the first.
- Steps to 90%: from the start of a task until the mean of five iterations is there; censored at the task's end. Of all
  tasks but the first, if there are more.
- Collapsed: the mean return of a task, other than the first if there are more, is at or below 10%.
- Return to A: mean return in the first tenth of a task that is as the first one was.
- Detector: an alarm within 25 updates of a switch is its detection, and any other is false. Delays are of harmful
  switches, after which the mean of five iterations is lower by 10% or more; 1 is the first update with new data.
- Speed: steps per second of processor time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from drift_scenarios import ITERATION, SCENARIOS, Scenario
from learning import iqm, iqm_interval

WINDOW = 5
"""Iterations that are averaged to tell where a return is."""
DETECTION = 25
"""Updates after a switch in which an alarm is its detection."""
POINTS = 20
"""Of a curve, for each task."""

Entry = dict[str, Any]
Interval = tuple[float, float, float]


@dataclass(frozen=True)
class Summary:
    """Metrics of a run; None where a scenario has none."""

    scenario: str
    label: str
    seed: int
    published: float | None
    plain: float | None
    by_task: list[float | None]
    normalized: float | None
    first: float | None
    last: float | None
    change: float | None
    steps_to_level: float | None
    censored: float | None
    end_of_a: float | None
    return_to_a: float | None
    collapsed: bool | None
    delays: list[int | None] | None
    false_alarms: int | None
    quiet_updates: int | None
    speed: float
    curve: list[float | None]
    iterations: int
    machine: str
    settings: dict[str, Any]

    @property
    def key(self) -> tuple[str, str, int]:
        return self.scenario, self.label, self.seed


def tasks_of(entry: Entry) -> int:
    """Number of whole tasks."""
    return int(entry["steps"] // (entry["settings"]["iterations"] * ITERATION))


def mean(values: Iterable[float | None]) -> float | None:
    """The mean of those that are known."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def share(scenario: Scenario, value: float) -> float:
    """How far a return is from the random policy's, 0, to the trained agent's, 1."""
    world = scenario.world
    return (value - world.random) / (world.level - world.random)


def summarize(entry: Entry, tasks: int) -> Summary:
    """Metrics of the first tasks of a run."""
    scenario = SCENARIOS[entry["scenario"]]
    iterations = entry["settings"]["iterations"]
    returns = [entry["returns"]["plain"][i * iterations : (i + 1) * iterations] for i in range(tasks)]
    by_task = [mean(task) for task in returns]
    judged = [i for i in range(tasks) if scenario.judged is None or i in scenario.judged]
    after = [i for i in judged if i > 0] if tasks > 1 else judged
    reached = [steps_to(returns[i], scenario) for i in after]
    back = [i for i in scenario.first if 0 < i < tasks]
    tenth = max(1, iterations // 10)
    known = [by_task[i] for i in judged if by_task[i] is not None]
    return Summary(
        scenario=entry["scenario"],
        label=entry["label"],
        seed=entry["seed"],
        published=mean(entry["returns"]["published"][: tasks * iterations]),
        plain=mean(by_task),
        by_task=by_task,
        normalized=float(np.mean([share(scenario, value) for value in known if value is not None])) if known else None,
        first=by_task[0],
        last=by_task[-1],
        change=None if by_task[0] is None or by_task[-1] is None else by_task[-1] - by_task[0],
        steps_to_level=mean(iterations * ITERATION if steps is None else steps for steps in reached),
        censored=mean(float(steps is None) for steps in reached),
        end_of_a=mean(returns[0][-tenth:]) if back else None,
        return_to_a=mean(mean(returns[i][:tenth]) for i in back),
        collapsed=has_collapsed([by_task[i] for i in after], scenario),
        **alarm_metrics(entry, returns, scenario),
        speed=entry["steps"] / max(entry["cpu_seconds"], 1e-9),
        curve=[point for task in returns for point in curve(task)],
        iterations=iterations,
        machine=entry["machine"],
        settings={k: v for k, v in entry["settings"].items() if k not in ("tasks", "iterations")},
    )


def steps_to(returns: Sequence[float | None], scenario: Scenario) -> int | None:
    """Steps until the mean of a window is at 90% of the level; None if it never is."""
    size = min(WINDOW, len(returns))
    for end in range(size, len(returns) + 1):
        value = mean(returns[end - size : end])
        if value is not None and share(scenario, value) >= 0.9:
            return end * ITERATION
    return None


def has_collapsed(means: Sequence[float | None], scenario: Scenario) -> bool | None:
    """Whether a task's mean is near that of a random policy; None if there is none to judge."""
    known = [value for value in means if value is not None]
    return any(share(scenario, value) <= 0.1 for value in known) if known else None


def alarm_metrics(entry: Entry, returns: Sequence[Sequence[float | None]], scenario: Scenario) -> dict[str, Any]:
    """Delays after harmful switches, None where one was missed; false alarms, and updates in which any would be."""
    if entry["alarms"] is None or not scenario.is_sudden:
        return {"delays": None, "false_alarms": None, "quiet_updates": None}
    iterations, tasks = entry["settings"]["iterations"], len(returns)
    alarms = [update for update in entry["alarms"] if update <= tasks * iterations]
    switches = [task * iterations for task in range(1, tasks)]
    detected = {switch: [a - switch for a in alarms if 0 < a - switch <= DETECTION] for switch in switches}
    delays = [
        min(detected[task * iterations], default=None)
        for task in range(1, tasks)
        if is_harmful(returns[task - 1], returns[task], scenario)
    ]
    return {
        "delays": delays,
        "false_alarms": len(alarms) - sum(map(len, detected.values())),
        "quiet_updates": tasks * iterations - len(switches) * min(DETECTION, iterations),
    }


def is_harmful(before: Sequence[float | None], after: Sequence[float | None], scenario: Scenario) -> bool:
    """Whether returns fall by a tenth of the way from the random policy to the level."""
    earlier, later = mean(before[-WINDOW:]), mean(after[:WINDOW])
    if earlier is None or later is None:
        return False
    return share(scenario, earlier) - share(scenario, later) >= 0.1


def curve(returns: Sequence[float | None]) -> list[float | None]:
    """Means of equal parts of a task."""
    parts = np.array_split(np.array(returns, float), min(POINTS, len(returns)))
    means = [mean(None if np.isnan(value) else float(value) for value in part) for part in parts]
    return [None if value is None else float(f"{value:.5g}") for value in means]


def average(summaries: Sequence[Summary], of: Callable[[Summary], float | None]) -> Interval | None:
    """Interquartile mean over seeds and its bootstrap interval."""
    values = [value for summary in summaries if (value := of(summary)) is not None]
    if not values:
        return None
    middle, low, high = iqm_interval(np.array(values, float))
    return float(middle), float(low), float(high)


def stratified(
    strata: Sequence[Sequence[float]], combine: Callable[[list[np.ndarray]], np.ndarray], draws: int = 2_000
) -> Interval:
    """A statistic of several scenarios and its bootstrap interval; seeds are drawn within each scenario.

    Args:
        strata: Values of each scenario's runs.
        combine: From values ``[draws, seeds]`` of each scenario to statistics ``[draws]``.
        draws: Of the bootstrap.
    """
    rng = np.random.default_rng(0)
    arrays = [np.array(values, float) for values in strata]
    drawn = [values[rng.integers(len(values), size=(draws, len(values)))] for values in arrays]
    low, high = np.quantile(combine(drawn), [0.025, 0.975])
    return float(combine([values[None] for values in arrays])[0]), float(low), float(high)


def sum_of_iqms(values: list[np.ndarray]) -> np.ndarray:
    return np.sum([iqm(each, axis=1) for each in values], axis=0)


def iqm_of_all(values: list[np.ndarray]) -> np.ndarray:
    """Over the runs of all scenarios."""
    return iqm(np.concatenate(values, axis=1), axis=1)


def paired(summaries: Sequence[Summary], others: Sequence[Summary]) -> Interval | None:
    """Mean difference of plain online returns over the seeds that both have, and its bootstrap interval."""
    theirs = {summary.seed: summary.plain for summary in others}
    pairs = [(summary.plain, theirs.get(summary.seed)) for summary in summaries]
    differences = [own - other for own, other in pairs if own is not None and other is not None]
    if not differences:
        return None
    return stratified([differences], lambda values: values[0].mean(1))
