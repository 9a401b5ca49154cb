"""Results of evaluations in a run folder, with what they were obtained on."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import BaseModel, BeforeValidator, Field

from driftproof._files import read_json

IN_SAMPLE = "IN SAMPLE"
_MOST_EPISODES = 1_000_000
_MOST_SCORES = 1_000
"""Limits of the number of items drawn."""


@dataclass(frozen=True)
class Label:
    """What results were obtained on.

    Attributes:
        text: In words.
        in_sample: Whether training saw it; ``None``: unknown.
        is_history: Whether it is a market's history.
    """

    text: str
    in_sample: bool | None
    is_history: bool = False

    @property
    def word(self) -> str:
        """In one word or two."""
        return {True: IN_SAMPLE, False: "not seen in training", None: "not labelled"}[self.in_sample]


@dataclass(frozen=True)
class Score:
    """Returns of some episodes.

    Attributes:
        name: Name of the agent, baseline or attack.
        mean: Mean return.
        low: Lower end of the mean's interval; the mean itself if unknown.
        high: Upper end of the interval.
        returns: Return of every episode, if known.
        episodes: Number of episodes.
        epsilon: Radius of the attack.
        note: How the interval was obtained, or why there is none.
        length: Mean steps of an episode, if known.
    """

    name: str
    mean: float
    low: float
    high: float
    returns: tuple[float, ...] = ()
    episodes: int | None = None
    epsilon: float = 0.0
    note: str = ""
    length: float | None = None


@dataclass(frozen=True)
class PhaseScore:
    """Returns in a phase of the drift, or in several with the same values.

    Attributes:
        phases: Numbers of the phases.
        values: Value of each change.
        score: Returns.
        is_seen: Whether training had such a phase.
        is_last: Whether training ended in it.
    """

    phases: tuple[int, ...]
    values: dict[str, float]
    score: Score
    is_seen: bool
    is_last: bool


def finite(value: Any) -> Any:
    """Replace numbers that are not finite by NaN, before pydantic validates."""
    return math.nan if value is None or (isinstance(value, float) and not math.isfinite(value)) else value


Number: TypeAlias = Annotated[float, Field(strict=True), BeforeValidator(finite)]
"""A float; ``null`` and values that are not finite, as of a diverged agent, are NaN."""
Numbers: TypeAlias = Annotated[list[Number], Field(max_length=_MOST_EPISODES)]

_Text: TypeAlias = Annotated[str, Field(strict=True, max_length=2_000)]


class _Result(BaseModel):
    """Of ``evaluation.json``: the agent's, or a baseline's."""

    mean: Number
    interval: Annotated[list[Number], Field(min_length=2, max_length=2)] | None = None
    returns: Numbers = []
    interval_note: _Text = ""
    length: Number | None = None
    episodes: Annotated[int, Field(strict=True, ge=0, le=2**53)] | None = None

    def score(self, name: str) -> Score:
        low, high = self.interval or (self.mean, self.mean)
        count = self.episodes or len(self.returns) or None
        return Score(
            name, self.mean, low, high, tuple(self.returns), count, note=self.interval_note, length=self.length
        )


class _Scope(BaseModel):
    text: _Text
    in_sample: bool | None = None
    split: _Text | None = None

    def label(self) -> Label:
        return Label(f"evaluated {self.text}", self.in_sample, self.split is not None)


class _Scoped(BaseModel):
    scope: _Scope | None = None


S = TypeVar("S", bound=_Scoped)


class _Evaluation(_Result, _Scoped):
    baselines: Annotated[dict[str, _Result], Field(max_length=_MOST_SCORES)] = {}


class _Attack(BaseModel):
    attack: Annotated[str, Field(strict=True)]
    epsilon: Annotated[float, Field(strict=True, ge=0, le=1e9)]
    mean: Number
    low: Number
    high: Number
    returns: Numbers

    def score(self) -> Score:
        ends = (self.mean, self.low, self.high)
        return Score(self.attack, *ends, tuple(self.returns), len(self.returns), self.epsilon)


class _Attacks(_Scoped):
    """``attacks.json``."""

    results: Annotated[list[_Attack], Field(max_length=_MOST_SCORES)]


class _Phase(_Result):
    phases: Annotated[list[Annotated[int, Field(strict=True, ge=0, le=2**53)]], Field(max_length=_MOST_EPISODES)]
    values: Annotated[dict[str, Number], Field(max_length=_MOST_SCORES)]
    is_seen: Annotated[bool, Field(strict=True)]
    is_last: Annotated[bool, Field(strict=True)]


class _Phases(_Scoped):
    """``phases.json``."""

    phases: Annotated[list[_Phase], Field(max_length=_MOST_SCORES)]


def read_evaluation(path: Path, config: Mapping[str, Any], labels: dict[str, Label]) -> list[Score]:
    """Results of the agent and of baselines."""
    found = _read(path, _Evaluation, config, labels)
    return [] if found is None else [found.score("agent"), *(of.score(name) for name, of in found.baselines.items())]


def read_attacks(path: Path, config: Mapping[str, Any], labels: dict[str, Label]) -> list[Score]:
    """Results under attacks."""
    found = _read(path, _Attacks, config, labels)
    return [] if found is None else [result.score() for result in found.results]


def read_phases(path: Path, config: Mapping[str, Any], labels: dict[str, Label]) -> list[PhaseScore]:
    """Results in phases of the drift."""
    found = _read(path, _Phases, config, labels)
    return [
        PhaseScore(tuple(each.phases), each.values, each.score(""), each.is_seen, each.is_last)
        for each in ([] if found is None else found.phases)
    ]


def _read(path: Path, model: type[S], config: Mapping[str, Any], labels: dict[str, Label]) -> S | None:
    """Read a file of results, and add its label; ``None`` if there is none."""
    if not os.path.lexists(path):
        return None
    found = read_json(path, model, advice="remove it, or evaluate again", allow_nan=True)
    scope = found.scope
    labels[path.name] = _earlier_label(config) if scope is None else scope.label()
    return found


def _earlier_label(config: Mapping[str, Any]) -> Label:
    """The label of results that were written before they had one, as far as the configuration tells it."""
    env = config.get("env")
    env = env if isinstance(env, Mapping) else {}
    own, other = (
        each if isinstance(each := env.get(name), Mapping) else {} for name in ("kwargs", "evaluation_kwargs")
    )
    unknown = "by an earlier version, which did not record on what; evaluate again"
    if not str(env.get("id", "")).endswith("driftproof/Market-v0"):
        return Label(f"evaluated {unknown}", None)
    trained, evaluated = own.get("split", "train"), {**own, **other}.get("split", "train")
    if "data" not in other and (trained == evaluated or "all" in (trained, evaluated)):
        return Label(
            f"evaluated {IN_SAMPLE}, on the split that training saw ({evaluated}), {unknown} dates", True, True
        )
    return Label(f"evaluated on split {evaluated}, {unknown} dates", None, True)
