"""Signals of histories: what the agent does in the market, bar by bar, and nothing that it could not know."""

import copy
import dataclasses

import gymnasium
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3.common.vec_env import DummyVecEnv

from driftproof.envs import FeatureConfig, write_csv
from driftproof.ppo import DistributionalPPO
from driftproof.signals import Thresholds, infer
from driftproof.signals import batch as batch_module
from driftproof.signals.actors import make_actor
from driftproof.signals.steps import NumpyStep
from driftproof.signals.view import MarketView

from .agents import FEATURES, agent, first, market, numbers

KINDS = {
    "LSTM": {},
    "LSTM, choices": {"actions": "discrete"},
    "GRU, normalised": {"policy": "MlpGruPolicy", "normalised": True},
    "no memory": {"policy": "MlpPolicy", "actions": "discrete"},
    "one memory": {"networks": (("shared_recurrence", True),)},
    "own extractors, one critic": {"networks": (("share_features_extractor", False), ("twin_critics", False))},
    "atoms, squashed": {"networks": (("value_head", "categorical"), ("squash_output", True))},
    "no layer normalisation, choices": {"actions": "discrete", "networks": (("layer_norm", False),)},
    "position": {"position": True},
    "position, no layer normalisation": {"position": True, "networks": (("layer_norm", False),)},
    "position, choices, normalised": {"position": True, "actions": "discrete", "normalised": True},
    "position, squashed, normalised": {"position": True, "normalised": True, "networks": (("squash_output", True),)},
    "position, ReLU, one memory": {
        "position": True,
        "networks": (("activation_fn", torch.nn.ReLU), ("shared_recurrence", True)),
    },
    "position, two layers": {"position": True, "networks": (("n_lstm_layers", 2),)},
    "position, GRU, one memory": {
        "position": True,
        "policy": "MlpGruPolicy",
        "networks": (("shared_recurrence", True),),
    },
}


def trading(bars, actions="continuous", position=False, **_):
    return gymnasium.make(
        "driftproof/Market-v0",
        data=bars,
        split="all",
        episode_length=None,
        features=FEATURES,
        actions=actions,
        observe_position=position,
    )


def episode(model, bars, options):
    """Positions, scores and quantiles of an agent that trades through all bars, from its own surface."""
    env = trading(bars, **options)
    observation, _ = env.reset()
    state = critic_state = None
    targets, quantiles, ended = [], [], False
    while True:
        seen = model.normalizer.normalize(observation[None])
        expected, critic_state = model.predict_quantiles(seen, critic_state)
        quantiles.append(expected[:, 0])
        action, state = model.predict(seen, state, deterministic=True)
        targets.append(float(action[0]) - 1 if model.action_space == gymnasium.spaces.Discrete(3) else action[0, 0])
        if ended:
            return np.array(targets), np.array(quantiles)
        observation, _, terminated, truncated, _ = env.step(action[0])
        ended = terminated or truncated


@pytest.mark.parametrize("kind", KINDS)
def test_signals_are_what_the_agent_does_in_the_market(kind):
    options = KINDS[kind]
    model, bars = agent(**options), market()
    signals = infer(model, bars, features=FEATURES, cvar_alpha=0.25)
    targets, quantiles = episode(model, bars, options)
    before = FEATURES.lookback - 1
    assert np.isnan(numbers(signals)[:before]).all()
    assert (signals.signal[:before] == "HOLD").all()
    score = signals.score[before:]
    if options.get("actions") == "discrete":
        # What it does is the most probable; how probable, the next test says.
        assert (np.sign(score)[np.abs(score) > 0.5] == targets[np.abs(score) > 0.5]).all()
    else:
        np.testing.assert_allclose(score, targets, atol=1e-6)
    assert len(np.unique(targets)) > 1
    levels = (np.arange(quantiles.shape[-1]) + 0.5) / quantiles.shape[-1]
    for name, level in (("p10", 0.1), ("p50", 0.5), ("p90", 0.9)):
        each = [[np.interp(level, levels, critic) for critic in critics] for critics in quantiles]
        np.testing.assert_allclose(getattr(signals, name)[before:], np.min(each, 1), atol=1e-6)
    if options.get("networks", ((None, None),))[0][1] != "categorical":
        worst = quantiles[..., : quantiles.shape[-1] // 4].mean(-1).min(-1)
        np.testing.assert_allclose(signals.cvar[before:], worst, atol=1e-6)


def test_positions_are_normalised_as_the_agent_does_it():
    model = agent(position=True, normalised=True)
    view, observation = MarketView(model, FEATURES), np.zeros((5, len(FEATURES.names) + 1), np.float32)
    observation[:, -1] = [-10, -1, 0, 0.3, 10]
    expected = model.normalizer.normalize(observation)[:, -1]
    assert np.abs(expected).max() == 2
    found = [view.normalised_position(position) for position in observation[:, -1].tolist()]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("position", [False, True])
def test_score_of_choices_is_how_much_more_probable_buying_is(position):
    model, bars = agent(actions="discrete", position=position), market()
    signals = infer(model, bars, features=FEATURES)
    env = trading(bars, actions="discrete", position=position)
    observation, _ = env.reset()
    step, state = model.policy.stepper(), model.policy.initial_state(1)
    for score in signals.score[FEATURES.lookback - 1 : -1]:
        with torch.no_grad():
            logits, _, state, _ = step(model.policy.normalized(torch.as_tensor(observation[None])), state)
        sell, _, buy = logits.softmax(-1)[0].tolist()
        assert score == pytest.approx(buy - sell, abs=1e-6)
        observation, *_ = env.step(int(logits.argmax()))


def test_fast_step_is_taken_where_it_can_be():
    for kind in ("position", "position, no layer normalisation"):
        assert NumpyStep.suits(agent(**KINDS[kind]).policy)
    assert not NumpyStep.suits(agent(**KINDS["position, two layers"]).policy)


@pytest.mark.parametrize("kind", ["LSTM", "GRU, normalised", "position", "position, two layers"])
@settings(max_examples=30)
@given(data=st.data())
def test_no_signal_knows_what_comes_after_it(kind, data):
    model, bars = agent(**KINDS[kind]), market(60)
    row = data.draw(st.integers(1, 59))
    factors = np.array(data.draw(st.lists(st.floats(0.5, 2), min_size=60 - row, max_size=60 - row)))
    volume = np.array(data.draw(st.lists(st.floats(0, 1e9), min_size=60 - row, max_size=60 - row)))
    other = dataclasses.replace(
        bars,
        **{
            name: np.append(getattr(bars, name)[:row], getattr(bars, name)[row:] * factors)
            for name in ("open", "high", "low", "close")
        },
        volume=np.append(bars.volume[:row], volume),
    )
    expected, found = (infer(model, each, features=FEATURES) for each in (bars, other))
    np.testing.assert_array_equal(numbers(expected)[:row], numbers(found)[:row])
    shorter = infer(model, first(bars, row), features=FEATURES)
    np.testing.assert_allclose(numbers(expected)[:row], numbers(shorter), atol=1e-6)


@pytest.mark.parametrize("kind", ["LSTM", "no memory", "position", "position, GRU, one memory"])
def test_markets_side_by_side_do_not_know_each_other(kind, monkeypatch):
    monkeypatch.setattr(batch_module, "_ROWS", 40)
    monkeypatch.setattr(batch_module, "_LEAST_ROWS", 16)
    model = agent(**KINDS[kind])
    # One too short for features, two of the same length, and two that end in the middle of a chunk.
    lengths = {"E": 5, "C": 60, "A": 100, "D": 23, "B": 60}
    markets = {symbol: market(rows, i, symbol) for i, (symbol, rows) in enumerate(lengths.items())}
    together = infer(model, markets, features=FEATURES)
    assert len(together) == sum(lengths.values())
    order = list(zip(together.timestamp.tolist(), together.symbol.tolist(), strict=True))
    assert order == sorted(order)
    for symbol, bars in markets.items():
        alone, rows = infer(model, bars, features=FEATURES), together.symbol == symbol
        np.testing.assert_allclose(numbers(together)[rows], numbers(alone), atol=1e-6)
        np.testing.assert_array_equal(together.close[rows], bars.close)
        np.testing.assert_array_equal(together.timestamp[rows], bars.timestamps)


def test_chunks_leave_no_trace(monkeypatch):
    model, bars = agent(), market()
    expected = infer(model, bars, features=FEATURES)
    monkeypatch.setattr(batch_module, "_ROWS", 7)
    monkeypatch.setattr(batch_module, "_LEAST_ROWS", 1)
    seen = []
    found = infer(model, bars, features=FEATURES, on_progress=lambda *each: seen.append(each))
    np.testing.assert_allclose(numbers(found), numbers(expected), atol=1e-6)
    rows = len(bars) - FEATURES.lookback + 1
    assert seen == [(min(done, rows), rows) for done in range(7, rows + 7, 7)]


def test_ruined_account_begins_anew():
    model = copy.deepcopy(agent(position=True))
    with torch.no_grad():
        model.policy.action_head.bias.fill_(-1000.0)  # As much is owed as there is.
    actor = make_actor(model, MarketView(model, FEATURES), 2)
    changes = np.array([[0.1, 0.1], [0.5, 0.5], [1.5, 0.5], [0.0, 0.0]])
    _, seen = actor.act(np.zeros((4, 2, len(FEATURES.names)), np.float32), changes)
    np.testing.assert_allclose(seen[..., -1], [[0, 0], [-3, -3], [0, -3], [-1, -1]], atol=1e-6)


def test_positions_are_observed_within_their_bounds():
    model = copy.deepcopy(agent(position=True))
    with torch.no_grad():
        model.policy.action_head.bias.fill_(-1000.0)  # As much is owed as there is.
    actor, features = (
        make_actor(model, MarketView(model, FEATURES), 1),
        np.zeros((2, 1, len(FEATURES.names)), np.float32),
    )
    _, seen = actor.act(features, np.array([[0.0], [0.95]]))
    assert seen[1, 0, -1] == model.observation_space.low[-1]


@given(
    scores=st.lists(st.one_of(st.floats(-1, 1), st.just(np.nan)), min_size=1),
    limits=st.tuples(st.floats(-1, 1), st.floats(-1, 1)).filter(lambda each: each[0] < each[1]),
    deadzone=st.floats(0, 1),
)
def test_signals_follow_thresholds(scores, limits, deadzone):
    sell, buy = limits
    scores = np.array(scores)
    for score, signal in zip(scores, Thresholds(buy, sell, deadzone).signals(scores), strict=True):
        if np.isnan(score) or abs(score) < deadzone:
            assert signal == "HOLD"
        elif score >= buy:
            assert signal == "BUY"
        else:
            assert signal == ("SELL" if score <= sell else "HOLD")


def test_default_thresholds():
    scores = np.array([-1, -0.6, -0.59, -0.05, 0, 0.05, 0.59, 0.6, 1])
    assert Thresholds().signals(scores).tolist() == ["SELL"] * 2 + ["HOLD"] * 5 + ["BUY"] * 2
    assert Thresholds(buy=0.0, sell=-0.01).signals(scores).tolist() == ["SELL"] * 3 + ["HOLD"] * 3 + ["BUY"] * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"buy": 2.0}, "Invalid buy: 2.0"),
        ({"deadzone": -0.1}, "Invalid deadzone: -0.1"),
        ({"sell": float("nan")}, "Invalid sell: nan"),
        ({"buy": -0.5, "sell": 0.5}, "sell is 0.5 and buy is -0.5: sell must be below buy"),
        ({"cvar_alpha": 0.0}, "Invalid cvar_alpha: 0.0"),
        ({"load": {"timezone": "UTC"}}, "load is for files"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        infer(agent(), market(), features=FEATURES, **arguments)


def test_agent_of_another_world_is_refused():
    with pytest.raises(ValueError, match="these are 14 features, or 15 numbers with the position: momentum_1, "):
        infer(agent(), market(), features=FeatureConfig())
    with pytest.raises(ValueError, match="these are 12 features"):
        infer(agent(), market(), features={"window": 8, "horizons": [1, 4, 8]})
    env = DummyVecEnv([lambda: gymnasium.make("CartPole-v1")])
    model = DistributionalPPO("MlpPolicy", env, n_steps=32, batch_size=32)
    with pytest.raises(ValueError, match="the agent observes Box"):
        infer(model, market())


def test_actions_that_are_no_positions_are_refused():
    class Wide(gymnasium.ActionWrapper):
        def __init__(self, env):
            super().__init__(env)
            self.action_space = gymnasium.spaces.Box(-2, 2, (1,), np.float32)

        def action(self, action):
            return action / 2

    env = DummyVecEnv([lambda: Wide(gymnasium.make("driftproof/RegimeMarket-v0"))])
    model = DistributionalPPO("MlpPolicy", env, n_steps=32, batch_size=32)
    with pytest.raises(ValueError, match=r"the agent's actions are Box\(-2.0, 2.0"):
        infer(model, market())


def test_agent_and_data_come_from_files(tmp_path):
    model = agent(normalised=True)
    markets = {symbol: market(60, i, symbol) for i, symbol in enumerate(("A", "B,C"))}
    model.save(tmp_path / "agent")
    write_csv(tmp_path / "prices.csv", *markets.values())
    threads = torch.get_num_threads()
    found = infer(tmp_path / "agent", str(tmp_path / "prices.csv"), features={"window": 8, "horizons": [1, 4]})
    assert torch.get_num_threads() == threads
    expected = infer(model, markets, features=FEATURES)
    np.testing.assert_array_equal(numbers(found), numbers(expected))
    assert found.symbol.tolist() == expected.symbol.tolist()


def test_worst_share_is_the_agents_own():
    bars = market()
    env = DummyVecEnv([lambda: gymnasium.make("driftproof/RegimeMarket-v0")])
    model = DistributionalPPO("MlpPolicy", env, n_steps=32, batch_size=32, cvar_alpha=0.5)
    half, tenth = infer(model, bars), infer(model, bars, cvar_alpha=0.1)
    assert (half.cvar[64:] > tenth.cvar[64:]).all()
    np.testing.assert_array_equal(infer(model, bars, cvar_alpha=0.5).cvar, half.cvar)
    plain = DistributionalPPO("MlpPolicy", env, n_steps=32, batch_size=32)
    np.testing.assert_array_equal(infer(plain, bars).cvar, infer(plain, bars, cvar_alpha=0.1).cvar)


def test_features_are_those_of_the_environment_unless_told(tmp_path):
    options = {"features": FeatureConfig(window=80)}
    env = DummyVecEnv([lambda: gymnasium.make("driftproof/RegimeMarket-v0", **options)])
    model, bars = DistributionalPPO("MlpLstmPolicy", env, n_steps=32, batch_size=32, seed=0), market(100)
    known = infer(model, bars)
    np.testing.assert_array_equal(numbers(known), numbers(infer(model, bars, **options)))
    model.save(tmp_path / "agent")
    np.testing.assert_array_equal(numbers(known), numbers(infer(tmp_path / "agent", bars, **options)))
    assert np.isnan(known.score).sum() == 80
    assert np.isnan(infer(tmp_path / "agent", bars).score).sum() == 64
