"""Optimizers with a leading member axis: a step of several members equals one of each, and masks leave no trace."""

from __future__ import annotations

import math

import pytest
import torch

from driftproof.optim import UPGD, UPGDW, AdaptiveUPGD, VarianceGradientScaler, functional
from driftproof.optim.masking import step_where

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


@pytest.mark.parametrize("statistic", ["elementwise", "spatial_mean"])
def test_variance_gradient_scaling(statistic):
    """Every number differs between members, and so do the steps that they take."""
    numbers = {
        "beta": [0.9, 0.99, 0.0],
        "alpha": [0.1, 1.0, 10.0],
        "eps": [1e-8, 1e-4, 1e-2],
        "warmup_steps": [0, 2, 4],
        "min_scaling_factor": [0.1, 0.01, 0.3],
        "variance_cap": [50.0, 1.0, 0.5],
    }
    taken = torch.rand(12, MEMBERS, generator=torch.Generator().manual_seed(0)) < 0.6
    keys = [str(i) for i in range(len(SHAPES))]
    together = functional.GradientStatistics(keys, drawn(0), statistic, members=MEMBERS)
    every = functional.ScalingSettings(**{name: torch.tensor(v) for name, v in numbers.items()})
    alone = [functional.GradientStatistics(keys, [p[i] for p in drawn(0)], statistic) for i in range(MEMBERS)]
    for step, flags in enumerate(taken):
        grads = [1 + grad for grad in drawn(100 + step)]
        if step == 5:
            grads[1] = None  # A frozen layer.
        spoiled = [None if g is None else torch.where(flags.view(-1, *[1] * (g.dim() - 1)), g, math.nan) for g in grads]
        factors = functional.vgs_step(together, spoiled, every, flags)
        for i in torch.nonzero(flags).flatten().tolist():
            settings_ = functional.ScalingSettings(**{name: v[i] for name, v in numbers.items()})
            single = functional.vgs_step(alone[i], [None if g is None else g[i] for g in grads], settings_)
            torch.testing.assert_close(factors[i], single)
    for i in range(MEMBERS):
        for name in ("weight", "energy", "mean", "signal", "norms", "largest", "step_count", "factor"):
            torch.testing.assert_close(getattr(together, name)[i], getattr(alone[i], name))
        for both, single in zip(together.moments, alone[i].moments, strict=True):
            torch.testing.assert_close(both[i], single)
        for name, value in together.total_averages().items():
            torch.testing.assert_close(value[i], alone[i].total_averages()[name])


def test_a_scaler_that_is_told_that_no_step_is_taken_does_not_change():
    params = [torch.nn.Parameter(p[0]) for p in drawn(0)]
    for on_host in (True, False):
        scaler = VarianceGradientScaler(params, warmup_steps=1, alpha=1.0)
        scaler._statistics.on_host = on_host
        states = []
        for step, flag in enumerate([True, True, False, True]):
            for param, grad in zip(params, drawn(step), strict=True):
                param.grad = grad[0] if flag else torch.full_like(param, math.nan)
            scaler.scale_gradients(torch.tensor(flag))
            scaler.step(torch.tensor(flag))
            states.append({**scaler.metrics(), **scaler.state_dict()["moments"]})
        assert states[2].keys() == states[1].keys()
        assert all(torch.equal(states[2][name], states[1][name]) for name in states[1])
        assert not all(torch.equal(states[3][name], states[1][name]) for name in states[1])


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.Adam, {"fused": True}),
        (torch.optim.Adam, {"foreach": True}),
        (torch.optim.AdamW, {"fused": True, "amsgrad": True}),
        (torch.optim.SGD, {"fused": True, "momentum": 0.9}),
        (torch.optim.NAdam, {}),
        (torch.optim.RMSprop, {"momentum": 0.9}),
        (UPGD, {}),
        (AdaptiveUPGD, {}),
        (AdaptiveUPGD, {"capturable": True}),
        (UPGDW, {"capturable": True, "foreach": False}),
    ],
)
def test_any_optimizer_takes_the_steps_that_a_flag_says(kind, options):
    params, expected = ([torch.nn.Parameter(p[0]) for p in drawn(0)] for _ in range(2))
    noise = {"sigma": 0.0} if kind in (UPGD, AdaptiveUPGD, UPGDW) else {}
    masked, plain = (kind(p, lr=0.01, **options, **noise) for p in (params, expected))
    for step, flag in enumerate([True, False, True, False, False, True]):
        for param, other, grad in zip(params, expected, drawn(step), strict=True):
            param.grad = grad[0].clone() if flag else torch.full_like(param, math.nan)
            other.grad = grad[0].clone()
        if step == 0:
            masked.step()  # Creates the state.
        else:
            step_where(masked, torch.tensor(flag))
        if flag:
            plain.step()
    assert not hasattr(masked, "found_inf")
    for param, other in zip(params, expected, strict=True):
        torch.testing.assert_close(param, other, rtol=1e-6, atol=1e-7)
        for name, value in plain.state[other].items():
            torch.testing.assert_close(masked.state[param][name], value, rtol=1e-6, atol=1e-7)


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
