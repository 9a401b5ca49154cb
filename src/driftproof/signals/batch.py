"""Signals for whole histories."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from driftproof._arguments import check_number
from driftproof.envs import Bars, FeatureConfig, compute_features
from driftproof.envs.market import check_volume, markets_of
from driftproof.ppo import DistributionalPPO
from driftproof.signals.actors import LEVELS, Critics, make_actor, one_thread
from driftproof.signals.rows import Signals, Thresholds
from driftproof.signals.view import Array, MarketView, Wide

_NUMBERS = 1 + len(LEVELS) + 1
"""Said of a bar: its score, quantiles and the mean of the worst returns."""
_ROWS = 8192
"""Judged at a time, all markets together."""
_LEAST_ROWS = 64
"""Of each market."""


def infer(
    agent: DistributionalPPO | str | os.PathLike[str],
    data: str | Path | Bars | Mapping[str, Bars],
    *,
    buy: float = 0.6,
    sell: float = -0.6,
    deadzone: float = 0.1,
    features: FeatureConfig | Mapping[str, Any] | None = None,
    cvar_alpha: float | None = None,
    load: Mapping[str, Any] | None = None,
    on_progress: Callable[[int, int], object] | None = None,
) -> Signals:
    """Signals of an agent for every bar of some markets, from that bar and those before it.

    Each market starts with the initial recurrent state and no position, as an episode does.

    Args:
        agent: The agent, or its file. No code in the file is run.
        data: A file, see :func:`driftproof.envs.load_market_data`; bars; or bars by symbol.
        buy: Scores from here on up are BUY.
        sell: Scores from here on down are SELL.
        deadzone: Scores closer to 0 than this are HOLD, whatever the other two say.
        features: Features that the agent was trained with; ``None``: those of its environment, if it has one, or the
            default.
        cvar_alpha: Share of the worst returns whose mean is ``cvar``; ``None``: the agent's own, or 0.1.
        load: Arguments of :func:`driftproof.envs.load_market_data`, if ``data`` is a file.
        on_progress: Called with the number of rows done, and of all rows.

    Returns:
        Rows in the order of time, and of symbols within it.

    Raises:
        MarketDataError: Something is wrong with the data; the message names the file and the row.
        ValueError: The agent has other observations or actions than a market's.
    """
    thresholds = Thresholds(buy, sell, deadzone)
    agent = loaded(agent)
    view, alpha = MarketView(agent, features), worst_share(agent, cvar_alpha)
    histories = _histories(markets_of(data, load), view)
    with one_thread(), ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        _judge(agent, view, [history for history in histories if history.rows], alpha, pool, on_progress)
    return _rows(histories, thresholds)


def positions(
    agent: DistributionalPPO | str | os.PathLike[str],
    markets: Mapping[str, Bars],
    features: FeatureConfig | Mapping[str, Any] | None = None,
) -> dict[str, Wide]:
    """The agent's deterministic positions at the close of every bar, by symbol ``[T]``, as in evaluation.

    Args:
        agent: The agent, or its file.
        markets: Bars by symbol.
        features: Features that the agent was trained with; see :func:`infer`.

    Returns:
        Positions from -1 to 1; NaN for the first bars of a market, which have no features.
    """
    agent = loaded(agent)
    view = MarketView(agent, features)
    histories = _histories(markets, view)
    with one_thread():
        _judge(agent, view, [history for history in histories if history.rows])
    return {symbol: next(each.position for each in histories if each.symbol == symbol) for symbol in markets}


def _histories(markets: Mapping[str, Bars], view: MarketView) -> list[_History]:
    """Histories of markets, the longest first."""
    histories = [_History.of(symbol, bars, view.features) for symbol, bars in markets.items()]
    return sorted(histories, key=lambda history: -history.rows)


def loaded(agent: DistributionalPPO | str | os.PathLike[str]) -> DistributionalPPO:
    """The agent, loaded from its file if needed, in evaluation mode."""
    if not isinstance(agent, DistributionalPPO):
        agent = DistributionalPPO.load(Path(agent), device="cpu")
    agent.policy.set_training_mode(False)
    return agent


def worst_share(agent: DistributionalPPO, cvar_alpha: float | None) -> float:
    """The share of the worst returns in CVaR."""
    if cvar_alpha is not None:
        check_number("cvar_alpha", cvar_alpha, above=0, at_most=1)
        return float(cvar_alpha)
    return agent.hyperparams.current("cvar_alpha") if "cvar_alpha" in agent.hyperparams else 0.1


@dataclass
class _History:
    """Bars of a market, and the agent's outputs for them.

    Attributes:
        symbol: What is traded.
        bars: All of them.
        features: Which features.
        rows: How many bars have features.
        said: Numbers for each bar ``[T, 5]``; NaN where there are no features.
        position: Deterministic position at each bar ``[T]``; NaN where there are no features.
    """

    symbol: str
    bars: Bars
    features: FeatureConfig
    rows: int
    said: Wide
    position: Wide

    @classmethod
    def of(cls, symbol: str, bars: Bars, features: FeatureConfig) -> _History:
        check_volume(bars, features)
        rows = max(0, len(bars) - features.lookback + 1)
        return cls(symbol, bars, features, rows, np.full((len(bars), _NUMBERS), np.nan), np.full(len(bars), np.nan))

    def look(self, start: int, stop: int) -> tuple[Array, Wide]:
        """Features and changes of price, of some of the rows that have features."""
        before = self.features.lookback - 1
        rows = slice(start, stop + before)
        open_, high, low, close, volume = (prices[rows] for prices in self.bars.prices)
        seen = compute_features(open_, high, low, close, volume, self.features)[before:]
        return seen.astype(np.float32), close[before:] / close[before - 1 : -1] - 1


def _judge(
    agent: DistributionalPPO,
    view: MarketView,
    histories: list[_History],
    cvar_alpha: float = 0.1,
    pool: ThreadPoolExecutor | None = None,
    on_progress: Callable[[int, int], object] | None = None,
) -> None:
    """Compute the outputs for histories, which are sorted by length, the longest first.

    Markets are processed in a batch, one chunk of bars at a time. Critics run one chunk behind the actor, in the pool;
    without one, they are not asked.
    """
    actor = make_actor(agent, view, len(histories))
    critics = None if pool is None else Critics(agent, len(histories), cvar_alpha)
    total, done, start = sum(history.rows for history in histories), 0, 0
    behind: Future[None] | None = None
    while histories:
        steps = min(max(_ROWS // len(histories), _LEAST_ROWS), histories[0].rows - start)
        # Outputs beyond the end of a shorter history are padding, and dropped.
        features = np.zeros((steps, len(histories), len(view.features.names)), np.float32)
        changes = np.zeros((steps, len(histories)))
        counts = [min(history.rows - start, steps) for history in histories]
        for i, (history, count) in enumerate(zip(histories, counts, strict=True)):
            features[:count, i], changes[:count, i] = history.look(start, start + count)
        outputs, basis = actor.act(features, changes)
        _write(histories, start, counts, view.scores(outputs)[..., None], slice(1))
        taken = view.positions(outputs)
        for i, (history, count) in enumerate(zip(histories, counts, strict=True)):
            history.position[len(history.bars) - history.rows + start :][:count] = taken[:count, i]
        if behind is not None:
            behind.result()
        if pool is not None and critics is not None:
            behind = pool.submit(_expect, critics, basis, histories, start, counts)
        start, done = start + steps, done + sum(counts)
        histories = [history for history in histories if history.rows > start]
        actor.keep(len(histories))
        if on_progress is not None:
            on_progress(done, total)
    if behind is not None:
        behind.result()


def _expect(critics: Critics, basis: torch.Tensor, histories: list[_History], start: int, counts: list[int]) -> None:
    critics.keep(len(histories))
    _write(histories, start, counts, critics.expect(basis), slice(1, None))


def _write(histories: list[_History], start: int, counts: list[int], numbers: Wide, columns: slice) -> None:
    """Store outputs ``[T, B, n]`` in the histories, from a row on."""
    for i, (history, count) in enumerate(zip(histories, counts, strict=True)):
        first = start + history.features.lookback - 1
        history.said[first : first + count, columns] = numbers[:count, i]


def _rows(histories: list[_History], thresholds: Thresholds) -> Signals:
    times = np.concatenate([history.bars.timestamps for history in histories])
    symbols = np.repeat([history.symbol for history in histories], [len(history.bars) for history in histories])
    order: Any = slice(None) if len(histories) == 1 else np.lexsort((symbols, times))
    said = np.concatenate([history.said for history in histories])[order]
    close = np.concatenate([history.bars.close for history in histories])[order]
    signals = thresholds.signals(said[:, 0])
    return Signals(times[order], symbols[order], signals, close, *(said[:, i] for i in range(_NUMBERS)))
