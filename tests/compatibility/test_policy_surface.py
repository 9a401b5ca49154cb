"""What code written for the policies of Stable-Baselines3 and sb3-contrib relies on."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.distributions import (
    SquashedDiagGaussianDistribution,
    kl_divergence,
    make_proba_distribution,
)
from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor

from driftproof.nn.interface import RNNStates
from driftproof.nn.policies import DistributionalPolicy, MlpLstmPolicy, MlpPolicy
from driftproof.ppo import DistributionalPPO
from driftproof.state import CheckpointError, write

OBSERVATIONS = spaces.Box(-1, 1, (3,))
ACTIONS = {
    "discrete": spaces.Discrete(4),
    "discrete from 2": spaces.Discrete(3, start=2),
    "multi-discrete": spaces.MultiDiscrete([2, 3]),
    "multi-binary": spaces.MultiBinary(3),
    "box": spaces.Box(-2, 2, (2,)),
    "box of two dimensions": spaces.Box(-2, 2, (2, 2)),
    "float64 box": spaces.Box(-1, 1, (2,), np.float64),
}
RECURRENT = {
    "lstm": {},
    "gru": {"core": "gru"},
    "two layers": {"n_lstm_layers": 2},
    "shared_lstm": {"shared_lstm": True, "enable_critic_lstm": False},
    "shared_recurrence": {"shared_recurrence": True},
    "critics without": {"enable_critic_lstm": False},
    "two extractors": {"share_features_extractor": False},
    "without bias": {"lstm_kwargs": {"bias": False}},
}


class World(gym.Env):
    def __init__(self, action_space, observation_space=OBSERVATIONS):
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        assert np.asarray(action).dtype == self.action_space.dtype
        return self.observation_space.sample(), 3.0, bool(self.np_random.random() < 0.2), False, {}


def observations(count):
    return torch.rand(count, 3, generator=torch.Generator().manual_seed(count))


def recurrent(seed=0, **kwargs):
    torch.manual_seed(seed)
    policy = MlpLstmPolicy(OBSERVATIONS, ACTIONS["box"], lstm_hidden_size=8, **kwargs)
    policy.set_training_mode(False)
    return policy


def states(policy, sequences, seed=1):
    torch.manual_seed(seed)
    pi = policy.initial_state(sequences).actor
    drawn = [tuple(torch.randn_like(part) for part in pi) for _ in range(2)]
    return RNNStates(*drawn)


def agent(policy="MlpPolicy", space="box", **kwargs):
    return DistributionalPPO(policy, World(ACTIONS[space]), n_steps=32, batch_size=32, n_epochs=1, seed=0, **kwargs)


@pytest.mark.parametrize("space", ACTIONS)
def test_a_policy_gives_actions_values_and_log_probabilities(space):
    torch.manual_seed(0)
    policy = MlpPolicy(OBSERVATIONS, ACTIONS[space])
    seen = observations(6)
    actions, values, log_prob = policy(seen)
    assert actions.shape == (6, *ACTIONS[space].shape)
    assert values.shape == (6, 1)
    again, same, entropy = policy.evaluate_actions(seen, actions)
    assert torch.equal(values, again)
    assert torch.equal(values, policy.predict_values(seen))
    torch.testing.assert_close(same, log_prob)
    assert entropy.shape == (6,)
    expected, _ = policy.predict(seen.numpy(), deterministic=True)
    shown = policy(seen, True)[0].detach().numpy()
    np.testing.assert_allclose(shown, expected, rtol=1e-6)
    np.testing.assert_array_equal(shown, policy(seen, deterministic=True)[0].detach().numpy())


@pytest.mark.parametrize("space", ["discrete", "multi-discrete", "multi-binary", "box", "box of two dimensions"])
def test_distributions_are_those_of_stable_baselines3(space):
    torch.manual_seed(0)
    policy = MlpPolicy(OBSERVATIONS, ACTIONS[space], log_std_init=-0.5)
    seen = observations(5)
    ours = policy.get_distribution(seen)
    theirs = make_proba_distribution(ACTIONS[space])
    latent = policy.actor_network(policy.extract_features(seen, policy.features_extractor))
    outputs = policy.action_net(latent)
    theirs.proba_distribution(outputs, *([policy.log_std] if space.startswith("box") else []))
    actions = ours.get_actions()
    assert actions.shape == theirs.get_actions().shape
    assert actions.dtype == theirs.get_actions().dtype
    torch.testing.assert_close(ours.mode().float(), theirs.mode().float())
    torch.testing.assert_close(ours.get_actions(deterministic=True), ours.mode())
    torch.testing.assert_close(ours.log_prob(actions), theirs.log_prob(actions))
    torch.testing.assert_close(ours.entropy(), theirs.entropy())
    if space != "multi-discrete":
        assert type(ours.distribution) is type(theirs.distribution)
        assert kl_divergence(ours, ours).abs().max() < 1e-6
    else:
        assert [part.logits.shape for part in ours.distribution] == [part.logits.shape for part in theirs.distribution]


def test_squashed_actions_are_between_minus_one_and_one_and_have_their_density():
    torch.manual_seed(0)
    policy = MlpPolicy(OBSERVATIONS, spaces.Box(-4, 2, (2,)), squash_output=True)
    seen = observations(5)
    actions, _, log_prob = policy(seen)
    assert actions.abs().max() < 1
    theirs = SquashedDiagGaussianDistribution(2)
    ours = policy.get_distribution(seen)
    theirs.proba_distribution(ours.distribution.mean, policy.log_std)
    torch.testing.assert_close(log_prob, theirs.log_prob(actions), rtol=1e-3, atol=1e-3)
    draws = torch.stack([ours.log_prob(ours.sample()) for _ in range(4000)])
    torch.testing.assert_close(ours.entropy(), -draws.mean(0), rtol=0.05, atol=0.05)
    predicted, _ = policy.predict(seen.numpy(), deterministic=True)
    np.testing.assert_allclose(policy.unscale_action(policy(seen, True)[0].detach().numpy()), predicted, rtol=1e-5)


def test_values_are_in_units_of_rewards():
    model = agent().learn(64)
    seen = observations(4)
    quantiles, _ = model.predict_quantiles(seen.numpy())
    values = model.policy.predict_values(seen)
    np.testing.assert_allclose(values.detach().numpy()[:, 0], quantiles.mean(2).min(0), rtol=1e-4)
    assert model.return_scale.snapshot.std != 1


def test_behaviour_is_cloned_with_evaluate_actions():
    policy = MlpPolicy(OBSERVATIONS, ACTIONS["discrete"])
    seen, wanted = observations(64), torch.arange(64) % 4
    seen[:, 0] = wanted.float()
    optimizer = torch.optim.Adam(policy.parameters(), 0.02)
    for _ in range(200):
        _, log_prob, _ = policy.evaluate_actions(seen, wanted)
        optimizer.zero_grad()
        (-log_prob.mean()).backward()
        optimizer.step()
    assert (policy(seen, True)[0] == wanted).float().mean() > 0.95


def test_actions_of_another_number_are_refused():
    with pytest.raises(ValueError, match=r"actions have shape \(5, 2\); 6 observations need \(6, 2\)"):
        MlpPolicy(OBSERVATIONS, ACTIONS["box"]).evaluate_actions(observations(6), torch.zeros(5, 2))


@pytest.mark.parametrize("form", RECURRENT)
def test_recurrent_policies_have_the_signatures_of_sb3_contrib(form):
    policy = recurrent(**RECURRENT[form])
    before, seen = states(policy, 2), observations(6)
    starts = torch.tensor([0.0, 0, 1, 1, 0, 0])
    actions, values, log_prob, after = policy(seen, before, starts, deterministic=True)
    assert (actions.shape, values.shape, log_prob.shape) == ((6, 2), (6, 1), (6,))
    again, same, _ = policy.evaluate_actions(seen, actions, before, starts)
    torch.testing.assert_close((again, same), (values, log_prob))
    distribution, pi = policy.get_distribution(seen, before.pi, starts)
    torch.testing.assert_close(distribution.mode(), actions)
    torch.testing.assert_close(pi, after.pi)
    shared = policy.critic_core is None
    torch.testing.assert_close(policy.predict_values(seen, before.pi if shared else before.vf, starts), values)
    torch.testing.assert_close(policy.get_distribution(seen, before, starts)[0].mode(), actions)


@pytest.mark.parametrize("form", RECURRENT)
def test_sequences_lie_one_after_the_other_as_in_sb3_contrib(form):
    policy = recurrent(**RECURRENT[form])
    state, seen = states(policy, 2), observations(6)
    starts = torch.tensor([0.0, 0, 1, 1, 0, 0])
    whole = policy(seen, state, starts, deterministic=True)
    for t in range(3):
        rows = [t, 3 + t]
        *step, state = policy(seen[rows], state, starts[rows], deterministic=True)
        torch.testing.assert_close(step, [part[rows] for part in whole[:3]])
    torch.testing.assert_close(state, whole[3])


def test_a_recurrent_policy_acts_as_predict_does():
    policy, seen = recurrent(), observations(4)
    actions, _, _, after = policy(seen, None, None, deterministic=True)
    expected, state = policy.predict(seen.numpy(), deterministic=True)
    np.testing.assert_allclose(actions.detach().numpy(), expected, rtol=1e-5)
    for ours, theirs in zip(after.pi, state, strict=True):
        np.testing.assert_allclose(ours.detach().numpy(), theirs, rtol=1e-4, atol=1e-6)


def test_states_that_do_not_fit_the_observations_are_refused():
    policy = recurrent()
    for wrong in (states(policy, 4), RNNStates((), ()), RNNStates((torch.zeros(1, 6, 7),) * 2, ())):
        with pytest.raises(ValueError, match=r"lstm_states must be 2 tensors of shape \(1, n, 8\)"):
            policy(observations(6), wrong, torch.zeros(6))


def test_only_the_actor_learns_a_shared_lstm_as_in_sb3_contrib():
    policy = recurrent(shared_lstm=True, enable_critic_lstm=False)
    policy.predict_values(observations(4)).sum().backward()
    assert all(weight.grad is None for weight in policy.actor_core.parameters())
    state = policy.initial_state(2)
    sequence = observations(6).view(3, 2, 3)
    for predictions in (policy.evaluate(sequence, state).predictions, policy.evaluate_critics(sequence, state)):
        sum(prediction.sum() for prediction in predictions).backward()
        assert all(weight.grad is None for weight in policy.actor_core.parameters())
    both = recurrent(shared_recurrence=True)
    both.predict_values(observations(4)).sum().backward()
    assert any(weight.grad.abs().sum() > 0 for weight in both.actor_core.parameters())


@pytest.mark.parametrize(
    "sharing",
    [
        {"shared_lstm": True},
        {"shared_lstm": True, "enable_critic_lstm": True},
        {"shared_lstm": True, "enable_critic_lstm": False, "share_features_extractor": False},
    ],
    ids=str,
)
def test_contradictory_sharing_is_an_assertion_error_as_in_sb3_contrib(sharing):
    with pytest.raises(AssertionError, match="share"):
        agent("MlpLstmPolicy", policy_kwargs=sharing)


@pytest.mark.parametrize("core", ["lstm", "gru"])
def test_dropout_of_lstm_kwargs_acts_between_layers_while_training(core):
    policy = recurrent(core=core, n_lstm_layers=2, lstm_kwargs={"dropout": 0.5})
    seen = observations(8)
    assert torch.equal(policy.predict_values(seen), policy.predict_values(seen))
    policy.set_training_mode(True)
    assert not torch.equal(policy.predict_values(seen), policy.predict_values(seen))
    inputs, keep = torch.rand(3, 2, 3), torch.ones(3, 2)
    start = policy.initial_state(2).actor
    run = policy.actor_core
    assert not torch.equal(run.masked(inputs, start, keep), run.masked(inputs, start, keep))
    assert not torch.equal(run(inputs, start), run(inputs, start))
    plain = recurrent(core=core, n_lstm_layers=2)
    plain.load_state_dict(policy.state_dict())
    policy.set_training_mode(False)
    torch.testing.assert_close(plain.predict_values(seen), policy.predict_values(seen))


def test_lstm_kwargs_that_change_shapes_are_refused():
    with pytest.raises(AssertionError, match=r"lstm_kwargs has 'bidirectional': .* 'dropout' and 'bias'"):
        agent("MlpLstmPolicy", policy_kwargs={"lstm_kwargs": {"bidirectional": True}})
    with pytest.raises(ValueError, match=r"Invalid lstm_kwargs\['dropout'\]: 2"):
        agent("MlpLstmPolicy", policy_kwargs={"lstm_kwargs": {"dropout": 2}})
    with pytest.raises(ValueError, match="'lstm_kwargs', which is for recurrent policies"):
        agent("MlpPolicy", policy_kwargs={"lstm_kwargs": {"dropout": 0.5}})


@pytest.mark.parametrize("kind", [torch.optim.AdamW, RMSpropTFLike, "adam"])
def test_policy_kwargs_choose_the_optimizer(kind, tmp_path):
    options = {"weight_decay": 0.01}
    model = agent(policy_kwargs={"optimizer_class": kind, "optimizer_kwargs": options}).learn(32)
    found = model.policy.optimizer
    assert type(found) is (torch.optim.Adam if kind == "adam" else kind)
    assert model.policy.optimizer_class is type(found)
    assert model.policy.optimizer_kwargs == options
    assert found.param_groups[0]["weight_decay"] == 0.01
    model.save(tmp_path / "agent")
    loaded = DistributionalPPO.load(tmp_path / "agent", env=World(ACTIONS["box"]))
    assert type(loaded.policy.optimizer) is type(found)
    assert loaded.learn(32).policy.optimizer.param_groups[0]["weight_decay"] == 0.01


def test_widths_may_be_numbers_of_numpy_and_the_old_form_warns():
    assert agent(policy_kwargs={"net_arch": [np.int64(4)]}).policy.actor_network[0].out_features == 4
    with pytest.warns(UserWarning, match="Stable-Baselines3 before 1.8"):
        policy = agent(policy_kwargs={"net_arch": [{"vf": [8]}]}).policy
    assert len(policy.actor_network) == 0
    assert policy.critics[0].network[0].out_features == 8


def test_attributes_that_people_read():
    policy = agent("MlpLstmPolicy", policy_kwargs={"net_arch": [4], "lstm_hidden_size": 8, "n_lstm_layers": 2}).policy
    assert policy.net_arch == [4]
    assert policy.activation_fn is torch.nn.Tanh
    assert policy.features_dim == 3
    assert policy.lstm_hidden_state_shape == (2, 1, 8)
    assert policy.lstm_actor.num_layers == 2
    assert policy.pi_features_extractor is policy.vf_features_extractor
    assert policy.action_net.out_features == 2
    policy = MlpPolicy(OBSERVATIONS, ACTIONS["discrete"], share_features_extractor=False)
    assert policy.pi_features_extractor is not policy.vf_features_extractor
    assert policy.lstm_actor is None
    assert policy.lstm_critic is None


class Doubled(BaseFeaturesExtractor):
    def __init__(self, observation_space, factor=2):
        super().__init__(observation_space, 3)
        self.factor = factor

    def forward(self, seen):
        return self.factor * seen


@pytest.mark.parametrize("name", ["MlpPolicy", "MlpLstmPolicy", "MlpGruPolicy"])
def test_a_policy_is_saved_and_loaded_without_its_agent(name, tmp_path):
    model = agent(name, policy_kwargs={"activation_fn": torch.nn.ReLU, "net_arch": {"pi": [4], "vf": [np.int64(6)]}})
    model.learn(64).policy.save(tmp_path / "policy.pkl")
    loaded = type(model.policy).load(tmp_path / "policy.pkl", device="cpu")
    seen = observations(5)
    model.policy.set_training_mode(False)
    assert torch.equal(loaded.predict_values(seen), model.policy.predict_values(seen))
    np.testing.assert_array_equal(*(p.predict(seen.numpy(), deterministic=True)[0] for p in (loaded, model.policy)))
    assert loaded.state_dict().keys() == model.policy.state_dict().keys()


def test_a_loaded_policy_needs_classes_that_the_file_only_names(tmp_path):
    kwargs = {"features_extractor_class": Doubled, "features_extractor_kwargs": {"factor": 3}}
    policy = MlpPolicy(OBSERVATIONS, ACTIONS["discrete"], **kwargs)
    policy.save(tmp_path / "policy")
    with pytest.raises(CheckpointError, match=r"custom_objects={'features_extractor_class': Doubled}"):
        MlpPolicy.load(tmp_path / "policy")
    with pytest.raises(CheckpointError, match=r"not a subclass of .*BaseFeaturesExtractor"):
        MlpPolicy.load(tmp_path / "policy", custom_objects={"features_extractor_class": dict})
    loaded = MlpPolicy.load(tmp_path / "policy", custom_objects={"features_extractor_class": Doubled})
    assert loaded.features_extractor.factor == 3
    assert torch.equal(loaded.predict_values(observations(3)), policy.predict_values(observations(3)))
    trusted = MlpPolicy.load(tmp_path / "policy", trusted=[__name__])
    assert isinstance(trusted.features_extractor, Doubled)


class Wide(MlpPolicy):
    def __init__(self, observation_space, action_space, width=8, **kwargs):
        super().__init__(observation_space, action_space, **{**kwargs, "net_arch": [width]})
        self.width = width

    def _get_constructor_parameters(self):
        return {**super()._get_constructor_parameters(), "width": self.width}


def test_a_policy_class_of_ones_own_is_loaded_with_its_arguments(tmp_path):
    Wide(OBSERVATIONS, ACTIONS["box"], width=5).save(tmp_path / "policy")
    assert Wide.load(tmp_path / "policy").width == 5


def test_files_that_do_not_fit_say_so(tmp_path):
    agent().save(tmp_path / "agent.zip")
    with pytest.raises(CheckpointError, match=r"DistributionalPPO.load\(path\).policy"):
        MlpPolicy.load(tmp_path / "agent.zip")
    Wide(OBSERVATIONS, ACTIONS["box"]).save(tmp_path / "wide")
    with pytest.raises(CheckpointError, match=r"does not fit MlpPolicy: .*width"):
        MlpPolicy.load(tmp_path / "wide")
    policy = MlpLstmPolicy(OBSERVATIONS, ACTIONS["box"])
    policy._arguments["lstm_hidden_size"] = 60_000
    policy.save(tmp_path / "huge")
    with pytest.raises(CheckpointError, match="its settings and its weights differ"):
        MlpLstmPolicy.load(tmp_path / "huge")
    policy._arguments["activation_fn"] = lambda: None
    with pytest.raises(TypeError, match="activation_fn has a function, which a file cannot hold"):
        policy.save(tmp_path / "function")


@pytest.mark.parametrize("space", ACTIONS)
@pytest.mark.parametrize("policy", ["MlpPolicy", "MlpLstmPolicy"])
def test_actions_are_arrays_of_the_space(policy, space):
    model = agent(policy, space)
    model.learn(1)
    for deterministic in (True, False):
        action, _ = model.predict(observations(1)[0].numpy(), deterministic=deterministic)
        assert isinstance(action, np.ndarray)
        assert action.shape == ACTIONS[space].shape
        assert action.dtype == ACTIONS[space].dtype
        assert ACTIONS[space].contains(action)
        actions, _ = model.predict(observations(7).numpy(), deterministic=deterministic)
        assert actions.shape == (7, *ACTIONS[space].shape)
        assert actions.dtype == ACTIONS[space].dtype


def test_one_discrete_observation_gives_one_action():
    model = DistributionalPPO("MlpPolicy", World(ACTIONS["discrete"], spaces.Discrete(5)), n_steps=32)
    for seen in (3, np.int64(3), np.array(3)):
        action, _ = model.predict(seen)
        assert isinstance(action, np.ndarray)
        assert action.shape == ()
    assert model.predict(np.array([1, 2, 3]))[0].shape == (3,)


def test_what_reset_returns_is_not_an_observation():
    model = agent()
    with pytest.raises(ValueError, match="mixing Gym API"):
        model.predict(World(ACTIONS["box"]).reset())


@pytest.mark.parametrize(
    "space",
    [spaces.Tuple((OBSERVATIONS, OBSERVATIONS)), spaces.Dict({"a": spaces.Dict({"b": OBSERVATIONS})})],
    ids=["tuple", "nested dict"],
)
def test_observations_in_parts_of_parts_are_not_implemented(space):
    with pytest.raises(NotImplementedError, match="FlattenObservation"):
        DistributionalPPO("MultiInputPolicy", World(ACTIONS["box"], space))
    flat = gym.wrappers.FlattenObservation(World(ACTIONS["box"], space))
    DistributionalPPO("MlpPolicy", flat, n_steps=16).learn(16)


def test_unbounded_actions_are_an_assertion_error_that_says_what_to_do():
    env = World(spaces.Box(-np.inf, np.inf, (2,)))
    with pytest.raises(AssertionError, match=r"must be finite; give it some, gymnasium\.wrappers\.TransformAction"):
        DistributionalPPO("MlpPolicy", env)
    bounded = gym.wrappers.TransformAction(env, lambda action: action, spaces.Box(-1, 1, env.action_space.shape))
    DistributionalPPO("MlpPolicy", bounded, n_steps=16).learn(16)


def test_policies_without_memory_carry_no_states():
    policy = MlpPolicy(OBSERVATIONS, ACTIONS["box"])
    assert len(policy(observations(3))) == 3
    assert not isinstance(policy.get_distribution(observations(3)), tuple)
    assert issubclass(MlpPolicy, DistributionalPolicy)


def test_files_in_which_shared_lstm_meant_learning_together_still_do(tmp_path):
    model = agent("MlpLstmPolicy", policy_kwargs={"shared_recurrence": True, "lstm_hidden_size": 8})
    config = model.config()
    del config["settings"]["policy_kwargs"]["shared_recurrence"]
    config["settings"]["policy_kwargs"]["shared_lstm"] = True
    write(tmp_path / "earlier.zip", model.state_tree(), config=config)
    loaded = DistributionalPPO.load(tmp_path / "earlier.zip")
    assert loaded.policy_kwargs["shared_recurrence"]
    loaded.policy.predict_values(observations(4)).sum().backward()
    assert any(weight.grad.abs().sum() > 0 for weight in loaded.policy.actor_core.parameters())
