"""Every policy, in every action space, with every kind of observation."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, VecTransposeImage

from driftproof.ppo import DistributionalPPO

from .scripted import small_networks

CORES = ["", "Lstm", "Gru"]

ACTIONS = {
    "discrete": spaces.Discrete(3),
    "discrete from 1": spaces.Discrete(3, start=1),
    "multi-discrete": spaces.MultiDiscrete([2, 4, 3]),
    "multi-discrete in 2-D": spaces.MultiDiscrete([[2, 3], [4, 2]]),
    "multi-binary": spaces.MultiBinary(3),
    "multi-binary in 2-D": spaces.MultiBinary([2, 2]),
    "box": spaces.Box(-0.5, 0.25, (2,), np.float32),
    "box in 2-D": spaces.Box(np.array([[0, -1], [2, 3]], np.float32), np.array([[1, 0], [2.5, 9]], np.float32)),
    "box of float64": spaces.Box(-0.1, 0.1, (1,), np.float64),
}
OBSERVATIONS = {
    "flat": spaces.Box(-1, 1, (3,), np.float32),
    "2-D": spaces.Box(-1, 1, (2, 3), np.float32),
    "float64": spaces.Box(-1, 1, (3,), np.float64),
    "unbounded": spaces.Box(-np.inf, np.inf, (3,), np.float32),
    "integers": spaces.Box(0, 9, (3,), np.int32),
    "discrete": spaces.Discrete(4),
    "multi-discrete": spaces.MultiDiscrete([3, 2]),
    "multi-binary": spaces.MultiBinary(4),
}
IMAGE = spaces.Box(0, 255, (36, 36, 1), np.uint8)
PARTS = spaces.Dict(
    {
        "place": spaces.Box(-1, 1, (2,), np.float32),
        "picture": IMAGE,
        "key": spaces.Discrete(3),
        "pair": spaces.MultiDiscrete([2, 3]),
        "switches": spaces.MultiBinary(2),
    }
)


class Chance(gymnasium.Env):
    """Random observations and rewards; takes no action that is not in its space."""

    def __init__(self, observation_space, action_space, index=0):
        self.observation_space, self.action_space = observation_space, action_space
        self.observation_space.seed(index)
        self.taken = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.age = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        # A MultiBinary contains 1.0, which is no index.
        assert np.asarray(action).dtype.kind == self.action_space.dtype.kind
        self.taken.append(np.array(action))
        self.age += 1
        ended, cut = self.age == 5, self.age == 3 and self.np_random.random() < 0.5
        return self.observation_space.sample(), self.np_random.normal(), ended, cut, {}


def learned(policy, observation_space, action_space, envs=2, **networks):
    env = DummyVecEnv([lambda i=i: Chance(observation_space, action_space, i) for i in range(envs)])
    networks = small_networks(policy, networks, units=8, width=8)
    model = DistributionalPPO(
        policy, env, n_steps=8, batch_size=8, n_epochs=1, seed=0, device="cpu", policy_kwargs=networks
    )
    model.learn(2 * 8 * envs)
    return model


def check(model):
    """Weights are finite, and answers are in the action space."""
    assert model._n_updates == 2
    assert all(p.isfinite().all() for p in model.policy.parameters())
    env = model.get_env()
    observations, state = env.reset(), None
    for deterministic in (False, True):
        actions, state = model.predict(observations, state, deterministic=deterministic)
        assert len(actions) == env.num_envs
        assert all(model.action_space.contains(action) for action in actions)
    one = {key: part[0] for key, part in observations.items()} if isinstance(observations, dict) else observations[0]
    action, _ = model.predict(one)
    assert model.action_space.contains(action)
    quantiles, _ = model.predict_quantiles(observations)
    assert quantiles.shape == (2, env.num_envs, 4)
    assert np.isfinite(quantiles).all()


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("actions", ACTIONS)
def test_actions_are_in_the_space(core, actions):
    model = learned(f"Mlp{core}Policy", OBSERVATIONS["flat"], ACTIONS[actions])
    check(model)


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("observations", OBSERVATIONS)
def test_observations_of_every_kind_are_learned_from(core, observations):
    check(learned(f"Mlp{core}Policy", OBSERVATIONS[observations], ACTIONS["discrete"]))


@pytest.mark.parametrize("core", CORES)
def test_images_are_learned_from_channels_first(core):
    model = learned(f"Cnn{core}Policy", IMAGE, ACTIONS["box"], features_extractor_kwargs={"features_dim": 8})
    assert isinstance(model.get_env(), VecTransposeImage)
    assert model.observation_space.shape == (1, 36, 36)
    check(model)
    # As it comes from an environment that nobody has wrapped.
    as_seen = np.random.default_rng(0).integers(0, 255, (36, 36, 1), np.uint8)
    action, _ = model.predict(as_seen, deterministic=True)
    transposed, _ = model.predict(as_seen.transpose(2, 0, 1), deterministic=True)
    np.testing.assert_array_equal(action, transposed)


@pytest.mark.parametrize("core", CORES)
def test_dictionaries_are_learned_from(core):
    arguments = {"cnn_output_dim": 8}
    check(learned(f"MultiInput{core}Policy", PARTS, ACTIONS["multi-discrete"], features_extractor_kwargs=arguments))


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("actions", ["box", "box in 2-D", "box of float64"])
def test_squashed_actions_stay_inside_their_bounds(core, actions):
    model = learned(f"Mlp{core}Policy", OBSERVATIONS["flat"], ACTIONS[actions], squash_output=True, log_std_init=1.0)
    check(model)
    space = model.action_space
    taken = np.concatenate([env.taken for env in model.get_env().envs])
    # None is clipped to a bound, however wide the distribution is.
    assert ((taken > space.low) & (taken < space.high)).mean() > 0.9


def test_actions_that_are_not_squashed_are_clipped():
    model = learned("MlpPolicy", OBSERVATIONS["flat"], ACTIONS["box"], log_std_init=3.0)
    taken = np.concatenate([env.taken for env in model.get_env().envs])
    assert {-0.5, 0.25} <= set(taken.flatten().tolist())


@pytest.mark.parametrize("number", [1, 3])
def test_discrete_actions_from_1_reach_all_of_the_space(number):
    model = learned("MlpLstmPolicy", OBSERVATIONS["flat"], ACTIONS["discrete from 1"], envs=number)
    assert {int(action) for env in model.get_env().envs for action in env.taken} == {1, 2, 3}


class Sum(BaseFeaturesExtractor):
    """A user's own."""

    def __init__(self, observation_space, factor=1.0):
        super().__init__(observation_space, features_dim=1)
        self.weight = torch.nn.Parameter(torch.tensor(factor))

    def forward(self, observations):
        return self.weight * observations.flatten(1).sum(1, keepdim=True)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("policy", ["MlpPolicy", "MlpLstmPolicy"])
def test_own_features_extractors_learn(policy, shared):
    model = learned(
        policy,
        OBSERVATIONS["2-D"],
        ACTIONS["discrete"],
        features_extractor_class=Sum,
        features_extractor_kwargs={"factor": 2.0},
        share_features_extractor=shared,
        net_arch={"pi": [4], "vf": [6, 6]},
        activation_fn=torch.nn.ReLU,
    )
    check(model)
    own = [part.weight.item() for part in model.policy.modules() if isinstance(part, Sum)]
    assert len(own) == (1 if shared else 2)
    assert all(weight != 2 for weight in own)


@pytest.mark.parametrize("policy", ["MlpLstmPolicy", "MlpGruPolicy"])
@pytest.mark.parametrize(
    "networks",
    [
        {"n_lstm_layers": 2},
        {"shared_lstm": True, "enable_critic_lstm": False},
        {"n_lstm_layers": 2, "lstm_kwargs": {"dropout": 0.5}},
        {"n_lstm_layers": 2, "lstm_kwargs": {"bias": False}, "enable_critic_lstm": False},
        {"shared_recurrence": True, "n_lstm_layers": 2},
        {"enable_critic_lstm": False},
        {"ortho_init": False, "net_arch": []},
    ],
    ids=str,
)
def test_memories_of_every_form_learn(policy, networks):
    check(learned(policy, OBSERVATIONS["flat"], ACTIONS["discrete"], **networks))
