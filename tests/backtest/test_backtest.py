"""Backtests: figures against an independent calculation, no look-ahead, costs, parts of the time."""

from __future__ import annotations

import csv
import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driftproof.backtest import backtest, combine, deflated_sharpe, performance, simulate
from driftproof.backtest.engine import Training
from driftproof.backtest.files import equity_table, trades_table, write_table
from driftproof.backtest.statistics import bootstrap_interval, sharpe
from driftproof.backtest.strategies import STRATEGIES, WINDOW
from driftproof.envs import Bars, MarketEnv, regime_bars
from driftproof.envs.trading import RUIN
from driftproof.signals import positions

from ..signals.agents import FEATURES, agent, market
from . import independent


def days(count, start="2015-01-01"):
    return (np.datetime64(start) + np.arange(count)).astype("datetime64[us]")


def bars_of(close, symbol="ONE", start="2015-01-01"):
    close = np.asarray(close, float)
    return Bars(days(len(close), start), close, close, close, close, np.ones(len(close)), symbol)


def prices(count, seed=0):
    return 100 * np.exp(np.cumsum(np.random.default_rng(seed).normal(0.0003, 0.02, count)))


PATHS = st.integers(3, 60).flatmap(
    lambda n: st.tuples(
        st.lists(st.floats(0.9, 1.15), min_size=n, max_size=n).map(lambda x: np.cumprod(x) * 50),
        st.lists(st.sampled_from([-1.0, -0.5, 0.0, 0.3, 1.0]), min_size=n - 1, max_size=n - 1).map(np.array),
    )
)


@settings(max_examples=50)
@given(PATHS, st.sampled_from([0.0, 0.0002, 0.01]), st.sampled_from([0.0, 0.02]))
def test_figures_are_those_of_an_independent_calculation(path, cost, financing):
    close, targets = path
    times = days(len(close))
    account = simulate(times, close, targets, cost, financing)
    found = dataclasses.asdict(performance(account))
    if found["sharpe"] is None or found["sortino"] is None or found["volatility"] < 1e-6:
        return
    seconds = (times - times[0]) / np.timedelta64(1, "s")
    expected = independent.figures(seconds.tolist(), close.tolist(), targets.tolist(), cost, financing)
    for name, value in expected.items():
        assert found[name] == (value if value is None else pytest.approx(value, rel=1e-9, abs=1e-9)), name


def test_a_few_weeks_have_no_return_per_year():
    close = 100 * 1.001 ** np.arange(366)
    assert performance(simulate(days(60), close[:60], np.ones(59), 0, 0)).annual_return is None
    year = performance(simulate(days(366), close, np.ones(365), 0, 0))
    assert year.annual_return == pytest.approx(1.001**365.25 - 1, rel=1e-9)


def test_deflated_sharpe_is_that_of_an_independent_calculation():
    returns = np.random.default_rng(3).standard_t(4, 500) * 0.01 + 0.001
    ratio, error = sharpe(returns)
    assert deflated_sharpe(returns, 20, 0.002) == pytest.approx(independent.deflated(ratio, error, 20, 0.002), rel=1e-9)
    assert deflated_sharpe(returns, 1) > deflated_sharpe(returns, 5) > deflated_sharpe(returns, 100)
    assert deflated_sharpe(np.zeros(10), 5) is None


@settings(max_examples=40)
@given(PATHS, st.lists(st.floats(0, 0.1), min_size=2, max_size=2).map(sorted))
def test_higher_costs_never_earn_more(path, costs):
    low, high = (simulate(days(len(path[0])), *path, cost).growth for cost in costs)
    assert (high <= low).all()
    cheap, dear = (simulate(days(len(path[0])), *path, 0.001, fee).growth for fee in costs)
    assert (dear <= cheap).all()


def test_an_account_is_that_of_the_environment():
    bars = market(60)
    for kind in ({}, {"actions": "discrete"}, {"position": True}):
        model = agent(**kind)
        env = MarketEnv(bars, "all", episode_length=None, features=FEATURES, actions=kind.get("actions", "continuous"))
        taken = positions(model, {"ONE": bars}, FEATURES)["ONE"]
        env.reset(seed=0)
        first = FEATURES.lookback - 1
        rewards = []
        for target in taken[first:-1]:
            action = int(target) + 1 if "actions" in kind else np.array([target])
            rewards.append(env.step(action)[1])
        account = simulate(bars.timestamps[first:], bars.close[first:], taken[first:-1], env.cost)
        np.testing.assert_allclose(account.log_returns, rewards, atol=1e-12)


@pytest.mark.parametrize("kind", [{}, {"actions": "discrete"}, {"position": True}])
def test_positions_are_those_that_the_agent_takes(kind):
    bars, model = market(60), agent(**kind)
    env = MarketEnv(
        bars,
        "all",
        episode_length=None,
        features=FEATURES,
        actions=kind.get("actions", "continuous"),
        observe_position=kind.get("position", False),
    )
    taken = positions(model, {"ONE": bars}, FEATURES)["ONE"]
    assert np.isnan(taken[: FEATURES.lookback - 1]).all()
    observation, _ = env.reset(seed=0)
    state, start = None, np.ones(1, bool)
    for target in taken[FEATURES.lookback - 1 : -1]:
        action, state = model.predict(observation, state, start, deterministic=True)
        own = float(action) - 1 if "actions" in kind else float(np.clip(action[0], -1, 1))
        assert target == pytest.approx(own, abs=1e-5)
        observation, *_ = env.step(action)
        start = np.zeros(1, bool)


@settings(max_examples=25)
@given(st.integers(5, 199), st.integers(0, 2**32 - 1), st.sampled_from(sorted(STRATEGIES)))
def test_no_figure_knows_what_comes_after_it(row, seed, name):
    close = prices(200)
    other = close.copy()
    other[row:] *= np.random.default_rng(seed).uniform(0.5, 2, 200 - row)
    taken, changed = STRATEGIES[name](close), STRATEGIES[name](other)
    np.testing.assert_array_equal(taken[:row], changed[:row])
    one, two = (simulate(days(200), c, t[:-1], 0.001, 0.01) for c, t in ((close, taken), (other, changed)))
    np.testing.assert_array_equal(one.equity[: row - 1], two.equity[: row - 1])


@settings(max_examples=10)
@given(st.integers(20, 58), st.integers(0, 2**32 - 1))
def test_no_backtest_of_an_agent_knows_what_comes_after_it(row, seed):
    bars, model = market(60), agent()
    factors = np.random.default_rng(seed).uniform(0.5, 2, 60 - row)
    changed = dataclasses.replace(
        bars,
        **{
            name: np.append(getattr(bars, name)[:row], getattr(bars, name)[row:] * factors)
            for name in ("open", "high", "low", "close")
        },
    )
    curves = []
    for each in (bars, changed):
        result = backtest({"A": each}, positions(model, {"A": each}, FEATURES), cost=0.001, training=Training())
        curves.append(result.parts[0].accounts["agent"].equity)
    bars_before = row - FEATURES.lookback
    np.testing.assert_array_equal(curves[0][:bars_before], curves[1][:bars_before])


def test_a_ruined_account_stays_ruined():
    close = np.array([1.0, 1.0, 2.5, 1.0, 1.0])
    account = simulate(days(5), close, np.array([0.0, -1.0, -1.0, 1.0]), 0.0)
    assert account.equity.tolist() == [1.0, RUIN, RUIN, RUIN]
    assert account.traded.tolist() == [0, 1, 0, 0]


def test_short_positions_are_financed():
    account = simulate(days(366), np.ones(366), -np.ones(365), 0.0, 0.02)
    assert account.financing.sum() == pytest.approx(0.02 * 365 / 365.25)
    assert simulate(days(366), np.ones(366), np.ones(365), 0.0, 0.02).financing.sum() == 0


def test_accounts_together_begin_with_equal_values():
    one = simulate(days(4), np.array([1, 2, 2, 2.0]), np.ones(3), 0.0)
    two = simulate(days(2, "2015-01-03"), np.array([1, 0.5]), np.ones(1), 0.0)
    both = combine([one, two])
    assert both.equity.tolist() == [1.5, 1.5, 1.25]
    assert both.long.tolist() == [0.5, 2 / 3, 1.0]
    assert both.end.tolist() == one.end.tolist()


def test_parts_are_told_apart():
    bars = bars_of(prices(400))
    targets = {"ONE": np.append(np.full(20, np.nan), np.ones(380))}
    training = Training((("2015-04-01", "2015-08-01"),), "trained on ONE, 2015-04-01 to 2015-08-01")
    result = backtest({"ONE": bars}, targets, cost=0.001, training=training)
    assert [(part.label, part.sample) for part in result.parts] == [
        ("out of sample, before training", "out of sample"),
        ("IN SAMPLE", "in sample"),
        ("out of sample, after training", "out of sample"),
    ]
    ends = [(part.performances["agent"].first, part.performances["agent"].last) for part in result.parts]
    assert ends == [("2015-01-21", "2015-04-01"), ("2015-04-01", "2015-08-01"), ("2015-08-01", "2016-02-04")]
    assert result.main is result.parts[2]
    agent_, hold = (result.main.performances[name] for name in ("agent", "buy and hold"))
    assert agent_ == hold
    assert result.main.excess == (0, 0, 0)
    assert set(result.main.years) == {"2015", "2016"}
    assert math.fsum(year["log_return"] for year in result.main.years.values()) == pytest.approx(agent_.log_return)
    assert math.fsum(each["bars"] for each in result.main.regimes.values()) == agent_.bars
    by_cost = [each.log_return for each in result.main.costs.values()]
    assert by_cost == sorted(by_cost, reverse=True)
    assert list(result.main.costs) == ["0x", "1x", "2x", "5x"]
    unknown = backtest({"ONE": bars}, targets, cost=0.001)
    assert [(part.label, part.sample) for part in unknown.parts] == [("UNKNOWN SAMPLE", "unknown")]
    later = backtest({"ONE": bars}, targets, cost=0.001, training=training, start="2015-10-01", end="2015-12-01")
    assert [part.label for part in later.parts] == ["out of sample, after training"]
    assert later.main.performances["agent"].first == "2015-10-01"
    with pytest.raises(ValueError, match="too few bars with features between 2018-01-01"):
        backtest({"ONE": bars}, targets, cost=0.001, start="2018-01-01")


def test_several_markets_are_one_portfolio_and_each_is_shown(tmp_path):
    markets = {"ONE": bars_of(prices(300, 1), "ONE"), "TWO": bars_of(prices(200, 2), "TWO", "2015-02-01")}
    generator = np.random.default_rng(5)
    targets = {symbol: generator.choice([-1.0, 0.0, 1.0], len(bars)) for symbol, bars in markets.items()}
    trials = [{symbol: generator.uniform(-1, 1, len(bars)) for symbol, bars in markets.items()} for _ in range(3)]
    result = backtest(markets, targets, cost=0.001, financing=0.01, training=Training(), trials=7, trial_targets=trials)
    part = result.main
    assert set(part.markets) == {"ONE", "TWO"}
    both = [
        simulate(bars.timestamps, bars.close, targets[symbol][:-1], 0.001, 0.01) for symbol, bars in markets.items()
    ]
    assert part.accounts["agent"].equity[-1] == pytest.approx(np.mean([account.equity[-1] for account in both]))
    assert part.deflated < part.performances["agent"].probability
    plain = result.to_dict(points=50)
    assert len(plain["parts"][0]["curves"]["time"]) == 50
    assert len(plain["parts"][0]["curves"]["equity"]["buy and hold"]) == 50
    trades, equity = trades_table(result), equity_table(result)
    held = [np.flatnonzero(np.diff(np.sign(each[:-1]), prepend=0) * np.sign(each[:-1])) for each in targets.values()]
    assert len(trades["entry"]) == sum(map(len, held))
    assert equity["log_return"].sum() == pytest.approx(part.performances["agent"].log_return)
    for name, columns in (("trades", trades), ("equity", equity)):
        rows = list(csv.DictReader(write_table(tmp_path / f"{name}.csv", columns).read_text().splitlines()))
        assert len(rows) == len(next(iter(columns.values())))
        parquet = pytest.importorskip("pyarrow.parquet")
        table = parquet.read_table(write_table(tmp_path / f"{name}.parquet", columns))
        assert table.num_rows == len(rows)


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    generator = np.random.default_rng(0)
    covered = 0
    for seed in range(30):
        noise = generator.normal(size=400)
        values = 0.1 + noise + 0.5 * np.roll(noise, 1)  # neighbours depend on each other
        low, high = bootstrap_interval(values, seed=seed)
        covered += low <= 0.1 <= high
    assert 24 <= covered <= 30


def test_volatility_scaling_holds_less_in_turbulent_times():
    generator = np.random.default_rng(1)
    changes = np.concatenate((generator.normal(0, 0.01, 400), generator.normal(0, 0.03, 200)))
    targets = STRATEGIES["volatility-scaled"](np.exp(np.cumsum(changes)))
    assert targets[:WINDOW].min() == 1
    assert targets[-1] < 0.5 < targets[300]


def test_regime_bars_can_be_backtested():
    bars = regime_bars(300)
    result = backtest({"R": bars}, {"R": np.ones(300)}, cost=0.0002, training=Training())
    assert result.main.performances["agent"].bars == 299
