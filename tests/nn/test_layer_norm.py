"""Layer normalisation without parameters: its kernels against torch's in float64."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from driftproof.nn import layer_norm as module
from driftproof.nn.layer_norm import FEWEST_ROWS, LayerNorm, layer_norm

on_gpu = pytest.mark.gpu
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Relative errors, in the Euclidean norm of each tensor, by the type of results."""


def both(norm, inputs, gradient):
    inputs = inputs.requires_grad_()
    outputs = norm(inputs)
    return outputs.detach(), torch.autograd.grad(outputs, inputs, gradient.to(outputs.dtype))[0]


def worst_error(shape, dtype, device, seed=0):
    """Of results and gradients, where rows have means and scales of their own."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(*shape, generator=generator, dtype=torch.float64)
    scale, mean = torch.randn(2, *shape[:-1], 1, generator=generator, dtype=torch.float64)
    rows = (scale * rows + 3 * mean).to(dtype)
    gradient = torch.randn(shape, generator=generator).to(dtype)
    ours = both(lambda x: layer_norm(x, 1e-5), rows.to(device), gradient.to(device))
    exact = both(lambda x: F.layer_norm(x, x.shape[-1:], eps=1e-5), rows.double(), gradient.double())
    assert all(part.dtype is dtype for part in ours)
    return max(float((a.double().cpu() - b).norm() / b.norm()) for a, b in zip(ours, exact, strict=True))


def check_random_shapes(device):
    """Called by the tests, and by this file as a script, where Triton interprets the kernels."""
    rng = np.random.default_rng(0)
    for seed in range(6):
        width = (64, 1, *rng.integers(2, 300, 4))[seed]
        shape = (int(rng.integers(1, 4)), FEWEST_ROWS + int(rng.integers(50)), int(width))
        for dtype, tolerance in TOLERANCE.items():
            if width > 1:  # A single number is its own mean.
                assert worst_error(shape, dtype, device, seed) < tolerance, (shape, dtype)
    norm = LayerNorm(7)
    inputs = torch.randn(7, FEWEST_ROWS, device=device).T  # Not contiguous.
    torch.testing.assert_close(norm(inputs), F.layer_norm(inputs, (7,)), atol=1e-6, rtol=1e-5)
    with torch.autocast(device, torch.bfloat16):
        assert norm(inputs).dtype is torch.bfloat16


@on_gpu
def test_kernels_equal_torch():
    check_random_shapes("cuda")


@on_gpu
def test_kernels_are_captured():
    inputs = torch.randn(2, FEWEST_ROWS, 64, device="cuda", requires_grad=True)
    given = torch.randn_like(inputs)
    first = torch.autograd.grad(layer_norm(inputs, 1e-5), inputs, given)  # Compiles.
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.autograd.grad(layer_norm(inputs, 1e-5), inputs, given)
    graph.replay()
    torch.testing.assert_close(captured, first, atol=0, rtol=0)


@on_gpu
def test_without_triton_torch_runs(monkeypatch):
    inputs = torch.randn(FEWEST_ROWS, 64, device="cuda")
    ours = layer_norm(inputs, 1e-5)
    monkeypatch.setattr(module, "fused", None)
    torch.testing.assert_close(layer_norm(inputs, 1e-5), ours, atol=1e-6, rtol=1e-5)


@pytest.mark.gpu
def test_interpreted_kernels_equal_torch():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-m", "tests.nn.test_layer_norm"], env=environment, check=True)


@pytest.mark.parametrize("rows", [3, 1000])
def test_on_a_cpu_it_is_that_of_torch(rows):
    inputs = torch.randn(rows, 64)
    assert torch.equal(LayerNorm(64)(inputs), F.layer_norm(inputs, (64,)))


if __name__ == "__main__":
    assert module.fused is not None
    assert module.fused.INTERPRETED
    check_random_shapes("cpu")
