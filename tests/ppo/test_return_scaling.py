"""The scale of returns through ``learn()``: when it is set, what it normalises, and that rescaling changes no value."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from .scripted import StepSpy, agent, identities, learn, plain_gae, scripted

LENGTHS = ([3], [5, 1], [20])
SHIFTS = [(1.0, 0.0), (1.0, 1e4), (1e-4, 0.0), (1e3, -5e5)]


def drifting(factor=1.0, shift=0.0, truncated=False):
    """Rewards that grow from rollout to rollout, so that the scale has to follow."""
    return scripted(
        *LENGTHS, truncated=truncated, reward=lambda t, i, _: shift + factor * (1 + t // 8) * math.sin(3 * t + i)
    )


class Returns:
    """Returns ``[T, N]`` of every update, from what the rollout holds and GAE by hand."""

    def __init__(self, model):
        self.gamma, self.gae_lambda = model.gamma, model.gae_lambda
        self.each = []

    def __call__(self, model):
        rollout = model._rollout
        mean, std = (float(x) for x in model.return_scale.snapshot)

        def value(predictions):
            means = [p.double().mean(-1) for p in predictions]
            return mean + std * (torch.minimum(*means) if len(means) == 2 else means[0])

        values, last, ends = value(rollout.predictions), value(rollout.last_predictions), value(rollout.bootstraps)
        columns = []
        for n in range(rollout.envs):
            end_values = np.where(rollout.truncated[:, n], ends[:, n], 0).tolist()
            columns.append(
                plain_gae(
                    rollout.rewards[:, n].tolist(),
                    values[:, n].tolist(),
                    last[n].item(),
                    rollout.dones[:, n].tolist(),
                    end_values,
                    self.gamma,
                    self.gae_lambda,
                )
            )
        self.each.append(torch.tensor(columns, dtype=torch.float64).T + values)


def scale_numbers(scale):
    return float(scale.mean), float(scale.std)


def test_is_set_by_the_first_rollout_before_the_first_step(monkeypatch):
    model = agent(drifting(shift=50.0), n_epochs=2)
    assert scale_numbers(model.return_scale.snapshot) == (0, 1)
    assert not model.return_scale.initialised
    seen = []
    StepSpy(monkeypatch, before=lambda *_: seen.append(scale_numbers(model.return_scale.snapshot)))
    returns = Returns(model)
    learn(model, before=returns)
    expected = returns.each[0].mean().item(), returns.each[0].std(correction=0).item()
    assert seen == [pytest.approx(expected, rel=1e-5)] * 2
    assert expected[0] > 50
    assert expected[1] != pytest.approx(1, rel=0.1)


def test_heads_are_left_alone_by_the_first_scale():
    """They have learned nothing yet, and what they say of normalised returns is near nothing, as it should be."""
    model = agent(drifting(shift=1e4), learning_rate=0.0)
    before = [head.linear.bias.clone() for head in model.policy.heads]
    learn(model)
    assert all(torch.equal(head.linear.bias, bias) for head, bias in zip(model.policy.heads, before, strict=True))


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9])
def test_forgets_exponentially(decay):
    """Moments of all returns, each rollout with the weight that is left of it."""
    model = agent(drifting(), return_scale_decay=decay, learning_rate=0.01, n_epochs=2)
    returns, scales = Returns(model), []
    logs = learn(model, 5, before=returns, after=lambda m: scales.append(scale_numbers(m.return_scale.value)))
    mean = square = 0.0
    for i, (rollout, scale) in enumerate(zip(returns.each, scales, strict=True)):
        weight = 1 if i == 0 else 1 - decay
        mean += weight * (rollout.mean().item() - mean)
        square += weight * (rollout.square().mean().item() - square)
        assert scale == pytest.approx((mean, math.sqrt(square - mean**2)), rel=1e-3, abs=1e-3)
    logged = [(log["return_scale/mean"], log["return_scale/std"]) for log in logs]
    assert logged == [pytest.approx(scale, rel=1e-5) for scale in scales]
    assert scales[-1][1] > 1.5 * scales[0][1]


def test_the_snapshot_is_the_value_after_every_update_and_never_moves_within(monkeypatch):
    model = agent(drifting(), learning_rate=0.01, n_epochs=3)
    within, after = [], []
    StepSpy(monkeypatch, before=lambda *_: within.append(scale_numbers(model.return_scale.snapshot)))

    def check(model):
        assert model.return_scale.snapshot == model.return_scale.value
        after.append(scale_numbers(model.return_scale.snapshot))

    learn(model, 4, after=check)
    assert len(set(after)) == 4
    # The first update uses its own scale, every later one that of the update before.
    assert within == [scale for scale in (after[0], *after[:-1]) for _ in range(3)]


@pytest.mark.parametrize(("factor", "shift"), SHIFTS)
@pytest.mark.parametrize("twin", [False, True])
def test_rescaling_keeps_what_the_critics_say(factor, shift, twin):
    """In an update that does not learn, nothing but the scale changes: decoded quantiles stay, heads do not."""
    model = agent(
        drifting(factor, shift), learning_rate=0.0, policy_kwargs={"twin_critics": twin}, policy="MlpLstmPolicy"
    )
    # With real predictions: learn a little first.
    model.hyperparams["learning_rate"] = 0.01
    learn(model, 2)
    model.hyperparams["learning_rate"] = 0.0
    observations = torch.rand(50, 3).numpy()
    before, old_scale = model.predict_quantiles(observations)[0], model.return_scale.snapshot
    weight = model.policy.heads[0].linear.weight.clone()
    learn(model, 3, reset_num_timesteps=False)
    after, new_scale = model.predict_quantiles(observations)[0], model.return_scale.snapshot
    assert abs(new_scale.std / old_scale.std - 1) > 0.02
    assert not torch.equal(weight, model.policy.heads[0].linear.weight)
    tolerance = 1e-5 * max(float(scale.std) + abs(float(scale.mean)) for scale in (old_scale, new_scale))
    np.testing.assert_allclose(after, before, atol=tolerance, rtol=0)


def test_a_categorical_head_does_not_keep_it():
    """Its atoms stand for other returns in another scale, which its documentation says."""
    model = agent(drifting(), learning_rate=0.0, policy_kwargs={"value_head": "categorical"})
    learn(model, 2)
    observations = torch.rand(5, 3).numpy()
    before, weight = model.predict_quantiles(observations)[0], model.policy.heads[0].linear.weight.clone()
    learn(model, 2, reset_num_timesteps=False)
    assert torch.equal(weight, model.policy.heads[0].linear.weight)
    assert not np.allclose(model.predict_quantiles(observations)[0], before, rtol=1e-2)


@pytest.mark.parametrize("truncated", [False, True])
def test_targets_are_normalised_with_the_snapshot(monkeypatch, truncated):
    spy = StepSpy(monkeypatch)
    model = agent(drifting(shift=5.0, truncated=truncated), learning_rate=0.01, gamma=0.9, gae_lambda=0.8)
    returns, snapshots = Returns(model), []
    learn(model, 3, before=returns, after=lambda m: snapshots.append(scale_numbers(m.return_scale.snapshot)))
    for update, batch in enumerate(spy.batches):
        mean, std = snapshots[max(update - 1, 0)]
        numbers = identities(batch.observations)
        expected = (returns.each[update][numbers // 10 - 8 * update, numbers % 10] - mean) / std
        torch.testing.assert_close(batch.targets.double(), expected, atol=1e-4, rtol=1e-4)


def test_equal_returns_are_not_divided_by_their_rounding():
    logs = learn(agent(scripted([1], [1], reward=lambda *_: 0.1)), 2)
    assert all(log["return_scale/std"] == 1 for log in logs)
    assert logs[-1]["return_scale/mean"] == pytest.approx(0.1)


@pytest.mark.parametrize("factor", [1e-4, 1e4])
def test_the_unit_of_rewards_hardly_matters(factor):
    """After the first update, in which critics still speak in units of one: then all is relative to the scale."""

    def explained(factor):
        # As the observation has it.
        env = scripted([1], [1], [1], reward=lambda t, i, _: factor * math.sin(1.7 * (10 * t + i)))
        model = agent(env, learning_rate=0.05, n_epochs=10, max_grad_norm=10.0, n_steps=16)
        return learn(model, 10)[-1]["train/explained_variance"]

    plain = explained(1.0)
    assert plain > 0.5
    assert explained(factor) == pytest.approx(plain, abs=0.1)
