"""Environments of an agent: their states, last observations, recurrent states and recent episodes."""

from __future__ import annotations

import copy
import math
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnv

from driftproof.learner.episode_returns import EpisodeReturns
from driftproof.learner.rollout import HostObservation
from driftproof.nn.exploration import StateDependentExploration
from driftproof.nn.policies import DistributionalPolicy
from driftproof.nn.types import PolicyState
from driftproof.ppo.counters import Counters
from driftproof.ppo.environments import (
    can_continue,
    check_environment_states,
    environment_states,
    generator_states,
    lasting_states,
    restore_environments,
    restore_generators,
    restore_lasting,
    without_learning,
)
from driftproof.ppo.normalizer import Normalizer
from driftproof.state import CheckpointError, compare, copy_tree
from driftproof.state.generators import check_generators_within
from driftproof.state.schema import (
    Rule,
    anything,
    check,
    count,
    items,
    mapping,
    number,
    numbers,
    optional,
    row,
    table,
)

_NUMBERS = (int, float, np.number)
_MOST_ENVIRONMENTS = 2**20
_MOST_SEEDS = 2**32


class Worker:
    """Owns the environments, their last observations, recurrent states and recent episodes.

    A component of the agent, named ``rollout`` in its tree: where the next rollout starts. Observations, recurrent
    states and episodes are also attributes of the agent, with Stable-Baselines3's names.

    Args:
        counters: Counters of the agent.
        normalizer: Observation normaliser.
    """

    policy: DistributionalPolicy
    seed: int | None
    """Seed of the agent."""
    window: int
    """Number of recent episodes that are averaged in the log."""

    def __init__(self, counters: Counters, normalizer: Normalizer) -> None:
        self.counters, self.normalizer = counters, normalizer
        self.env: VecEnv | None = None
        self.observation: HostObservation | None = None
        """The last observations; ``None``: the next rollout starts new episodes."""
        self.starts: npt.NDArray[np.bool_] | None = None
        """Whether the last observation is the first of an episode ``[N]``."""
        self.state: PolicyState | None = None
        """Recurrent state before the last observation; ``None``: the initial state."""
        self.episodes: deque[dict[str, Any]] | None = None
        """Returns and lengths of recent episodes."""
        self.successes: deque[float] | None = None
        """Whether recent episodes were successes, where environments report it."""
        self.in_rollout = False
        """Whether a rollout is partly collected, or was not trained on yet."""
        self.reset_seed: int | None = None
        """Seed of the environments' last reset, if they were not stepped since."""
        self.returns: EpisodeReturns | None = None
        """Returns of running episodes up to now, for the drift alarm."""
        self._before_reset: list[dict[str, Any]] | None = None
        """Lasting state of the environments, such as drift, before that reset."""

    @property
    def is_whole(self) -> bool:
        """Whether the next rollout can be reproduced exactly from the saved state."""
        if self.in_rollout:
            return False
        if self.env is None or self.observation is None:
            return self.counters.num_timesteps == 0
        return self.reset_seed is not None or can_continue(self.env)

    @property
    def recurrent_state(self) -> PolicyState:
        """Recurrent state before the last observation, the initial state at the start of episodes."""
        if self.state is not None:
            return self.state
        if self.env is None:
            raise AttributeError("there is no recurrent state without environments: call set_env(env) first")
        return self.policy.initial_state(self.env.num_envs)

    def reset_state(self, is_collecting: bool = False) -> None:
        """Reset the recurrent state of running episodes, which go on: the next observations are not their first.

        Args:
            is_collecting: Whether a rollout is being collected: training on it resets states only where episodes start.
        """
        self.state = None
        if is_collecting and self.starts is not None and self.observation is not None:
            self.starts = np.ones(len(self.starts), dtype=bool)
        if self.returns is not None:
            self.returns.weights_were_replaced()

    def state_dict(self) -> dict[str, Any]:
        """Recent episodes, and the state of running ones, if there are any."""
        state: dict[str, Any] = {
            "episodes": _episodes(self.episodes),
            "successes": [float(success) for success in self.successes or ()],
            "lasting": None,
            "running": None,
        }
        if self.policy.exploration is not None:
            # The next rollout draws new ones, but predict() uses these until then.
            state["exploration"] = self.policy.exploration.matrices
        if self.env is None:
            return state
        state["lasting"] = self._before_reset if self.reset_seed is not None else lasting_states(self.env)
        if self.observation is None:
            return state
        memory = self.recurrent_state
        state["running"] = {
            "observation": self.observation,
            "starts": np.asarray(self.starts),
            "memory": {"actor": memory.actor, "critic": memory.critic},
            "reset_seed": self.reset_seed,
            "environments": None if self.reset_seed is not None else environment_states(self.env),
            "returns": None if self.returns is None else self.returns.state_dict(),
        }
        return state

    def check_state_dict(self, state_dict: Any) -> None:
        """Raise a ``CheckpointError`` unless a rollout of this agent can start from this state."""
        rules: dict[str, Rule] = {
            "episodes": _check_columns,
            "successes": items(number()),
            "running": optional(self._check_running),
        }
        # Older files lack the lasting state of environments.
        others: dict[str, Rule] = {"lasting": optional(items(_lasting))}
        if self.policy.exploration is not None:
            others["exploration"] = _matrices(self.policy.exploration)
        check("rollout", state_dict, table(rules, others))
        check_generators_within(state_dict, ("rollout",))

    def _check_running(self, running: Any, path: tuple[Any, ...]) -> None:
        # Older files lack the returns.
        others: dict[str, Rule] = {"returns": anything}
        names = ("observation", "starts", "memory", "reset_seed", "environments")
        table(dict.fromkeys(names, anything), others)(running, path)
        numbers((None,), [np.bool_])(running["starts"], (*path, "starts"))
        envs = len(running["starts"])
        if not 1 <= envs <= _MOST_ENVIRONMENTS:
            raise CheckpointError(f"the rollout has {envs} environments")
        memory = self.policy.initial_state(1)
        rules: dict[str, Rule] = {
            "observation": self._observations(envs),
            "starts": anything,
            "memory": table({name: _recurrent_state(getattr(memory, name), envs) for name in PolicyState._fields}),
            "reset_seed": optional(count(at_most=_MOST_SEEDS)),
            "environments": optional(anything),
        }
        table(rules, {"returns": optional(EpisodeReturns.rule(envs))})(running, path)
        if running["environments"] is not None:
            check_environment_states(self.env, envs, running["environments"], (*path, "environments"))

    def _observations(self, envs: int) -> Rule:
        """Schema of the policy's observations; normalised ones are floats, whatever the environment's dtype."""
        space, normalised = self.policy.observation_space, self.normalizer.is_used
        if isinstance(space, spaces.Dict):
            return table({key: _observation(part, envs, normalised) for key, part in space.items()})
        return _observation(space, envs, normalised)

    def restore_point(self) -> Callable[[], None]:
        """Returns a function that restores the present state of the worker, and of environments that have one."""
        env, exploration, before = self.env, self.policy.exploration, dict(vars(self))
        matrices = None if exploration is None else exploration.matrices
        returns = copy.copy(self.returns)
        lasting = places = generators = None
        # Environments have no state before the first reset.
        if env is not None and self.observation is not None:
            lasting, places, generators = copy_tree(
                (lasting_states(env), environment_states(env), generator_states(env))
            )

        def restore() -> None:
            vars(self).update(before)
            if self.returns is not None:
                vars(self.returns).update(vars(returns))
            if exploration is not None and matrices is not None:
                exploration.put_in_force(matrices)
            if env is not None and lasting is not None:
                restore_lasting(env, lasting)
            if env is not None and places is not None:
                restore_environments(env, places)
            if env is not None and generators is not None:
                restore_generators(env, generators)

        return restore

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state, if the environments can; otherwise start new episodes."""
        self.check_state_dict(state_dict)
        lasting = state_dict.get("lasting")
        if self.policy.exploration is not None and "exploration" in state_dict:
            self.policy.exploration.put_in_force(state_dict["exploration"])
        self.episodes = deque(_infos(state_dict["episodes"]), maxlen=self.window)
        self.successes = deque(state_dict["successes"], maxlen=self.window)
        self.observation, self.in_rollout, self.reset_seed = None, False, None
        env, running = self.env, state_dict["running"]
        if env is None:
            return
        if lasting is not None and not restore_lasting(env, lasting):
            warnings.warn(
                "the saved drift does not fit these environments (other drift, or another number): they begin anew",
                stacklevel=2,
            )
            return
        self._before_reset = lasting
        if running is None:
            if self.counters.num_timesteps == 0 and self.seed is not None:
                env.seed(self.seed)  # No episode has started: seed as at construction.
            return
        if len(running["starts"]) != env.num_envs:
            return
        observation = self._restart(env, running)
        if observation is not None:
            self._go_on(observation, running)

    def settle(self, force_reset: bool | None, state_dict: Mapping[str, Any] | None) -> None:
        """After a state was loaded, start new episodes or continue the running ones.

        Args:
            force_reset: Start new episodes; ``False``: continue, since the environments were not stepped since the
                state was saved; ``None``: continue if the environments can.
            state_dict: The loaded state; ``None``: there was none.
        """
        running = None if state_dict is None else state_dict["running"]
        if force_reset:
            self.observation = None
        if force_reset is not False or self.observation is not None or self.env is None or running is None:
            return
        if len(running["starts"]) == self.env.num_envs:
            self._go_on(running["observation"], running)

    def _go_on(self, observation: Any, running: Mapping[str, Any]) -> None:
        memory, device = running["memory"], self.policy.device
        self.observation, self.starts = observation, np.array(running["starts"], dtype=bool)
        self.state = PolicyState(*(tuple(t.to(device) for t in memory[name]) for name in PolicyState._fields))
        if self.returns is not None and running.get("returns") is not None:
            self.returns.load_state_dict(running["returns"], self.starts)

    def restart(self, seed: int) -> None:
        """Seed and reset the environments, so that these episodes can be started again elsewhere."""
        assert self.env is not None
        self._before_reset = lasting_states(self.env)
        self.env.seed(seed)
        self.observation = self.env.reset()  # type: ignore[assignment]
        self.starts, self.state = np.ones(self.env.num_envs, dtype=bool), None
        self.reset_seed = seed

    def _restart(self, env: VecEnv, running: Mapping[str, Any]) -> Any:
        """Reset the environments as before; returns their observations, or ``None`` if that is impossible."""
        seed = running["reset_seed"]
        if seed is not None:
            env.seed(seed)
            observation = without_learning(env)
            self.reset_seed = seed
            if compare(observation, running["observation"]):
                warnings.warn(
                    "environments that were seeded and reset as before returned other observations: training will not "
                    "continue exactly",
                    stacklevel=2,
                )
            return observation
        if running["environments"] is None:
            return None
        if not restore_environments(env, running["environments"]):
            warnings.warn(
                "these environments, or the wrappers around them, cannot restore the saved state: new episodes begin",
                stacklevel=2,
            )
            return None
        return running["observation"]


def _episodes(infos: Iterable[Mapping[str, Any]] | None) -> dict[str, Any]:
    """Numbers reported for recent episodes, as columns; missing ones are NaN."""
    rows = [{key: float(x) for key, x in info.items() if isinstance(x, _NUMBERS)} for info in infos or ()]
    keys = dict.fromkeys(key for row in rows for key in row)
    return {key: np.array([row.get(key, np.nan) for row in rows]) for key in keys}


def _infos(columns: Mapping[str, Any]) -> list[dict[str, float]]:
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    infos = [dict(zip(columns, row, strict=True)) for row in rows]
    return [{key: int(x) if key == "l" else x for key, x in info.items() if not math.isnan(x)} for info in infos]


def _check_columns(value: Any, path: tuple[Any, ...]) -> None:
    mapping(numbers((None,), [np.float64], finite=False))(value, path)
    if len({len(column) for column in value.values()}) > 1:
        raise CheckpointError("the columns of the rollout's episodes have different lengths")
    for name in ("r", "l") if value else ():  # Averaged for the log.
        numbers((None,), [np.float64])(value.get(name), (*path, name))


def _lasting(value: Any, path: tuple[Any, ...]) -> None:
    if not isinstance(value, dict) or "specification" not in value:
        raise CheckpointError("the lasting state of the rollout's environments has no specification")


def _matrices(exploration: StateDependentExploration) -> Rule:
    """Schema of exploration matrices ``[envs, features, dim]``."""
    inner = numbers((None, exploration.features, exploration.dim), [torch.float32], tensors_only=True)

    def rule(value: Any, path: tuple[Any, ...]) -> None:
        inner(value, path)
        if not 1 <= len(value) <= _MOST_ENVIRONMENTS:
            raise CheckpointError(f"the rollout has exploration matrices for {len(value)} environments")

    return rule


def _recurrent_state(example: tuple[Any, ...], envs: int) -> Rule:
    """Schema of recurrent states ``[layers, envs, units]``."""
    return row(*(numbers((t.shape[0], envs, *t.shape[2:]), [t.dtype], tensors_only=True) for t in example))


def _observation(space: spaces.Space[Any], envs: int, normalised: bool) -> Rule:
    shape = (envs, *(space.shape or ()))
    if isinstance(space, spaces.Discrete):
        return numbers(shape, [np.dtype(space.dtype)], at_least=0, at_most=float(space.n - 1))
    if isinstance(space, spaces.MultiBinary):
        return numbers(shape, [np.dtype(space.dtype)], at_least=0, at_most=1)
    if isinstance(space, spaces.MultiDiscrete):
        inner = numbers(shape, [np.dtype(space.dtype)], at_least=0)

        def rule(value: Any, path: tuple[Any, ...]) -> None:
            inner(value, path)
            if (np.asarray(value) >= space.nvec).any():
                raise CheckpointError(f"the rollout's last observations are outside {space}")

        return rule
    return numbers(shape, [np.dtype(space.dtype), *([np.float32, np.float64] if normalised else [])])
