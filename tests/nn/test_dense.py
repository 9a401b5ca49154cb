"""Dense networks differentiated by formulas, against autograd."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from driftproof.adversarial import PerturbationConfig, SAPPOConfig
from driftproof.nn.dense import dense_networks
from driftproof.nn.policies import CnnLstmPolicy, CnnPolicy, MlpGruPolicy, MlpLstmPolicy, MlpPolicy
from driftproof.ppo import DistributionalPPO

BOX = spaces.Box(-1, 1, (2, 3), np.float32)
ACTIONS = {"discrete": spaces.Discrete(4), "continuous": spaces.Box(-1, 1, (2,), np.float32)}


def gradients(policy, loss):
    policy.zero_grad()
    loss.backward()
    return {name: p.grad for name, p in policy.named_parameters()}


@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU])
@pytest.mark.parametrize("actions", ACTIONS)
@pytest.mark.parametrize("layer_norm", [False, True])
def test_outputs_and_gradients_are_those_of_autograd(actions, activation, layer_norm):
    torch.manual_seed(0)
    kwargs = {"net_arch": {"pi": [8, 16, 8], "vf": [16]}, "activation_fn": activation, "ortho_init": False}
    policy = MlpPolicy(BOX, ACTIONS[actions], layer_norm=layer_norm, **kwargs)
    check_against_autograd(policy, torch.rand(2, 5, 2, 3))


def check_against_autograd(policy, *given):
    def loss(evaluation):
        return evaluation.parameters.square().sum() + sum(p.exp().mean() for p in evaluation.predictions)

    given = *given, policy.initial_state(5)
    expected = policy.evaluate(*given)
    wanted = gradients(policy, loss(expected))
    policy.zero_grad()
    networks = policy.dense_networks()
    actual = policy.evaluate_dense(networks, *given)
    loss(actual).backward()
    places = {id(p): torch.full_like(p, torch.nan) for p in policy.actor_network.parameters()}
    networks.backward(places)
    torch.testing.assert_close(actual.parameters, expected.parameters)
    torch.testing.assert_close(actual.predictions, expected.predictions)
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-4, atol=1e-6, msg=name)
    for parameter in policy.actor_network.parameters():
        assert parameter.grad is places[id(parameter)]


@pytest.mark.parametrize(
    ("kind", "kwargs"),
    [
        (MlpLstmPolicy, {}),
        (MlpLstmPolicy, {"layer_norm": False}),
        (MlpGruPolicy, {"shared_recurrence": True, "net_arch": {"pi": [], "vf": [8]}}),
        (MlpLstmPolicy, {"shared_lstm": True, "enable_critic_lstm": False}),
        (MlpLstmPolicy, {"enable_critic_lstm": False, "net_arch": []}),
        (CnnPolicy, {"share_features_extractor": False}),
        (CnnLstmPolicy, {"twin_critics": False}),
    ],
)
def test_gradients_reach_what_comes_before_dense_layers(kind, kwargs):
    """Recurrent cores and features extractors, which actor and critics share or have of their own."""
    torch.manual_seed(0)
    is_image = issubclass(kind, CnnPolicy | CnnLstmPolicy)
    space = spaces.Box(0, 255, (3, 36, 36), np.uint8) if is_image else BOX
    policy = kind(space, ACTIONS["discrete"], **{"layer_norm": True, "lstm_hidden_size": 8, "net_arch": [8], **kwargs})
    shape = (2, 5, *space.shape)
    check_against_autograd(policy, torch.randint(0, 255, shape, dtype=torch.uint8) if is_image else torch.rand(shape))


def test_gradients_are_added_to_what_autograd_found_before():
    layer = nn.Linear(3, 2)
    networks = dense_networks([[layer]])
    (output,) = networks([torch.ones(4, 3)])
    (output.sum() + 5 * layer.bias.sum()).backward()
    networks.backward({})
    assert layer.bias.grad.tolist() == [9.0, 9.0]


@pytest.mark.parametrize("layer_norm", [False, True])
def test_networks_that_are_no_part_of_the_loss_get_no_gradient(layer_norm):
    torch.manual_seed(0)
    policy = MlpPolicy(BOX, ACTIONS["discrete"], layer_norm=layer_norm, net_arch=[8])
    networks = policy.dense_networks()
    evaluation = policy.evaluate_dense(networks, torch.rand(2, 5, 2, 3), policy.initial_state(5))
    evaluation.predictions[1].square().sum().backward()
    networks.backward({})
    with_gradient = {name for name, parameter in policy.named_parameters() if parameter.grad is not None}
    assert with_gradient == {name for name, _ in policy.named_parameters() if name.startswith("critics.1.")}


def test_saturated_tanh_and_nan():
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    with torch.no_grad():
        for layer in (first, second):
            layer.weight.fill_(1)
            layer.bias.zero_()
    inputs = torch.tensor([[-200.0], [200.0], [0.0], [torch.nan]])
    (output,) = dense_networks([[first, nn.Tanh(), second]])([inputs])
    assert output[:3, 0].tolist() == [-1.0, 1.0, 0.0]
    assert output[3].isnan()


def frozen(policy):
    policy.action_head.weight.requires_grad_(False)


def watched(policy):
    policy.critics[0].head.register_forward_hook(lambda *_: None)


def watched_parameter(policy):
    policy.action_head.weight.register_hook(lambda gradient: gradient)


def tied(policy):
    policy.critics[1].network[0].weight = policy.critics[0].network[0].weight


def other_layers(policy):
    policy.actor_network[1] = nn.ELU()


@pytest.mark.parametrize("change", [frozen, watched, watched_parameter, tied, other_layers])
def test_autograd_where_there_is_more_than_dense_layers(change):
    policy = MlpPolicy(BOX, ACTIONS["discrete"])
    assert policy.dense_networks() is not None
    change(policy)
    assert policy.dense_networks() is None


def test_autograd_for_exploration_matrices_and_overridden_methods():
    class Mine(MlpPolicy):
        def predict_returns(self, memory):
            return super().predict_returns(memory)

    box = ACTIONS["continuous"]
    others = [MlpLstmPolicy(BOX, box, use_sde=True), MlpPolicy(BOX, box, use_sde=True), Mine(BOX, box)]
    assert [policy.dense_networks() for policy in others] == [None] * 3


def test_autograd_for_layer_normalisation_of_another_kind():
    def network(*norms):
        return [nn.Linear(3, 4), *norms, nn.Tanh(), nn.Linear(4, 2)]

    plain = nn.LayerNorm(4, elementwise_affine=False)
    assert dense_networks([network(plain), network(plain)]) is not None
    for other in (nn.LayerNorm(4), nn.LayerNorm(4, 1e-3, elementwise_affine=False)):
        assert dense_networks([network(plain), network(other)]) is None
    assert dense_networks([network(plain), network()]) is None
    assert dense_networks([[nn.LayerNorm(3), *network()]]) is None


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"ent_coef": 0.01},
        {"clip_range_vf": 0.2, "kl_penalty": True, "target_kl": 0.01},
        {"adversarial": SAPPOConfig(robust_kl_coef=0.5, perturbation=PerturbationConfig(epsilon=0.1))},
    ],
    ids=["usual", "entropy", "other terms", "adversary"],
)
@pytest.mark.parametrize("policy", ["MlpPolicy", "MlpLstmPolicy"])
def test_agents_learn_as_with_autograd(policy, arguments):
    weights = []
    for uses_autograd in (False, True):
        env = gym.make("CartPole-v1")
        agent = DistributionalPPO(policy, env, n_steps=64, batch_size=16, n_epochs=2, seed=0, **arguments)
        if uses_autograd:
            agent.policy.register_forward_hook(lambda *_: None)
        agent.learn(128)
        weights.append(torch.nn.utils.parameters_to_vector(agent.policy.parameters()))
    assert not torch.equal(*weights)  # They round differently: two ways were taken.
    torch.testing.assert_close(*weights, rtol=1e-3, atol=1e-5)
