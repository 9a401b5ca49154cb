"""Noise for sampling the actions of all members."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from driftproof.learner.population import MemberGenerators, PopulationRollout
from driftproof.nn.stacked import StackedPolicy


def action_noise(
    policy: StackedPolicy, rollout: PopulationRollout, generators: MemberGenerators, members: Sequence[int]
) -> Tensor:
    """Noise for the steps of a rollout ``[M, T, N, ...]``, as each of these members draws it alone on a CPU."""
    distribution, shape = policy.like.distribution, (rollout.steps, rollout.envs)
    if not generators.is_single:
        return distribution.noise(rollout.members, *shape, device=rollout.device)
    drawn = generators.each(members, lambda _: distribution.noise(*shape))
    noise = torch.zeros(rollout.members, *drawn[0].shape, dtype=drawn[0].dtype)
    for member, part in zip(members, drawn, strict=True):
        noise[member] = part
    return noise
