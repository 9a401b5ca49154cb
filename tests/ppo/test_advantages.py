"""Advantages: against a loop over each environment, at the ends of episodes, and normalised."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from driftproof.learner.advantages import explained_variance, gae, normalize_advantages


def plain_gae(rewards, values, last_value, dones, bootstraps, valid, gamma, gae_lambda):
    """One environment, from its last step to its first, in double precision."""
    advantages, running, next_value = [], 0.0, last_value
    for t in reversed(range(len(rewards))):
        if dones[t]:
            running, next_value = 0.0, bootstraps[t]
        running = rewards[t] + gamma * next_value - values[t] + gamma * gae_lambda * running
        if not valid[t]:
            running = 0.0
        advantages.append(running)
        next_value = values[t]
    return advantages[::-1]


def a_rollout(steps, envs, seed=0, p_done=0.2, p_truncated=0.5, junk=True):
    """Episodes as an environment makes them that resets itself in the step after an episode."""
    generator = torch.Generator().manual_seed(seed)

    def draw():
        return torch.randn(steps, envs, generator=generator)

    def chance(p):
        return torch.rand(steps, envs, generator=generator) < p

    dones, truncated, valid = chance(p_done), chance(p_truncated), torch.ones(steps, envs, dtype=torch.bool)
    if junk:
        for t in range(1, steps):
            valid[t] = ~(dones[t - 1] & valid[t - 1])
            dones[t] &= valid[t]
    return {
        "rewards": draw(),
        "values": draw(),
        "last_values": torch.randn(envs, generator=generator),
        "dones": dones,
        "bootstrap_values": torch.where(dones & truncated, draw(), 0),
        "valid": valid,
    }


def plain_gae_of(rollout, gamma, gae_lambda):
    columns = [
        plain_gae(
            rollout["rewards"][:, n].tolist(),
            rollout["values"][:, n].tolist(),
            rollout["last_values"][n].item(),
            rollout["dones"][:, n].tolist(),
            rollout["bootstrap_values"][:, n].tolist(),
            rollout["valid"][:, n].tolist(),
            gamma,
            gae_lambda,
        )
        for n in range(rollout["rewards"].shape[1])
    ]
    return torch.tensor(columns, dtype=torch.float64).T


class TestGAE:
    @given(
        steps=st.integers(1, 40),
        envs=st.integers(1, 4),
        seed=st.integers(0, 1000),
        gamma=st.floats(0, 1),
        gae_lambda=st.floats(0, 1),
        p_done=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
        junk=st.booleans(),
    )
    def test_equals_the_loop_over_each_environment(self, steps, envs, seed, gamma, gae_lambda, p_done, junk):
        rollout = a_rollout(steps, envs, seed, p_done, junk=junk)
        advantages, returns = gae(**rollout, gamma=gamma, gae_lambda=gae_lambda)
        expected = plain_gae_of(rollout, gamma, gae_lambda)
        torch.testing.assert_close(advantages.double(), expected, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(returns, advantages + rollout["values"])

    def test_long_rollouts_keep_their_precision(self):
        rollout = a_rollout(2048, 8, p_done=0.005)
        advantages, _ = gae(**rollout, gamma=0.99, gae_lambda=0.95)
        torch.testing.assert_close(advantages.double(), plain_gae_of(rollout, 0.99, 0.95), rtol=1e-5, atol=2e-5)

    def test_identifiable_rewards_are_summed_within_their_episode(self):
        # The reward is step * 10 + environment; environment n ends an episode after n + 1 steps, then never again.
        steps, envs = 5, 3
        rewards = torch.arange(steps).unsqueeze(1) * 10.0 + torch.arange(envs)
        dones = torch.zeros(steps, envs, dtype=torch.bool)
        for n in range(envs):
            dones[n, n] = True
        zeros = torch.zeros(steps, envs)
        advantages, returns = gae(rewards, zeros, torch.zeros(envs), dones, zeros, gamma=1.0, gae_lambda=1.0)
        assert advantages.T.tolist() == [
            [0, 100, 90, 70, 40],
            [1 + 11, 11, 21 + 31 + 41, 31 + 41, 41],
            [2 + 12 + 22, 12 + 22, 22, 32 + 42, 42],
        ]
        assert torch.equal(returns, advantages)

    def test_a_time_limit_bootstraps_and_a_termination_does_not(self):
        rewards, values = torch.ones(2, 2), torch.zeros(2, 2)
        dones = torch.tensor([[True, True], [False, False]])
        bootstraps = torch.tensor([[100.0, 0.0], [0.0, 0.0]])
        advantages, _ = gae(rewards, values, torch.full((2,), 7.0), dones, bootstraps, gamma=0.5, gae_lambda=1.0)
        assert advantages.tolist() == [[1 + 50, 1], [1 + 3.5, 1 + 3.5]]

    @given(seed=st.integers(0, 1000), end=st.integers(0, 10))
    def test_nothing_leaks_over_the_end_of_an_episode(self, seed, end):
        rollout = a_rollout(12, 2, seed, p_done=0.0)
        rollout["dones"][end, 0] = True
        before = gae(**rollout, gamma=0.99, gae_lambda=0.95)
        for name in ("rewards", "values"):
            rollout[name][end + 1 :, 0] += 1e6
        rollout["last_values"][0] += 1e6
        after = gae(**rollout, gamma=0.99, gae_lambda=0.95)
        for one, other in zip(before, after, strict=True):
            assert torch.equal(one[: end + 1, 0], other[: end + 1, 0])
            assert torch.equal(one[:, 1], other[:, 1])

    def test_junk_is_isolated_whatever_it_holds(self):
        rollout = a_rollout(30, 4)
        junk = ~rollout["valid"]
        assert junk.sum() > 5
        before, _ = gae(**rollout, gamma=0.99, gae_lambda=0.95)
        for name in ("rewards", "values", "bootstrap_values"):
            rollout[name][junk] = 1e6
        rollout["dones"] |= junk
        after, returns = gae(**rollout, gamma=0.99, gae_lambda=0.95)
        assert torch.equal(before, after)
        assert (after[junk] == 0).all()
        assert returns.isfinite().all()

    def test_bootstrap_values_are_ignored_inside_episodes(self):
        rollout = a_rollout(20, 3)
        before, _ = gae(**rollout, gamma=0.99, gae_lambda=0.95)
        rollout["bootstrap_values"][~rollout["dones"]] = math.nan
        after, _ = gae(**rollout, gamma=0.99, gae_lambda=0.95)
        assert torch.equal(before, after)

    def test_without_a_mask_everything_is_valid(self):
        rollout = a_rollout(9, 2, junk=False)
        del rollout["valid"]
        everything = torch.ones(9, 2, dtype=torch.bool)
        with_mask = gae(**rollout, gamma=0.99, gae_lambda=0.95, valid=everything)
        for one, other in zip(gae(**rollout, gamma=0.99, gae_lambda=0.95), with_mask, strict=True):
            assert torch.equal(one, other)

    def test_arguments_are_left_alone_and_results_carry_no_graph(self):
        rollout = a_rollout(9, 2)
        copies = {name: tensor.clone() for name, tensor in rollout.items()}
        rollout["values"].requires_grad_()
        advantages, returns = gae(**rollout, gamma=0.99, gae_lambda=0.95)
        assert not advantages.requires_grad
        assert not returns.requires_grad
        assert all(torch.equal(tensor, copies[name]) for name, tensor in rollout.items())

    @pytest.mark.parametrize("name", ["values", "last_values", "dones", "bootstrap_values", "valid"])
    def test_a_wrong_shape_is_named(self, name):
        rollout = a_rollout(4, 2)
        rollout[name] = rollout[name][..., :1]
        with pytest.raises(ValueError, match=rf"^{name} has shape"):
            gae(**rollout, gamma=0.99, gae_lambda=0.95)


def plain_moments(numbers, correction=0):
    mean = math.fsum(numbers) / len(numbers)
    return mean, math.fsum((x - mean) ** 2 for x in numbers) / max(len(numbers) - correction, 1)


class TestNormalization:
    @given(
        seed=st.integers(0, 1000),
        steps=st.integers(1, 20),
        scale=st.sampled_from([1e-4, 1.0, 1e4]),
        shift=st.sampled_from([0.0, -3.0, 50.0]),
        share=st.sampled_from([0.3, 1.0]),
    )
    def test_equals_the_formula_on_valid_samples(self, seed, steps, scale, shift, share):
        generator = torch.Generator().manual_seed(seed)
        advantages = scale * (torch.randn(steps, 3, generator=generator) + shift)
        valid = torch.rand(steps, 3, generator=generator) < share
        normalised = normalize_advantages(torch.where(valid, advantages, math.nan), valid)
        assert (normalised[~valid] == 0).all()
        numbers = advantages[valid].tolist()
        if len(numbers) < 2:
            assert (normalised == 0).all()
            return
        mean, variance = plain_moments(numbers, correction=1)
        expected = [(x - mean) / (math.sqrt(variance) + 1e-8) for x in numbers]
        torch.testing.assert_close(normalised[valid], torch.tensor(expected), rtol=1e-3, atol=1e-3)

    @given(level=st.floats(-1e6, 1e6, width=32), count=st.integers(1, 50))
    def test_equal_advantages_are_centred_only(self, level, count):
        normalised = normalize_advantages(torch.full((count, 3), level))
        assert (normalised.abs() <= 1e-6 * abs(level)).all()

    def test_nothing_valid(self):
        assert (normalize_advantages(torch.ones(3, 2), torch.zeros(3, 2, dtype=torch.bool)) == 0).all()

    def test_eps_bounds_the_result(self):
        advantages = torch.tensor([[1e-4, -1e-4]])
        assert normalize_advantages(advantages, eps=1.0).abs().max() < 1.1e-4

    def test_a_mask_of_another_shape_is_refused(self):
        with pytest.raises(ValueError, match=r"^valid has shape"):
            normalize_advantages(torch.ones(3, 2), torch.ones(3, dtype=torch.bool))


class TestExplainedVariance:
    @given(seed=st.integers(0, 1000), quality=st.sampled_from([0.0, 0.5, 1.0, -1.0]))
    def test_equals_the_formula_on_valid_samples(self, seed, quality):
        generator = torch.Generator().manual_seed(seed)
        returns = 5 + torch.randn(8, 3, generator=generator)
        values = quality * returns + 0.1 * torch.randn(8, 3, generator=generator)
        valid = torch.rand(8, 3, generator=generator) < 0.7
        residuals = [r - v for r, v in zip(returns[valid].tolist(), values[valid].tolist(), strict=True)]
        expected = 1 - plain_moments(residuals)[1] / plain_moments(returns[valid].tolist())[1]
        result = explained_variance(values, torch.where(valid, returns, math.nan), valid)
        assert result.shape == ()
        assert result.item() == pytest.approx(expected, rel=1e-4, abs=1e-4)

    @pytest.mark.parametrize("level", [0.0, 0.1, 1e6])
    def test_equal_returns_explain_nothing(self, level):
        assert explained_variance(torch.randn(50, 3), torch.full((50, 3), level)).item() == 0

    def test_perfect_values_explain_everything(self):
        returns = torch.randn(5, 2)
        assert explained_variance(returns, returns).item() == 1


def test_nothing_waits_for_the_device():
    rollout = {name: tensor.to("meta") for name, tensor in a_rollout(9, 2).items()}
    advantages, returns = gae(**rollout, gamma=0.99, gae_lambda=torch.tensor(0.95))
    normalize_advantages(advantages, rollout["valid"])
    explained_variance(rollout["values"], returns, rollout["valid"])
    with pytest.raises(RuntimeError, match="meta"):
        advantages.sum().item()
