"""Backtests of positions in markets: accounts, baselines, parts of the time, and sensitivity to costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from driftproof._arguments import check_number
from driftproof.backtest.account import Account, Numbers, Times, combine, simulate
from driftproof.backtest.statistics import (
    Performance,
    bootstrap_interval,
    deflated_sharpe,
    groups_of,
    performance,
    sharpe,
    years_of,
)
from driftproof.backtest.strategies import STRATEGIES, regimes
from driftproof.envs.market_data import Bars

AGENT = "agent"
COST_FACTORS = (0, 1, 2, 5)
"""Multiples of the costs whose effect is shown."""
_LEAST_BARS = 3

Sample = Literal["in sample", "out of sample", "unknown"]


@dataclass(frozen=True)
class Training:
    """What an agent was trained on.

    Attributes:
        periods: First and last times of the bars; empty if there were none, as in simulated markets.
        text: The same in words.
        is_known: Whether it is known at all.
    """

    periods: tuple[tuple[str, str], ...] = ()
    text: str = "trained on no such prices"
    is_known: bool = True


@dataclass(frozen=True)
class Part:
    """A part of the time, with all accounts in it.

    Attributes:
        label: What it is to the agent, in words.
        sample: Whether the agent was trained on it.
        accounts: Accounts of the agent and of baselines, all markets together, by name.
        performances: Their statistics.
        markets: Statistics of the agent in each market, if there are several.
        years: Statistics of the agent and of buying and holding, by year.
        regimes: The same by regime of the market.
        costs: Statistics of the agent at multiples of the costs.
        excess: Log-return per year beyond buying and holding, with its 95% interval.
        interval: 95% interval of the agent's log-return per year.
        deflated: Probability that the agent is better than the luckiest of all trials without skill.
    """

    label: str
    sample: Sample
    accounts: dict[str, Account]
    performances: dict[str, Performance]
    markets: dict[str, Performance]
    years: dict[str, dict[str, float]]
    regimes: dict[str, dict[str, float]]
    costs: dict[str, Performance]
    excess: tuple[float, float, float]
    interval: tuple[float, float]
    deflated: float | None


@dataclass(frozen=True)
class Backtest:
    """A backtest.

    Attributes:
        parts: Parts of the time, in its order.
        symbols: Markets.
        cost: Cost of trading, as a share of the value traded.
        financing: Cost of short positions per year.
        trials: Number of trials that the agent was selected from.
        training: What the agent was trained on.
        targets: Positions of the agent by symbol, with their times and closes.
    """

    parts: list[Part]
    symbols: list[str]
    cost: float
    financing: float
    trials: int
    training: Training
    targets: dict[str, tuple[Times, Numbers, Numbers]] = field(repr=False)

    @property
    def main(self) -> Part:
        """The part to look at: the longest that the agent was not trained on, or else the longest."""
        unseen = [part for part in self.parts if part.sample == "out of sample"]
        return max(unseen or self.parts, key=lambda part: part.performances[AGENT].bars)

    def to_dict(self, points: int = 1000) -> dict[str, Any]:
        """All numbers as plain values, with at most this many points of each equity curve."""
        return {
            "symbols": self.symbols,
            "cost": self.cost,
            "financing": self.financing,
            "trials": self.trials,
            "training": asdict(self.training),
            "parts": [_plain(part, points) for part in self.parts],
        }


def backtest(
    markets: Mapping[str, Bars],
    targets: Mapping[str, Numbers],
    *,
    cost: float,
    financing: float = 0.0,
    training: Training | None = None,
    start: str | None = None,
    end: str | None = None,
    trials: int = 1,
    trial_targets: Sequence[Mapping[str, Numbers]] = (),
) -> Backtest:
    """What an account would have earned that follows an agent's positions, next to baselines.

    Each market has an account of its own with the same value at first; nothing is moved between them. Every part of the
    time begins with accounts that hold nothing.

    Args:
        markets: Bars by symbol.
        targets: The agent's positions at the closes of all bars, by symbol ``[T]``; NaN where it has none yet.
        cost: Cost of trading, as a share of the value traded.
        financing: Cost of borrowing what is sold short, as a share of its value, per year.
        training: What the agent was trained on; ``None``: not known.
        start: Date that the backtest begins at.
        end: Date that it ends before.
        trials: Number of trials that the agent was selected from, for the deflated Sharpe ratio.
        trial_targets: Positions of other trials, whose Sharpe ratios say how much trials differ.

    Raises:
        ValueError: There are too few bars, or an argument is invalid.
    """
    check_number("cost", cost, at_least=0, below=0.5)
    check_number("financing", financing, at_least=0, below=1)
    training = Training(text="what it was trained on is not known", is_known=False) if training is None else training
    since, until = (None if date is None else np.datetime64(date, "us") for date in (start, end))
    first = min(_first_time(bars, targets[symbol]) for symbol, bars in markets.items())
    last = max(bars.timestamps[-1] for bars in markets.values())
    known, taken = {}, {}
    for symbol, bars in markets.items():
        known[symbol] = (bars.timestamps, bars.close, targets[symbol])
        taken[symbol] = {AGENT: targets[symbol]} | {name: make(bars.close) for name, make in STRATEGIES.items()}
    setting = _Setting(markets, taken, cost, financing, max(trials, 1), [dict(each) for each in trial_targets])
    parts = []
    for label, sample, low, high in _periods(training, max(first, since or first), min(last, until or last)):
        part = setting.part(label, sample, low, high)
        if part is not None:
            parts.append(part)
    if not parts:
        raise ValueError(f"too few bars with features between {_day(since or first)} and {_day(until or last)}")
    return Backtest(parts, list(markets), cost, financing, max(trials, 1), training, known)


def _first_time(bars: Bars, targets: Numbers) -> np.datetime64:
    known = np.flatnonzero(~np.isnan(targets))
    first: np.datetime64 = bars.timestamps[known[0]] if len(known) else bars.timestamps[-1]
    return first


def _periods(
    training: Training, first: np.datetime64, last: np.datetime64
) -> list[tuple[str, Sample, np.datetime64, np.datetime64]]:
    """Parts of the time by what they were to the agent: label, sample, start and end, both included."""
    if not training.is_known:
        return [("UNKNOWN SAMPLE", "unknown", first, last)]
    if not training.periods:
        return [("out of sample", "out of sample", first, last)]
    spans = sorted((np.datetime64(low, "us"), np.datetime64(high, "us")) for low, high in training.periods)
    parts: list[tuple[str, Sample, np.datetime64, np.datetime64]] = []
    at = first
    for i, (low, high) in enumerate(spans):
        if at < low:
            before = "before training" if i == 0 else "between training periods"
            parts.append((f"out of sample, {before}", "out of sample", at, min(low, last)))
        if max(at, low) < min(high, last):
            parts.append(("IN SAMPLE", "in sample", max(at, low), min(high, last)))
        at = max(at, high)
    if at < last:
        parts.append(("out of sample, after training", "out of sample", at, last))
    return [part for part in parts if part[2] < part[3]]


@dataclass(frozen=True)
class _Setting:
    """Everything that the parts of a backtest have in common."""

    markets: Mapping[str, Bars]
    taken: Mapping[str, Mapping[str, Numbers]]
    cost: float
    financing: float
    trials: int
    trial_targets: list[dict[str, Numbers]]

    def account(
        self, symbol: str, targets: Numbers, low: np.datetime64, high: np.datetime64, factor: float = 1.0
    ) -> Account | None:
        """The account of one market in a part of the time."""
        bars = self.markets[symbol]
        rows = slice(*np.searchsorted(bars.timestamps, [low, high + np.timedelta64(1, "us")]).tolist())
        own = self.taken[symbol][AGENT][rows]
        known = np.flatnonzero(~np.isnan(own))
        if not len(known) or len(own) - known[0] < _LEAST_BARS:
            return None
        bars, taken = bars.rows(rows).rows(slice(known[0], None)), targets[rows][known[0] :]
        return simulate(bars.timestamps, bars.close, taken[:-1], self.cost * factor, self.financing)

    def combined(
        self, targets: Mapping[str, Numbers], low: np.datetime64, high: np.datetime64, factor: float = 1.0
    ) -> Account | None:
        accounts = [self.account(symbol, targets[symbol], low, high, factor) for symbol in self.markets]
        found = [account for account in accounts if account is not None]
        return combine(found) if found else None

    def part(self, label: str, sample: Sample, low: np.datetime64, high: np.datetime64) -> Part | None:
        accounts: dict[str, Account] = {}
        for name in (AGENT, *STRATEGIES):
            account = self.combined({symbol: taken[name] for symbol, taken in self.taken.items()}, low, high)
            if account is None:
                return None
            accounts[name] = account
        own, market = accounts[AGENT], accounts["buy and hold"]
        each = {
            symbol: self.account(symbol, taken[AGENT], low, high) for symbol, taken in self.taken.items()
        } if len(self.markets) > 1 else {}  # fmt: skip
        agent = {symbol: taken[AGENT] for symbol, taken in self.taken.items()}
        costs = {f"{factor}x": self.combined(agent, low, high, factor) for factor in COST_FACTORS}
        per_year = len(own) / years_of(own)
        excess = own.log_returns - market.log_returns
        return Part(
            label=label,
            sample=sample,
            accounts=accounts,
            performances={name: performance(account) for name, account in accounts.items()},
            markets={symbol: performance(account) for symbol, account in each.items() if account is not None},
            years=_by_group(accounts, np.array([str(end)[:4] for end in own.end.astype("datetime64[Y]")])),
            regimes=_by_group(accounts, regimes(market)),
            costs={name: performance(account) for name, account in costs.items() if account is not None},
            excess=(float(excess.mean()) * per_year, *bootstrap_interval(excess, per_year)),
            interval=bootstrap_interval(own.log_returns, per_year),
            deflated=deflated_sharpe(own.returns, self.trials, self._trial_variance(low, high)),
        )

    def _trial_variance(self, low: np.datetime64, high: np.datetime64) -> float | None:
        """Variance of the Sharpe ratios of all trials; ``None`` if fewer than two are known."""
        accounts = [self.combined(targets, low, high) for targets in self.trial_targets]
        ratios = [sharpe(account.returns)[0] for account in accounts if account is not None]
        known = [ratio for ratio in ratios if ratio is not None]
        return float(np.var(known, ddof=1)) if len(known) > 1 else None


def _by_group(accounts: Mapping[str, Account], names: Any) -> dict[str, dict[str, float]]:
    """Log-returns of the agent and of buying and holding, and the agent's Sharpe ratio, by group of bars."""
    own, market = accounts[AGENT], accounts["buy and hold"]
    per_year = len(own) / years_of(own)
    found: dict[str, dict[str, float]] = {}
    for name, which in groups_of(names).items():
        part = own.where(which)
        ratio = sharpe(part.returns)[0] if len(part) > 1 else None
        found[name] = {
            "bars": float(which.sum()),
            "log_return": float(part.log_returns.sum()),
            "buy_and_hold": float(market.log_returns[which].sum()),
            "sharpe": float("nan") if ratio is None else ratio * float(np.sqrt(per_year)),
            "exposure": float((part.long - part.short).mean()),
        }
    return found


def _day(time: np.datetime64) -> str:
    return str(time)[:10]


def _plain(part: Part, points: int) -> dict[str, Any]:
    own = part.accounts[AGENT]
    which = np.unique(np.linspace(0, len(own) - 1, min(points, len(own))).round().astype(int))
    curves = {name: account.equity[which].tolist() for name, account in part.accounts.items()}
    peaks = np.maximum.accumulate(np.maximum(own.equity, 1))
    return {
        "label": part.label,
        "sample": part.sample,
        "performances": {name: asdict(each) for name, each in part.performances.items()},
        "markets": {symbol: asdict(each) for symbol, each in part.markets.items()},
        "years": part.years,
        "regimes": part.regimes,
        "costs": {factor: asdict(each) for factor, each in part.costs.items()},
        "excess": list(part.excess),
        "interval": list(part.interval),
        "deflated": part.deflated,
        "curves": {
            "time": [str(end) for end in own.end[which].astype("datetime64[s]")],
            "equity": curves,
            "drawdown": (own.equity / peaks - 1)[which].tolist(),
            "position": (own.long - own.short)[which].tolist(),
        },
    }
