"""Any environment can drift: in what is observed, what actions do, and what is rewarded."""

from __future__ import annotations

import json

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import PassiveEnvChecker
from hypothesis import given
from hypothesis import strategies as st
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

from driftproof.envs import (
    ActionGain,
    ActionPermute,
    Cyclic,
    DriftWrapper,
    Dynamics,
    Gradual,
    ObservationFlip,
    ObservationNoise,
    ObservationOffset,
    ObservationPermute,
    ObservationScale,
    ObservationShift,
    RandomWalk,
    RewardScale,
    RewardSign,
    Sudden,
    change,
    drifting,
)
from tests.envs.worlds import Counter, Echo, play

TWO_PHASES = Sudden(every=5, values=[1, 2])
BOX = spaces.Box(-1, 1, (3,), np.float32)


def observed(env, steps):
    return np.array([observation for observation, *_ in play(env, steps, action=0)])


def test_time_goes_on_through_episodes():
    env = drifting(Echo(), RewardScale(TWO_PHASES))
    rewards = [reward for _, reward, _ in play(env, 12, action=0)[1:]]
    assert rewards == [1] * 5 + [2] * 5 + [1] * 2


def test_time_can_be_counted_in_episodes():
    env = drifting(Echo(), RewardScale(Sudden(every=2, values=[1, 2], unit="episodes")))
    rewards = [reward for _, reward, _ in play(env, 15, action=0)[1:]]
    assert rewards == [1] * 6 + [2] * 6 + [1] * 3


def test_a_step_is_under_one_value_from_action_to_observation():
    env = drifting(
        Echo(), [ActionPermute(Sudden(every=1)), RewardScale(Sudden(every=1)), ObservationScale(Sudden(every=1))]
    )
    (first, _, drift), *later = play(env, 8, action=1)
    assert first[0] == 0
    assert drift["reward_scale"] == 0
    for i, (observation, reward, drift) in enumerate(later):
        assert observation[0] == reward == drift["reward_scale"] == drift["action_permute"] == i


def test_infos_tell_values_and_the_phase():
    env = drifting(
        Echo(), [RewardScale(TWO_PHASES), RewardScale(Sudden(every=2, values=[1, 3])), RewardSign(Gradual(1, 1, 3))]
    )
    drifts = [drift for *_, drift in play(env, 6, action=0)[1:]]
    assert [drift["reward_scale"] for drift in drifts] == [1, 1, 1, 1, 1, 2]
    assert [drift["reward_scale_2"] for drift in drifts] == [1, 1, 3, 3, 1, 1]
    assert [drift["phase"] for drift in drifts] == [0, 1, 2, 3, 4, 5]


class TestTime:
    """The drift can be taken to any time, and held there."""

    def rewards(self, env, steps):
        return [reward for _, reward, _ in play(env, steps, action=0)[1:]]

    def test_goes_on_from_there(self):
        env = drifting(Echo(), RewardScale(TWO_PHASES), seed=0)
        env.set_drift_time(8)
        assert self.rewards(env, 4) == [2, 2, 1, 1]
        env.set_drift_time(4)
        assert self.rewards(env, 4) == [1, 2, 2, 2]

    @pytest.mark.parametrize(("time", "reward"), [((7,), 2), ((2,), 1), ((0, 3), 2)])
    def test_is_held(self, time, reward):
        unit = "episodes" if len(time) > 1 else "steps"
        every = 3 if len(time) > 1 else 5
        env = drifting(Echo(), RewardScale(Sudden(every=every, values=[1, 2], unit=unit)), seed=0)
        env.reset()
        env.set_drift_time(*time, hold=True)
        assert self.rewards(env, 20) == [reward] * 20
        assert env.drift_values == {"phase": reward - 1, "reward_scale": reward}
        env.set_drift_time(0)
        assert set(self.rewards(env, 20)) == {1, 2}

    def test_random_values_are_those_of_that_time(self):
        made = lambda: drifting(Echo(), RewardScale(RandomWalk(0, 1, 0.1)), seed=3)  # noqa: E731
        played = self.rewards(made(), 20)
        env = made()
        for time in (15, 4, 9):
            env.set_drift_time(time, hold=True)
            assert self.rewards(env, 2) == [played[time]] * 2

    def test_attributes_follow(self):
        env = drifting("CartPole-v1", Dynamics(TWO_PHASES, "length"), seed=0)
        for time, length in ((7, 1.0), (2, 0.5)):
            env.set_drift_time(time, hold=True)
            env.reset()
            assert env.unwrapped.length == length

    def test_is_that_of_wrappers_inside_too(self):
        env = drifting(drifting(Echo(), RewardScale(TWO_PHASES), 0), RewardScale(Sudden(every=3, values=[1, 10])), 0)
        assert env.drift_moments(0) == [(0, 0), (3, 0), (5, 0)]
        env.set_drift_time(5, hold=True)
        assert self.rewards(env, 9) == [20] * 9
        assert env.drift_values == {"phase": 2, "reward_scale": 2, "reward_scale_2": 10}

    def test_moments_in_steps_and_episodes_are_converted(self):
        steps, episodes = RewardScale(Sudden(at=[100])), RewardSign(Sudden(at=[10], unit="episodes"))
        assert drifting(Echo(), [steps, episodes]).drift_moments(200, 40) == [(0, 0), (50, 10), (100, 20)]

    def test_holding_is_saved(self):
        env, other = (drifting(Counter(), RewardScale(TWO_PHASES), seed=0) for _ in range(2))
        env.set_drift_time(7, hold=True)
        other.load_state_dict(env.state_dict())
        assert self.rewards(other, 9) == [2] * 9
        earlier = {key: value for key, value in env.lasting_state.items() if key != "is_held"}
        other.lasting_state = earlier
        assert self.rewards(other, 5) == [2, 2, 2, 1, 1]

    def test_needs_a_seed_and_a_time(self):
        env = drifting(Echo(), RewardScale(TWO_PHASES))
        with pytest.raises(gymnasium.error.ResetNeeded, match="give the drift a seed"):
            env.set_drift_time(3)
        env.reset(seed=0)
        with pytest.raises(ValueError, match="steps"):
            env.set_drift_time(-1)


def test_drift_in_drift_adds_up():
    env = drifting(drifting(Echo(), RewardScale(TWO_PHASES)), RewardScale(Sudden(every=3, values=[1, 10])))
    seen = play(env, 6, action=0)[1:]
    assert [reward for _, reward, _ in seen] == [1, 1, 1, 10, 10, 20]
    assert seen[-1][2] == {"phase": 2, "reward_scale": 2, "reward_scale_2": 10}


@pytest.mark.parametrize("seed", [None, 3])
def test_every_change_goes_its_own_way(seed):
    """Also those of wrappers in wrappers, which are what one wrapper with all of them would be."""
    walks = [ObservationShift(RandomWalk(0, 1, 0.1), indices=[i]) for i in (0, 1)]
    noises = [ObservationNoise(Gradual(1, 1, 1), indices=[i]) for i in (2, 3)]
    inside, outside = [walks[0], noises[0]], [walks[1], noises[1]]
    together = observed(drifting(Echo(), [*inside, *outside], seed), 20)
    nested = observed(drifting(drifting(Echo(), inside, seed), outside, seed), 20)
    np.testing.assert_array_equal(nested, together)
    changes = together - [1, 2, 3, 4]
    for one, other in ((0, 1), (2, 3)):
        assert not np.allclose(changes[1:, one], changes[1:, other])


def test_observations_are_scaled_and_shifted():
    env = drifting(Echo(), [ObservationScale(TWO_PHASES), ObservationShift(Gradual(0, 5, over=5), indices=[1, 3])])
    assert observed(env, 6).tolist() == [
        [1, 2, 3, 4],
        [1, 2, 3, 4],
        [1, 3, 3, 5],
        [1, 4, 3, 6],
        [1, 5, 3, 7],
        [1, 6, 3, 8],
        [2, 9, 6, 13],
    ]


def test_observations_change_places_and_back():
    env = drifting(Echo(), ObservationPermute(Sudden(every=2, values=[0, 1, 0, 2, 1])), seed=0)
    seen = observed(env, 10)[1:].tolist()
    assert seen[0] == seen[1] == seen[4] == seen[5] == [1, 2, 3, 4]
    assert seen[2] == seen[3] == seen[8] == seen[9]
    assert len({tuple(row) for row in seen}) == 3
    assert all(sorted(row) == [1, 2, 3, 4] for row in seen)


def test_only_some_change_places():
    env = drifting(Echo(), ObservationPermute(Sudden(every=1), indices=[0, 2]), seed=0)
    assert {tuple(row) for row in observed(env, 20).tolist()} == {(1, 2, 3, 4), (3, 2, 1, 4)}


def test_every_number_has_its_own_offset():
    env = drifting(Echo(), ObservationOffset(Sudden(every=2, values=[0, 1, 0, 2, 1]), deviation=100.0), seed=0)
    offsets = observed(env, 10)[1:] - [1, 2, 3, 4]
    assert (offsets[[0, 1, 4, 5]] == 0).all()
    np.testing.assert_array_equal(offsets[2:4], offsets[8:])
    assert len(np.unique(offsets[[2, 6]])) == 8
    other = observed(drifting(Echo(), env.specification, seed=1), 10)[1:] - [1, 2, 3, 4]
    assert not np.allclose(other[2], offsets[2])


def test_offsets_have_the_deviation_they_are_told():
    space = spaces.Box(0, 9000, (4000,), np.float32)
    env = drifting(Echo(space), ObservationOffset(Sudden(every=1), indices=range(2000), deviation=3.0), seed=0)
    offsets = observed(env, 2)[-1] - np.arange(1, 4001)
    assert offsets[:2000].std() == pytest.approx(3, rel=0.05)
    assert offsets[:2000].mean() == pytest.approx(0, abs=0.3)
    assert (offsets[2000:] == 0).all()
    assert (env.observation_space.low[:2000] == -np.inf).all()
    assert (env.observation_space.high[2000:] == 9000).all()


def test_signs_flip_and_flip_back():
    env = drifting(Echo(), ObservationFlip(Sudden(every=2, values=[0, 1, 0, 2, 3, 4, 1])), seed=0)
    signs = observed(env, 14)[1:] / [1, 2, 3, 4]
    assert (signs[[0, 1, 4, 5]] == 1).all()
    np.testing.assert_array_equal(signs[2:4], signs[12:])
    assert (np.abs(signs) == 1).all()
    assert (signs[[2, 6, 8, 10]] < 0).any(1).all()
    assert len({tuple(row) for row in signs}) > 3
    assert env.observation_space == spaces.Box(-10, 10, (4,), np.float32)


def test_noise_has_the_deviation_it_is_told():
    env = drifting(Echo(spaces.Box(-np.inf, np.inf, (2000,), np.float32)), ObservationNoise(Gradual(0, 2, over=2)))
    noise = observed(env, 4) - np.arange(1, 2001)
    assert noise.std(1) == pytest.approx([0, 0, 1, 2, 2], rel=0.05, abs=1e-6)


def test_parts_of_dicts_change():
    space = spaces.Dict({"a": spaces.Box(0, 9, (2,), np.float32), "b": spaces.Discrete(3)})
    env = drifting(Echo(space), ObservationScale(Sudden(every=1, values=[2]), key="a"))
    observation, info = env.reset()
    assert observation["a"].tolist() == [2, 4]
    assert observation["b"] == 1
    assert info["drift"]["observation_scale.a"] == 2
    assert env.observation_space["a"].high.tolist() == [18, 18]


def test_pictures_stay_pictures():
    env = drifting(
        Echo(spaces.Box(0, 200, (2, 3, 3), np.uint8)),
        [ObservationScale(Sudden(every=1, values=[100])), ObservationNoise(Sudden(every=1, values=[5.0]))],
    )
    observation, _ = env.reset(seed=0)
    assert observation.dtype == np.uint8
    assert observation.max() == 200
    assert env.observation_space == spaces.Box(0, 200, (2, 3, 3), np.uint8)


@given(
    low=st.floats(-5, 5),
    width=st.floats(0, 5),
    scale=st.tuples(st.floats(-3, 3), st.floats(-3, 3)),
    shift=st.tuples(st.floats(-3, 3), st.floats(-3, 3)),
    number=st.integers(0, 5),
)
def test_spaces_hold_what_is_observed(low, width, scale, shift, number):
    box = spaces.Box(np.float32([low, 0, -np.inf]), np.float32([low + width, 4, np.inf]))
    box.seed(0)
    changes = [
        ObservationScale(Sudden(every=1, values=scale)),
        ObservationShift(Sudden(every=1, values=shift)),
        ObservationPermute(Sudden(every=1, values=[0, number])),
    ]

    class Random(Echo):
        def _observe(self):
            return self.observation_space.sample()

    env = drifting(Random(box), changes, seed=0)
    wide = spaces.Box(env.observation_space.low - 1e-4, env.observation_space.high + 1e-4)
    for observation, *_ in play(env, 9, action=0):
        assert wide.contains(observation)


def test_actions_change_places():
    echo = Echo()
    env = drifting(echo, ActionPermute(Sudden(every=4)), seed=1)
    env.reset()
    maps = []
    for _ in range(5):
        maps.append([])
        for action in range(4):
            env.step(np.int64(action))
            maps[-1].append(echo.action)
    assert maps[0] == [0, 1, 2, 3]
    assert all(sorted(done) == [0, 1, 2, 3] for done in maps)
    assert len({tuple(done) for done in maps}) > 2


@pytest.mark.parametrize(
    ("space", "action"),
    [
        (spaces.Discrete(3, start=5), 6),
        (BOX, np.float32([0.1, 0.2, 0.3])),
        (spaces.MultiBinary(4), np.int8([0, 1, 0, 0])),
        (spaces.MultiDiscrete([3, 3]), np.int64([0, 2])),
    ],
)
def test_permuted_actions_stay_in_their_space(space, action):
    echo = Echo(action_space=space)
    env = drifting(echo, ActionPermute(Sudden(every=1)), seed=0)
    env.reset()
    done = set()
    for _ in range(20):
        env.step(action)
        assert space.contains(echo.action)
        done.add(str(echo.action))
    assert len(done) > 1


def test_gain_keeps_actions_within_their_range():
    echo = Echo(action_space=BOX)
    env = drifting(echo, ActionGain(Sudden(every=1, values=[3.0])))
    env.reset()
    env.step(np.float32([0.1, -0.2, 0.9]))
    assert echo.action == pytest.approx([0.3, -0.6, 1.0])
    assert BOX.contains(echo.action)


def test_rewards_turn_round():
    env = drifting(Echo(), RewardSign(Cyclic(1, -1, 4, "square")))
    assert [reward for _, reward, _ in play(env, 6, action=0)[1:]] == [1, 1, -1, -1, 1, 1]


def test_seeds_make_drift_common_or_each_ones_own():
    walk = RewardScale(RandomWalk(0, 1, 0.1))

    def rewards(seed):
        env = DummyVecEnv([lambda: drifting(Echo(), walk, seed=seed)] * 3)
        env.seed(5)
        env.reset()
        return np.array([env.step([0, 0, 0])[1] for _ in range(10)]).T

    common = rewards(seed=4)
    assert (common[0] == common[1]).all()
    own = rewards(seed=None)
    assert len({tuple(row) for row in own}) == 3
    assert (own == rewards(seed=None)).all()


@pytest.mark.parametrize("kind", [DummyVecEnv, SubprocVecEnv])
def test_vectors_of_stable_baselines(kind):
    env = make_vec_env(lambda: drifting("CartPole-v1", ObservationScale(TWO_PHASES)), 2, vec_env_cls=kind)
    env.reset()
    for i in range(7):
        _, _, _, infos = env.step([0, 1])
        assert [info["drift"]["phase"] for info in infos] == [i // 5] * 2
    env.close()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_vectors_of_gymnasium(mode):
    wrappers = [lambda env: drifting(env, ObservationScale(TWO_PHASES))]
    env = gymnasium.make_vec("CartPole-v1", 2, vectorization_mode=mode, wrappers=wrappers)
    env.reset(seed=0)
    for i in range(7):
        info = env.step(np.array([0, 1]))[-1]
        assert info["drift"]["phase"].tolist() == [i // 5] * 2
    env.close()


def test_a_vector_that_is_one_environment_is_refused():
    env = gymnasium.make_vec("CartPole-v1", 2)
    with pytest.raises(TypeError, match="let each of them drift"):
        drifting(env, RewardScale(TWO_PHASES))


def test_the_checker_of_gymnasium_has_no_objections():
    changes = [ObservationScale(TWO_PHASES), ObservationPermute(Sudden(every=3)), ActionPermute(Sudden(every=7))]
    play(PassiveEnvChecker(drifting(Echo(), [*changes, RewardScale(TWO_PHASES)], seed=0)), 20, action=0)


def test_a_specification_makes_the_same_environment():
    changes = [ObservationScale(TWO_PHASES, indices=[0]), Dynamics(RandomWalk(0.5, 2, 0.1), ["length", "masspole"])]
    env = drifting("CartPole-v1", changes, seed=3)
    plain = json.loads(json.dumps(env.specification))
    assert [change(spec) for spec in plain] == changes
    for same in (drifting("CartPole-v1", plain, seed=3), gymnasium.make(env.spec)):
        for one, other in zip(play(env, 9, action=1), play(same, 9, action=1), strict=True):
            assert one[0].tolist() == other[0].tolist()
            assert one[1:] == other[1:]
        env = drifting("CartPole-v1", changes, seed=3)


def test_changes_are_not_bound_to_an_environment():
    changes = [ObservationNoise(Sudden(every=1, values=[1.0])), ObservationScale(RandomWalk(0, 1, 0.1))]
    one, other = (drifting(Echo(), changes, seed=3) for _ in range(2))
    assert (observed(one, 9) == observed(other, 9)).all()


STATEFUL = [
    ObservationScale(RandomWalk(0.5, 2, 0.1)),
    ObservationNoise(Sudden(every=3, low=0, high=1)),
    ObservationPermute(Sudden(every=2, unit="episodes")),
]


@pytest.mark.parametrize("seed", [None, 3])
def test_a_state_goes_on_where_it_was(seed):
    def make():
        return drifting(drifting(Counter(), STATEFUL, seed), RewardScale(RandomWalk(0, 1, 0.1)), seed)

    env, other = make(), make()
    assert env.continues
    play(env, 10, action=0)
    state = env.state_dict()
    other.reset(seed=77)
    other.load_state_dict(state)
    assert other.env.env.age == env.env.env.age
    for _ in range(10):
        (seen, *rest), (expected, *others) = other.step(0), env.step(0)
        assert seen.tolist() == expected.tolist()
        assert rest == others
        if rest[2]:
            assert other.reset()[0].tolist() == env.reset()[0].tolist()


def test_drift_goes_on_without_an_environment_that_can():
    env, other = (drifting(drifting("CartPole-v1", STATEFUL), RewardScale(TWO_PHASES)) for _ in range(2))
    assert not env.continues
    play(env, 40, action=0)
    state = env.state_dict()
    assert state["environment"] is None
    other.load_state_dict(state)
    for one in (env, other):
        one.reset(seed=9)
    assert env.step(0)[0].tolist() == other.step(0)[0].tolist()


def test_states_of_another_drift_are_refused():
    env = drifting(Counter(), STATEFUL, seed=1)
    other = drifting(Counter(), STATEFUL[:1], seed=1)
    with pytest.raises(ValueError, match="another drift"):
        other.load_state_dict(env.state_dict())
    with pytest.raises(ValueError, match="cannot go on"):
        drifting(Echo(), STATEFUL, seed=1).load_state_dict(env.state_dict())


@pytest.mark.parametrize(
    ("world", "spec", "error", "message"),
    [
        (Echo(), {"kind": "observation_skale"}, ValueError, "did you mean 'observation_scale'"),
        (Echo(), {"kind": "reward_scale"}, ValueError, "lacks 'schedule'"),
        (Echo(), ObservationScale(TWO_PHASES, indices=[4]), ValueError, "has 4 numbers"),
        (Echo(), ObservationScale(TWO_PHASES, key="a"), ValueError, "no place in observations"),
        (Echo(spaces.Discrete(3)), ObservationScale(TWO_PHASES), TypeError, "that are a Box"),
        (Echo(), ObservationPermute(TWO_PHASES, indices=[1]), ValueError, "at least 2 numbers"),
        (Echo(), ActionGain(TWO_PHASES), TypeError, "that are a Box"),
        (Echo(action_space=spaces.Discrete(1)), ActionPermute(TWO_PHASES), ValueError, "has one"),
        (Echo(action_space=spaces.Text(3)), ActionPermute(TWO_PHASES), TypeError, "Discrete, MultiDiscrete"),
        (Echo(action_space=spaces.MultiDiscrete([2, 3])), ActionPermute(TWO_PHASES), ValueError, "the same range"),
        (Echo(), Dynamics(TWO_PHASES, "aged"), AttributeError, r"did you mean 'age'\?"),
        (Echo(), Dynamics(TWO_PHASES, "action_space"), TypeError, "only numbers"),
        (Echo(), [Dynamics(TWO_PHASES, "age"), Dynamics(TWO_PHASES, "age")], ValueError, "one way only"),
        (drifting(Echo(), Dynamics(TWO_PHASES, "age")), Dynamics(TWO_PHASES, "age"), ValueError, "one way only"),
    ],
)
def test_changes_without_a_place_are_refused(world, spec, error, message):
    with pytest.raises(error, match=message):
        drifting(world, spec)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ObservationScale(TWO_PHASES, indices=[1, 1]), "each once"),
        (lambda: ObservationNoise(Gradual(1, -1, 5)), "not negative"),
        (lambda: ActionPermute(Gradual(0, -1, 5)), "not negative"),
        (lambda: ObservationFlip(Gradual(0, -1, 5)), "not negative"),
        (lambda: ObservationOffset(Gradual(0, -1, 5)), "not negative"),
        (lambda: ObservationOffset(TWO_PHASES, deviation=0.0), "Invalid deviation: 0.0"),
        (lambda: Dynamics(TWO_PHASES), "Invalid names"),
        (lambda: DriftWrapper(Echo(), [], seed=-1), "Invalid seed: -1"),
    ],
)
def test_nonsense_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_arguments_of_make_need_an_id():
    with pytest.raises(TypeError, match="made already"):
        drifting(Echo(), RewardScale(TWO_PHASES), render_mode="human")


def test_no_step_before_a_reset():
    with pytest.raises(gymnasium.error.ResetNeeded):
        drifting(Echo(), RewardScale(TWO_PHASES)).step(0)
