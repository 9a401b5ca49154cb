"""UPGD warns once if a scaler shrinks its direction and not its noise. A warning that is not expected is an error."""

from __future__ import annotations

import pytest

from driftproof.optim import UPGD, UPGDW, AdaptiveUPGD, VarianceGradientScaler

from .helpers import parameters, set_gradients

WARNING = "shrinks the gradient, which is UPGD's direction"


def take_steps(optimizer, params, scaler):
    for step in range(3):
        set_gradients(params, step)
        scaler.scale_gradients()
        optimizer.step()
        scaler.step()


@pytest.mark.parametrize("scaler_first", [False, True])
def test_warns_at_the_first_step_and_only_there(scaler_first):
    params = parameters((3,), (2,))
    built = [VarianceGradientScaler(params)] if scaler_first else []
    optimizer = UPGD(params, lr=0.1)
    scaler = built[0] if built else VarianceGradientScaler(params)
    with pytest.warns(UserWarning, match=WARNING) as caught:
        take_steps(optimizer, params, scaler)
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_warns_when_asked():
    params = parameters((3,))
    optimizer, scaler = UPGD(params, lr=0.1), VarianceGradientScaler(params)
    with pytest.warns(UserWarning, match=WARNING):
        optimizer.check_noise()
    take_steps(optimizer, params, scaler)


@pytest.mark.parametrize(
    ("optimizer_class", "options", "scaling"),
    [
        (AdaptiveUPGD, {}, {}),
        (UPGDW, {}, {}),
        (UPGD, {"adaptive_noise": True}, {}),
        (UPGD, {"sigma": 0.0}, {}),
        (UPGD, {}, {"apply_to": "update"}),
        (UPGD, {}, {"enabled": False}),
    ],
)
def test_no_warning_where_the_ratio_stays(optimizer_class, options, scaling):
    params = parameters((3,), (2,))
    optimizer, scaler = optimizer_class(params, lr=0.1, **options), VarianceGradientScaler(params, **scaling)
    if scaling.get("apply_to") == "update":
        scaler.attach(optimizer)
    take_steps(optimizer, params, scaler)


def test_no_warning_for_a_scaler_of_others_or_none():
    params, others = parameters((3,)), parameters((3,))
    scaler = VarianceGradientScaler(others)
    set_gradients(others, 0)
    take_steps(UPGD(params, lr=0.1), params, scaler)
