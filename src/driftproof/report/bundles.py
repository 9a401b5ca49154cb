"""Groups runs that differ only in their seed, to be drawn as one line with a band."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np

from driftproof.report.charts import Trace, band, colour, line, shading
from driftproof.report.runs import Run
from driftproof.report.series import Life, spread, together


@dataclass(frozen=True)
class Bundle:
    """Agents drawn together: members of a population, or runs that differ only in their seed.

    Attributes:
        name: Name of the run, or of the runs.
        colour: Colour of the bundle.
        runs: One population, or single agents.
        lives: Logged metrics of each agent.
    """

    name: str
    colour: str
    runs: list[Run]
    lives: list[Life]

    @classmethod
    def of(cls, run: Run) -> Bundle:
        """A bundle of one run."""
        return cls(run.name, colour(0), [run], list(run.members.values()))


def bundled(runs: Sequence[Run]) -> list[Bundle]:
    """Bundles of all runs, in the order of their first runs."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        key = run.name
        if run.config and not run.is_population:
            key = json.dumps(_without_own(run.config, run.path.resolve().name), sort_keys=True, default=str)
        groups.setdefault(key, []).append(run)
    result = []
    for i, group in enumerate(groups.values()):
        name = group[0].name if len(group) == 1 else f"{len(group)} runs: {', '.join(run.name for run in group)}"
        result.append(Bundle(name, colour(i), group, [life for run in group for life in run.members.values()]))
    return result


def curves(bundles: Sequence[Bundle], metric: str, sign: int = 1, is_flag: bool = False) -> list[Trace]:
    """A line for each bundle that has the metric: the median of its agents, with a band of the middle 80 %.

    For a flag, the share of agents that have it.
    """
    traces: list[Trace] = []
    for bundle in bundles:
        steps, values = together(bundle.lives, metric)
        if not len(steps):
            continue
        low, middle, high = spread(sign * values)
        if is_flag:
            middle = np.nan_to_num(values).sum(0) / np.maximum(np.isfinite(values).sum(0), 1)
        group = {"legendgroup": bundle.name, "showlegend": len(bundles) > 1}
        name = "median" if len(bundles) == 1 and len(bundle.lives) > 1 and not is_flag else bundle.name
        if len(bundle.lives) > 1 and not is_flag:
            traces += band(steps, low, high, bundle.colour, legendgroup=bundle.name)
        traces.append(line(steps, middle, name, bundle.colour, **group))
    return traces


def titled(title: str, run: Run, bundles: Sequence[Bundle]) -> str:
    """The title of a chart of one run, with the run's name if there are others."""
    return f"{title}: {run.name}" if sum(len(bundle.runs) for bundle in bundles) > 1 else title


def common_phases(bundles: Sequence[Bundle]) -> list[tuple[float, float]]:
    """Phases of the drift that all agents went through at the same steps; none if they differ."""
    found = [life.phases() for bundle in bundles for life in bundle.lives]
    longest = max(found, key=len, default=[])
    # Some may have trained for fewer steps than others.
    return longest if all(other and other == longest[: len(other)] for other in found) else []


def shaded(bundles: Sequence[Bundle], *, numbered: bool = False) -> dict[str, Any]:
    """A layout with the phases that the bundles have in common."""
    end = max(run.last_step for bundle in bundles for run in bundle.runs)
    return shading(common_phases(bundles), end, numbered=numbered)


def _without_own(config: Any, folder: str) -> Any:
    """The configuration without seeds and paths of the run folder, which repetitions of a run share."""
    if isinstance(config, Mapping):
        return {str(key): _without_own(value, folder) for key, value in config.items() if key != "seed"}
    if isinstance(config, list):
        return [_without_own(value, folder) for value in config]
    is_own_name = isinstance(config, str) and PurePath(config).name == folder
    return None if is_own_name else config
