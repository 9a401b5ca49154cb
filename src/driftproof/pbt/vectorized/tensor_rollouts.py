"""Rollouts in environments on the device: nothing is copied to the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.callbacks import BaseCallback
from torch import Tensor

from driftproof._arguments import ArgumentError
from driftproof.envs import tensor
from driftproof.envs.tensor import TensorEnv
from driftproof.learner.graph import capturing
from driftproof.learner.metrics import to_host
from driftproof.learner.population import MemberGenerators, PopulationCollector, PopulationRollout, PopulationState
from driftproof.nn.types import PolicyState
from driftproof.pbt.vectorized.noise import action_noise
from driftproof.ppo import DistributionalPPO, TensorVecEnv


class TensorRollouts:
    """Collects rollouts of all members in one tensor environment, of which each member owns ``N`` in a row.

    Episodes that end in a rollout count for the agents once its update is done, when the host waits for the device
    anyway.

    Args:
        agents: The members' agents. Each has a ``TensorVecEnv`` of ``N`` environments, which holds their state between
            trainings.
        state: State of the members.
        rollout: Rollouts to overwrite.
        generators: Random generators of the members.
    """

    def __init__(
        self,
        agents: Sequence[DistributionalPPO],
        state: PopulationState,
        rollout: PopulationRollout,
        generators: MemberGenerators,
    ) -> None:
        self.agents, self.rollout, self.generators = agents, rollout, generators
        envs = [self._env_of(agent) for agent in agents]
        if any(agent.learner.normalizer is not None for agent in agents):
            raise ArgumentError(
                "observation_normalizer=True needs observations on the host, and those of these environments stay on "
                "the device: leave it out, or train members in environments of Gymnasium",
                "observation_normalizer",
            )
        first = envs[0]
        if any((env.env_id, env.kwargs, env.device) != (first.env_id, first.kwargs, first.device) for env in envs):
            raise ArgumentError("members need tensor environments of the same id, arguments and device")
        self.env = tensor.make(first.env_id, len(envs) * rollout.envs, first.device, **first.kwargs)
        """Environments of all members; those of a member begin, or continue, in :meth:`read`."""
        self.env.reset()
        self.policy = state.policy
        self.state = state.policy.initial_state(rollout.envs)
        """Recurrent state before the last observations ``[M, layers, N, units]``."""
        shape = (state.members, rollout.envs)
        self.observation = torch.zeros_like(rollout.observations[:, 0])  # type: ignore[index]
        self.starts = torch.ones(shape, dtype=torch.bool, device=rollout.device)
        self.returns = torch.zeros(*shape, rollout.steps, dtype=torch.float64, device=rollout.device)
        """Returns of episodes that ended at a step ``[M, N, T]``; NaN elsewhere."""
        self.lengths = torch.zeros_like(self.returns)
        self.captures = rollout.device.type == "cuda"
        """Whether rollouts are captured in a CUDA graph, which costs the host one launch instead of thousands."""
        self._graph: torch.cuda.CUDAGraph | None = None
        self._noise: Tensor | None = None
        self._trained: list[int] = []

    def read(self, member: int) -> None:
        """Take observations, environments and the recurrent state from a member's agent."""
        agent, rows = self.agents[member], self._rows(member)
        for stack, part in zip(_parts(self.state), _parts(agent.state), strict=True):
            stack[member].copy_(part)
        worker = agent.worker
        if worker.observation is None:
            return  # Its training has not begun.
        self.observation[member].copy_(torch.as_tensor(worker.observation))
        self.starts[member].copy_(torch.as_tensor(worker.starts))
        own, whole = self._env_of(agent).state_dict(), self.env.state_dict()
        for name, stack in whole.items():
            stack[rows].copy_(own[name])
        self.env.load_state_dict(whole)

    def write(self, member: int) -> None:
        """Give observations, environments and the recurrent state to a member's agent."""
        agent, rows = self.agents[member], self._rows(member)
        worker = agent.worker
        if worker.observation is None:
            return
        self._env_of(agent).load_state_dict({name: each[rows] for name, each in self.env.state_dict().items()})
        worker.state = PolicyState(*(tuple(part[member].clone() for part in parts) for parts in self.state))
        worker.observation = self.observation[member].cpu().numpy().copy()
        worker.starts = self.starts[member].cpu().numpy().copy()

    def restart(self, members: Sequence[int]) -> None:
        """Reset the recurrent states of running episodes of some members."""
        index = torch.tensor(members).to(self.starts.device, non_blocking=True)
        for stack in _parts(self.state):
            stack.index_fill_(0, index, 0)
        for member in members:
            self.agents[member].reset_lstm_states_to_initial()

    def collect(self, callbacks: Mapping[int, BaseCallback]) -> dict[int, Exception]:
        """Collect one rollout of each member that has a callback, without waiting for the device."""
        members, agents = list(callbacks), self.agents
        for member in members:
            agents[member].worker.in_rollout, agents[member].worker.reset_seed = True, None
            callbacks[member].on_rollout_start()
        before: dict[str, Any] | None = None
        if len(members) < self.rollout.members:
            before = {"env": self.env.state_dict(), "state": [part.clone() for part in _parts(self.state)]}
            before |= {"observation": self.observation.clone(), "starts": self.starts.clone()}
        self._collect(action_noise(self.policy, self.rollout, self.generators, members))
        if before is not None:
            self._restore([m for m in range(self.rollout.members) if m not in callbacks], before)
        self._trained = members
        for member in members:
            agents[member].worker.counters.num_timesteps += self.rollout.steps * self.rollout.envs
            callbacks[member].update_locals({"infos": [{} for _ in range(self.rollout.envs)]})
            callbacks[member].on_step()
            callbacks[member].on_rollout_end()
        return {}

    def _collect(self, noise: Tensor) -> None:
        if self._noise is None:
            # Without a graph, so that everything that is initialised when first used is.
            self._noise = noise.clone()
            self._act(self._noise)
            return
        self._noise.copy_(noise)
        if not self.captures:
            self._act(self._noise)
            return
        with torch.cuda.device(self.rollout.device):
            if self._graph is None:
                graph = torch.cuda.CUDAGraph()
                with capturing(graph):
                    self._act(self._noise)
                self._graph = graph
            self._graph.replay()

    def _act(self, noise: Tensor) -> None:
        """All steps of a rollout; whatever outlives it is updated in place."""
        rollout, env = self.rollout, self.env
        members, envs = rollout.members, rollout.envs
        collector = PopulationCollector(self.policy, rollout, self.state, noise)
        env.prepare(rollout.steps)
        for step in range(rollout.steps):
            actions = collector.act(self.observation, self.starts)
            new = env.step(actions.flatten(0, 1))
            ended = (new.terminated | new.truncated).view(members, envs)
            rollout.rewards[:, step].copy_(new.reward.view(members, envs))
            rollout.dones[:, step].copy_(ended)
            # An episode that terminates has no value behind its last observation, whatever its time limit.
            rollout.truncated[:, step].copy_((new.truncated & ~new.terminated).view(members, envs))
            for stored, last in ((self.returns, env.last_returns), (self.lengths, env.last_lengths)):
                stored[..., step].copy_(torch.where(ended, last.view(members, envs), torch.nan))
            collector.record(new.final_observation.view(members, envs, *new.final_observation.shape[1:]))
            self.observation.copy_(new.observation.view_as(self.observation))
            self.starts.copy_(ended)
        collector.finish(self.observation, self.starts)
        for stack, part in zip(_parts(self.state), _parts(rollout.last_state), strict=True):
            stack.copy_(part)

    def _restore(self, members: list[int], before: Mapping[str, Any]) -> None:
        """Undo the steps of members that do not train."""
        states = self.env.state_dict()
        for member in members:
            rows = self._rows(member)
            for name, stack in states.items():
                stack[rows].copy_(before["env"][name][rows])
            self.observation[member].copy_(before["observation"][member])
            self.starts[member].copy_(before["starts"][member])
            for part, old in zip(_parts(self.state), before["state"], strict=True):
                part[member].copy_(old[member])
        self.env.load_state_dict(states)

    def finish_update(self) -> None:
        """Tell the agents of the episodes that ended in the last rollout."""
        both = to_host(torch.stack((self.returns, self.lengths))).numpy()
        for member in self._trained:
            returns, lengths = both[:, member].swapaxes(1, 2)  # In the order of time.
            ended = ~np.isnan(returns)
            pairs = zip(returns[ended].tolist(), lengths[ended].tolist(), strict=True)
            infos = [{"r": round(total, 6), "l": int(length), "t": 0.0} for total, length in pairs]
            agent = self.agents[member]
            assert agent.ep_info_buffer is not None
            agent.ep_info_buffer.extend(infos)

    def _rows(self, member: int) -> slice:
        return slice(member * self.rollout.envs, (member + 1) * self.rollout.envs)

    @staticmethod
    def _env_of(agent: DistributionalPPO) -> TensorEnv:
        if not isinstance(agent.env, TensorVecEnv):
            raise ArgumentError(f"members on the device need a TensorVecEnv without wrappers, not {agent.env}")
        return agent.env.env


def _parts(state: PolicyState) -> tuple[Tensor, ...]:
    return state.actor + state.critic
