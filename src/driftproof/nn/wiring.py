"""Reorders and inverts the inputs and outputs of a policy's networks, as if sensors and actuators were wired anew."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from stable_baselines3.common.torch_layers import FlattenExtractor
from torch import Tensor, nn

from driftproof.nn.cores import Core, GRUCore, LSTMCore, NoCore
from driftproof.nn.distributions import Categorical, Gaussian
from driftproof.nn.types import Rewiring, Wiring

if TYPE_CHECKING:
    from driftproof.nn.policies import DistributionalPolicy


def wiring_of(policy: DistributionalPolicy) -> Wiring | None:
    """What :func:`rewire` can reorder; ``None``: it cannot, since observations are not read directly."""
    extractors = {
        type(each) for each in (policy.features_extractor, policy.critic_features_extractor) if each is not None
    }
    if extractors != {FlattenExtractor} or not {type(core) for core in policy._cores()} <= {NoCore, LSTMCore, GRUCore}:
        return None
    distribution = policy.distribution
    if isinstance(distribution, Categorical):
        return Wiring(distribution.size, True, True)
    return Wiring(math.prod(distribution.action_shape), False, isinstance(distribution, Gaussian))


@torch.no_grad()
def rewire(policy: DistributionalPolicy, found: Rewiring) -> None:
    """Reorder weights, such that the policy does with the present sensors and actions what it did with the former."""
    sensors, sensor_signs, actions, action_signs = (torch.from_numpy(part).to(policy.device) for part in found)
    for weight in _input_weights(policy):
        weight.copy_(weight[:, sensors] * sensor_signs)
    if not isinstance(policy.distribution, Categorical | Gaussian):
        return
    for parameter in policy.action_head.parameters():
        parameter.copy_(parameter[actions] * action_signs.view(-1, *[1] * (parameter.dim() - 1)))
    if isinstance(policy.distribution, Gaussian) and policy.log_std.shape[-1] == len(actions):
        policy.log_std.copy_(policy.log_std[..., actions])


def _input_weights(policy: DistributionalPolicy) -> Iterator[Tensor]:
    """Weights of the layers that read observations."""
    critics = [_first(each.network, each.head.linear) for each in policy._critics()]
    yield from _of_core(policy.actor_core, [_first(policy.actor_network, policy.action_head)])
    if policy.critic_core is not None:
        yield from _of_core(policy.critic_core, critics)
    elif isinstance(policy.actor_core, NoCore):
        yield from (layer.weight for layer in critics)


def _of_core(core: Core, following: list[nn.Linear]) -> Iterator[Tensor]:
    if isinstance(core, LSTMCore | GRUCore):
        yield core.recurrence.get_parameter("weight_ih_l0")
    else:
        yield from (layer.weight for layer in following)


def _first(network: nn.Sequential, otherwise: nn.Linear) -> nn.Linear:
    return next((layer for layer in network if isinstance(layer, nn.Linear)), otherwise)
