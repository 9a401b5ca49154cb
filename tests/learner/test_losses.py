"""Losses in their fast forms against the formulas as they are written in papers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from gymnasium import spaces

from driftproof.learner.losses import policy_loss
from driftproof.nn.distributions import distribution_for
from driftproof.nn.heads import QuantileHead


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
