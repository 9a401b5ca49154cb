"""What several tests of the optimizers need."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from driftproof.optim import UPGD, UPGDW, AdaptiveUPGD

OPTIMIZERS = [UPGD, AdaptiveUPGD, UPGDW]
MOMENTS = {UPGD: (), AdaptiveUPGD: ("first_moment", "sec_moment"), UPGDW: ("exp_avg", "exp_avg_sq")}
NOISES = [
    {"sigma": 0.0},
    {"sigma": 0.1},
    {"sigma": 0.1, "adaptive_noise": True},
    {"sigma": 0.1, "adaptive_noise": True, "noise_reference": "gradient"},
    {"sigma": 0.1, "adaptive_noise": True, "noise_reference": "gradient", "instant_noise_scale": False},
]


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)) for shape in shapes]


def set_gradients(params: list[nn.Parameter], step: int, scale: float = 1.0, missing: set[int] = frozenset()) -> None:
    """Gradients that depend on the step alone; parameters in ``missing`` get none."""
    generator = torch.Generator().manual_seed(1000 + step)
    for i, param in enumerate(params):
        grad = scale * torch.randn(param.shape, generator=generator, dtype=torch.float32)
        param.grad = None if i in missing else grad.to(param.dtype)


def values(params: list[nn.Parameter]) -> list[Tensor]:
    return [param.detach().clone() for param in params]


def assert_equal(left: list[Tensor], right: list[Tensor], **tolerance: float) -> None:
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, **(tolerance or {"atol": 0, "rtol": 0}))
