"""Statistics of observations whose sensors drift, anchored on the first observations of episodes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from driftproof.state.schema import Rule, count, number, numbers, table

Array = npt.NDArray[np.float64]

_EPSILON = 1e-8
_CONSTANT = 1e-12
"""Variance up to which a sensor has not moved: the smallest that single precision shows of numbers near 1."""
_CLIP, _CLIP_STARTS = 5.0, 4.0
"""Standard deviations beyond which observations count less; they may be from before a shift is noticed."""
_UNCLIPPED = 200
"""Observations before which none is clipped."""
_FEWEST_STARTS = 16
"""Number of episodes before the search for shifts starts; after a shift, half of that."""
_START_MEMORY = 200
"""Episodes that the statistics of first observations remember."""
_DEVIATIONS = (12.0, 6.0, 4.5, 3.5)
"""Standard deviations by which the last one, two, three, four first observations must all deviate in one direction."""
_STANDARD_ERRORS = {8: 6.0, 16: 5.0, 32: 5.0, 64: 5.0}
"""Standard errors by which the mean of so many last first observations must deviate: the wider episodes begin, the more
of them it takes."""
_LONGEST = max(_STANDARD_ERRORS)
_LEAST_SPREAD = 0.05
"""Least standard deviation of first observations, relative to that of all: smaller shifts do not matter."""
_TRIAL = 256
"""Observations after which a shift is undone if they fit the former statistics better."""
_BETTER = 0.85
"""How much smaller the misfit must be for that: a policy that fails after a shift sees unusual things anyway."""
_USUAL_MEMORY = 2_000
"""Observations that tell what the policy usually sees."""
_MISFIT = 9.0
"""Largest square of a standardised deviation that counts: what is unusual either way tells nothing."""
_LEAST_USUAL, _LARGEST_STD, _LARGEST_MEAN = 0.1, 3.0, 1.5
"""Networks get sensors with standard deviations and means in between as they are."""
_AMPLIFIED_STD = 1 / 3
"""Standard deviation of those with smaller ones."""
_LARGEST_CREEP, _CREEP_ERRORS = 0.25, 4.0
"""Movement of first observations that is not followed until a shift was found: so many standard deviations of all
observations, or standard errors of the mean of the first ones when the search for shifts starts."""
_CERTAIN_CREEP = 0.75
"""Such a movement that is no chance, in standard deviations of first observations: three errors of the mean of 16."""
_LARGEST_AMPLIFIED, _USUAL_DEVIATION = 1.5, 0.5
"""Deviation that sensors of a small scale are amplified to, at most; those that ever deviate as much as the second stay
as they are."""
_LEAST_TARGET = 1e-7
_LARGEST_GROWN, _CLEARLY = 1.0, 1.5
"""Standard deviation up to which a normalised sensor may grow because of what the policy does, and how much its square
must exceed the variance known: a scale that only grows would follow every noise."""
FIXED = 1_000
"""Observations after which that decision is final."""
_LARGEST = 1e38
"""Largest observation, about that of float32: squares of differences must be finite."""


class AnchoredStatistics:
    """Mean and variance of vectors ``[size]`` that forget, ignore outliers, and follow shifts of episode starts.

    Observations are normalised to the first statistics, within bounds: sensors of a usual scale stay what they are
    until they drift, and are then mapped back to what they were.

    Args:
        size: Numbers of an observation.
        memory: Observations that mean and variance remember.
    """

    def __init__(self, size: int, memory: int) -> None:
        self.size, self.memory = size, memory
        self.mean, self.variance, self.count = np.zeros(size), np.ones(size), 0.0
        self.start_mean, self.start_variance = np.zeros(size), np.zeros(size)
        self.start_count, self.start_weight = 0.0, 0.0
        """Episodes in the variance and in the mean of starts; the latter begins anew after a shift."""
        self.target_mean, self.target_std, self.is_fixed = np.zeros(size), np.ones(size), 0
        """What observations are normalised to, and whether it has been decided."""
        self.fractional = np.zeros(size)
        """1 for sensors that have not only shown whole numbers. The others may be flags, which are rare at times."""
        self.largest = np.zeros(size)
        """Largest deviation from the mean until then."""
        self.recent, self.known = np.zeros((_LONGEST, size)), 0
        """The last first observations, and how many of them there are since the last shift."""
        self.creep = np.zeros(size)
        """Movement of first observations that the mean has not followed: chance, or a slow shift."""
        self.shift, self.on_trial = np.zeros(size), 0
        """The last shift, and how many more observations decide whether to keep it."""
        self.usual_mean, self.usual_variance, self.usual_count = np.zeros(size), np.zeros(size), 0.0
        """Where the policy usually is, relative to where episodes began lately; its variance; observations."""
        self.misfit, self.former_misfit = 0.0, 0.0
        self.shifts, self.undone = 0, 0
        self.free = 0
        """Observations for which the scale may shrink, too."""

    @property
    def std(self) -> Array:
        """Standard deviation; 1 of sensors that have not moved yet, which stay as they are."""
        return np.where(self.variance > _CONSTANT, np.sqrt(self.variance + _EPSILON), 1.0)

    @property
    def moments(self) -> tuple[Array, Array]:
        """What to subtract from observations, and what to divide them by."""
        mean, std = (self.target_mean, self.target_std) if self.is_fixed else self._target(is_final=False)
        scale = self.std / std
        return self.mean - mean * scale, scale

    def _target(self, is_final: bool) -> tuple[Array, Array]:
        own = self.std
        # The ratio is exactly 1 for scales within the bounds: these sensors stay exactly as they are. Until it is
        # decided, less is changed: a few observations in a row differ less than many do, and are on one side.
        is_small = (own < _LEAST_USUAL) & (self.fractional > 0) & is_final
        largest_mean = _LARGEST_MEAN if is_final else _LARGEST_STD
        ratio = np.where(is_small, _AMPLIFIED_STD, np.minimum(own, _LARGEST_STD)) / own
        # Sensors that hardly ever move, such as contacts, may move often once the policy has learned.
        largest = np.where(self.largest < _USUAL_DEVIATION, self.largest, np.inf)
        ratio = np.minimum(ratio, np.maximum(_LARGEST_AMPLIFIED / np.maximum(largest, _EPSILON), 1.0))
        # Rounding may exceed the bound, which states are checked against.
        return np.clip(self.mean * ratio, -largest_mean, largest_mean), np.minimum(own * ratio, _LARGEST_STD)

    def fix(self) -> None:
        """Fix what observations are normalised to: the current statistics."""
        if not self.is_fixed:
            (self.target_mean, self.target_std), self.is_fixed = self._target(is_final=True), 1
            self.creep = np.zeros(self.size)  # Up to here, the mean has followed all observations.
            self.variance = np.where(self.variance > _CONSTANT, self.variance, 1.0 - _EPSILON)

    def restart(self) -> None:
        """Restart the statistics for networks with new weights: soon, only new observations count."""
        self.count, self.is_fixed, self.largest = min(self.count, float(_UNCLIPPED)), 0, np.zeros(self.size)

    def rewire(self, order: npt.NDArray[np.int64], signs: Array) -> None:
        """From now on, component ``i`` measures what ``order[i]`` measured, times ``signs[i]``."""
        for name in ("mean", "start_mean", "target_mean", "shift", "creep", "recent", "usual_mean"):
            setattr(self, name, getattr(self, name)[..., order] * signs)
        for name in ("variance", "start_variance", "target_std", "largest", "fractional", "usual_variance"):
            setattr(self, name, getattr(self, name)[order])

    def has_shifted(self, start: Array) -> int:
        """Number of the latest first observations, this one included, that show a shift; 0: none."""
        if not self._is_settled:
            return 0
        self.recent, self.known = np.concatenate((self.recent[1:], start[None])), min(self.known + 1, _LONGEST)
        recent = self.recent[-self.known :]
        z = (recent - self.start_mean) / self._start_std()
        z = np.where((self.fractional > 0) | (recent != np.rint(recent)), z, 0.0)
        if np.abs(z[-1]).max() > _DEVIATIONS[-1]:  # The last one is among them, however many they are.
            for last, deviation in enumerate(_DEVIATIONS, start=1):
                if len(z) >= last and ((z[-last:] > deviation).all(0) | (z[-last:] < -deviation).all(0)).any():
                    return last
        z = np.minimum(np.maximum(z, -_CLIP_STARTS), _CLIP_STARTS)
        for last, limit in _STANDARD_ERRORS.items():
            if len(z) < last or self.start_weight < 2 * last:
                break
            # The reference knows these observations, and is itself a mean of a limited number.
            known = last / self.start_weight
            error = (1 - known) * math.sqrt(1 / last + 1 / (self.start_weight - last))
            if np.abs(z[-last:].sum(0) / last).max() > limit * error:
                return last
        return 0

    def move(self, last: int) -> None:
        """Move the mean by the shift that the last first observations show."""
        self.fix()
        shifted = self.recent[-last:].mean(0)
        # What the mean has not followed is chance, unless it is certain; part of it are the observations of a window.
        has_crept = np.abs(self.creep) > _CERTAIN_CREEP * self._start_std()
        known = last / self.start_weight if last in _STANDARD_ERRORS and not self.shifts else 0.0
        self.shift = (shifted - self.start_mean) / np.where(has_crept, 1, 1 - known)
        self.mean, self.creep = self.mean + np.where(has_crept, self.creep, 0) + self.shift, np.zeros(self.size)
        # More episodes refine the estimate, and the mean follows it; their spread may have changed too.
        self.start_mean, self.start_weight = shifted, float(last)
        self.start_count = min(self.start_count, _FEWEST_STARTS / 4)
        self.known = 0
        self.on_trial, self.misfit, self.former_misfit = _TRIAL, 0.0, 0.0
        self.shifts += 1

    def learn_start(self, start: Array) -> None:
        """Update with the first observation of an episode."""
        difference = apart = start - self.start_mean
        if self._is_settled:
            bound = _CLIP_STARTS * self._start_std()
            difference = np.minimum(np.maximum(difference, -bound), bound)
            apart = np.minimum(np.maximum(apart, -2 * bound), 2 * bound)  # Or the spread would never reach the bound.
        self.start_weight = min(self.start_weight + 1, _START_MEMORY)
        step = difference / self.start_weight
        self.start_mean = self.start_mean + step
        if self.shifts > 0:
            self.mean = self.mean + step
        elif self._is_settled:
            self.creep = self.creep + step
            error = _CREEP_ERRORS * self._start_std() / math.sqrt(_FEWEST_STARTS)
            has_crept = np.abs(self.creep) > np.maximum(_LARGEST_CREEP * self.std, error)
            if (has_crept & (self.fractional > 0)).any():
                self.mean, self.creep, self.shifts = self.mean + self.creep, np.zeros(self.size), 1
        self.start_count = min(self.start_count + 1, _START_MEMORY)
        weight = 1 / self.start_count
        self.start_variance = (1 - weight) * (self.start_variance + weight * apart**2)

    def learn(self, observations: Array) -> None:
        """Update with observations ``[n, size]``."""
        if self.on_trial > 0:
            self._judge(observations)
        self.fractional = np.maximum(self.fractional, (observations != np.rint(observations)).any(0))
        difference = observations - self.mean
        if self.on_trial == 0:
            self._learn_usual(observations)
        if self.count >= _UNCLIPPED:
            bound = _CLIP * self.std
            difference = np.clip(difference, -bound, bound)
        self.count = min(self.count + len(observations), max(self.memory, len(observations)))
        weight = len(observations) / self.count
        moved = difference.mean(0)
        if self.is_fixed and self._is_settled:
            # Episodes begin as before, so that the policy has moved the mean, not the sensors. Nor has a scale changed
            # because the policy keeps still, or travels: networks get what it does, within bounds.
            square = (difference**2).mean(0)
            if self.free == 0:
                square = square * (self.target_std / np.maximum(self.target_std, _LARGEST_GROWN)) ** 2
            follows = (square > _CLEARLY * self.variance) | ((self.free > 0) & (square > _CONSTANT))
            self.variance = np.where(follows, (1 - weight) * self.variance + weight * square, self.variance)
            self.free = max(self.free - len(observations), 0)
            return
        if not self.is_fixed:
            self.largest = np.maximum(self.largest, np.abs(difference - weight * moved).max(0))
        self.mean = self.mean + weight * moved
        between = weight * (1 - weight) * moved**2
        self.variance = (1 - weight) * self.variance + weight * difference.var(0) + between

    def _learn_usual(self, observations: Array) -> None:
        """Follow what the policy sees, relative to the latest first observations: these follow slow shifts, too."""
        is_enough = self.known >= _FEWEST_STARTS
        difference = observations - (self.recent[-self.known :].mean(0) if is_enough else self.start_mean)
        self.usual_count = min(self.usual_count + len(difference), max(_USUAL_MEMORY, len(difference)))
        weight = len(difference) / self.usual_count
        moved = difference.mean(0) - self.usual_mean
        self.usual_mean = self.usual_mean + weight * moved
        self.usual_variance = (1 - weight) * (self.usual_variance + weight * moved**2) + weight * difference.var(0)

    def forget(self) -> None:
        """Let new observations count more: as if only a tenth of the memory were filled."""
        self.count, self.free = min(self.count, self.memory / 10), 3 * self.memory

    def _judge(self, observations: Array) -> None:
        """Undo a shift if what follows is more usual without it: episodes begin elsewhere, no sensor moved."""
        spread = self.usual_variance + _LEAST_SPREAD**2 * (self.variance + _EPSILON)
        now, before = (
            np.minimum((observations - start - self.usual_mean) ** 2 / spread, _MISFIT)
            for start in (self.start_mean, self.start_mean - self.shift)
        )
        self.misfit += float(now.sum())
        self.former_misfit += float(before.sum())
        self.on_trial = max(self.on_trial - len(observations), 0)
        if self.on_trial == 0 and self.former_misfit < _BETTER * self.misfit:
            self.mean = self.mean - self.shift
            self.undone += 1

    @property
    def _is_settled(self) -> bool:
        """Whether enough episodes are known to tell a shift from chance."""
        return min(self.start_count, self.start_weight) >= _FEWEST_STARTS / (2 if self.shifts else 1)

    def _start_std(self) -> Array:
        return np.sqrt(np.maximum(self.start_variance, _LEAST_SPREAD**2 * (self.variance + _EPSILON)))

    def state_dict(self) -> dict[str, Any]:
        """A copy of the statistics."""
        arrays = {name: torch.from_numpy(getattr(self, name).copy()) for name in _ARRAYS}
        return arrays | {name: getattr(self, name) for name in (*_NUMBERS, *_COUNTS)}

    def rule(self) -> Rule:
        """Schema of :meth:`state_dict`."""
        bounds: dict[str, Any] = {"at_least": -_LARGEST, "at_most": _LARGEST}
        rules: dict[str, Rule] = dict.fromkeys(_ARRAYS, numbers((self.size,), [torch.float64], **bounds))
        variance = numbers((self.size,), [torch.float64], at_least=0, at_most=_LARGEST**2)
        rules |= dict.fromkeys(("variance", "start_variance", "largest", "usual_variance"), variance)
        rules["fractional"] = numbers((self.size,), [torch.float64], at_least=0, at_most=1)
        rules["recent"] = numbers((_LONGEST, self.size), [torch.float64], **bounds)
        rules["target_std"] = numbers((self.size,), [torch.float64], at_least=_LEAST_TARGET, at_most=_LARGEST_STD)
        rules |= dict.fromkeys(_NUMBERS, number(at_least=0, at_most=_LARGEST**2)) | dict.fromkeys(_COUNTS, count())
        rules["known"] = count(at_most=_LONGEST)
        return table(rules)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checked state."""
        for name in _ARRAYS:
            setattr(self, name, torch.as_tensor(state[name]).double().cpu().numpy().copy())
        for name in _NUMBERS:
            setattr(self, name, float(state[name]))
        for name in _COUNTS:
            setattr(self, name, int(state[name]))


_ARRAYS = (
    *("mean", "variance", "start_mean", "start_variance", "recent", "shift", "creep"),
    *("target_mean", "target_std", "largest", "fractional", "usual_mean", "usual_variance"),
)
_NUMBERS = ("count", "start_count", "start_weight", "usual_count", "misfit", "former_misfit")
_COUNTS = ("known", "on_trial", "shifts", "undone", "is_fixed", "free")
