"""Metrics of a UPGD step, computed from state and gradients after it."""

from __future__ import annotations

import torch
from torch import Tensor

from driftproof.optim import _reference
from driftproof.optim._core import Extremes, Group, elements

_SAMPLE = 1 << 15


def step_metrics(groups: list[Group], members: bool = False) -> dict[str, Tensor]:
    """See :meth:`driftproof.optim.UPGD.metrics`; with a member axis, each member's ``[M]``."""
    groups = [group.widened() for group in groups]
    device = groups[0].params[0].device
    extremes = Extremes.over([_reference.utility_extremes(group, members) for group in groups])
    noise_energy, direction_energy, utilities, gates = [], [], [], []

    def rows(tensor: Tensor) -> Tensor:
        """``[elements]``, or ``[M, elements]``."""
        return tensor.flatten(1 if members else 0).to(device)

    for group in groups:
        for i, param in enumerate(group.params):
            direction = _reference.direction(group, i)
            std = _reference.noise_std(group, i, direction, members) if group.settings.has_noise else 0.0
            utility = _reference.corrected_utility(group, i)
            gate = _reference.protection(utility, extremes.to(param.device, param.dtype), group.settings)
            noise_energy.append(torch.zeros((), device=device) + std**2 * elements(param, members))
            direction_energy.append(rows(direction).square().sum(-1))
            utilities.append(rows(utility))
            gates.append(rows(gate))
    all_gates, all_utilities = torch.cat(gates, -1), torch.cat(utilities, -1)
    # A regular sample bounds the cost of sorting; indices known to the host need no synchronisation.
    ordered = all_utilities[..., :: -(-all_utilities.shape[-1] // _SAMPLE)].sort(-1).values
    ratio = torch.stack(noise_energy).sum(0) / torch.stack(direction_energy).sum(0)
    last = ordered.shape[-1] - 1
    return {
        "upgd/noise_to_direction": ratio.sqrt().nan_to_num(0, posinf=torch.inf),
        "upgd/gate_mean": all_gates.mean(-1),
        "upgd/gate_std": all_gates.std(-1, correction=0),
        **{f"upgd/utility_p{percent}": ordered[..., last * percent // 100] for percent in (10, 50, 90)},
    }
