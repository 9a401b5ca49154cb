"""Signals for a stream of bars."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from driftproof.envs import Bars, FeatureConfig, compute_features, read_bars
from driftproof.envs.market import check_volume
from driftproof.envs.market_data import Gap
from driftproof.ppo import DistributionalPPO
from driftproof.signals.actors import Critics, make_actor, one_thread
from driftproof.signals.batch import loaded, worst_share
from driftproof.signals.rows import HEADER, Signals, Thresholds
from driftproof.signals.view import Array, MarketView, Wide


def stream(
    agent: DistributionalPPO | str | os.PathLike[str],
    lines: Iterable[str],
    write: Callable[[str], object],
    *,
    buy: float = 0.6,
    sell: float = -0.6,
    deadzone: float = 0.1,
    features: FeatureConfig | Mapping[str, Any] | None = None,
    cvar_alpha: float | None = None,
    columns: Mapping[str, str] | None = None,
    timezone: str | None = None,
    day_first: bool | None = None,
    frequency: str | None = None,
    max_gap: Gap = None,
    source: str = "input",
    symbol: str = "",
) -> int:
    """Write an agent's signal for each bar as soon as its line is read; lines of several markets may alternate.

    Signals are those of :func:`infer` for the whole history.

    Args:
        agent: The agent, or its file. No code in the file is run.
        lines: CSV, the header first, such as ``sys.stdin``.
        write: Called with the header, then with one line for each line; without line ends, as ``print`` wants it.
        buy: See :func:`infer`, as for the three that follow.
        sell: Scores from here on down are SELL.
        deadzone: Scores closer to 0 than this are HOLD.
        features: Features that the agent was trained with; ``None``: those of its environment, if it has one, or the
            default.
        cvar_alpha: Share of the worst returns whose mean is ``cvar``.
        columns: See :func:`driftproof.envs.read_bars`, as for all that follow.
        timezone: Name of the zone that timestamps without an offset are in.
        day_first: Whether 02/03/2024 is in March.
        frequency: Usual time between bars, which the stream's must match.
        max_gap: Longest time from one bar of a market to the next, in days, or a timedelta.
        source: Name of the lines in messages.
        symbol: Symbol of the market if there is no such column.

    Returns:
        Number of bars.

    Raises:
        MarketDataError: A line is invalid; the message names it. Signals of earlier lines have been written.
        ValueError: The agent has other observations or actions than a market's.
    """
    thresholds = Thresholds(buy, sell, deadzone)
    reader = StreamReader(loaded(agent), thresholds, features, cvar_alpha)
    write(HEADER)
    count = 0
    bars = read_bars(
        lines,
        source=source,
        columns=columns,
        timezone=timezone,
        day_first=day_first,
        frequency=frequency,
        max_gap=max_gap,
        symbol=symbol,
    )
    with one_thread():
        for bar in bars:
            write(next(reader.read(bar).lines()))
            count += 1
    return count


class StreamReader:
    """Runs an agent over markets bar by bar, with a recurrent state for each market.

    Args:
        agent: The agent.
        thresholds: Thresholds of scores for signals.
        features: Features that the agent was trained with; ``None``: those of its environment, if it has one, or the
            default.
        cvar_alpha: Share of the worst returns whose mean is ``cvar``; ``None``: the agent's own, or 0.1.
    """

    def __init__(
        self,
        agent: DistributionalPPO,
        thresholds: Thresholds,
        features: FeatureConfig | Mapping[str, Any] | None = None,
        cvar_alpha: float | None = None,
    ) -> None:
        self._thresholds, self._view = thresholds, MarketView(agent, features)
        self._actor = make_actor(agent, self._view, 1)
        self._critics = Critics(agent, 1, worst_share(agent, cvar_alpha))
        self._nothing = self._actor.state, self._critics.state
        self._markets: dict[str, _Market] = {}

    def read(self, bar: Bars) -> Signals:
        """The signal for one bar, which must follow the earlier ones of its market."""
        if bar.symbol not in self._markets:
            check_volume(bar, self._view.features)
            self._markets[bar.symbol] = _Market(RunningFeatures(self._view.features), bar.close, self._nothing)
        said, symbol = self._judge(self._markets[bar.symbol], bar), np.array([bar.symbol])
        return Signals(bar.timestamps, symbol, self._thresholds.signals(said[0]), bar.close, *said)

    def _judge(self, market: _Market, bar: Bars) -> Wide:
        """Outputs for a bar: score, quantiles and CVaR, ``[5, 1]``."""
        features = market.features.push(bar)
        changes, market.close = bar.close / market.close - 1, bar.close
        if features is None:
            return np.full((5, 1), np.nan)
        self._actor.state, self._critics.state = market.state
        outputs, basis = self._actor.act(features[None, None], changes[None])
        expected = self._critics.expect(basis)
        market.state = self._actor.state, self._critics.state
        return np.concatenate((self._view.scores(outputs), expected[0].T))


class RunningFeatures:
    """Features of one bar after the other: those that :func:`compute_features` gives for all at once."""

    def __init__(self, config: FeatureConfig) -> None:
        self._config = config
        self._bars = np.empty((5, config.lookback))
        self._count = 0

    def push(self, bar: Bars) -> Array | None:
        """Features ``[F]`` of a bar; ``None`` while there are not enough bars before it."""
        self._bars[:, :-1] = self._bars[:, 1:]
        self._bars[:, -1] = np.concatenate(bar.prices)
        self._count += 1
        if self._count < self._config.lookback:
            return None
        open_, high, low, close, volume = self._bars
        features: Array = compute_features(open_, high, low, close, volume, self._config)[-1].astype(np.float32)
        return features


@dataclass
class _Market:
    """State of one market.

    Attributes:
        features: Running features.
        close: Last close ``[1]``.
        state: Recurrent states of actor and critics.
    """

    features: RunningFeatures
    close: Wide
    state: tuple[Any, Any]
