"""Small tasks that need memory: a policy that sees only the present observation cannot solve them."""

from __future__ import annotations

from typing import Any, TypeAlias

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box, Discrete

_Vector: TypeAlias = npt.NDArray[np.float32]


class MemoryCue(gymnasium.Env[_Vector, np.int64]):
    """A cue is shown at the first step, then come ``length`` steps of noise; the last action must name the cue.

    Observation: the cue as one-hot, or noise in its place, then "this is the cue", then "answer now". Reward is 1 for
    the right answer and 0 for everything else, so the mean return is the share of right answers. A policy without
    memory gets 1/``cues``.

    Args:
        cues: Number of different cues.
        length: Steps between cue and answer.
    """

    def __init__(self, cues: int = 4, length: int = 8) -> None:
        if cues < 2 or length < 1:
            raise ValueError(f"cues must be at least 2 and length at least 1, got {cues} and {length}")
        self.cues = cues
        self.length = length
        self.observation_space = Box(0.0, 1.0, (cues + 2,), np.float32)
        self.action_space = Discrete(cues)
        self.cue = 0
        self.step_count = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[_Vector, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self.cue = int(self.np_random.integers(self.cues))
        self.step_count = 0
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[_Vector, float, bool, bool, dict[str, Any]]:
        over = self.step_count == self.length
        reward = float(over and int(action) == self.cue)
        self.step_count += 1
        return self._observe(), reward, over, False, {}

    def _observe(self) -> _Vector:
        observation: _Vector = np.zeros(self.cues + 2, np.float32)
        if self.step_count == 0:
            observation[self.cue] = 1
        else:
            observation[: self.cues] = self.np_random.random(self.cues)
        observation[-2:] = self.step_count == 0, self.step_count == self.length
        return observation


class RepeatPrevious(gymnasium.Env[np.int64, np.int64]):
    """One of four symbols is shown at every step; the action must name the one of four steps ago.

    The reward is ±1, divided by the number of answers, so the return goes from -1 to 1; guessing earns -0.5.
    """

    SYMBOLS, DELAY, LENGTH = 4, 4, 52

    def __init__(self) -> None:
        self.observation_space = self.action_space = Discrete(self.SYMBOLS)
        self.shown: list[int] = []

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.int64, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self.shown = []
        return self._next(), {}

    def step(self, action: np.int64) -> tuple[np.int64, float, bool, bool, dict[str, Any]]:
        step, reward = len(self.shown) - 1, 0.0
        if step >= self.DELAY:
            is_right = int(action) == self.shown[step - self.DELAY]
            reward = (1.0 if is_right else -1.0) / (self.LENGTH - self.DELAY)
        return self._next(), reward, step + 1 >= self.LENGTH, False, {}

    def _next(self) -> np.int64:
        symbol: np.int64 = self.np_random.integers(self.SYMBOLS)
        self.shown.append(int(symbol))
        return symbol


class HideVelocities(gymnasium.ObservationWrapper[_Vector, Any, Any]):
    """CartPole with position and angle only.

    Args:
        env: A CartPole.
    """

    VISIBLE = (0, 2)

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        inside, visible = env.observation_space, list(self.VISIBLE)
        assert isinstance(inside, Box)
        self.observation_space = Box(inside.low[visible], inside.high[visible])

    def observation(self, observation: Any) -> _Vector:
        seen: _Vector = observation[list(self.VISIBLE)]
        return seen


def cartpole_no_velocity(**kwargs: Any) -> gymnasium.Env[Any, Any]:
    """``driftproof/CartPoleNoVelocity-v0``: CartPole with position and angle only."""
    return HideVelocities(gymnasium.make("CartPole-v1", **kwargs))
