from __future__ import annotations

import functools
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.wrappers.vector import DictInfoToList, RecordEpisodeStatistics, TransformReward
from stable_baselines3 import PPO
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack, VecMonitor, VecNormalize

from driftproof.ppo.vector_env import GymnasiumVecEnv, as_vec_env

MODES = list(AutoresetMode)
LENGTHS = ((2, 3), (1, 4), (3, 1))
"""How long the episodes of each environment last, in turn."""


class Tally(gymnasium.Env):
    """Shows 100 · episode + 10 · step + index, so that nothing can be mistaken for anything else."""

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 7}

    def __init__(self, index, render_mode=None, dict_obs=False):
        self.index = index
        self.render_mode = render_mode
        self.dict_obs = dict_obs
        self.gain = 1
        box = spaces.Box(0, np.inf, (1,), np.float32)
        self.observation_space = spaces.Dict({"value": box, "double": box}) if dict_obs else box
        self.action_space = spaces.Discrete(50)
        self.episode = -1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode += 1
        self.steps = 0
        return self.observe(), {"first": self.value, "options": str(options or {})}

    def step(self, action):
        self.steps += 1
        ended = self.steps == LENGTHS[self.index][self.episode % 2]
        terminated, truncated = [(True, False), (False, True), (True, True)][(self.episode + self.index) % 3]
        info = {"value": self.value, "nested": {"pair": np.array([self.value, self.index])}}
        if self.index == 1:
            info["only"] = "one"
        return self.observe(), self.gain * (action + self.index / 8), ended and terminated, ended and truncated, info

    @property
    def value(self):
        return 100 * self.episode + 10 * self.steps + self.index

    def observe(self):
        value = np.array([self.value], np.float32)
        return {"value": value, "double": 2 * value} if self.dict_obs else value

    def render(self):
        return np.full((2, 2, 3), self.index, np.uint8)

    def add(self, number, to=0):
        return self.index + number + to


def vectorized(mode, kind=SyncVectorEnv, copy=True, **arguments):
    makers = [functools.partial(Tally, index, **arguments) for index in range(len(LENGTHS))]
    return kind(makers, copy=copy, autoreset_mode=mode)


@pytest.fixture
def adapted():
    """Make adapters that are closed at the end."""
    made = []

    def adapt(env):
        made.append(GymnasiumVecEnv(env))
        return made[-1]

    yield adapt
    for env in made:
        env.close()


def values(obs):
    return obs["value"][..., 0] if isinstance(obs, dict) else obs[..., 0]


def choose(value):
    return int(value) % 47


def expected_episodes(index, number):
    """What a plain loop over one environment sees."""
    env = Tally(index)
    episodes = []
    for _ in range(number):
        obs, first = env.reset()
        episode = {"obs": [float(obs[0])], "rewards": [], "infos": [], "first": first}
        ended = False
        while not ended:
            obs, reward, terminated, truncated, info = env.step(choose(obs[0]))
            episode["obs"].append(float(obs[0]))
            episode["rewards"].append(reward)
            episode["infos"].append(info | {"nested": {"pair": info["nested"]["pair"].tolist()}})
            ended = terminated or truncated
        episode["truncated"] = truncated and not terminated
        episode["r"], episode["l"] = sum(episode["rewards"]), len(episode["rewards"])
        episodes.append(episode)
    return episodes


def played_episodes(env, steps):
    """The episodes of every environment that end within some steps, without the steps that only reset."""
    obs = env.reset()

    def begin(i):
        return {"obs": [float(values(obs)[i])], "rewards": [], "infos": [], "first": env.reset_infos[i]}

    current = [begin(i) for i in range(env.num_envs)]
    finished = [[] for _ in range(env.num_envs)]
    resetting = [False] * env.num_envs
    for _ in range(steps):
        obs, rewards, dones, infos = env.step(np.array([choose(value) for value in values(obs)]))
        for i, (reward, done, info) in enumerate(zip(rewards, dones, infos, strict=True)):
            assert info.pop("autoreset", False) is resetting[i]
            if resetting[i]:
                assert (reward, done, info) == (0, False, {})
                current[i] = begin(i)
                resetting[i] = False
                continue
            episode = current[i]
            episode["rewards"].append(float(reward))
            if done:
                episode["obs"].append(float(values(info.pop("terminal_observation"))))
                episode["truncated"] = info.pop("TimeLimit.truncated")
                statistics = info.pop("episode")
                assert statistics.pop("t") >= 0
                episode.update(statistics)
                finished[i].append(episode)
                if env.autoreset_mode is AutoresetMode.NEXT_STEP:
                    assert values(obs)[i] == episode["obs"][-1]
                    resetting[i] = True
                else:
                    current[i] = begin(i)
            else:
                episode["obs"].append(float(values(obs)[i]))
            if "nested" in info:
                info["nested"] = {"pair": info["nested"]["pair"].tolist()}
            episode["infos"].append(info)
    return finished


@pytest.mark.parametrize("dict_obs", [False, True])
@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
@pytest.mark.parametrize("mode", MODES)
def test_episodes_are_those_of_a_plain_loop_in_every_mode(mode, kind, dict_obs, adapted):
    env = adapted(vectorized(mode, kind, dict_obs=dict_obs))
    for i, episodes in enumerate(played_episodes(env, 18)):
        assert len(episodes) >= 4
        assert episodes == expected_episodes(i, len(episodes))


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("mode", MODES)
def test_make_vec_plays_the_episodes_of_make(mode, kind, adapted):
    arguments = {"autoreset_mode": mode}
    env = adapted(gymnasium.make_vec("CartPole-v1", 2, vectorization_mode=kind, vector_kwargs=arguments))
    env.seed(5)
    obs = env.reset()
    ends = [[], []]
    for _ in range(60):
        obs, _, dones, infos = env.step((obs[:, 0] > 0).astype(int))
        for i in np.flatnonzero(dones):
            ends[i].append((infos[i]["terminal_observation"].tolist(), infos[i]["episode"]["l"]))
    for i, found in enumerate(ends):
        single = gymnasium.make("CartPole-v1")
        seed = 5 + i
        for final_obs, length in found:
            obs, _ = single.reset(seed=seed)
            seed = None
            steps, terminated = 0, False
            while not terminated:
                obs, _, terminated, _, _ = single.step(int(obs[0] > 0))
                steps += 1
            assert (obs.tolist(), steps) == (final_obs, length)
        assert len(found) >= 3


def test_native_cart_poles_take_one_step_to_reset(adapted):
    raw = gymnasium.make_vec("CartPole-v1", 8, max_episode_steps=12)
    env = adapted(gymnasium.make_vec("CartPole-v1", 8, max_episode_steps=12))
    assert env.autoreset_mode is AutoresetMode.NEXT_STEP
    env.seed(3)
    obs = env.reset()
    np.testing.assert_array_equal(obs, raw.reset(seed=3)[0])
    lengths = np.zeros(8, int)
    seen = {"terminated": 0, "truncated": 0, "reset": 0}
    was_done = np.zeros(8, bool)
    for step in range(60):
        # Half of them push to one side only.
        actions = np.where(np.arange(8) % 2, 1, step % 2)
        raw_obs, raw_rewards, terminated, truncated, _ = raw.step(actions)
        obs, rewards, dones, infos = env.step(actions)
        np.testing.assert_array_equal(obs, raw_obs)
        np.testing.assert_array_equal(rewards, raw_rewards)
        np.testing.assert_array_equal(dones, terminated | truncated)
        lengths = np.where(was_done, 0, lengths + 1)
        for i, info in enumerate(infos):
            if dones[i]:
                np.testing.assert_array_equal(info["terminal_observation"], raw_obs[i])
                assert info["TimeLimit.truncated"] == (not terminated[i])
                assert (info["episode"]["r"], info["episode"]["l"]) == (lengths[i], lengths[i])
                seen["terminated" if terminated[i] else "truncated"] += 1
            else:
                assert info == ({"autoreset": True} if was_done[i] else {})
                seen["reset"] += was_done[i]
        was_done = dones.copy()
    assert min(seen.values()) > 5


def test_rewards_of_a_step_that_only_resets_do_not_count(adapted):
    env = adapted(TransformReward(vectorized(AutoresetMode.NEXT_STEP), lambda rewards: rewards - 100))
    env.reset()
    rewards, infos = zip(*[env.step(np.full(3, 4))[1::2] for _ in range(6)], strict=True)
    assert [row[1] for row in rewards] == [-95.875, 0, -95.875, -95.875, -95.875, -95.875]
    assert infos[5][1]["episode"]["r"] == 4 * -95.875


@pytest.mark.parametrize("mode", MODES)
def test_final_observations_are_apart_from_the_others(mode, adapted):
    env = adapted(vectorized(mode))
    env.reset()
    obs, _, _, infos = env.step(np.zeros(3, int))
    obs[:] = 0
    assert infos[1]["terminal_observation"].tolist() == [11]


@pytest.mark.parametrize("dict_obs", [False, True])
@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
@pytest.mark.parametrize("mode", MODES)
def test_kept_observations_stay_as_they_are(mode, kind, dict_obs, adapted):
    env = adapted(vectorized(mode, kind, copy=False, dict_obs=dict_obs))
    obs = env.reset()
    kept = [(obs, values(obs).tolist())]
    for _ in range(8):
        obs, _, dones, infos = env.step(np.zeros(3, int))
        kept.append((obs, values(obs).tolist()))
        kept += [(infos[i]["terminal_observation"], None) for i in np.flatnonzero(dones)]
    finals = [values(obs).item() for obs, numbers in kept if numbers is None]
    assert sorted(finals)[:4] == [11, 20, 32, 112]
    for obs, numbers in kept:
        assert numbers is None or values(obs).tolist() == numbers


def test_observations_written_in_place_by_a_wrapper_are_copied(adapted):
    class Reused(VectorWrapper):
        buffer = np.zeros((3, 1), np.float32)

        def reset(self, **arguments):
            self.buffer[:], infos = self.env.reset(**arguments)
            return self.buffer, infos

        def step(self, actions):
            self.buffer[:], *rest = self.env.step(actions)
            return self.buffer, *rest

    env = adapted(Reused(vectorized(AutoresetMode.NEXT_STEP)))
    first = env.reset()
    second, *_ = env.step(np.zeros(3, int))
    env.step(np.zeros(3, int))
    assert first.tolist() == [[0], [1], [2]]
    assert second.tolist() == [[10], [11], [12]]


def test_observations_are_contiguous(adapted):
    env = adapted(gymnasium.make_vec("CartPole-v1", 3))
    assert env.reset().flags.c_contiguous
    assert env.step(np.zeros(3, int))[0].flags.c_contiguous


def test_rewards_and_dones_belong_to_the_caller(adapted):
    env = adapted(vectorized(AutoresetMode.NEXT_STEP))
    env.reset()
    _, rewards, dones, _ = env.step(np.full(3, 4))
    assert rewards.dtype == np.float32
    rewards += 1000
    dones[:] = True
    _, rewards, dones, infos = env.step(np.full(3, 4))
    assert rewards.tolist() == [4, 0, 4.25]
    assert dones.tolist() == [True, False, False]
    assert infos[0]["episode"]["r"] == 8


def test_infos_go_to_those_they_are_about(adapted):
    env = adapted(vectorized(AutoresetMode.SAME_STEP))
    env.reset()
    assert [info["first"] for info in env.reset_infos] == [0, 1, 2]
    infos = env.step(np.zeros(3, int))[3]
    assert ["only" in info for info in infos] == [False, True, False]
    assert [info["value"] for info in infos] == [10, 11, 12]
    assert [info["nested"]["pair"].tolist() for info in infos] == [[10, 0], [11, 1], [12, 2]]
    assert all(type(info["value"]) is int for info in infos)
    assert not any("final_obs" in info or "final_info" in info or "first" in info for info in infos)
    assert [info["first"] for info in env.reset_infos] == [0, 101, 2]


def test_infos_without_masks_and_of_no_environment_in_particular(adapted):
    class Extra(VectorWrapper):
        def step(self, actions):
            *rest, infos = self.env.step(actions)
            extra = {"row": np.arange(6).reshape(3, 2), "lone": np.array(7), "word": "all", "_hidden": np.arange(3)}
            return *rest, infos | extra

    env = adapted(Extra(gymnasium.make_vec("CartPole-v1", 3)))
    env.reset()
    infos = env.step(np.zeros(3, int))[3]
    for i, info in enumerate(infos):
        assert info.pop("row").tolist() == [2 * i, 2 * i + 1]
        assert info == {"lone": 7, "word": "all", "_hidden": i}


def test_kept_infos_stay_as_they_are(adapted):
    class Reused(VectorWrapper):
        buffer = np.zeros((3, 2))

        def step(self, actions):
            *rest, infos = self.env.step(actions)
            self.buffer += 1
            return *rest, infos | {"row": self.buffer}

    env = adapted(Reused(gymnasium.make_vec("CartPole-v1", 3)))
    env.reset()
    first = env.step(np.zeros(3, int))[3]
    env.step(np.zeros(3, int))
    assert first[2]["row"].tolist() == [1, 1]


def test_every_environment_and_step_has_an_info_of_its_own(adapted):
    env = adapted(gymnasium.make_vec("CartPole-v1", 3))
    env.reset()
    infos = [info for _ in range(2) for info in env.step(np.zeros(3, int))[3]]
    infos[0]["mark"] = 1
    assert infos[1:] == [{}] * 5


@pytest.mark.parametrize("mode", MODES)
def test_reset_starts_everything_anew(mode, adapted):
    env = adapted(vectorized(mode))
    env.reset()
    assert env.step(np.full(3, 9))[2].tolist() == [False, True, False]
    obs = env.reset()
    # Where the mode resets within a step, the second environment has had one episode more.
    episode = 1 if mode is AutoresetMode.NEXT_STEP else 2
    assert obs.tolist() == [[100], [100 * episode + 1], [102]]
    _, rewards, _, infos = env.step(np.full(3, 1))
    assert not any("autoreset" in info for info in infos)
    assert rewards.tolist() == [1, 1.125, 1.25]
    assert infos[2]["episode"]["r"] == 1.25
    assert infos[2]["episode"]["l"] == 1


@pytest.mark.parametrize("kind", ["sync", "async", "vector_entry_point"])
def test_seed_is_used_once(kind, adapted):
    env, other = (adapted(gymnasium.make_vec("CartPole-v1", 3, vectorization_mode=kind)) for _ in range(2))
    assert env.seed(7) == [7, 8, 9]
    first = env.reset()
    assert not np.array_equal(first, env.reset())
    env.seed(7)
    np.testing.assert_array_equal(env.reset(), first)
    np.testing.assert_array_equal(other.env.reset(seed=7)[0], first)
    if kind != "vector_entry_point":
        np.testing.assert_array_equal(gymnasium.make("CartPole-v1").reset(seed=9)[0], first[2])


def test_options_are_used_once(adapted):
    env = adapted(gymnasium.make_vec("CartPole-v1", 3))
    env.set_options({"low": 0.5, "high": 0.6})
    assert (env.reset() >= 0.5).all()
    assert (env.reset() <= 0.05).all()
    tallies = adapted(vectorized(AutoresetMode.DISABLED))
    tallies.set_options({"array": np.arange(2)})
    tallies.reset()
    assert [info["options"] for info in tallies.reset_infos] == ["{'array': array([0, 1])}"] * 3
    tallies.step(np.zeros(3, int))
    assert tallies.reset_infos[1]["options"] == "{}"


def test_options_that_differ_are_refused(adapted):
    env = adapted(vectorized(AutoresetMode.NEXT_STEP))
    env.set_options([{"a": 1}, {"a": 1}, {"a": 2}])
    with pytest.raises(ValueError, match="same options everywhere"):
        env.reset()
    env.set_options([{"a": 1}, {"a": 1}, {"a": 1}])
    env.reset()
    assert env.reset_infos[2]["options"] == "{'a': 1}"


class Echo(gymnasium.Env):
    """Tells what it was given."""

    observation_space = spaces.Box(-9, 9, (2,), np.float32)

    def __init__(self, action_space):
        self.action_space = action_space

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action)
        return np.zeros(2, np.float32), 0.0, False, False, {"given": action, "dtype": str(np.asarray(action).dtype)}


@pytest.mark.parametrize(
    ("space", "given", "dtype"),
    [
        (spaces.Discrete(5), np.array([4, 2], np.int32), "int64"),
        (spaces.MultiDiscrete([3, 4]), np.array([[1, 2], [0, 3]], np.int32), "int64"),
        (spaces.MultiBinary(2), np.array([[0, 1], [1, 1]], np.int64), "int8"),
        (spaces.Box(-1, 1, (2,), np.float32), np.array([[0.5, -0.5], [0.25, 1]], np.float64), "float32"),
        (spaces.Box(0, 255, (2,), np.uint8), np.array([[1, 2], [3, 255]], np.int64), "uint8"),
    ],
)
def test_actions_arrive_with_the_dtype_of_their_space(space, given, dtype, adapted):
    env = adapted(SyncVectorEnv([functools.partial(Echo, space)] * 2))
    env.reset()
    infos = env.step(given)[3]
    for i, info in enumerate(infos):
        np.testing.assert_array_equal(info["given"], given[i])
        assert info["dtype"] == dtype


def test_actions_of_combined_spaces_are_passed_on(adapted):
    space = spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Box(-1, 1, (1,))})
    env = adapted(SyncVectorEnv([functools.partial(Echo, space)] * 2))
    env.reset()
    infos = env.step({"a": np.array([1, 2]), "b": np.array([[0.5], [-0.5]], np.float32)})[3]
    assert [info["given"]["a"] for info in infos] == [1, 2]


class Pairs(gymnasium.Env):
    observation_space = spaces.Tuple([spaces.Discrete(100), spaces.Box(0, 100, (1,))])
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return (0, np.zeros(1, np.float32)), {}

    def step(self, action):
        self.steps += 1
        return (self.steps, np.full(1, 10 * self.steps, np.float32)), 1.0, False, self.steps == 2, {}


@pytest.mark.parametrize("mode", MODES)
def test_tuples_of_observations(mode, adapted):
    env = adapted(SyncVectorEnv([Pairs] * 2, copy=False, autoreset_mode=mode))
    numbers, boxes = env.reset()
    env.step(np.zeros(2, int))
    assert (numbers.tolist(), boxes.tolist()) == ([0, 0], [[0], [0]])
    obs, _, dones, infos = env.step(np.zeros(2, int))
    assert dones.all()
    assert [part.tolist() for part in infos[1]["terminal_observation"]] == [2, [20]]
    assert obs[0].tolist() == ([2, 2] if mode is AutoresetMode.NEXT_STEP else [0, 0])


@pytest.mark.parametrize("mode", MODES)
def test_statistics_of_the_environment_are_kept(mode, adapted):
    class Counted(Monitor):
        def step(self, action):
            *rest, info = super().step(action)
            if "episode" in info:
                info["episode"]["r"] = 1000 + self.env.value
            return *rest, info

    makers = [lambda i=i: Counted(Tally(i)) for i in range(3)]
    env = adapted(SyncVectorEnv(makers, autoreset_mode=mode))
    env.reset()
    env.step(np.zeros(3, int))
    infos = env.step(np.zeros(3, int))[3]
    assert infos[0]["episode"]["r"] == 1020
    assert infos[0]["episode"]["l"] == 2


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_statistics_of_a_vector_wrapper_are_kept(mode, adapted):
    class Counted(RecordEpisodeStatistics):
        def step(self, actions):
            *rest, infos = super().step(actions)
            if "episode" in infos:
                infos["episode"]["r"] += 1000
            return *rest, infos

    env = adapted(Counted(vectorized(mode)))
    env.reset()
    env.step(np.full(3, 4))
    infos = env.step(np.full(3, 4))[3]
    assert infos[0]["episode"]["r"] == 1008
    assert infos[0]["episode"]["l"] == 2
    assert infos[0]["value"] == 20
    assert "episode" not in infos[2]


def test_final_observations_may_be_batched_and_without_final_infos(adapted):
    class Batched(VectorWrapper):
        def step(self, actions):
            *rest, infos = self.env.step(actions)
            final = np.stack([np.zeros(1) if one is None else one for one in infos["final_obs"]])
            return *rest, {"final_obs": {"value": final}, "_final_obs": infos["_final_obs"], "key": np.arange(3)}

    env = adapted(Batched(vectorized(AutoresetMode.SAME_STEP)))
    env.reset()
    infos = env.step(np.zeros(3, int))[3]
    assert infos[1]["terminal_observation"]["value"].tolist() == [11]
    assert [info["key"] for info in infos] == [0, 1, 2]
    assert "terminal_observation" not in infos[0]
    assert env.reset_infos[1] == {}


def test_same_step_without_a_final_observation_is_refused(adapted):
    class Silent(VectorWrapper):
        def step(self, actions):
            *rest, _ = self.env.step(actions)
            return *rest, {}

    env = adapted(Silent(vectorized(AutoresetMode.SAME_STEP)))
    env.reset()
    with pytest.raises(ValueError, match=r'no "final_obs"'):
        env.step(np.zeros(3, int))


@pytest.mark.parametrize("metadata", [{}, {"autoreset_mode": "sometimes"}])
def test_unknown_autoreset_mode_is_refused_until_it_is_told(metadata, adapted):
    env = VectorWrapper(vectorized(AutoresetMode.NEXT_STEP))
    env.metadata = metadata
    with pytest.raises(ValueError, match=r"env\.metadata = .*NEXT_STEP.* or SAME_STEP, or DISABLED"):
        GymnasiumVecEnv(env)
    env.metadata = {**env.metadata, "autoreset_mode": AutoresetMode.NEXT_STEP}
    assert adapted(env).autoreset_mode is AutoresetMode.NEXT_STEP


def test_lists_of_infos_are_refused(adapted):
    env = adapted(DictInfoToList(vectorized(AutoresetMode.NEXT_STEP)))
    with pytest.raises(TypeError, match="DictInfoToList"):
        env.reset()


@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
def test_attributes_and_methods_of_the_environments(kind, adapted):
    env = adapted(VectorWrapper(vectorized(AutoresetMode.SAME_STEP, kind)))
    assert env.get_attr("index") == [0, 1, 2]
    assert env.get_attr("index", [2, 0]) == [2, 0]
    assert env.get_attr("index", 1) == [1]
    assert env.env_method("add", 10, to=100) == [110, 111, 112]
    env.set_attr("gain", 3)
    assert env.get_attr("gain") == [3, 3, 3]
    env.set_attr("gain", [1, 2, 3], indices=range(3))
    assert env.get_attr("gain") == [[1, 2, 3]] * 3
    assert env.has_attr("gain")
    assert not env.has_attr("loss")
    with pytest.raises(AttributeError, match="no attribute 'loss'"):
        env.env_method("loss")
    # The workers have survived it.
    env.reset()
    env.set_attr("gain", 2)
    assert env.step(np.full(3, 4))[1].tolist() == [8, 8.25, 8.5]


def test_methods_are_found_and_not_called_by_get_attr(adapted):
    env = adapted(vectorized(AutoresetMode.SAME_STEP))
    assert [method(1) for method in env.get_attr("add")] == [1, 2, 3]


def test_some_environments_can_be_reached_if_in_this_process(adapted):
    env = adapted(vectorized(AutoresetMode.SAME_STEP))
    env.set_attr("gain", 5, indices=[0, 2])
    assert env.get_attr("gain") == [5, 1, 5]
    assert env.env_method("add", 1, indices=2) == [3]
    env = adapted(vectorized(AutoresetMode.SAME_STEP, AsyncVectorEnv))
    with pytest.raises(NotImplementedError, match="leave out indices"):
        env.set_attr("gain", 5, indices=[0, 2])
    with pytest.raises(NotImplementedError, match="leave out indices"):
        env.env_method("add", 1, indices=2)
    with pytest.raises(NotImplementedError, match="leave out indices"):
        env.env_method("add", 1, indices=[2, 1, 0])


def test_native_environments_have_nothing_inside_to_reach(adapted):
    env = adapted(gymnasium.make_vec("CartPole-v1", 2))
    assert env.get_attr("render_mode") == [None, None]
    assert not env.has_attr("gravity")
    with pytest.raises(AttributeError, match="'gravity' of its environments cannot be read"):
        env.get_attr("gravity")
    with pytest.raises(AttributeError, match="'render' of its environments cannot be read"):
        env.env_method("render")
    with pytest.raises(AttributeError, match="'gravity' of its environments cannot be set"):
        env.set_attr("gravity", 1)
    assert env.env_is_wrapped(gymnasium.wrappers.TimeLimit) == [False, False]


def test_wrappers_of_the_environments(adapted):
    makers = [lambda: gymnasium.wrappers.TimeLimit(Tally(0), 5), lambda: Tally(1)]
    env = adapted(SyncVectorEnv(makers))
    assert env.env_is_wrapped(gymnasium.wrappers.TimeLimit) == [True, False]
    assert env.env_is_wrapped(gymnasium.wrappers.TimeLimit, 1) == [False]
    assert env.env_is_wrapped(Monitor) == [True, True]
    env = adapted(AsyncVectorEnv(makers))
    assert env.env_is_wrapped(Monitor, [0]) == [True]
    with pytest.raises(NotImplementedError, match="does not show the wrappers"):
        env.env_is_wrapped(gymnasium.wrappers.TimeLimit)


@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
def test_frames_are_tiled(kind, adapted):
    env = adapted(vectorized(AutoresetMode.SAME_STEP, kind, render_mode="rgb_array"))
    env.reset()
    assert env.render_mode == "rgb_array"
    assert env.metadata["render_fps"] == 7
    assert [frame.flat[0] for frame in env.get_images()] == [0, 1, 2]
    assert env.render()[::2, ::2, 0].tolist() == [[0, 1], [2, 0]]


def test_other_render_modes_are_left_to_the_environment(adapted):
    class Shown(VectorWrapper):
        render_mode = "human"
        shown = 0

        def render(self):
            self.shown += 1

    env = adapted(Shown(gymnasium.make_vec("CartPole-v1", 2)))
    assert env.render() is None
    assert env.env.shown == 1
    assert env.get_images() == []


def test_close_closes_the_environment():
    env = GymnasiumVecEnv(vectorized(AutoresetMode.SAME_STEP, AsyncVectorEnv))
    workers = env.env.processes
    env.close()
    assert env.env.closed
    assert not any(worker.is_alive() for worker in workers)


class EnvPoolUpTo11(gymnasium.Env):
    """EnvPool's interface up to 1.1: a plain Env by its class, with the spaces of a single environment.

    From envpool/python/gymnasium_envpool.py and envpool.py. Infos are arrays without masks, and a step after the end
    of an episode resets, ignoring the action.
    """

    metadata: ClassVar = {"render_modes": ["rgb_array", "human"]}

    def __init__(self, players=1):
        self.inner = vectorized(AutoresetMode.NEXT_STEP, copy=False)
        self.players = players

    @property
    def config(self):
        return {"num_envs": 3, "batch_size": 3, "max_num_players": self.players}

    @property
    def all_env_ids(self):
        return np.arange(3, dtype=np.int32)

    @property
    def observation_space(self):
        return self.inner.single_observation_space

    @property
    def action_space(self):
        return self.inner.single_action_space

    def __len__(self):
        return self.config["num_envs"]

    def async_reset(self):
        self.received = self.inner.reset()

    def send(self, action, env_id=None):
        self.received = self.inner.step(action)

    def recv(self, reset=False, return_info=True):
        obs, *rest, _ = self.received
        steps = np.array([env.steps for env in self.inner.envs], np.int32)
        infos = {"env_id": self.all_env_ids, "players": {"env_id": self.all_env_ids}, "elapsed_step": steps}
        return np.repeat(obs, self.players, axis=0), *rest, infos

    def step(self, action, env_id=None):
        self.send(action, env_id)
        return self.recv()

    def reset(self, env_id=None):
        self.async_reset()
        return self.recv(reset=True)


class EnvPoolFrom12(EnvPoolUpTo11, VectorEnv):
    """EnvPool's interface since 1.2: an Env and a VectorEnv, whose spaces are still those of a single environment."""

    metadata: ClassVar = {"render_modes": ["rgb_array", "human"], "autoreset_mode": AutoresetMode.NEXT_STEP}
    num_envs = property(EnvPoolUpTo11.__len__)
    single_observation_space = EnvPoolUpTo11.observation_space
    single_action_space = EnvPoolUpTo11.action_space

    def reset(self, env_id=None, *, seed=None, options=None):
        return super().reset(env_id)


@pytest.mark.parametrize("kind", [EnvPoolUpTo11, EnvPoolFrom12])
def test_envpool_plays_the_episodes_of_a_plain_loop(kind):
    env = as_vec_env(kind())
    assert (env.num_envs, env.autoreset_mode) == (3, AutoresetMode.NEXT_STEP)
    assert env.observation_space.shape == (1,)
    assert env.env_is_wrapped(gymnasium.wrappers.TimeLimit) == [False] * 3
    assert not env.has_attr("gain")
    expected = {i: expected_episodes(i, 9) for i in range(3)}
    for i, episodes in enumerate(played_episodes(env, 18)):
        assert len(episodes) >= 4
        for found, wanted in zip(episodes, expected[i], strict=False):
            assert found["first"] == {"env_id": i, "players": {"env_id": i}, "elapsed_step": 0}
            assert [info["elapsed_step"] for info in found["infos"]] == list(range(1, wanted["l"] + 1))
            for key in ("obs", "rewards", "truncated", "r", "l"):
                assert found[key] == wanted[key]


@pytest.mark.parametrize("kind", [EnvPoolUpTo11, EnvPoolFrom12])
def test_envpool_says_that_it_is_not_seeded(kind):
    env = as_vec_env(kind())
    env.seed(1)
    with pytest.warns(UserWarning, match="EnvPool takes its seed when made"):
        env.reset()
    env.reset()


def test_envpool_with_more_rows_than_environments_is_refused():
    with pytest.raises(ValueError, match="6 environments instead of 3; EnvPool needs batch_size = num_envs"):
        as_vec_env(EnvPoolUpTo11(players=2)).reset()


def test_only_vector_environments_are_adapted(adapted):
    plain = gymnasium.make("CartPole-v1")
    assert as_vec_env(plain) is None
    assert as_vec_env(DummyVecEnv([lambda: plain])) is None
    assert as_vec_env(adapted(gymnasium.make_vec("CartPole-v1", 2))) is None
    assert as_vec_env("CartPole-v1") is None
    vector = VectorWrapper(gymnasium.make_vec("CartPole-v1", 2))
    assert as_vec_env(vector).env is vector
    with pytest.raises(TypeError, match="VectorEnv or an EnvPool, but is a TimeLimit"):
        GymnasiumVecEnv(plain)


class Chooser:
    """The policy of the loops above."""

    def predict(self, observations, state=None, episode_start=None, deterministic=False):
        return np.array([choose(value) for value in values(observations)]), None


@pytest.mark.parametrize("mode", MODES)
def test_evaluate_policy_counts_episodes_rightly(mode, adapted):
    env = adapted(vectorized(mode))
    rewards, lengths = evaluate_policy(Chooser(), env, n_eval_episodes=9, return_episode_rewards=True)
    wanted = [episode for i in range(3) for episode in expected_episodes(i, 3)]
    assert sorted(zip(rewards, lengths, strict=True)) == sorted((episode["r"], episode["l"]) for episode in wanted)


@pytest.mark.parametrize("mode", MODES)
def test_vec_monitor_is_told_that_it_is_not_needed(mode, adapted):
    with pytest.warns(UserWarning, match="already wrapped with a `Monitor`"):
        env = VecMonitor(adapted(vectorized(mode)))
    env.reset()
    env.step(np.full(3, 4))
    infos = env.step(np.full(3, 4))[3]
    assert (infos[0]["episode"]["r"], infos[0]["episode"]["l"]) == (8, 2)


@pytest.mark.parametrize("mode", MODES)
def test_vec_normalize_around_it(mode, adapted):
    env = VecNormalize(adapted(vectorized(mode, dict_obs=True)), norm_reward=False, clip_obs=1e9)
    env.reset()
    _, rewards, _, infos = env.step(np.full(3, 4))
    assert rewards.tolist() == [4, 4.125, 4.25]
    final_obs = env.unnormalize_obs(infos[1]["terminal_observation"])
    np.testing.assert_allclose([final_obs["value"][0], final_obs["double"][0]], [11, 22], rtol=1e-5)
    first = env.get_original_obs()["value"][:, 0].tolist()
    assert first == [10, 11 if mode is AutoresetMode.NEXT_STEP else 101, 12]


@pytest.mark.parametrize("dict_obs", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_vec_frame_stack_around_it(mode, dict_obs, adapted):
    env = VecFrameStack(adapted(vectorized(mode, dict_obs=dict_obs)), 3)

    def stacks(obs):
        return (obs["value"] if dict_obs else obs).tolist()

    env.reset()
    env.step(np.zeros(3, int))
    obs, _, dones, infos = env.step(np.zeros(3, int))
    assert dones[0]
    assert stacks(infos[0]["terminal_observation"]) == [0, 10, 20]
    assert stacks(obs)[2] == [2, 12, 22]
    if mode is not AutoresetMode.NEXT_STEP:
        assert stacks(obs)[0] == [0, 0, 100]


def test_training_logs_episodes_and_evaluates(adapted):
    env = adapted(gymnasium.make_vec("CartPole-v1", 4))
    agent = PPO("MlpPolicy", env, n_steps=32, batch_size=64, n_epochs=1, seed=0, device="cpu").learn(256)
    assert len(agent.ep_info_buffer) > 3
    assert all(episode["r"] == episode["l"] > 0 for episode in agent.ep_info_buffer)
    mean, _ = evaluate_policy(agent, env, 4)
    assert mean >= 8
