"""Features of a market at the close of a bar, from that bar and those before it.

One function for training and for inference, for NumPy arrays and torch tensors, for one market and for many. Every
feature looks at the last :attr:`FeatureConfig.lookback` bars only, so that features of a long history and of its end
are the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from driftproof._arguments import check_count, check_flag

LIMIT = 10.0
"""Features are clipped to ±10."""


@dataclass(frozen=True)
class FeatureConfig:
    """Configuration of the features.

    Args:
        window: Bars over which volatility and most features are measured, at least 8. Longer is smoother, but slower.
        horizons: Bars over which momentum and deviation are measured, up to ``window``.
        volume: Whether the traded volume is a feature; without it, data need none.
    """

    window: int = 64
    horizons: Sequence[int] = (1, 4, 16, 64)
    volume: bool = True

    def __post_init__(self) -> None:
        check_flag("volume", self.volume)
        check_count("window", self.window, at_least=8)
        object.__setattr__(self, "horizons", tuple(self.horizons))
        for horizon in self.horizons:
            check_count("horizons", horizon, at_least=1)
        if not self.horizons or max(self.horizons) > self.window or len(set(self.horizons)) < len(self.horizons):
            raise ValueError(
                f"Invalid horizons: {list(self.horizons)}; must be one or more, each once, up to the window, "
                f"{self.window}"
            )

    @property
    def names(self) -> list[str]:
        """Names of the features, in their order."""
        return [
            *(f"momentum_{horizon}" for horizon in self.horizons),
            *(f"deviation_{horizon}" for horizon in self.horizons if horizon > 1),
            *("autocorrelation", "efficiency", "volatility", "range", "body", "channel"),
            *(("volume",) if self.volume else ()),
        ]

    @property
    def lookback(self) -> int:
        """Number of bars that the features of one bar need."""
        return self.window + 1


def compute_features(open: Any, high: Any, low: Any, close: Any, volume: Any, config: FeatureConfig) -> Any:
    """Features of every bar, ``[..., T, F]``, of prices and volumes ``[..., T]``, in time's order.

    With ``x`` the logarithm of the close, ``r`` its changes from bar to bar, and ``s`` the root of the mean of ``r²``
    over the window, in which everything that has a scale is measured:

    - ``momentum_h``: change of ``x`` over ``h`` bars, in ``s·√h``
    - ``deviation_h``: ``x`` less its mean over ``h`` bars, in ``s·√h``
    - ``autocorrelation``: of ``r`` with the ``r`` before it, over the window
    - ``efficiency``: change of ``x`` over the window, as a share of the way it took
    - ``volatility``: logarithm of ``s`` over a quarter of the window, relative to ``s``
    - ``range``: logarithm of high over low, in ``s``
    - ``body``: logarithm of close over open, in ``s``
    - ``channel``: where the close is between the window's low, -1, and its high, 1
    - ``volume``: relative to its mean over the window, less 1

    Args:
        open: Prices at the beginning of bars.
        high: Highest prices.
        low: Lowest prices.
        close: Prices at the end of bars, when features are known.
        volume: Traded volume; not read without the feature.
        config: Configuration of the features.

    Returns:
        Features, of the type and precision of ``close``. The first ``config.lookback - 1`` bars have none: NaN.
    """
    xp: Any = torch if isinstance(close, torch.Tensor) else np
    window, rows = config.window, close.shape[-1]
    shape = (*close.shape[:-1], min(rows, config.lookback - 1), len(config.names))
    unknown = xp.zeros(shape, **({"dtype": close.dtype, "device": close.device} if xp is torch else {})) + math.nan
    count = rows - unknown.shape[-2]
    if count == 0:
        return unknown

    def now(x: Any) -> Any:
        """The bars that have features."""
        return x[..., x.shape[-1] - count :]

    def ago(x: Any, bars: int) -> Any:
        return x[..., x.shape[-1] - count - bars : x.shape[-1] - bars]

    x = xp.log(close)
    r = x[..., 1:] - x[..., :-1]
    energy = now(_sums(r * r, window)) / window
    s = xp.sqrt(energy) + 1e-12
    features = []
    for horizon in config.horizons:
        features.append((now(x) - ago(x, horizon)) / (s * math.sqrt(horizon)))
    for horizon in config.horizons:
        if horizon > 1:
            features.append((now(x) - now(_sums(x, horizon)) / horizon) / (s * math.sqrt(horizon)))
    features.append(now(_sums(r[..., 1:] * r[..., :-1], window - 1)) / ((window - 1) * energy + 1e-24))
    features.append((now(x) - ago(x, window)) / (now(_sums(xp.abs(r), window)) + 1e-12))
    quarter = window // 4
    features.append(xp.log((xp.sqrt(now(_sums(r * r, quarter)) / quarter) + 1e-12) / s))
    features.append(xp.log(now(high) / now(low)) / s)
    features.append(xp.log(now(close) / now(open)) / s)
    top, bottom = now(_extremes(xp.maximum, high, window)), now(_extremes(xp.minimum, low, window))
    features.append((2 * now(close) - top - bottom) / (top - bottom + 1e-12 * top))
    if config.volume:
        mean = now(_sums(volume, window)) / window
        features.append((now(volume) - mean) / (mean + (mean == 0)))
    known = xp.clip(xp.stack(features, axis=-1), -LIMIT, LIMIT)
    return xp.concatenate([unknown, known], axis=-2)


def _sums(x: Any, window: int) -> Any:
    """Sums over the last ``window`` numbers, ``[..., T - window + 1]``.

    Of sums over powers of two: each number touches only the sums of its own windows, so that rounding in one window,
    or a wild number in it, leaves no trace in later ones, as it would in differences of running totals.
    """
    total: Any = None
    done, power, size = 0, x, 1
    while True:
        if window & size:
            # The part of the window that ends `done` numbers ago.
            part = power[..., : power.shape[-1] - done] if done else power
            total = part if total is None else total[..., total.shape[-1] - part.shape[-1] :] + part
            done += size
        size *= 2
        if size > window:
            return total[..., total.shape[-1] - (x.shape[-1] - window + 1) :]
        power = power[..., size // 2 :] + power[..., : -size // 2]


def _extremes(choose: Any, x: Any, window: int) -> Any:
    """The greatest, or the least, of the last ``window`` numbers, ``[..., T - window + 1]``."""
    size = 1
    while size < window:
        shift = min(size, window - size)
        x = choose(x[..., shift:], x[..., :-shift])
        size += shift
    return x
