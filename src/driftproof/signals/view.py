"""An agent's observations of a market, and the score of its actions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from driftproof.envs import FeatureConfig
from driftproof.envs.trading import feature_config
from driftproof.nn.distributions import SquashedGaussian
from driftproof.nn.normalization import LIMIT, WHOLE
from driftproof.ppo import DistributionalPPO

Array = npt.NDArray[np.float32]
Wide = npt.NDArray[np.float64]


def _learned_with(agent: DistributionalPPO) -> FeatureConfig | None:
    """Features of the market that the agent is in, if it is in one."""
    env = agent.get_env()
    if env is None or not env.has_attr("features"):
        return None
    features = env.get_attr("features")[0]
    return features if isinstance(features, FeatureConfig) else None


class MarketView:
    """Observations of an agent trained in a market, and the meaning of its outputs.

    Args:
        agent: Agent trained in ``driftproof/Market-v0``, ``driftproof/RegimeMarket-v0`` or an environment with the same
            spaces.
        features: Features that it was trained with; ``None``: those of its environment, if it has one, or the default.

    Attributes:
        features: Features that it observes.
        observes_position: Whether its position is the last number of observations.
        is_discrete: Whether its actions are SELL, HOLD and BUY, rather than a position.

    Raises:
        ValueError: The agent has other observations or actions.
    """

    def __init__(self, agent: DistributionalPPO, features: FeatureConfig | Mapping[str, Any] | None = None) -> None:
        if not agent.policy.predicts_distributions:
            raise TypeError(
                f"{type(agent.policy).__name__} derives from Stable-Baselines3's ActorCriticPolicy and predicts no "
                "quantiles: signals need a policy of driftproof"
            )
        self.features = feature_config(_learned_with(agent) if features is None else features)
        shape, width = agent.observation_space.shape, len(self.features.names)
        if shape not in ((width,), (width + 1,)):
            raise ValueError(
                f"the agent observes {agent.observation_space}, but these are {width} features, or {width + 1} numbers "
                f"with the position: {', '.join(self.features.names)}. Pass the features that it learned with, as in "
                "features={'window': 32, 'horizons': [1, 8]}"
            )
        self.observes_position = shape == (width + 1,)
        space = agent.action_space
        self.is_discrete = isinstance(space, spaces.Discrete)
        if space not in (spaces.Discrete(3), spaces.Box(-1, 1, (1,), np.float32)):
            raise ValueError(
                f"the agent's actions are {space}; signals need positions from -1 to 1, Box(-1, 1, (1,)), or "
                "Discrete(3): SELL, HOLD and BUY"
            )
        self._is_squashed = isinstance(agent.policy.distribution, SquashedGaussian)
        self._normalisers: list[tuple[Wide, Wide, float]] = []
        """Mean, standard deviation and limit of ``VecNormalize`` and of the agent's normaliser, where they exist."""
        statistics = agent.normalizer.state_dict()
        if statistics and statistics["norm_obs"]:
            mean, var = (np.asarray(statistics["obs_rms"][""][name], np.float64) for name in ("mean", "var"))
            self._normalisers.append((mean, np.sqrt(var + statistics["epsilon"]), float(statistics["clip_obs"])))
        if agent.policy.normalizer is not None:
            own = agent.policy.normalizer.moments[WHOLE]
            self._normalisers.append((own.mean.numpy(), own.std.numpy(), LIMIT))
        self._for_position = [(float(mean[-1]), float(std[-1]), limit) for mean, std, limit in self._normalisers]

    def normalised(self, features: Array) -> Array:
        """Normalised features ``[..., F]``, the policy's input."""
        width = features.shape[-1]
        for mean, std, limit in self._normalisers:
            features = np.clip((features - mean[:width]) / std[:width], -limit, limit).astype(np.float32)
        return features

    def normalised_position(self, position: float) -> float:
        """A normalised position, the policy's input."""
        for mean, std, limit in self._for_position:
            position = min(max((float(np.float32(position)) - mean) / std, -limit), limit)
        return position

    def position(self, outputs: Sequence[float]) -> float:
        """The agent's deterministic position, from the policy's outputs for one action."""
        if self.is_discrete:
            return float(outputs.index(max(outputs)) - 1)
        return math.tanh(outputs[0]) if self._is_squashed else min(max(outputs[0], -1.0), 1.0)

    def positions(self, outputs: Wide) -> Wide:
        """The agent's deterministic positions ``[...]``, of the policy's outputs for actions ``[..., n]``."""
        if self.is_discrete:
            chosen: Wide = outputs.argmax(-1) - 1.0
            return chosen
        return self.scores(outputs)

    def scores(self, outputs: Wide) -> Wide:
        """The mean position, or P(BUY) - P(SELL), ``[...]``, of the policy's outputs for actions ``[..., n]``."""
        if not self.is_discrete:
            return np.tanh(outputs[..., 0]) if self._is_squashed else np.clip(outputs[..., 0], -1, 1)
        odds = np.exp(outputs - outputs.max(-1, keepdims=True))
        scores: Wide = (odds[..., 2] - odds[..., 0]) / odds.sum(-1)
        return scores
