"""Decay of the parameters towards their initial values, which keeps networks able to learn.

Kumar, Marklund & Van Roy, "Maintaining Plasticity in Continual Learning via Regenerative Regularization", 2023
(arXiv 2308.11958); here decoupled from the gradient, as weight decay is in AdamW.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from driftproof.nn.types import SECOND_CRITIC
from driftproof.state.schema import check, numbers, table


class InitialWeights:
    """Initial values of a policy's parameters, and the decay towards them.

    A decay ``p ← p - lr * decay * (p - initial)`` after each of ``n`` optimizer steps multiplies the distance from the
    initial values by ``(1 - lr * decay)^n``. :meth:`decay` does that once per update, outside of the optimizer: for all
    optimizers alike, for masked and captured steps, and at no cost per step. What an update moves then decays by all
    steps of the update instead of those that follow, a difference of a share
    ``n * lr * decay`` of that movement.

    Args:
        policy: The networks, as they are initialised.
        strength: Decay per unit of the learning rate.
    """

    def __init__(self, policy: nn.Module, strength: float) -> None:
        self.policy, self.strength = policy, strength
        self._initial = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}

    @torch.no_grad()
    def decay(self, learning_rate: float | Tensor, steps: Tensor) -> dict[str, Tensor]:
        """Decay all trainable parameters, without waiting for the device.

        Args:
            learning_rate: Learning rate of the optimizer steps.
            steps: Number of optimizer steps that were taken since the last call, 0-dim.

        Returns:
            Metrics: the root mean square of the parameters' distances from their initial values.
        """
        trained = {name: each for name, each in self.policy.named_parameters() if each.requires_grad}
        rate = torch.as_tensor(learning_rate, device=steps.device) * self.strength
        share = 1 - (1 - rate).clamp_min(0) ** steps
        distances = torch._foreach_sub([self._initial[name] for name in trained], list(trained.values()))
        count = sum(each.numel() for each in distances)
        norm = torch.stack(torch._foreach_norm(distances)).square().sum()
        torch._foreach_mul_(distances, share)
        torch._foreach_add_(list(trained.values()), distances)
        return {"train/distance_from_initial": (norm / count).sqrt() * (1 - share)}

    def state_dict(self) -> dict[str, Tensor]:
        """The initial values by the parameters' names."""
        return {name: tensor.clone() for name, tensor in self._initial.items()}

    def check_state_dict(self, state_dict: Any) -> None:
        """Raise a ``CheckpointError`` unless these are parameters of the policy, or of one like it with one critic."""
        rules = {name: numbers(tensor.shape, tensors_only=True) for name, tensor in self._initial.items()}
        # The second critic of a policy that had one before keeps its own initial values.
        second = {name: rule for name, rule in rules.items() if name.startswith(SECOND_CRITIC)}
        has_second = isinstance(state_dict, Mapping) and any(name in state_dict for name in second)
        first = {name: rule for name, rule in rules.items() if has_second or name not in second}
        check("initial_weights", state_dict, table(first))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over saved initial values.

        Raises:
            CheckpointError: They do not fit; nothing has changed.
        """
        self.check_state_dict(state_dict)
        for name, tensor in state_dict.items():
            self._initial[name].copy_(tensor)
