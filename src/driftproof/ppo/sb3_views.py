"""Views of an agent for callbacks and scripts written for Stable-Baselines3, computed on access."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from stable_baselines3.common.utils import FloatSchedule
from torch import Tensor

from driftproof.learner.estimates import Estimates
from driftproof.learner.learner import Learner, UpdateSettings
from driftproof.learner.rollout import Rollout
from driftproof.nn.distributions import ActionDistribution
from driftproof.nn.normalization import WHOLE
from driftproof.settings.schedules import Schedule

Array = npt.NDArray[Any]


class RolloutView:
    """The last rollout by the names of Stable-Baselines3's ``RolloutBuffer``: arrays ``[n_steps, n_envs, ...]``.

    Values are the smaller critic's, in units of rewards. Advantages are not normalised.

    Args:
        rollout: The rollout.
        learner: Learner that estimates values and advantages.
        distribution: Distribution of the policy's actions.
        settings: Current settings.
    """

    def __init__(
        self,
        rollout: Rollout,
        learner: Learner,
        distribution: ActionDistribution,
        settings: Callable[[], UpdateSettings],
    ) -> None:
        self._rollout, self._learner, self._distribution, self._settings = rollout, learner, distribution, settings
        self.buffer_size, self.n_envs = rollout.steps, rollout.envs
        self.device = rollout.device

    def size(self) -> int:
        """Number of steps per environment."""
        return self.buffer_size

    @property
    def gamma(self) -> float:
        """Current discount."""
        return float(self._settings().gamma)

    @property
    def gae_lambda(self) -> float:
        """Current λ of GAE."""
        return float(self._settings().gae_lambda)

    @property
    def observations(self) -> Array | dict[str, Array]:
        """Observations of the policy, normalised if ``VecNormalize`` does so, but not by the agent itself."""
        observations = self._rollout.observations
        if isinstance(observations, dict):
            return {key: self._raw(key, part) for key, part in observations.items()}
        return self._raw(WHOLE, observations)

    def _raw(self, key: str, stored: Tensor) -> Array:
        """A part of the observations, as the policy's methods take it."""
        normalizer = self._learner.normalizer
        recorded = None if normalizer is None else normalizer.recorded(self.buffer_size, key)
        stored_array = _array(stored)
        return stored_array if recorded is None else recorded[0].astype(stored_array.dtype)

    @property
    def actions(self) -> Array:
        """Actions of the policy, neither clipped nor scaled ``[n_steps, n_envs, action size]``."""
        shown = self._distribution.shown(self._rollout.actions)
        return _array(shown).reshape(self.buffer_size, self.n_envs, -1)

    @property
    def rewards(self) -> Array:
        """Rewards of the environments."""
        return np.array(self._rollout.rewards)

    @property
    def episode_starts(self) -> Array:
        """1 where an episode starts with this step."""
        return np.array(self._rollout.starts, np.float32)

    @property
    def log_probs(self) -> Array:
        """Log-probabilities of the actions."""
        rollout = self._rollout
        return _array(self._distribution.log_prob(rollout.parameters, rollout.actions))

    @property
    def values(self) -> Array:
        """Values of the observations."""
        return _array(self._estimates.values)

    @property
    def returns(self) -> Array:
        """λ-returns, the targets of the critics."""
        return _array(self._estimates.returns)

    @property
    def advantages(self) -> Array:
        """Generalised advantage estimates."""
        return _array(self._estimates.advantages)

    @cached_property
    def _estimates(self) -> Estimates:
        return self._learner.estimate(self._rollout, self._settings())


class Deferred:
    """A tensor for callbacks that is computed only when used.

    Any attribute, operator or function of torch and NumPy computes the tensor.
    """

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._compute = compute

    @cached_property
    def tensor(self) -> Tensor:
        """The tensor itself."""
        return self._compute()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self.tensor.cpu().numpy(), dtype=dtype)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def plain(value: Any) -> Any:
            if isinstance(value, Deferred):
                return value.tensor
            return type(value)(map(plain, value)) if isinstance(value, list | tuple) else value

        return function(*plain(args), **{key: plain(value) for key, value in (kwargs or {}).items()})

    def __len__(self) -> int:
        return len(self.tensor)

    def __getitem__(self, index: Any) -> Tensor:
        return self.tensor[index]

    def __float__(self) -> float:
        return float(self.tensor)

    def __repr__(self) -> str:
        return repr(self.tensor)

    def __add__(self, other: Any) -> Any:
        return self.tensor + other

    def __sub__(self, other: Any) -> Any:
        return self.tensor - other

    def __mul__(self, other: Any) -> Any:
        return self.tensor * other

    def __truediv__(self, other: Any) -> Any:
        return self.tensor / other

    def __neg__(self) -> Tensor:
        return -self.tensor

    __radd__, __rmul__ = __add__, __mul__


class Scheduled(float, FloatSchedule):
    """The base value of a hyper-parameter that is also callable as Stable-Baselines3's schedule.

    Args:
        base: The base value.
        schedule: Function of the remaining progress, from 1 to 0; ``None``: constant.
    """

    def __new__(cls, base: float, schedule: Schedule | None = None) -> Scheduled:
        return super().__new__(cls, base)

    def __init__(self, base: float, schedule: Schedule | None = None) -> None:
        FloatSchedule.__init__(self, float(base) if schedule is None else schedule)

    __repr__ = float.__repr__

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        return float, (float(self),)


def _array(tensor: Tensor) -> Array:
    return np.array(tensor.detach().cpu().numpy())
