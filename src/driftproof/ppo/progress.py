"""Where training is: what has been counted, random generators, and the edge of the rollout."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnv

from driftproof.nn.exploration import StateDependentExploration
from driftproof.nn.types import PolicyState
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

if TYPE_CHECKING:
    from driftproof.ppo.algorithm import DistributionalPPO

_NUMBERS = (int, float, np.number)
_MOST_OVERRUN = 1e9
_MOST_ENVIRONMENTS = 2**20
_MOST_SEEDS = 2**32
_COUNTS = ("num_timesteps", "_total_timesteps", "_n_updates", "_episode_num")


class Counters:
    """Steps, updates, and how far a planned training is."""

    def __init__(self, agent: DistributionalPPO) -> None:
        self._agent = agent
        self.skipped_in_a_row = 0
        """Minibatches that were not finite, up to now."""

    def state_dict(self) -> dict[str, Any]:
        """The numbers."""
        state: dict[str, Any] = {name.strip("_"): int(getattr(self._agent, name)) for name in _COUNTS}
        state["progress_remaining"] = float(self._agent._current_progress_remaining)
        state["skipped_in_a_row"] = self.skipped_in_a_row
        return state

    def check_state_dict(self, state_dict: Any) -> None:
        """Raise a ``CheckpointError`` unless these are such numbers."""
        rules = {name.strip("_"): count() for name in (*_COUNTS, "skipped_in_a_row")}
        # Below 0 if the last rollout went beyond the plan.
        rules["progress_remaining"] = number(at_least=-_MOST_OVERRUN, at_most=1)
        check("counters", state_dict, table(rules))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Count on from there."""
        self.check_state_dict(state_dict)
        for name in _COUNTS:
            setattr(self._agent, name, int(state_dict[name.strip("_")]))
        self._agent._current_progress_remaining = float(state_dict["progress_remaining"])
        self.skipped_in_a_row = int(state_dict["skipped_in_a_row"])


class Edge:
    """What the next rollout begins with: observations, memories, episodes so far, and where the environments are."""

    def __init__(self, agent: DistributionalPPO) -> None:
        self._agent = agent
        self.reset_seed: int | None = None
        """What environments were seeded with when they were last reset, if nothing has happened since."""
        self._before_reset: list[dict[str, Any]] | None = None
        """What goes on when episodes end, as it was then."""

    @property
    def is_whole(self) -> bool:
        """Whether a rollout can begin elsewhere exactly as it would here."""
        agent = self._agent
        if agent._in_rollout:
            return False
        if agent.env is None or agent._last_obs is None:
            return agent.num_timesteps == 0
        return self.reset_seed is not None or can_continue(agent.env)

    def state_dict(self) -> dict[str, Any]:
        """Episodes that have ended, and if there are any, those that go on."""
        agent = self._agent
        state: dict[str, Any] = {
            "episodes": _episodes(agent.ep_info_buffer),
            "successes": [float(success) for success in agent.ep_success_buffer or ()],
            "lasting": None,
            "running": None,
        }
        if agent.policy.exploration is not None:
            # The next rollout draws its own, but until then actions that are predicted depend on them.
            state["exploration"] = agent.policy.exploration.matrices
        if agent.env is None:
            return state
        state["lasting"] = self._before_reset if self.reset_seed is not None else lasting_states(agent.env)
        if agent._last_obs is None:
            return state
        memory = agent.policy.initial_state(agent.env.num_envs) if agent._forget else agent.state
        state["running"] = {
            "observation": agent._last_obs,
            "starts": np.asarray(agent._last_episode_starts),
            "memory": {"actor": memory.actor, "critic": memory.critic},
            "reset_seed": self.reset_seed,
            "environments": None if self.reset_seed is not None else environment_states(agent.env),
        }
        return state

    def check_state_dict(self, state_dict: Any) -> None:
        """Raise a ``CheckpointError`` unless a rollout of this agent can begin there."""
        rules: dict[str, Rule] = {
            "episodes": _check_columns,
            "successes": items(number()),
            "running": optional(self._check_running),
        }
        # Older files know nothing of what lasts.
        others: dict[str, Rule] = {"lasting": optional(items(_lasting))}
        if self._agent.policy.exploration is not None:
            others["exploration"] = _matrices(self._agent.policy.exploration)
        check("rollout", state_dict, table(rules, others))
        check_generators_within(state_dict, ("rollout",))

    def _check_running(self, running: Any, path: tuple[Any, ...]) -> None:
        table(dict.fromkeys(("observation", "starts", "memory", "reset_seed", "environments"), anything))(running, path)
        numbers((None,), [np.bool_])(running["starts"], (*path, "starts"))
        envs = len(running["starts"])
        if not 1 <= envs <= _MOST_ENVIRONMENTS:
            raise CheckpointError(f"the rollout has {envs} environments")
        memory = self._agent.policy.initial_state(1)
        rules: dict[str, Rule] = {
            "observation": self._observations(envs),
            "starts": anything,
            "memory": table({who: _memory(getattr(memory, who), envs) for who in PolicyState._fields}),
            "reset_seed": optional(count(at_most=_MOST_SEEDS)),
            "environments": optional(anything),
        }
        table(rules)(running, path)
        if running["environments"] is not None:
            env = self._agent.env
            check_environment_states(env, envs, running["environments"], (*path, "environments"))

    def _observations(self, envs: int) -> Rule:
        """What the policy is given: normalised observations are real numbers, whatever the environment's are."""
        space, normalised = self._agent.observation_space, self._agent.normalizer.is_used
        if isinstance(space, spaces.Dict):
            return table({key: _observation(part, envs, normalised) for key, part in space.items()})
        return _observation(space, envs, normalised)

    def restore_point(self) -> Callable[[], None]:
        """What makes the agent, and environments that can tell where they are, again what they are now."""
        agent, env = self._agent, self._agent.env
        names = ("ep_info_buffer", "ep_success_buffer", "_last_obs", "_last_episode_starts", "_forget", "_in_rollout")
        before = {name: getattr(agent, name) for name in (*names, "state") if hasattr(agent, name)}
        own = self.reset_seed, self._before_reset
        matrices = None if agent.policy.exploration is None else agent.policy.exploration.matrices
        lasting = places = generators = None
        # Environments that no episode has begun in yet are nowhere.
        if env is not None and agent._last_obs is not None:
            lasting, places, generators = copy_tree(
                (lasting_states(env), environment_states(env), generator_states(env))
            )

        def restore() -> None:
            for name, value in before.items():
                setattr(agent, name, value)
            self.reset_seed, self._before_reset = own
            if agent.policy.exploration is not None and matrices is not None:
                agent.policy.exploration.put_in_force(matrices)
            if env is not None and lasting is not None:
                restore_lasting(env, lasting)
            if env is not None and places is not None:
                restore_environments(env, places)
            if env is not None and generators is not None:
                restore_generators(env, generators)

        return restore

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there, if the environments can; otherwise new episodes begin."""
        agent = self._agent
        self.check_state_dict(state_dict)
        lasting = state_dict.get("lasting")
        if agent.policy.exploration is not None and "exploration" in state_dict:
            agent.policy.exploration.put_in_force(state_dict["exploration"])
        agent.ep_info_buffer = deque(_infos(state_dict["episodes"]), maxlen=agent._stats_window_size)
        agent.ep_success_buffer = deque(state_dict["successes"], maxlen=agent._stats_window_size)
        agent._last_obs, agent._in_rollout, self.reset_seed = None, False, None
        env, running = agent.env, state_dict["running"]
        if env is None:
            return
        if lasting is not None and not restore_lasting(env, lasting):
            warnings.warn(
                "the environments had drifted, and these do not drift in that way, or are not as many: they begin anew",
                stacklevel=2,
            )
            return
        self._before_reset = lasting
        if running is None:
            if agent.num_timesteps == 0 and agent.seed is not None:
                env.seed(agent.seed)  # As when it was made, for nothing has begun.
            return
        if len(running["starts"]) != env.num_envs:
            return
        observation = self._restart(env, running)
        if observation is not None:
            self._go_on(observation, running)

    def settle(self, force_reset: bool | None, state_dict: Mapping[str, Any] | None) -> None:
        """See to it, after a state was loaded, that episodes begin or go on as the caller wants it.

        Args:
            force_reset: Begin new episodes; ``False``: go on, since the environments have not moved since the state was
                taken; ``None``: as the environments can.
            state_dict: The state; ``None``: there was none.
        """
        agent, running = self._agent, None if state_dict is None else state_dict["running"]
        if force_reset:
            agent._last_obs = None
        if force_reset is not False or agent._last_obs is not None or agent.env is None or running is None:
            return
        if len(running["starts"]) == agent.env.num_envs:
            self._go_on(running["observation"], running)

    def _go_on(self, observation: Any, running: Mapping[str, Any]) -> None:
        agent, memory = self._agent, running["memory"]
        agent._last_obs, agent._last_episode_starts = observation, np.array(running["starts"], dtype=bool)
        agent.state = PolicyState(*(tuple(t.to(agent.device) for t in memory[who]) for who in PolicyState._fields))
        agent._forget = False

    def restart(self, seed: int) -> None:
        """Begin new episodes that can begin again, elsewhere."""
        agent = self._agent
        assert agent.env is not None
        self._before_reset = lasting_states(agent.env)
        agent.env.seed(seed)
        agent._last_obs = agent.env.reset()  # type: ignore[assignment]
        agent._last_episode_starts = np.ones(agent.env.num_envs, dtype=bool)
        agent.state, agent._forget = agent.policy.initial_state(agent.env.num_envs), False
        self.reset_seed = seed

    def _restart(self, env: VecEnv, running: Mapping[str, Any]) -> Any:
        """The observations to go on from, once the environments are there; ``None`` if they cannot be."""
        seed = running["reset_seed"]
        if seed is not None:
            env.seed(seed)
            observation = without_learning(env)
            self.reset_seed = seed
            if compare(observation, running["observation"]):
                warnings.warn(
                    "environments that were seeded and reset as before began otherwise: training will not go on "
                    "exactly as it would have",
                    stacklevel=2,
                )
            return observation
        if running["environments"] is None:
            return None
        if not restore_environments(env, running["environments"]):
            warnings.warn(
                "the environments were where these, or the wrappers around them, cannot go on: new episodes begin",
                stacklevel=2,
            )
            return None
        return running["observation"]


def _episodes(infos: Iterable[Mapping[str, Any]] | None) -> dict[str, Any]:
    """Numbers that were told of recent episodes, as columns; what was not told of one is NaN."""
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
    for name in ("r", "l") if value else ():  # which are averaged for the log
        numbers((None,), [np.float64])(value.get(name), (*path, name))


def _lasting(value: Any, path: tuple[Any, ...]) -> None:
    if not isinstance(value, dict) or "specification" not in value:
        raise CheckpointError("what lasts of the rollout's environments has no specification")


def _matrices(exploration: StateDependentExploration) -> Rule:
    """Exploration matrices ``[envs, features, dim]``."""
    inner = numbers((None, exploration.features, exploration.dim), [torch.float32], tensors_only=True)

    def rule(value: Any, path: tuple[Any, ...]) -> None:
        inner(value, path)
        if not 1 <= len(value) <= _MOST_ENVIRONMENTS:
            raise CheckpointError(f"the rollout has exploration matrices for {len(value)} environments")

    return rule


def _memory(example: tuple[Any, ...], envs: int) -> Rule:
    """Recurrent states ``[layers, envs, units]``."""
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
