"""One agent of a population, trained a few updates at a time, and how it takes over from another."""

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
"""From a member's id to its agent, with an environment of its own."""
Metric: TypeAlias = Callable[[DistributionalPPO], float]
"""How well an agent does."""
MakeCallback: TypeAlias = Callable[[], BaseCallback]
"""Makes what is called while a member trains."""


def mean_reward(agent: DistributionalPPO) -> float:
    """Mean return of recent episodes; NaN if none has ended yet."""
    mean = episode_mean(agent.ep_info_buffer)
    return float("nan") if mean is None else mean


class Trainee:
    """An agent, how far it is to be trained, and how well it does.

    Args:
        agent: With an environment.
        total_updates: Of the whole training, which schedules see.
        metric: Of its performance.
        callback: For training.
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
        """How many it has done."""
        return self.agent.num_timesteps // self._steps

    @property
    def is_done(self) -> bool:
        """Whether nothing is left of its training."""
        return self.updates >= self.total_updates

    @property
    def _steps(self) -> int:
        return self.agent.n_steps * self.agent.n_envs

    def train(self, updates: int) -> float:
        """Train so many updates, or what is left; how well it does then.

        Raises:
            RuntimeError: A callback ended it before.
        """
        agent = self.agent
        agent.pause_at = agent.num_timesteps + updates * self._steps
        if agent.num_timesteps == 0:
            agent.learn(self.total_updates * self._steps, self.callback)
        elif not self.is_done:
            agent.resume(self.callback)
        if agent.num_timesteps < min(agent.pause_at, self.total_updates * self._steps):
            raise RuntimeError("a callback ended the training of a member, which goes on to the end of its slice")
        return float(self.metric(agent))

    def count_from(self, updates: int) -> None:
        """Let a new agent go on in the middle of a training."""
        counts = self.agent.counters.state_dict()
        total, done = self.total_updates * self._steps, updates * self._steps
        progress = 1 - done / total
        counts |= {"num_timesteps": done, "total_timesteps": total, "progress_remaining": progress}
        self.agent.counters.load_state_dict(counts)
        self.agent.state_was_loaded()

    def set_hyperparams(self, hyperparams: Mapping[str, Any]) -> None:
        """Put hyper-parameters in force; none is set if one of them is wrong."""
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
        """Become another agent, with other hyper-parameters, in one's own environments.

        Args:
            parameters: What its ``get_parameters()`` returned, the same by the names of components, or of legacy files,
                the policy's state dict: then the optimizer begins without moments and variance gradient scaling anew,
                with a ``FutureWarning``.
            tree_format: Which of the two.
            hyperparams: In force from now on.
            optimizer: ``"copy"``: goes on with its moments; ``"reset"``: begins without any.

        Raises:
            CheckpointError: The parameters do not fit; nothing has changed.
        """
        agent = self.agent
        self._check(hyperparams)
        states = dict(parameters)
        name = "optimizer" if "optimizer" in states else "policy.optimizer"
        if optimizer == "reset" and tree_format == "v2_full_parameters" and states.get(name) is not None:
            if not isinstance(states[name], Mapping):
                raise CheckpointError(f"the state of {name} is no dict")
            states[name] = {**states[name], "state": {}}
        agent.set_parameters(states)
        self.set_hyperparams(hyperparams)

    def _check(self, hyperparams: Mapping[str, Any]) -> None:
        for name, value in hyperparams.items():
            self.agent.hyperparams.check(name, value)
