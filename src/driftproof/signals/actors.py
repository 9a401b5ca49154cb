"""Actors and critics that read histories of several markets side by side, and remember each of them."""

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
"""Of the quantiles that critics are asked for."""


class Actor(Protocol):
    """Decides for markets, bar after bar.

    Attributes:
        state: What it knows of them; it may be put back later.
    """

    state: Any

    def act(self, features: Array, changes: Wide) -> tuple[Wide, Tensor]:
        """Go on over some bars.

        Args:
            features: ``[T, B, F]``.
            changes: Of prices since the bar before, relative, ``[T, B]``.

        Returns:
            The policy's outputs for actions ``[T, B, m]``, and what critics want to see ``[T, B, ...]``.
        """

    def keep(self, count: int) -> None:
        """Go on with the first of the markets only."""


def make_actor(agent: DistributionalPPO, view: MarketView, batch: int) -> Actor:
    """An actor that remembers nothing yet, for ``batch`` markets."""
    return PositionActor(agent, view, batch) if view.observes_position else MarketActor(agent, view, batch)


class MarketActor:
    """Sees the market alone, so that its memory runs over all bars in one call."""

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
    """Sees its position too, which is what its own actions and prices have made of it: bar after bar."""

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
        # Python's numbers, which cost less than NumPy's: one account is no array.
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
    """The position, as observed, that a price's change has made of one. A ruined account begins anew, without any."""
    grown, position = settle(target, target, change, 0.0)
    return 0.0 if grown <= RUIN else min(max(position, -LIMIT), LIMIT)


class Critics:
    """What is expected of markets: of two critics, for every number that of the more cautious one.

    Args:
        agent: Whose critics.
        batch: Markets.
        cvar_alpha: The share of worst returns whose mean is asked for.
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
        """Quantiles of returns at :data:`LEVELS`, interpolated, and the mean of the worst, ``[T, B, 4]``.

        Args:
            basis: What :meth:`Actor.act` returned.
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
        """What they know of markets; it may be put back later."""
        return None if self._memory is None else self._memory.state

    @state.setter
    def state(self, state: Any) -> None:
        if self._memory is not None:
            self._memory.state = state

    def keep(self, count: int) -> None:
        """Go on with the first of the markets only."""
        if self._memory is not None:
            self._memory.keep(count)


class Memory:
    """What a core remembers of markets side by side.

    Signals must be the same whether bars come one by one or all at once, for one market or for many, but shapes change
    how sums are rounded, and memories may carry that on. So all that comes after cores is computed in double precision,
    and so are cores, but for LSTMs: oneDNN's rounds the same in all shapes, and is several times as fast.
    """

    def __init__(self, core: Core, batch: int, device: torch.device) -> None:
        self._core = core if isinstance(core, LSTMCore) else wide(core)
        self._dtype = torch.float32 if isinstance(core, LSTMCore) else torch.float64
        self.state = tuple(part.to(self._dtype) for part in core.initial_state(batch, device))

    def run(self, features: Tensor) -> Tensor:
        """Go on over features ``[T, B, n]``: memories ``[T, B, units]``."""
        memory, self.state = self._core.run(features.to(self._dtype), self.state)
        return memory.double()

    def keep(self, count: int) -> None:
        """Go on with the first of the markets only."""
        self.state = tuple(part[:, :count].contiguous() for part in self.state)


def extract(policy: DistributionalPolicy, seen: Tensor, extractor: BaseFeaturesExtractor | None = None) -> Tensor:
    """Features ``[T, B, n]`` that a core wants, from observations ``[T, B, ...]``."""
    flat: Tensor = policy.extract_features(seen.flatten(0, 1), extractor or policy.features_extractor)
    return flat.view(*seen.shape[:2], -1)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Torch in one thread: the steps of a few markets are too small to be shared by more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
