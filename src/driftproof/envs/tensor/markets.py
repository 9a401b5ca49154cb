"""Both markets as tensors: accounts that read the features and changes of prices of a bar from a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from driftproof.envs.features import LIMIT, compute_features
from driftproof.envs.market import MarketEnv
from driftproof.envs.regime_market import RegimeMarketEnv
from driftproof.envs.regimes import Noise, simulate_batch
from driftproof.envs.tensor.base import TensorEnv, TensorStep
from driftproof.envs.tensor.random import normal, uniform
from driftproof.envs.trading import RUIN, TradingEnv, settle

_AT_ONCE = 1 << 21
"""Bars that are simulated at once, at most, by a reset: bounds the memory that it takes."""


class TradingTensorEnv(TensorEnv):
    """Accounts in markets, see :class:`~driftproof.envs.trading.TradingEnv`.

    Args:
        num_envs: Number of environments.
        device: Device of all tensors.
        world: The environment in Gymnasium, whose arguments apply.
        rows: Rows of the table of bars.
    """

    _state = (*TensorEnv._state, "position")

    def __init__(self, num_envs: int, device: torch.device | str, world: TradingEnv, rows: int) -> None:
        if world.render_mode is not None:
            raise ValueError(f"Invalid render_mode: {world.render_mode!r}; tensor environments draw no pictures")
        super().__init__(num_envs, device, world.observation_space, world.action_space)
        self.actions, self.observe_position, self.cost = world.actions, world.observe_position, world.cost
        self.position = self._zeros(torch.float64)
        """Value held, as a share of the account, ``[N]``."""
        self._row, self._last = self._zeros(torch.int64), self._zeros(torch.int64)
        self._features = torch.zeros(rows, len(world.features.names), device=self.device)
        self._changes = torch.zeros(rows, dtype=torch.float64, device=self.device)

    def _advance(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        target = actions.reshape(self.num_envs).double().nan_to_num(0.0)
        target = (target - 1 if self.actions == "discrete" else target).clamp(-1, 1)
        growth, position = settle(self.position, target, self._changes[self._row], self.cost)
        ruined = growth <= RUIN
        self.position.copy_(position.masked_fill(ruined, 0.0))
        self._row += 1
        self.episode_lengths += 1
        return growth.clamp(min=RUIN).log(), ruined, ~ruined & (self._row >= self._last)

    def _begin(self, ended: Tensor, first: Tensor, length: Tensor | int) -> None:
        """Begin episodes at these rows, ``[N]``, where ``ended``."""
        self.position.masked_fill_(ended, 0.0)
        torch.where(ended, first, self._row, out=self._row)
        torch.where(ended, first + length, self._last, out=self._last)

    def _observe(self) -> Tensor:
        observation = self._features[self._row]
        if self.observe_position:
            return torch.cat([observation, self.position[:, None].clamp(-LIMIT, LIMIT).float()], 1)
        return observation


class Market(TradingTensorEnv):
    """``driftproof/Market-v0``: all histories are on the device, and episodes are random windows of them.

    Args:
        num_envs: Number of environments.
        device: Device of all tensors.
        **kwargs: Arguments of :class:`~driftproof.envs.market.MarketEnv`.
    """

    _state = (*TradingTensorEnv._state, "_row", "_last")

    def __init__(self, num_envs: int, device: torch.device | str = "cpu", **kwargs: Any) -> None:
        world = MarketEnv(**kwargs)
        super().__init__(num_envs, device, world, sum(map(len, world.markets.values())))
        firsts, counts, lengths, offset = [], [], [], 0
        for symbol, bars in world.markets.items():
            rows, stop = world.rows[symbol], offset + len(bars)
            self._features[offset:stop] = torch.from_numpy(world._features[symbol])
            self._changes[offset : stop - 1] = torch.from_numpy(bars.close[1:] / bars.close[:-1] - 1)
            firsts.append(offset + rows.start)
            lengths.append(world.episode_length or len(rows) - 1)
            counts.append(len(rows) - lengths[-1])
            offset = stop
        self._firsts, self._counts, self._lengths = (
            torch.tensor(column, device=self.device) for column in (firsts, counts, lengths)
        )
        self._index = torch.arange(2, device=self.device)

    def _restart(self, ended: Tensor) -> None:
        which, where = uniform(self._keys[:, None], self.episodes[:, None] * 2 + self._index).unbind(1)
        market = (which * len(self._firsts)).long()
        first = self._firsts[market] + (where * self._counts[market]).long()
        self._begin(ended, first, self._lengths[market])

    def _check_state(self, state_dict: Mapping[str, Tensor]) -> None:
        row, last = state_dict["row"], state_dict["last"]
        if not bool(((row >= 0) & (row < last) & (last < len(self._changes))).all()):
            raise ValueError("the state is of bars that are not here")


class RegimeMarket(TradingTensorEnv):
    """``driftproof/RegimeMarket-v0``: a new market in every episode, simulated on the device.

    Each environment has the market of its running episode and the next one, which is simulated while the episode lasts.
    An account that is ruined begins again in the same market, since the next one may not be ready.

    Args:
        num_envs: Number of environments.
        device: Device of all tensors.
        **kwargs: Arguments of :class:`~driftproof.envs.regime_market.RegimeMarketEnv`.
    """

    _state = (*TradingTensorEnv._state, "markets")

    def __init__(self, num_envs: int, device: torch.device | str = "cpu", **kwargs: Any) -> None:
        world = RegimeMarketEnv(**kwargs)
        self.episode_length, self.parameters, self.features = world.episode_length, world.parameters, world.features
        super().__init__(num_envs, device, world, num_envs * 2 * (world.episode_length + 1))
        self.markets = self._zeros(torch.int64)
        """Number of the market of the running episode, ``[N]``."""
        self._envs = torch.arange(num_envs, device=self.device)
        self._filled = torch.full((num_envs * 2,), -1, device=self.device)
        """Number of the market in each slot, of which an environment has two."""
        self._cursor = torch.zeros((), dtype=torch.int64, device=self.device)
        self._portion, self._prepared, self._captured = self.episode_length // 4, 0, False
        # A CPU can look which environments need their next market; with accelerators that would be a synchronisation.
        self._in_portions = self.device.type != "cpu"

    def _set_seeds(self, seed: int | Tensor) -> None:
        super()._set_seeds(seed)
        self._filled.fill_(-1)
        self.markets.fill_(-1)

    def _restart_all(self) -> None:
        self.markets += 1
        self._fill_missing()
        super()._restart_all()

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        keys = self._keys.clone()
        super().load_state_dict(state_dict)
        self._filled.view(-1, 2)[self._keys != keys] = -1
        self._fill_missing()
        self._restart(torch.ones_like(self.episodes, dtype=torch.bool))
        self.position.copy_(state_dict["position"])
        self._row += self.episode_lengths

    def _check_state(self, state_dict: Mapping[str, Tensor]) -> None:
        bar, market = state_dict["episode_lengths"], state_dict["markets"]
        if not bool(((bar >= 0) & (bar < self.episode_length) & (market >= 0)).all()):
            raise ValueError("the state is of bars that are not here")

    def prepare(self, steps: int) -> None:
        """Simulate the next markets of as many environments as need theirs by the end of these steps.

        An environment needs its next market ``episode_length`` steps after the last one. All have their turn in half
        that time, so that each has had it whenever these steps begin. Whether it was needed does not matter: the same
        market is the same again.
        """
        if not self._in_portions:
            return
        half = max(1, self.episode_length // 2)
        self._portion = self._prepared = max(1, min(steps, half))
        self._captured = _is_capturing(self.device)
        count = -(-self.num_envs // (half // self._portion))
        envs = (self._cursor + self._envs[:count]) % self.num_envs
        self._fill(envs, self.markets[envs] + 1)
        self._cursor.copy_((self._cursor + count) % self.num_envs)

    def step(self, actions: Tensor) -> TensorStep:
        if not self._in_portions:
            step = super().step(actions)
            if len(envs := step.truncated.nonzero().squeeze(1)):
                self._fill(envs, self.markets[envs] + 1)
            return step
        is_capturing = _is_capturing(self.device)
        if is_capturing != self._captured:
            # What was prepared outside is no part of a graph that is replayed, and the other way round.
            self.prepare(1 if is_capturing else self.episode_length // 4)
        elif not self._prepared:
            self.prepare(self._portion)
        self._prepared -= 1
        return super().step(actions)

    def _advance(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        reward, terminated, truncated = super()._advance(actions)
        self.markets += truncated
        return reward, terminated, truncated

    def _restart(self, ended: Tensor) -> None:
        self._begin(ended, self._slots(self._envs, self.markets) * (self.episode_length + 1), self.episode_length)

    def _fill_missing(self) -> None:
        """Simulate the running and the next markets of all environments, except those that are there."""
        for numbers in (self.markets, self.markets + 1):
            missing = (self._filled[self._slots(self._envs, numbers)] != numbers).nonzero().squeeze(1)
            for envs in torch.split(missing, max(1, _AT_ONCE // self.episode_length)):
                self._fill(envs, numbers[envs])

    def _fill(self, envs: Tensor, numbers: Tensor) -> None:
        """Simulate the markets of these numbers, ``[B]``, of these environments."""
        path = simulate_batch(self._noise(self._keys[envs], numbers), self.parameters)
        first = self.features.lookback - 1
        features = compute_features(*path[:5], self.features)[:, first:]
        close = path.close[:, first:]
        shape = (self.num_envs * 2, self.episode_length + 1)
        slots = self._slots(envs, numbers)
        self._filled[slots] = numbers
        self._features.view(*shape, -1)[slots] = features.float()
        self._changes.view(shape)[slots, :-1] = close[:, 1:] / close[:, :-1] - 1

    def _noise(self, keys: Tensor, numbers: Tensor) -> Noise:
        rows = self.features.lookback + self.episode_length
        counters = torch.arange(7 * rows, device=self.device).view(7, 1, rows)
        drawn = uniform(keys[:, None], numbers[:, None] * (7 * rows) + counters)
        shock, above = normal(drawn[3], drawn[4])
        below, volume = normal(drawn[5], drawn[6])
        return Noise(drawn[0], drawn[1], shock, drawn[2], above, below, volume)

    def _slots(self, envs: Tensor, numbers: Tensor) -> Tensor:
        """Where markets of these numbers are."""
        return envs * 2 + numbers % 2


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
