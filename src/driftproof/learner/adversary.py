"""Interface of adversarial training: an adversary that perturbs observations and adds a loss term."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from driftproof._members import Number
from driftproof.learner.hyperparams import Hyperparameter
from driftproof.learner.rollout import Minibatch
from driftproof.nn.stacked import StackedPolicy
from driftproof.nn.types import Evaluation


class MemberAdversaries(Protocol):
    """The adversaries of a population's members as one, which attacks all their minibatches at once."""

    def adopt(self, member: int, adversary: Any) -> None:
        """Replace a member's adversary."""

    def begin_update(self, trains: Sequence[bool]) -> None:
        """Prepare for an update of some members."""

    def share(self, sequences: int) -> int:
        """How many of a minibatch's sequences are attacked."""

    def loss(
        self, policy: StackedPolicy, batch: Minibatch, clean: Evaluation, vf_coef: Number, proceed: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Each member's loss term ``[M]`` and metrics ``[M]``; see :meth:`Adversary.loss`.

        Members where ``proceed`` ``[M]`` is false are not attacked.
        """


class Adversary(Protocol):
    """Attacks part of every minibatch and returns a term for the loss. A component of the agent's state."""

    def hyperparameters(self) -> Mapping[str, Hyperparameter]:
        """Hyper-parameters that may change while training; the agent prefixes their names with ``adversary.``."""

    def begin_update(self) -> None:
        """Prepare for an update; called before its minibatches."""

    def share(self, sequences: int) -> int:
        """How many of a minibatch's sequences are attacked: the first ones, as their order is random."""

    def loss(self, batch: Minibatch, clean: Evaluation, vf_coef: Number) -> tuple[Tensor, dict[str, Tensor]]:
        """Term to add to the loss of a minibatch, and 0-dim metrics by name, without waiting for the device.

        The names are the same for every minibatch; their means over the update are logged as ``adversarial/...``.

        Args:
            batch: Minibatch with clean observations; ``attacked_segments`` are the segments of the attacked sequences.
            clean: The policy's outputs for the clean observations, whose gradients reach the parameters.
            vf_coef: Weight of the value loss.
        """

    def of_members(self, adversaries: Sequence[Any]) -> MemberAdversaries:
        """Adversaries of this kind as one, for the members of a population.

        Raises:
            ValueError: They differ in more than hyper-parameters, or cannot be combined.
        """

    def state_dict(self) -> dict[str, Any]:
        """Counters and random generators."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore counters and random generators."""


@runtime_checkable
class AdversarySettings(Protocol):
    """Settings of adversarial training, the agent's argument ``adversarial``; several agents may share them."""

    def build(self, policy: Any, seed: int | None) -> Adversary:
        """Build the adversary of one agent.

        Args:
            policy: The agent's networks, on their device.
            seed: The agent's seed. Do not draw from torch's global generator: the agent samples actions from it.
        """


def check_adversarial(adversarial: Any) -> None:
    """Raise a ``TypeError`` unless it is ``None`` or has ``build()``."""
    if adversarial is None or (isinstance(adversarial, AdversarySettings) and not isinstance(adversarial, type)):
        return
    raise TypeError(
        "adversarial must be None or settings of adversarial training, such as "
        f"driftproof.adversarial.SAPPOConfig(robust_kl_coef=0.1), not {adversarial!r}"
    )
