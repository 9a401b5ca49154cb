"""Statistics of an account, and how sure they are.

Sharpe and Sortino ratios are of simple returns per bar, without an interest rate, times the root of the bars per year.
Their standard errors are those of independent returns that need not be normal: Mertens (2002) for the Sharpe ratio, the
delta method for the Sortino ratio. Probabilities: Bailey and López de Prado, The deflated Sharpe ratio (2014).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from driftproof.backtest.account import YEAR, Account, Numbers

_EULER = 0.5772156649015329
_DRAWS = 2000
"""Samples of the bootstrap."""
_DAY: np.timedelta64 = np.timedelta64(1, "D")
_NOTHING = 1e-14
"""Deviations of returns below this are rounding."""
_SHORTEST = 0.25
"""Years from which a return per year is given: what a few weeks compound to in a year is no forecast."""


@dataclass(frozen=True)
class Performance:
    """What an account did.

    Attributes:
        first: Beginning of its first bar.
        last: End of its last bar.
        bars: Number of bars.
        bars_per_year: Bars per year.
        simple_return: Simple return of the whole time.
        log_return: Logarithmic return of the whole time.
        annual_return: Simple return per year, compounded; ``None`` for less than a quarter of a year.
        volatility: Standard deviation of simple returns, per year.
        sharpe: Sharpe ratio, per year; ``None`` where returns do not vary.
        sharpe_error: Its standard error.
        sortino: Sortino ratio, per year; ``None`` without a loss.
        sortino_error: Its standard error.
        probability: Probability that the Sharpe ratio is above 0, given this one.
        max_drawdown: Largest loss since an earlier peak, below 0.
        drawdown_days: Longest time from a peak until it was reached again, or to the end.
        turnover: Value traded per year, relative to the account.
        costs: Sum of the costs of trading, relative to the account at the time.
        financing: Sum of the costs of borrowing.
        exposure: Mean value held, long or short.
        long: Share of bars with a long position.
        short: Share of bars with a short position.
        hit_rate: Share of bars with a gain, among those with a position; ``None`` without one.
    """

    first: str
    last: str
    bars: int
    bars_per_year: float
    simple_return: float
    log_return: float
    annual_return: float | None
    volatility: float
    sharpe: float | None
    sharpe_error: float | None
    sortino: float | None
    sortino_error: float | None
    probability: float | None
    max_drawdown: float
    drawdown_days: float
    turnover: float
    costs: float
    financing: float
    exposure: float
    long: float
    short: float
    hit_rate: float | None


def performance(account: Account) -> Performance:
    """Statistics of an account with at least two bars."""
    if len(account) < 2:
        raise ValueError(f"statistics need two bars or more, not {len(account)}")
    returns, log_return = account.returns, float(account.log_returns.sum())
    years = years_of(account)
    per_year = len(account) / years
    ratio, error = sharpe(returns)
    sortino, sortino_error = _sortino(returns)
    depth, days = drawdown(account)
    is_held = (account.long > 0) | (account.short > 0)
    scale = math.sqrt(per_year)
    return Performance(
        first=_date(account.start[0]),
        last=_date(account.end[-1]),
        bars=len(account),
        bars_per_year=per_year,
        simple_return=math.expm1(log_return),
        log_return=log_return,
        annual_return=math.expm1(log_return / years) if years >= _SHORTEST else None,
        volatility=float(returns.std(ddof=1)) * scale,
        sharpe=None if ratio is None else ratio * scale,
        sharpe_error=None if error is None else error * scale,
        sortino=None if sortino is None else sortino * scale,
        sortino_error=None if sortino_error is None else sortino_error * scale,
        probability=None if ratio is None else deflated_sharpe(returns),
        max_drawdown=depth,
        drawdown_days=days,
        turnover=float(account.traded.sum()) / years,
        costs=float(account.costs.sum()),
        financing=float(account.financing.sum()),
        exposure=float((account.long + account.short).mean()),
        long=float((account.long > 0).mean()),
        short=float((account.short > 0).mean()),
        hit_rate=float((returns[is_held] > 0).mean()) if is_held.any() else None,
    )


def years_of(account: Account) -> float:
    """Length of an account's time in years."""
    return float((account.end[-1] - account.start[0]) / np.timedelta64(1, "us")) / (YEAR * 1e6)


def _date(time: np.datetime64) -> str:
    """A time without what is 0 of it."""
    return str(time.astype("datetime64[s]")).removesuffix(":00").removesuffix("T00:00")


def moments(returns: Numbers) -> tuple[float, float]:
    """Skewness and kurtosis; those of a normal distribution are 0 and 3."""
    deviations = returns - returns.mean()
    variance = float(np.mean(deviations**2))
    if math.sqrt(variance) <= _NOTHING:
        return 0.0, 3.0
    return float(np.mean(deviations**3)) / variance**1.5, float(np.mean(deviations**4)) / variance**2


def sharpe(returns: Numbers) -> tuple[float | None, float | None]:
    """Sharpe ratio per bar and its standard error."""
    deviation = float(returns.std(ddof=1))
    if deviation <= _NOTHING:
        return None, None
    ratio = float(returns.mean()) / deviation
    return ratio, math.sqrt(_variance_of_sharpe(ratio, returns))


def _variance_of_sharpe(ratio: float, returns: Numbers) -> float:
    skewness, kurtosis = moments(returns)
    return max(1 - skewness * ratio + (kurtosis - 1) / 4 * ratio**2, 1e-12) / (len(returns) - 1)


def _sortino(returns: Numbers) -> tuple[float | None, float | None]:
    losses = np.minimum(returns, 0) ** 2
    downside = math.sqrt(float(losses.mean()))
    if downside <= _NOTHING:
        return None, None
    mean = float(returns.mean())
    influence = (returns - mean) / downside - mean / (2 * downside**3) * (losses - downside**2)
    return mean / downside, float(influence.std(ddof=1)) / math.sqrt(len(returns))


def deflated_sharpe(returns: Numbers, trials: int = 1, trial_variance: float | None = None) -> float | None:
    """Probability that the Sharpe ratio exceeds that of the luckiest of some trials without any skill.

    Args:
        returns: Simple returns of the trial that was selected.
        trials: Number of independent trials; 1: the probability that the Sharpe ratio is above 0.
        trial_variance: Variance of the trials' Sharpe ratios per bar; ``None``: that of an estimate without skill.
    """
    ratio, _ = sharpe(returns)
    if ratio is None:
        return None
    luck = 0.0
    if trials > 1:
        variance = 1 / (len(returns) - 1) if trial_variance is None else trial_variance
        normal = NormalDist()
        highest = (1 - _EULER) * normal.inv_cdf(1 - 1 / trials) + _EULER * normal.inv_cdf(1 - 1 / (trials * math.e))
        luck = math.sqrt(variance) * highest
    return NormalDist().cdf((ratio - luck) / math.sqrt(_variance_of_sharpe(ratio, returns)))


def drawdown(account: Account) -> tuple[float, float]:
    """The largest loss since an earlier peak, and the longest time in days from a peak until it was reached again."""
    equity = np.concatenate(([1.0], account.equity))
    times = np.concatenate((account.start[:1], account.end))
    peaks = np.maximum.accumulate(equity)
    # When the running peak was last reached, at each time.
    at_peak = np.maximum.accumulate(np.where(equity >= peaks, np.arange(len(equity)), 0))
    before = np.concatenate(([0], at_peak[:-1]))
    # A recovery ends the time below the peak that began before it; a peak right after a peak is no time below.
    was_below = np.concatenate(([False], equity[:-1] < peaks[:-1]))
    since = np.where(was_below, before, at_peak)
    return float((equity / peaks - 1).min()), float((times - times[since]).max() / _DAY)


def bootstrap_interval(values: Numbers, scale: float = 1.0, seed: int = 0) -> tuple[float, float]:
    """95% interval of a mean, times a scale, by the stationary bootstrap of Politis and Romano (1994).

    Blocks of random length, of the cube root of the length on average, keep the dependence between neighbours.

    Args:
        values: Values in the order of time.
        scale: Factor of the mean.
        seed: Seed of the samples.
    """
    generator, length = np.random.default_rng(seed), len(values)
    jump = 1 / max(length ** (1 / 3), 1)
    at = generator.integers(length, size=_DRAWS)
    totals = np.zeros(_DRAWS)
    for _ in range(length):
        totals += values[at]
        starts = generator.random(_DRAWS) < jump
        at = np.where(starts, generator.integers(length, size=_DRAWS), (at + 1) % length)
    low, high = np.quantile(totals / length * scale, [0.025, 0.975]).tolist()
    return low, high


def groups_of(names: npt.NDArray[np.str_]) -> dict[str, npt.NDArray[np.bool_]]:
    """Which bars have each name, in the order of their first bar."""
    found, first = np.unique(names, return_index=True)
    return {str(name): names == name for name in found[np.argsort(first)]}
