"""Kinds of settings that rl-zoo3 has for PPO and RecurrentPPO, and how it trains, continues and evaluates agents."""

import gc
import warnings
import weakref

import gymnasium
import numpy as np
import pytest
import torch
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import VecFrameStack, VecNormalize
from torch import nn

from driftproof.ppo import DistributionalPPO, Linear


class FromInitialValue:
    """The zoo's ``lin_0.001``: a schedule that is an object of a class that no file knows."""

    def __init__(self, initial_value):
        self.initial_value = float(initial_value)

    def __call__(self, progress_remaining):
        return progress_remaining * self.initial_value


class Frames(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 255, (36, 36, 1), np.uint8)
    action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.integers(0, 255, self.observation_space.shape, dtype=np.uint8), {}

    def step(self, action):
        return self.reset()[0], float(action), self.np_random.random() < 0.1, False, {}


WIDE = {"log_std_init": -2, "ortho_init": False, "activation_fn": nn.ReLU, "net_arch": {"pi": [32, 32], "vf": [32, 32]}}
MEMORY = {"ortho_init": False, "activation_fn": nn.ReLU, "lstm_hidden_size": 8, "enable_critic_lstm": True}
BOTH_NETWORKS = {"net_arch": {"pi": [16], "vf": [16]}}

CARTPOLE, PENDULUM = "CartPole-v1", "Pendulum-v1"
ENTRIES = {
    "nothing but a policy": ("MlpPolicy", PENDULUM, 1, False, {}),
    "schedules, one minibatch": (
        *("MlpPolicy", CARTPOLE, 8, False),
        {"n_steps": 8, "batch_size": 64, "learning_rate": FromInitialValue(1e-3), "clip_range": FromInitialValue(0.2)},
    ),
    "schedules of Stable-Baselines3": (
        *("MlpPolicy", CARTPOLE, 2, True),
        {"n_steps": 16, "learning_rate": LinearSchedule(3e-4, 0, 1), "clip_range": LinearSchedule(0.4, 0, 1)},
    ),
    "a batch larger than the rollout": (
        *("MlpPolicy", PENDULUM, 1, True),
        {"n_steps": 8, "batch_size": 256, "gamma": 0.9999, "gae_lambda": 0.9, "max_grad_norm": 5, "vf_coef": 0.19},
    ),
    "no batch size, short rollouts": ("MlpPolicy", CARTPOLE, 16, True, {"n_steps": 16, "gae_lambda": 1.0}),
    "gSDE": (
        *("MlpPolicy", PENDULUM, 4, False),
        {"n_steps": 16, "use_sde": True, "sde_sample_freq": 4, "policy_kwargs": {**WIDE, "log_std_init": -3.29}},
    ),
    "normalised rewards only": (
        *("MlpPolicy", PENDULUM, 2, {"norm_obs": False, "norm_reward": True}),
        {"n_steps": 16, "policy_kwargs": WIDE, "ent_coef": 1.4e-07, "normalize_advantage": False},
    ),
    "clipped values": ("MlpPolicy", CARTPOLE, 2, True, {"n_steps": 16, "clip_range_vf": 0.2}),
    "frames": (
        *("CnnPolicy", Frames, 2, {"norm_obs": False, "norm_reward": True}),
        {"n_steps": 16, "batch_size": 32, "learning_rate": FromInitialValue(2.5e-4)},
    ),
    "memory": (
        *("MlpLstmPolicy", CARTPOLE, 8, True),
        {"n_steps": 8, "batch_size": 64, "learning_rate": FromInitialValue(1e-3), "policy_kwargs": MEMORY},
    ),
    "memory, gSDE": (
        *("MlpLstmPolicy", PENDULUM, 4, True),
        {"n_steps": 32, "use_sde": True, "sde_sample_freq": 8, "policy_kwargs": {**MEMORY, **BOTH_NETWORKS}},
    ),
    "memory without layers behind it": (
        *("MlpLstmPolicy", PENDULUM, 2, True),
        {"n_steps": 32, "batch_size": 16, "policy_kwargs": {**MEMORY, "net_arch": {"pi": [], "vf": []}}},
    ),
    "memory of the actor only": (
        *("MlpLstmPolicy", PENDULUM, 1, True),
        {
            "n_steps": 16,
            "batch_size": 64,
            "policy_kwargs": {"enable_critic_lstm": False, "lstm_hidden_size": 8, "log_std_init": 0.0},
        },
    ),
    "frames with memory": (
        *("CnnLstmPolicy", Frames, 2, {"norm_obs": False, "norm_reward": True}),
        {
            "n_steps": 16,
            "batch_size": 32,
            "use_sde": False,
            "policy_kwargs": {"enable_critic_lstm": False, "activation_fn": nn.GELU, "lstm_hidden_size": 8},
        },
    ),
}
EXPECTED = ".*(scales rewards, which is not needed|does not divide the rollout|by name only)"


def environments(env, number, normalize, evaluation=False):
    """As the zoo makes them: statistics around environments, stacked frames around these."""
    result = make_vec_env(env, number, seed=0)
    if normalize:
        arguments = {} if normalize is True else dict(normalize)
        result = VecNormalize(result, **arguments | ({"training": False, "norm_reward": False} if evaluation else {}))
    return VecFrameStack(result, 2) if env is Frames else result


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_trains_continues_and_is_evaluated(entry, tmp_path):
    policy, env, number, normalize, settings = ENTRIES[entry]
    settings = {**settings, "n_epochs": 1} | ({} if "n_steps" in settings else {"n_steps": 64})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", EXPECTED)
        model = DistributionalPPO(policy, environments(env, number, normalize), seed=0, device="cpu", **settings)
        # The last rollout overruns this.
        model.learn(model.n_steps * number + 1)
        model.save(tmp_path / "agent")
    before = model.policy.state_dict()

    # The zoo gives everything but the policy again, whether or not it could be changed.
    again = {name: value for name, value in settings.items() if name != "policy_kwargs"}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", EXPECTED)
        continued = DistributionalPPO.load(
            *(tmp_path / "agent.zip", environments(env, number, normalize), "cpu"),
            **{"seed": 0, "tensorboard_log": None, "verbose": 0, **again},
        )
        assert all(torch.equal(tensor, before[name]) for name, tensor in continued.policy.state_dict().items())
        assert continued.lr_schedule(1.0) == model.lr_schedule(1.0)
        continued.learn(model.n_steps * number)

    nothing = {"learning_rate": 0.0, "lr_schedule": lambda _: 0.0, "clip_range": lambda _: 0.0}
    watched = DistributionalPPO.load(tmp_path / "agent", custom_objects=nothing, device="cpu", seed=0)
    assert watched.learning_rate == watched.clip_range(1.0) == 0
    world = environments(env, number, normalize, evaluation=True)
    mean, _ = evaluate_policy(watched, world, 1)
    assert np.isfinite(mean)


@pytest.mark.parametrize("schedule", [Linear(1e-3, 1e-4), LinearSchedule(1e-3, 0, 1), FromInitialValue(1e-3)])
@pytest.mark.parametrize("policy", ["MlpPolicy", "MlpLstmPolicy"])
def test_a_schedule_stays_at_its_end_if_the_last_rollout_overruns_training(schedule, policy, tmp_path):
    networks = {"lstm_hidden_size": 4} if "Lstm" in policy else {}
    model = DistributionalPPO(
        *(policy, CARTPOLE, schedule),
        n_steps=32,
        n_epochs=1,
        clip_range=schedule,
        device="cpu",
        policy_kwargs={"net_arch": [4], **networks},
    )
    model.learn(40)
    assert model.num_timesteps == 64
    for group in model.policy.optimizer.param_groups:
        assert group["lr"] == pytest.approx(schedule(0.0))
    assert model.hyperparams.current("clip_range") == pytest.approx(schedule(0.0))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", EXPECTED)
        model.save(tmp_path / "agent")
    given = {"learning_rate": schedule, "clip_range": schedule}
    DistributionalPPO.load(tmp_path / "agent", make_vec_env(CARTPOLE), "cpu", given).learn(32)


def test_an_environment_is_freed_after_a_trial():
    model = DistributionalPPO("MlpPolicy", CARTPOLE, n_steps=16, n_epochs=1, device="cpu").learn(16)
    env = weakref.ref(model.env)
    model.env.close()
    del model.env
    assert model.get_env() is None
    gc.collect()
    assert env() is None
    with pytest.raises(ValueError, match="environment"):
        model.learn(16)


def test_a_decay_that_rounding_leaves_below_zero_can_be_saved_and_loaded(tmp_path):
    def decay(remaining):
        return 0.3 - 3 * 0.1 * (1 - remaining)

    assert decay(0.0) < 0
    model = DistributionalPPO("MlpPolicy", CARTPOLE, decay, n_steps=32, n_epochs=1, device="cpu").learn(32)
    with pytest.warns(UserWarning, match="by name only: learning_rate"):
        model.save(tmp_path / "agent")
    DistributionalPPO.load(tmp_path / "agent", make_vec_env(CARTPOLE), "cpu", {"learning_rate": decay})


def test_settings_that_cannot_change_may_be_given_to_load_as_they_are(tmp_path):
    model = DistributionalPPO("MlpPolicy", PENDULUM, n_steps=16, use_sde=True, optimizer_class="adam", device="cpu")
    model.save(tmp_path / "agent")
    loaded = DistributionalPPO.load(tmp_path / "agent", device="cpu", use_sde=True, policy="MlpPolicy", gamma=0.9)
    assert loaded.use_sde
    assert loaded.gamma == 0.9
    for wrong in ({"use_sde": False}, {"policy": "MlpLstmPolicy"}, {"no_such": None}):
        with pytest.raises(TypeError, match=f"cannot change {next(iter(wrong))}"):
            DistributionalPPO.load(tmp_path / "agent", device="cpu", **wrong)


class OwnAdam(torch.optim.Adam):
    pass


def test_a_class_of_ones_own_may_be_given_to_load_as_a_setting(tmp_path):
    DistributionalPPO("MlpPolicy", CARTPOLE, n_steps=16, optimizer_class=OwnAdam, device="cpu").save(tmp_path / "agent")
    loaded = DistributionalPPO.load(tmp_path / "agent", device="cpu", optimizer_class=OwnAdam)
    assert type(loaded.policy.optimizer) is OwnAdam


@pytest.mark.parametrize("given", [5e-4, lambda remaining: 5e-4 * remaining], ids=["number", "function"])
def test_custom_objects_replace_a_function_that_the_file_only_names(given, tmp_path):
    model = DistributionalPPO("MlpPolicy", CARTPOLE, lambda left: 1e-3 * left, n_steps=16, n_epochs=1, device="cpu")
    model.hyperparams["learning_rate"] = 2e-3
    with pytest.warns(UserWarning, match="by name only: learning_rate"):
        model.save(tmp_path / "agent")
    loaded = DistributionalPPO.load(tmp_path / "agent", device="cpu", custom_objects={"learning_rate": given})
    assert loaded.lr_schedule(1.0) == 5e-4
    # The same function goes on with what was set.
    same = DistributionalPPO.load(
        tmp_path / "agent", device="cpu", custom_objects={"learning_rate": lambda x: 1e-3 * x}
    )
    assert same.lr_schedule(0.5) == pytest.approx(1e-3)


def test_an_environment_for_evaluation_keeps_rewards_and_statistics_as_they_are(tmp_path):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", EXPECTED)
        model = DistributionalPPO(
            "MlpPolicy", environments(CARTPOLE, 2, True), n_steps=32, n_epochs=1, device="cpu"
        ).learn(64)
    model.save(tmp_path / "agent")
    for number in (1, 2):
        env = environments(CARTPOLE, number, True, evaluation=True)
        loaded = DistributionalPPO.load(tmp_path / "agent", env, "cpu")
        assert loaded.get_vec_normalize_env() is env
        assert not env.norm_reward
        assert not env.training
        np.testing.assert_allclose(env.obs_rms.mean, model.get_vec_normalize_env().obs_rms.mean)
        env.reset()
        rewards = env.step(np.zeros(number, dtype=int))[1]
        np.testing.assert_array_equal(rewards, 1)
