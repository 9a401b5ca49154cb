"""An account that follows given positions through given prices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from driftproof.envs.trading import RUIN

Numbers = npt.NDArray[np.float64]
Times = npt.NDArray[np.datetime64]

YEAR = 365.25 * 86400
"""Seconds of a year."""


@dataclass(frozen=True)
class Account:
    """Bars of an account, arrays ``[T]``. A bar lasts from one close, where the account trades, to the next.

    Numbers are fractions of the account's value at the beginning of the bar.

    Attributes:
        start: When bars begin.
        end: When bars end.
        growth: Factor by which the account grows, after costs.
        long: Value held long.
        short: Value held short.
        traded: Value traded.
        costs: Costs of trading.
        financing: Cost of borrowing what is sold short.
    """

    start: Times
    end: Times
    growth: Numbers
    long: Numbers
    short: Numbers
    traded: Numbers
    costs: Numbers
    financing: Numbers

    def __len__(self) -> int:
        return len(self.growth)

    @property
    def returns(self) -> Numbers:
        """Simple returns of bars."""
        return self.growth - 1

    @property
    def log_returns(self) -> Numbers:
        """Logarithmic returns of bars, which add up."""
        return np.log(self.growth).astype(np.float64)

    @property
    def equity(self) -> Numbers:
        """Value of the account, at first 1, at the end of bars."""
        return np.cumprod(self.growth, dtype=np.float64)

    def where(self, which: npt.NDArray[np.bool_]) -> Account:
        """Some of the bars."""
        return Account(**{field.name: getattr(self, field.name)[which] for field in fields(self)})


def simulate(
    times: Times, close: Numbers, targets: Numbers, cost: float, financing: float = 0.0, position: float = 0.0
) -> Account:
    """The account that takes a position at each close but the last.

    As in :class:`driftproof.envs.trading.TradingEnv`, the position is a share of the account that moves with the price,
    so that keeping it takes small trades. A ruined account stays as it is.

    Args:
        times: Times of the bars ``[T + 1]``.
        close: Closes ``[T + 1]``.
        targets: Positions from -1 to 1, taken at all closes but the last ``[T]``.
        cost: Cost of trading, as a share of the value traded.
        financing: Cost of borrowing what is sold short, as a share of its value, per year.
        position: Position before the first trade.
    """
    change = close[1:] / close[:-1] - 1
    years = np.diff(times) / np.timedelta64(1, "us") / (YEAR * 1e6)
    targets = np.array(targets, np.float64)
    interest = financing * np.maximum(-targets, 0) * years
    held = 1 + targets * change - interest
    after = targets * (1 + change) / np.where(held == 0, 1, held)
    traded = np.abs(targets - np.concatenate(([position], after[:-1])))
    growth = (1 - cost * traded) * held
    paid = (1 - cost * traded) * interest
    ruined = np.flatnonzero(growth <= RUIN)
    if len(ruined):
        growth[ruined[0]], rest = RUIN, slice(ruined[0] + 1, None)
        growth[rest], targets[rest], traded[rest], paid[rest] = 1, 0, 0, 0
    long, short = np.maximum(targets, 0), np.maximum(-targets, 0)
    return Account(times[:-1], times[1:], growth, long, short, traded, cost * traded, paid)


def combine(accounts: Sequence[Account]) -> Account:
    """Several accounts as one, which begins with the same value in each and moves nothing between them."""
    if len(accounts) == 1:
        return accounts[0]
    ends = np.unique(np.concatenate([account.end for account in accounts]))
    starts = np.concatenate(([min(account.start[0] for account in accounts)], ends[:-1]))
    totals = {name: np.zeros(len(ends)) for name in ("growth", "long", "short", "traded", "costs", "financing")}
    value = np.zeros(len(ends))
    for account in accounts:
        at = np.searchsorted(ends, account.end)
        growth = np.ones(len(ends))
        growth[at] = account.growth
        before = np.concatenate(([1.0], np.cumprod(growth)[:-1]))
        value += before
        totals["growth"] += before * growth
        for name in ("long", "short", "traded", "costs", "financing"):
            totals[name][at] += before[at] * getattr(account, name)
    return Account(starts, ends, **{name: total / value for name, total in totals.items()})
