"""Where training is: what has been counted, random generators, and the edge of the rollout."""

from __future__ import annotations

import random
import warnings
from collections import deque
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from stable_baselines3.common.vec_env import VecEnv

from driftproof._arguments import check_count, check_number
from driftproof.nn.policies import PolicyState
from driftproof.ppo.environments import (
    environment_states,
    generator_states,
    restore_environments,
    restore_generators,
    without_learning,
)
from driftproof.state import compare

if TYPE_CHECKING:
    from driftproof.ppo.algorithm import DistributionalPPO

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

    @property
    def is_whole(self) -> bool:
        """Whether a rollout can begin elsewhere exactly as it would here."""
        agent = self._agent
        if agent._in_rollout:
            return False
        nothing_yet = agent._last_obs is None or agent._forget or agent.env is None
        return nothing_yet or self.reset_seed is not None or environment_states(agent.env) is not None  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        """Episodes that have ended, and if there are any, those that go on."""
        agent = self._agent
        state: dict[str, Any] = {
            "episodes": _episodes(agent.ep_info_buffer),
            "successes": [float(success) for success in agent.ep_success_buffer or ()],
            "running": None,
        }
        if agent._last_obs is None or agent._forget or agent.env is None:
            return state
        state["running"] = {
            "observation": agent._last_obs,
            "starts": np.asarray(agent._last_episode_starts),
            "memory": {"actor": agent.state.actor, "critic": agent.state.critic},
            "reset_seed": self.reset_seed,
            "environments": None if self.reset_seed is not None else environment_states(agent.env),
        }
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there, if the environments can; otherwise new episodes begin."""
        agent = self._agent
        if wrong := set(state_dict) ^ {"episodes", "successes", "running"}:
            raise ValueError(f"the state lacks, or should not have, {', '.join(sorted(map(repr, wrong)))}")
        episodes = [dict(zip(state_dict["episodes"], row, strict=True)) for row in _rows(state_dict["episodes"])]
        agent.ep_info_buffer = deque(episodes, maxlen=agent._stats_window_size)
        agent.ep_success_buffer = deque(state_dict["successes"], maxlen=agent._stats_window_size)
        agent._last_obs, agent._in_rollout = None, False
        running = state_dict["running"]
        if running is None or agent.env is None or len(running["starts"]) != agent.env.num_envs:
            return
        observation = self._restart(agent.env, running)
        if observation is None:
            return
        memory = running["memory"]
        agent._last_obs, agent._last_episode_starts = observation, np.array(running["starts"])
        actor, critic = (tuple(part.to(agent.device) for part in memory[who]) for who in ("actor", "critic"))
        agent.state = PolicyState(actor, critic)
        agent._forget = False

    def restart(self, seed: int) -> None:
        """Begin new episodes that can begin again, elsewhere."""
        agent = self._agent
        assert agent.env is not None
        agent.env.seed(seed)
        agent._last_obs = agent.env.reset()  # type: ignore[assignment]
        agent._last_episode_starts = np.ones(agent.env.num_envs, dtype=bool)
        agent.state, agent._forget = agent.policy.initial_state(agent.env.num_envs), False
        self.reset_seed = seed

    def _restart(self, env: VecEnv, running: Mapping[str, Any]) -> Any:
        """The observations to go on from, once the environments are there; ``None`` if they cannot be."""
        if running["reset_seed"] is not None:
            self.reset_seed = running["reset_seed"]
            env.seed(self.reset_seed)
            observation = without_learning(env)
            if compare(observation, running["observation"]):
                warnings.warn(
                    "environments that were seeded and reset as before began otherwise: training will not go on "
                    "exactly as it would have",
                    stacklevel=2,
                )
            return observation
        self.reset_seed = None
        if running["environments"] is None or not restore_environments(env, running["environments"]):
            return None
        return running["observation"]


def _episodes(infos: Iterable[Mapping[str, Any]] | None) -> dict[str, Any]:
    """What a Monitor told of recent episodes: their return, length and time."""
    infos = list(infos or ())
    return {key: np.array([info[key] for info in infos], np.float64) for key in ("r", "l", "t")}


def _rows(columns: Mapping[str, Any]) -> list[list[float]]:
    return np.stack([columns[key] for key in columns], 1).tolist()  # type: ignore[no-any-return]
