"""The last action and reward as part of observations, for agents whose memory outlasts episodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from driftproof.envs.drift import saves_state


class LastStep(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Adds the last action, its reward, and whether an episode starts to observations.

    An agent with ``lasting_memory`` can then see how well it does in a world that it knows from before, as in
    Duan et al., "RL²", 2016 (arXiv 1611.02779). At the start of an episode they are those of the end of the one before;
    a reset with a seed forgets them. They are added at the end of vectors, and as ``"last_step"`` to dicts; other
    observations become dicts with ``"observation"`` and ``"last_step"``.

    Args:
        env: The environment; discrete actions become one number for each option.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        inside, size = env.observation_space, spaces.flatdim(env.action_space) + 2
        bound = np.full(size, np.inf, np.float32)
        extra = spaces.Box(-bound, bound, dtype=np.float32)
        self._last = np.zeros(size - 1, np.float32)
        self._is_vector = isinstance(inside, spaces.Box) and len(inside.shape) == 1
        if isinstance(inside, spaces.Box) and self._is_vector:
            low, high = np.concatenate((inside.low, -bound)), np.concatenate((inside.high, bound))
            self.observation_space = spaces.Box(low.astype(np.float32), high.astype(np.float32), dtype=np.float32)
        elif isinstance(inside, spaces.Dict):
            self.observation_space = spaces.Dict({**inside.spaces, "last_step": extra})
        else:
            self.observation_space = spaces.Dict({"observation": inside, "last_step": extra})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self._last = np.zeros_like(self._last)
        observation, info = self.env.reset(seed=seed, options=options)
        return self._with_last(observation, is_start=True), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        flat: npt.NDArray[Any] = np.asarray(spaces.flatten(self.env.action_space, action))
        self._last = np.append(flat, float(reward)).astype(np.float32)
        return self._with_last(observation, is_start=False), reward, terminated, truncated, info

    def _with_last(self, observation: Any, is_start: bool) -> Any:
        last = np.append(self._last, np.float32(is_start))
        if self._is_vector:
            return np.concatenate((observation, last)).astype(np.float32)
        return {
            **(observation if isinstance(observation, Mapping) else {"observation": observation}),
            "last_step": last,
        }

    @property
    def continues(self) -> bool:
        """Whether the environment inside can save its state, so that :meth:`state_dict` is complete."""
        return saves_state(self.env)

    def state_dict(self) -> dict[str, Any]:
        """The last action and reward, and the state of the environment inside."""
        return {"last": self._last.copy(), "environment": self.env.get_wrapper_attr("state_dict")()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue as the saved environment would have."""
        self._last = np.array(state_dict["last"], np.float32)
        self.env.get_wrapper_attr("load_state_dict")(state_dict["environment"])
