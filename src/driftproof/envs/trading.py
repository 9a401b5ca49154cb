"""An account in a market: the base of both market environments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from driftproof._arguments import check_flag, check_number, check_option
from driftproof.envs._specs import from_plain
from driftproof.envs.features import LIMIT, FeatureConfig

Actions = Literal["continuous", "discrete"]
Features = npt.NDArray[np.floating[Any]]

RUIN = 1e-3
"""An account that falls to this share of its value within a bar is ruined, and the episode ends."""


def settle(position: Any, target: Any, change: Any, cost: float) -> tuple[Any, Any]:
    """Growth of an account over a bar, with a trade at its beginning; for floats, arrays or tensors.

    Args:
        position: Value held, as a share of the account; negative if short.
        target: Position after trading.
        change: Relative change of the price over the bar.
        cost: Cost of trading, as a share of the value traded.

    Returns:
        The account's growth factor, and the position as a share of the new account, which moves with the price.
    """
    held = 1 + target * change
    return (1 - cost * abs(target - position)) * held, target * (1 + change) / (held + (held == 0))


class TradingEnv(gymnasium.Env[npt.NDArray[np.float32], Any]):
    """One market, one account. Each step is a bar: observe its close, trade there, and see the next close.

    The reward is the logarithmic growth of the account in the step, so that their sum is that of the whole episode. An
    episode ends with its last bar (truncated), or if the account is ruined (terminated).

    The observation has the :mod:`features <driftproof.envs.features>` of the market, and the position if asked for.

    Args:
        actions: ``"continuous"``: the position, from -1 (fully short) to 1 (fully long);
            ``"discrete"``: 0 SELL, 1 HOLD and 2 BUY, for the positions -1, 0 and 1.
        commission: Commission, as a share of the value traded.
        slippage: Slippage: how much worse than the close prices are when trading, as a share.
        observe_position: Whether the position is the observation's last number. Without it, observations are of the
            market alone, so that all bars of a history can be judged at once.
        features: Features to observe, or a mapping of arguments of :class:`FeatureConfig`.
        render_mode: ``"rgb_array"``: :meth:`render` draws prices and positions of the episode.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012
    observation_space: spaces.Box  # type: ignore[assignment]

    def __init__(
        self,
        actions: Actions = "continuous",
        commission: float = 0.0001,
        slippage: float = 0.0001,
        observe_position: bool = False,
        features: FeatureConfig | Mapping[str, Any] | None = None,
        render_mode: str | None = None,
    ) -> None:
        if render_mode is not None:
            check_option("render_mode", render_mode, self.metadata["render_modes"])
        check_option("actions", actions, ("continuous", "discrete"))
        check_number("commission", commission, at_least=0, below=0.25)
        check_number("slippage", slippage, at_least=0, below=0.25)
        check_flag("observe_position", observe_position)
        self.features = feature_config(features)
        self.actions, self.observe_position = actions, observe_position
        self.cost = float(commission) + float(slippage)
        size = len(self.features.names) + observe_position
        self.observation_space = spaces.Box(-LIMIT, LIMIT, (size,), np.float32)
        self.action_space = spaces.Discrete(3) if actions == "discrete" else spaces.Box(-1, 1, (1,), np.float32)
        self.render_mode = render_mode
        self._bar, self._last = 0, 0
        self._position, self._wealth = 0.0, 0.0
        self._held: list[float] = []

    def _enter(self, features: Features, close: npt.NDArray[np.float64]) -> None:
        """Begin an episode that observes these features, ``[T, F]``, one for each of these closes, ``[T]``."""
        self._observations = np.zeros((len(features), *self.observation_space.shape), np.float32)
        self._observations[:, : features.shape[1]] = features
        # Python floats: indexing arrays would take most of the time of a step.
        self._changes: list[float] = (close[1:] / close[:-1] - 1).tolist()
        self._closes: list[float] = close.tolist()
        self._bar, self._last = 0, len(self._changes)
        self._position, self._wealth = 0.0, 0.0
        self._held = []

    def step(self, action: Any) -> tuple[npt.NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        target = float(action) - 1.0 if self.actions == "discrete" else float(action[0])
        if not -1.0 <= target <= 1.0:
            target = self._bounded(target)
        if self._bar >= self._last:
            raise gymnasium.error.ResetNeeded("the episode is over: call reset()")
        traded = abs(target - self._position)
        growth, self._position = settle(self._position, target, self._changes[self._bar], self.cost)
        if self.render_mode is not None:
            self._held.append(target)
        self._bar += 1
        ruined = growth <= RUIN
        reward = math.log(RUIN if ruined else growth)
        self._wealth += reward
        if ruined:
            self._last, self._position = self._bar, 0.0
        info = self._info()
        info["traded"] = traded
        return self._observe(), reward, ruined, not ruined and self._bar == self._last, info

    def _bounded(self, target: float) -> float:
        if math.isnan(target):
            raise ValueError("the action is not a number")
        if self.actions == "discrete":
            raise ValueError(f"the action is {target + 1:g}; 0 is SELL, 1 HOLD and 2 BUY")
        return min(max(target, -1.0), 1.0)

    def render(self) -> npt.NDArray[np.uint8] | None:
        """The close of every bar so far, on green for long and red for short positions."""
        if self.render_mode is None:
            return None
        height, width = 160, self._bar + 1
        closes = np.array(self._closes[:width])
        rows = (closes.max() - closes) / (np.ptp(closes) or 1) * (height - 5) + 2
        held = np.zeros(width)
        held[width - len(self._held) :] = self._held
        shade = (100 * np.abs(held)).astype(np.uint8)
        picture = np.full((height, width, 3), 255, np.uint8)
        picture[..., 2] -= shade
        picture[:, held > 0, 0] -= shade[held > 0]
        picture[:, held < 0, 1] -= shade[held < 0]
        picture[rows.astype(int), np.arange(width)] = 0
        return picture

    def _observe(self) -> npt.NDArray[np.float32]:
        if self.observe_position:
            self._observations[self._bar, -1] = min(max(self._position, -LIMIT), LIMIT)
        observation: npt.NDArray[np.float32] = self._observations[self._bar]
        return observation

    def _info(self) -> dict[str, Any]:
        return {"close": self._closes[self._bar], "position": self._position, "wealth": math.exp(self._wealth)}

    def _account_state(self) -> dict[str, Any]:
        return {"bar": self._bar, "last": self._last, "position": self._position, "wealth": self._wealth}

    def _load_account(self, state: Mapping[str, Any]) -> None:
        self._bar, self._last = state["bar"], state["last"]
        self._position, self._wealth = state["position"], state["wealth"]


def feature_config(features: FeatureConfig | Mapping[str, Any] | None) -> FeatureConfig:
    """The configuration itself, or one from its arguments, or the default one."""
    if isinstance(features, FeatureConfig):
        return features
    return from_plain("features", features or {}, FeatureConfig)
