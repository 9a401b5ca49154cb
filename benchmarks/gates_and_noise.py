"""Two choices in numbers: what noise is measured against, and what the gate is anchored to. A few seconds.

    python benchmarks/gates_and_noise.py

*Noise*: the norm of the noise over that of the direction, while all gradients are multiplied by a constant. *Gate*: the
effective learning rate of an ordinary weight, while two outliers are as useful, or as harmful, as any could be.
"""

from __future__ import annotations

import common
import torch
from torch import nn

from driftproof.optim import UPGD, AdaptiveUPGD

SCALES = (1.0, 1 / 6, 1e-3, 10.0)
REFERENCES = {
    "adaptive_noise=False": {},
    'noise_reference="direction"': {"adaptive_noise": True},
    'noise_reference="gradient"': {"adaptive_noise": True, "noise_reference": "gradient"},
    'noise_reference="gradient", instant_noise_scale=False': {
        "adaptive_noise": True,
        "noise_reference": "gradient",
        "instant_noise_scale": False,
    },
}


def noise_to_direction(optimizer_class: type[UPGD | AdaptiveUPGD], scale: float, options: dict[str, object]) -> float:
    """The ratio after 200 steps of regression, with the loss multiplied by ``scale``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = optimizer_class(model.parameters(), lr=1e-5, sigma=0.1, min_noise_std=1e-12, **options)
    inputs = torch.randn(512, 16)
    targets = inputs.sum(1, keepdim=True).sin()
    ratios = []
    for step in range(200):
        rows = torch.randint(512, (32,))
        optimizer.zero_grad()
        (scale * nn.functional.mse_loss(model(inputs[rows]), targets[rows])).backward()
        optimizer.step()
        if step >= 100:
            ratios.append(optimizer.metrics()["upgd/noise_to_direction"])
    return torch.stack(ratios).median().item()


def noise_table() -> str:
    rows = []
    for optimizer_class in (UPGD, AdaptiveUPGD):
        for name, options in REFERENCES.items():
            ratios = [noise_to_direction(optimizer_class, scale, options) for scale in SCALES]
            rows.append([optimizer_class.__name__, f"`{name}`", *(f"{ratio:.3g}" for ratio in ratios)])
    columns = ["optimizer", "noise", *(f"gradients × {scale:.3g}" for scale in SCALES)]
    return common.show_table("Norm of the noise over norm of the direction, σ = 0.1", columns, rows)


def effective_rate(gate: str, outliers: tuple[float, float]) -> float:
    """The step of a weight of zero utility over lr times its gradient, beside two outliers."""
    weights = torch.tensor([*outliers, 1e-6])
    param = nn.Parameter(weights.clone())
    optimizer = UPGD([param], lr=1e-9, weight_decay=0.0, sigma=0.0, gate=gate)
    param.grad = torch.tensor([-1.0, -1.0, 1.0])
    before = param.detach().double()
    optimizer.step()
    return ((before - param.detach().double())[2] / 1e-9).item()


def gate_table() -> str:
    cases = {"+1 and −1": (1.0, -1.0), "+1 and 0": (1.0, 0.0), "0 and −1": (0.0, -1.0)}
    rows = [
        [f'`gate="{gate}"`', *(f"{effective_rate(gate, outliers):.2f}" for outliers in cases.values())]
        for gate in ("anchored", "minmax")
    ]
    columns = ["", *(f"outliers {name}" for name in cases)]
    return common.show_table("Effective learning rate of a weight of zero utility", columns, rows)


if __name__ == "__main__":
    common.write_result("gates_and_noise", "python benchmarks/gates_and_noise.py", [noise_table(), gate_table()])
