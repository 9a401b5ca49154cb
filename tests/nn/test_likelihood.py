"""Derivatives of log-probability, entropy and distance from exploration by formula, against autograd."""

import pytest
import torch
from gymnasium import spaces

from driftproof.nn.distributions import Categorical
from driftproof.nn.likelihood import AutogradLikelihood, ChoiceLikelihood


@pytest.mark.parametrize("coefficients", [(0.0, 0.0), (-0.1, 0.0), (0.0, 0.3), (torch.tensor(-0.1), torch.tensor(0.3))])
@pytest.mark.parametrize("is_leaf", [True, False])
def test_gradients_of_one_choice_are_those_of_autograd(coefficients, is_leaf):
    torch.manual_seed(0)
    distribution, spread = Categorical(spaces.Discrete(5)), torch.tensor(3.0, requires_grad=True)
    actions, of_log_prob = torch.randint(5, (2, 7)), torch.randn(2, 7)
    leaves, results = [], []
    numbers = torch.randn(2, 7, 5)
    for exact in (True, False):
        spread.grad = None
        leaf = numbers.clone().requires_grad_()
        parameters = leaf if is_leaf else leaf * spread
        if exact:
            likelihood = AutogradLikelihood(distribution, parameters, actions)
        else:
            likelihood = distribution.likelihood(parameters, actions)
            assert isinstance(likelihood, ChoiceLikelihood)
        entropy, divergence = coefficients
        mean = likelihood.uniform_divergence() if divergence else torch.zeros(())
        likelihood.backward(of_log_prob, entropy, divergence)
        leaves.append(leaf.grad)
        results.append((likelihood.log_prob, likelihood.entropy, mean, spread.grad))
    torch.testing.assert_close(*leaves)
    torch.testing.assert_close(*results)
    assert leaves[0].abs().max() > 0


def test_gradients_are_added_to_those_that_parameters_have():
    parameters = torch.zeros(3, 2, requires_grad=True)
    (parameters.sum() * 5).backward()
    likelihood = ChoiceLikelihood(parameters, torch.tensor([0, 1, 1]))
    likelihood.backward(torch.ones(3), 0.0, 0.0)
    assert parameters.grad.tolist() == [[5.5, 4.5], [4.5, 5.5], [4.5, 5.5]]
