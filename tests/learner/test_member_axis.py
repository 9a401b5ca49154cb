"""Tensor functions and controllers with a leading member axis: equal to one call, or one controller, per member."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from driftproof.learner.advantages import explained_variance, gae, normalize_advantages
from driftproof.learner.entropy import EntropySchedule
from driftproof.learner.kl import KLPenalty, KLStop
from driftproof.learner.losses import Coefficients, mean, policy_loss, ppo_losses, value_loss
from driftproof.learner.return_scale import ReturnScale
from driftproof.learner.rollout import Minibatch
from driftproof.nn.heads import CategoricalHead, QuantileHead
from driftproof.nn.types import Evaluation, PolicyState
from tests.nn.test_distributions import made
from tests.ppo.test_advantages import a_rollout

MEMBERS = range(3)
seeds = st.integers(0, 999)


def stacked(rollouts):
    return {name: torch.stack([rollout[name] for rollout in rollouts]) for name in rollouts[0]}


class TestAdvantages:
    @given(seed=seeds, steps=st.integers(1, 20), envs=st.integers(1, 4))
    def test_gae_with_discounts_of_their_own(self, seed, steps, envs):
        rollouts = [a_rollout(steps, envs, seed + i) for i in MEMBERS]
        gamma, gae_lambda = torch.tensor([0.0, 0.9, 0.99]), torch.tensor([0.5, 1.0, 0.95])
        together = gae(**stacked(rollouts), gamma=gamma, gae_lambda=gae_lambda)
        for i in MEMBERS:
            alone = gae(**rollouts[i], gamma=gamma[i], gae_lambda=gae_lambda[i])
            assert all(torch.equal(both[i], single) for both, single in zip(together, alone, strict=True))

    @given(seed=seeds, steps=st.integers(1, 20), envs=st.integers(1, 4))
    def test_statistics(self, seed, steps, envs):
        rollouts = [a_rollout(steps, envs, seed + i) for i in MEMBERS]
        rollouts[0]["rewards"] *= 100
        rollouts[1]["rewards"].fill_(3.0)
        every = stacked(rollouts)
        advantages = normalize_advantages(every["rewards"], every["valid"])
        explained = explained_variance(every["values"], every["rewards"], every["valid"])
        assert explained.shape == (3,)
        for i in MEMBERS:
            one = rollouts[i]
            torch.testing.assert_close(advantages[i], normalize_advantages(one["rewards"], one["valid"]))
            torch.testing.assert_close(
                explained[i], explained_variance(one["values"], one["rewards"], one["valid"]), rtol=1e-5, atol=1e-5
            )


class TestLosses:
    @pytest.mark.parametrize("shape", [(6,), (4, 3)], ids=str)
    @pytest.mark.parametrize("masked", [False, True])
    def test_losses_and_gradients(self, shape, masked):
        log_ratio = (0.3 * torch.randn(3, *shape)).requires_grad_()
        advantages, clip_range = torch.randn(3, *shape), torch.tensor([0.05, 0.2, 0.5])
        valid = (torch.rand(3, *shape) < 0.7).float() if masked else None
        together = policy_loss(log_ratio, advantages, clip_range)
        losses = mean(together.loss, valid, members=True)
        (gradient,) = torch.autograd.grad(losses.sum(), log_ratio)
        for i in MEMBERS:
            one = log_ratio[i].detach().requires_grad_()
            alone = policy_loss(one, advantages[i], float(clip_range[i]))
            loss = mean(alone.loss, None if valid is None else valid[i])
            torch.testing.assert_close(losses[i], loss)
            assert torch.equal(together.clipped[i], alone.clipped)
            torch.testing.assert_close(gradient[i], torch.autograd.grad(loss, one)[0])

    @pytest.mark.parametrize("kind", [QuantileHead, CategoricalHead])
    def test_value_loss_with_clip_ranges_of_their_own(self, kind):
        head, clip_range = kind(1), torch.tensor([0.05, 0.2, 0.5])
        prediction, old = torch.randn(2, 3, 6, head.outputs)
        targets = torch.randn(3, 6)
        together = value_loss(head, prediction, targets, old, "mean_only", clip_range)
        for i in MEMBERS:
            alone = value_loss(head, prediction[i], targets[i], old[i], "mean_only", float(clip_range[i]))
            torch.testing.assert_close(together[i], alone)

    @pytest.mark.parametrize("name", ["Discrete", "Box", "squashed"])
    @pytest.mark.parametrize("masked", [False, True])
    @pytest.mark.parametrize("shape", [(6,), (4, 3)], ids=str)
    def test_whole_loss_with_coefficients_of_their_own(self, name, masked, shape):
        distribution, head = made(name), QuantileHead(1)
        coefficients = Coefficients(
            clip_range=torch.tensor([0.05, 0.2, 0.5]),
            clip_range_vf=torch.tensor([0.5, 0.1, 0.2]),
            ent_coef=torch.tensor([0.0, 0.01, 0.1]),
            vf_coef=torch.tensor([0.5, 1.0, 2.0]),
            kl_coef=torch.tensor([1.0, 0.0, 3.0]),
            max_grad_norm=0.5,
            exploration_floor=torch.tensor([0.0, 0.5, 1.0]),
        )
        old, now = torch.randn(2, 3, *shape, distribution.size)
        actions = distribution.sample(old, distribution.noise(3, *shape))
        predictions = torch.randn(4, 3, *shape, head.outputs)
        batch = Minibatch(
            observations=torch.empty(3),
            actions=actions,
            parameters=old,
            log_probs=distribution.log_prob(old, actions),
            advantages=torch.randn(3, *shape),
            targets=torch.randn(3, *shape),
            predictions=(predictions[2], predictions[3]),
            valid=(torch.rand(3, *shape) < 0.7).float() if masked else None,
            state=PolicyState((), ()),
            segments=None,
            keep=None,
        )

        def losses(evaluation, batch, coefficients, **options):
            return ppo_losses(distribution, head, evaluation, batch, coefficients, "mean_only", True, True, **options)

        evaluation = Evaluation(now.requires_grad_(), (predictions[0], predictions[1]))
        loss, metrics = losses(evaluation, batch, coefficients, members=True)
        (gradient,) = torch.autograd.grad(loss.sum(), now)
        for i in MEMBERS:
            one = now[i].detach().requires_grad_()
            part = {name: _member(value, i) for name, value in batch._asdict().items()}
            alone = losses(
                Evaluation(one, (predictions[0, i], predictions[1, i])),
                Minibatch(**part),
                Coefficients(*(_member(number, i) for number in coefficients)),
            )
            torch.testing.assert_close(loss[i], alone[0])
            torch.testing.assert_close(gradient[i], torch.autograd.grad(alone[0], one)[0])
            assert metrics.keys() == alone[1].keys()
            for key, number in metrics.items():
                torch.testing.assert_close(number[i], alone[1][key])


def _member(value, i):
    """What one member has of a minibatch or of coefficients."""
    if isinstance(value, torch.Tensor):
        return value[i]
    return tuple(part[i] for part in value) if type(value) is tuple else value


class TestKL:
    @given(kls=st.lists(st.tuples(*[st.floats(0, 0.05)] * 3), min_size=1, max_size=12))
    @pytest.mark.parametrize("mode", ["absolute", "consecutive", "fraction"])
    def test_stop(self, mode, kls):
        settings = {
            "target": torch.tensor([0.01, 0.02, 0.03]),
            "tolerance": torch.tensor([1.0, 1.5, 0.5]),
            "fraction": torch.tensor([0.29, 0.5, 0.0]),
        }
        together = KLStop(**settings, mode=mode, patience=2, members=3)
        alone = [KLStop(**{k: float(v[i]) for k, v in settings.items()}, mode=mode, patience=2) for i in MEMBERS]
        for stop in (together, *alone):
            stop.reset(100 if mode == "fraction" else len(kls))
        for kl in kls:
            numbers = torch.tensor(kl)
            flags = together.observe(numbers)
            assert flags.tolist() == [stop.observe(numbers[i]).item() for i, stop in enumerate(alone)]

    def test_a_share_of_minibatches_counts_exactly_in_single_precision(self):
        stop = KLStop(0.01, "fraction", fraction=torch.tensor([0.29, 0.07, 0.58]), members=3)
        stop.reset(100)
        flags = torch.stack([stop.observe(torch.ones(3)) for _ in range(60)])
        assert flags.sum(0).tolist() == [29, 7, 58]

    @given(kls=st.lists(st.tuples(*[st.floats(0, 0.1) | st.just(math.nan)] * 3), min_size=1, max_size=12))
    def test_penalty(self, kls):
        settings = {
            "target": torch.tensor([0.01, 0.02, 0.03]),
            "kp": torch.tensor([0.0, 0.1, 0.3]),
            "ki": torch.tensor([0.4, 0.1, 0.0]),
            "kd": torch.tensor([0.0, 0.2, 0.1]),
            "max_coef": torch.tensor([1.0, 3.0, 10.0]),
            "init_coef": torch.tensor([0.5, 0.0, 2.0]),
        }
        together = KLPenalty(**settings, members=3)
        alone = [KLPenalty(**{k: float(v[i]) for k, v in settings.items()}) for i in MEMBERS]
        for kl in kls:
            together.update(torch.tensor(kl))
            for i, penalty in enumerate(alone):
                penalty.update(torch.tensor(kl[i]))
        for name, tensor in together.state_dict().items():
            torch.testing.assert_close(tensor, torch.stack([penalty.state_dict()[name] for penalty in alone]))
        restored = KLPenalty(**settings, members=3)
        restored.load_state_dict(together.state_dict())
        restored.update(torch.full((3,), 0.02))
        together.update(torch.full((3,), 0.02))
        assert torch.equal(restored.coefficient, together.coefficient)
        initial = KLPenalty(**settings, members=3).state_dict()
        assert all(torch.equal(tensor, initial[name]) for name, tensor in together.initial_state_dict().items())


def test_return_scale():
    decay = torch.tensor([0.5, 0.9, 0.99])
    together, alone = ReturnScale(decay, members=3), [ReturnScale(float(d)) for d in decay]
    for rollout in range(4):
        returns = torch.randn(3, 5, 2) * torch.tensor([1.0, 10.0, 0.1]).view(3, 1, 1)
        valid = torch.rand(3, 5, 2) < 0.8
        valid[1] &= rollout == 0  # One member has nothing to observe later.
        together.observe(returns, valid)
        snapshots = together.refresh()
        for i, scale in enumerate(alone):
            scale.observe(returns[i], valid[i])
            for snapshot, single in zip(snapshots, scale.refresh(), strict=True):
                torch.testing.assert_close(torch.stack([part[i] for part in snapshot]), torch.stack([*single]))
            torch.testing.assert_close(together.normalize(returns)[i], scale.normalize(returns[i]))
            torch.testing.assert_close(together.decode(returns)[i], scale.decode(returns[i]))
    restored = ReturnScale(decay, members=3)
    restored.load_state_dict(together.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(restored.snapshot, together.snapshot, strict=True))


@pytest.mark.parametrize("kind", [partial(KLPenalty, 0.01), ReturnScale, EntropySchedule])
@pytest.mark.parametrize("members", [None, 2])
def test_a_state_of_another_number_of_members_is_refused(kind, members):
    with pytest.raises(ValueError, match=r"shape|must be"):
        kind(members=3).load_state_dict(kind(members=members).state_dict())


@given(
    returns=st.lists(st.tuples(*[st.floats(-10, 10) | st.just(math.nan)] * 3), min_size=1, max_size=15),
    explained=st.tuples(*[st.floats(-1, 1)] * 3),
)
@pytest.mark.parametrize("start", ["immediately", "plateau"])
def test_entropy_schedule(start, returns, explained):
    def settings(index=None):
        numbers = {
            "ent_coef_final": [0.0, 0.01, 0.2],
            "ent_coef_min": [0.0, 0.01, 0.1],
            "ent_boost_factor": [1.0, 2.0, 3.0],
            "ent_boost_below": [0.0, 0.1, 0.5],
            "ent_boost_cap": [0.5, 0.3, 0.15],
            "plateau_tolerance": [0.0, 0.01, 0.1],
        }
        single = {k: v[index] for k, v in numbers.items()} if index is not None else {}
        if index == 0:
            del single["ent_boost_below"], single["ent_boost_cap"]  # They contradict a factor of 1.
        patience = {"ent_plateau_patience": 2} if start == "plateau" else {}
        every = {k: torch.tensor(v, dtype=torch.float64) for k, v in numbers.items()}
        return {"ent_coef_start": start, **patience, **(every if index is None else single)}

    together, alone = EntropySchedule(**settings(), members=3), [EntropySchedule(**settings(i)) for i in MEMBERS]
    base = torch.tensor([0.1, 0.2, 0.4], dtype=torch.float64)
    for step, numbers in enumerate(returns):
        together.explained_variance = torch.tensor(explained, dtype=torch.float64)
        coefficients = together.update(base, 1 - step / 15, torch.tensor(numbers, dtype=torch.float64))
        for i, schedule in enumerate(alone):
            schedule.explained_variance = explained[i]
            assert coefficients[i].item() == schedule.update(base[i].item(), 1 - step / 15, numbers[i])
        restored = EntropySchedule(**settings(), members=3)
        restored.load_state_dict(together.state_dict())
        together = restored
