"""What a response to drift does to a learner: statistics restart, weights are reordered, softened or replaced."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from driftproof.nn.types import Rewiring
from driftproof.state import copy_tree

if TYPE_CHECKING:
    from driftproof.learner.learner import Learner


@torch.no_grad()
def restart_optimizer(learner: Learner) -> None:
    """Restart the optimizer's moments and the statistics of variance gradient scaling."""
    for state in learner.optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor):
                value.zero_()  # In place: a captured CUDA graph goes on with these tensors.
            elif isinstance(value, int | float) and not isinstance(value, bool):
                state[name] = type(value)(0)
    if learner.vgs is not None:
        learner.vgs.reset_statistics()
    learner.tensors_were_replaced()


@torch.no_grad()
def soften(learner: Learner) -> None:
    """Move heads and last layers halfway to fresh ones."""
    policy = learner.policy
    for own, fresh in zip(policy.last_parameters(), policy.fresh().last_parameters(), strict=True):
        own.lerp_(fresh.to(own), 0.5)


@torch.no_grad()
def rewire(learner: Learner, found: Rewiring) -> None:
    """Reorder weights, and what belongs to them, for sensors and actions that were reordered or inverted."""
    policy, initial = learner.policy, learner.initial_weights
    if initial is not None:
        own = copy_tree(policy.state_dict())
        policy.load_state_dict({**own, **initial.state_dict()})
        policy.rewire(found)
        initial.load_state_dict(dict(policy.named_parameters()))
        policy.load_state_dict(own)
    policy.rewire(found)
    if learner.normalizer is not None:
        learner.normalizer.rewire(found.sensors, found.sensor_signs)


@torch.no_grad()
def renew(learner: Learner) -> None:
    """Replace all weights by fresh ones, and restart the scale of returns and the KL penalty, which belong to them."""
    learner.policy.load_state_dict(learner.policy.fresh().state_dict())
    learner.return_scale.restart()
    if learner.normalizer is not None:
        learner.normalizer.restart()
    if learner.initial_weights is not None:
        learner.initial_weights.load_state_dict(dict(learner.policy.named_parameters()))
    if learner.kl_penalty is not None:
        learner.kl_penalty.load_state_dict(learner.kl_penalty.initial_state_dict())
