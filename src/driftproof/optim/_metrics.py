"""Metrics of a UPGD step, computed from state and gradients after it."""

from __future__ import annotations

import torch
from torch import Tensor

from driftproof.optim import _reference
from driftproof.optim._core import Extremes, Group

_SAMPLE = 1 << 15


def step_metrics(groups: list[Group]) -> dict[str, Tensor]:
    """See :meth:`driftproof.optim.UPGD.metrics`."""
    groups = [group.widened() for group in groups]
    device = groups[0].params[0].device
    extremes = Extremes.over([_reference.utility_extremes(group, members=False) for group in groups])
    noise_energy, direction_energy, utilities, gates = [], [], [], []
    for group in groups:
        for i, param in enumerate(group.params):
            direction = _reference.direction(group, i)
            std = _reference.noise_std(group, i, direction, members=False) if group.settings.has_noise else 0.0
            utility = _reference.corrected_utility(group, i)
            gate = _reference.protection(utility, extremes.to(param.device, param.dtype), group.settings)
            noise_energy.append(torch.zeros((), device=device) + std**2 * param.numel())
            direction_energy.append(direction.square().sum().to(device))
            utilities.append(utility.flatten().to(device))
            gates.append(gate.flatten().to(device))
    all_gates, all_utilities = torch.cat(gates), torch.cat(utilities)
    # A regular sample bounds the cost of sorting; indices known to the host need no synchronisation.
    ordered = all_utilities[:: -(-all_utilities.numel() // _SAMPLE)].sort().values
    ratio = torch.stack(noise_energy).sum() / torch.stack(direction_energy).sum()
    return {
        "upgd/noise_to_direction": ratio.sqrt().nan_to_num(0, posinf=torch.inf),
        "upgd/gate_mean": all_gates.mean(),
        "upgd/gate_std": all_gates.std(correction=0),
        **{f"upgd/utility_p{percent}": ordered[(ordered.numel() - 1) * percent // 100] for percent in (10, 50, 90)},
    }
