"""What the agent asks of somebody who makes its observations worse while it learns; others fill it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from driftproof._members import Number
from driftproof.learner.hyperparams import Hyperparameter
from driftproof.learner.rollout import Minibatch
from driftproof.nn.types import Evaluation


class Adversary(Protocol):
    """Attacks part of every minibatch, and says what to add to the loss. A component of the agent's state."""

    def hyperparameters(self) -> Mapping[str, Hyperparameter]:
        """Numbers that may change while training, by names that the agent puts ``adversary.`` before."""

    def begin_update(self) -> None:
        """Called before the minibatches of an update."""

    def share(self, sequences: int) -> int:
        """How many of a minibatch's sequences are attacked, the first ones; they come in random order."""

    def loss(self, batch: Minibatch, clean: Evaluation, vf_coef: Number) -> tuple[Tensor, dict[str, Tensor]]:
        """What to add to the loss of a minibatch, and 0-dim numbers by name, without waiting for the device.

        The names are the same for every minibatch; their means over the update are logged as ``adversarial/...``.

        Args:
            batch: Its observations are clean; ``attacked_segments`` is the plan for its first sequences.
            clean: What the policy says of them now, with a graph.
            vf_coef: Weight of critics in the loss.
        """

    def state_dict(self) -> dict[str, Any]:
        """Counters and generators."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on as the saved one would have."""


@runtime_checkable
class AdversarySettings(Protocol):
    """What users give the agent as ``adversarial``; the same may be given to many."""

    def build(self, policy: Any, seed: int | None) -> Adversary:
        """An adversary of one agent's own.

        Args:
            policy: The agent's networks, on their device.
            seed: The agent's. Nothing may be drawn from torch's global generator, which the agent acts with.
        """


def check_adversarial(adversarial: Any) -> None:
    """Raise a ``TypeError`` unless it is ``None`` or has ``build()``."""
    if adversarial is None or (isinstance(adversarial, AdversarySettings) and not isinstance(adversarial, type)):
        return
    raise TypeError(
        "adversarial must be None or settings of adversarial training, such as "
        f"driftproof.adversarial.SAPPOConfig(robust_kl_coef=0.1), not {adversarial!r}"
    )
