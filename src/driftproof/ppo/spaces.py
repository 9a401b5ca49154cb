"""Supported spaces of observations and actions."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from driftproof._arguments import ArgumentError
from driftproof._text import printable


class UnsupportedSpaceError(TypeError, NotImplementedError):
    """A space of an unsupported kind. Stable-Baselines3 raises ``NotImplementedError``."""


_FLATTEN = "; flatten it with gymnasium.wrappers.FlattenObservation(env)"


def check_spaces(observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> None:
    """Refuse observation and action spaces that are not supported."""
    parts = observation_space.values() if isinstance(observation_space, spaces.Dict) else [observation_space]
    for part in parts:
        if not isinstance(part, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
            hint = _FLATTEN if isinstance(part, spaces.Dict | spaces.Tuple) else ""
            raise UnsupportedSpaceError(
                f"observation space {printable(observation_space, 300)} is not supported: use Box, Discrete, "
                f"MultiDiscrete, MultiBinary, or a Dict of these{hint}"
            )
        if np.any(getattr(part, "start", 0)):
            raise ValueError(f"observation space {observation_space} is not supported: {part} must start at 0")
    if not isinstance(action_space, spaces.Box):
        return
    if not np.can_cast(np.float32, action_space.dtype):
        raise TypeError(
            f"action space {action_space} is not supported: a Box needs float32 or float64; for whole numbers use "
            "Discrete or MultiDiscrete"
        )
    if not action_space.is_bounded():
        raise ArgumentError(
            f"action space {printable(action_space, 300)} is not supported: its bounds must be finite; give it some, "
            "gymnasium.wrappers.TransformAction(env, lambda action: action, spaces.Box(-1, 1, env.action_space.shape))"
        )
