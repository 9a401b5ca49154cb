"""Reorders and inverts the inputs and outputs of a policy's networks, as if sensors and actuators were wired anew."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy.typing as npt
import torch
from stable_baselines3.common.torch_layers import FlattenExtractor
from torch import Tensor, nn

from driftproof.nn.cores import Core, GRUCore, LSTMCore, NoCore
from driftproof.nn.distributions import Categorical, Gaussian

if TYPE_CHECKING:
    from driftproof.nn.policies import DistributionalPolicy


class Wiring(NamedTuple):
    """Sensors and actions of a policy.

    Attributes:
        actions: Number of actions; of several choices or components, how many there are.
        is_discrete: Whether an action is one of them.
        can_reorder: Whether actions can be reordered.
    """

    actions: int
    is_discrete: bool
    can_reorder: bool


def wiring_of(policy: DistributionalPolicy) -> Wiring | None:
    """What :func:`rewire` can reorder; ``None``: it cannot, since observations are not read directly."""
    extractors = {
        type(each) for each in (policy.features_extractor, policy.critic_features_extractor) if each is not None
    }
    if extractors != {FlattenExtractor} or not all(isinstance(c, NoCore | LSTMCore | GRUCore) for c in policy._cores()):
        return None
    distribution = policy.distribution
    if isinstance(distribution, Categorical):
        return Wiring(distribution.size, True, True)
    actions = 1
    for size in distribution.action_shape:
        actions *= size
    return Wiring(actions, False, isinstance(distribution, Gaussian))


@torch.no_grad()
def rewire(
    policy: DistributionalPolicy,
    sensors: npt.NDArray[Any],
    sensor_signs: npt.NDArray[Any],
    actions: npt.NDArray[Any],
    action_signs: npt.NDArray[Any],
) -> None:
    """Sensor ``i`` measures from now on what ``sensors[i]`` did, times its sign; and actions alike."""
    device = policy.device
    order, signs = torch.from_numpy(sensors).to(device), torch.from_numpy(sensor_signs).to(device)
    for weight in _input_weights(policy):
        weight.copy_(weight[:, order] * signs)
    head = policy.action_head
    order, signs = torch.from_numpy(actions).to(device), torch.from_numpy(action_signs).to(device)
    for parameter in head.parameters():
        parameter.copy_(parameter[order] * signs.view(-1, *[1] * (parameter.dim() - 1)))
    if isinstance(policy.distribution, Gaussian):
        log_std: Tensor = policy.log_std
        log_std.copy_(log_std[..., order] if log_std.shape[-1] == len(order) else log_std)


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
