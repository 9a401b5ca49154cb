"""Optimizers with a leading member axis: a step of several members equals one of each, and masks leave no trace."""

from __future__ import annotations

import math

import pytest
import torch

from driftproof.optim import functional

MEMBERS = 3
SHAPES = [(5, 3), (3,), (2, 2, 2)]
NUMBERS = {
    "lr": [0.01, 0.1, 0.03],
    "weight_decay": [0.0, 0.1, 1.0],
    "sigma": [0.1, 0.0, 0.5],
    "beta_utility": [0.9, 0.99, 0.0],
    "temperature": [1.0, 0.5, 2.0],
    "eps": [1e-8, 1e-3, 1e-5],
    "noise_beta": [0.9, 0.5, 0.99],
    "min_noise_std": [1e-6, 1e-2, 1e-3],
}
BETAS = [(0.9, 0.99), (0.5, 0.9), (0.0, 0.999)]
NOISE = {"adaptive_noise": True, "noise_reference": "gradient", "instant_noise_scale": False}
FORMS = [(adam, foreach, noise) for adam in (False, True) for foreach in (False, True) for noise in ({}, NOISE)]


def settings(adam, member=None, **options):
    if member is not None:
        numbers = {name: values[member] for name, values in NUMBERS.items()}
        return functional.Settings(**numbers, betas=BETAS[member] if adam else None, **options)
    betas = tuple(torch.tensor(column) for column in zip(*BETAS, strict=True)) if adam else None
    return functional.Settings(**{name: torch.tensor(v) for name, v in NUMBERS.items()}, betas=betas, **options)


def group(params, settings_, steps_shape=()):
    def zeros():
        return [torch.zeros_like(p) for p in params]

    return functional.Group(
        settings_,
        params,
        utilities=zeros(),
        steps=[torch.zeros(steps_shape) for _ in params],
        first_moments=zeros() if settings_.betas else [],
        second_moments=zeros() if settings_.betas else [],
        norm_emas=[torch.zeros(steps_shape) for _ in params] if settings_.averages_norms else [],
    )


def tensors(group_):
    moments = [*group_.first_moments, *group_.second_moments, *group_.norm_emas]
    return [*group_.params, *group_.utilities, *group_.steps, *moments]


def drawn(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(MEMBERS, *shape, generator=generator) for shape in SHAPES]


def source(noises):
    flat = torch.cat([noise.flatten() for noise in noises])
    return lambda count, device: functional.RawNoise(flat, 1.0)


@pytest.mark.parametrize(("adam", "foreach", "noise"), FORMS)
@pytest.mark.parametrize("gate", ["anchored", "minmax"])
def test_members_that_skip_steps_equal_separate_ones(adam, foreach, noise, gate):
    """Every number differs between members, and so do the steps that they take: some gradients are not finite."""
    taken = torch.rand(12, MEMBERS, generator=torch.Generator().manual_seed(0)) < 0.6
    taken[0, 0] = False  # Before there is any state.
    together = group(drawn(0), settings(adam, foreach=foreach, gate=gate, **noise), (MEMBERS,))
    alone = [
        group([p[i].clone() for p in drawn(0)], settings(adam, i, foreach=foreach, gate=gate, **noise))
        for i in range(MEMBERS)
    ]
    for step, flags in enumerate(taken):
        grads, noises = drawn(100 + step), drawn(200 + step)
        together.grads = [grad.clone() for grad in grads]
        for grad in together.grads:
            grad[~flags] = math.nan
        functional.upgd_step([together], members=True, noise=source(noises), proceed=flags)
        for i in torch.nonzero(flags).flatten().tolist():
            alone[i].grads = [grad[i] for grad in grads]
            functional.upgd_step([alone[i]], noise=source([n[i] for n in noises]))
    for i in range(MEMBERS):
        for both, single in zip(tensors(together), tensors(alone[i]), strict=True):
            torch.testing.assert_close(both[i], single, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("adam", "foreach", "noise"), FORMS)
def test_a_step_that_is_not_taken_changes_nothing(adam, foreach, noise):
    """On a device, where the host does not know; the CPU is told to count steps as a device does."""
    one = group([p[0] for p in drawn(0)], settings(adam, 0, foreach=foreach, capturable=True, **noise))
    for step, flag in enumerate([False, True, True, False, False, True]):
        before = [tensor.clone() for tensor in tensors(one)]
        one.grads = [grad[0] if flag else torch.full_like(grad[0], math.nan) for grad in drawn(step)]
        functional.upgd_step([one], proceed=torch.tensor(flag))
        same = [torch.equal(tensor, old) for tensor, old in zip(tensors(one), before, strict=True)]
        assert all(same) if not flag else not any(same[: len(SHAPES)])


def test_flags_per_member_need_counts_per_member():
    together = group(drawn(0), settings(adam=True))
    together.grads = drawn(1)
    with pytest.raises(ValueError, match="step counts"):
        functional.upgd_step([together], members=True, proceed=torch.ones(MEMBERS, dtype=torch.bool))


def test_clipping():
    grads, max_norm = drawn(0), torch.tensor([0.1, 3.0, 1e6])
    expected = [torch.nn.utils.get_total_norm([grad[i] for grad in grads]) for i in range(MEMBERS)]
    together = [grad.clone() for grad in grads]
    norms = functional.clip_gradients(together, max_norm, members=True)
    torch.testing.assert_close(norms, torch.stack(expected))
    for i in range(MEMBERS):
        params = [torch.zeros_like(grad[i], requires_grad=True) for grad in grads]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad[i].clone()
        single = [grad[i].clone() for grad in grads]
        functional.clip_gradients(single, float(max_norm[i]))
        torch.nn.utils.clip_grad_norm_(params, float(max_norm[i]))
        for both, one, param in zip(together, single, params, strict=True):
            torch.testing.assert_close(both[i], param.grad)
            torch.testing.assert_close(one, param.grad)
