"""What take-overs changed, against what the members' own trends predicted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from driftproof.report.lineage import takeovers
from driftproof.report.runs import Run
from driftproof.runs import RETURN

_FEWEST = 4
"""Returns that a member must have logged since its last take-over, for a trend."""
_LONGEST = 12
"""Returns that a trend is fitted to, at most."""


@dataclass(frozen=True)
class Outcome:
    """A take-over, some time after it.

    Attributes:
        step: Environment steps of the member when it took over.
        predicted: Return that the member's own trend predicted for then.
        actual: Its return.
    """

    step: float
    predicted: float
    actual: float


def outcomes(run: Run) -> list[Outcome]:
    """Take-overs with enough returns before and after them, in the order of steps.

    The trend is a straight line through the member's returns since its last take-over. It is extended over as many
    updates as were done until the next one, at most as many as it was fitted to, where it is compared with the return.
    """
    found = []
    taken = takeovers(run.events)
    for event in taken:
        if event.member not in run.members:
            continue
        steps, values = run.members[event.member].column(RETURN)
        steps, values = steps[np.isfinite(values)], values[np.isfinite(values)]
        at = event.step * run.steps_per_update
        others = [other.step * run.steps_per_update for other in taken if other.member == event.member]
        begin = max((step for step in others if step < at), default=0)
        end = min((step for step in others if step > at), default=np.inf)
        before = np.flatnonzero((steps > begin) & (steps <= at))[-_LONGEST:]
        after = np.flatnonzero((steps > at) & (steps <= end))[: len(before)]
        if len(before) < _FEWEST or not len(after):
            continue
        slope, level = np.polyfit(steps[before] - at, values[before], 1)
        last = after[-1]
        found.append(Outcome(float(at), float(level + slope * (steps[last] - at)), float(values[last])))
    return sorted(found, key=lambda outcome: outcome.step)


def beaten(run: Run) -> list[bool]:
    """For each take-over that can be judged, whether the member did better than its own trend predicted."""
    sign = -1 if run.lower_is_better else 1
    return [sign * (outcome.actual - outcome.predicted) > 0 for outcome in outcomes(run)]
