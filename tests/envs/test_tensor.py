"""Environments as tensors: the same worlds as Gymnasium's, that reset themselves and resume exactly."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from driftproof.envs import MarketEnv, RegimeMarketEnv, compute_features, regime_bars, tensor
from driftproof.envs.regimes import Noise, simulate
from driftproof.envs.tensor.random import normal, stream_keys, uniform
from driftproof.envs.trading import RUIN
from tests.gpu import without_waiting

SMALL = {"episode_length": 30, "features": {"window": 8, "horizons": [1, 4]}}
WILD = {"parameters": {"volatility": 0.1, "turbulence": 10.0, "turbulence_duration": 1e9}}
BARS = {"A": regime_bars(200, seed=1, symbol="A"), "B": regime_bars(150, seed=2, symbol="B")}
KWARGS = {
    "CartPole-v1": {},
    "Pendulum-v1": {"max_episode_steps": 30},
    "driftproof/RegimeMarket-v0": {**SMALL, "observe_position": True},
    "driftproof/Market-v0": {**SMALL, "data": BARS, "actions": "discrete"},
}
IDS = list(KWARGS)
DISCRETE = {"CartPole-v1": 2, "driftproof/Market-v0": 3}


def made(env_id, num_envs=5, seed=0, device="cpu"):
    env = tensor.make(env_id, num_envs, device, **KWARGS[env_id])
    return env, env.reset(seed)


def actions(env_id, steps, num_envs=5, seed=0):
    """Random actions, ``[steps, N]``, some of them out of range."""
    generator = torch.Generator().manual_seed(seed)
    if env_id in DISCRETE:
        return torch.randint(DISCRETE[env_id], (steps, num_envs), generator=generator)
    return torch.randn(steps, num_envs, 1, generator=generator)


def assert_equal_steps(one, other):
    for ours, theirs in zip(one, other, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def balanced(states):
    """Actions that keep the pole up, until the episode is truncated."""
    return (states @ torch.tensor([0.1, 0.5, 10.0, 2.0], dtype=torch.float64) > 0).long().numpy()


@settings(max_examples=2)
@given(seed=st.integers(0, 2**31))
@example(seed=2)
@pytest.mark.parametrize("kind", ["CartPole-v1", "balanced CartPole-v1", "Pendulum-v1"])
def test_classic_control_is_that_of_gymnasium(kind, seed):
    """Over whole episodes, from the same states."""
    env_id = kind.rpartition(" ")[2]
    env = tensor.make(env_id, 3)
    env.reset(seed)
    worlds = [gymnasium.make(env_id, disable_env_checker=True) for _ in range(3)]
    for world, state in zip(worlds, env.state.tolist(), strict=True):
        world.reset(seed=0)
        world.unwrapped.state = np.array(state)
    generator, running = np.random.default_rng(seed), [0, 1, 2]
    while running:
        if env_id == "Pendulum-v1":
            taken = generator.normal(0, 3, (3, 1)).astype(np.float32)
        else:
            taken = balanced(env.state) if kind != env_id else generator.integers(0, 2, 3)
        _, reward, terminated, truncated, final = (part.numpy() for part in env.step(torch.from_numpy(taken)))
        steps = [worlds[i].step(taken[i]) for i in running]
        for ours, theirs in zip((final, reward), zip(*steps, strict=True), strict=False):
            assert np.abs(ours[running] - np.array(theirs)).max() < 1e-5
        ended = [(is_terminated, is_truncated) for _, _, is_terminated, is_truncated, _ in steps]
        assert list(zip(terminated[running], truncated[running], strict=True)) == ended
        running = [i for i, over in zip(running, ended, strict=True) if not any(over)]
    if kind != "CartPole-v1":
        assert env.last_lengths.tolist() == [gymnasium.spec(env_id).max_episode_steps] * 3


def test_arguments_of_gymnasium_apply():
    env = tensor.make("CartPole-v1", 2, sutton_barto_reward=True)
    env.reset(0)
    step = env.step(torch.tensor([0, 1]))
    while not step.terminated.any():
        assert (step.reward == 0).all()
        step = env.step(torch.tensor([0, 1]))
    assert torch.equal(step.reward, -step.terminated.float())
    heavy, light = (tensor.make("Pendulum-v1", 1, g=g) for g in (10.0, 1.0))
    for env in (heavy, light):
        env.reset(0)
    assert not torch.equal(heavy.step(torch.zeros(1, 1)).observation, light.step(torch.zeros(1, 1)).observation)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_first_states_are_distributed_as_in_gymnasium(env_id):
    env = tensor.make(env_id, 4000)
    env.reset(3)
    world = gymnasium.make(env_id)
    world.reset(seed=0)
    states = []
    for _ in range(4000):
        world.reset()
        states.append(world.unwrapped.state)
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        expected, scale = np.quantile(states, share, axis=0), np.abs(states).max(0)
        np.testing.assert_allclose(np.quantile(env.state.numpy(), share, axis=0) / scale, expected / scale, atol=0.06)


def regime_world(env, i, options):
    """The market of environment ``i`` of these tensors in Gymnasium, with the same noise."""
    noise = env._noise(env._keys[i : i + 1], env.markets[i : i + 1])
    world = RegimeMarketEnv(**options)
    world.reset(seed=0)
    path = simulate(Noise(*(part[0].numpy() for part in noise)), world.parameters)
    first = world.features.lookback - 1
    world._enter(compute_features(*path[:5], world.features)[first:], path.close[first:])
    world._regimes = path.regime[first:].tolist()
    return world


def market_world(env, i, options):
    """The same window of the same history in Gymnasium."""
    row, lengths = env._row[i].item(), [len(bars) for bars in BARS.values()]
    symbol, row = ("A", row) if row < lengths[0] else ("B", row - lengths[0])
    world = MarketEnv(**options)
    world.reset(options={"symbol": symbol, "row": row})
    return world


@pytest.mark.parametrize("kind", ["continuous", "discrete"])
@pytest.mark.parametrize("observe_position", [False, True])
@pytest.mark.parametrize("env_id", ["driftproof/RegimeMarket-v0", "driftproof/Market-v0"])
@pytest.mark.parametrize("is_wild", [False, True])
def test_markets_are_those_of_gymnasium(env_id, kind, observe_position, is_wild):
    options = {"actions": kind, "observe_position": observe_position, "commission": 0.003, **SMALL}
    if env_id == "driftproof/Market-v0":
        options |= {"data": BARS, "split": "validation", "fractions": [0.3, 0.6, 0.1]}
    elif is_wild:
        options |= WILD
    env = tensor.make(env_id, 8, **options)
    seen = env.reset(5)
    is_regime = env_id == "driftproof/RegimeMarket-v0"
    assert env.single_observation_space == (RegimeMarketEnv if is_regime else MarketEnv)(**options).observation_space
    beside = regime_world if is_regime else market_world
    generator, ruins = np.random.default_rng(0), 0
    for _ in range(3):
        worlds = [beside(env, i, options) for i in range(8)]
        np.testing.assert_allclose(seen.numpy(), [world._observe() for world in worlds], atol=1e-5)
        is_over = np.zeros(8, bool)
        for _ in range(30):
            taken = generator.integers(0, 3, 8) if kind == "discrete" else generator.uniform(-1.2, 1.2, (8, 1))
            seen, reward, terminated, truncated, final = env.step(torch.from_numpy(taken))
            for i in np.flatnonzero(~is_over):
                expected = worlds[i].step(taken[i])
                np.testing.assert_allclose(final[i].numpy(), expected[0], atol=1e-5)
                assert reward[i].item() == pytest.approx(expected[1], abs=1e-5)
                assert (terminated[i].item(), truncated[i].item()) == expected[2:4]
                is_over[i] = expected[2] or expected[3]
                ruins += expected[2]
        if is_over.all() and not truncated.all():
            break  # Accounts are in different bars from here on.
    assert (ruins > 0) == (is_wild and is_regime)


def test_a_ruined_account_begins_again_in_its_market():
    env = tensor.make("driftproof/RegimeMarket-v0", 20, **{**SMALL, **WILD})
    first = env.reset(0)
    was_ruined = torch.zeros(20, dtype=torch.bool)
    for _ in range(29):
        step = env.step(-torch.ones(20))
        assert (step.reward[step.terminated] == np.float32(np.log(RUIN))).all()
        torch.testing.assert_close(step.observation[step.terminated], first[step.terminated], rtol=0, atol=0)
        was_ruined |= step.terminated
    assert was_ruined.any()
    assert (env.markets == 0).all()


@pytest.mark.parametrize("env_id", IDS)
def test_the_step_that_ends_an_episode_begins_the_next(env_id):
    env, seen = made(env_id)
    space, rewards, ended = env.single_observation_space, [[] for _ in range(5)], 0
    for taken in actions(env_id, 100):
        step = env.step(taken)
        assert seen.dtype == torch.float32
        assert all(map(space.contains, seen.numpy()))
        done = step.terminated | step.truncated
        assert torch.equal(step.observation[~done], step.final_observation[~done])
        for i in range(5):
            rewards[i].append(step.reward[i].item())
            if done[i]:
                assert not torch.equal(step.observation[i], step.final_observation[i])
                assert env.last_returns[i].item() == pytest.approx(sum(rewards[i]), rel=1e-5, abs=1e-6)
                assert env.last_lengths[i].item() == len(rewards[i])
                rewards[i] = []
            assert env.episode_lengths[i].item() == len(rewards[i])
            assert env.episode_returns[i].item() == pytest.approx(sum(rewards[i]), rel=1e-5, abs=1e-6)
        ended += done.sum().item()
        seen = step.observation
    assert env.episodes.sum().item() == ended > 10


@pytest.mark.parametrize("env_id", IDS)
def test_an_episode_is_new(env_id):
    env, _ = made(env_id, 1)
    firsts = []
    for taken in actions(env_id, 400, 1):
        step = env.step(taken)
        if (step.terminated | step.truncated).item():
            firsts.append(tuple(step.observation[0].tolist()))
    assert len(firsts) == len(set(firsts)) > 10
    again = env.reset()
    assert tuple(again[0].tolist()) not in firsts


@pytest.mark.parametrize("env_id", IDS)
def test_an_environment_does_the_same_alone_and_among_others(env_id):
    many, _ = made(env_id, 5, seed=10)
    alone, seen = made(env_id, 1, seed=13)
    taken = actions(env_id, 70)
    assert torch.equal(made(env_id, 5, seed=10)[1][3:4], seen)
    chosen, _ = made(env_id, 2, seed=torch.tensor([13, 11]))
    for step in taken:
        among, single = many.step(step), alone.step(step[3:4])
        pair = chosen.step(step[[3, 1]])
        assert_equal_steps([part[3:4] for part in among], single)
        assert_equal_steps([part[[3, 1]] for part in among], pair)


@pytest.mark.parametrize("env_id", IDS)
@pytest.mark.parametrize("steps", [0, 17, 45])
def test_a_loaded_state_continues_exactly(env_id, steps):
    env, _ = made(env_id)
    for taken in actions(env_id, steps):
        env.step(taken)
    other, _ = made(env_id, seed=99)
    state = env.state_dict()
    other.load_state_dict(state)
    for taken in actions(env_id, 25, seed=2):
        env.step(taken)
    for _ in range(2):
        env.load_state_dict(state)
    for taken in actions(env_id, 70, seed=1):
        assert_equal_steps(env.step(taken), other.step(taken))
    assert_equal_steps(env.state_dict().values(), other.state_dict().values())
    assert torch.equal(env.reset(), other.reset())


@pytest.mark.parametrize("env_id", IDS)
def test_states_continue_in_other_places(env_id):
    one, other = made(env_id, 2, seed=3)[0], made(env_id, 3, seed=50)[0]
    for taken in actions(env_id, 20):
        one.step(taken[:2])
        other.step(taken[2:])
    whole, states = made(env_id)[0], (one.state_dict(), other.state_dict())
    whole.load_state_dict({name: torch.cat([state[name] for state in states]) for name in states[0]})
    for taken in actions(env_id, 70, seed=1):
        apart = zip(one.step(taken[:2]), other.step(taken[2:]), strict=True)
        assert_equal_steps(whole.step(taken), [torch.cat(parts) for parts in apart])


@pytest.mark.parametrize("steps", [1, 7, 13, 30, 100])
def test_preparing_in_any_portions_gives_the_same_markets(steps):
    env, _ = made("driftproof/RegimeMarket-v0", 7)
    other, _ = made("driftproof/RegimeMarket-v0", 7)
    other._in_portions = True  # As on an accelerator.
    generator = np.random.default_rng(steps)
    for t, taken in enumerate(actions("driftproof/RegimeMarket-v0", 300, 7)):
        if t % steps == 0:
            other.prepare(steps if t < 150 else int(generator.integers(1, 40)))
        assert_equal_steps(env.step(taken), other.step(taken))


def test_simulated_markets_have_the_statistics_of_those_in_gymnasium():
    env = tensor.make("driftproof/RegimeMarket-v0", 300, episode_length=256)
    env.reset(0)
    seen, changes = env._features.view(600, 257, -1), env._changes.view(600, 257)[:, :-1]
    world = RegimeMarketEnv(episode_length=256)
    world.reset(seed=0)
    expected, expected_changes = [], []
    for _ in range(600):
        world.reset()
        expected.append(world._observations.copy())
        expected_changes.append(world._changes)
    ours, theirs = (np.concatenate(list(each)) for each in (seen.numpy(), expected))
    spread = theirs.std(0)
    np.testing.assert_allclose(ours.mean(0) / spread, theirs.mean(0) / spread, atol=0.05)
    np.testing.assert_allclose(ours.std(0), spread, rtol=0.05)
    moments = [np.array(each).reshape(600, 256) for each in (changes.tolist(), expected_changes)]
    assert moments[0].std() == pytest.approx(moments[1].std(), rel=0.05)
    tails = [np.abs(each / each.std()) > 4 for each in moments]
    assert tails[0].mean() == pytest.approx(tails[1].mean(), rel=0.2)
    # The first half is the first markets of all environments, the second half the next ones: all are different.
    assert len({tuple(row) for row in seen[:, 0].tolist()}) == 600


def test_windows_are_from_all_histories_and_everywhere_in_them():
    env = tensor.make("driftproof/Market-v0", 2000, data=BARS, split="all", **SMALL)
    env.reset(0)
    rows = env._row.numpy()
    first, second = rows[rows < 200], rows[rows >= 200] - 200
    assert len(first) / 2000 == pytest.approx(0.5, abs=0.05)
    assert (first.min(), first.max(), second.min(), second.max()) == (8, 169, 8, 119)
    whole = tensor.make("driftproof/Market-v0", 4, data=BARS, split="all", **{**SMALL, "episode_length": None})
    whole.reset(1)
    assert set((whole._last - whole._row).tolist()) == {191, 141}


def test_random_numbers_are_uniform_normal_and_independent():
    drawn = uniform(stream_keys(torch.arange(300))[:, None], torch.arange(300))
    assert 0 <= drawn.min() < 1e-4
    assert 1 - 1e-4 < drawn.max() < 1
    for share in (0.1, 0.5, 0.9):
        assert (drawn < share).double().mean().item() == pytest.approx(share, abs=0.005)
    for table in (drawn, drawn.T):
        apart = torch.corrcoef(table) - torch.eye(300)
        assert apart.abs().max() < 0.3
        assert apart.std().item() == pytest.approx(300**-0.5, rel=0.05)
    one, other = normal(drawn[:, ::2], drawn[:, 1::2])
    for each in (one, other):
        assert each.mean().abs() < 0.02
        assert each.std().item() == pytest.approx(1, abs=0.02)
        assert (each.abs() > 2).double().mean().item() == pytest.approx(0.0455, abs=0.003)
    assert (one * other).mean().abs() < 0.02


def test_actions_that_are_no_numbers_are_zero():
    for env_id in ("Pendulum-v1", "driftproof/RegimeMarket-v0"):
        (one, _), (other, _) = made(env_id), made(env_id)
        assert_equal_steps(one.step(torch.full((5, 1), torch.nan)), other.step(torch.zeros(5, 1)))


def test_ids_without_a_tensor_form_are_refused():
    with pytest.raises(ValueError, match=r"'Acrobot-v1' has no tensor form; CartPole-v1, Pendulum-v1, driftproof/Reg"):
        tensor.make("Acrobot-v1", 2)
    assert tensor.make("driftproof.envs:driftproof/RegimeMarket-v0", 2, **SMALL).num_envs == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tensor.make("CartPole-v1", 0), "Invalid num_envs: 0"),
        (lambda: tensor.make("driftproof/RegimeMarket-v0", 2, commission=-1), "Invalid commission: -1"),
        (lambda: tensor.make("driftproof/RegimeMarket-v0", 2, render_mode="rgb_array"), "Invalid render_mode"),
        (lambda: tensor.make("CartPole-v1", 2).reset(-1), "Invalid seed: -1"),
        (lambda: tensor.make("CartPole-v1", 2).reset(torch.zeros(3)), "seeds must be of shape"),
        (lambda: made("CartPole-v1", 2)[0].load_state_dict(made("CartPole-v1", 3)[0].state_dict()), "not a state of 2"),
        (
            lambda: made("driftproof/Market-v0", 2)[0].load_state_dict(
                {**made("driftproof/Market-v0", 2)[0].state_dict(), "row": torch.tensor([5, 10**6])}
            ),
            "bars that are not here",
        ),
        (
            lambda: made("driftproof/RegimeMarket-v0", 2)[0].load_state_dict(
                {**made("driftproof/RegimeMarket-v0", 2)[0].state_dict(), "episode_lengths": torch.tensor([5, 30])}
            ),
            "bars that are not here",
        ),
    ],
)
def test_nonsense_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.gpu
@pytest.mark.parametrize("env_id", IDS)
def test_steps_do_not_wait_for_the_device(env_id):
    env, _ = made(env_id, device="cuda")
    taken = actions(env_id, 70).cuda()
    with without_waiting():
        for each in taken:
            env.step(each)
    assert (env.episodes > 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("env_id", IDS)
def test_the_device_makes_no_difference(env_id):
    (env, first), (other, same) = made(env_id), made(env_id, device="cuda")
    torch.testing.assert_close(same.cpu(), first, rtol=0, atol=1e-5)
    for taken in actions(env_id, 70):
        for one, another in zip(env.step(taken), other.step(taken.cuda()), strict=True):
            torch.testing.assert_close(another.cpu(), one, rtol=0, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("is_prepared", [False, True])
@pytest.mark.parametrize("env_id", IDS)
def test_a_captured_rollout_is_that_of_eager_steps(env_id, is_prepared):
    (env, _), (eager, _) = made(env_id, device="cuda"), made(env_id, device="cuda")
    taken = actions(env_id, 16 * 8).cuda()
    here = torch.zeros_like(taken[:8])

    def rollout():
        if is_prepared:
            env.prepare(8)
        return [env.step(each) for each in here]

    before = env.state_dict()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        rollout()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        steps = rollout()
    env.load_state_dict(before)
    for part in taken.split(8):
        here.copy_(part)
        graph.replay()
        for each, step in zip(part, steps, strict=True):
            assert_equal_steps(step, eager.step(each))
    assert (env.episodes > 0).all()
