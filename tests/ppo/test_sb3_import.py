"""Agents of Stable-Baselines3 and sb3-contrib go on here: same actions, same values, and no pickle is opened."""

from __future__ import annotations

import base64
import io
import json
import pickle
import re
import warnings
import zipfile

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from sb3_contrib import MaskablePPO, RecurrentPPO
from stable_baselines3 import A2C, DQN, PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.torch_layers import FlattenExtractor
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import VecNormalize
from torch import nn

from driftproof.ppo import DistributionalPPO, Linear, from_sb3, import_sb3
from driftproof.state import CheckpointError
from tests.cli.commands import call

VECTOR = spaces.Box(-1, 1, (3,))
IMAGE = spaces.Box(0, 255, (36, 36, 3), np.uint8)
DICT = spaces.Dict({"a": VECTOR, "b": IMAGE, "c": spaces.Discrete(3)})
CHOICE = spaces.Discrete(3)
ACTIONS = [CHOICE, spaces.Box(-0.5, 2, (2,)), spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(4)]
SMALL = {"lstm_hidden_size": 8}
SHARED = {**SMALL, "shared_lstm": True, "enable_critic_lstm": False, "n_lstm_layers": 2}
NO_CRITIC_LSTM = {**SMALL, "enable_critic_lstm": False}


class World(gymnasium.Env):
    """Shows anything, and pays by chance."""

    def __init__(self, observations=VECTOR, actions=CHOICE):
        self.observation_space, self.action_space = observations, actions
        observations.seed(0)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._steps = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        self._steps += 1
        return self.observation_space.sample(), 10 * self.np_random.random(), self._steps == 7, False, {}


def trained(path, kind=PPO, policy=None, world=None, steps=128, **settings):
    """An agent of Stable-Baselines3 that is no longer at its beginning, and its file."""
    policy = policy or ("MlpLstmPolicy" if kind is RecurrentPPO else "MlpPolicy")
    settings = {"n_steps": 32, "batch_size": 32, "n_epochs": 2, "learning_rate": 1e-2, "seed": 0, **settings}
    model = kind(policy, world or World(), device="cpu", **settings)
    if steps:
        model.learn(steps)
    model.save(path)
    return model


def their_values(model, observations, starts):
    """What their critic says ``[T]``."""
    with torch.no_grad():
        if not isinstance(model, RecurrentPPO):
            return [float(model.policy.predict_values(o)) for o in observations]
        policy = model.policy
        state = tuple(torch.zeros(policy.lstm_hidden_state_shape) for _ in range(2))
        lstm = policy.lstm_actor if policy.lstm_critic is None else policy.lstm_critic
        values = []
        for observation, start in zip(observations, starts, strict=True):
            start = torch.tensor([float(start)])
            values.append(float(policy.predict_values(observation, state, start)))
            features = policy.extract_features(observation)
            features = features if policy.share_features_extractor else features[1]
            state = policy._process_sequence(features, state, start, lstm)[1]
        return values


def check_same(model, agent, steps=25):
    """Actions and values in the same episodes."""
    env, mine, theirs, critic = model.get_env(), None, None, None
    observation, start = env.reset(), np.ones(1, bool)
    observations, starts, values = [], [], []
    for _ in range(steps):
        wanted, theirs = model.predict(observation, theirs, start, deterministic=True)
        given, mine = agent.predict(observation, mine, start, deterministic=True)
        assert given.shape == wanted.shape
        np.testing.assert_allclose(given, wanted, atol=1e-6)
        quantiles, critic = agent.predict_quantiles(observation, critic, start)
        values.append(quantiles.mean(-1)[:, 0])
        observations.append(model.policy.obs_to_tensor(observation)[0])
        starts.append(start[0])
        observation, _, start, _ = env.step(wanted)
    wanted = np.array(their_values(model, observations, starts))
    for given in np.array(values).T:
        np.testing.assert_allclose(given, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("actions", ACTIONS, ids=lambda space: type(space).__name__)
@pytest.mark.parametrize(
    ("kind", "kwargs"),
    [
        (PPO, {}),
        (PPO, {"activation_fn": nn.ReLU, "net_arch": {"pi": [8], "vf": []}}),
        (RecurrentPPO, SMALL),
        (RecurrentPPO, SHARED),
        (RecurrentPPO, NO_CRITIC_LSTM),
        (RecurrentPPO, {**NO_CRITIC_LSTM, "net_arch": []}),
    ],
    ids=["ppo", "relu", "lstm", "shared", "memoryless critic", "heads only"],
)
def test_actions_and_values_are_the_same(tmp_path, kind, kwargs, actions):
    # Training RecurrentPPO with MultiBinary actions is an error of sb3-contrib.
    steps = 0 if kind is RecurrentPPO and isinstance(actions, spaces.MultiBinary) else 128
    model = trained(tmp_path / "sb3", kind, world=World(VECTOR, actions), policy_kwargs=kwargs, steps=steps)
    agent = from_sb3(tmp_path / "sb3.zip", World(VECTOR, actions), device="cpu")
    check_same(model, agent)
    agent.save(tmp_path / "agent")
    check_same(model, DistributionalPPO.load(tmp_path / "agent", device="cpu"))
    agent.learn(64)


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize(("kind", "form"), [(PPO, "{}Policy"), (RecurrentPPO, "{}LstmPolicy")])
@pytest.mark.parametrize(("world", "name"), [(IMAGE, "Cnn"), (DICT, "MultiInput")])
def test_features_extractors(tmp_path, kind, form, world, name, shares):
    # One policy for any width of features that is not the default.
    width = {"features_dim": 32} if name == "Cnn" else {"cnn_output_dim": 16}
    kwargs = {"share_features_extractor": shares, "features_extractor_kwargs": width, "normalize_images": True}
    kwargs |= SMALL if kind is RecurrentPPO else {}
    model = trained(tmp_path / "sb3", kind, form.format(name), World(world), policy_kwargs=kwargs, steps=32)
    agent = from_sb3(tmp_path / "sb3.zip", World(world), device="cpu")
    check_same(model, agent, steps=10)
    assert type(agent.policy).__name__ == form.format(name)
    assert (agent.policy.critic_features_extractor is None) is shares


def test_networks_have_no_layer_normalisation_with_the_drift_kit_either(tmp_path):
    model = trained(tmp_path / "sb3", RecurrentPPO, policy_kwargs=SMALL)
    agent = from_sb3(tmp_path / "sb3.zip", World(), device="cpu")
    assert (agent.drift_kit, agent.layer_norm, agent.exploration_floor) == (False, False, 0.0)
    agent = from_sb3(tmp_path / "sb3.zip", World(), device="cpu", drift_kit=True)
    assert (agent.layer_norm, agent.exploration_floor, agent.drift_alarm) == (False, 0.003, True)
    check_same(model, agent)


def test_action_distributions_are_the_same(tmp_path):
    for actions in ACTIONS:
        model = trained(tmp_path / "sb3", world=World(VECTOR, actions))
        agent = from_sb3(tmp_path / "sb3.zip", World(VECTOR, actions), device="cpu")
        observations = torch.randn(50, 3)
        with torch.no_grad():
            _, _, log_probs = model.policy(observations)
            theirs = model.policy.get_distribution(observations)
            chosen = theirs.get_actions()
            parameters, *_ = agent.policy.stepper()(observations, agent.policy.initial_state(50))
            own = agent.policy.distribution
            log_probs = own.log_prob(parameters, chosen.to(own.action_dtype))
            torch.testing.assert_close(log_probs, theirs.log_prob(chosen), rtol=0, atol=2e-6)
            torch.testing.assert_close(own.entropy(parameters), theirs.entropy(), rtol=0, atol=2e-6)


@pytest.mark.parametrize(("kind", "kwargs"), [(PPO, {}), (RecurrentPPO, SMALL)])
@pytest.mark.parametrize("sde", [{}, {"full_std": False, "use_expln": True}, {"squash_output": True}])
def test_state_dependent_exploration(tmp_path, kind, kwargs, sde):
    world = World(VECTOR, ACTIONS[1])
    settings = {"use_sde": True, "sde_sample_freq": 4, "policy_kwargs": {**kwargs, **sde}}
    model = trained(tmp_path / "sb3", kind, world=world, **settings, learning_rate=1e-3)
    agent = from_sb3(tmp_path / "sb3.zip", world, device="cpu")
    check_same(model, agent)
    assert agent.sde_sample_freq == 4
    agent.save(tmp_path / "agent")
    check_same(model, DistributionalPPO.load(tmp_path / "agent", device="cpu"))
    if kind is PPO:
        observations = torch.randn(50, 3)
        with torch.no_grad():
            deviation = model.policy.get_distribution(observations).distribution.scale
            parameters, *_ = agent.policy.stepper()(observations, agent.policy.initial_state(50))
        torch.testing.assert_close(parameters[:, 2:].exp(), deviation, rtol=1e-6, atol=1e-6)
    agent.learn(64)


def test_the_first_update_keeps_values_and_parts_the_critics(tmp_path, monkeypatch):
    """The return scale comes with the first rollout; heads are rescaled to it, and no value changes by that."""
    from driftproof.learner.learner import Learner

    model = trained(tmp_path / "sb3", RecurrentPPO, policy_kwargs=SMALL, clip_range=0.1)
    agent = from_sb3(
        tmp_path / "sb3.zip", World(), device="cpu", optimizer_class="adam", clip_range_vf=0.1, vf_coef=1.0
    )
    original, seen = Learner._optimize, []

    def watched(*arguments):
        rollout = arguments[1]
        assert agent.return_scale.snapshot.std != 1
        check_same(model, agent)
        # What was predicted during the rollout is in the new scale too: value clipping compares it.
        again = agent.policy.evaluate_critics(rollout.observations[:1], agent.policy.initial_state(1))
        torch.testing.assert_close(rollout.predictions[0][:1], again[0], rtol=1e-4, atol=1e-4)
        seen.append(True)
        return original(*arguments)

    monkeypatch.setattr(Learner, "_optimize", watched)
    agent.learn(32)
    assert seen == [True]
    monkeypatch.setattr(Learner, "_optimize", original)
    agent.learn(320)
    observation = np.random.default_rng(0).uniform(-1, 1, (100, 3)).astype(np.float32)
    one, other = agent.predict_quantiles(observation)[0]
    # Adam adds no noise that could part the critics.
    assert np.abs(one.mean(-1) - other.mean(-1)).max() > 0.01
    first, second = (critic.network[0].weight for critic in agent.policy.critics)
    assert (first - second).abs().max() > 1e-3
    assert (one[:, -1] - one[:, 0]).min() > 5  # Rewards are random, up to 10, and quantiles have spread.


def test_return_scale_waits_for_the_first_rollout_in_files_too(tmp_path):
    model = trained(tmp_path / "sb3")
    from_sb3(tmp_path / "sb3.zip", World(), device="cpu").save(tmp_path / "agent")
    agent = DistributionalPPO.load(tmp_path / "agent", World(), device="cpu")
    assert agent.return_scale.initialised
    assert not agent.return_scale.has_statistics
    taker = DistributionalPPO("MlpPolicy", World(), device="cpu", n_steps=32, batch_size=32, drift_kit=False)
    taker.set_parameters(agent.get_parameters())
    check_same(model, taker)
    assert not taker.return_scale.has_statistics


def test_rewards_that_were_normalised(tmp_path):
    env = VecNormalize(make_vec_env(World, 1), gamma=0.9)
    model = trained(tmp_path / "sb3", world=env)
    scale = float(np.sqrt(env.ret_rms.var + env.epsilon))
    env.norm_reward = False
    agent = from_sb3(tmp_path / "sb3.zip", env, reward_scale=scale, device="cpu")
    observation = env.reset()
    (value,) = their_values(model, [model.policy.obs_to_tensor(observation)[0]], [True])
    np.testing.assert_allclose(agent.predict_quantiles(observation)[0].mean(), value * scale, rtol=1e-4)
    assert agent.normalizer.is_used


class TestSettings:
    def test_are_those_of_the_file(self, tmp_path):
        settings = {"gamma": 0.9, "gae_lambda": 0.8, "ent_coef": 0.01, "vf_coef": 0.7, "max_grad_norm": 0.4}
        settings |= {"target_kl": 0.05, "clip_range": 0.15, "learning_rate": 7e-4, "seed": 5, "n_epochs": 3}
        trained(tmp_path / "sb3", **settings, normalize_advantage=False, stats_window_size=50)
        agent = from_sb3(tmp_path / "sb3.zip", World(), device="cpu")
        assert {name: getattr(agent, name) for name in settings} == settings
        assert (agent.n_steps, agent.batch_size, agent.normalize_advantage) == (32, 32, False)
        assert agent._stats_window_size == 50
        assert agent.num_timesteps == 128

    def test_may_be_given(self, tmp_path):
        trained(tmp_path / "sb3", RecurrentPPO, policy_kwargs=SMALL)
        agent = from_sb3(
            tmp_path / "sb3.zip",
            World(),
            device="cpu",
            learning_rate=1e-5,
            policy_kwargs={"num_quantiles": 8, "twin_critics": False},
        )
        assert agent.learning_rate == 1e-5
        assert agent.predict_quantiles(np.zeros((1, 3), np.float32))[0].shape == (1, 1, 8)
        with pytest.raises(ValueError, match="quantile"):
            from_sb3(tmp_path / "sb3.zip", World(), policy_kwargs={"value_head": "categorical"})

    @pytest.mark.parametrize(
        ("schedule", "expected"),
        [
            (LinearSchedule(1e-3, 0, 1), Linear(1e-3)),
            (LinearSchedule(1e-3, 1e-4, 0.5), None),
            (lambda remaining: 1e-3 + 0 * remaining, 1e-3),
        ],
        ids=["linear", "linear, then constant", "function"],
    )
    def test_schedules(self, tmp_path, schedule, expected):
        trained(tmp_path / "sb3", learning_rate=schedule)
        agent, report = import_sb3(tmp_path / "sb3.zip", World(), device="cpu")
        found = agent.settings()["learning_rate"]
        if expected is None:
            assert [found(x) for x in (1, 0.75, 0)] == [schedule(x) for x in (1, 0.75, 0)]
        else:
            assert found == expected
        assert any("learning_rate" in line for line in report) is (expected == 1e-3)

    def test_of_minibatches_that_do_not_divide_evenly(self, tmp_path):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            trained(tmp_path / "sb3", RecurrentPPO, n_steps=31, batch_size=16, policy_kwargs=SMALL, steps=31)
            agent = from_sb3(tmp_path / "sb3.zip", make_vec_env(World, 2), device="cpu")
            assert (agent.n_steps, agent.batch_size) == (31, 16)
            agent.learn(62)

    def test_of_value_clipping_are_not_taken(self, tmp_path):
        trained(tmp_path / "sb3", clip_range_vf=0.2)
        agent, report = import_sb3(tmp_path / "sb3.zip", World(), device="cpu")
        assert agent.clip_range_vf is None
        assert any(line.startswith("clip_range_vf: not loaded") for line in report)

    def test_that_make_no_sense_are_left_out(self, tmp_path):
        trained(tmp_path / "sb3")
        wrong = {"gamma": 7, "n_steps": 10**18, "seed": -1, "ent_coef": "x", "num_timesteps": 1e400, "n_epochs": True}
        forge_data(tmp_path / "sb3.zip", lambda data: data | wrong)
        agent, report = import_sb3(tmp_path / "sb3.zip", World(), device="cpu")
        assert (agent.gamma, agent.n_steps, agent.seed, agent.num_timesteps) == (0.99, 2048, None, 0)
        for name in ("gamma", "n_steps", "seed", "ent_coef", "n_epochs"):
            assert any(line.startswith(f"{name}: the file's value is invalid") for line in report)

    @pytest.mark.parametrize(
        "large", [1e300, 2**70, {"value_schedule": "LinearSchedule(start=1e300, end=0.0, end_fraction=1.0)"}]
    )
    def test_that_are_beyond_all_bounds_are_left_out(self, tmp_path, large):
        trained(tmp_path / "sb3")
        names = ("learning_rate", "clip_range", "ent_coef", "vf_coef", "max_grad_norm", "target_kl")
        forge_data(tmp_path / "sb3.zip", lambda data: data | dict.fromkeys((*names, "lr_schedule"), large))
        _, report = import_sb3(tmp_path / "sb3.zip", World(), device="cpu")
        for name in names:
            assert any(line.startswith(f"{name}: ") for line in report)

    def test_a_file_without_any(self, tmp_path):
        model = trained(tmp_path / "sb3")
        forge(tmp_path / "sb3.zip", lambda members: {n: c for n, c in members.items() if n != "data"})
        check_same(model, from_sb3(tmp_path / "sb3.zip", World(), device="cpu"))


class TestOptimizer:
    @pytest.mark.parametrize("name", ["adam", "adamw", "upgdw", "adaptive_upgd"])
    def test_moments_of_adam(self, tmp_path, name):
        model = trained(tmp_path / "sb3", RecurrentPPO, world=World(VECTOR, ACTIONS[1]), policy_kwargs=SMALL)
        agent, report = import_sb3(
            tmp_path / "sb3.zip", World(VECTOR, ACTIONS[1]), device="cpu", optimizer_class=name, adam_moments=True
        )
        assert "policy.optimizer: moments of Adam loaded for 15 of 27 parameters; others begin anew" in report
        first, second = ("first_moment", "sec_moment") if name == "adaptive_upgd" else ("exp_avg", "exp_avg_sq")
        own, theirs = agent.policy.optimizer.state, model.policy.optimizer.state
        pairs = [
            (agent.policy.log_std, model.policy.log_std),
            (agent.policy.action_head.weight, model.policy.action_net.weight),
            (agent.policy.critic_core.recurrence.weight_hh_l0, model.policy.lstm_critic.weight_hh_l0),
        ]
        for mine, other in pairs:
            torch.testing.assert_close(own[mine][first], theirs[other]["exp_avg"])
            torch.testing.assert_close(own[mine][second], theirs[other]["exp_avg_sq"])
            assert own[mine]["step"] == theirs[other]["step"]
        assert not own.get(agent.policy.critics[0].head.linear.weight)
        agent.learn(64)

    def test_begins_anew(self, tmp_path):
        trained(tmp_path / "sb3")
        agent, report = import_sb3(tmp_path / "sb3.zip", World(), device="cpu")
        assert not agent.policy.optimizer.state
        assert "policy.optimizer: begins anew" in report
        report = import_sb3(tmp_path / "sb3.zip", World(), optimizer_class="sgd", adam_moments=True).report
        assert "policy.optimizer: begins anew, since SGD has no moments of Adam" in report

    def test_of_another_kind(self, tmp_path):
        """A2C has the networks of PPO, and another optimizer."""
        model = A2C("MlpPolicy", World(), device="cpu", seed=0).learn(20)
        model.save(tmp_path / "a2c")
        agent, report = import_sb3(tmp_path / "a2c.zip", World(), device="cpu", adam_moments=True)
        check_same(model, agent)
        assert any("loaded for 0 of" in line for line in report)


class Mine(FlattenExtractor):
    def __init__(self, space):
        super().__init__(space)
        self.scale = nn.Parameter(torch.full((3,), 0.5))

    def forward(self, observations):
        return super().forward(observations) * self.scale


class TestRefused:
    def refused(self, path, match, world=None, **settings):
        with pytest.raises(CheckpointError, match=match) as error:
            from_sb3(path, world or World(), device="cpu", **settings)
        assert len(str(error.value)) < 800

    def test_other_environments(self, tmp_path):
        trained(tmp_path / "sb3")
        self.refused(
            tmp_path / "sb3.zip", r"action_head.*\(3,\) in the file and \(2,\) here", gymnasium.make("CartPole-v1")
        )
        self.refused(tmp_path / "sb3.zip", "does not fit", World(IMAGE))
        self.refused(tmp_path / "sb3.zip", "does not fit", World(VECTOR, ACTIONS[1]))

    def test_other_algorithms(self, tmp_path):
        DQN("MlpPolicy", World(), device="cpu", buffer_size=10).save(tmp_path / "dqn")
        self.refused(tmp_path / "dqn.zip", "it is not from PPO or RecurrentPPO")

        class Masked(World):
            def action_masks(self):
                return [True, True, False]

        MaskablePPO("MlpPolicy", Masked(), device="cpu").save(tmp_path / "masked")
        self.refused(tmp_path / "masked.zip", "do not mask actions")

    def test_classes_that_only_the_caller_has(self, tmp_path):
        kwargs = {"features_extractor_class": Mine, "activation_fn": nn.ReLU}
        model = trained(tmp_path / "sb3", policy_kwargs=kwargs)
        self.refused(tmp_path / "sb3.zip", "its features_extractor_class is not one of")
        agent = from_sb3(tmp_path / "sb3.zip", World(), device="cpu", policy_kwargs={"features_extractor_class": Mine})
        check_same(model, agent)

    def test_lstms_of_other_kinds(self, tmp_path):
        kwargs = {**SMALL, "n_lstm_layers": 2, "lstm_kwargs": {"bias": False, "dropout": 0.1}}
        model = trained(tmp_path / "sb3", RecurrentPPO, policy_kwargs=kwargs, steps=0)
        model.policy.set_training_mode(False)
        check_same(model, from_sb3(tmp_path / "sb3.zip", World(), device="cpu"))
        kwargs = {**SMALL, "lstm_kwargs": {"proj_size": 4}}
        forge_data(tmp_path / "sb3.zip", lambda data: data | {"policy_kwargs": kwargs})
        self.refused(tmp_path / "sb3.zip", "lstm_kwargs has 'proj_size'")

    def test_files_of_other_kinds(self, tmp_path):
        torch.save({"weight": torch.zeros(2)}, tmp_path / "x.pt")
        self.refused(tmp_path / "x.pt", "is not a zip file of Stable-Baselines3")
        with pytest.raises(FileNotFoundError):
            from_sb3(tmp_path / "nothing.zip", World())


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path):
        self._path = str(path)

    def __reduce__(self):
        return open, (self._path, "w")


def members_of(path):
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def forge(path, change):
    members = change(members_of(path))
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def forge_data(path, change):
    forge(path, lambda members: members | {"data": json.dumps(change(json.loads(members["data"]))).encode()})


def forge_policy(path, change):
    def changed(members):
        state = torch.load(io.BytesIO(members["policy.pth"]), weights_only=True)
        file = io.BytesIO()
        torch.save(change(dict(state)), file)
        return members | {"policy.pth": file.getvalue()}

    forge(path, changed)


class TestHostile:
    @pytest.fixture
    def path(self, tmp_path):
        trained(tmp_path / "sb3", RecurrentPPO, policy_kwargs=SMALL, steps=32)
        return tmp_path / "sb3.zip"

    def refused(self, path):
        with pytest.raises(CheckpointError) as error:
            from_sb3(path, World(), device="cpu")
        assert len(str(error.value)) < 800
        with pytest.raises(CheckpointError):
            DistributionalPPO.load(path)

    def test_pickles_among_the_settings_stay_closed(self, path, tmp_path):
        text = base64.b64encode(pickle.dumps(Bomb(tmp_path / "ran"))).decode()
        pickled = {":type:": "<class 'function'>", ":serialized:": text}
        names = [*json.loads(members_of(path)["data"]), "policy_kwargs", "learning_rate", "use_sde"]
        forge_data(path, lambda data: data | dict.fromkeys((n for n in names if n != "use_sde"), pickled))
        agent = from_sb3(path, World(), device="cpu")
        assert agent.learning_rate == 1e-2  # of the optimizer
        assert not (tmp_path / "ran").exists()

    @pytest.mark.parametrize("member", ["policy.pth", "policy.optimizer.pth"])
    def test_pickles_instead_of_tensors(self, path, tmp_path, member):
        for content in (pickle.dumps(Bomb(tmp_path / "ran")), torch_bomb(tmp_path / "ran")):
            forge(path, lambda members, content=content: members | {member: content})
            self.refused(path)
        assert not (tmp_path / "ran").exists()

    def test_descriptions_name_no_modules(self, path, tmp_path, monkeypatch):
        (tmp_path / "surprise.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
        monkeypatch.syspath_prepend(tmp_path)
        for named in ("<class 'surprise.Tanh'>", "surprise:Tanh", ["surprise"], {"surprise": 1}):
            forge_data(path, lambda data, named=named: data | {"policy_kwargs": {"activation_fn": named}})
            self.refused(path)
        assert not (tmp_path / "ran").exists()

    @pytest.mark.parametrize(
        "data",
        [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"a": ' * 100_000, b'{"gamma": ' + b"9" * 5000 + b"}"],
        ids=["empty", "list", "cut off", "no text", "deep lists", "deep dicts", "long number"],
    )
    def test_settings_that_are_none(self, path, data):
        forge(path, lambda members: members | {"data": data})
        self.refused(path)

    @pytest.mark.parametrize(
        "change",
        {
            "nothing": lambda s: {},
            "huge": lambda s: s | {"action_net.weight": torch.zeros(1).expand(10**6, 10**6)},
            "huge LSTM": lambda s: s | {"lstm_actor.weight_hh_l0": torch.zeros(1).expand(4 * 10**6, 10**6)},
            "transposed": lambda s: s | {"action_net.weight": s["action_net.weight"].t().contiguous()},
            "integers": lambda s: s | {"action_net.bias": s["action_net.bias"].long()},
            "NaN": lambda s: s | {"action_net.bias": s["action_net.bias"] * float("nan")},
            "no tensor": lambda s: s | {"action_net.bias": 3},
            "a number for a name": lambda s: s | {3: torch.zeros(1)},
            "missing": lambda s: {key: value for key, value in s.items() if key != "lstm_critic.bias_ih_l0"},
            "too many": lambda s: s | {"extra.weight": torch.zeros(1)},
            "escape": lambda s: s | {"\x1b]0;title\x07": torch.zeros(1)},
            "many layers": lambda s: s | {f"lstm_actor.weight_hh_l{i}": torch.zeros(1) for i in range(500)},
            "wide": lambda s: s | {"mlp_extractor.policy_net.0.weight": torch.zeros(10**5, 1)},
            "scalars": lambda s: {key: torch.zeros(()) for key in s},
            "empty": lambda s: {key: torch.zeros(0) for key in s},
            "two values": lambda s: s | {"value_net.bias": torch.zeros(2), "value_net.weight": torch.zeros(2, 64)},
            "critic twice": lambda s: s | {"critic.weight": torch.zeros(3, 3)},
            "features": lambda s: s | {"pi_features_extractor.x": torch.zeros(1)},
        }.items(),
        ids=lambda item: item[0],
    )
    def test_wrong_tensors(self, path, change):
        forge_policy(path, change[1])
        with pytest.raises(CheckpointError) as error:
            from_sb3(path, World(), device="cpu")
        assert len(str(error.value)) < 800
        assert str(error.value).isprintable()

    def test_optimizers_that_are_none(self, path):
        for state in ({}, {"state": 3}, {"state": {0: 3}, "param_groups": [3]}, {"state": {0: {"step": "x"}}}, [1], 3):
            file = io.BytesIO()
            torch.save(state, file)
            forge(path, lambda members, file=file: members | {"policy.optimizer.pth": file.getvalue()})
            agent = from_sb3(path, World(), device="cpu", adam_moments=True, optimizer_class="adam")
            assert not agent.policy.optimizer.state


def torch_bomb(path):
    file = io.BytesIO()
    torch.save(Bomb(path), file)
    return file.getvalue()


def test_load_says_what_to_do_instead(tmp_path):
    trained(tmp_path / "sb3")
    path = str(tmp_path / "sb3.zip")
    with pytest.raises(CheckpointError) as error:
        DistributionalPPO.load(path)
    assert f"driftproof convert {path} NEW.zip --env ID" in str(error.value)
    call_given = re.search(r"driftproof\.ppo\.from_sb3\((.*), env\)", str(error.value))
    assert call_given[1] == repr(path)


class TestConvert:
    def test_makes_an_agent(self, tmp_path, capsys):
        model = trained(
            tmp_path / "sb3", RecurrentPPO, world=gymnasium.make("CartPole-v1"), policy_kwargs=SMALL, n_steps=64
        )
        target = tmp_path / "agent.zip"
        code, output, errors = call(capsys, "convert", tmp_path / "sb3.zip", target, "--env", "CartPole-v1")
        assert code == 0, errors
        assert "MlpLstmPolicy, all 20 tensors loaded" in output
        agent = DistributionalPPO.load(target, "CartPole-v1", device="cpu")
        assert (agent.n_steps, agent.learning_rate) == (64, 1e-2)
        check_same(model, agent)
        code, output, _ = call(capsys, "evaluate", target, "--env", "CartPole-v1", "--episodes", 2)
        assert code == 0
        assert "2 episodes of CartPole-v1" in output

    def test_settings_that_are_given_go_before_those_in_the_file(self, tmp_path, capsys):
        trained(tmp_path / "sb3", world=gymnasium.make("CartPole-v1"))
        (tmp_path / "c.yaml").write_text("env: {id: CartPole-v1, n_envs: 2}\nppo: {learning_rate: 3.0e-4}\n")
        options = ["--config", tmp_path / "c.yaml", "--set", "optimizer.name=adam", "--set", "vgs.enabled=false"]
        options += ["--set", "critic.num_quantiles=8"]
        code, _, errors = call(capsys, "convert", tmp_path / "sb3.zip", tmp_path / "agent.zip", *options)
        assert code == 0, errors
        agent = DistributionalPPO.load(tmp_path / "agent.zip", device="cpu")
        assert (agent.learning_rate, agent.n_steps, agent.n_envs, agent.vgs) == (3e-4, 32, 2, None)
        assert type(agent.policy.optimizer) is torch.optim.Adam
        assert agent.policy.heads[0].outputs == 8

    def test_writes_nothing_if_it_fails(self, tmp_path, capsys):
        trained(tmp_path / "sb3")
        code, _, errors = call(capsys, "convert", tmp_path / "sb3.zip", tmp_path / "x.zip", "--env", "CartPole-v1")
        assert code == 1
        assert "does not fit observations" in errors
        assert len(errors.splitlines()) == 1
        assert not (tmp_path / "x.zip").exists()
