"""A market with hidden regimes: what it is, what an account in it earns, and the same for many at once."""

from __future__ import annotations

import json

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from hypothesis import given
from hypothesis import strategies as st
from stable_baselines3.common.env_checker import check_env as stable_baselines_check

from driftproof.envs import (
    REGIMES,
    Dynamics,
    FeatureConfig,
    RegimeMarketBatch,
    RegimeMarketEnv,
    RegimeParameters,
    Sudden,
    compute_features,
    drifting,
    regime_bars,
)
from driftproof.envs.regimes import Noise, simulate, simulate_batch
from driftproof.envs.trading import RUIN, settle

SMALL = {"episode_length": 30, "features": {"window": 8, "horizons": [1, 4]}}


def episode(env, actions):
    """What the environment returned, step by step."""
    steps = []
    for action in actions:
        steps.append(env.step(action))
    return steps


def positions(count, seed=0):
    return np.random.default_rng(seed).uniform(-1, 1, (count, 1)).astype(np.float32)


def test_the_name_is_registered():
    env = gymnasium.make("driftproof/RegimeMarket-v0", **SMALL)
    assert type(env) is RegimeMarketEnv
    assert gymnasium.make("driftproof.envs:driftproof/RegimeMarket-v0").observation_space.shape == (14,)


def test_checkers_have_no_objections():
    for actions in ("continuous", "discrete"):
        env = RegimeMarketEnv(actions=actions, observe_position=True, **SMALL)
        check_env(env, skip_render_check=True)
        stable_baselines_check(env)


def test_rewards_are_what_becomes_of_the_account():
    env = RegimeMarketEnv(commission=0.01, slippage=0.005, **SMALL)
    env.reset(seed=0)
    account, owned, price = 1000.0, 0.0, env._closes[0]
    for (action,), (_, reward, _, _, info) in zip(positions(30), episode(env, positions(30)), strict=True):
        before, action = account, float(action)
        # Trade to the position, paying for what is traded, with what is left as the account.
        traded = abs(action * account - owned * price)
        account -= 0.015 * traded
        owned = action * account / price
        account += owned * (info["close"] - price)
        price = info["close"]
        assert reward == pytest.approx(np.log(account / before), rel=1e-6, abs=1e-9)
        assert info["position"] == pytest.approx(owned * price / account, rel=1e-6)
    assert info["wealth"] == pytest.approx(account / 1000)


def test_doing_nothing_earns_nothing_and_holding_earns_the_price():
    env = RegimeMarketEnv(**SMALL)
    env.reset(seed=0)
    assert sum(step[1] for step in episode(env, np.zeros((30, 1)))) == 0
    env.reset(seed=0)
    first = env._closes[0]
    steps = episode(env, np.ones((30, 1)))
    assert sum(step[1] for step in steps) == pytest.approx(np.log((1 - 0.0002) * steps[-1][4]["close"] / first))


def test_discrete_actions_are_positions():
    for action, position in ((0, -1), (1, 0), (2, 1)):
        discrete, continuous = RegimeMarketEnv(actions="discrete", **SMALL), RegimeMarketEnv(**SMALL)
        discrete.reset(seed=3)
        continuous.reset(seed=3)
        for one, other in zip(
            episode(discrete, [action] * 30), episode(continuous, np.full((30, 1), position)), strict=True
        ):
            assert one[1:] == other[1:]


def test_observations_are_features_of_the_past():
    env = RegimeMarketEnv(**SMALL)
    first, info = env.reset(seed=5)
    config = env.features
    path = simulate(Noise.draw(np.random.default_rng(np.random.PCG64(5)), config.lookback + 30), env.parameters)
    assert info["regime"] == path.regime[config.lookback - 1]
    seen = [first, *(step[0] for step in episode(env, positions(30)))]
    for bar, observation in enumerate(seen):
        until = config.lookback + bar
        known = compute_features(*(column[:until] for column in path[:5]), config)[-1]
        np.testing.assert_array_equal(observation, known.astype(np.float32))
    assert len(observation) == len(config.names)


def test_positions_can_be_observed():
    env = RegimeMarketEnv(observe_position=True, **SMALL)
    assert env.reset(seed=0)[0][-1] == 0
    for observation, _, _, _, info in episode(env, positions(30)):
        assert observation[-1] == pytest.approx(info["position"])


def test_a_ruined_account_ends_the_episode():
    parameters = {"volatility": 0.1, "turbulence": 10.0, "turbulence_duration": 1e9}
    env = RegimeMarketEnv(parameters, episode_length=500)
    env.reset(seed=0)
    for _ in range(500):
        _, reward, terminated, truncated, _ = env.step([-1.0])
        if terminated or truncated:
            break
    assert terminated
    assert not truncated
    assert reward == np.log(RUIN)
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step([0.0])


def test_actions_beyond_the_range_are_bounded_and_no_numbers_refused():
    one, other = RegimeMarketEnv(**SMALL), RegimeMarketEnv(**SMALL)
    one.reset(seed=0)
    other.reset(seed=0)
    assert one.step([7.0])[1] == other.step([1.0])[1]
    with pytest.raises(ValueError, match="not a number"):
        one.step([np.nan])
    discrete = RegimeMarketEnv(actions="discrete", **SMALL)
    discrete.reset()
    with pytest.raises(ValueError, match="0 is SELL"):
        discrete.step(3)


def test_pictures_show_prices_and_positions():
    env = RegimeMarketEnv(render_mode="rgb_array", **SMALL)
    env.reset(seed=0)
    assert env.render().shape == (160, 1, 3)
    for position in (1.0, -1.0, 0.0):
        env.step([position])
    picture = env.render()
    assert picture.dtype == np.uint8
    assert picture[0].tolist() == [[255, 255, 255], [155, 255, 155], [255, 155, 155], [255, 255, 255]]
    assert ((picture == 0).all(2).sum(0) == 1).all()
    with pytest.raises(ValueError, match="Invalid render_mode: 'human'"):
        RegimeMarketEnv(render_mode="human")
    assert RegimeMarketEnv().render() is None


def many(parameters, markets=200, rows=600, seed=0):
    generator = np.random.default_rng(seed)
    paths = [simulate(Noise.draw(generator, rows), parameters) for _ in range(markets)]
    return [np.stack(column) for column in zip(*paths, strict=True)]


def test_regimes_are_what_their_parameters_say():
    parameters = RegimeParameters()
    _, high, low, close, volume, regime, drift = many(parameters)
    changes = np.diff(np.log(close), axis=1)
    regime, drift = regime[:, 1:], drift[:, 1:]
    shares = np.bincount(regime.ravel()) / regime.size
    assert shares == pytest.approx(parameters.shares, abs=0.03)
    trend, reversion, turbulence = (regime == number for number in range(3))
    assert changes[turbulence].std() > 2.5 * changes[reversion].std()
    assert np.abs(drift[trend]) == pytest.approx(parameters.trend_drift)
    assert (changes - drift)[trend].std() == pytest.approx(parameters.volatility, rel=0.02)
    lag = [np.mean((changes[:, 1:] * changes[:, :-1])[which[:, 1:] & which[:, :-1]]) for which in (trend, reversion)]
    assert lag[0] > 0 > lag[1]
    leaving = np.dot(parameters.shares, parameters.leaving)
    assert np.mean(regime[:, 1:] != regime[:, :-1]) == pytest.approx(leaving, rel=0.1)
    assert (low <= close).all()
    assert (close <= high).all()
    assert (volume > 0).all()


def test_holding_earns_nothing_on_average():
    _, _, _, close, *_ = many(RegimeParameters(), markets=600)
    gains = np.log(close[:, -1] / close[:, 0])
    assert abs(gains.mean()) < 3 * gains.std() / np.sqrt(len(gains))


def test_the_same_seed_is_the_same_market():
    env = RegimeMarketEnv(**SMALL)
    runs = []
    for _ in range(2):
        env.reset(seed=4)
        first = env._closes
        env.reset()
        runs.append((first, env._closes))
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]


@given(st.integers(0, 29))
def test_a_state_goes_on_where_it_was(steps):
    env, other = RegimeMarketEnv(**SMALL), RegimeMarketEnv(**SMALL)
    env.reset(seed=2)
    other.reset(seed=3)
    episode(env, positions(steps))
    other.load_state_dict(json.loads(json.dumps(env.state_dict())))
    for _ in range(2):
        rest = positions(30 - steps, seed=1)
        for one, another in zip(episode(env, rest), episode(other, rest), strict=True):
            np.testing.assert_array_equal(one[0], another[0])
            assert one[1:] == another[1:]
        np.testing.assert_array_equal(env.reset()[0], other.reset()[0])
        steps = 0


def test_markets_themselves_can_drift():
    env = drifting(RegimeMarketEnv(**SMALL), Dynamics(Sudden(every=30, values=[1, 10]), "parameters.volatility"))
    spreads = []
    for _ in range(2):
        env.reset(seed=0)
        spreads.append(np.std(env.unwrapped._changes))
        state = None
        for action in positions(30):
            env.step(action)
            state = state or env.state_dict()
    assert spreads[1] > 5 * spreads[0]
    # Restored, the market is that of when the episode began.
    env.load_state_dict(state)
    assert np.std(env.unwrapped._changes) > 5 * spreads[0]


def test_an_episode_is_of_the_market_of_its_own_time():
    schedule = Sudden(every=1, values=[1, 10], unit="episodes")
    env = drifting(RegimeMarketEnv(**SMALL), Dynamics(schedule, "parameters.volatility"))
    for factor in (1, 10, 1):
        _, info = env.reset(seed=0)
        assert info["drift"]["dynamics.parameters.volatility"] == factor
        calm = RegimeMarketEnv({"volatility": 0.01 * factor}, **SMALL)
        calm.reset(seed=0)
        assert env.unwrapped._changes == calm._changes


@pytest.mark.parametrize("actions", ["continuous", "discrete"])
@pytest.mark.parametrize("observe_position", [False, True])
def test_many_markets_at_once_are_the_same(actions, observe_position):
    options = {"actions": actions, "observe_position": observe_position, **SMALL}
    batch = RegimeMarketBatch(20, **options)
    generators = [np.random.default_rng(np.random.PCG64(seed)) for seed in range(20)]
    noise = [Noise.draw(generator, batch.rows) for generator in generators]
    seen = batch.reset(Noise(*(torch.tensor(np.stack(column)) for column in zip(*noise, strict=True))))
    envs = [RegimeMarketEnv(**options) for _ in range(20)]
    singles = [env.reset(seed=seed)[0] for seed, env in enumerate(envs)]
    np.testing.assert_allclose(seen.numpy(), singles, atol=1e-6)
    rng = np.random.default_rng(0)
    for _ in range(30):
        taken = rng.integers(0, 3, 20) if actions == "discrete" else rng.uniform(-1.2, 1.2, (20, 1))
        step = batch.step(torch.tensor(taken))
        observations, rewards, _, truncated, infos = zip(
            *(env.step(action) for env, action in zip(envs, taken, strict=True)), strict=True
        )
        np.testing.assert_allclose(step.observation.numpy(), observations, atol=1e-6)
        np.testing.assert_allclose(step.reward.numpy(), rewards, atol=1e-6)
        for name in ("position", "traded", "wealth", "close", "regime"):
            np.testing.assert_allclose(step.info[name].numpy(), [info[name] for info in infos], atol=1e-6)
        assert step.truncated == truncated[0]


def test_ruin_is_the_same_in_one_market_and_in_many():
    options = {"parameters": {"volatility": 0.1, "turbulence": 10.0, "turbulence_duration": 1e9}, **SMALL}
    options |= {"episode_length": 200, "observe_position": True}
    env, batch = RegimeMarketEnv(**options), RegimeMarketBatch(1, **options)
    noise = Noise.draw(np.random.default_rng(np.random.PCG64(0)), batch.rows)
    batch.reset(Noise(*(torch.tensor(column)[None] for column in noise)))
    env.reset(seed=0)
    terminated = False
    while not terminated:
        observation, reward, terminated, _, info = env.step([-1.0])
        step = batch.step(torch.tensor([-1.0]))
        np.testing.assert_allclose(step.observation[0].numpy(), observation, atol=1e-6)
        assert step.reward.item() == pytest.approx(reward, abs=1e-6)
        assert step.info["position"].item() == pytest.approx(info["position"], rel=1e-6)
        assert step.terminated.item() == terminated
    assert info["position"] == 0


def test_actions_beyond_the_range_are_bounded_in_many_markets():
    for actions, beyond, within in (("continuous", [-7.0, 7.0], [-1.0, 1.0]), ("discrete", [-1, 5], [0, 2])):
        batches = [RegimeMarketBatch(2, actions=actions, seed=0, **SMALL) for _ in range(2)]
        for batch in batches:
            batch.reset()
        one, other = (batch.step(torch.tensor(each)) for batch, each in zip(batches, (beyond, within), strict=True))
        assert torch.equal(one.reward, other.reward)


def test_ruin_in_one_of_many_markets():
    batch = RegimeMarketBatch(50, {"volatility": 0.1, "turbulence": 5.0}, 200, seed=1)
    batch.reset()
    total = torch.zeros(50, dtype=torch.float64)
    ruined = torch.zeros(50, dtype=torch.bool)
    for _ in range(200):
        step = batch.step(-torch.ones(50))
        assert (step.reward[ruined] == 0).all()
        total += step.reward
        ruined = step.terminated
        assert torch.isfinite(step.reward).all()
    assert ruined.any()
    assert (step.info["wealth"] == total.exp()).all()


def test_many_markets_go_on_where_they_were():
    batch, other = RegimeMarketBatch(4, seed=0, **SMALL), RegimeMarketBatch(4, seed=9, **SMALL)
    other.load_state_dict(batch.state_dict())
    for before in (0, 7):
        batch.reset()
        for _ in range(before):
            batch.step(torch.ones(4))
        other.load_state_dict(batch.state_dict())
        for _ in range(30 - before):
            ours, theirs = batch.step(torch.ones(4)), other.step(torch.ones(4))
            assert torch.equal(ours.observation, theirs.observation)
            assert torch.equal(ours.reward, theirs.reward)
    assert torch.equal(batch.reset(), other.reset())
    other.load_state_dict(RegimeMarketBatch(4, seed=0, **SMALL).state_dict())
    with pytest.raises(RuntimeError, match="no episode has begun"):
        other.step(torch.ones(4))


def test_many_markets_are_all_different():
    batch = RegimeMarketBatch(8, seed=0, **SMALL)
    first = batch.reset()
    assert len({tuple(row) for row in first.tolist()}) == 8
    assert not torch.equal(first, batch.reset())


def test_single_precision_is_close():
    noise = Noise.draw_batch(torch.Generator().manual_seed(0), 5, 100, torch.device("cpu"), torch.float64)
    exact = simulate_batch(noise, RegimeParameters())
    rough = simulate_batch(Noise(*(part.float() for part in noise)), RegimeParameters())
    assert rough.close.dtype == torch.float32
    torch.testing.assert_close(rough.close.double(), exact.close, rtol=1e-4, atol=0)


@pytest.mark.gpu
def test_markets_on_cuda_are_the_same():
    noise = Noise.draw_batch(torch.Generator().manual_seed(0), 64, 95, torch.device("cpu"), torch.float64)
    batches = [RegimeMarketBatch(64, device=device, episode_length=30) for device in ("cpu", "cuda")]
    seen = [batch.reset(Noise(*(part.to(batch.device) for part in noise))) for batch in batches]
    torch.testing.assert_close(seen[1].cpu(), seen[0], atol=1e-6, rtol=0)
    for _ in range(30):
        steps = [batch.step(torch.ones(64, device=batch.device)) for batch in batches]
        torch.testing.assert_close(steps[1].reward.cpu(), steps[0].reward, atol=1e-6, rtol=0)


@given(st.floats(-1, 1), st.floats(-1, 1), st.floats(-0.5, 0.9), st.floats(0, 0.01))
def test_settling_never_makes_money_of_nothing(position, target, change, cost):
    growth, after = settle(position, target, change, cost)
    assert growth <= 1 + abs(target * change) + 1e-12
    assert after * growth == pytest.approx(target * (1 + change) * (1 - cost * abs(target - position)), abs=1e-9)


def test_bars_as_if_they_were_real():
    bars = regime_bars(100, {"trend_drift": 0.0}, seed=3, symbol="X")
    assert len(bars) == 100
    assert bars.symbol == "X"
    assert bars.timestamps[1] - bars.timestamps[0] == np.timedelta64(1, "h")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RegimeMarketEnv({"volatilty": 1}), r"did you mean 'volatility'"),
        (lambda: RegimeMarketEnv(RegimeParameters(volatility=0)), "Invalid volatility: 0"),
        (lambda: RegimeParameters(volatility=1), "Invalid volatility: 1"),
        (lambda: RegimeParameters(reversion_speed=1), "Invalid reversion_speed: 1"),
        (lambda: RegimeParameters(turbulence_duration=0.5), "Invalid turbulence_duration"),
        (lambda: RegimeMarketEnv(actions="both"), "Invalid actions: 'both'"),
        (lambda: RegimeMarketEnv(commission=-1), "Invalid commission: -1"),
        (lambda: RegimeMarketEnv(episode_length=0), "Invalid episode_length: 0"),
        (lambda: RegimeMarketEnv(features={"windows": 3}), "did you mean 'window'"),
        (lambda: RegimeMarketBatch(0), "Invalid num_markets: 0"),
        (lambda: RegimeMarketBatch(2).reset(Noise(*[torch.zeros(2, 3)] * 7)), "noise must be of shape"),
    ],
)
def test_nonsense_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_batches_need_a_reset():
    batch = RegimeMarketBatch(2, **SMALL)
    with pytest.raises(RuntimeError, match="call reset"):
        batch.step(torch.zeros(2))
    noise = Noise.draw_batch(torch.Generator(), 2, batch.rows, torch.device("cpu"), torch.float64)
    batch.reset(noise)
    with pytest.raises(RuntimeError, match="cannot be saved"):
        batch.state_dict()


def test_names_of_regimes():
    assert REGIMES == ("trend", "reversion", "turbulence")
    assert FeatureConfig().lookback == 65
