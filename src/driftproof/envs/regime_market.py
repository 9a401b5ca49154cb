"""``driftproof/RegimeMarket-v0``: a simulated market with hidden regimes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from driftproof._arguments import check_count
from driftproof.envs.features import FeatureConfig, compute_features
from driftproof.envs.market_data import Bars
from driftproof.envs.regimes import Noise, RegimeParameters, regime_parameters, simulate
from driftproof.envs.trading import Actions, TradingEnv


class RegimeMarketEnv(TradingEnv):
    """A simulated market with hidden regimes, new in every episode. See :mod:`driftproof.envs.regimes`.

    ``info["regime"]`` has the number of the last bar's regime, for evaluation; observations do not show it.

    Args:
        parameters: Parameters of the market, or a mapping of arguments of :class:`RegimeParameters`.
        episode_length: Steps of an episode.
        actions: See :class:`TradingEnv`, as for the following arguments.
        commission: Commission of trading.
        slippage: Slippage of trading.
        observe_position: Whether the position is observed.
        features: Observed features.
        render_mode: ``None`` or ``"rgb_array"``.
    """

    def __init__(
        self,
        parameters: RegimeParameters | Mapping[str, Any] | None = None,
        episode_length: int = 512,
        actions: Actions = "continuous",
        commission: float = 0.0001,
        slippage: float = 0.0001,
        observe_position: bool = False,
        features: FeatureConfig | Mapping[str, Any] | None = None,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(actions, commission, slippage, observe_position, features, render_mode)
        check_count("episode_length", episode_length, at_least=1)
        self.parameters = regime_parameters(parameters)
        self.episode_length = episode_length
        self._begun: dict[str, Any] | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[npt.NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed)
        self.parameters.check()
        self._begun = {"generator": self.np_random.bit_generator.state, "parameters": dict(vars(self.parameters))}
        self._begin(self.parameters)
        return self._observe(), self._info()

    def _begin(self, parameters: RegimeParameters) -> None:
        rows = self.features.lookback + self.episode_length
        path = simulate(Noise.draw(self.np_random, rows), parameters)
        first = self.features.lookback - 1
        features = compute_features(*path[:5], self.features)
        self._enter(features[first:], path.close[first:])
        self._regimes: list[int] = path.regime[first:].tolist()

    def _info(self) -> dict[str, Any]:
        info = super()._info()
        info["regime"] = self._regimes[self._bar]
        return info

    def state_dict(self) -> dict[str, Any]:
        """State of the market and the account."""
        return {"begun": self._begun, "account": self._account_state()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        self._begun = state_dict["begun"]
        if self._begun is None:
            return
        # The same random state generates the same market again.
        self.np_random.bit_generator.state = self._begun["generator"]
        self._begin(regime_parameters(self._begun["parameters"]))
        self._load_account(state_dict["account"])


def regime_bars(
    rows: int, parameters: RegimeParameters | Mapping[str, Any] | None = None, seed: int = 0, symbol: str = "REGIME"
) -> Bars:
    """Hourly bars of a simulated market with regimes, from 2000 on.

    Args:
        rows: Number of bars.
        parameters: Parameters of the market.
        seed: Seed of the market.
        symbol: Symbol of the market.
    """
    check_count("rows", rows, at_least=1)
    path = simulate(Noise.draw(np.random.default_rng(seed), rows), regime_parameters(parameters))
    hours = np.arange(rows).astype("timedelta64[h]")
    times = (np.datetime64("2000-01-01", "h") + hours).astype("datetime64[us]")
    return Bars(times, *path[:5], symbol=symbol)
