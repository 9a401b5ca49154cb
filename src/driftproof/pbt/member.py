"""A member of a population: trains an agent a few updates at a time, and copies a donor in an exploit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.type_aliases import MaybeCallback

from driftproof.pbt.stores import CheckpointFormat
from driftproof.ppo import DistributionalPPO
from driftproof.runs.ranking import episode_mean
from driftproof.settings.population import OptimizerExploitStrategy
from driftproof.state import CheckpointError

MakeAgent: TypeAlias = Callable[[int], DistributionalPPO]
"""Returns the agent of a member, by its id, with its own environment."""
Metric: TypeAlias = Callable[[DistributionalPPO], float]
"""Returns the performance of an agent."""
MakeCallback: TypeAlias = Callable[[], BaseCallback]
"""Creates the callback of a member's training."""


def mean_reward(agent: DistributionalPPO) -> float:
    """Mean return of recent episodes; NaN if none has ended yet."""
    mean = episode_mean(agent.ep_info_buffer)
    return float("nan") if mean is None else mean


class Trainee:
    """An agent that is trained in slices and evaluated after each.

    Args:
        agent: The agent, with an environment.
        total_updates: Updates of the whole training; schedules run over them.
        metric: Returns the agent's performance.
        callback: Callback of the training.
    """

    def __init__(
        self,
        agent: DistributionalPPO,
        total_updates: int,
        metric: Metric = mean_reward,
        callback: MaybeCallback = None,
    ) -> None:
        self.agent, self.total_updates, self.metric, self.callback = agent, total_updates, metric, callback

    @property
    def updates(self) -> int:
        """Updates done so far."""
        return self.agent.num_timesteps // self._steps

    @property
    def is_done(self) -> bool:
        """Whether all updates are done."""
        return self.updates >= self.total_updates

    @property
    def _steps(self) -> int:
        return self.agent.n_steps * self.agent.n_envs

    def train(self, updates: int) -> float:
        """Train ``updates`` more updates, at most until the end, and return the performance.

        Raises:
            RuntimeError: A callback stopped the training earlier.
        """
        agent = self.agent
        agent.pause_at = agent.num_timesteps + updates * self._steps
        if agent.num_timesteps == 0:
            agent.learn(self.total_updates * self._steps, self.callback)
        elif not self.is_done:
            agent.resume(self.callback)
        if agent.num_timesteps < min(agent.pause_at, self.total_updates * self._steps):
            raise RuntimeError("a callback stopped a member's training before the end of its slice")
        return float(self.metric(agent))

    def count_from(self, updates: int) -> None:
        """Set a new agent's counters as if ``updates`` updates were done."""
        counts = self.agent.counters.state_dict()
        total, done = self.total_updates * self._steps, updates * self._steps
        progress = 1 - done / total
        counts |= {"num_timesteps": done, "total_timesteps": total, "progress_remaining": progress}
        self.agent.counters.load_state_dict(counts)
        self.agent.state_was_loaded()

    def set_hyperparams(self, hyperparams: Mapping[str, Any]) -> None:
        """Set the agent's hyper-parameters; all of them, or none if one is invalid."""
        self._check(hyperparams)
        for name, value in hyperparams.items():
            self.agent.hyperparams[name] = value

    def inherit(
        self,
        parameters: Mapping[str, Any],
        tree_format: CheckpointFormat,
        hyperparams: Mapping[str, Any],
        optimizer: OptimizerExploitStrategy = "copy",
    ) -> None:
        """Exploit: copy a donor's parameters and set new hyper-parameters; environments and counters stay.

        Args:
            parameters: The donor's ``get_parameters()``, or its states by component; from legacy files only the
                policy's state dict, which resets the optimizer and variance gradient scaling with a ``FutureWarning``.
            tree_format: Format of ``parameters``.
            hyperparams: The new hyper-parameters.
            optimizer: ``"copy"`` the donor's optimizer moments, or ``"reset"`` them.

        Raises:
            CheckpointError: The parameters do not fit; nothing has changed.
        """
        agent = self.agent
        self._check(hyperparams)
        states = dict(parameters)
        name = "optimizer" if "optimizer" in states else "policy.optimizer"
        if optimizer == "reset" and tree_format == "v2_full_parameters" and states.get(name) is not None:
            if not isinstance(states[name], Mapping):
                raise CheckpointError(f"the state of {name} is not a dict")
            states[name] = {**states[name], "state": {}}
        agent.set_parameters(states)
        self.set_hyperparams(hyperparams)

    def _check(self, hyperparams: Mapping[str, Any]) -> None:
        for name, value in hyperparams.items():
            self.agent.hyperparams.check(name, value)
