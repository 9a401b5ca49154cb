"""Many markets with regimes at once, as tensors on any device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from driftproof._arguments import check_count, check_flag, check_number, check_option
from driftproof.envs.features import LIMIT, FeatureConfig, compute_features
from driftproof.envs.regimes import Noise, RegimeParameters, regime_parameters, simulate_batch
from driftproof.envs.trading import RUIN, Actions, feature_config, settle


class Step(NamedTuple):
    """What a step of all markets returns.

    Attributes:
        observation: ``[N, F]``, in float32.
        reward: ``[N]``.
        terminated: ``[N]``: accounts that are ruined. Until the next reset they earn nothing.
        truncated: Whether this was the last bar, of all markets: call ``reset()``.
        info: ``close``, ``position``, ``traded``, ``wealth`` and ``regime``, ``[N]`` each.
    """

    observation: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: bool
    info: dict[str, Tensor]


class RegimeMarketBatch:
    """The same as many :class:`RegimeMarketEnv`, whose episodes begin and end together.

    Given the same noise and the same actions, it does what they do, within rounding.

    Args:
        num_markets: How many.
        parameters: See :class:`RegimeMarketEnv`, as for all that follow up to ``features``.
        episode_length: Steps.
        actions: Positions, or 0, 1 and 2 for SELL, HOLD and BUY.
        commission: Paid for trading.
        slippage: By how much prices are worse when trading.
        observe_position: Whether the position is observed.
        features: Which features are observed.
        device: Where.
        dtype: Of prices and accounts. float32 is faster on most accelerators, and agrees to fewer digits.
        seed: Of all that is random.
    """

    def __init__(
        self,
        num_markets: int,
        parameters: RegimeParameters | Mapping[str, Any] | None = None,
        episode_length: int = 512,
        actions: Actions = "continuous",
        commission: float = 0.0001,
        slippage: float = 0.0001,
        observe_position: bool = False,
        features: FeatureConfig | Mapping[str, Any] | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
    ) -> None:
        check_count("num_markets", num_markets, at_least=1)
        check_count("episode_length", episode_length, at_least=1)
        check_count("seed", seed)
        check_option("actions", actions, ("continuous", "discrete"))
        check_number("commission", commission, at_least=0, below=0.25)
        check_number("slippage", slippage, at_least=0, below=0.25)
        check_flag("observe_position", observe_position)
        self.num_markets, self.episode_length = num_markets, episode_length
        self.actions, self.observe_position = actions, observe_position
        self.parameters, self.features = regime_parameters(parameters), feature_config(features)
        self.cost = float(commission) + float(slippage)
        self.device, self.dtype = torch.device(device), dtype
        self._generator = torch.Generator(self.device).manual_seed(seed)
        self._begun: dict[str, Any] | None = None
        self._bar: int = -1
        self._position: Tensor
        self._wealth: Tensor
        self._ruined: Tensor

    @property
    def rows(self) -> int:
        """Bars of an episode, with those that its first features need."""
        return self.features.lookback + self.episode_length

    def reset(self, noise: Noise | None = None) -> Tensor:
        """Begin new episodes.

        Args:
            noise: What is random about them, tensors ``[N, rows]``; ``None``: is drawn.

        Returns:
            Observations, ``[N, F]``.
        """
        self._begun = None
        if noise is None:
            self._begun = {"generator": self._generator.get_state(), "parameters": dict(vars(self.parameters))}
            noise = self._draw()
        elif noise.shock.shape != (self.num_markets, self.rows):
            raise ValueError(f"noise must be of shape {(self.num_markets, self.rows)}, not {tuple(noise.shock.shape)}")
        self._begin(noise, self.parameters)
        return self._observe()

    def step(self, actions: Tensor) -> Step:
        """Trade in all markets.

        Args:
            actions: ``[N]`` or ``[N, 1]``. Those beyond the range are taken for the nearest within it.
        """
        if not 0 <= self._bar < self.episode_length:
            raise RuntimeError("no episode has begun, or all are over: call reset()")
        target = actions.reshape(self.num_markets).to(self.device, self.dtype)
        target = (target - 1 if self.actions == "discrete" else target).clamp(-1, 1)
        target = torch.where(self._ruined, 0.0, target)
        traded = abs(target - self._position)
        growth, self._position = settle(self._position, target, self._changes[:, self._bar], self.cost)
        growth = torch.where(self._ruined, 1.0, growth)
        reward = growth.clamp(min=RUIN).log()
        self._ruined = self._ruined | (growth <= RUIN)
        self._position = torch.where(self._ruined, 0.0, self._position)
        self._wealth = self._wealth + reward
        self._bar += 1
        return Step(self._observe(), reward, self._ruined, self._bar == self.episode_length, self._info(traded))

    def _draw(self) -> Noise:
        return Noise.draw_batch(self._generator, self.num_markets, self.rows, self.device, self.dtype)

    def _begin(self, noise: Noise, parameters: RegimeParameters) -> None:
        path = simulate_batch(noise, parameters)
        first = self.features.lookback - 1
        self._observations = compute_features(*path[:5], self.features)[:, first:].to(torch.float32)
        self._closes, self._regimes = path.close[:, first:], path.regime[:, first:]
        self._changes = self._closes[:, 1:] / self._closes[:, :-1] - 1
        self._bar = 0
        self._position = torch.zeros(self.num_markets, device=self.device, dtype=self.dtype)
        self._wealth = torch.zeros_like(self._position)
        self._ruined = torch.zeros_like(self._position, dtype=torch.bool)

    def _observe(self) -> Tensor:
        observation: Tensor = self._observations[:, self._bar]
        if self.observe_position:
            return torch.cat([observation, self._position[:, None].clamp(-LIMIT, LIMIT).float()], 1)
        return observation

    def _info(self, traded: Tensor) -> dict[str, Tensor]:
        return {
            "close": self._closes[:, self._bar],
            "position": self._position,
            "traded": traded,
            "wealth": self._wealth.exp(),
            "regime": self._regimes[:, self._bar],
        }

    def state_dict(self) -> dict[str, Any]:
        """Where all markets and accounts are."""
        if self._begun is None and self._bar >= 0:
            raise RuntimeError("episodes with noise that was given cannot be saved")
        state = {"generator": self._generator.get_state(), "begun": self._begun, "account": None}
        if self._begun is not None:
            state["account"] = {
                "bar": self._bar,
                "position": self._position,
                "wealth": self._wealth,
                "ruined": self._ruined,
            }
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there, on the same kind of device."""
        self._begun, account, self._bar = state_dict["begun"], state_dict["account"], -1
        if self._begun is not None and account is not None:
            # The markets are the same again if they are drawn with the same numbers.
            self._generator.set_state(self._begun["generator"].cpu())
            self._begin(self._draw(), regime_parameters(self._begun["parameters"]))
            self._bar = account["bar"]
            self._position, self._wealth, self._ruined = (
                account[name].to(self.device) for name in ("position", "wealth", "ruined")
            )
        self._generator.set_state(state_dict["generator"].cpu())
