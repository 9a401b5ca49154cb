"""An account in a market of one's own data."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from stable_baselines3.common.env_checker import check_env as stable_baselines_check
from stable_baselines3.common.env_util import make_vec_env

from driftproof.envs import (
    FeatureConfig,
    MarketDataError,
    MarketEnv,
    compute_features,
    from_columns,
    regime_bars,
    write_csv,
)
from driftproof.ppo import DistributionalPPO

SMALL = FeatureConfig(window=8, horizons=(1, 4))
OPTIONS = {"features": SMALL, "episode_length": 20}


@pytest.fixture
def bars():
    return regime_bars(200, seed=1, symbol="X")


def test_the_name_is_registered(tmp_path, bars):
    write_csv(tmp_path / "x.csv", bars)
    env = gymnasium.make("driftproof/Market-v0", data=str(tmp_path / "x.csv"), **OPTIONS)
    assert type(env) is MarketEnv
    check_env(env, skip_render_check=True)
    stable_baselines_check(env)


def test_files_that_are_wrong_are_named(tmp_path, bars):
    with pytest.raises(MarketDataError, match=r"x.csv: there is no such file"):
        gymnasium.make("driftproof/Market-v0", data=tmp_path / "x.csv")


def test_parts_are_apart_and_in_order(bars):
    rows = [MarketEnv(bars, split, **OPTIONS).rows["X"] for split in ("train", "validation", "test")]
    assert rows == [range(8, 140), range(140, 170), range(170, 200)]
    assert MarketEnv(bars, "all", **OPTIONS).rows["X"] == range(8, 200)
    first, second = bars.timestamps[150], bars.timestamps[180]
    rows = [
        MarketEnv(bars, split, dates=[str(first), str(second)], **{**OPTIONS, "episode_length": 10}).rows["X"]
        for split in ("train", "validation", "test")
    ]
    assert rows == [range(8, 150), range(150, 180), range(180, 200)]


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_episodes_stay_within_their_part(bars, split):
    env = MarketEnv(bars, split, **{**OPTIONS, "episode_length": 10})
    seen = set()
    env.reset(seed=0)
    for _ in range(60):
        _, info = env.reset()
        seen.add(info["row"])
        for _ in range(10):
            _, _, _, truncated, info = env.step([1.0])
            seen.add(info["row"])
        assert truncated
    assert seen == set(env.rows["X"])


def test_what_happens_later_changes_nothing_before(bars):
    """Every observation and reward of training, with all that comes after replaced."""

    def train(close):
        other = regime_bars(200, seed=9)
        columns = {
            name: np.concatenate([getattr(bars, name)[:140], getattr(close(other), name)[140:]])
            for name in ("open", "high", "low", "close", "volume")
        }
        env = MarketEnv(from_columns({"timestamp": bars.timestamps, **columns}), **{**OPTIONS, "episode_length": None})
        observation, _ = env.reset()
        seen = [observation, *(env.step([0.7]) for _ in range(131))]
        assert seen[-1][3]
        return seen

    for one, other in zip(train(lambda _: bars), train(lambda other: other), strict=True):
        np.testing.assert_array_equal(one[0], other[0])
        assert np.array_equal(one[1], other[1])


def test_observations_are_the_features_that_others_compute(bars):
    env = MarketEnv(bars, "test", **{**OPTIONS, "episode_length": None})
    features = compute_features(*bars.prices, SMALL).astype(np.float32)
    observation, info = env.reset()
    assert info["row"] == 170
    np.testing.assert_array_equal(observation, features[170])
    total = 0.0
    for row in range(171, 200):
        observation, reward, _, truncated, info = env.step([1.0])
        np.testing.assert_array_equal(observation, features[row])
        assert info["close"] == bars.close[row]
        total += reward
    assert truncated
    assert total == pytest.approx(np.log(bars.close[199] / bars.close[170] * 0.9998))


def test_several_markets_take_turns_at_random(bars):
    env = MarketEnv({"X": bars, "Y": regime_bars(300, seed=2)}, **OPTIONS)
    env.reset(seed=0)
    assert {env.reset()[1]["symbol"] for _ in range(30)} == {"X", "Y"}
    assert {MarketEnv(env.markets, symbols=["Y"], **OPTIONS).reset()[1]["symbol"] for _ in range(5)} == {"Y"}
    _, info = env.reset(options={"symbol": "Y", "row": 60})
    assert (info["symbol"], info["row"], info["close"]) == ("Y", 60, env.markets["Y"].close[60])


def test_a_state_goes_on_where_it_was(bars):
    env, other = (MarketEnv({"X": bars, "Y": regime_bars(300, seed=2)}, **OPTIONS) for _ in range(2))
    other.load_state_dict(env.state_dict())
    env.reset(seed=3)
    for _ in range(7):
        env.step([0.5])
    other.load_state_dict(env.state_dict())
    for _ in range(13):
        one, another = env.step([-0.5]), other.step([-0.5])
        np.testing.assert_array_equal(one[0], another[0])
        assert one[1:] == another[1:]
    assert env.reset()[1] == other.reset()[1]
    with pytest.raises(ValueError, match="which is not here"):
        MarketEnv(regime_bars(100, symbol="Z"), **OPTIONS).load_state_dict(env.state_dict())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"episode_length": 132}, r"train of 'X' has 140 rows, 131 of which can be steps"),
        ({"split": "test", "episode_length": 30}, "30 rows, 29 of which"),
        ({"split": "tomorrow"}, "Invalid split: 'tomorrow'"),
        ({"fractions": (0.5, 0.5)}, "must be three, of the sum 1"),
        ({"fractions": (0.5, 0.3, 0.3)}, "must be three, of the sum 1"),
        ({"fractions": (1.5, -0.5, 0)}, "Invalid fractions: -0.5"),
        ({"dates": ["2001-01-01"]}, "must be two"),
        ({"dates": ["2001-01-01", "2000-01-01"]}, "must not begin after"),
        ({"symbols": ["Y"]}, "there are 'X'"),
        ({"load": {"timezone": "UTC"}}, "load is for files"),
    ],
)
def test_nonsense_is_refused(bars, arguments, message):
    with pytest.raises(ValueError, match=message):
        MarketEnv(bars, **{**OPTIONS, **arguments})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"symbol": "Y"}, "Invalid symbol: 'Y'"),
        ({"row": 7}, "begin at 8 to 119"),
        ({"rows": 7}, "Invalid options: rows"),
    ],
)
def test_options_without_a_meaning_are_refused(bars, options, message):
    with pytest.raises(ValueError, match=message):
        MarketEnv(bars, **OPTIONS).reset(options=options)


def test_data_of_another_kind_is_refused():
    with pytest.raises(TypeError, match="must be a file, Bars"):
        MarketEnv([1, 2, 3])


def test_agents_learn_in_it(tmp_path, bars):
    write_csv(tmp_path / "x.csv", bars, regime_bars(200, seed=2, symbol="Y"))
    env = make_vec_env("driftproof/Market-v0", 2, env_kwargs={"data": tmp_path / "x.csv", **OPTIONS})
    agent = DistributionalPPO("MlpPolicy", env, n_steps=32, batch_size=32, n_epochs=1, seed=0, device="cpu")
    agent.learn(128)
    assert agent.num_timesteps == 128
    assert agent.worker.is_whole


@pytest.mark.parametrize("index", ["sp500", "nasdaq"])
def test_real_prices(index, tmp_path):
    data = pytest.importorskip(f"arch.data.{index}").load()
    path = tmp_path / f"{index}.csv"
    data.to_csv(path)
    env = MarketEnv(path, "test", episode_length=None, load={"columns": {"timestamp": "Date"}})
    bars = env.markets[index]
    assert len(bars) == 5031
    assert str(bars.timestamps[0]) == "1999-01-04T00:00:00.000000"
    assert bars.close.tolist() == data["Close"].tolist()
    observation, _ = env.reset()
    total, steps, truncated = 0.0, 0, False
    while not truncated:
        observation, reward, _, truncated, _ = env.step([1.0])
        assert np.isfinite(observation).all()
        total, steps = total + reward, steps + 1
    assert steps == len(env.rows[index]) - 1
    assert total == pytest.approx(np.log(bars.close[-1] / bars.close[env.rows[index].start] * 0.9998))
