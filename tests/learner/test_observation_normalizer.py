"""The observation normaliser: what it finds, follows and undoes, and that it is part of all that an agent does."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from driftproof.learner.observation_normalizer import ObservationNormalizer
from driftproof.nn.normalization import normalized
from driftproof.nn.policies import MlpPolicy
from driftproof.ppo import DistributionalPPO
from driftproof.state import CheckpointError, compare

VECTOR = spaces.Box(-np.inf, np.inf, (3,), np.float32)
EPISODE = 20


def observe(normalizer, episodes, rng, offset=0.0, start_offset=0.0, gain=1.0):
    """Episodes that begin near 0 and wander off; one environment, a rollout every four episodes."""
    for episode in range(episodes):
        state = rng.normal(0, 0.05, 3) + start_offset
        for step in range(EPISODE):
            normalizer.observe(np.float32([state * gain + offset]), np.array([step == 0]))
            state = 0.8 * state + rng.normal(0, 0.5, 3)
        if episode % 4 == 3:
            normalizer.finish()


def observe_rows(normalizer, rows, length=EPISODE):
    """One environment with episodes of this length."""
    for step, row in enumerate(rows):
        normalizer.observe(row[None], np.array([step % length == 0]))
        if step % 500 == 499:
            normalizer.finish()


def mean_of(normalizer):
    return normalizer.moments[""].mean.numpy()


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_a_shift_of_all_sensors_is_found_at_the_first_episode(rng):
    normalizer = ObservationNormalizer(VECTOR)
    observe(normalizer, 60, rng)
    before, offset = mean_of(normalizer), np.array([2.0, -1.0, 3.0])
    normalizer.observe(np.float32([rng.normal(0, 0.05, 3) + offset]), np.array([True]))
    assert normalizer.metrics()["drift/anchor_moves"] == 1
    np.testing.assert_allclose(mean_of(normalizer) - before, offset, atol=0.2)


def test_the_estimate_of_a_shift_becomes_better_with_more_episodes(rng):
    normalizer = ObservationNormalizer(VECTOR)
    observe(normalizer, 60, rng)
    before, offset = mean_of(normalizer), np.array([2.0, -1.0, 3.0])
    observe(normalizer, 12, rng, offset)
    assert normalizer.metrics() == {"drift/anchor_moves": 1, "drift/anchor_undone": 0}
    np.testing.assert_allclose(mean_of(normalizer) - before, offset, atol=0.08)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_a_world_that_stands_still_has_no_shifts(seed):
    normalizer = ObservationNormalizer(VECTOR)
    observe(normalizer, 200, np.random.default_rng(seed))
    assert normalizer.metrics()["drift/anchor_moves"] == 0


@pytest.mark.parametrize("length", [10, 50])
@pytest.mark.parametrize("seed", range(5))
def test_chance_movements_of_wide_starts_are_not_followed(seed, length):
    """Episodes begin anywhere: the mean of the first sixteen is a quarter of a standard deviation off."""
    normalizer = ObservationNormalizer(VECTOR)
    observe_rows(normalizer, np.float32(np.random.default_rng(seed).normal(0, 1, (20_000, 3))), length)
    assert normalizer.metrics()["drift/anchor_moves"] == 0
    np.testing.assert_allclose(mean_of(normalizer), 0, atol=0.01)


@pytest.mark.parametrize("spread", [0.05, 1.0])
def test_a_slow_shift_is_followed(rng, spread):
    normalizer = ObservationNormalizer(VECTOR)
    rows = rng.normal(0, 1, (60_000, 3))
    rows[::EPISODE] *= spread
    drift = 4 * np.clip(np.arange(60_000) / 40_000 - 0.2, 0, 1)
    observe_rows(normalizer, np.float32(rows + drift[:, None]))
    assert normalizer.metrics()["drift/anchor_undone"] == 0
    np.testing.assert_allclose(mean_of(normalizer), 4, atol=0.5)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(1e-6, 1e6), min_size=3, max_size=3))
def test_its_own_state_is_taken_whatever_the_scales_are(scales):
    normalizer, other = ObservationNormalizer(VECTOR), ObservationNormalizer(VECTOR)
    observe_rows(normalizer, np.float32(np.random.default_rng(0).normal(0, 1, (1000, 3)) * scales))
    other.load_state_dict(normalizer.state_dict())
    assert not compare(normalizer.state_dict(), other.state_dict())


def test_a_shift_is_undone_if_episodes_only_begin_elsewhere(rng):
    normalizer = ObservationNormalizer(VECTOR)
    observe(normalizer, 60, rng)
    before = mean_of(normalizer)
    observe(normalizer, 24, rng, start_offset=np.array([2.0, -1.0, 3.0]))
    assert normalizer.metrics() == {"drift/anchor_moves": 1, "drift/anchor_undone": 1}
    np.testing.assert_allclose(mean_of(normalizer), before, atol=0.5)


@pytest.mark.parametrize("offset", [0.8, -1.5, 3.0])
def test_a_shift_is_found_where_episodes_begin_anywhere(offset):
    """It takes more episodes then: the mean of sixteen, or of sixty-four."""
    normalizer, rng = ObservationNormalizer(VECTOR), np.random.default_rng(0)
    observe_rows(normalizer, np.float32(rng.uniform(-1.7, 1.7, (200 * EPISODE, 3))))
    shifted = rng.uniform(-1.7, 1.7, (150 * EPISODE, 3))
    shifted[:, 1] += offset
    observe_rows(normalizer, np.float32(shifted))
    assert normalizer.metrics() == {"drift/anchor_moves": 1, "drift/anchor_undone": 0}
    np.testing.assert_allclose(mean_of(normalizer), [0, offset, 0], atol=0.4)


@pytest.mark.parametrize("place", [3.0, -3.0])
def test_a_shift_is_kept_wherever_the_policy_has_learned_to_be(rng, place):
    """Statistics are of what an untrained policy saw; a trained one is elsewhere, and now sees that shifted."""
    normalizer = ObservationNormalizer(VECTOR)
    observe(normalizer, 60, rng)

    def trained(episodes, offset):
        rows = rng.normal(place, 0.5, (episodes, EPISODE, 3))
        rows[:, 0] = rng.normal(0, 0.05, (episodes, 3))
        observe_rows(normalizer, np.float32(rows.reshape(-1, 3) + offset))

    trained(300, 0.0)
    before = mean_of(normalizer)
    offset = -np.sign(place) * np.array([2.0, 1.5, 2.5])  # Back to where the untrained one was.
    trained(30, offset)
    assert normalizer.metrics() == {"drift/anchor_moves": 1, "drift/anchor_undone": 0}
    np.testing.assert_allclose(mean_of(normalizer) - before, offset, atol=0.1)


def test_episodes_that_rarely_begin_elsewhere_are_no_shift(rng):
    """Of eight sensors, each shows something else at the start of every twentieth episode."""
    normalizer = ObservationNormalizer(spaces.Box(-np.inf, np.inf, (8,), np.float32))
    rows = rng.normal(0, 1.5, (2_000, 5, 8))
    rows[:, 0] = rng.normal(0, 0.1, (2_000, 8)) + 3.3 * (rng.random((2_000, 8)) < 0.05)
    observe_rows(normalizer, np.float32(rows.reshape(-1, 8)), length=5)
    assert normalizer.metrics()["drift/anchor_moves"] < 40


def test_starts_with_another_spread_do_not_move_it_again_and_again(rng):
    normalizer = ObservationNormalizer(VECTOR)
    observe(normalizer, 60, rng)
    for _ in range(100):
        normalizer.observe(np.float32([rng.normal(0, 3.0, 3)]), np.array([True]))
    assert normalizer.metrics()["drift/anchor_moves"] <= 4


def test_outliers_before_a_shift_is_noticed_do_not_spoil_the_scale(rng):
    normalizer = ObservationNormalizer(VECTOR)
    observe(normalizer, 100, rng)
    before = normalizer.moments[""].std
    for _ in range(40):  # The rest of an episode, thousands of standard deviations away.
        normalizer.observe(np.float32([[5000.0, 5000.0, 5000.0]]), np.array([False]))
    normalizer.learn()
    assert (normalizer.moments[""].std < 1.5 * before).all()


@pytest.mark.parametrize("gain", [0.3, 3.0])
def test_a_new_scale_is_learned_within_the_memory_after_a_change_of_the_world(rng, gain):
    normalizer = ObservationNormalizer(VECTOR, memory=2000)
    observe(normalizer, 100, rng)
    before = normalizer.moments[""].std
    normalizer.forget()
    observe(normalizer, 400, rng, gain=gain)
    np.testing.assert_allclose(normalizer.moments[""].std / before, gain, rtol=0.35)


@pytest.mark.parametrize("gain", [0.3, 1.1])
def test_a_policy_that_keeps_still_or_travels_does_not_change_the_scale(rng, gain):
    """Its inputs must not be amplified or damped for what it does."""
    normalizer = ObservationNormalizer(VECTOR, memory=2000)
    observe(normalizer, 100, rng)
    before = normalizer.moments[""].std
    observe(normalizer, 300, rng, gain=gain)
    np.testing.assert_allclose(normalizer.moments[""].std / before, 1.0, rtol=0.1)


def test_a_scale_grows_where_networks_would_see_large_numbers(rng):
    normalizer = ObservationNormalizer(VECTOR, memory=2000)
    observe(normalizer, 100, rng)
    observe(normalizer, 400, rng, gain=20.0)
    deviation = normalizer.statistics[""].variance ** 0.5
    shown = 20 * np.std(rng.normal(0, 0.5 / np.sqrt(1 - 0.64), 10_000)) / normalizer.moments[""].std
    assert (deviation > 5).all()
    np.testing.assert_allclose(shown, 1.0, rtol=0.2)


def test_contacts_that_are_rare_at_first_are_not_amplified(rng):
    """Nor are sensors that have not moved at all before the scale is fixed."""
    normalizer = ObservationNormalizer(VECTOR, memory=2000)
    for step in range(3000):
        touches = float(rng.random() < 0.003)
        rows = np.float32([[rng.normal(0, 0.01), touches, 0.0 if step < 1500 else touches]])
        normalizer.observe(rows, np.array([step % 20 == 0]))
        if step % 500 == 499:
            normalizer.finish()
    std = normalizer.moments[""].std.numpy()
    assert std[0] < 0.04
    assert std[1:].tolist() == [1, 1]
    for _ in range(3):
        normalizer.forget()
        observe_rows(normalizer, np.float32([[0.01, 0, 0]]).repeat(6000, 0))
    assert normalizer.moments[""].std[2] == 1


def test_sensors_of_a_usual_scale_stay_exactly_as_they_are(rng):
    """Before it is decided what to normalise to, and then."""
    normalizer = ObservationNormalizer(VECTOR)
    seen = np.float32(rng.normal([0.9, -0.5, 0.001], [0.4, 2.9, 1.0], (4096, 3)))
    for i, rows in enumerate(seen.reshape(512, 8, 3)):
        normalizer.observe(rows, np.zeros(8, dtype=bool))
        assert torch.equal(normalized(torch.from_numpy(rows), normalizer.moments), torch.from_numpy(rows)), i
    normalizer.finish()
    seen = torch.cat((torch.from_numpy(seen), torch.tensor([[0.0, 1e-20, -1e-20]])))
    assert torch.equal(normalized(seen, normalizer.moments), seen)


def test_a_step_is_normalised_by_the_moments_it_has_changed(rng):
    """Bit by bit the same on the host; also in a dict, of which other parts stay as they are."""
    space = spaces.Dict({"sensors": spaces.Box(-np.inf, np.inf, (2, 3), np.float32), "mode": spaces.Discrete(3)})
    normalizers = {key: ObservationNormalizer(each) for key, each in (("", VECTOR), ("sensors", space))}
    for i in range(60):
        starts, offset = np.arange(4) == i % 9, 100.0 * (i > 40)
        vector = np.float32(rng.normal(offset, [1e-3, 500.0, 1.0], (4, 3)))
        parts = {"sensors": np.float64(rng.normal(offset, 30.0, (4, 2, 3))), "mode": np.arange(4)}
        for key, observation in (("", vector), ("sensors", parts)):
            result = normalizers[key].take(observation, starts)
            part, raw = (result, observation) if key == "" else (result[key], observation[key])
            expected = normalizers[key].moments[key].normalize(torch.from_numpy(raw))
            assert torch.equal(torch.from_numpy(part), expected), i
            assert part.dtype == np.float32
            if key:
                assert result["mode"] is observation["mode"]
    assert normalizers[""].statistics[""].shifts > 0


def test_other_scales_are_brought_into_bounds(rng):
    normalizer = ObservationNormalizer(VECTOR)
    seen = np.float32(rng.normal([1.0, -500.0, 3.0], [1e-3, 100.0, 1.0], (4000, 3)))
    for rows in seen.reshape(500, 8, 3):
        normalizer.observe(rows, np.zeros(8, dtype=bool))
    normalizer.finish()
    result = normalized(torch.from_numpy(seen), normalizer.moments)
    assert result.dtype is torch.float32
    np.testing.assert_allclose(result.std(0), [1 / 3, 3.0, 1.0], rtol=0.05)
    np.testing.assert_allclose(result.mean(0), [1.5, -1.5, 1.5], atol=0.1)


@pytest.mark.parametrize("unit", [np.ones(3), np.array([1e-4, 1.0, 300.0])], ids=["usual", "unusual"])
def test_drifted_sensors_are_mapped_back_to_what_they_were_after_an_alarm(rng, unit):
    normalizer = ObservationNormalizer(VECTOR, memory=2000)
    observe(normalizer, 100, rng, gain=unit)
    probe = np.float32(rng.normal(0, 0.7, (200, 3)))

    def shown(gain, offset):
        return normalized(torch.from_numpy(np.float32(probe * gain + offset)), normalizer.moments)

    before = shown(unit, 0.0)
    gain, offset = np.array([3.0, 1.5, 2.0]) * unit, np.array([4.0, -2.0, 5.0]) * unit
    observe(normalizer, 4, rng, offset=offset, gain=gain)
    normalizer.forget()
    observe(normalizer, 400, rng, offset=offset, gain=gain)
    assert normalizer.metrics()["drift/anchor_moves"] >= 1
    np.testing.assert_allclose(shown(gain, offset), before, atol=0.4 * before.std(0).max())
    assert not np.allclose(shown(unit, 0.0), before, atol=1.5 * before.std(0).max())


def test_a_policy_that_moves_to_other_states_does_not_move_the_mean(rng):
    normalizer = ObservationNormalizer(VECTOR, memory=1000)
    observe(normalizer, 100, rng)
    before = normalizer.statistics[""].mean
    for _ in range(200):
        state = rng.normal(0, 0.05, 3)
        for step in range(EPISODE):
            normalizer.observe(np.float32([state]), np.array([step == 0]))
            state = 0.8 * state + rng.normal([0.4, 0.0, -0.4], 0.5)
        normalizer.finish()
    np.testing.assert_allclose(normalizer.statistics[""].mean, before, atol=0.1)
    assert normalizer.metrics()["drift/anchor_moves"] == 0


def test_fresh_networks_let_it_decide_anew(rng):
    normalizer = ObservationNormalizer(VECTOR)
    observe(normalizer, 100, rng)
    for _ in range(80):  # The gain of sensors has changed, and their scale was followed.
        observe(normalizer, 4, rng, gain=50.0)
    normalizer.restart()
    observe(normalizer, 100, rng, gain=50.0)
    rows = normalized(torch.from_numpy(np.float32(rng.normal(0, 0.8 * 50, (500, 3)))), normalizer.moments)
    assert ((rows.std(0) > 1.5) & (rows.std(0) < 4)).all()


def test_reordered_statistics_describe_reordered_sensors(rng):
    gain, order, signs = np.array([1.0, 20.0, 0.01]), np.array([2, 0, 1]), np.array([-1.0, 1.0, -1.0])
    normalizer = ObservationNormalizer(VECTOR)
    observe(normalizer, 60, rng, offset=2.0, gain=gain)
    raw = np.float32(rng.normal(0, 1, (50, 3)) * gain + 2)
    before = normalized(torch.from_numpy(raw), normalizer.moments).numpy()
    normalizer.rewire(order, signs)
    after = normalized(torch.from_numpy(np.float32(raw[:, order] * signs)), normalizer.moments)
    np.testing.assert_allclose(after, before[:, order] * signs, rtol=1e-5, atol=1e-6)
    assert normalizer.statistics[""].has_shifted(2 * signs) == 0, "episodes begin there"
    state = normalizer.state_dict()
    normalizer.check_state_dict(state)


def test_observations_of_a_rollout_are_kept():
    normalizer = ObservationNormalizer(VECTOR)
    for _ in range(2):
        normalizer.begin()
        assert normalizer.recorded(3) is None
        for step in range(3):
            normalizer.observe(np.full((2, 3), step, np.float32), np.array([step == 1, False]))
        assert normalizer.recorded(2) is None
        assert normalizer.recorded(3, "other") is None
    rows, starts = normalizer.recorded(3)
    assert rows[..., 0].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert starts.tolist() == [[False, False], [True, False], [False, False]]


def test_only_floating_point_parts_of_a_dict_are_normalised():
    space = spaces.Dict({"a": VECTOR, "image": spaces.Box(0, 255, (4, 4, 1), np.uint8), "n": spaces.Discrete(3)})
    assert set(ObservationNormalizer(space).moments) == {"a"}


def test_a_state_with_wrong_numbers_is_refused_and_changes_nothing(rng):
    normalizer = ObservationNormalizer(VECTOR)
    observe(normalizer, 20, rng)
    before = normalizer.state_dict()
    for key, wrong in {
        "mean": torch.zeros(2).double(),
        "variance": -torch.ones(3).double(),
        "shifts": -1,
        "target_std": torch.zeros(3).double(),
    }.items():
        with pytest.raises(CheckpointError, match=key):
            normalizer.load_state_dict({"": {**before[""], key: wrong}})
    assert not compare(before, normalizer.state_dict())


class Shifted(gymnasium.ObservationWrapper):
    """CartPole whose sensors shift at a step."""

    def __init__(self, at):
        super().__init__(gymnasium.make("CartPole-v1"))
        self.at, self.steps = at, 0
        self.observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)

    def step(self, action):
        self.steps += 1
        return super().step(action)

    def observation(self, observation):
        offset = np.array([3.0, -2.0, 1.0, -4.0], np.float32) if self.steps >= self.at else np.float32(0)
        return (observation + offset).astype(np.float32)


def returns_of(agent, episodes=10):
    env = Shifted(0)
    totals = []
    for seed in range(episodes):
        observation, _ = env.reset(seed=seed)
        total, ended = 0.0, False
        while not ended:
            action, _ = agent.predict(observation, deterministic=True)
            observation, reward, terminated, truncated, _ = env.step(action)
            total, ended = total + reward, terminated or truncated
        totals.append(total)
    return np.mean(totals)


@pytest.mark.slow
def test_an_agent_survives_a_shift_of_its_sensors():
    quick = {"n_steps": 800, "batch_size": 200, "n_epochs": 6, "learning_rate": 2e-3, "seed": 0}
    made = {
        normalize: DistributionalPPO("MlpPolicy", Shifted(12_000), observation_normalizer=normalize, **quick).learn(
            12_800
        )
        for normalize in (True, False)
    }
    assert returns_of(made[True]) > 100
    assert returns_of(made[False]) < 50


@pytest.fixture(scope="module")
def agent():
    return DistributionalPPO("MlpPolicy", "CartPole-v1", n_steps=128, seed=0, observation_normalizer=True).learn(512)


SEEN = np.random.default_rng(1).normal(0.5, 1, (5, 4)).astype(np.float32)


def test_what_the_policy_says_is_of_normalised_observations(agent):
    raw = torch.from_numpy(SEEN)
    moments = agent.learner.normalizer.moments[""]
    by_hand = ((raw - moments.mean) / moments.std).clamp(-20, 20).float()
    values, own = agent.policy.predict_values(raw), agent.policy.normalizer
    agent.policy.normalizer = None
    try:
        assert torch.equal(values, agent.policy.predict_values(by_hand))
    finally:
        agent.policy.normalizer = own


def test_a_saved_agent_and_a_saved_policy_see_the_same(agent, tmp_path):
    agent.save(tmp_path / "agent.zip")
    agent.policy.save(tmp_path / "policy.zip")
    loaded = DistributionalPPO.load(tmp_path / "agent.zip")
    alone = MlpPolicy.load(tmp_path / "policy.zip")
    values = agent.policy.predict_values(torch.from_numpy(SEEN))
    assert torch.equal(values, loaded.policy.predict_values(torch.from_numpy(SEEN)))
    assert torch.equal(values, alone.predict_values(torch.from_numpy(SEEN)))
    assert not compare(agent.learner.normalizer.state_dict(), loaded.learner.normalizer.state_dict())


def test_another_agent_takes_the_statistics_over(agent):
    other = DistributionalPPO("MlpPolicy", "CartPole-v1", n_steps=128, seed=1, observation_normalizer=True)
    other.set_parameters(agent.get_parameters())
    raw = torch.from_numpy(SEEN)
    assert torch.equal(agent.policy.predict_values(raw), other.policy.predict_values(raw))


def test_callbacks_see_raw_observations(agent):
    from stable_baselines3.common.callbacks import BaseCallback

    seen = []

    class Looks(BaseCallback):
        def _on_step(self):
            seen.append(self.locals["obs_tensor"].clone())
            return True

    normalizer = agent.learner.normalizer
    normalizer.sensors.fix()
    normalizer.sensors.mean = normalizer.sensors.mean + 0.1
    normalizer.forget()
    agent.learn(128, callback=Looks(), reset_num_timesteps=False)
    assert torch.cat(seen)[:, 0].abs().max() < 3
    raw = torch.as_tensor(agent.rollout_buffer.observations)
    torch.testing.assert_close(torch.stack(seen).view_as(raw), raw)
    assert not torch.equal(agent._rollout.observations.view_as(raw), raw), "networks are trained on normalised ones"


def test_explicitly_normalising_nothing_is_an_error():
    with pytest.raises(ValueError, match="nothing to normalise"):
        DistributionalPPO("MlpPolicy", "FrozenLake-v1", drift_kit=False, observation_normalizer=True)
    assert DistributionalPPO("MlpPolicy", "FrozenLake-v1", drift_kit=True).learner.normalizer is None


def test_rare_flags_are_no_shift(rng):
    """Of a hundred flags, each is set at the start of some episodes only; a shift of the same sensors is found."""
    statistics = ObservationNormalizer(spaces.Box(-np.inf, np.inf, (100,), np.float32))
    seen = np.float32(rng.random((600, 4, 100)) < 0.02)
    starts = np.zeros((600, 4), bool)
    starts[::8] = True
    for rows, first in zip(seen[:500], starts[:500], strict=True):
        statistics.observe(rows, first)
    statistics.finish()
    assert statistics.metrics()["drift/anchor_moves"] == 0
    assert torch.equal(normalized(torch.from_numpy(seen[0]), statistics.moments), torch.from_numpy(seen[0]))
    for rows, first in zip(seen[500:], starts[500:], strict=True):
        statistics.observe(rows + np.float32(1.3), first)
    assert statistics.metrics()["drift/anchor_moves"] > 0


def test_environments_may_become_fewer():
    """As in evaluations, where some have played their episodes before others."""
    normalizer, fewer = ObservationNormalizer(VECTOR), []
    for envs in (3, 3, 2, 1, 3):
        rows = np.arange(3 * envs, dtype=np.float32).reshape(envs, 3)
        fewer.append(normalizer.take(rows, np.arange(envs) == 0))
    assert [len(each) for each in fewer] == [3, 3, 2, 1, 3]
    normalizer.finish()
    assert normalizer.sensors.count == 12


def test_a_rollout_without_steps_does_no_harm():
    normalizer = ObservationNormalizer(VECTOR)
    normalizer.begin()
    normalizer.finish()
    normalizer.begin()
    normalizer.take(np.zeros((2, 3), np.float32), np.ones(2, bool))
    assert normalizer.recorded(1)[0].shape == (1, 2, 3)
