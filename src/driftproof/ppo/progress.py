"""Where training is: what has been counted, random generators, and the edge of the rollout."""

from __future__ import annotations

import math
import random
import warnings
from collections import deque
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium.spaces import Dict
from stable_baselines3.common.vec_env import VecEnv

from driftproof._arguments import check_count, check_number
from driftproof.nn.policies import PolicyState
from driftproof.ppo.environments import (
    can_continue,
    environment_states,
    generator_states,
    lasting_states,
    restore_environments,
    restore_generators,
    restore_lasting,
    without_learning,
)
from driftproof.state import compare

if TYPE_CHECKING:
    from driftproof.ppo.algorithm import DistributionalPPO

_NUMBERS = (int, float, np.number)
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

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Count on from there."""
        if wrong := set(state_dict) ^ set(self.state_dict()):
            raise ValueError(f"the state lacks, or should not have, {', '.join(sorted(map(repr, wrong)))}")
        check_number("progress_remaining", state_dict["progress_remaining"], at_most=1)
        for name, value in state_dict.items():
            if name != "progress_remaining":
                check_count(name, value)
        for name in _COUNTS:
            setattr(self._agent, name, state_dict[name.strip("_")])
        self._agent._current_progress_remaining = float(state_dict["progress_remaining"])
        self.skipped_in_a_row = state_dict["skipped_in_a_row"]


class Generators:
    """Random generators of Python, NumPy, torch and the environments."""

    def __init__(self, agent: DistributionalPPO) -> None:
        self._agent = agent

    def state_dict(self) -> dict[str, Any]:
        """All states. Environments that hide their generators are left out."""
        version, words, gauss = random.getstate()
        # As an array: hundreds of numbers one by one would be most of what there is to save.
        state: dict[str, Any] = {"python": (version, np.array(words, np.uint32), gauss)}
        state["numpy"] = np.random.get_state(legacy=False)
        state["torch"] = torch.get_rng_state()
        state["cuda"] = torch.cuda.get_rng_state(self._agent.device) if self._agent.device.type == "cuda" else None
        state["environments"] = None if self._agent.env is None else generator_states(self._agent.env)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Draw the numbers from now on that would have been drawn from then on."""
        version, words, gauss = state_dict["python"]
        random.setstate((version, tuple(words.tolist()), gauss))
        np.random.set_state(state_dict["numpy"])
        torch.set_rng_state(state_dict["torch"].cpu())
        if state_dict["cuda"] is not None and self._agent.device.type == "cuda":
            torch.cuda.set_rng_state(state_dict["cuda"].cpu(), self._agent.device)
        env, states = self._agent.env, state_dict["environments"]
        if env is not None and states is not None and len(states) == env.num_envs:
            restore_generators(env, states)


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

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there, if the environments can; otherwise new episodes begin."""
        agent = self._agent
        lasting = state_dict.get("lasting")  # Older files know nothing of it.
        if wrong := {"lasting", *state_dict} ^ {"episodes", "successes", "lasting", "running"}:
            raise ValueError(f"the state lacks, or should not have, {', '.join(sorted(map(repr, wrong)))}")
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
        memory = self._checked(running)
        observation = self._restart(env, running)
        if observation is None:
            return
        agent._last_obs, agent._last_episode_starts = observation, np.array(running["starts"], dtype=bool)
        agent.state, agent._forget = memory, False

    def _checked(self, running: Mapping[str, Any]) -> PolicyState:
        """What is remembered, if that and the observations are of the agent's shapes."""
        agent, count = self._agent, len(running["starts"])
        spaces = agent.observation_space
        parts = spaces.spaces if isinstance(spaces, Dict) else {"": spaces}
        observation = running["observation"] if isinstance(spaces, Dict) else {"": running["observation"]}
        shapes = {key: np.shape(part) for key, part in observation.items()}
        if shapes != {key: (count, *(part.shape or ())) for key, part in parts.items()}:
            raise ValueError(f"the last observations have shapes {shapes}, and the space is {spaces}")
        memory = PolicyState(
            *(tuple(t.to(agent.device) for t in running["memory"][who]) for who in PolicyState._fields)
        )
        for ours, theirs in zip(agent.policy.initial_state(count), memory, strict=True):
            if [t.shape for t in ours] != [t.shape for t in theirs]:
                raise ValueError("what is remembered of running episodes has other shapes than the agent's memory")
        return memory

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
            check_count("reset_seed", seed)
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
