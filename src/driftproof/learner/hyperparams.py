"""Hyper-parameters: a base value that users set, a schedule that multiplies it, and a function that applies it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from driftproof._arguments import check_number
from driftproof._text import did_you_mean
from driftproof.settings.schedules import Factor, Schedule, base_and_schedule
from driftproof.state import CheckpointError
from driftproof.state.schema import anything, check, mapping


@dataclass
class Hyperparameter:
    """One hyper-parameter of the agent.

    Attributes:
        base: Value set by the constructor, a user or a population.
        bounds: Bounds of valid values, as arguments of :func:`check_number`.
        whole: Whether it is an integer.
        schedule: Factor of the base as a function of the remaining progress.
        apply: Writes a new current value to the object that uses it; ``None``: it is read from here.
        unused: Setting that it needs to have an effect in this agent; ``None``: it has an effect.
        neutral: Value that a state means which was written before the hyper-parameter existed; ``None``: there is none.
    """

    base: float
    bounds: Mapping[str, float]
    whole: bool = False
    schedule: Factor | None = None
    apply: Callable[[float], None] | None = None
    unused: str | None = None
    neutral: float | None = None
    current: float = 0.0

    def __post_init__(self) -> None:
        self.base = int(self.base) if self.whole else float(self.base)

    def advance(self, progress_remaining: float) -> None:
        """Set the current value for this point of training."""
        value = self.base if self.schedule is None else self.base * self.schedule(progress_remaining)
        self.current = int(value) if self.whole else value
        if self.apply is not None:
            self.apply(self.current)


class Hyperparameters(MutableMapping[str, float]):
    """Hyper-parameters of an agent that may change while it trains, by name.

    ``hyperparams["learning_rate"]`` is the base value, and setting it is the only way to change it; from then on the
    current value is the base times the schedule, see :meth:`current`. Only optional ones are added and removed.

    Args:
        entries: The hyper-parameters.
        fixed: Names of the agent's other settings, and why they cannot change.
    """

    def __init__(self, entries: Mapping[str, Hyperparameter], fixed: Mapping[str, str]) -> None:
        self._entries = dict(entries)
        self._fixed = dict(fixed)
        self._progress = 1.0
        self.advance(1.0)

    @property
    def fixed(self) -> Mapping[str, str]:
        """Settings that cannot change while training, each with the reason."""
        return dict(self._fixed)

    @property
    def unused(self) -> Mapping[str, str]:
        """Hyper-parameters without effect in this agent, each with the setting that it needs."""
        return {name: entry.unused for name, entry in self._entries.items() if entry.unused is not None}

    def current(self, name: str) -> float:
        """The current value: base times schedule."""
        return self._entry(name).current

    def advance(self, progress_remaining: float) -> None:
        """Apply all schedules for this point of training, from 1 at its beginning to 0 at its end."""
        self._progress = progress_remaining
        for entry in self._entries.values():
            entry.advance(progress_remaining)

    def at(self, name: str, progress_remaining: float) -> float:
        """Base times schedule at a point of training, from 1 at its beginning to 0 at its end."""
        entry = self._entry(name)
        return entry.base if entry.schedule is None else float(entry.base * entry.schedule(progress_remaining))

    def add(self, name: str, entry: Hyperparameter) -> None:
        """Add an optional hyper-parameter."""
        self._fixed.pop(name, None)
        self._entries[name] = entry
        entry.advance(self._progress)

    def act(self, name: str, apply: Callable[[float], None]) -> None:
        """Apply a hyper-parameter with this function from now on."""
        entry = self._entry(name)
        entry.apply = apply
        entry.advance(self._progress)

    def remove(self, name: str, reason: str) -> None:
        """Remove an optional hyper-parameter; using its name afterwards raises an error with the reason."""
        self._entries.pop(name, None)
        self._fixed[name] = reason

    def override(self, name: str, value: float) -> None:
        """Set the current value until the next :meth:`advance`, for controllers; the base stays."""
        self._entry(name).current = value

    def schedule(self, name: str) -> Schedule | None:
        """The schedule as it was given: a function of the remaining progress."""
        factor = self._entry(name).schedule
        return None if factor is None else factor.function

    def set_schedule(self, name: str, schedule: Schedule) -> None:
        """Follow another schedule from now on: the current value is what the function returns."""
        entry = self._entry(name)
        base, factor = base_and_schedule(name, schedule)
        self.check(name, base)
        entry.schedule = factor
        self[name] = base

    def check(self, name: str, value: Any) -> None:
        """Raise the error that setting this value would raise."""
        self._check_bounds(name, value)
        entry = self._entry(name)
        if entry.unused is not None and value != entry.base:
            raise ValueError(f"{name}={value!r} would have no effect: it needs {entry.unused}")

    def _check_bounds(self, name: str, value: Any) -> None:
        entry = self._entry(name)
        check_number(name, value, **entry.bounds)
        if entry.whole and value != int(value):
            raise ValueError(f"Invalid {name}: {value!r}; must be a whole number")

    def state_dict(self) -> dict[str, float]:
        """The base values."""
        return {name: entry.base for name, entry in self._entries.items()}

    def check_state_dict(self, state: Any) -> None:
        """Raise a ``CheckpointError`` unless these are valid values of some or all of the agent's hyper-parameters."""
        check("hyperparams", state, mapping(anything))
        if unknown := [name for name in state if name not in self._entries]:
            raise CheckpointError(f"the agent has no hyper-parameters {unknown[:5]}, or was constructed without them")
        for name, value in state.items():
            base = self._entries[name].base
            if type(value) is type(base) and value == base:  # An exploit loads many states that hardly differ.
                continue
            try:
                # Values without effect are accepted in a saved state.
                self._check_bounds(name, value)
            except ValueError as error:
                raise CheckpointError(f"hyperparams: {error}") from error

    def restore_point(self) -> Callable[[], None]:
        """Returns a function that restores the present values."""
        before, progress = {name: (entry.base, entry.current) for name, entry in self._entries.items()}, self._progress

        def restore() -> None:
            self._progress = progress
            for name, (base, current) in before.items():
                entry = self._entries[name]
                entry.base, entry.current = base, current
                if entry.apply is not None:
                    entry.apply(current)

        return restore

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Set base values; none is set if one of them is invalid. Warns of hyper-parameters that the state lacks."""
        self.check_state_dict(state)
        if missing := [
            name for name, entry in self._entries.items() if name not in state and entry.base != entry.neutral
        ]:
            warnings.warn(f"the state lacks the hyper-parameters {missing}: they keep their values", stacklevel=2)
        for name, value in state.items():
            if value != self._entries[name].base:  # An exploit loads many states that hardly differ.
                self._set(name, value)

    def __getitem__(self, name: str) -> float:
        return self._entry(name).base

    def __setitem__(self, name: str, value: float) -> None:
        self.check(name, value)
        self._set(name, value)

    def _set(self, name: str, value: float) -> None:
        entry = self._entry(name)
        entry.base = int(value) if entry.whole else float(value)
        entry.advance(self._progress)

    def __delitem__(self, name: str) -> None:
        raise TypeError(f"hyper-parameters cannot be removed: {name!r}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"Hyperparameters({dict(self)})"

    def _entry(self, name: str) -> Hyperparameter:
        if name in self._entries:
            return self._entries[name]
        if name in self._fixed:
            raise KeyError(f"{name!r} cannot change while the agent trains: {self._fixed[name]}")
        raise KeyError(f"there is no hyper-parameter {name!r}; {did_you_mean(name, self._entries)}")
