"""Backtest figures written from their definitions, in plain Python, one bar after the other."""

from __future__ import annotations

import math
from statistics import NormalDist, fmean, stdev

YEAR = 365.25 * 86400


def account(seconds, closes, targets, cost, financing):
    """Growth factors, traded shares, costs and financing of bars."""
    position, bars = 0.0, []
    for i, target in enumerate(targets):
        years = (seconds[i + 1] - seconds[i]) / YEAR
        value = 1.0
        traded = abs(target - position)
        paid = cost * traded * value
        value -= paid
        invested = target * value
        borrowed = -invested if invested < 0 else 0.0
        interest = borrowed * financing * years
        after = invested * closes[i + 1] / closes[i]
        new = value + (after - invested) - interest
        bars.append({"growth": new, "traded": traded, "costs": paid, "financing": interest, "target": target})
        position = after / new
    return bars


def figures(seconds, closes, targets, cost, financing):
    bars = account(seconds, closes, targets, cost, financing)
    n, years = len(bars), (seconds[-1] - seconds[0]) / YEAR
    returns = [bar["growth"] - 1 for bar in bars]
    log_return = math.fsum(math.log(bar["growth"]) for bar in bars)
    mean, deviation = fmean(returns), stdev(returns)
    population = math.sqrt(fmean((r - mean) ** 2 for r in returns))
    skewness = fmean(((r - mean) / population) ** 3 for r in returns)
    kurtosis = fmean(((r - mean) / population) ** 4 for r in returns)
    scale = math.sqrt(n / years)
    ratio = mean / deviation
    error = math.sqrt((1 - skewness * ratio + (kurtosis - 1) / 4 * ratio**2) / (n - 1))
    downside = math.sqrt(fmean(min(r, 0.0) ** 2 for r in returns))
    influence = [(r - mean) / downside - mean * (min(r, 0.0) ** 2 - downside**2) / (2 * downside**3) for r in returns]
    equity, peak, peak_time, depth, longest = 1.0, 1.0, seconds[0], 0.0, 0.0
    was_below = False
    for bar, time in zip(bars, seconds[1:], strict=True):
        equity *= bar["growth"]
        if was_below or equity < peak:
            longest = max(longest, time - peak_time)
        was_below = equity < peak
        if equity >= peak:
            peak, peak_time = equity, time
        depth = min(depth, equity / peak - 1)
    held = [(bar, r) for bar, r in zip(bars, returns, strict=True) if bar["target"] != 0]
    return {
        "bars": n,
        "bars_per_year": n / years,
        "simple_return": math.exp(log_return) - 1,
        "log_return": log_return,
        "annual_return": math.exp(log_return / years) - 1 if years >= 0.25 else None,
        "volatility": deviation * scale,
        "sharpe": ratio * scale,
        "sharpe_error": error * scale,
        "sortino": mean / downside * scale,
        "sortino_error": stdev(influence) / math.sqrt(n) * scale,
        "probability": NormalDist().cdf(ratio / error),
        "max_drawdown": depth,
        "drawdown_days": longest / 86400,
        "turnover": math.fsum(bar["traded"] for bar in bars) / years,
        "costs": math.fsum(bar["costs"] for bar in bars),
        "financing": math.fsum(bar["financing"] for bar in bars),
        "exposure": fmean(abs(bar["target"]) for bar in bars),
        "long": fmean(bar["target"] > 0 for bar in bars),
        "short": fmean(bar["target"] < 0 for bar in bars),
        "hit_rate": fmean(r > 0 for _, r in held) if held else None,
    }


def deflated(ratio, error, trials, variance):
    """Probability that a Sharpe ratio exceeds the expected largest of so many without skill."""
    normal, euler = NormalDist(), 0.57721566490153286
    largest = (1 - euler) * normal.inv_cdf(1 - 1 / trials) + euler * normal.inv_cdf(1 - 1 / (trials * math.e))
    return normal.cdf((ratio - math.sqrt(variance) * largest) / error)
