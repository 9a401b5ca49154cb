"""Runs actor and critics over histories of several markets in a batch, with their recurrent states."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import Tensor

from driftproof.envs.features import LIMIT
from driftproof.envs.trading import RUIN, settle
from driftproof.nn.cores import Core, LSTMCore
from driftproof.nn.policies import DistributionalPolicy
from driftproof.ppo import DistributionalPPO
from driftproof.signals.steps import make_step, wide
from driftproof.signals.view import Array, MarketView, Wide

LEVELS = (0.1, 0.5, 0.9)
"""Levels of the returned quantiles."""


class Actor(Protocol):
    """Runs the policy over markets, bar after bar.

    Attributes:
        state: Recurrent state, which can be saved and restored.
    """

    state: Any

    def act(self, features: Array, changes: Wide) -> tuple[Wide, Tensor]:
        """Process some bars.

        Args:
            features: Features of the bars ``[T, B, F]``.
            changes: Relative changes of prices since the previous bar ``[T, B]``.

        Returns:
            The policy's outputs for actions ``[T, B, m]``, and the input of the critics ``[T, B, ...]``.
        """

    def keep(self, count: int) -> None:
        """Drop all but the first ``count`` markets."""


def make_actor(agent: DistributionalPPO, view: MarketView, batch: int) -> Actor:
    """Create an actor with an initial recurrent state, for ``batch`` markets."""
    return PositionActor(agent, view, batch) if view.observes_position else MarketActor(agent, view, batch)


class MarketActor:
    """Actor that observes only the market, so that its recurrent core processes all bars in one call."""

    def __init__(self, agent: DistributionalPPO, view: MarketView, batch: int) -> None:
        self._policy, self._view = agent.policy, view
        self._memory = Memory(self._policy.actor_core, batch, self._policy.device)
        self._network = wide(torch.nn.Sequential(self._policy.actor_network, self._policy.action_head))

    @torch.inference_mode()
    def act(self, features: Array, changes: Wide) -> tuple[Wide, Tensor]:
        policy = self._policy
        seen = torch.as_tensor(self._view.normalised(features), device=policy.device)
        memory = self._memory.run(extract(policy, seen))
        outputs: Wide = self._network(memory).cpu().numpy()
        return outputs, memory if policy.critic_core is None else seen

    @property
    def state(self) -> Any:
        return self._memory.state

    @state.setter
    def state(self, state: Any) -> None:
        self._memory.state = state

    def keep(self, count: int) -> None:
        self._memory.keep(count)


class PositionActor:
    """Actor that also observes its position, which depends on its own actions: runs bar by bar."""

    def __init__(self, agent: DistributionalPPO, view: MarketView, batch: int) -> None:
        self._policy, self._view = agent.policy, view
        self._step = make_step(agent.policy, batch)
        self._targets = [0.0] * batch
        """Positions taken at the last bar."""

    def act(self, features: Array, changes: Wide) -> tuple[Wide, Tensor]:
        steps, batch, width = features.shape
        view, shares_memory = self._view, self._policy.critic_core is None
        seen = np.empty((steps, batch, width + 1), np.float32)
        seen[..., :width] = view.normalised(features)
        outputs = np.empty((steps, batch, self._policy.action_head.out_features))
        memories = []
        # Python floats, which are faster than NumPy scalars for a single account.
        for t, moves in enumerate(changes.tolist()):
            positions = map(_moved, self._targets, moves)
            seen[t, :, width] = [view.normalised_position(position) for position in positions]
            outputs[t], memory = self._step(seen[t])
            self._targets = [view.position(numbers) for numbers in outputs[t].tolist()]
            if shares_memory:
                memories.append(memory.copy())
        basis = np.stack(memories) if shares_memory else seen
        return outputs, torch.as_tensor(basis, device=self._policy.device)

    @property
    def state(self) -> Any:
        return self._targets, self._step.state

    @state.setter
    def state(self, state: Any) -> None:
        self._targets, self._step.state = state

    def keep(self, count: int) -> None:
        self._step.keep(count)
        self._targets = self._targets[:count]


def _moved(target: float, change: float) -> float:
    """The observed position after a change of the price; 0 for a ruined account, which starts anew."""
    grown, position = settle(target, target, change, 0.0)
    return 0.0 if grown <= RUIN else min(max(position, -LIMIT), LIMIT)


class Critics:
    """Expected returns; of two critics, the lower value of each number.

    Args:
        agent: The agent.
        batch: Number of markets.
        cvar_alpha: Share of the worst returns whose mean is computed (CVaR).
    """

    def __init__(self, agent: DistributionalPPO, batch: int, cvar_alpha: float) -> None:
        self._policy, self._scale, self._alpha = agent.policy, agent.return_scale, cvar_alpha
        core, device = self._policy.critic_core, self._policy.device
        self._memory = None if core is None else Memory(core, batch, device)
        self._critics: list[Any] = [wide(critic) for critic in self._policy.critics]
        count = self._policy.heads[0].outputs
        self._weights = torch.zeros(count, len(LEVELS), device=device, dtype=torch.float64)
        for i, level in enumerate(LEVELS):
            place = min(max(level * count - 0.5, 0.0), count - 1.0)
            lower, share = int(place), place % 1
            self._weights[lower, i] += 1 - share
            self._weights[min(lower + 1, count - 1), i] += share

    @torch.inference_mode()
    def expect(self, basis: Tensor) -> Wide:
        """Interpolated quantiles of returns at :data:`LEVELS`, and CVaR, ``[T, B, 4]``.

        Args:
            basis: Critics' input from :meth:`Actor.act`.
        """
        if self._memory is not None:
            basis = self._memory.run(extract(self._policy, basis, self._policy.critic_features_extractor))
        opinions = []
        for critic in self._critics:
            prediction = critic(basis)
            quantiles = critic.head.quantiles(prediction) @ self._weights
            opinions.append(torch.cat((quantiles, critic.head.cvar(prediction, self._alpha).unsqueeze(-1)), -1))
        cautious = torch.stack(opinions).amin(0)
        expected: Wide = self._scale.decode(cautious).cpu().numpy()
        return expected

    @property
    def state(self) -> Any:
        """Recurrent states, which can be saved and restored."""
        return None if self._memory is None else self._memory.state

    @state.setter
    def state(self, state: Any) -> None:
        if self._memory is not None:
            self._memory.state = state

    def keep(self, count: int) -> None:
        """Drop all but the first ``count`` markets."""
        if self._memory is not None:
            self._memory.keep(count)


class Memory:
    """A recurrent core with its state for a batch of markets.

    Signals must be the same whether bars come one by one or all at once, for one market or for many, but shapes change
    how sums are rounded, and recurrent states may propagate that. So everything is computed in double precision, except
    for LSTM cores: oneDNN's LSTM rounds the same in all shapes, and is several times as fast.
    """

    def __init__(self, core: Core, batch: int, device: torch.device) -> None:
        self._core = core if isinstance(core, LSTMCore) else wide(core)
        self._dtype = torch.float32 if isinstance(core, LSTMCore) else torch.float64
        self.state = tuple(part.to(self._dtype) for part in core.initial_state(batch, device))

    def run(self, features: Tensor) -> Tensor:
        """Outputs ``[T, B, units]`` for features ``[T, B, n]``; updates the recurrent state."""
        memory, self.state = self._core.run(features.to(self._dtype), self.state)
        return memory.double()

    def keep(self, count: int) -> None:
        """Drop all but the first ``count`` markets."""
        self.state = tuple(part[:, :count].contiguous() for part in self.state)


def extract(policy: DistributionalPolicy, seen: Tensor, extractor: BaseFeaturesExtractor | None = None) -> Tensor:
    """Input features ``[T, B, n]`` of a core, from observations ``[T, B, ...]``."""
    flat: Tensor = policy.extract_features(seen.flatten(0, 1), extractor or policy.features_extractor)
    return flat.view(*seen.shape[:2], -1)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Use one torch thread: steps of a few markets are too small to parallelise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
