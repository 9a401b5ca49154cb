"""Every scheduler of torch drives every optimizer, momentum included; ``betas`` mean the same for all."""

from __future__ import annotations

import inspect
import pickle

import pytest
import torch
from torch.optim import lr_scheduler, swa_utils

from driftproof.optim import UPGD, UPGDW, AdaptiveUPGD

from .helpers import OPTIMIZERS, parameters, set_gradients

STEPS = 12
MAKE = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, STEPS),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)], [4]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 4), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.01, step_size_up=4),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.02, total_steps=STEPS + 1),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.001, anneal_epochs=4),
}


def test_no_scheduler_is_forgotten():
    known = {
        name
        for name, value in vars(lr_scheduler).items()
        if inspect.isclass(value) and issubclass(value, lr_scheduler.LRScheduler) and not name.startswith("_")
    }
    assert known - {"LRScheduler"} == set(MAKE) - {"SWALR"}


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("optimizer_class", [*OPTIMIZERS, torch.optim.AdamW])
def test_schedulers(optimizer_class, name):
    """Two groups follow the scheduler exactly as AdamW's do."""

    def course(kind):
        params = parameters((3, 2), (2,))
        optimizer = kind([{"params": params[:1]}, {"params": params[1:], "lr": 0.02}], lr=0.01)
        scheduler, rates = MAKE[name](optimizer), []
        for step in range(STEPS):
            set_gradients(params, step)
            before = [p.detach().clone() for p in params]
            optimizer.step()
            rates.append([float(group["lr"]) for group in optimizer.param_groups])
            assert all(torch.equal(a, b) == (rate == 0) for a, b, rate in zip(before, params, rates[-1], strict=True))
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        return rates

    rates = course(optimizer_class)
    assert rates == course(torch.optim.AdamW)
    assert len(set(map(tuple, rates))) > 1


@pytest.mark.parametrize("optimizer_class", [AdaptiveUPGD, UPGDW])
@pytest.mark.parametrize("name", ["OneCycleLR", "CyclicLR"])
def test_momentum_is_cycled(optimizer_class, name):
    """The first moment is an average with the scheduler's beta."""
    params = parameters((3,))
    optimizer = optimizer_class(params, lr=0.01, sigma=0.0)
    scheduler = MAKE[name](optimizer)
    expected, betas = torch.zeros(3), []
    for step in range(STEPS):
        set_gradients(params, step)
        beta = optimizer.param_groups[0]["betas"][0]
        expected.lerp_(params[0].grad, 1 - beta)
        betas.append(beta)
        optimizer.step()
        scheduler.step()
    assert len(set(betas)) > 3
    first_moment = optimizer.state[params[0]][optimizer_class.moment_keys[0]]
    torch.testing.assert_close(first_moment, expected)


def test_upgd_ignores_cycled_momentum():
    params, others = parameters((3,)), parameters((3,))
    optimizer, other = UPGD(params, lr=0.01, sigma=0.0), UPGD(others, lr=0.01, sigma=0.0)
    schedulers = [
        lr_scheduler.OneCycleLR(each, 0.02, total_steps=STEPS, cycle_momentum=cycled)
        for each, cycled in ((optimizer, True), (other, False))
    ]
    for step in range(STEPS - 1):
        set_gradients(params, step)
        set_gradients(others, step)
        optimizer.step()
        other.step()
        for scheduler in schedulers:
            scheduler.step()
    assert optimizer.param_groups[0]["momentum"] > 0
    assert torch.equal(params[0], others[0])


class TestBetas:
    @pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
    def test_one_argument_for_all(self, optimizer_class):
        in_constructor = optimizer_class(parameters((2,)), betas=(0.8, 0.9))
        in_group = optimizer_class([{"params": parameters((2,)), "betas": (0.8, 0.9)}])
        for optimizer in (in_constructor, in_group):
            settings = optimizer.settings_of(optimizer.param_groups[0])
            assert settings.betas == (None if optimizer_class is UPGD else (0.8, 0.9))
            assert settings.beta_utility == (0.999 if optimizer_class is AdaptiveUPGD else 0.9)

    @pytest.mark.parametrize(
        ("optimizer_class", "name", "value"),
        [(AdaptiveUPGD, "beta1", 0.7), (AdaptiveUPGD, "beta2", 0.99), (UPGD, "beta_utility", 0.99)],
    )
    def test_contradictions_are_refused(self, optimizer_class, name, value):
        with pytest.raises(ValueError, match=f"{name}={value} contradicts betas="):
            optimizer_class(parameters((2,)), betas=(0.8, 0.9), **{name: value})
        with pytest.raises(ValueError, match=f"{name}={value} contradicts betas="):
            optimizer_class([{"params": parameters((2,)), "betas": (0.8, 0.9), name: value}])
        index = optimizer_class.beta_names[name]
        optimizer_class(parameters((2,)), betas=(0.8, 0.9), **{name: (0.8, 0.9)[index]})

    @pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
    @pytest.mark.parametrize("betas", [(0.9,), 0.9, (1.0, 0.9), (0.9, -0.1), (0.9, "x")])
    def test_bad_betas_are_named(self, optimizer_class, betas):
        with pytest.raises(ValueError, match="Invalid betas"):
            optimizer_class(parameters((2,)), betas=betas)
        with pytest.raises(ValueError, match="Invalid betas"):
            optimizer_class([{"params": parameters((2,)), "betas": betas}])

    def test_groups_have_one_place_for_each(self):
        params = parameters((2,), (3,))
        optimizer = AdaptiveUPGD([{"params": params[:1], "beta1": 0.5}, {"params": params[1:]}], beta2=0.99)
        assert [group["betas"] for group in optimizer.param_groups] == [(0.5, 0.99), (0.9, 0.99)]
        assert not {"beta1", "beta2"} & set(optimizer.param_groups[0])
        # Code that sets the former names.
        optimizer.param_groups[0]["beta1"] = 0.6
        set_gradients(params, 0)
        optimizer.step()
        assert optimizer.param_groups[0]["betas"] == (0.6, 0.99)
        torch.testing.assert_close(optimizer.state[params[0]]["first_moment"], 0.4 * params[0].grad)

    def test_groups_of_earlier_versions_are_read(self):
        def as_before(groups):
            for group in groups:
                group["beta1"], group["beta2"] = group.pop("betas")

        params = parameters((2,))
        optimizer = AdaptiveUPGD(params, beta1=0.5, beta2=0.99)
        state = optimizer.state_dict()
        as_before(state["param_groups"])
        other = AdaptiveUPGD(parameters((2,)))
        other.load_state_dict(state)
        as_before([*optimizer.param_groups, optimizer.defaults])
        for read in (other, pickle.loads(pickle.dumps(optimizer))):
            assert read.param_groups[0]["betas"] == (0.5, 0.99)
            assert "beta1" not in read.param_groups[0]
        upgd = UPGD(parameters((2,)))
        for options in (*upgd.param_groups, upgd.defaults):
            del options["momentum"]
        lr_scheduler.OneCycleLR(pickle.loads(pickle.dumps(upgd)), 0.1, total_steps=3)
