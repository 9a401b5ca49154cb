"""Reads and validates run folders for a report."""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from driftproof import _yaml
from driftproof._files import damage_told, read_bytes
from driftproof.report.results import Label, PhaseScore, Score, finite, read_attacks, read_evaluation, read_phases
from driftproof.report.series import Life
from driftproof.runs import (
    ATTACK_RESULTS,
    CHECKPOINTS,
    CONFIG,
    EVALUATION,
    EVENTS,
    MEMBERS,
    METRICS,
    PHASE_RESULTS,
    RETURN,
    is_population,
)
from driftproof.runs.events import Event, read_events
from driftproof.runs.folder import RunFolder
from driftproof.runs.metrics import Row, read_metrics
from driftproof.runs.ranking import ranking
from driftproof.runs.sources import Sources, read_sources
from driftproof.state import CheckpointError, inspect

_MOST_LIBRARIES = 30
"""Largest number of libraries whose versions are shown."""


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        name: Name of the run, unique in the report.
        path: Run folder.
        members: Logged metrics of each member.
        population: Logged metrics of the whole population.
        events: Events of the members.
        performance: Performance of members at their last reports; empty for a single agent.
        lower_is_better: Whether a lower performance is better.
        config: Configuration, as far as it is known.
        config_text: Configuration as text.
        versions: Versions of the libraries that wrote its checkpoints.
        evaluation: Results of the agent, then of baselines.
        attacks: Results of all attacks and radii.
        phases: Results in every phase of the drift.
        sources: Data, machine and time of its start, if recorded.
        labels: What each of these results was obtained on, by the name of its file.
        notes: Optional files that could not be read.
    """

    name: str
    path: Path
    members: dict[int, Life]
    population: Life
    events: list[Event] = field(default_factory=list)
    performance: dict[int, float] = field(default_factory=dict)
    lower_is_better: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    evaluation: list[Score] = field(default_factory=list)
    attacks: list[Score] = field(default_factory=list)
    phases: list[PhaseScore] = field(default_factory=list)
    sources: Sources = field(default_factory=Sources)
    labels: dict[str, Label] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def is_population(self) -> bool:
        return len(self.members) > 1 or bool(self.events)

    @cached_property
    def metrics(self) -> set[str]:
        """Names of all metrics that members logged."""
        return {name for life in self.members.values() for name in life.metrics}

    @property
    def last_step(self) -> int:
        """Environment steps of the member that has trained longest."""
        return max(life.end for life in self.members.values())

    @cached_property
    def ranking(self) -> list[int]:
        """Members, best first: by performance in the population, else by their last return."""
        scores = self.performance or {member: life.last(RETURN) for member, life in self.members.items()}
        members = sorted(self.members)
        return [members[i] for i in ranking([scores.get(member) for member in members], self.lower_is_better)]

    @property
    def best(self) -> int:
        """The best member at the end."""
        return self.ranking[0]

    @cached_property
    def steps_per_update(self) -> int:
        """Environment steps per update of a member, from its counters."""
        moves: Counter[int] = Counter()
        for life in self.members.values():
            counts = [(0.0, 0.0), *zip(*life.column("time/iterations"), strict=True)]
            for (step, count), (next_step, next_count) in pairwise(counts):
                if next_count > count and 0 < (move := (next_step - step) / (next_count - count)) < math.inf:
                    moves[round(move)] += 1
        if moves:
            return max(moves.most_common(1)[0][0], 1)
        return max(math.gcd(*(step for life in self.members.values() for step in life.steps)), 1)


_RESULTS: dict[str, Any] = {EVALUATION: read_evaluation, ATTACK_RESULTS: read_attacks, PHASE_RESULTS: read_phases}


def read_runs(paths: Sequence[str | os.PathLike[str]]) -> list[Run]:
    """Read runs, in the order given, with unique names.

    Raises:
        TypeError: ``paths`` is one path.
        ValueError: There are no paths, or one is given twice.
        RunFolderError: A file is damaged.
        FileNotFoundError: A folder, or its metrics, are missing.
    """
    if isinstance(paths, str | os.PathLike):
        raise TypeError(f"runs must be a sequence of folders, such as [{os.fspath(paths)!r}]")
    folders = [Path(path) for path in paths]
    if not folders:
        raise ValueError("runs is empty: name at least one folder of a run")
    places = [folder.resolve() for folder in folders]
    for folder, place in zip(folders, places, strict=True):
        if places.count(place) > 1:
            raise ValueError(f"{folder} is named twice: a report compares different runs")
    return [read_run(folder, name) for folder, name in zip(folders, _names(places), strict=True)]


def read_run(folder: Path, name: str) -> Run:
    """Read one run; see :func:`read_runs`."""
    if not folder.exists():
        raise FileNotFoundError(f"{folder}: there is no such folder; give that of a run, such as runs/NAME")
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is not a folder; give that of a run, such as runs/NAME")
    metrics = _metrics(folder / METRICS)
    population = metrics.pop(None, [])
    if not metrics:
        raise ValueError(f"{folder / METRICS} has no metrics of an agent: the run has not done an update yet")
    members = {member: Life(metrics[member]) for member in sorted(m for m in metrics if m is not None)}
    searched, performance = _population_state(folder)
    config, text = _config(folder / CONFIG)
    if not config and searched:
        config, text = searched, _yaml.dump(searched)
    versions, notes = _versions(folder)
    labels: dict[str, Label] = {}
    results = {name: read(folder / name, config, labels) for name, read in _RESULTS.items()}
    return Run(
        name=name,
        path=folder,
        members=members,
        population=Life(population),
        events=read_events(folder / EVENTS),
        performance=performance,
        lower_is_better=searched.get("metric_mode") == "min",
        config=config,
        config_text=text,
        versions=versions,
        evaluation=results[EVALUATION],
        attacks=results[ATTACK_RESULTS],
        phases=results[PHASE_RESULTS],
        sources=read_sources(folder) or Sources(),
        labels=labels,
        notes=notes,
    )


def _names(places: Sequence[Path]) -> list[str]:
    """The shortest unique ends of paths."""
    names = [place.name or str(place) for place in places]
    depth = 1
    while len(set(names)) < len(names):
        depth += 1
        names = ["/".join(place.parts[-depth:]) for place in places]
    return names


def _metrics(path: Path) -> dict[int | None, Sequence[Row]]:
    if not os.path.lexists(path):
        raise FileNotFoundError(f"{path.parent} is not the folder of a run: there is no {path.name}")
    return read_metrics(path)


def _config(path: Path) -> tuple[dict[str, Any], str]:
    """A configuration as values and as text; empty if there is none."""
    if not os.path.lexists(path):
        return {}, ""
    with damage_told(path, "correct it, or restore it from a copy"):
        text = read_bytes(path, _yaml.MAX_BYTES).decode("utf-8")
        try:
            config = _yaml.value(text)
        except yaml.YAMLError as error:
            raise ValueError(getattr(error, "problem", None) or str(error)) from error
        if not isinstance(config, dict):
            raise ValueError("it is not a mapping of names to values")
    return config, text


def _population_state(folder: Path) -> tuple[dict[str, Any], dict[int, float]]:
    """Configuration of a population, and its members' last performances; empty if there is none."""
    if not is_population(folder):
        return {}, {}
    state = RunFolder(folder).read_state()
    performance = {i: finite(place.performance) for i, place in enumerate(state.members)}
    return state.config.model_dump(), performance


def _versions(folder: Path) -> tuple[dict[str, str], list[str]]:
    """Versions of the libraries that wrote the newest checkpoint, or a note why they are unknown."""
    found = [*folder.glob(f"{MEMBERS}/member_*.zip"), *folder.glob(f"{CHECKPOINTS}/checkpoint_*.zip")]
    if not found:
        return {}, []
    newest = max(found, key=lambda path: path.name.rpartition("_")[2])
    try:
        return dict(itertools.islice(inspect(newest).versions.items(), _MOST_LIBRARIES)), []
    except (CheckpointError, FileNotFoundError) as error:  # damaged, or replaced by a run that goes on
        return {}, [f"versions of libraries: {error}"]
