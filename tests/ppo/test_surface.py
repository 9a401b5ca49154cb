"""Used as Stable-Baselines3 is used: its callbacks, wrappers, loggers and helpers, with an agent that remembers."""

import copy
import gc
import pickle
import tracemalloc

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.callbacks import (
    BaseCallback,
    CallbackList,
    CheckpointCallback,
    EvalCallback,
    StopTrainingOnMaxEpisodes,
    StopTrainingOnRewardThreshold,
)
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import KVWriter, Logger, configure
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    SubprocVecEnv,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
    sync_envs_normalization,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from driftproof.ppo import DistributionalPPO
from tests.helpers import weights

from .scripted import small_networks

RECURRENT = ["MlpLstmPolicy", "MlpGruPolicy"]
POLICIES = ["MlpPolicy", *RECURRENT]


class Clock(gymnasium.Env):
    """Episodes of one length, with a reward of 1; shows age, episode and index, so that no two steps look alike."""

    def __init__(self, index=0, length=5):
        self.observation_space = spaces.Box(-10, 10, (3,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.index, self.length = index, length
        self.episode, self.steps = -1, 0

    def reset(self, *, seed=None, options=None):
        self.age = 0
        self.episode += 1
        return self.observe(), {}

    def step(self, action):
        self.age += 1
        self.steps += 1
        return self.observe(), 1.0, self.age == self.length, False, {}

    def observe(self):
        return np.array([self.age / 10, self.episode / 10, self.index], np.float32)


def clocks(number=2, length=5):
    return DummyVecEnv([lambda i=i: Monitor(Clock(i, length)) for i in range(number)])


def cart_poles(number=2, **kwargs):
    return make_vec_env("CartPole-v1", number, **kwargs)


def small(env, policy="MlpLstmPolicy", **kwargs):
    kwargs = {"n_steps": 16, "batch_size": 16, "n_epochs": 2, "seed": 0, "device": "cpu", **kwargs}
    networks = small_networks(policy, kwargs.pop("policy_kwargs", {}), units=8, width=8)
    return DistributionalPPO(policy, env, policy_kwargs=networks, **kwargs)


def parameters(model):
    """All of it, but for an option that torch adds to the groups of any optimizer that was loaded."""
    result = model.get_parameters()
    for group in result["policy.optimizer"]["param_groups"]:
        group.pop("differentiable", None)
    return result


def same(first, second):
    """Whether two trees of tensors and plain values are equal, bit by bit."""
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, torch.Tensor):
        # The scaler's history begins with NaN.
        return torch.equal(first.isnan(), second.isnan()) and torch.equal(first.nan_to_num(), second.nan_to_num())
    return first == second


class Pages(KVWriter):
    """Keeps what is logged."""

    def __init__(self):
        self.pages = []

    def write(self, key_values, key_excluded, step=0):
        self.pages.append({"step": step, **key_values})

    def close(self):
        pass


def log_pages(model):
    pages = Pages()
    model.set_logger(Logger(None, [pages]))
    return pages.pages


def remembered(model):
    return [part.clone() for part in model.state.actor + model.state.critic]


class RolloutStarts(BaseCallback):
    """Looks at the agent where rollouts start."""

    def __init__(self):
        super().__init__()
        self.memories, self.coefficients = [], []

    def _on_rollout_start(self):
        self.memories.append(remembered(self.model))
        self.coefficients.append(self.model.hyperparams.current("ent_coef"))

    def _on_step(self):
        return True


# Learning


@pytest.mark.parametrize("policy", POLICIES)
def test_learn_counts_steps_in_whole_rollouts_and_returns_the_agent(policy):
    model = small(cart_poles(), policy)
    before = weights(model)
    assert model.learn(33) is model
    assert model.num_timesteps == 64
    assert not torch.equal(weights(model), before)
    assert weights(model).isfinite().all()


def test_the_same_seed_gives_the_same_weights_and_another_seed_others():
    first, again, other = (weights(small(cart_poles(), seed=seed).learn(64)) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("policy", POLICIES)
def test_two_learns_without_reset_equal_one_of_twice_the_length(policy):
    model = small(clocks(), policy, sequence_length=None if policy == "MlpPolicy" else 4).learn(96)
    parts = small(clocks(), policy, sequence_length=None if policy == "MlpPolicy" else 4).learn(32)
    resets = parts.get_env().get_attr("episode")
    parts.learn(64, reset_num_timesteps=False)
    assert parts.num_timesteps == 96
    # 16 and 48 steps in episodes of five: begun in the fourth and the tenth.
    assert (resets, parts.get_env().get_attr("episode")) == ([3, 3], [9, 9])
    assert torch.equal(weights(model), weights(parts))


def test_learning_anew_resets_environments_and_memory():
    model = small(clocks(1)).learn(16)
    assert all(part.any() for part in remembered(model))
    starts = RolloutStarts()
    model.learn(16, starts)
    assert model.num_timesteps == 16
    assert model.get_env().get_attr("episode") == [3 + 1 + 3]
    assert not any(part.any() for part in starts.memories[0])


def test_memory_is_kept_between_learns_and_forgotten_on_request():
    model = small(clocks(1)).learn(16)
    kept, starts = remembered(model), RolloutStarts()
    assert all(part.any() for part in kept)
    model.learn(16, starts, reset_num_timesteps=False)
    assert same(starts.memories[0], kept)
    model.reset_lstm_states_to_initial()
    model.learn(16, starts, reset_num_timesteps=False)
    assert not any(part.any() for part in starts.memories[1])


def test_log_interval_says_how_many_updates_are_between_entries():
    model = small(clocks())
    pages = log_pages(model)
    model.learn(6 * 32, log_interval=3)
    assert [page["step"] for page in pages] == [96, 192]
    model.learn(64, log_interval=None)
    assert len(pages) == 2


def test_memory_stays_flat_over_repeated_learns():
    # Without Monitor, which keeps the returns of all episodes.
    model = small(DummyVecEnv([lambda i=i: Clock(i) for i in range(2)]))

    def live_tensors():
        gc.collect()
        tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]
        # Other tests have sparse ones, and ones without data.
        tensors = [tensor for tensor in tensors if tensor.layout is torch.strided and not tensor.is_meta]
        return len(tensors), sum({t.data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    for _ in range(3):
        model.learn(32)
    before = live_tensors()
    tracemalloc.start()
    try:
        # What was allocated before tracing and is replaced would count as growth.
        model.learn(32, reset_num_timesteps=False)
        gc.collect()
        first = tracemalloc.get_traced_memory()[0]
        for _ in range(8):
            model.learn(32, reset_num_timesteps=False)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - first
    finally:
        tracemalloc.stop()
    assert live_tensors() == before
    # What Python keeps for reuse; to keep one dict for each of the 128 steps would be twice as much.
    assert grown < 50_000


@pytest.mark.parametrize("optimizer", ["adaptive_upgd", "adam"])
@pytest.mark.parametrize("scaling", [True, False])
@pytest.mark.parametrize("twin", [True, False])
def test_every_subset_of_the_techniques_learns(optimizer, scaling, twin):
    model = small(
        clocks(),
        optimizer_class=optimizer,
        variance_gradient_scaling=scaling,
        policy_kwargs={"twin_critics": twin},
    )
    before = weights(model)
    model.learn(64)
    moved = weights(model) - before
    assert moved.isfinite().all()
    assert moved.any()
    logged = model.logger.name_to_value
    assert ("critic/loss_2" in logged) is twin
    assert ("vgs/scaling_factor" in logged) is scaling
    assert ("vgs_state" in model.get_parameters()) is scaling
    signs = {name: value for name, value in logged.items() if name.startswith("upgd/")}
    assert bool(signs) is ("upgd" in str(optimizer).lower())
    if signs:
        # Of the last step, whose gradients are still there.
        told = {name: value.item() for name, value in model.policy.optimizer.metrics().items()}
        assert signs == pytest.approx(told, rel=1e-5)


# Entropy


def entropy_coefficients(updates=4, **kwargs):
    starts = RolloutStarts()
    model = small(clocks(), ent_coef=0.1, **kwargs)
    model.learn(updates * 32, starts)
    last, log = model.hyperparams.current("ent_coef"), model.logger.name_to_value
    assert log["train/ent_coef"] == last
    parts = log["train/policy_gradient_loss"] + 0.5 * log["train/value_loss"] + last * log["train/entropy_loss"]
    assert log["train/loss"] == pytest.approx(parts, abs=1e-6)
    # Those of every update are in force until the next.
    return [*starts.coefficients[1:], last]


def test_entropy_coefficient_decays_linearly_and_not_below_its_minimum():
    assert entropy_coefficients() == [0.1] * 4
    assert entropy_coefficients(ent_coef_final=0.02) == pytest.approx([0.08, 0.06, 0.04, 0.02])
    assert entropy_coefficients(ent_coef_final=0.05, ent_coef_min=0.05) == pytest.approx([0.0875, 0.075, 0.0625, 0.05])
    assert entropy_coefficients(ent_coef_min=0.1) == [0.1] * 4


def test_entropy_decay_waits_for_a_plateau():
    # Returns are always 5: the first update sees the best, and the second that it is no better.
    coefficients = entropy_coefficients(ent_coef_final=0.0, ent_coef_start="plateau", ent_plateau_patience=2)
    assert coefficients == pytest.approx([0.1, 0.1, 0.1, 0.0])


def test_entropy_is_boosted_while_the_critics_explain_little():
    # Nothing is known before the first update; a share below 1 of the variance is explained after it.
    boosted = entropy_coefficients(ent_boost_factor=3, ent_boost_below=1.0)
    assert boosted == pytest.approx([0.1, 0.3, 0.3, 0.3])
    assert entropy_coefficients(ent_boost_factor=3, ent_boost_below=1.0, ent_boost_cap=0.2) == pytest.approx(
        [0.1, 0.2, 0.2, 0.2]
    )


# Callbacks


def test_eval_callback_evaluates_saves_the_best_and_stops_at_the_threshold(tmp_path):
    stop = StopTrainingOnRewardThreshold(reward_threshold=4.5)
    callback = EvalCallback(
        clocks(1),
        callback_on_new_best=stop,
        n_eval_episodes=2,
        eval_freq=8,
        log_path=str(tmp_path),
        best_model_save_path=str(tmp_path),
        verbose=0,
    )
    model = small(clocks()).learn(320, callback)
    # Every episode is worth 5, and each step counts for both environments.
    assert model.num_timesteps == 16
    evaluations = np.load(tmp_path / "evaluations.npz")
    assert evaluations["timesteps"].tolist() == [16]
    assert evaluations["results"].tolist() == [[5, 5]]
    best = DistributionalPPO.load(tmp_path / "best_model.zip", device="cpu")
    assert torch.equal(weights(best), weights(model))


def test_checkpoint_callback_saves_the_agent_and_the_statistics(tmp_path):
    env = VecNormalize(clocks(), norm_reward=False)
    callback = CheckpointCallback(save_freq=16, save_path=str(tmp_path), name_prefix="clock", save_vecnormalize=True)
    model = small(env)
    model.learn(64, callback)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [
        "clock_32_steps.zip",
        "clock_64_steps.zip",
        "clock_vecnormalize_32_steps.pkl",
        "clock_vecnormalize_64_steps.pkl",
    ]
    # The last is from the end of the second rollout, after the first update.
    first = small(VecNormalize(clocks(), norm_reward=False)).learn(32)
    last = DistributionalPPO.load(tmp_path / "clock_64_steps.zip", device="cpu")
    assert last.num_timesteps == 64
    assert torch.equal(weights(last), weights(first))


def test_callbacks_are_called_in_order_at_every_event():
    class Events(BaseCallback):
        def __init__(self, name, events):
            super().__init__()
            self.name, self.events = name, events

        def _on_training_start(self):
            self.events.append((self.name, "training start"))

        def _on_rollout_start(self):
            self.events.append((self.name, "rollout start"))

        def _on_step(self):
            self.events.append((self.name, "step", self.num_timesteps))
            return True

        def _on_rollout_end(self):
            self.events.append((self.name, "rollout end"))

        def _on_training_end(self):
            self.events.append((self.name, "training end"))

    events = []
    small(clocks(), n_steps=2, batch_size=4).learn(8, CallbackList([Events("a", events), Events("b", events)]))
    assert events[::2] == [
        ("a", "training start"),
        *[
            event
            for rollout in (0, 4)
            for event in (
                ("a", "rollout start"),
                ("a", "step", rollout + 2),
                ("a", "step", rollout + 4),
                ("a", "rollout end"),
            )
        ],
        ("a", "training end"),
    ]
    assert [("b", *event[1:]) for event in events[::2]] == events[1::2]


def test_callbacks_see_what_stable_baselines3_shows_them():
    seen = {}

    def look(locals_, globals_):
        seen.update(locals_)
        return True

    small(clocks()).learn(32, look)
    assert seen["rewards"].tolist() == [1, 1]
    assert seen["dones"].shape == (2,)
    assert seen["actions"].shape == (2,)
    assert len(seen["infos"]) == 2
    np.testing.assert_array_equal(seen["new_obs"][:, 2], [0, 1])


def test_callbacks_count_episodes():
    model = small(clocks()).learn(320, StopTrainingOnMaxEpisodes(max_episodes=2))
    # Two environments end four episodes of five steps in ten.
    assert model.num_timesteps == 20


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("steps", [3, 5])
def test_learning_goes_on_from_where_a_callback_stopped_it(policy, steps):
    model = small(clocks(1), policy)
    before = weights(model)
    model.learn(64, lambda *_: model.num_timesteps < steps)
    assert model.num_timesteps == steps
    assert torch.equal(weights(model), before)
    clock = model.get_env().envs[0].unwrapped
    np.testing.assert_array_equal(model._last_obs, [clock.observe()])
    # The fifth step ends an episode.
    assert model._last_episode_starts.tolist() == [steps == 5]
    episode = clock.episode
    first = []
    model.learn(
        16,
        lambda locals_, _: first.append(torch.from_numpy(locals_["rollout_buffer"].observations[0])) or True,
        reset_num_timesteps=False,
    )
    np.testing.assert_allclose(first[0][0], [steps % 5 / 10, episode / 10, 0])
    assert clock.steps == steps + 16
    assert not torch.equal(weights(model), before)


@pytest.mark.filterwarnings("ignore::tqdm.TqdmExperimentalWarning")
def test_the_progress_bar_counts_to_the_end(monkeypatch):
    from stable_baselines3.common import callbacks

    bars = []

    class Bar(callbacks.tqdm):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            bars.append(self)

    monkeypatch.setattr(callbacks, "tqdm", Bar)
    model = small(clocks())
    model.learn(64, progress_bar=True)
    model.learn(32, progress_bar=True, reset_num_timesteps=False)
    assert [(bar.n, bar.total) for bar in bars] == [(64, 64), (32, 32)]


# Environments


def test_get_env_and_set_env():
    model = small(clocks())
    first, second = model.get_env(), clocks()
    model.learn(32)
    model.set_env(second)
    assert model.get_env() is second
    steps = first.get_attr("steps")
    model.learn(32, reset_num_timesteps=False)
    assert first.get_attr("steps") == steps
    assert second.get_attr("steps") == [16, 16]
    assert model.num_timesteps == 64


def test_set_env_without_reset_keeps_observation_and_memory():
    model = small(clocks(1)).learn(16)
    kept, starts = remembered(model), RolloutStarts()
    model.set_env(model.get_env(), force_reset=False)
    model.learn(16, starts, reset_num_timesteps=False)
    assert same(starts.memories[0], kept)
    assert model.get_env().get_attr("episode") == [6]
    model.set_env(model.get_env())
    model.learn(16, starts, reset_num_timesteps=False)
    assert not any(part.any() for part in starts.memories[1])
    assert model.get_env().get_attr("episode") == [6 + 1 + 3]


def test_networks_can_be_built_before_there_is_an_environment():
    expected = weights(small(cart_poles()).learn(64))
    late = small(None, _init_setup_model=False)
    late.set_env(cart_poles())
    late._setup_model()
    assert torch.equal(weights(late.learn(64)), expected)
    twice = small(cart_poles(), _init_setup_model=False)
    twice._setup_model()
    twice._setup_model()
    assert torch.equal(weights(twice.learn(64)), expected)


def test_environments_by_id_are_made_and_monitored():
    model = small("CartPole-v1").learn(32)
    assert model.get_env().env_is_wrapped(Monitor) == [True]
    assert model.logger.name_to_value["train/n_updates"] == 4
    assert len(model.ep_info_buffer) > 0


def test_gymnasium_vector_environments_learn():
    model = small(gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="sync")).learn(64)
    assert model.num_timesteps == 64
    assert weights(model).isfinite().all()
    assert len(model.ep_info_buffer) > 0
    reward, _ = evaluate_policy(model, model.get_env(), n_eval_episodes=2)
    assert reward > 1


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_environments_in_processes_give_the_same_weights():
    in_processes = cart_poles(vec_env_cls=SubprocVecEnv, vec_env_kwargs={"start_method": "fork"})
    try:
        trained = weights(small(in_processes).learn(64))
    finally:
        in_processes.close()
    assert torch.equal(trained, weights(small(cart_poles()).learn(64)))


def test_stacked_frames_reach_the_policy():
    model = small(VecFrameStack(clocks(), 3)).learn(64)
    assert model.observation_space.shape == (9,)
    env = model.get_env()
    stacked = env.reset()
    stacked, *_ = env.step(np.zeros(2, int))
    assert stacked[0, [3, 6]].tolist() == pytest.approx([0, 0.1])
    actions, _ = model.predict(stacked)
    assert actions.shape == (2,)


def test_monitored_episodes_are_averaged_in_the_log():
    model = small(VecMonitor(DummyVecEnv([lambda: Clock(length=4)])))
    pages = log_pages(model)
    model.learn(32)
    assert pages[0]["rollout/ep_rew_mean"] == 4
    assert pages[0]["rollout/ep_len_mean"] == 4


# Normalised observations


def test_observations_are_normalised_while_training_and_not_while_evaluating():
    env = VecNormalize(clocks(length=8), norm_reward=False)
    model = small(env)
    assert model.get_vec_normalize_env() is env
    model.learn(64)
    mean = env.obs_rms.mean.copy()
    assert mean[2] == pytest.approx(0.5, abs=0.01)
    seen = model._rollout.observations[..., 2]
    assert seen[-1].tolist() == pytest.approx([-1, 1], abs=0.01)
    env.training = False
    model.learn(32, reset_num_timesteps=False)
    np.testing.assert_array_equal(env.obs_rms.mean, mean)


def test_eval_callback_evaluates_with_the_statistics_of_training():
    env, eval_env = (VecNormalize(clocks(number), norm_reward=False) for number in (2, 1))
    eval_env.training = False
    model = small(env)
    model.learn(32, EvalCallback(eval_env, n_eval_episodes=1, eval_freq=16, verbose=0))
    np.testing.assert_array_equal(eval_env.obs_rms.mean, env.obs_rms.mean)
    assert env.obs_rms.mean.any()
    sync_envs_normalization(env, eval_env)
    reward, _ = evaluate_policy(model, eval_env, n_eval_episodes=1)
    assert reward == 5


# Files and parameters


@pytest.mark.parametrize("policy", POLICIES)
def test_a_saved_agent_says_the_same_after_loading(policy, tmp_path):
    model = small(cart_poles(), policy, target_kl=0.05, kl_penalty=True).learn(64)
    model.hyperparams["gamma"] = 0.9
    model.save(tmp_path / "agent")
    loaded = DistributionalPPO.load(tmp_path / "agent", device="cpu")
    assert same(parameters(loaded), parameters(model))
    assert loaded.num_timesteps == 64
    assert loaded.gamma == 0.9
    observations = np.random.default_rng(0).normal(size=(3, 2, 4)).astype(np.float32)
    states = [None, None]
    for observation in observations:
        answers = []
        for i, agent in enumerate((model, loaded)):
            actions, states[i] = agent.predict(observation, states[i], deterministic=True)
            answers.append((actions, agent.predict_quantiles(observation)[0]))
        np.testing.assert_array_equal(answers[0][0], answers[1][0])
        np.testing.assert_array_equal(answers[0][1], answers[1][1])


def test_a_loaded_agent_learns_on_in_any_number_of_environments(tmp_path):
    model = small(cart_poles()).learn(64)
    model.save(tmp_path / "agent.zip")
    given = DistributionalPPO.load(tmp_path / "agent.zip", cart_poles(4), device="cpu")
    given.learn(64, reset_num_timesteps=False)
    set_later = DistributionalPPO.load(tmp_path / "agent.zip", device="cpu")
    assert set_later.get_env() is None
    set_later.set_env(cart_poles(1))
    set_later.learn(64, reset_num_timesteps=False)
    for loaded in (given, set_later):
        assert loaded.num_timesteps == 128
        assert not torch.equal(weights(loaded), weights(model))


def test_settings_given_to_load_replace_those_in_the_file(tmp_path):
    small(clocks(), gamma=0.5).save(tmp_path / "agent.zip")
    loaded = DistributionalPPO.load(
        tmp_path / "agent.zip", clocks(), device="cpu", learning_rate=1e-5, gamma=0.7, n_steps=32, batch_size=32
    )
    assert (loaded.learning_rate, loaded.gamma, loaded.n_steps) == (1e-5, 0.7, 32)
    loaded.learn(64)
    assert loaded.num_timesteps == 64
    assert loaded.policy.optimizer.param_groups[0]["lr"] == 1e-5


def test_parameters_are_a_copy_that_can_be_given_back():
    model = small(cart_poles(), target_kl=0.05, kl_penalty=True).learn(64)
    given = parameters(model)
    assert {"policy", "policy.optimizer", "vgs_state", "kl_penalty_state"} <= given.keys()
    kept = copy.deepcopy(given)
    model.learn(64)
    assert same(given, kept)
    assert not same(model.get_parameters()["policy"], kept["policy"])
    model.set_parameters(given)
    assert same(parameters(model), kept)
    # What was given back was copied, too.
    model.learn(32)
    assert same(given, kept)


def test_another_agent_with_the_same_parameters_learns_the_same():
    model = small(clocks()).learn(64)
    twin = small(clocks(), seed=1)
    twin.set_parameters(model.get_parameters())
    for agent in (model, twin):
        agent.set_env(clocks())
        torch.manual_seed(5)
        agent.learn(64)
    assert same(parameters(twin), parameters(model))


def test_parameters_come_from_a_file_too(tmp_path):
    model = small(clocks()).learn(32)
    model.save(tmp_path / "agent.zip")
    other = small(clocks(), seed=1)
    other.set_parameters(str(tmp_path / "agent.zip"), device="cpu")
    assert same(parameters(other), parameters(model))


def test_parameters_that_are_missing_or_unknown_are_named():
    model = small(clocks())
    given = model.get_parameters()
    del given["vgs_state"]
    given["adversary"] = {}
    before = weights(model)
    other = small(clocks(), seed=1)
    with pytest.raises(ValueError, match=r"vgs_state.*adversary"):
        other.set_parameters(given)
    assert not torch.equal(weights(other), before)
    with pytest.warns(UserWarning, match=r"vgs_state.*adversary"):
        other.set_parameters(given, exact_match=False)
    assert torch.equal(weights(other), before)


@pytest.mark.parametrize("wrong", ["value", "name", "shape", "scaler"])
def test_parameters_that_do_not_fit_change_nothing(wrong):
    donor = {"name": {"target_kl": 0.1}, "shape": {"policy_kwargs": {"net_arch": [8, 9]}}}.get(wrong, {})
    given = small(clocks(), **donor).learn(32).get_parameters()
    if wrong == "value":
        given["hyperparams"]["gamma"] = 5
    if wrong == "scaler":
        given["vgs_state"] = {}
    model = small(clocks(), seed=1).learn(32)
    before = parameters(model)
    with pytest.raises((KeyError, RuntimeError, ValueError), match=r"gamma|target_kl|size mismatch|Missing key|state"):
        model.set_parameters(given)
    assert same(parameters(model), before)
    model.learn(32)
    assert not same(parameters(model), before)


def test_copies_and_pickles_of_a_policy_say_the_same_and_go_their_own_way():
    model = small(cart_poles()).learn(32)
    observation = np.ones((2, 4), np.float32)
    _, state = model.predict(observation)
    expected = model.policy.predict(observation, state, deterministic=True)
    for policy in (copy.deepcopy(model.policy), pickle.loads(pickle.dumps(model.policy))):
        actions, after = policy.predict(observation, state, deterministic=True)
        np.testing.assert_array_equal(actions, expected[0])
        np.testing.assert_array_equal(after, expected[1])
        before = torch.nn.utils.parameters_to_vector(policy.parameters()).detach().clone()
        model.learn(32)
        assert torch.equal(torch.nn.utils.parameters_to_vector(policy.parameters()), before)


# Logs


def test_tensorboard_gets_the_usual_metrics_and_ours(tmp_path):
    model = small(clocks(), tensorboard_log=str(tmp_path), target_kl=0.05, kl_penalty=True, clip_range_vf=0.2)
    model.learn(96, tb_log_name="run")
    events = EventAccumulator(str(tmp_path / "run_1")).Reload()
    tags = set(events.Tags()["scalars"])
    usual = "approx_kl clip_fraction clip_range clip_range_vf entropy_loss explained_variance learning_rate loss "
    usual += "policy_gradient_loss value_loss"
    assert {f"train/{name}" for name in usual.split()} <= tags
    assert {"rollout/ep_rew_mean", "rollout/ep_len_mean", "time/fps"} <= tags
    ours = "critic/loss_1 critic/loss_2 critic/grad_norm_1 critic/grad_norm_2 critic/grad_ratio critic/divergence "
    ours += "critic/correlation critic/warning kl/exact kl/penalty_coef kl/stopped return_scale/mean return_scale/std "
    ours += "vgs/grad_norm_ema vgs/grad_mean_ema vgs/grad_var_ema vgs/grad_max_ema vgs/normalized_variance "
    ours += "vgs/scaling_factor vgs/scaling_factor_p10 vgs/scaling_factor_p50 vgs/scaling_factor_p90 vgs/step_count "
    ours += "vgs/tensor_variance_p10 vgs/tensor_variance_p50 vgs/tensor_variance_p90 vgs/warmup_active train/ent_coef"
    assert set(ours.split()) <= tags
    for core in ("actor", "critic"):
        assert {f"lstm/{core}_hidden_layer0_{kind}" for kind in ("norm", "mean", "std")} <= tags
    # An update is logged with the rollout after it.
    assert [event.step for event in events.Scalars("train/loss")] == [64, 96]
    assert [event.step for event in events.Scalars("rollout/ep_rew_mean")] == [32, 64, 96]
    assert all(np.isfinite(event.value) for tag in tags for event in events.Scalars(tag))


def test_the_csv_logger_writes_a_line_for_every_update(tmp_path):
    model = small(clocks())
    model.set_logger(configure(str(tmp_path), ["csv"]))
    model.learn(96)
    model.logger.close()
    lines = (tmp_path / "progress.csv").read_text().splitlines()
    header = lines[0].split(",")
    assert {"time/total_timesteps", "train/loss", "critic/loss_1", "vgs/step_count"} <= set(header)
    last = dict(zip(header, lines[-1].split(","), strict=True))
    assert (last["time/total_timesteps"], last["train/n_updates"]) == ("96", "4")
    assert float(last["vgs/step_count"]) == 8


# Predictions


@pytest.mark.parametrize("policy", RECURRENT)
def test_evaluate_policy_carries_the_memory_as_a_hand_written_loop_does(policy):
    model = small(cart_poles(), policy)
    with torch.no_grad():
        # Decisive, and moved by what is remembered.
        model.policy.action_head.weight.mul_(1000)
    evaluated, _ = evaluate_policy(model, cart_poles(1, seed=7), n_eval_episodes=3, return_episode_rewards=True)
    rewards = []
    plain = gymnasium.make("CartPole-v1")
    observation, _ = plain.reset(seed=7)
    for _ in range(3):
        state, total, ended = None, 0.0, False
        while not ended:
            action, state = model.predict(observation, state, deterministic=True)
            observation, reward, terminated, truncated, _ = plain.step(action)
            total, ended = total + reward, terminated or truncated
        rewards.append(total)
        observation, _ = plain.reset()
    assert evaluated == rewards


@pytest.mark.parametrize("policy", POLICIES)
def test_one_observation_is_answered_as_a_batch_of_one(policy):
    model = small(cart_poles(), policy)
    observations = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    batch, state = model.predict(observations, deterministic=True)
    assert batch.shape == (3,)
    for i, observation in enumerate(observations):
        action, one = model.predict(observation, deterministic=True)
        assert action.shape == ()
        assert action == batch[i]
        if policy == "MlpPolicy":
            assert one is None
            assert state is None
            continue
        for part, whole in zip(one, state, strict=True):
            assert part.shape == (1, 1, 8)
            np.testing.assert_allclose(part[:, 0], whole[:, i], rtol=1e-5, atol=1e-6)


def test_deterministic_answers_do_not_vary_and_others_do():
    model = small(cart_poles())
    observation = np.zeros((64, 4), np.float32)
    same_answers = model.predict(observation, deterministic=True)[0]
    assert len(set(same_answers.tolist())) == 1
    assert set(model.predict(observation)[0].tolist()) == {0, 1}


@pytest.mark.parametrize("policy", RECURRENT)
@pytest.mark.parametrize("method", ["predict", "predict_quantiles"])
def test_an_episode_start_resets_its_own_row_only(policy, method):
    model = small(cart_poles(), policy)
    answer = getattr(model, method)
    observations = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    _, state = answer(observations[0])
    _, after = answer(observations[1], state, np.array([False, True, False]))
    _, continued = answer(observations[1], state)
    _, fresh = answer(observations[1])
    for part, on, anew in zip(after, continued, fresh, strict=True):
        np.testing.assert_array_equal(part[:, [0, 2]], on[:, [0, 2]])
        np.testing.assert_array_equal(part[:, 1], anew[:, 1])
        assert np.abs(on[:, 1] - anew[:, 1]).max() > 1e-3


def test_states_that_do_not_fit_are_refused():
    model = small(cart_poles())
    observation = np.zeros((2, 4), np.float32)
    _, state = model.predict(observation)
    with pytest.raises(ValueError, match=r"2 arrays of shape \(1, 3, 8\).*\(1, 2, 8\)"):
        model.predict(np.zeros((3, 4), np.float32), state)
    with pytest.raises(ValueError, match="2 arrays"):
        model.predict(observation, state[:1])
    with pytest.raises(ValueError, match="episode_start must be one flag for each of 2 observations"):
        model.predict(observation, state, np.array([True, False, True]))


class TwoLots(gymnasium.Env):
    """Pays 3 where it shows 1, and -1 where it shows -1."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.observe(), {}

    def step(self, action):
        reward = 1.0 + 2 * self.shown
        self.steps += 1
        return self.observe(), reward, self.steps == 8, False, {}

    def observe(self):
        self.shown = self.np_random.choice([-1.0, 1.0])
        return np.array([self.shown], np.float32)


@pytest.mark.parametrize("policy", POLICIES)
def test_quantiles_are_ordered_and_in_units_of_rewards(policy):
    env = DummyVecEnv([TwoLots] * 2)
    model = small(env, policy, gamma=0.0, n_steps=32, batch_size=64, n_epochs=10, learning_rate=1e-2)
    model.learn(64 * 12)
    quantiles, state = model.predict_quantiles(np.array([[1], [-1]], np.float32))
    assert quantiles.shape == (2, 2, 4)
    assert (state is None) == (policy == "MlpPolicy")
    assert (np.diff(quantiles) >= 0).all()
    # Normalised, they would be 1 and -1.
    np.testing.assert_allclose(quantiles.mean(-1), [[3, -1]] * 2, atol=0.4)
    np.testing.assert_allclose(quantiles, [[[3] * 4, [-1] * 4]] * 2, atol=0.8)
    assert model.predict_quantiles(np.array([1], np.float32))[0].shape == (2, 1, 4)


def test_a_categorical_critic_has_quantiles_too():
    env = DummyVecEnv([TwoLots] * 2)
    arguments = {"gamma": 0.0, "n_steps": 32, "batch_size": 64, "n_epochs": 10, "learning_rate": 1e-2}
    networks = {"value_head": "categorical", "num_atoms": 21, "v_min": -3, "v_max": 3, "twin_critics": False}
    model = small(env, "MlpPolicy", policy_kwargs=networks, **arguments).learn(64 * 12)
    quantiles, _ = model.predict_quantiles(np.array([[1], [-1]], np.float32))
    assert quantiles.shape == (1, 2, 21)
    assert (np.diff(quantiles) >= 0).all()
    np.testing.assert_allclose(np.median(quantiles, -1), [[3, -1]], atol=0.7)
