"""State-dependent exploration: Stable-Baselines3's distribution for the same weights, and noise that is correlated."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.policies import ActorCriticPolicy

from driftproof.nn.exploration import StateDependentExploration
from driftproof.nn.policies import MlpPolicy

OBSERVATIONS = spaces.Box(-1, 1, (5,), np.float32)
ACTIONS = spaces.Box(-1, 1, (3,), np.float32)
SEEN = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))


def pair(seed=0, **settings):
    """Stable-Baselines3's policy and ours, with the same weights."""
    torch.manual_seed(seed)
    settings = {"net_arch": [16, 8], "use_sde": True, **settings}
    theirs = ActorCriticPolicy(OBSERVATIONS, ACTIONS, lambda _: 1e-3, **settings)
    ours = MlpPolicy(OBSERVATIONS, ACTIONS, **settings)
    with torch.no_grad():
        # Standard deviations below and above 1, where use_expln makes a difference.
        theirs.log_std.add_(torch.randn_like(theirs.log_std))
        theirs.action_net.weight.mul_(50)
        for own, given in zip(layers(ours), layers(theirs), strict=True):
            own.copy_(given)
    return ours, theirs


def layers(policy):
    """The actor's parameters in one order."""
    if isinstance(policy, MlpPolicy):
        return [*policy.actor_network.parameters(), *policy.action_head.parameters(), policy.log_std]
    return [*policy.mlp_extractor.policy_net.parameters(), *policy.action_net.parameters(), policy.log_std]


def evaluated(policy, actions):
    """Log-probabilities and entropies of our policy, as Stable-Baselines3's tells them."""
    parameters = policy.evaluate_actor(SEEN.unsqueeze(0), policy.initial_state(len(SEEN))).squeeze(0)
    return policy.distribution.log_prob(parameters, actions), policy.distribution.entropy(parameters)


VARIANTS = pytest.mark.parametrize(
    "variant",
    [{}, {"full_std": False}, {"use_expln": True}, {"full_std": False, "use_expln": True}],
    ids=["full", "by feature", "expln", "by feature, expln"],
)


@VARIANTS
@pytest.mark.parametrize("log_std_init", [0.0, -2.0])
def test_log_probabilities_entropies_and_gradients_are_stable_baselines3s(variant, log_std_init):
    ours, theirs = pair(log_std_init=log_std_init, **variant)
    actions = torch.randn(7, 3)
    gradients = []
    for policy in (ours, theirs):
        log_prob, entropy = evaluated(ours, actions) if policy is ours else theirs.evaluate_actions(SEEN, actions)[1:]
        gradients.append(
            (
                log_prob.detach(),
                entropy.detach(),
                *torch.autograd.grad(log_prob.mean() + 0.3 * entropy.mean(), layers(policy)),
            )
        )
    for own, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-5)
    assert gradients[0][-1].abs().max() > 0.01


@VARIANTS
def test_squashed_log_probabilities_are_stable_baselines3s(variant):
    ours, theirs = pair(log_std_init=-1.0, squash_output=True, **variant)
    before = torch.rand(7, 3) * 3 - 1.5
    own, _ = evaluated(ours, before)
    _, expected, _ = theirs.evaluate_actions(SEEN, before.tanh())
    # They add 1e-6 to the slope of the tangent.
    torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-4)


@VARIANTS
@pytest.mark.parametrize("squash_output", [False, True])
def test_actions_are_stable_baselines3s_for_the_same_matrices(variant, squash_output):
    ours, theirs = pair(log_std_init=-2.0, squash_output=squash_output, **variant)
    theirs.reset_noise(len(SEEN))
    std = theirs.action_dist.get_std(theirs.log_std)
    ours.exploration.put_in_force((theirs.action_dist.exploration_matrices / std).detach())
    expected, _ = theirs.predict(SEEN.numpy())
    own, _ = ours.predict(SEEN.numpy())
    np.testing.assert_allclose(own, expected, rtol=1e-4, atol=1e-5)


def noise_of(exploration, log_std, latent):
    return exploration.noise(latent, log_std, exploration.log_std(latent, log_std).expand(len(latent), exploration.dim))


@pytest.mark.parametrize("full_std", [False, True])
def test_noise_is_standard_normal_at_every_state_and_correlated_as_states_are(full_std):
    torch.manual_seed(0)
    draws, exploration = 40_000, StateDependentExploration(3, 2, full_std)
    log_std = exploration.initial_log_std(0.0) + torch.tensor([[-1.0], [0.0], [0.5]])
    first, second = torch.tensor([1.0, -0.5, 0.2]), torch.tensor([0.9, -0.4, 0.5])
    exploration.draw(draws)
    now, later, again = (noise_of(exploration, log_std, s.expand(draws, 3)) for s in (first, second, first))
    assert torch.equal(now, again)
    weights = log_std[:, 0].exp() * torch.stack((first, second))
    correlation = torch.nn.functional.cosine_similarity(*weights, dim=0)
    assert 0.5 < correlation < 0.95
    for noise in (now, later):
        assert noise.mean(0).abs().max() < 5 / math.sqrt(draws)
        torch.testing.assert_close(noise.std(0), torch.ones(2), atol=0.02, rtol=0)
    torch.testing.assert_close((now * later).mean(0), correlation.expand(2), atol=0.03, rtol=0)
    # One number of an action says nothing of the other.
    assert (now[:, 0] * now[:, 1]).mean().abs() < 5 / math.sqrt(draws)


def test_states_without_features_have_finite_gradients():
    exploration = StateDependentExploration(3, 2, use_expln=True)
    log_std = torch.tensor([[-90.0, 90.0]]).repeat(3, 1).requires_grad_()
    spread = exploration.log_std(torch.zeros(4, 3), log_std)
    spread.sum().backward()
    assert spread.isfinite().all()
    assert log_std.grad.isfinite().all()


@pytest.mark.parametrize(
    "matrices",
    [torch.zeros(3, 2), torch.zeros(1, 2, 3), torch.zeros(0, 3, 2), torch.full((1, 3, 2), math.nan), "weights"],
)
def test_matrices_that_do_not_fit_are_refused(matrices):
    exploration = StateDependentExploration(3, 2)
    before = exploration.matrices.clone()
    with pytest.raises(ValueError, match="exploration matrices must"):
        exploration.put_in_force(matrices)
    assert torch.equal(exploration.matrices, before)
