"""Nothing reads a number back from the device, as far as a machine without one can tell.

Tensors of the meta device have no values: reading one raises, and so does an index or a branch that depends on one.
``test_cuda.py`` has the same on a real device.
"""

from __future__ import annotations

import pytest
import torch

from driftproof.optim import VarianceGradientScaler, _foreach

from .helpers import NOISES, OPTIMIZERS

SHAPES = [(4, 3), (3,), (), (2, 2)]


@pytest.fixture(autouse=True)
def meta_counts_as_accelerator(monkeypatch):
    monkeypatch.setattr(_foreach, "DEVICES", (*_foreach.DEVICES, "meta"))
    monkeypatch.setitem(_foreach._BUCKET_ELEMENTS, "meta", 1 << 20)
    # The one operation of the step that knows no meta tensors.
    monkeypatch.setattr(torch, "_fused_sgd_", lambda *args, **kwargs: None)


def meta_parameters():
    return [torch.empty(shape, device="meta", requires_grad=True) for shape in SHAPES]


def set_meta_gradients(params, missing=()):
    for i, param in enumerate(params):
        param.grad = None if i in missing else torch.empty_like(param)


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("gate", ["anchored", "minmax"])
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
def test_step_and_metrics(optimizer_class, noise, gate, capturable, monkeypatch):
    moved = []
    move = _foreach.move
    monkeypatch.setattr(_foreach, "move", lambda *args: (moved.append(1), move(*args)))
    params = meta_parameters()
    optimizer = optimizer_class(params, gate=gate, capturable=capturable, **noise)
    for missing in ((), (1,), ()):
        set_meta_gradients(params, missing)
        optimizer.step()
        optimizer.metrics()
    assert len(moved) >= 3


@pytest.mark.parametrize("statistic", ["elementwise", "spatial_mean"])
@pytest.mark.parametrize("mode", ["gradient", "update"])
def test_scaler(mode, statistic):
    params = meta_parameters()
    optimizer = torch.optim.SGD(params, lr=0.1)
    scaler = VarianceGradientScaler(params, statistic=statistic, apply_to=mode)
    if mode == "update":
        scaler.attach(optimizer)
    for missing in ((), (1,), (0, 2), ()):
        set_meta_gradients(params, missing)
        scaler.scale_gradients()
        optimizer.step()
        scaler.step()
        scaler.metrics()
        scaler.compute_gradient_statistics()
        scaler.state_dict()


def test_the_test_sees_a_synchronisation():
    scaler = VarianceGradientScaler(meta_parameters())
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        scaler.get_scaling_factor()
