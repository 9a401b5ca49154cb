"""Parts of the drift kit in networks and losses, through ``learn()`` and files."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from driftproof.config import loads
from driftproof.config.build import agent_arguments, build_env
from driftproof.config.from_agent import config_from
from driftproof.envs import LastStep
from driftproof.nn.interface import RNNStates
from driftproof.nn.policies import MlpGruPolicy
from driftproof.ppo import DistributionalPPO, warm_start
from driftproof.settings.definition import settings_of
from driftproof.settings.drift import DriftSettings
from driftproof.state import CheckpointError

from .changing import ENVS, STEPS, agent_in
from .scripted import StepSpy, agent, learn, scripted, weights

SPACES = {
    "Discrete": spaces.Discrete(3),
    "MultiDiscrete": spaces.MultiDiscrete([2, 3]),
    "MultiBinary": spaces.MultiBinary(2),
    "Box": spaces.Box(-1, 1, (2,), np.float32),
}


def learner(space="Discrete", **arguments):
    return agent(scripted([3], [5, 1], [20], action_space=SPACES[space], reward=lambda *_: 0), **arguments)


def observing(policy):
    """Environments with the observations that a policy needs."""
    kinds = {
        "Cnn": spaces.Box(0, 255, (3, 36, 36), np.uint8),
        "Mul": spaces.Dict({"a": spaces.Box(-1, 1, (2,)), "b": spaces.Discrete(3)}),
    }
    space = kinds.get(policy[:3], spaces.Box(-1, 1, (2,)))

    class Sampled(gymnasium.Env):
        observation_space, action_space = space, spaces.Discrete(3)

        def reset(self, *, seed=None, options=None):
            return self.observation_space.sample(), {}

        def step(self, action):
            return self.observation_space.sample(), 1.0, False, bool(self.np_random.random() < 0.1), {}

    return DummyVecEnv([Sampled])


def reloaded(model, tmp_path):
    model.save(tmp_path / "agent.zip")
    return DistributionalPPO.load(tmp_path / "agent.zip", device="cpu")


class TestExplorationFloor:
    @pytest.mark.parametrize("space", SPACES)
    def test_leads_a_certain_policy_back(self, space):
        def spoil(model):
            with torch.no_grad():
                if space == "Box":
                    model.policy.log_std.fill_(-6.0)
                model.policy.action_head.bias.copy_(torch.tensor([9.0, -9.0] * 3)[: len(model.policy.action_head.bias)])

        divergences = {}
        for floor in (0.0, 1.0):
            model = learner(space, exploration_floor=floor, learning_rate=0.03, n_epochs=30)
            spoil(model)
            logs = learn(model, 3)
            parameters = model.policy.evaluate_actor(torch.zeros(1, 1, 3), model.policy.initial_state(1))
            divergences[floor] = model.policy.distribution.uniform_divergence(parameters).item()
            assert ("train/uniform_divergence" in logs[0]) == (floor > 0)
        assert logs[-1]["train/uniform_divergence"] < logs[0]["train/uniform_divergence"]
        assert logs[-1]["train/exploration_floor"] == 1.0
        assert divergences[1.0] < divergences[0.0] / 3

    def test_is_part_of_the_loss(self, monkeypatch):
        spy = StepSpy(monkeypatch)
        learn(learner(exploration_floor=0.3))
        for facts in spy.facts:
            value = (facts["critic_loss_1"] + facts["critic_loss_2"]) / 2
            expected = facts["policy_loss"] + 0.5 * value + 0.3 * facts["uniform_divergence"]
            assert facts["loss"] == pytest.approx(expected, abs=1e-5)

    def test_is_a_hyperparameter(self, tmp_path):
        model = learner()
        assert model.hyperparams["exploration_floor"] == model.exploration_floor == 0
        model.hyperparams["exploration_floor"] = 0.2
        assert learn(model)[0]["train/exploration_floor"] == 0.2
        assert reloaded(model, tmp_path).exploration_floor == 0.2
        with pytest.raises(ValueError, match="Invalid exploration_floor: -1"):
            model.exploration_floor = -1
        with pytest.raises((TypeError, ValueError), match="exploration_floor"):
            model.exploration_floor = None

    def test_a_state_without_it_has_none(self):
        model, other = learner(), learner(exploration_floor=0.1)
        state = model.get_parameters()
        del state["hyperparams"]["exploration_floor"]
        model.set_parameters(state)
        with pytest.warns(UserWarning, match="exploration_floor"):
            other.set_parameters(state)

    def test_in_configurations(self):
        config = loads("drift: {exploration_floor: 0.01}")
        assert agent_arguments(config)["exploration_floor"] == 0.01
        assert config_from(learner(exploration_floor=0.02).settings(), 3, {}).drift.exploration_floor == 0.02


class TestLayerNorm:
    @pytest.mark.parametrize(
        ("policy", "networks"),
        [
            ("MlpPolicy", {}),
            ("MlpLstmPolicy", {}),
            ("MlpLstmPolicy", {"shared_recurrence": True, "net_arch": []}),
            ("MlpGruPolicy", {"enable_critic_lstm": False}),
            ("MultiInputPolicy", {}),
            ("CnnPolicy", {"net_arch": []}),
            ("CnnLstmPolicy", {}),
        ],
    )
    def test_of_every_network(self, policy, networks, tmp_path):
        """Normalised are the arguments of activations, and the outputs of cores; files hold it."""
        model = agent(observing(policy), policy, layer_norm=True, policy_kwargs=networks)
        learn(model, 2)
        for each in (model, reloaded(model, tmp_path)):
            for network in (each.policy.actor_network, *(critic.network for critic in each.policy.critics)):
                kinds = [type(layer).__name__ for layer in network]
                dense = networks.get("net_arch") is None
                inputs = policy != "MlpPolicy" and policy != "MultiInputPolicy"
                inputs &= "enable_critic_lstm" not in networks or network is each.policy.actor_network
                assert kinds == ["LayerNorm"] * inputs + ["Linear", "LayerNorm", "Tanh"] * dense
                assert not list(network.buffers())
            observation = each.observation_space.sample()
            assert each.predict(observation, deterministic=True)[0] == model.predict(observation, deterministic=True)[0]
        assert reloaded(model, tmp_path).layer_norm is True

    @pytest.mark.parametrize("policy", ["MlpPolicy", "MlpLstmPolicy"])
    def test_keeps_units_from_saturating(self, policy):
        gradients = []
        for layer_norm in (False, True):
            model = learner(policy=policy, layer_norm=layer_norm)
            network, given = model.policy.actor_network, torch.full((1, model.policy.actor_core.units), 300.0)
            given[0, 1] = -500
            given.requires_grad_()
            gradients.append(torch.autograd.grad(network(given).square().sum() / given.detach().std(), given)[0].norm())
        assert gradients[0] < 1e-12 < gradients[1]

    def test_parameters_have_the_names_that_they_have_without(self):
        for policy in ("MlpPolicy", "MlpLstmPolicy"):
            with_it, without = (learner(policy=policy, layer_norm=flag).policy.state_dict() for flag in (True, False))
            assert list(with_it) == list(without)

    def test_acts_as_it_is_trained(self):
        """Step by step, and over whole sequences."""
        model = learner(policy="MlpLstmPolicy", layer_norm=True)

        @torch.no_grad()
        def check(model):
            rollout = model._rollout
            parameters, predictions = model.policy.evaluate(rollout.observations[:3, :1], model.policy.initial_state(1))
            torch.testing.assert_close(parameters, rollout.parameters[:3, :1])
            torch.testing.assert_close(predictions[1], rollout.predictions[1][:3, :1])

        learn(model, before=check)

    def test_is_one_setting_in_two_places(self):
        inner = learner(policy_kwargs={"layer_norm": True})
        assert inner.layer_norm is True
        assert learner(layer_norm=True).policy_kwargs["layer_norm"] is True
        assert learner().layer_norm is False
        with pytest.raises(ValueError, match=r"layer_norm=False and policy_kwargs\['layer_norm'\]=True"):
            learner(layer_norm=False, policy_kwargs={"layer_norm": True})

    def test_policies_of_others_have_none(self):
        class Own(ActorCriticPolicy):
            pass

        with pytest.raises(ValueError, match="layer_norm=True needs a policy of driftproof"):
            DistributionalPPO(Own, scripted([3]), layer_norm=True)

    def test_in_configurations(self):
        config = loads("drift: {layer_norm: true}")
        assert agent_arguments(config)["layer_norm"] is True
        assert config_from(learner(layer_norm=True).settings(), 3, {}).drift.layer_norm is True


class TestDefaults:
    @pytest.mark.parametrize("policy", ["MlpPolicy", "MlpLstmPolicy"])
    def test_the_kit_is_on(self, policy):
        model = DistributionalPPO(policy, "CartPole-v1")
        assert {"drift_alarm", "drift_response", "observations"} <= model.components().keys()
        assert (model.layer_norm, model.exploration_floor, model.drift_rewiring) == (True, 0.003, True)

    def test_a_recurrent_agent_is_the_one_without_it_until_something_happens(self):
        """Sensors of a usual scale stay as they are, and the other parts only watch."""
        ends = []
        for drift_kit in (False, True):
            model = agent_in({0: "right"}, policy="MlpLstmPolicy", drift_kit=drift_kit, drift_alarm=drift_kit)
            ends.append(weights(model.learn(30 * STEPS * ENVS)))
        assert model.learner.normalizer.sensors.is_fixed
        assert model.learner.drift_response.state_dict()["good"] is not None
        assert torch.equal(*ends)

    def test_observations_that_are_normalised_already_stay_as_they_are(self, tmp_path):
        env = make_vec_env("CartPole-v1", 2)
        model = DistributionalPPO("MlpPolicy", VecNormalize(env, norm_reward=False), n_steps=16, batch_size=16)
        assert (model.observation_normalizer, model.drift_rewiring, model.drift_response) == (False, False, True)
        model.save(tmp_path / "agent.zip")
        assert DistributionalPPO.load(tmp_path / "agent.zip", env).learner.normalizer is None
        for wrapper, settings in (
            ({"norm_obs": False}, {}),
            ({}, {"observation_normalizer": True}),
            ({}, {"drift_rewiring": True}),
        ):
            wrapped = VecNormalize(env, norm_reward=False, **wrapper)
            assert DistributionalPPO("MlpPolicy", wrapped, **settings).observation_normalizer


class TestRecurrentDefaults:
    """Recurrent policies have layer normalisation and an exploration floor without the kit."""

    @pytest.mark.parametrize(
        ("policy", "networks", "parts"),
        [
            ("MlpPolicy", {}, (False, 0.0)),
            ("MlpPolicy", {"core": None}, (False, 0.0)),
            ("MlpLstmPolicy", {"core": "none"}, (False, 0.0)),
            ("MlpLstmPolicy", {}, (True, 0.003)),
            (MlpGruPolicy, {}, (True, 0.003)),
            ("MlpPolicy", {"core": "gru"}, (True, 0.003)),
            ("MlpLstmPolicy", {"layer_norm": False}, (False, 0.003)),
        ],
    )
    def test_depend_on_the_core(self, policy, networks, parts):
        model = DistributionalPPO(policy, "CartPole-v1", policy_kwargs=networks, drift_kit=False)
        assert (model.layer_norm, model.exploration_floor) == parts
        kinds = {type(layer).__name__ for layer in model.policy.actor_network}
        assert ("LayerNorm" in kinds) == parts[0]
        assert not model.drift_alarm

    def test_can_be_switched_off(self):
        model = learner(policy="MlpLstmPolicy", layer_norm=False, exploration_floor=0.0)
        assert (model.layer_norm, model.exploration_floor) == (False, 0.0)

    def test_policies_of_others_have_neither(self):
        class Own(ActorCriticPolicy):
            pass

        model = DistributionalPPO(Own, scripted([3]), n_steps=8, batch_size=8, drift_kit=False)
        assert (model.layer_norm, model.exploration_floor) == (False, 0.0)

    def test_settings_of_earlier_files_have_neither(self):
        model = learner(policy="MlpLstmPolicy")
        assert config_from(model.settings(), 3, {}).drift.layer_norm is True
        names = settings_of(DriftSettings)
        earlier = {name: value for name, value in model.settings().items() if name not in names}
        drift = config_from({**earlier, "policy_kwargs": {}}, 3, {}).drift
        assert (drift.layer_norm, drift.exploration_floor) == (False, 0.0)

    def test_weights_of_networks_without_it_are_refused(self, tmp_path):
        old, new = (learner(policy="MlpLstmPolicy", layer_norm=flag) for flag in (False, None))
        old.save(tmp_path / "old.zip")
        for load in (new.set_parameters, partial(warm_start, new)):
            with pytest.raises(CheckpointError, match=r"the agent's networks have layer .* set layer_norm=False"):
                load(tmp_path / "old.zip")


class TestInitDecay:
    def initial(self, model):
        saved = model.components()["initial_weights"].state_dict()
        return torch.cat([saved[name].flatten() for name, _ in model.policy.named_parameters()])

    @pytest.mark.parametrize("optimizer", ["adam", "sgd", "adaptive_upgd", "upgdw"])
    @pytest.mark.parametrize("masked", [False, True])
    def test_is_that_of_all_steps_of_an_update(self, optimizer, masked, monkeypatch):
        model = learner(init_decay=2.0, learning_rate=0.01, optimizer_class=optimizer, batch_size=8)
        model.learner.step.masked = masked
        stepped = []
        StepSpy(monkeypatch, after=lambda *_: stepped.append(weights(model)))
        (log,) = learn(model)
        assert log["train/optimizer_steps"] == len(stepped) == 3
        distance = 0.98**3 * (stepped[-1] - self.initial(model))
        torch.testing.assert_close(weights(model), self.initial(model) + distance)
        assert log["train/distance_from_initial"] == pytest.approx(distance.square().mean().sqrt().item(), rel=1e-5)

    def test_steps_that_were_not_taken_do_not_count(self, monkeypatch):
        model = learner(init_decay=2.0, learning_rate=0.01, batch_size=8, target_kl=1e-9)
        model.learner.step.masked = True
        stepped = []
        StepSpy(monkeypatch, after=lambda *_: stepped.append(weights(model)))
        (log,) = learn(model)
        taken = log["train/optimizer_steps"]
        assert 0 < taken < len(stepped)
        initial = self.initial(model)
        torch.testing.assert_close(weights(model), initial + 0.98**taken * (stepped[-1] - initial))

    def test_a_decay_of_everything_restores_the_initial_weights(self):
        model = learner(init_decay=1e4, learning_rate=1e-3)
        learn(model)
        torch.testing.assert_close(weights(model), self.initial(model))

    def test_frozen_parameters_stay(self):
        model = learner(init_decay=10.0, learning_rate=0.05)
        frozen = model.policy.actor_network[0].weight
        frozen.requires_grad_(False).add_(1.0)
        before = frozen.clone()
        learn(model)
        assert torch.equal(frozen, before)

    def test_initial_weights_are_part_of_the_state(self, tmp_path):
        model = learner(init_decay=0.5)
        assert "initial_weights" not in learner().components()
        start = self.initial(model)
        learn(model, 2)
        loaded = reloaded(model, tmp_path)
        other = learner(init_decay=0.5, seed=7)
        other.set_parameters(model.get_parameters())
        for each in (model, loaded, other):
            assert torch.equal(self.initial(each), start)
        assert loaded.init_decay == 0.5

    def test_wrong_states_are_refused(self):
        model = learner(init_decay=0.5)
        part = model.components()["initial_weights"]
        good = part.state_dict()
        name = next(iter(good))
        for wrong in (
            {},
            {**good, name: torch.zeros(1)},
            {**good, name: good[name] * torch.nan},
            {**good, "x": good[name]},
        ):
            with pytest.raises(CheckpointError, match="initial_weights"):
                part.load_state_dict(wrong)
        one = learner(init_decay=0.5, policy_kwargs={"twin_critics": False}, seed=9)
        part.load_state_dict(one.components()["initial_weights"].state_dict())
        assert torch.equal(part.state_dict()["critics.1.head.linear.weight"], good["critics.1.head.linear.weight"])

    def test_in_configurations(self):
        assert agent_arguments(loads("drift: {init_decay: 0.1}"))["init_decay"] == 0.1
        assert config_from(learner(init_decay=0.2).settings(), 3, {}).drift.init_decay == 0.2
        with pytest.raises(ValueError, match="Invalid init_decay: -1"):
            learner(init_decay=-1)


class TestOptimism:
    def estimates(self, *levels, **arguments):
        """Of one rollout, with each of these levels of optimism."""
        env = scripted([3], [5, 1], [20], truncated=True)
        model, found = agent(env, gamma=0.9, gae_lambda=0.7, **arguments), []

        def look(model):
            settings, rollout = model.update_settings(), model._rollout
            found.extend(model.learner.estimate(rollout, settings._replace(optimism=level)) for level in levels)

        learn(model, before=look)
        return found

    def test_minus_one_is_the_minimum(self):
        for alpha in (None, 0.5):
            minimum, lowest = self.estimates(None, -1.0, cvar_alpha=alpha)
            for name in ("values", "advantages", "returns"):
                torch.testing.assert_close(getattr(lowest, name), getattr(minimum, name), atol=1e-4, rtol=1e-4)

    def test_is_for_the_advantages_of_optimists_alone(self):
        low, middle, high = self.estimates(-1.0, 0.0, 1.0)
        assert torch.equal(high.values, middle.values)
        assert torch.equal(high.returns, middle.returns)
        torch.testing.assert_close(middle.values, torch.stack(middle.by_critic).mean(0))
        assert (low.values <= middle.values).all()
        # Advantages are linear in it, as they are in the values.
        change = high.advantages - middle.advantages
        torch.testing.assert_close(change, middle.advantages - low.advantages, atol=1e-4, rtol=1e-3)
        assert change.abs().max() > 0.01

    def test_is_an_optional_hyperparameter(self, tmp_path):
        model = learner()
        assert model.optimism is None
        assert "optimism" not in model.hyperparams
        model.optimism = 0.5
        learn(model)
        assert model.update_settings().optimism == 0.5
        assert reloaded(model, tmp_path).optimism == 0.5
        model.optimism = None
        assert model.update_settings().optimism is None
        with pytest.raises(ValueError, match="Invalid optimism: -2"):
            learner(optimism=-2)

    def test_changes_what_is_learned(self):
        ends = []
        for level in (None, -1.0, 0.0, 1.0):
            model = learner(optimism=level, optimizer_class="sgd", learning_rate=0.1)
            learn(model, 2)
            ends.append(weights(model))
        torch.testing.assert_close(ends[0], ends[1], atol=1e-5, rtol=1e-5)
        assert not torch.allclose(ends[0], ends[2], atol=1e-3)
        assert not torch.allclose(ends[2], ends[3], atol=1e-3)

    @pytest.mark.parametrize("level", [None, 1.0])
    def test_one_critic_agrees_with_itself(self, level):
        minimum, other = self.estimates(None, level, policy_kwargs={"twin_critics": False})
        assert torch.equal(minimum.advantages, other.advantages)

    def test_in_configurations(self):
        assert agent_arguments(loads("drift: {optimism: 0.1}"))["optimism"] == 0.1
        assert config_from(learner(optimism=0.2).settings(), 3, {}).drift.optimism == 0.2


class TestRecycling:
    WIDE: ClassVar = {"net_arch": [6, 5]}

    @pytest.mark.parametrize("activation", [torch.nn.Tanh, torch.nn.ReLU])
    @pytest.mark.parametrize("policy", ["MlpPolicy", "MlpLstmPolicy", "MlpGruPolicy"])
    def test_dormant_units_start_anew_and_the_policy_stays(self, policy, activation):
        """Dense and recurrent units that are constant get fresh weights; what the networks compute is the same."""
        networks = {**self.WIDE, "activation_fn": activation}
        settings = {"layer_norm": False, "recycle_dormant": 0.01, "learning_rate": 0.0}
        model = learner(policy=policy, policy_kwargs=networks, **settings)
        networks, core = model.policy, model.policy.critic_core
        dense = networks.actor_network[0]
        with torch.no_grad():
            dense.bias[2] = 50.0 if activation is torch.nn.Tanh else -50.0
            networks.critics[1].network[2].bias[0] = -50.0
            if core.parts:
                # The last unit remains 0: the output gate of an LSTM is closed, the update gate of a GRU open.
                gate, bias = (3, -50.0) if core.parts == 2 else (1, 50.0)
                core.recurrence.bias_ih_l0[(gate + 1) * core.units - 1] = bias
        old = {name: p.detach().clone() for name, p in networks.named_parameters()}
        (log,) = learn(model, before=self.look)
        assert 0 < log["train/dormant_units"] < 0.3
        assert not torch.equal(dense.weight[2], old["actor_network.0.weight"][2])
        assert torch.equal(dense.weight[:2], old["actor_network.0.weight"][:2])
        assert (networks.actor_network[2].weight[:, 2] == 0).all()
        assert (networks.critics[1].head.linear.weight[:, 0] == 0).all()
        if core.parts:
            assert (networks.critics[0].network[0].weight[:, core.units - 1] == 0).all()
            assert (core.recurrence.weight_hh_l0[:, core.units - 1] == 0).all()
        now = self.outputs(model)
        torch.testing.assert_close(now, self.before, atol=2e-4, rtol=2e-4)
        assert learn(model)[0]["train/dormant_units"] < log["train/dormant_units"]

    def look(self, model):
        self.before = self.outputs(model)

    @torch.no_grad()
    def outputs(self, model):
        """Of the first steps of the first environment, before its episode ends."""
        policy = model.policy
        if not hasattr(self, "seen"):
            self.seen = model._rollout.observations[:3, :1].clone()
        parameters, predictions = policy.evaluate(self.seen, policy.initial_state(1))
        return torch.cat((parameters, *predictions), -1)

    @pytest.mark.parametrize("optimizer", ["adam", "adaptive_upgd"])
    def test_moments_of_recycled_units_start_anew(self, optimizer):
        model = learner(policy_kwargs=self.WIDE, recycle_dormant=0.01, optimizer_class=optimizer)
        learn(model, 2)
        layers = model.policy.actor_network
        with torch.no_grad():
            layers[0].bias[2] = 50.0
        learn(model)
        state = model.policy.optimizer.state
        for name in [name for name, value in state[layers[0].weight].items() if value.dim() == 2]:
            assert (state[layers[0].weight][name][2] == 0).all()
            assert (state[layers[2].weight][name][:, 2] == 0).all()
            assert (state[layers[0].weight][name][3] != 0).any()

    def test_needs_networks_of_ours(self):
        class Own(ActorCriticPolicy):
            pass

        with pytest.raises(ValueError, match=r"recycle_dormant=0.1 needs a policy of driftproof"):
            DistributionalPPO(Own, scripted([3]), recycle_dormant=0.1)

    def test_in_configurations(self, tmp_path):
        assert agent_arguments(loads("drift: {recycle_dormant: 0.1}"))["recycle_dormant"] == 0.1
        model = learner(recycle_dormant=0.2)
        assert config_from(model.settings(), 3, {}).drift.recycle_dormant == 0.2
        assert reloaded(model, tmp_path).learner.recycle_dormant == 0.2


class TestLastingMemory:
    @pytest.mark.parametrize("policy", ["MlpLstmPolicy", "MlpGruPolicy"])
    @pytest.mark.parametrize("lasting", [False, True])
    def test_outlasts_episodes_in_rollouts_and_updates(self, policy, lasting, monkeypatch):
        model = learner(policy=policy, policy_kwargs={"lasting_memory": lasting}, learning_rate=0.0)
        spy, steps = StepSpy(monkeypatch), []

        @torch.no_grad()
        def check(model):
            rollout, networks = model._rollout, model.policy
            state = networks.initial_state(3)
            for t in range(rollout.steps):
                if not lasting:
                    state = state.masked(torch.from_numpy(~rollout.starts[t]).float().unsqueeze(1))
                step = networks.stepper()(rollout.observations[t], state)
                torch.testing.assert_close(rollout.parameters[t], step.parameters)
                state = step.state
                steps.append(t)
            assert rollout.starts[1:].any()

        learn(model, before=check)
        assert len(steps) == 8
        # What is trained is what acted.
        assert all(facts["approx_kl"] == pytest.approx(0, abs=1e-7) for facts in spy.facts)

    def test_predictions_ignore_episode_starts(self):
        observation, start = np.full((1, 3), 0.5, np.float32), np.array([True])
        for lasting in (False, True):
            model = learner(policy="MlpLstmPolicy", policy_kwargs={"lasting_memory": lasting})
            learn(model)
            _, first = model.predict(observation, deterministic=True)
            _, later = model.predict(observation, first, start, deterministic=True)
            assert np.array_equal(first[0], later[0]) == (not lasting)
            tensor = torch.from_numpy(observation)
            states = RNNStates(*[tuple(torch.from_numpy(part) for part in first)] * 2)
            *_, after = model.policy(tensor, states, torch.ones(1))
            assert torch.allclose(after.pi[0], torch.from_numpy(first[0]), atol=1e-6) == (not lasting)

    def test_a_restart_forgets(self):
        model = learner(policy="MlpLstmPolicy", policy_kwargs={"lasting_memory": True})
        learn(model)
        assert model.worker.state is not None
        model.worker.reset_state()
        assert (model.worker.recurrent_state.actor[0] == 0).all()

    def test_needs_memory_and_is_saved(self, tmp_path):
        with pytest.raises(ValueError, match="lasting_memory"):
            learner(policy_kwargs={"lasting_memory": True})
        model = learner(policy="MlpGruPolicy", policy_kwargs={"lasting_memory": True})
        assert reloaded(model, tmp_path).policy.lasting_memory is True
        config = loads("policy: {name: MlpGruPolicy, lasting_memory: true}\nenv: {last_step: true}")
        assert agent_arguments(config)["policy_kwargs"]["lasting_memory"] is True
        env = build_env(config)
        assert env.observation_space.shape == (4 + 2 + 2,)

    def test_last_step_is_observed(self):
        env = LastStep(gymnasium.make("CartPole-v1"))
        first, _ = env.reset(seed=0)
        assert first[4:].tolist() == [0, 0, 0, 1]
        second, *_ = env.step(1)
        assert second[4:].tolist() == [0, 1, 1, 0]
        assert env.observation_space.contains(second)
        again, _ = env.reset()
        assert again[4:].tolist() == [0, 1, 1, 1]
        assert env.reset(seed=1)[0][4:].tolist() == [0, 0, 0, 1]
        assert not env.continues

    @pytest.mark.parametrize("policy", ["Cnn", "MultiInput"])
    def test_last_step_of_other_observations(self, policy):
        env = LastStep(observing(policy).envs[0])
        env.reset()
        observation, *_ = env.step(2)
        assert env.observation_space.contains(observation)
        assert observation["last_step"].tolist() == [0, 0, 1, 1, 0]


def test_parts_that_are_off_change_nothing():
    ends = []
    for arguments in (
        {},
        {"exploration_floor": 0.0, "layer_norm": False, "init_decay": 0.0, "optimism": None, "recycle_dormant": 0.0},
    ):
        model = learner(**arguments)
        learn(model, 2)
        ends.append(weights(model))
    assert torch.equal(*ends)


@pytest.mark.parametrize(
    "settings",
    [
        {"normalizer_memory": 500, "drift_kit": False},
        {"drift_threshold": 9.0, "drift_kit": False},
        {"drift_worlds": 1, "drift_kit": True, "drift_response": False},
        {"drift_response": True, "drift_alarm": False},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_a_setting_without_its_part_is_an_error(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        DistributionalPPO("MlpPolicy", "CartPole-v1", **settings)
