"""Saving, loading, copying: everything that makes an agent goes the same way, and nothing in a file is run."""

from __future__ import annotations

import copy
import io
import json
import pickle
import random
import zipfile

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback, CheckpointCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.torch_layers import FlattenExtractor
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack, VecNormalize, unwrap_vec_normalize

from driftproof.ppo import Cosine, DistributionalPPO, Linear, SaveCheckpoints
from driftproof.ppo.manifest import decode, encode
from driftproof.state import CheckpointError, compare, flatten, inspect, read, unflatten, without, write

from .resuming import walk
from .scripted import small_networks

UPDATE = 32


def cart_poles(number=2, normalize=False):
    env = make_vec_env("CartPole-v1", number, seed=0)
    return VecNormalize(env, norm_reward=False) if normalize else env


def small(env=None, policy="MlpLstmPolicy", kind=DistributionalPPO, **kwargs):
    networks = small_networks(policy, kwargs.pop("policy_kwargs", {}))
    kwargs = {"n_steps": 16, "batch_size": 16, "n_epochs": 2, "seed": 0, "device": "cpu", **kwargs}
    return kind(policy, cart_poles() if env is None else env, policy_kwargs=networks, **kwargs)


def learned(agent):
    """What training has made of an agent, but for an option that torch adds to optimizers when it loads them."""
    tree = without(agent.state_tree(), ["random", "rollout"])
    for group in tree["optimizer"]["param_groups"]:
        group.pop("differentiable", None)
    return tree


def assert_same(one, other):
    differences = compare(learned(one), learned(other))
    assert not differences, "\n".join(map(str, differences[:5]))


class Toy:
    """A component that counts, in a tensor and in a plain value."""

    def __init__(self):
        self.tensor, self.value = torch.zeros(3), 0

    def state_dict(self):
        return {"tensor": self.tensor, 7: {"value": self.value}}

    def load_state_dict(self, state):
        self.tensor, self.value = state["tensor"], state[7]["value"]


class WithToy(DistributionalPPO):
    def _setup_model(self):
        if "policy" not in self.__dict__:
            super()._setup_model()
            self.toy = Toy()
            self.register("toy", self.toy)


def routes(tmp_path):
    def through_file(agent):
        agent.save(tmp_path / "agent")
        return type(agent).load(tmp_path / "agent", device="cpu")

    def through_memory(agent):
        agent.save(file := io.BytesIO())
        file.seek(0)
        return type(agent).load(file, device="cpu")

    def through_parameters(agent):
        other = small(kind=type(agent))
        other.set_parameters(agent.get_parameters())
        other.counters.load_state_dict(agent.counters.state_dict())
        return other

    def through_a_file_of_parameters(agent):
        agent.save(tmp_path / "agent.zip")
        other = small(kind=type(agent))
        other.set_parameters(tmp_path / "agent.zip")
        other.counters.load_state_dict(agent.counters.state_dict())
        return other

    def through_the_tree(agent):
        other = small(kind=type(agent))
        other.load_state_tree(agent.state_tree())
        return other

    return {
        "file": through_file,
        "memory": through_memory,
        "parameters": through_parameters,
        "file of parameters": through_a_file_of_parameters,
        "tree": through_the_tree,
        "pickle": lambda agent: pickle.loads(pickle.dumps(agent)),
        "deepcopy": copy.deepcopy,
    }


ROUTES = ["file", "memory", "parameters", "file of parameters", "tree", "pickle", "deepcopy"]


class TestEveryRoute:
    @pytest.mark.parametrize("route", ROUTES)
    def test_carries_everything_with_a_component_that_was_only_registered(self, route, tmp_path):
        agent = small(kind=WithToy, kl_penalty=True, target_kl=0.01).learn(2 * UPDATE)
        agent.toy.tensor += 5
        agent.toy.value = 9
        if route in ("parameters", "file of parameters", "tree"):
            agent = small(kind=WithToy).learn(2 * UPDATE)
            agent.toy.tensor, agent.toy.value = torch.full((3,), 5.0), 9
        other = routes(tmp_path)[route](agent)
        assert type(other) is WithToy
        assert other.toy is not agent.toy
        assert (other.toy.tensor.tolist(), other.toy.value) == ([5.0] * 3, 9)
        assert_same(other, agent)

    @pytest.mark.parametrize("route", ROUTES)
    def test_shares_no_memory(self, route, tmp_path):
        agent = small().learn(UPDATE)
        other = routes(tmp_path)[route](agent)
        before = learned(other)
        agent.learn(UPDATE, reset_num_timesteps=False)
        assert not compare(learned(other), before)
        assert compare(learned(agent), before)

    def test_is_named(self):
        agent = small(kl_penalty=True, target_kl=0.01, kind=WithToy)
        names = ["policy", "optimizer", "vgs", "kl_penalty", "return_scale", "entropy"]
        names += ["drift_alarm", "observations", "drift_response", "normalizer", "hyperparams"]
        assert list(agent.state_tree()) == [*names, "counters", "toy", "rollout", "random"]
        assert set(agent.get_parameters()) == {
            *("policy", "policy.optimizer", "vgs_state", "kl_penalty_state", "return_scale_state", "entropy_state"),
            *("drift_alarm_state", "observations_state", "drift_response_state"),
            *("normalizer_state", "hyperparams", "toy_state"),
        }

    def test_components_are_checked(self):
        agent = small()
        with pytest.raises(ValueError, match="'policy' already"):
            agent.register("policy", Toy())
        with pytest.raises(TypeError, match=r"'mine' needs state_dict\(\)"):
            agent.register("mine", object())

    def test_what_is_unset_or_unknown_is_named(self, tmp_path):
        small(kind=WithToy).save(tmp_path / "toy.zip")
        small().save(tmp_path / "plain.zip", exclude=["vgs"])
        with pytest.warns(UserWarning, match=r"the states lack \['vgs'\]"):
            DistributionalPPO.load(tmp_path / "plain.zip", device="cpu")
        with pytest.raises(ValueError, match=r"have unknown \['toy_state'\]"):
            small().set_parameters(tmp_path / "toy.zip")
        with pytest.warns(UserWarning, match=r"have unknown \['toy_state'\]"):
            small().set_parameters(tmp_path / "toy.zip", exact_match=False)

    def test_some_components_can_be_saved_alone(self, tmp_path):
        agent = small().learn(UPDATE)
        agent.save(tmp_path / "part.zip", include=["policy", "hyperparams"])
        assert set(read(tmp_path / "part.zip").tree) == {"policy", "hyperparams"}
        with pytest.raises(KeyError, match="polcy"):
            agent.save(tmp_path / "part.zip", include=["polcy"])

    def test_random_numbers_of_the_process_stay_its_own(self, tmp_path):
        agent = small().learn(UPDATE)
        agent.save(tmp_path / "agent.zip")
        pickled = pickle.dumps(agent)

        def drawn():
            return random.random(), np.random.random(), torch.rand(1).item()

        def seed():
            random.seed(1), np.random.seed(1), torch.manual_seed(1)

        seed()
        expected = drawn()
        for copied in (
            lambda: copy.deepcopy(agent),
            lambda: pickle.loads(pickled),
            lambda: DistributionalPPO.load(tmp_path / "agent.zip", device="cpu"),
            lambda: agent.save(tmp_path / "again.zip"),
        ):
            seed()
            copied()
            assert drawn() == expected


OPTIMIZERS = ["adaptive_upgd", "upgd", "upgdw", "adamw", "adam", "sgd"]
SCALERS = [
    {"statistic": "elementwise", "apply_to": "gradient"},
    {"statistic": "spatial_mean", "apply_to": "gradient"},
    {"statistic": "elementwise", "apply_to": "update"},
]


@pytest.mark.filterwarnings("ignore:variance gradient scaling shrinks:UserWarning")
@pytest.mark.parametrize("scaler", SCALERS, ids=lambda s: "-".join(s.values()))
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_next_update_after_loading_is_the_one_that_would_have_been(optimizer, scaler, tmp_path):
    arguments = {"optimizer_class": optimizer, "vgs_kwargs": {"warmup_steps": 3, **scaler}}
    if optimizer == "sgd":
        arguments["optimizer_kwargs"] = {"momentum": 0.9}
    agent = small(DummyVecEnv([walk] * 2), "MlpPolicy", **arguments).learn(2 * UPDATE)
    agent.save(tmp_path / "agent.zip")
    agent.learn(UPDATE, reset_num_timesteps=False)
    loaded = DistributionalPPO.load(tmp_path / "agent.zip", DummyVecEnv([walk] * 2), device="cpu")
    loaded.learn(UPDATE, reset_num_timesteps=False)
    assert_same(loaded, agent)
    assert loaded.num_timesteps == 3 * UPDATE


class TestExactness:
    def test_is_claimed_between_updates_where_environments_can_go_on(self, tmp_path):
        agent = small(DummyVecEnv([walk] * 2))
        agent.save(tmp_path / "new.zip")
        agent.learn(UPDATE)
        agent.save(tmp_path / "between.zip")
        assert read(tmp_path / "new.zip").exact
        assert read(tmp_path / "between.zip").exact

    def test_is_not_claimed_where_they_cannot(self, tmp_path):
        small().learn(UPDATE).save(tmp_path / "agent.zip")
        assert not read(tmp_path / "agent.zip").exact

    def test_is_not_claimed_within_a_rollout(self, tmp_path):
        agent = small(DummyVecEnv([walk] * 2))
        agent.learn(UPDATE, CheckpointCallback(4, str(tmp_path), "within"))
        files = sorted(tmp_path.glob("within_*.zip"))
        assert len(files) == 4
        assert not any(read(file).exact for file in files)
        loaded = DistributionalPPO.load(files[0], DummyVecEnv([walk] * 2), device="cpu")
        loaded.learn(UPDATE, reset_num_timesteps=False)

    def test_our_callback_saves_between_updates(self, tmp_path):
        saving = SaveCheckpoints(tmp_path, every=2, keep_last=2, restart_environments=True)
        small().learn(7 * UPDATE, saving)
        names = [path.name for path in saving.store.list()]
        # Every second update, and the end.
        assert names[-2:] == [f"checkpoint_{6 * UPDATE:012d}.zip", f"checkpoint_{7 * UPDATE:012d}.zip"]
        assert read(tmp_path / names[-2]).exact
        assert not read(tmp_path / names[-1]).exact
        assert saving.store.best() is not None
        assert saving.store.best_score() > 5

    def test_environments_that_begin_otherwise_are_told_of(self, tmp_path):
        class Unseeded(gymnasium.ObservationWrapper):
            def observation(self, observation):
                return observation + np.random.default_rng().normal(size=4).astype(np.float32)

        def env():
            return make_vec_env("CartPole-v1", 2, wrapper_class=Unseeded)

        saving = SaveCheckpoints(tmp_path, restart_environments=True, background=False)
        small(env()).learn(UPDATE, saving)
        with pytest.warns(UserWarning, match="returned other observations"):
            DistributionalPPO.load(saving.store.latest(), env(), device="cpu")

    def test_what_is_done_cannot_be_resumed(self):
        agent = small().learn(UPDATE)
        with pytest.raises(ValueError, match="32 of 32 planned steps are done"):
            agent.resume()

    def test_a_plan_is_resumed_to_its_end(self, tmp_path):
        agent = small(learning_rate=Linear(1e-3))
        agent.learn(4 * UPDATE, lambda *_: agent.num_timesteps <= 2 * UPDATE)
        agent.save(tmp_path / "agent.zip")
        loaded = DistributionalPPO.load(tmp_path / "agent.zip", cart_poles(), device="cpu").resume()
        assert loaded.num_timesteps >= 4 * UPDATE
        assert loaded._total_timesteps == 4 * UPDATE
        assert loaded.hyperparams.current("learning_rate") <= 0


class TestEnvironments:
    @pytest.mark.parametrize("number", [1, 2, 5])
    def test_may_be_another_number(self, number, tmp_path):
        small().learn(UPDATE).save(tmp_path / "agent.zip")
        loaded = DistributionalPPO.load(tmp_path / "agent.zip", cart_poles(number), device="cpu")
        assert loaded.n_envs == number
        loaded.learn(16 * number, reset_num_timesteps=False)
        assert loaded.num_timesteps == UPDATE + 16 * number

    def test_statistics_go_into_the_wrapper_that_is_there(self, tmp_path):
        agent = small(cart_poles(normalize=True)).learn(UPDATE)
        agent.save(tmp_path / "agent.zip")
        env = cart_poles(normalize=True)
        env.training = False
        loaded = DistributionalPPO.load(tmp_path / "agent.zip", env, device="cpu")
        assert loaded.get_env() is env
        assert not isinstance(env.venv, VecNormalize)
        assert np.array_equal(env.obs_rms.mean, agent.get_env().obs_rms.mean)
        assert env.obs_rms.count == agent.get_env().obs_rms.count
        assert env.training is False

    def test_a_wrapper_is_made_where_there_is_none(self, tmp_path):
        env = VecNormalize(make_vec_env("CartPole-v1", 2), norm_reward=False, clip_obs=3.0)
        agent = small(env).learn(UPDATE)
        agent.save(tmp_path / "agent.zip")
        plain = cart_poles()
        loaded = DistributionalPPO.load(tmp_path / "agent.zip", plain, device="cpu")
        wrapper = loaded.get_env()
        assert isinstance(wrapper, VecNormalize)
        assert wrapper.venv is plain
        assert (wrapper.clip_obs, wrapper.norm_reward) == (3.0, False)
        assert np.array_equal(wrapper.obs_rms.var, env.obs_rms.var)
        loaded.learn(UPDATE)

    def test_without_one_observations_can_be_normalised(self, tmp_path):
        agent = small(cart_poles(normalize=True)).learn(UPDATE)
        agent.save(tmp_path / "agent.zip")
        loaded = DistributionalPPO.load(tmp_path / "agent.zip", device="cpu")
        raw = np.array([[0.1, -0.2, 0.3, 1.0]], np.float32)
        assert np.array_equal(loaded.normalizer.normalize(raw), agent.get_env().normalize_obs(raw))
        again = copy.deepcopy(loaded)
        assert np.array_equal(again.normalizer.normalize(raw), agent.get_env().normalize_obs(raw))
        loaded.set_env(cart_poles())
        assert np.array_equal(unwrap_vec_normalize(loaded.get_env()).obs_rms.mean, agent.get_env().obs_rms.mean)

    def test_statistics_of_dictionaries(self, tmp_path):
        class Two(gymnasium.ObservationWrapper):
            observation_space = spaces.Dict({"a": spaces.Box(-9, 9, (3,)), "b": spaces.Box(-9, 9, (1,))})

            def observation(self, observation):
                return {"a": observation[:3], "b": observation[3:]}

        def env(**kwargs):
            venv = DummyVecEnv([lambda: Two(gymnasium.make("CartPole-v1"))] * 2)
            return VecNormalize(venv, norm_reward=False, norm_obs_keys=["b"])

        agent = small(env(), "MultiInputLstmPolicy").learn(UPDATE)
        agent.save(tmp_path / "agent.zip")
        loaded = DistributionalPPO.load(tmp_path / "agent.zip", env(), device="cpu")
        assert loaded.get_env().obs_rms["b"].mean == agent.get_env().obs_rms["b"].mean

    def test_pending_observations_are_normalised_with_inherited_statistics(self):
        donor, agent = (small(cart_poles(normalize=True)) for _ in range(2))
        donor.learn(6 * UPDATE)
        agent.learn(UPDATE)
        raw = agent.get_env().get_original_obs()
        agent.set_parameters(donor.get_parameters())
        assert np.array_equal(agent._last_obs, donor.get_env().normalize_obs(raw))
        stacked = small(VecFrameStack(cart_poles(normalize=True), 2)).learn(UPDATE)
        stacked.set_parameters(stacked.get_parameters())
        stacked.learn(UPDATE, reset_num_timesteps=False)

    def test_statistics_of_other_observations_are_refused_and_nothing_changes(self):
        agent = small(cart_poles(normalize=True)).learn(UPDATE)
        states = agent.get_parameters()
        states["normalizer_state"]["obs_rms"][""]["mean"] = np.zeros(3)
        states["normalizer_state"]["obs_rms"][""]["var"] = np.ones(3)
        states["return_scale_state"]["mean"] += 5
        before = learned(agent)
        with pytest.raises(ValueError, match=r"shapes.*\(3,\).*\(4,\)"):
            agent.set_parameters(states)
        assert not compare(learned(agent), before)


class Extractor(FlattenExtractor):
    """Somebody's own."""


def halving(progress):
    return 1e-3 * (0.5 + progress / 2)


class TestFilesNameWhatTheyCannotHold:
    def test_classes_must_be_given_again(self, tmp_path):
        agent = small(policy_kwargs={"features_extractor_class": Extractor})
        agent.save(tmp_path / "agent.zip")
        with pytest.raises(CheckpointError, match=r"features_extractor_class=.*Extractor.*custom_objects"):
            DistributionalPPO.load(tmp_path / "agent.zip", device="cpu")
        for name in ("features_extractor_class", "policy_kwargs.features_extractor_class", "Extractor"):
            loaded = DistributionalPPO.load(tmp_path / "agent.zip", device="cpu", custom_objects={name: Extractor})
            assert type(loaded.policy.features_extractor) is Extractor

    def test_functions_must_be_given_again(self, tmp_path):
        agent = small(learning_rate=halving)
        with pytest.warns(UserWarning, match="by name only: learning_rate"):
            agent.save(tmp_path / "agent.zip")
        with pytest.raises(CheckpointError, match=r"learning_rate=.*halving"):
            DistributionalPPO.load(tmp_path / "agent.zip", device="cpu")
        loaded = DistributionalPPO.load(tmp_path / "agent.zip", device="cpu", learning_rate=halving)
        assert loaded.hyperparams.schedule("learning_rate") is halving
        assert DistributionalPPO.load(tmp_path / "agent.zip", device="cpu", learning_rate=1e-5).learning_rate == 1e-5

    @pytest.mark.parametrize("schedule", [Linear(1e-3), Linear(1e-3, 1e-5), Cosine(2e-3), LinearSchedule(1e-3, 0, 0.5)])
    def test_known_schedules_need_not(self, schedule, tmp_path):
        agent = small(learning_rate=schedule, clip_range=Linear(0.2, 0.1))
        agent.hyperparams["learning_rate"] *= 2
        agent.save(tmp_path / "agent.zip")
        loaded = DistributionalPPO.load(tmp_path / "agent.zip", device="cpu")
        for progress in (1.0, 0.6, 0.1):
            for model in (agent, loaded):
                model.hyperparams.advance(progress)
            assert loaded.hyperparams.current("learning_rate") == agent.hyperparams.current("learning_rate")
            assert loaded.hyperparams.current("clip_range") == agent.hyperparams.current("clip_range")

    def test_known_classes_need_not(self, tmp_path):
        networks = {"activation_fn": torch.nn.GELU, "features_extractor_class": FlattenExtractor}
        agent = small(policy_kwargs=networks, optimizer_class=torch.optim.NAdam, optimizer_kwargs={"betas": (0.8, 0.9)})
        agent.save(tmp_path / "agent.zip")
        loaded = DistributionalPPO.load(tmp_path / "agent.zip", device="cpu")
        assert isinstance(loaded.policy.actor_network[-1], torch.nn.GELU)
        assert isinstance(loaded.policy.optimizer, torch.optim.NAdam)
        assert loaded.policy.optimizer.param_groups[0]["betas"] == (0.8, 0.9)

    def test_nothing_is_imported_because_a_file_says_so(self, tmp_path, monkeypatch):
        (tmp_path / "trap.py").write_text("raise SystemExit('imported')")
        monkeypatch.syspath_prepend(tmp_path)
        agent = small()
        config = agent.config()
        for tag in ("$class", "$foreign"):
            config["settings"]["policy_kwargs"]["activation_fn"] = {tag: "trap.Tanh"}
            write(tmp_path / "agent.zip", agent.state_tree(), config=config)
            with pytest.raises(CheckpointError, match=r"trap\.Tanh"):
                DistributionalPPO.load(tmp_path / "agent.zip", device="cpu")

    def test_another_class_of_agents_is_named(self, tmp_path):
        small(kind=WithToy).save(tmp_path / "agent.zip")
        with pytest.raises(CheckpointError, match=r"WithToy.load\(\)"):
            DistributionalPPO.load(tmp_path / "agent.zip", device="cpu")


FOUR = {"shape": [4], "dtype": "float32"}


class TestHostileFiles:
    """Files that are whole, with checksums that hold, and lie."""

    @pytest.mark.parametrize(
        ("place", "value"),
        [
            (("settings", "policy_kwargs", "lstm_hidden_size"), 10**9),
            (("settings", "policy_kwargs", "n_lstm_layers"), 10**12),
            (("settings", "policy_kwargs", "net_arch"), [10**9]),
            (("settings", "policy_kwargs", "num_quantiles"), 10**9),
            (("settings", "policy_kwargs", "unknown"), 1),
            (("settings", "gamma"), 5),
            (("settings", "unknown"), 1),
            (("settings", "policy"), "NoPolicy"),
            (("settings",), 5),
            (("settings", "learning_rate"), {"$schedule": "Linear", "start": "x"}),
            (("settings", "learning_rate"), {"$schedule": "open", "file": "x"}),
            (("settings", "learning_rate"), {"$unknown": 1}),
            (("observation_space",), {"$space": {"kind": "Box", "low": 0, "high": 1, "shape": [2**40], "dtype": "f4"}}),
            (("observation_space",), {"$space": {"kind": "Box", "low": 0, "high": 1, "shape": [4], "dtype": "O"}}),
            (("observation_space",), {"$space": {"kind": "Discrete", "n": 10**12, "start": 0}}),
            (("action_space",), {"$space": {"kind": "Discrete", "n": -1, "start": 0}}),
            (("action_space",), {"$space": {"kind": "Discrete", "n": 10**12, "start": 0}}),
            (("action_space",), {"$space": {"kind": "eval"}}),
            (("action_space",), {"$space": {"kind": "MultiBinary", "n": [2**40]}}),
            (("action_space",), {"$space": {"kind": "MultiBinary", "n": []}}),
            (("action_space",), {"$space": {"kind": "MultiDiscrete", "nvec": [2**40], "start": [0]}}),
            (("action_space",), {"$space": {"kind": "MultiDiscrete", "nvec": [[2], [2, 3]], "start": [0]}}),
            (("action_space",), {"$space": {"kind": "Discrete", "n": True, "start": 0}}),
            (("action_space",), {"$space": {"kind": "Discrete", "n": 2}}),
            (("action_space",), {"$space": ["Discrete"]}),
            (("action_space",), {"$space": {"kind": ["Box"]}}),
            (("observation_space",), {"$space": {"kind": "Box", "low": [0] * 5, "high": 1, **FOUR}}),
            (("observation_space",), {"$space": {"kind": "Box", "low": "x", "high": 1, **FOUR}}),
            (("observation_space",), {"$space": {"kind": "Box", "low": 0, "high": 1, **FOUR, "shape": [-4, -1]}}),
            (("observation_space",), {"$space": {"kind": "Box", "low": 0, "high": 1, **FOUR, "shape": [1] * 1000}}),
            (("observation_space",), {"$space": {"kind": "Box", "low": 0, "high": 1, **FOUR, "dtype": "(9999,)f4"}}),
            (("observation_space",), {"$space": {"kind": "Dict", "spaces": [["a", {"kind": "Dict"}]]}}),
            (("observation_space",), {"$space": {"kind": "Dict", "spaces": {"a": 1}}}),
            (("action_space",), 3),
            (("n_envs",), "many"),
        ],
        ids=str,
    )
    def test_settings(self, place, value, tmp_path):
        agent = small()
        config = agent.config()
        target = config
        for key in place[:-1]:
            target = target[key]
        target[place[-1]] = value
        write(tmp_path / "agent.zip", agent.state_tree(), config=config)
        with pytest.raises(CheckpointError):
            DistributionalPPO.load(tmp_path / "agent.zip", cart_poles(), device="cpu")

    @pytest.mark.parametrize(
        ("component", "change"),
        [
            ("policy", lambda state: state.pop("action_head.bias")),
            ("policy", lambda state: state.update({"action_head.bias": torch.zeros(5)})),
            ("policy", lambda state: state.update({"action_head.bias": "zeros"})),
            ("optimizer", lambda state: state["state"][0].update(first_moment=torch.zeros(7))),
            ("optimizer", lambda state: state.update(param_groups=[])),
            ("optimizer", lambda state: state["state"].update({999: {}})),
            ("vgs", lambda state: state.clear()),
            ("return_scale", lambda state: state.update(mean=float("nan"))),
            ("entropy", lambda state: state.update(plateau="now")),
            ("hyperparams", lambda state: state.update(gamma=7.0)),
            ("hyperparams", lambda state: state.update(unknown=7.0)),
            ("counters", lambda state: state.update(num_timesteps=-1)),
            ("counters", lambda state: state.update(progress_remaining="half")),
            ("rollout", lambda state: state.pop("episodes")),
            ("rollout", lambda state: state["running"].pop("starts")),
            ("rollout", lambda state: state["running"]["environments"].pop("environments")),
            ("random", lambda state: state.update(python=(1, 2, 3))),
            ("random", lambda state: state.update(torch=torch.zeros(3))),
            ("normalizer", lambda state: state.update(obs_rms=5)),
        ],
    )
    def test_states(self, component, change, tmp_path):
        def env():
            return DummyVecEnv([walk] * 2)

        agent = small(env()).learn(UPDATE)
        tree = agent.state_tree()
        change(tree[component])
        write(tmp_path / "agent.zip", tree, config=agent.config())
        drawn = torch.get_rng_state()
        with pytest.raises(CheckpointError):
            DistributionalPPO.load(tmp_path / "agent.zip", env(), device="cpu")
        # Nothing half-loaded: not even the generators.
        assert torch.equal(torch.get_rng_state(), drawn)

    def test_files_of_stable_baselines3(self, tmp_path):
        PPO("MlpPolicy", "CartPole-v1", device="cpu").save(tmp_path / "sb3.zip")
        with pytest.raises(CheckpointError, match="Stable-Baselines3"):
            DistributionalPPO.load(tmp_path / "sb3.zip", device="cpu")

    def test_trees_that_are_no_agents(self, tmp_path):
        write(tmp_path / "tree.zip", {"policy": torch.zeros(3)})
        with pytest.raises(CheckpointError, match="holds no agent"):
            DistributionalPPO.load(tmp_path / "tree.zip", device="cpu")

    def test_a_file_holds_no_pickle(self, tmp_path):
        agent = small(learning_rate=halving, policy_kwargs={"features_extractor_class": Extractor}).learn(UPDATE)
        with pytest.warns(UserWarning, match="by name only: learning_rate"):
            agent.save(tmp_path / "agent.zip")
        with zipfile.ZipFile(tmp_path / "agent.zip") as archive:
            assert archive.namelist() == ["manifest.json", "state.safetensors"]
            json.loads(archive.read("manifest.json"))
        assert inspect(tmp_path / "agent.zip").intact


BOXES = st.builds(
    lambda shape, dtype, seed: spaces.Box(
        *np.sort(np.random.default_rng(seed).integers(0, 100, (2, *shape)), axis=0).astype(dtype), dtype=dtype
    ),
    st.lists(st.integers(1, 4), max_size=3).map(tuple),
    st.sampled_from([np.float32, np.float64, np.uint8, np.int64]),
    st.integers(0, 1000),
)
UNBOUNDED = st.builds(
    lambda n, low: spaces.Box(np.full(n, -np.inf if low else 0.5, np.float32), np.full(n, np.inf, np.float32)),
    st.integers(1, 5),
    st.booleans(),
)
SIMPLE = (
    BOXES
    | UNBOUNDED
    | st.builds(lambda n, start: spaces.Discrete(n, start=start), st.integers(1, 9), st.integers(-3, 3))
    | st.builds(spaces.MultiDiscrete, st.lists(st.integers(1, 9), min_size=1, max_size=4))
    | st.builds(spaces.MultiBinary, st.integers(1, 9) | st.lists(st.integers(1, 3), min_size=2, max_size=3))
)
SPACES = SIMPLE | st.builds(spaces.Dict, st.dictionaries(st.text(min_size=1, max_size=5), SIMPLE, min_size=1))


@settings(deadline=None)
@given(space=SPACES)
def test_spaces_are_the_same_after_json(space):
    tensors, plain = flatten(encode(space))
    assert not tensors
    assert decode(unflatten({}, json.loads(json.dumps(plain, allow_nan=False))), {}) == space


def test_settings_are_those_that_make_the_same_agent():
    arguments = {
        "learning_rate": Linear(1e-3),
        "gamma": 0.9,
        "clip_range_vf": 0.3,
        "value_clip_mode": "per_quantile",
        "cvar_alpha": 0.3,
        "target_kl": 0.02,
        "kl_stop": "fraction",
        "kl_stop_fraction": 0.5,
        "kl_penalty": {"kp": 0.2},
        "ent_coef": 0.02,
        "ent_coef_final": 0.01,
        "ent_boost_factor": 2.0,
        "vgs_kwargs": {"alpha": 0.3},
        "optimizer_kwargs": {"sigma": 0.01, "lr": Linear(1e-3)},
        "stats_window_size": 7,
        "sequence_length": 8,
    }
    agent = small(**arguments)
    given = agent.settings()
    for name, value in arguments.items():
        expected = {"sigma": 0.01} if name == "optimizer_kwargs" else value
        assert given[name] == expected, name
    assert given["policy"] == "MlpLstmPolicy"
    again = DistributionalPPO(env=cart_poles(), device="cpu", **given)
    assert dict(again.hyperparams) == dict(agent.hyperparams)
    assert again.settings() == given


class TestWhatReviewersFound:
    """Ways in which a state was lost, or a file believed, before."""

    def test_a_component_that_an_instance_registered(self, tmp_path):
        agent = small()
        toy = Toy()
        toy.value = 4
        agent.register("toy", toy)
        for other in (copy.deepcopy(agent), pickle.loads(pickle.dumps(agent))):
            assert other.components()["toy"].value == 4
            assert other.components()["toy"] is not toy
        agent.save(tmp_path / "agent.zip")
        with pytest.warns(UserWarning, match="toy"):
            loaded = DistributionalPPO.load(tmp_path / "agent.zip", device="cpu")
        late = Toy()
        loaded.register("toy", late)
        assert late.value == 4

    def test_statistics_for_an_environment_without_a_wrapper(self):
        donor, agent = small(cart_poles(normalize=True)).learn(UPDATE), small(observation_normalizer=False)
        before = learned(agent)
        with pytest.raises(ValueError, match=r"has no VecNormalize: wrap it"):
            agent.set_parameters(donor.get_parameters())
        assert not compare(learned(agent), before)

    def test_statistics_survive_an_environment_that_is_refused(self, tmp_path):
        agent = small(cart_poles(normalize=True)).learn(UPDATE)
        agent.save(tmp_path / "agent.zip")
        loaded = DistributionalPPO.load(tmp_path / "agent.zip", device="cpu")
        with pytest.raises(ValueError, match="spaces do not match"):
            loaded.set_env(make_vec_env("Pendulum-v1", 2))
        for _ in range(2):  # and one that replaces another
            loaded.set_env(cart_poles())
            assert np.array_equal(loaded.get_env().obs_rms.mean, agent.get_env().obs_rms.mean)

    def test_optimizers_whose_state_has_other_shapes(self, tmp_path):
        agent = small(policy="MlpPolicy", optimizer_class=torch.optim.Adafactor).learn(UPDATE)
        agent.save(tmp_path / "agent.zip")
        loaded = DistributionalPPO.load(tmp_path / "agent.zip", device="cpu")
        assert not compare(learned(loaded)["optimizer"]["state"], learned(agent)["optimizer"]["state"])

    def test_what_optimizers_keep_in_their_groups(self):
        class Counting(torch.optim.SGD):
            def step(self, closure=None):
                for group in self.param_groups:
                    group["k"] = group.get("k", 0) + 1
                return super().step(closure)

        agent = small(policy="MlpPolicy", optimizer_class=Counting).learn(UPDATE)
        assert copy.deepcopy(agent).policy.optimizer.param_groups[0]["k"] == agent.policy.optimizer.param_groups[0]["k"]

    def test_arguments_of_subclasses(self, tmp_path):
        class More(DistributionalPPO):
            def __init__(self, *args, extra=1, **kwargs):
                self.extra = extra
                super().__init__(*args, **kwargs)

        agent = small(kind=More, extra=7)
        agent.save(tmp_path / "agent.zip")
        assert copy.deepcopy(agent).extra == 7
        assert More.load(tmp_path / "agent.zip", device="cpu").extra == 7
        del agent.extra
        with pytest.raises(TypeError, match=r"no attribute 'extra'.*settings\(\)"):
            copy.deepcopy(agent)

    def test_episodes_of_which_less_or_more_is_told(self, tmp_path):
        agent = small().learn(UPDATE)
        agent.ep_info_buffer.extend([{"r": 1.0, "l": 3}, {"r": 2.0, "l": 5, "t": 1.0, "gold": 7}])
        agent.save(tmp_path / "agent.zip")
        loaded = DistributionalPPO.load(tmp_path / "agent.zip", device="cpu")
        assert list(loaded.ep_info_buffer)[-2:] == [{"r": 1.0, "l": 3}, {"r": 2.0, "l": 5, "t": 1.0, "gold": 7.0}]
        assert isinstance(loaded.ep_info_buffer[-1]["l"], int)

    def test_observations_that_are_not_clipped(self, tmp_path):
        env = VecNormalize(cart_poles(), norm_reward=False, clip_obs=np.inf)
        small(env).learn(UPDATE).save(tmp_path / "agent.zip")
        assert DistributionalPPO.load(tmp_path / "agent.zip", cart_poles(), device="cpu").get_env().clip_obs == np.inf

    def test_what_is_not_exact_does_not_say_so(self, tmp_path):
        agent = small(DummyVecEnv([walk] * 2)).learn(UPDATE)
        agent.save(tmp_path / "whole.zip")
        assert read(tmp_path / "whole.zip").exact
        agent.save(tmp_path / "part.zip", exclude=["vgs"])
        DistributionalPPO.load(tmp_path / "whole.zip", device="cpu").save(tmp_path / "asked.zip")
        wrapped = DummyVecEnv([lambda: gymnasium.wrappers.FrameStackObservation(walk(), 2)] * 2)
        small(wrapped, "MlpPolicy").learn(UPDATE).save(tmp_path / "frames.zip")
        twice = VecNormalize(VecNormalize(DummyVecEnv([walk] * 2), norm_reward=False), norm_reward=False)
        small(twice, "MlpPolicy").learn(UPDATE).save(tmp_path / "twice.zip")
        for name in ("part", "asked", "frames", "twice"):
            assert not read(tmp_path / f"{name}.zip").exact, name

    @pytest.mark.parametrize("change", [lambda agent: agent, lambda agent: agent.reset_lstm_states_to_initial()])
    def test_an_agent_whose_memory_was_reset_goes_on_exactly(self, change, tmp_path):
        agent = small(DummyVecEnv([walk] * 2)).learn(UPDATE)
        change(agent)
        agent.save(tmp_path / "agent.zip")
        loaded = DistributionalPPO.load(tmp_path / "agent.zip", DummyVecEnv([walk] * 2), device="cpu")
        loaded.learn(UPDATE, reset_num_timesteps=False)
        after = learned(loaded)
        state = torch.get_rng_state()
        agent_again = DistributionalPPO.load(tmp_path / "agent.zip", agent.get_env(), device="cpu")
        agent_again.learn(UPDATE, reset_num_timesteps=False)
        assert not compare(learned(agent_again), after)
        assert torch.equal(torch.get_rng_state(), state)

    def test_an_agent_that_has_not_begun_begins_as_it_would_have(self, tmp_path):
        agent = small(DummyVecEnv([walk] * 2))
        agent.save(tmp_path / "agent.zip")
        agent.learn(UPDATE)
        loaded = DistributionalPPO.load(tmp_path / "agent.zip", DummyVecEnv([walk] * 2), device="cpu").learn(UPDATE)
        assert_same(loaded, agent)

    @pytest.mark.parametrize(
        ("place", "value"),
        [
            (("policy_kwargs", "net_arch"), [1] * 40_000),
            (("policy_kwargs", "net_arch"), {"pi": [1] * 40_000, "vf": []}),
        ],
        ids=["list", "dict"],
    )
    def test_settings_that_would_take_minutes(self, place, value, tmp_path):
        agent = small()
        config = agent.config()
        config["settings"][place[0]][place[1]] = value
        write(tmp_path / "agent.zip", agent.state_tree(), config=config)
        with pytest.raises(CheckpointError, match="more layers than it has weights"):
            DistributionalPPO.load(tmp_path / "agent.zip", device="cpu")

    def test_spaces_that_would_take_gigabytes(self, tmp_path):
        agent = small()
        config = agent.config()
        box = {"kind": "Box", "low": 0, "high": 1, "shape": [2**21], "dtype": "float32"}
        config["observation_space"] = {"$space": {"kind": "Dict", "spaces": [[str(i), box] for i in range(8)]}}
        write(tmp_path / "agent.zip", agent.state_tree(), config=config)
        with pytest.raises(CheckpointError, match="too many numbers"):
            DistributionalPPO.load(tmp_path / "agent.zip", device="cpu")

    def test_files_without_weights(self, tmp_path):
        agent = small()
        write(tmp_path / "agent.zip", without(agent.state_tree(), ["policy"]), config=agent.config())
        with pytest.raises(CheckpointError, match="holds no agent"):
            DistributionalPPO.load(tmp_path / "agent.zip", device="cpu")

    def test_files_do_not_set_attributes_of_wrappers(self, tmp_path):
        def env():
            return VecNormalize(DummyVecEnv([walk] * 2), norm_reward=False)

        agent = small(env()).learn(UPDATE)
        tree = agent.state_tree()
        tree["rollout"]["running"]["environments"]["wrappers"][0][1]["norm_reward"] = True
        write(tmp_path / "agent.zip", tree, config=agent.config(), exact=True)
        given = env()
        with pytest.raises(CheckpointError, match="norm_reward"):
            DistributionalPPO.load(tmp_path / "agent.zip", given, device="cpu")
        assert given.norm_reward is False

    def test_observations_of_another_shape(self, tmp_path):
        agent = small(DummyVecEnv([walk] * 2)).learn(UPDATE)
        for place in ("observation", "memory"):
            tree = agent.state_tree()
            running = tree["rollout"]["running"]
            if place == "observation":
                running["observation"] = np.zeros((2, 7), np.float32)
            else:
                running["memory"]["actor"] = (torch.zeros(1, 2, 99),) * 2
            write(tmp_path / "agent.zip", tree, config=agent.config(), exact=True)
            with pytest.raises(CheckpointError, match="of shape"):
                DistributionalPPO.load(tmp_path / "agent.zip", DummyVecEnv([walk] * 2), device="cpu")

    def test_files_do_not_say_where_to_log(self, tmp_path):
        small(tensorboard_log=str(tmp_path / "here")).save(tmp_path / "agent.zip")
        assert DistributionalPPO.load(tmp_path / "agent.zip", device="cpu").tensorboard_log is None
        again = DistributionalPPO.load(tmp_path / "agent.zip", device="cpu", tensorboard_log="there")
        assert again.tensorboard_log == "there"

    def test_a_refused_tree_leaves_running_episodes_alone(self):
        agent = small().learn(UPDATE)
        tree = agent.state_tree()
        tree["return_scale"]["mean"] = float("nan")
        last = agent._last_obs.copy()
        with pytest.raises(ValueError, match="mean"):
            agent.load_state_tree(tree)
        assert np.array_equal(agent._last_obs, last)

    def test_a_refused_file_leaves_the_environment_alone(self, tmp_path):
        agent = small(cart_poles(normalize=True)).learn(UPDATE)
        tree = agent.state_tree()
        tree["return_scale"]["mean"] = float("nan")
        write(tmp_path / "agent.zip", tree, config=agent.config())
        env = cart_poles(normalize=True)
        with pytest.raises(CheckpointError):
            DistributionalPPO.load(tmp_path / "agent.zip", env, device="cpu")
        assert env.obs_rms.count < 1
        assert env.training

    def test_a_failed_write_does_not_end_the_callback(self, tmp_path):
        saving = SaveCheckpoints(tmp_path)
        agent = small().learn(UPDATE)
        in_the_way = tmp_path / f"checkpoint_{2 * UPDATE:012d}.zip"
        in_the_way.mkdir()
        with pytest.raises(RuntimeError, match="in the background failed"):
            agent.learn(UPDATE, saving, reset_num_timesteps=False)
        in_the_way.rmdir()
        agent.learn(UPDATE, saving, reset_num_timesteps=False)
        assert saving.store.latest() is not None

    def test_a_folder_of_another_run_is_refused(self, tmp_path):
        small().learn(UPDATE, SaveCheckpoints(tmp_path))
        with pytest.raises(ValueError, match="checkpoints of another run"):
            small().learn(UPDATE, SaveCheckpoints(tmp_path))

    def test_a_stop_within_a_rollout_keeps_the_last_exact_checkpoint(self, tmp_path):
        agent = small(DummyVecEnv([walk] * 2))
        saving = SaveCheckpoints(tmp_path)
        agent.learn(4 * UPDATE, [saving, StopAt(UPDATE + 6)])
        assert read(saving.store.latest()).exact
        assert len(saving.store.list()) == 1

    def test_settings_in_custom_objects(self, tmp_path):
        small().save(tmp_path / "agent.zip")
        loaded = DistributionalPPO.load(
            tmp_path / "agent.zip", device="cpu", custom_objects={"learning_rate": 1e-5, "lr_schedule": lambda _: 0.0}
        )
        assert loaded.learning_rate == 1e-5

    def test_another_seed(self, tmp_path):
        small(DummyVecEnv([walk] * 2)).learn(UPDATE).save(tmp_path / "agent.zip")
        trees = []
        for seed in (1, 2, 1):
            env = DummyVecEnv([walk] * 2)
            loaded = DistributionalPPO.load(tmp_path / "agent.zip", env, device="cpu", seed=seed)
            trees.append(learned(loaded.learn(UPDATE, reset_num_timesteps=False)))
        assert compare(trees[0], trees[1])
        assert not compare(trees[0], trees[2])

    def test_what_is_taken_away(self, tmp_path):
        small(target_kl=0.1, cvar_alpha=0.5).save(tmp_path / "agent.zip")
        loaded = DistributionalPPO.load(tmp_path / "agent.zip", device="cpu", target_kl=None, cvar_alpha=None)
        assert loaded.target_kl is None
        assert "cvar_alpha" not in loaded.hyperparams

    def test_hyperparameters_that_only_one_has(self):
        cautious, plain = small(cvar_alpha=0.5), small()
        with pytest.warns(UserWarning, match=r"lacks the hyper-parameters \['cvar_alpha'\]"):
            cautious.set_parameters(plain.get_parameters())
        with pytest.raises(ValueError, match="cvar_alpha"):
            plain.set_parameters(cautious.get_parameters())

    def test_components_that_end_like_parameters(self, tmp_path):
        agents = [small(), small()]
        toys = [Toy(), Toy()]
        toys[0].value = 3
        for agent, toy in zip(agents, toys, strict=True):
            agent.register("my_state", toy)
        agents[0].save(tmp_path / "agent.zip")
        agents[1].set_parameters(tmp_path / "agent.zip")
        assert toys[1].value == 3

    def test_names_without_endings_and_environments_by_id(self, tmp_path):
        agent = small()
        agent.save(tmp_path / "agent.zip")
        (tmp_path / "agent.zip").rename(tmp_path / "agent")
        loaded = DistributionalPPO.load(tmp_path / "agent", "CartPole-v1", device="cpu")
        assert loaded.n_envs == 1

    def test_agents_without_networks(self):
        agent = DistributionalPPO("MlpPolicy", _init_setup_model=False, device="cpu")
        with pytest.raises(TypeError, match=r"_setup_model\(\) first"):
            copy.deepcopy(agent)


class StopAt(BaseCallback):
    def __init__(self, step):
        super().__init__()
        self.step = step

    def _on_step(self):
        return self.num_timesteps < self.step


def test_a_new_training_begins_with_what_was_learned_in_other_data(tmp_path):
    from driftproof.envs import MarketEnv, regime_bars

    def envs(count, period):
        options = {"data": regime_bars(400), "split": "all", "period": period, "episode_length": 32}
        return VecNormalize(make_vec_env(MarketEnv, count, seed=0, env_kwargs=options), norm_reward=False)

    first, second = ["2000-01-01", "2000-01-10"], ["2000-01-10", "2000-01-17"]
    old = DistributionalPPO("MlpLstmPolicy", envs(2, first), n_steps=16, batch_size=16, n_epochs=1, device="cpu")
    old.learn(64)
    old.save(tmp_path / "old")
    with pytest.raises(CheckpointError, match=r"not here; for a new training .*warm_start=True"):
        DistributionalPPO.load(tmp_path / "old", envs(2, second), device="cpu")
    new = DistributionalPPO.load(tmp_path / "old", envs(3, second), device="cpu", warm_start=True, learning_rate=1e-5)
    assert (new.num_timesteps, new.n_envs, new.learning_rate) == (0, 3, 1e-5)
    for name, tensor in old.policy.state_dict().items():
        torch.testing.assert_close(new.policy.state_dict()[name], tensor, rtol=0, atol=0)
    statistics = [agent.get_vec_normalize_env().obs_rms.count for agent in (old, new)]
    assert statistics[0] == statistics[1]
    new.learn(48)
    assert new.num_timesteps == 48
    with pytest.raises(TypeError, match="warm_start begins a new training"):
        DistributionalPPO.load(tmp_path / "old", device="cpu", warm_start=True)
