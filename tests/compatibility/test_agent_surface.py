"""What scripts and callbacks for Stable-Baselines3 use of an agent."""

import inspect
import io
import tempfile

import gymnasium
import numpy as np
import pytest
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback, LogEveryNTimesteps
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.utils import ConstantSchedule, FloatSchedule, LinearSchedule
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnvWrapper, VecNormalize

from driftproof.ppo import DistributionalPPO, base

NETWORKS = {"net_arch": [8]}


def small(env="CartPole-v1", policy="MlpPolicy", **arguments):
    networks = NETWORKS if policy == "MlpPolicy" else {**NETWORKS, "lstm_hidden_size": 4}
    return DistributionalPPO(
        policy, env, **{"n_steps": 16, "n_epochs": 1, "seed": 0, "policy_kwargs": networks, **arguments}
    )


policies = pytest.mark.parametrize("policy", ["MlpPolicy", "MlpLstmPolicy"])


def test_logs_are_written_between_rollouts():
    model = small()
    model.learn(64, callback=LogEveryNTimesteps(8), log_interval=None)
    model.dump_logs()


@policies
def test_rewards_may_be_scaled_by_vec_normalize_and_are_noted_once(policy, monkeypatch, tmp_path):
    monkeypatch.setattr(base, "_said", set())
    env = VecNormalize(make_vec_env("CartPole-v1", n_envs=2))
    with pytest.warns(UserWarning, match="scales rewards, which is not needed"):
        model = small(env, policy)
    model.learn(64)
    model.save(tmp_path / "agent.zip")
    fresh = VecNormalize(make_vec_env("CartPole-v1", n_envs=2))
    loaded = DistributionalPPO.load(tmp_path / "agent.zip", env=fresh)
    assert fresh.ret_rms.var == env.ret_rms.var
    # An environment without a wrapper gets one like that of training.
    without = DistributionalPPO.load(tmp_path / "agent.zip", env=make_vec_env("CartPole-v1", n_envs=2))
    assert without.get_env().norm_reward
    loaded.learn(32)


def test_schedules_are_called_and_replaced():
    model = small(learning_rate=LinearSchedule(1e-3, 0.0, 1.0), clip_range=0.3)
    assert model.lr_schedule(0.5) == pytest.approx(5e-4)
    assert type(model.lr_schedule(1.0)) is float
    assert model.clip_range == 0.3
    assert model.clip_range(1.0) == 0.3
    assert isinstance(model.clip_range, FloatSchedule)
    model.lr_schedule = lambda remaining: 2e-3 * remaining
    model.learn(32)
    assert model.lr_schedule(0.5) == pytest.approx(1e-3)
    assert model.hyperparams.current("learning_rate") == pytest.approx(0.0, abs=1e-9)


class Watch(BaseCallback):
    def __init__(self):
        super().__init__()
        self.values, self.log_probs, self.seen = [], [], []

    def _on_step(self):
        found = self.locals
        assert {"obs_tensor", "actions", "clipped_actions", "new_obs", "rewards", "dones", "infos"} <= set(found)
        self.values.append(np.asarray(found["values"]))
        self.log_probs.append(found["log_probs"].cpu().numpy())
        self.seen.append(float(torch.as_tensor(found["obs_tensor"]).sum()))
        return True

    def _on_rollout_end(self):
        buffer = self.model.rollout_buffer
        assert buffer.size() == 16
        np.testing.assert_allclose(np.stack(self.values)[..., 0], buffer.values, atol=1e-5)
        np.testing.assert_allclose(np.stack(self.log_probs), buffer.log_probs, atol=1e-5)
        np.testing.assert_allclose(self.seen, buffer.observations.sum((1, 2)), rtol=1e-5)
        np.testing.assert_allclose(buffer.returns, buffer.advantages + buffer.values, atol=1e-5)
        assert buffer.actions.shape == (16, 2, 1)
        self.rollout = buffer


@policies
def test_callbacks_find_rollouts_and_locals(policy):
    watch = Watch()
    small(make_vec_env("CartPole-v1", n_envs=2), policy).learn(32, callback=watch)
    # The recursion by hand: one reward after the other.
    buffer = watch.rollout
    last, expected = 0.0, []
    for step in range(15, 0, -1):
        goes_on = 1 - buffer.episode_starts[step]
        delta = buffer.rewards[step - 1] + 0.99 * buffer.values[step] * goes_on - buffer.values[step - 1]
        if step == 15:
            last = (buffer.advantages[14] - delta) / (0.99 * 0.95)  # The last one bootstraps from outside.
            last = np.where(goes_on > 0, last, 0)
        last = delta + 0.99 * 0.95 * goes_on * last
        expected.append(last)
    np.testing.assert_allclose(np.stack(expected[::-1]), buffer.advantages[:15], atol=1e-4)


def test_rollouts_are_collected_by_hand():
    model = small()
    _, callback = model._setup_learn(32)
    for _ in range(2):
        assert model.collect_rollouts(model.get_env(), callback, model.rollout_buffer, n_rollout_steps=16)
        model.train()
    assert model.num_timesteps == 32
    assert model.rollout_buffer.rewards.any()
    with pytest.raises(ValueError, match="n_rollout_steps=3"):
        model.collect_rollouts(model.get_env(), callback, model.rollout_buffer, n_rollout_steps=3)


class StuckError(Exception):
    """An environment's own."""


class Fails(gymnasium.Wrapper):
    def step(self, action):
        raise StuckError("the arm is stuck")


def test_exceptions_of_environments_keep_their_type():
    model = small(DummyVecEnv([lambda: gymnasium.make("CartPole-v1"), lambda: Fails(gymnasium.make("CartPole-v1"))]))
    with pytest.raises(StuckError, match="the arm is stuck") as caught:
        model.learn(64)
    assert any("environment 1 raised StuckError at step 0" in note for note in caught.value.__notes__)


def test_no_steps_change_nothing():
    model = small()
    before = model.policy.state_dict()["action_head.weight"].clone()
    model.learn(0)
    assert model.num_timesteps == 0
    assert before.equal(model.policy.state_dict()["action_head.weight"])


def test_a_kl_target_may_be_set_and_taken_away_later(tmp_path):
    model = small(n_epochs=20, learning_rate=0.05)
    model.learn(16)
    whole = model.logger.name_to_value["train/optimizer_steps"]
    model.target_kl = 1e-6
    model.learn(16)
    assert model.logger.name_to_value["train/optimizer_steps"] < whole
    model.save(tmp_path / "agent.zip")
    assert DistributionalPPO.load(tmp_path / "agent.zip").target_kl == 1e-6
    model.target_kl = None
    model.learn(16)
    assert model.logger.name_to_value["train/optimizer_steps"] == whole


def test_files_are_read_where_they_were_written():
    with tempfile.TemporaryFile() as file:
        small().save(file)
        DistributionalPPO.load(file)
        assert not file.closed
    memory = io.BytesIO()
    small().save(memory)
    DistributionalPPO.load(memory)


def test_settings_can_be_left_out_of_a_file(tmp_path):
    model = small(verbose=2, tensorboard_log=str(tmp_path))
    model.save(tmp_path / "agent.zip", exclude=["verbose", "tensorboard_log"])
    assert DistributionalPPO.load(tmp_path / "agent.zip").verbose == 0
    model.save(tmp_path / "agent.zip", exclude=["verbose"], include=["verbose"])
    assert DistributionalPPO.load(tmp_path / "agent.zip").verbose == 2
    model.save(tmp_path / "agent.zip", exclude=["replay_buffer", "verbose"])
    assert DistributionalPPO.load(tmp_path / "agent.zip").verbose == 0


def test_attributes_travel_if_they_are_plain_and_are_named_if_not(tmp_path):
    model = small()
    model.note, model.stages, model.handle = "of the first day", [1, 2.5], object()
    with pytest.warns(UserWarning, match="does not hold the agent's attributes handle"):
        model.save(tmp_path / "agent.zip")
    loaded = DistributionalPPO.load(tmp_path / "agent.zip")
    assert (loaded.note, loaded.stages) == ("of the first day", [1, 2.5])
    assert not hasattr(loaded, "handle")


def test_functions_are_announced_when_they_are_saved(tmp_path):
    model = small(learning_rate=lambda remaining: 1e-3 * remaining)
    with pytest.warns(UserWarning, match="by name only: learning_rate; pass them to load"):
        model.save(tmp_path / "agent.zip")
    DistributionalPPO.load(tmp_path / "agent.zip", custom_objects={"learning_rate": 1e-3})


def test_custom_objects_of_the_zoo_are_taken(tmp_path):
    small().save(tmp_path / "agent.zip")
    zoo = {"learning_rate": 0.0, "lr_schedule": lambda _: 0.0, "clip_range": lambda _: 0.0}
    loaded = DistributionalPPO.load(tmp_path / "agent.zip", custom_objects=zoo)
    assert loaded.lr_schedule(1.0) == 0
    assert loaded.clip_range == 0


@pytest.mark.parametrize(
    "schedule", [FloatSchedule(2e-3), FloatSchedule(LinearSchedule(1e-3, 0, 0.5)), ConstantSchedule(1e-3)]
)
def test_schedules_of_stable_baselines3_are_saved(tmp_path, schedule):
    small(learning_rate=schedule).save(tmp_path / "agent.zip")
    loaded = DistributionalPPO.load(tmp_path / "agent.zip")
    assert loaded.lr_schedule(0.8) == pytest.approx(schedule(0.8))


def test_parameters_that_are_missing_stay_without_exact_match():
    model, other = small(seed=1), small(seed=2)
    given = other.get_parameters()
    kept = model.policy.state_dict()["action_head.bias"].clone()
    del given["policy"]["action_head.bias"]
    with pytest.warns(UserWarning, match=r"the state lacks action_head.bias"):
        model.set_parameters(given, exact_match=False)
    assert model.policy.state_dict()["action_head.bias"].equal(kept)
    torch.testing.assert_close(model.policy.state_dict()["action_head.weight"], given["policy"]["action_head.weight"])
    with pytest.raises(ValueError, match=r"action_head.bias"):
        model.set_parameters(given, exact_match=True)


def test_parameters_and_saved_policies_have_the_statistics_of_observations(tmp_path):
    def probabilities(policy):
        return policy.get_distribution(observations).distribution.probs

    class Sensors(gymnasium.ObservationWrapper):
        def observation(self, observation):
            return 40 * observation + 20

    env = make_vec_env("CartPole-v1", 2, seed=0, wrapper_class=Sensors)
    model = DistributionalPPO("MlpPolicy", env, n_steps=64, batch_size=64, seed=0, learning_rate=0.01).learn(1_024)
    observations = torch.as_tensor(env.reset())
    model.policy.save(tmp_path / "policy.zip")
    policy = type(model.policy).load(tmp_path / "policy.zip")
    other = DistributionalPPO("MlpPolicy", env, n_steps=64, batch_size=64, seed=1)
    other.policy.load_state_dict(model.policy.state_dict())
    assert not torch.allclose(probabilities(other.policy), probabilities(model.policy), atol=0.01)
    other.set_parameters(model.get_parameters())
    torch.testing.assert_close(probabilities(other.policy), probabilities(model.policy))
    torch.testing.assert_close(probabilities(policy), probabilities(model.policy))


def test_set_env_takes_as_many_environments_and_load_any_number(tmp_path):
    model = small(make_vec_env("CartPole-v1", n_envs=2)).learn(32)
    env = model.get_env()
    with pytest.raises(AssertionError, match=r"got 3 environments for an agent with 2.*load\(path, env\)"):
        model.set_env(make_vec_env("CartPole-v1", n_envs=3))
    assert model.get_env() is env
    assert model.n_envs == 2
    model.learn(32, reset_num_timesteps=False)
    model.save(tmp_path / "agent.zip")
    loaded = DistributionalPPO.load(tmp_path / "agent.zip", make_vec_env("CartPole-v1", n_envs=3))
    assert loaded.learn(48, reset_num_timesteps=False).num_timesteps == 64 + 48


@policies
def test_a_loaded_agent_goes_on_in_an_environment_that_has_not_moved(policy, tmp_path):
    model = small(policy=policy).learn(16)
    env, steps = model.get_env(), model.get_env().envs[0].get_wrapper_attr("_elapsed_steps")
    model.save(tmp_path / "agent.zip")
    moved = DistributionalPPO.load(tmp_path / "agent.zip", env, force_reset=False)
    assert np.array_equal(moved._last_obs, model._last_obs)
    moved.learn(1, Once(), reset_num_timesteps=False)
    assert env.envs[0].get_wrapper_attr("_elapsed_steps") in (steps + 1, 0)
    assert all(torch.equal(a, b) for a, b in zip(Once.before.actor, model.state.actor, strict=True))
    assert DistributionalPPO.load(tmp_path / "agent.zip", env)._last_obs is None
    assert DistributionalPPO.load(tmp_path / "agent.zip", env, force_reset=True)._last_obs is None


class Once(BaseCallback):
    """Ends training at its first step, and keeps the memory before it."""

    before = None

    def _on_rollout_start(self):
        Once.before = self.model.state

    def _on_step(self):
        return False


class Mute(VecEnvWrapper):
    """Tells nothing beside observations, rewards and ends."""

    def reset(self):
        return self.venv.reset()

    def step_wait(self):
        observation, rewards, dones, _ = self.venv.step_wait()
        return observation, rewards, dones, []


def test_environments_need_not_tell_anything():
    small(Mute(make_vec_env("CartPole-v1", n_envs=2))).learn(32)


def test_a_single_sample_cannot_be_normalised():
    with pytest.raises(AssertionError, match="advantages of a single sample"):
        small(n_steps=1)
    small(n_steps=1, normalize_advantage=False).learn(2)


@pytest.mark.filterwarnings("ignore:rich is experimental")
def test_progress_bars_need_nothing_to_be_installed():
    small().learn(32, progress_bar=True)


def test_a_rollout_buffer_class_is_refused_with_the_way_to_read_rollouts():
    with pytest.raises(TypeError, match=r"rollout_buffer_class.*model\.rollout_buffer"):
        small(rollout_buffer_class=object)


def test_every_argument_of_ppo_is_taken_at_its_default():
    theirs = inspect.signature(PPO).parameters.items()
    defaults = {name: each.default for name, each in theirs if each.default is not each.empty}
    assert {"rollout_buffer_class", "rollout_buffer_kwargs", "_init_setup_model"} <= set(defaults)
    assert DistributionalPPO("MlpPolicy", "CartPole-v1", **defaults).n_steps == defaults["n_steps"]


def test_a_small_policy_on_a_gpu_is_warned_of():
    model = DistributionalPPO("MlpPolicy", "CartPole-v1", device="cpu")
    model.device = torch.device("cuda")
    with pytest.warns(UserWarning, match="on the GPU with MlpPolicy"):
        model._maybe_recommend_cpu()
    model = DistributionalPPO("MlpLstmPolicy", "CartPole-v1", device="cpu")
    model.device = torch.device("cuda")
    model._maybe_recommend_cpu()
