"""Changes of observations, actions and rewards.

A schedule gives one number, and a change applies it. Changes are immutable, so that environments may share them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

from driftproof._arguments import check_count, check_number
from driftproof._registry import CHANGES, Registry
from driftproof.envs._specs import to_plain
from driftproof.envs.schedules import Schedule, schedule


@dataclass(frozen=True)
class Change:
    """A change of an environment.

    Args:
        schedule: Schedule of the change's number, or its plain form.
    """

    registry: ClassVar[Registry] = CHANGES

    schedule: Schedule

    def __post_init__(self) -> None:
        object.__setattr__(self, "schedule", schedule(self.schedule))

    @property
    def kind(self) -> str:
        """Name of the change in plain values."""
        return self.registry.name(type(self))

    @property
    def name(self) -> str:
        """Name of the change in ``info["drift"]``."""
        return self.kind

    def check(self, env: gymnasium.Env[Any, Any]) -> None:
        """Raise unless the environment fits the change."""

    def to_dict(self) -> dict[str, Any]:
        """The change as plain values, for :func:`driftproof.envs.change`."""
        plain: dict[str, Any] = to_plain(self)
        return plain


class Dice:
    """Random numbers of a change, besides those of its schedule.

    Args:
        seed: Seed, different for every change of an environment.
    """

    def __init__(self, seed: Sequence[int]) -> None:
        self.seed = tuple(seed)
        self.generator = np.random.default_rng([*seed, 1])

    def permutation(self, number: int, size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The permutation with a number; only number 0 is the identity. The same number gives the same permutation."""
        return _permutation((*self.seed, number), size) if number else np.arange(size)

    def normal(self, number: int, size: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        """The standard normal vector with a number; number 0 is zero. The same number gives the same vector."""
        return _normal((*self.seed, number), size) if number else np.zeros(size)

    def signs(self, number: int, size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The vector of 1 and -1 with a number; only number 0 has no -1. The same number gives the same vector."""
        return _signs((*self.seed, number), size) if number else np.ones(size, np.int64)


@functools.lru_cache(1024)
def _permutation(seed: tuple[int, ...], size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    generator = np.random.default_rng([*seed, 2])
    while True:
        order = generator.permutation(size)
        if (order != np.arange(size)).any():
            return order


@functools.lru_cache(1024)
def _normal(seed: tuple[int, ...], size: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.random.default_rng([*seed, 3]).normal(size=size)


@functools.lru_cache(1024)
def _signs(seed: tuple[int, ...], size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    generator = np.random.default_rng([*seed, 4])
    while True:
        signs = 1 - 2 * generator.integers(2, size=size)
        if (signs < 0).any():
            return signs


@dataclass(frozen=True)
class ObservationChange(Change):
    """A change of observations.

    Args:
        schedule: Schedule of the change's number.
        indices: Indices of the changed numbers in the flattened observation; ``None``: all.
        key: Key of the changed part of a dict of observations.
    """

    indices: Sequence[int] | None = None
    key: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.indices is not None:
            object.__setattr__(self, "indices", tuple(self.indices))
            for index in self.indices:
                check_count("indices", index)
            if not self.indices or len(set(self.indices)) < len(self.indices):
                raise ValueError(f"Invalid indices: {list(self.indices)}; must be one or more, each once")

    @property
    def name(self) -> str:
        return self.kind if self.key is None else f"{self.kind}.{self.key}"

    def check(self, env: gymnasium.Env[Any, Any]) -> None:
        space = env.observation_space
        if isinstance(space, spaces.Dict) != (self.key is not None) or self._part(space) is None:
            known = f"; key must be one of {', '.join(map(repr, space))}" if isinstance(space, spaces.Dict) else ""
            raise ValueError(f"{self.kind} with key={self.key!r} has no place in observations of {space}{known}")
        part = self._part(space)
        if not isinstance(part, spaces.Box):
            raise TypeError(f"{self.kind} needs observations that are a Box, not {part}")
        size = int(np.prod(part.shape))
        if self.indices is not None and max(self.indices) >= size:
            raise ValueError(f"Invalid indices: {list(self.indices)}; the observation has {size} numbers")
        if self._least > (size if self.indices is None else len(self.indices)):
            raise ValueError(f"{self.kind} needs at least {self._least} numbers")

    _least: ClassVar[int] = 1

    def _part(self, space: spaces.Space[Any]) -> Any:
        return space.spaces.get(self.key) if isinstance(space, spaces.Dict) and self.key is not None else space

    def widened(self, space: spaces.Space[Any]) -> spaces.Space[Any]:
        """The space of changed observations."""
        if isinstance(space, spaces.Dict) and self.key is not None:
            return spaces.Dict({**space.spaces, self.key: self.widened(space[self.key])})
        assert isinstance(space, spaces.Box)
        if not np.issubdtype(space.dtype, np.floating):
            return space  # Integers, such as pixels, are clipped to their range.
        low, high = space.low.reshape(-1).copy(), space.high.reshape(-1).copy()
        which = slice(None) if self.indices is None else list(self.indices)
        with np.errstate(invalid="ignore", over="ignore"):
            low[which], high[which] = self._reach(low[which], high[which])
        return spaces.Box(low.reshape(space.shape), high.reshape(space.shape), dtype=space.dtype)

    def _reach(self, low: Any, high: Any) -> tuple[Any, Any]:
        """Bounds of the results of :meth:`_changed` for numbers within bounds."""
        raise NotImplementedError

    def _changed(self, numbers: Any, value: float, dice: Dice) -> Any:
        """The changed numbers, as a new array: the input belongs to the environment."""
        raise NotImplementedError

    def observe(self, observation: Any, value: float, dice: Dice, space: Any) -> Any:
        """The changed observation, within the widened space."""
        if self.key is not None:
            return {**observation, self.key: self._array(observation[self.key], value, dice, space[self.key])}
        return self._array(observation, value, dice, space)

    def _array(self, observation: Any, value: float, dice: Dice, space: spaces.Box) -> Any:
        array = np.asarray(observation)
        flat = array.reshape(-1)
        if self.indices is None:
            changed = self._changed(flat, value, dice)
        else:
            changed = flat.astype(np.result_type(flat, np.float32))
            changed[list(self.indices)] = self._changed(flat[list(self.indices)], value, dice)
        changed = changed.reshape(array.shape)
        if array.dtype.kind != "f":
            changed = np.clip(np.rint(changed), space.low, space.high)
        return changed.astype(array.dtype, copy=False)


class ObservationPermute(ObservationChange):
    """Permutes numbers. The schedule gives the number of the permutation; 0 is the identity."""

    _least = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_not_negative(self, "the number of a permutation")

    def _reach(self, low: Any, high: Any) -> tuple[Any, Any]:
        return low.min(), high.max()

    def _changed(self, numbers: Any, value: float, dice: Dice) -> Any:
        return numbers[dice.permutation(round(value), len(numbers))]


class ObservationScale(ObservationChange):
    """Multiplies numbers by the schedule's number."""

    def _reach(self, low: Any, high: Any) -> tuple[Any, Any]:
        products = np.stack([bound * factor for bound in (low, high) for factor in self.schedule.bounds])
        products[np.isnan(products)] = 0  # Infinity times 0: infinite bounds are never reached.
        return products.min(0), products.max(0)

    def _changed(self, numbers: Any, value: float, dice: Dice) -> Any:
        return numbers * value


class ObservationShift(ObservationChange):
    """Adds the schedule's number to numbers."""

    def _reach(self, low: Any, high: Any) -> tuple[Any, Any]:
        least, most = self.schedule.bounds
        return low + least, high + most

    def _changed(self, numbers: Any, value: float, dice: Dice) -> Any:
        return numbers + value


@dataclass(frozen=True)
class ObservationOffset(ObservationChange):
    """Adds a random vector to numbers, as if sensors had been calibrated anew.

    Args:
        schedule: Schedule of the vector's number: the same number gives the same vector, and 0 adds nothing.
        indices: Indices of the changed numbers in the flattened observation; ``None``: all.
        key: Key of the changed part of a dict of observations.
        deviation: Standard deviation of the vector's numbers, which are normal.
    """

    deviation: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_not_negative(self, "the number of a vector")
        check_number("deviation", self.deviation, above=0)

    def _reach(self, low: Any, high: Any) -> tuple[Any, Any]:
        return -np.inf, np.inf

    def _changed(self, numbers: Any, value: float, dice: Dice) -> Any:
        return numbers + self.deviation * dice.normal(round(value), len(numbers))


class ObservationFlip(ObservationChange):
    """Flips signs of random numbers, at least one. The schedule gives the number of the choice; 0 flips none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_not_negative(self, "the number of a choice of signs")

    def _reach(self, low: Any, high: Any) -> tuple[Any, Any]:
        most = np.maximum(np.abs(low), np.abs(high))
        return -most, most

    def _changed(self, numbers: Any, value: float, dice: Dice) -> Any:
        return numbers * dice.signs(round(value), len(numbers))


class ObservationNoise(ObservationChange):
    """Adds Gaussian noise to numbers. The schedule gives its standard deviation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_not_negative(self, "a standard deviation")

    def _reach(self, low: Any, high: Any) -> tuple[Any, Any]:
        return -np.inf, np.inf

    def _changed(self, numbers: Any, value: float, dice: Dice) -> Any:
        return numbers + value * dice.generator.normal(size=len(numbers))


class ActionChange(Change):
    """A change of actions."""

    def act(self, action: Any, value: float, dice: Dice, space: Any) -> Any:
        """The changed action."""
        raise NotImplementedError


class ActionPermute(ActionChange):
    """Permutes actions, or the numbers of an action.

    The schedule gives the number of the permutation; 0 is the identity.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_not_negative(self, "the number of a permutation")

    def check(self, env: gymnasium.Env[Any, Any]) -> None:
        space = env.action_space
        if isinstance(space, spaces.Discrete):
            choices = int(space.n)
        elif isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
            choices = int(np.prod(space.shape))
            for bounds in _bounds(space):
                if len(np.unique(bounds)) > 1:
                    raise ValueError(f"{self.kind} needs the same range for all numbers of an action, not {space}")
        else:
            raise TypeError(
                f"{self.kind} needs actions that are Discrete, MultiDiscrete, MultiBinary or Box, not {space}"
            )
        if choices < 2:
            raise ValueError(
                f"{self.kind} needs two actions, or numbers of an action, to change places; {space} has one"
            )

    def act(self, action: Any, value: float, dice: Dice, space: Any) -> Any:
        number = round(value)
        if isinstance(space, spaces.Discrete):
            start = int(space.start)
            return start + int(dice.permutation(number, int(space.n))[int(action) - start])
        flat = np.asarray(action).reshape(-1)
        return flat[dice.permutation(number, len(flat))].reshape(np.shape(action))


class ActionGain(ActionChange):
    """Multiplies actions by the schedule's number, clipped to their range."""

    def check(self, env: gymnasium.Env[Any, Any]) -> None:
        if not isinstance(env.action_space, spaces.Box):
            raise TypeError(f"{self.kind} needs actions that are a Box, not {env.action_space}")

    def act(self, action: Any, value: float, dice: Dice, space: Any) -> Any:
        return np.clip(np.asarray(action) * value, space.low, space.high).astype(space.dtype)


class RewardChange(Change):
    """A change of rewards."""

    def reward(self, reward: float, value: float) -> float:
        """The changed reward."""
        raise NotImplementedError


class RewardScale(RewardChange):
    """Multiplies rewards by the schedule's number."""

    def reward(self, reward: float, value: float) -> float:
        return reward * value


class RewardSign(RewardChange):
    """Flips the sign of rewards while the schedule's number is negative."""

    def reward(self, reward: float, value: float) -> float:
        return -reward if value < 0 else reward


def _check_not_negative(change: Change, what: str) -> None:
    if change.schedule.bounds[0] < 0:
        raise ValueError(f"{change.kind} needs a schedule of {what}, which is not negative, not {change.schedule}")


def _bounds(space: Any) -> list[Any]:
    if isinstance(space, spaces.Box):
        return [space.low, space.high]
    return [space.nvec, space.start] if isinstance(space, spaces.MultiDiscrete) else []
