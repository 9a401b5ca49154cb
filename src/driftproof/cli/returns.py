"""Episode returns, with confidence intervals where the episodes are independent enough to estimate them."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from driftproof._bootstrap import independent_interval, series_interval

if TYPE_CHECKING:
    import numpy as np
    from stable_baselines3.common.vec_env import VecEnv

_FEWEST_BARS = 30
"""Smallest number of bars for a block bootstrap."""


@dataclass
class Episodes:
    """Recorder of episodes, used as the callback of ``evaluate_policy``.

    Attributes:
        returns: Return of every episode.
        steps: Number of steps of all episodes together.
        paths: Checksum of the observations and rewards of every episode.
        bars: For episodes on market data, rewards by symbol and row.
    """

    returns: list[float] = field(default_factory=list)
    steps: int = 0
    paths: list[int] = field(default_factory=list)
    bars: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    _running: dict[int, int] = field(default_factory=dict)

    def __call__(self, local: Mapping[str, Any], _: Mapping[str, Any]) -> None:
        import numpy as np

        i, info, reward = local["i"], local["info"], float(local["reward"])
        seen, code = local["observations"], self._running.get(i, 0)
        for part in seen.values() if isinstance(seen, dict) else (seen,):
            code = zlib.crc32(np.ascontiguousarray(part[i]).tobytes(), code)
        self._running[i] = zlib.crc32(np.float64(reward).tobytes(), code)
        self.steps += 1
        if "row" in info and "symbol" in info:
            self.bars[str(info["symbol"]), int(info["row"])].append(reward)
        if local["done"] and "episode" in info:
            self.paths.append(self._running.pop(i))


def play(
    player: Any,
    venv: VecEnv,
    episodes: int,
    seed: int,
    deterministic: bool = True,
    look: Callable[[Mapping[str, Any], Mapping[str, Any]], None] | None = None,
) -> Episodes:
    """Run a policy for a number of episodes; ``look`` is called after every step."""
    from stable_baselines3.common.evaluation import evaluate_policy

    recorded = Episodes()

    def after_step(local: Mapping[str, Any], everywhere: Mapping[str, Any]) -> None:
        recorded(local, everywhere)
        if look is not None:
            look(local, everywhere)

    venv.seed(seed)
    returns, _ = evaluate_policy(
        player, venv, episodes, deterministic, callback=after_step, return_episode_rewards=True
    )
    recorded.returns = [float(value) for value in returns]  # type: ignore[union-attr]
    return recorded


def summary(episodes: Episodes, times: Mapping[str, Sequence[Any]] | None = None) -> dict[str, Any]:
    """Returns, their mean and standard deviation, and a 95% confidence interval of the mean or why it is missing.

    Args:
        episodes: The episodes.
        times: Timestamps of rows by symbol, for episodes on market data.
    """
    import numpy as np

    values = np.asarray(episodes.returns)
    if times is not None and episodes.bars:
        interval, note = _interval_of_bars(episodes, times, float(values.mean()))
    elif len(values) == 1:
        interval, note = None, "no interval: only one episode"
    elif len(set(episodes.paths)) == 1:
        interval, note = None, f"no interval: all {len(values)} episodes are identical"
    else:
        interval, note = independent_interval(values), f"bootstrap over {len(values)} episodes"
    return {
        "mean": float(values.mean()),
        "std": float(values.std()),
        "interval": None if interval is None else list(interval),
        "interval_note": note,
        "length": episodes.steps / len(values),
        "returns": episodes.returns,
    }


def interval_told(result: Mapping[str, Any]) -> str:
    """Confidence interval as text; a dash if there is none."""
    return "–" if result["interval"] is None else "[{:.4g}, {:.4g}]".format(*result["interval"])


def _interval_of_bars(
    episodes: Episodes, times: Mapping[str, Sequence[Any]], mean: float
) -> tuple[tuple[float, float] | None, str]:
    """Interval by a stationary block bootstrap over bars, since episodes that share bars are not independent."""
    import numpy as np

    at: dict[Any, list[float]] = defaultdict(list)
    for (symbol, row), rewards in episodes.bars.items():
        at[times[symbol][row]] += rewards
    series: np.ndarray[Any, Any] = np.array([np.mean(at[time]) for time in sorted(at)])
    count, length = len(episodes.returns), episodes.steps / len(episodes.returns)
    paths = len(episodes.bars) / length
    distinct = (
        f"{count} episodes cover {len(episodes.bars):,} different bars, equal to {paths:.1f} non-overlapping episodes"
    )
    if len(series) < _FEWEST_BARS:
        return None, f"no interval: {len(series)} bars are too few for a block bootstrap; {distinct}"
    low, high, block = series_interval(series)
    centre = float(series.mean())
    ends = mean + length * (low - centre), mean + length * (high - centre)
    return ends, f"stationary block bootstrap over {len(series):,} bars, mean block {block:.1f}; {distinct}"
