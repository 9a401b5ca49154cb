"""The top of the page: each run in a few numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from driftproof._text import shortlist
from driftproof.report.bundles import Bundle
from driftproof.report.charts import number
from driftproof.report.counterfactual import beaten
from driftproof.report.lineage import takeovers
from driftproof.report.outcomes import interval
from driftproof.report.runs import Run
from driftproof.runs import ATTACK_RESULTS, EVALUATION, RETURN


@dataclass(frozen=True)
class Card:
    """A run in a few numbers, each with its name and a word about it; and lines about where they come from."""

    name: str
    colour: str
    facts: list[tuple[str, str, str]]
    lines: list[tuple[str, str]]


def cards(bundles: Sequence[Bundle]) -> list[Card]:
    return [Card(run.name, bundle.colour, _facts(run), _origin(run)) for bundle in bundles for run in bundle.runs]


def _facts(run: Run) -> list[tuple[str, str, str]]:
    facts = [_best_return(run)]
    if run.evaluation:
        score = run.evaluation[0]
        facts.append(("Evaluation", number(score.mean), _known(interval(score), run.labels[EVALUATION].word)))
    if run.is_population:
        taken = takeovers(run.events)
        restarts = sum(event.kind == "restart" for event in run.events)
        facts.append(("Members", number(len(run.members)), f"{restarts} restarts" if restarts else "no restarts"))
        facts.append(("Take-overs", number(len(taken)), _helped(run)))
    updates = run.last_step // run.steps_per_update
    facts.append(("Updates", number(updates), "of each member" if run.is_population else ""))
    steps = sum(life.end for life in run.members.values())
    whose = "all members together" if run.is_population else ""
    is_wide = steps >= 10_000_000
    facts.append(
        ("Steps", f"{steps / 1e6:.1f} M", f"{steps:,} {whose}".strip()) if is_wide else ("Steps", number(steps), whose)
    )
    seconds = _seconds(run)
    if seconds is not None:
        facts.append(("Time", _duration(seconds), f"{number(round(steps / seconds))} steps/s"))
    if run.attacks and max(score.epsilon for score in run.attacks) > 0:
        worst = min(run.attacks, key=lambda score: score.mean)
        facts.append(
            (
                "Under attack",
                number(worst.mean),
                f"{worst.name}, ε = {number(worst.epsilon)}; {run.labels[ATTACK_RESULTS].word}",
            )
        )
    return facts


def _best_return(run: Run) -> tuple[str, str, str]:
    steps, values = run.members[run.best].column(RETURN)
    finite = [(value, step) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
    if not finite:
        return ("Training return", "–", "no episode has ended")
    peak, step = max(finite)
    whose = f"member {run.best}, " if run.is_population else ""
    return (
        "Best training return" if run.is_population else "Training return",
        number(run.members[run.best].last(RETURN)),
        f"{whose}peak {number(peak)} at step {number(step)}",
    )


def _known(ends: str, word: str) -> str:
    return word if ends == "–" else f"{ends}; {word}"


def _helped(run: Run) -> str:
    judged = beaten(run)
    return f"{sum(judged)} of {len(judged)} beat their own trend" if judged else "no trend to compare with"


def _origin(run: Run) -> list[tuple[str, str]]:
    """When, where and with what the run was done."""
    sources = run.sources
    lines = []
    if sources.started:
        lines.append(("Started", sources.started.replace("T", " ").removesuffix("+00:00") + " UTC"))
    if sources.machine:
        lines.append(("Machine", sources.machine))
    if run.versions:
        lines.append(("Versions", ", ".join(f"{name} {version}" for name, version in run.versions.items())))
    for file in sources.files:
        lines.append(("Data", f"{file.path}, {file.bytes:,} bytes, sha256 {file.sha256[:12]}"))
    for history in sources.histories[:1]:
        first, last = history.span
        names = shortlist(list(history.symbols))
        lines.append(("Trained on", f"{history.split} split of {names}, {first} to {last}, {history.bars:,} bars"))
    return lines


def _seconds(run: Run) -> float | None:
    """How long the training took."""
    # A member's clock is not the population's.
    life = run.population if run.is_population else next(iter(run.members.values()))
    _, elapsed = life.column("time/time_elapsed")
    # The clock begins anew when a training is resumed.
    total = sum(now for now, then in pairwise([*elapsed, 0.0]) if then < now)
    return float(total) if total > 0 else None


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
