"""The top of the page: each run in a few numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from driftproof.report.bundles import Bundle
from driftproof.report.charts import number
from driftproof.report.lineage import takeovers
from driftproof.report.runs import RETURN, Run, last
from driftproof.report.series import column


@dataclass(frozen=True)
class Card:
    """A run in a few numbers: each with its name, and a word about it."""

    name: str
    colour: str
    facts: list[tuple[str, str, str]]


def cards(bundles: Sequence[Bundle]) -> list[Card]:
    return [Card(run.name, bundle.colour, _facts(run)) for bundle in bundles for run in bundle.runs]


def _facts(run: Run) -> list[tuple[str, str, str]]:
    facts = [_best_return(run)]
    if run.evaluation:
        score = run.evaluation[0]
        facts.append(("Evaluation", number(score.mean), f"{number(score.low)} to {number(score.high)}"))
    if run.is_population:
        taken = takeovers(run.events)
        restarts = sum(event.kind == "restart" for event in run.events)
        facts.append(("Members", number(len(run.members)), f"{restarts} restarts" if restarts else "no restarts"))
        facts.append(("Take-overs", number(len(taken)), _helped(run)))
    updates = run.last_step // run.steps_per_update
    facts.append(("Updates", number(updates), "of each member" if run.is_population else ""))
    steps = sum(int(rows[-1]["step"]) for rows in run.members.values())
    facts.append(("Steps", number(steps), "all members together" if run.is_population else ""))
    seconds = _seconds(run)
    if seconds is not None:
        facts.append(("Time", _duration(seconds), f"{number(round(steps / seconds))} steps/s"))
    if run.attacks and max(score.epsilon for score in run.attacks) > 0:
        worst = min(run.attacks, key=lambda score: score.mean)
        facts.append(("Under attack", number(worst.mean), f"{worst.name}, ε = {number(worst.epsilon)}"))
    return facts


def _best_return(run: Run) -> tuple[str, str, str]:
    steps, values = column(run.members[run.best], RETURN)
    finite = [(value, step) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
    if not finite:
        return ("Best return", "–", "no episode has ended")
    peak, step = max(finite)
    whose = f"member {run.best}, " if run.is_population else ""
    return (
        "Best return" if run.is_population else "Return",
        number(last(run.members[run.best], RETURN)),
        f"{whose}peak {number(peak)} at step {number(step)}",
    )


def _helped(run: Run) -> str:
    rate = last(run.population, "population/exploit_success_rate")
    return "" if math.isnan(rate) else f"{rate:.0%} helped"


def _seconds(run: Run) -> float | None:
    """How long an agent that trained alone took; a member's clock is not the population's."""
    if run.is_population:
        return None
    (rows,) = run.members.values()
    _, elapsed = column(rows, "time/time_elapsed")
    # The clock begins anew when a training is resumed.
    total = sum(before for before, after in zip(elapsed, [*elapsed[1:], 0.0], strict=True) if after < before)
    return float(total) if total > 0 else None


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
