"""Losses in their fast forms against the formulas as they are written in papers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gymnasium import spaces

from driftproof.learner.direct import direct_losses
from driftproof.learner.losses import Coefficients, policy_loss, ppo_losses
from driftproof.learner.rollout import Minibatch
from driftproof.nn.distributions import distribution_for
from driftproof.nn.heads import QuantileHead
from driftproof.nn.types import Evaluation, PolicyState


def with_gradient(function, *inputs):
    inputs = [x.clone().requires_grad_() for x in inputs]
    value = function(*inputs)
    return value, torch.autograd.grad(value.sum(), inputs)


def test_the_policy_loss_is_the_smaller_of_two_surrogates():
    torch.manual_seed(0)
    log_ratio, advantages = torch.randn(500) / 3, torch.randn(500)
    advantages[:5] = 0

    def textbook(log_ratio):
        ratio = log_ratio.exp()
        return -torch.minimum(advantages * ratio, advantages * ratio.clamp(0.8, 1.2))

    expected = with_gradient(textbook, log_ratio)
    torch.testing.assert_close(with_gradient(lambda x: policy_loss(x, advantages, 0.2).loss, log_ratio), expected)
    assert (expected[1][0] == 0).any()
    assert (expected[1][0] != 0).any()


@pytest.mark.parametrize("count", [1, 7])
def test_the_quantile_loss_is_the_tilted_huber_loss(count):
    torch.manual_seed(0)
    head = QuantileHead(4, count, huber_kappa=0.3)
    prediction, target = torch.randn(5, 6, count), torch.randn(5, 6)

    def textbook(prediction):
        error = target.unsqueeze(-1) - prediction
        huber = F.huber_loss(error, torch.zeros_like(error), reduction="none", delta=0.3)
        return ((head.levels - (error < 0).float()).abs() * huber / 0.3).mean(-1)

    expected = with_gradient(textbook, prediction)
    torch.testing.assert_close(
        with_gradient(lambda x: head.loss(x, target), prediction), expected, rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize(
    "space", [spaces.Discrete(3), spaces.MultiDiscrete([2, 4]), spaces.MultiBinary(3), spaces.Box(-1, 1, (2,))], ids=str
)
def test_log_probability_and_entropy_together_are_what_they_are_apart(space):
    torch.manual_seed(0)
    distribution = distribution_for(space)
    parameters = torch.randn(5, distribution.size)
    actions = distribution.sample(parameters, distribution.noise(5))
    log_probs, entropies = distribution.log_prob_and_entropy(parameters, actions)
    torch.testing.assert_close(log_probs, distribution.log_prob(parameters, actions), rtol=0, atol=0)
    torch.testing.assert_close(entropies, distribution.entropy(parameters), rtol=0, atol=0)


@pytest.mark.parametrize("floor", [0.0, 0.3])
@pytest.mark.parametrize("ent_coef", [0.0, 0.01, torch.tensor(0.02)])
@pytest.mark.parametrize("space", [spaces.Discrete(3), spaces.Box(-1, 1, (2,), np.float32)])
def test_gradients_by_formula_are_those_of_autograd(space, ent_coef, floor):
    torch.manual_seed(0)
    distribution, head, samples = distribution_for(space), QuantileHead(4, 5, huber_kappa=0.5), 200
    old = torch.randn(1, samples, distribution.size)
    actions = distribution.sample(old, distribution.noise(1, samples))
    parameters = (old + 0.5 * torch.randn_like(old)).requires_grad_()
    predictions = tuple(torch.randn(1, samples, 5, requires_grad=True) for _ in range(2))
    log_probs = distribution.log_prob(old, actions)
    advantages, targets = torch.randn(1, samples), torch.randn(1, samples)
    batch = Minibatch(
        *(torch.empty(0), actions, old, log_probs, advantages, targets, (), None),
        *(PolicyState((), ()), None, None),
    )
    c = Coefficients(0.2, 0.0, ent_coef, 0.7, 0.0, 0.5, floor)
    results = []
    for function in (ppo_losses, direct_losses):
        evaluation = Evaluation(parameters, predictions)
        loss, metrics = function(distribution, head, evaluation, batch, c, exploration_floor=floor > 0)
        if function is ppo_losses:
            loss.backward()
        results.append([{"loss": loss, **metrics}, [t.grad for t in (parameters, *predictions)]])
        parameters.grad = predictions[0].grad = predictions[1].grad = None
    (expected, wanted), (actual, gradients) = results
    assert 0 < expected["clip_fraction"] < 1
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name].detach(), msg=name)
    torch.testing.assert_close(gradients, wanted)
