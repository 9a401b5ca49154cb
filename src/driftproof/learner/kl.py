"""KL divergence of an update: an estimate, early stopping, and a penalty with a controlled coefficient.

Early stopping and penalty serve a single agent, or several members at once: state and, where they differ, settings are
then tensors ``[M]``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, get_args

import torch
from torch import Tensor

from driftproof._arguments import check_count, check_option
from driftproof._members import Number, assign, check_numbers, load_numbers, member_shape
from driftproof.settings.agent import KLPenaltySettings, StopMode
from driftproof.settings.definition import documented, takes
from driftproof.state.schema import check, scalars, table

_LARGEST_ERROR = 1e3
"""Bound of the relative error: enough for any coefficient to reach its bound; an exact KL may be infinite."""
_LARGEST_COEFFICIENT = 1e6
"""Largest coefficient in a loaded state; a larger one would make losses infinite."""


def approximate_kl(log_ratio: Tensor) -> Tensor:
    """An estimate of KL(old‖new) per sample that is unbiased and never negative.

    The estimator ``k3`` of http://joschu.net/blog/kl-approx.html.

    Args:
        log_ratio: ``log π_new(a) - log π_old(a)`` of actions that the old policy took.
    """
    # Rounding can give small negative numbers.
    return (torch.expm1(log_ratio) - log_ratio).clamp_min(0)


class KLStop:
    """Ends an update early once the policy has moved too far.

    All flags stay on the device: :meth:`observe` returns a factor, 1 to continue and 0 once stopped, to multiply the
    remaining steps with. A minibatch is *above* if its KL exceeds ``tolerance * target``. NaN does not count as above:
    such a minibatch is skipped anyway.

    Args:
        target: Target KL, typically 0.005 to 0.05; ``None``: never stop.
        mode: ``"absolute"``: stop at the first minibatch above. ``"consecutive"``: after ``patience`` of them in a row.
            ``"fraction"``: once more than ``fraction`` of all minibatches of the update were above.
        tolerance: Multiple of the target above which a minibatch counts.
        patience: Minibatches in a row, for ``"consecutive"``.
        fraction: Share of minibatches, for ``"fraction"``.
        device: Device of the flags.
        members: Number of agents; ``None``: one, with 0-dim numbers.
    """

    target: Tensor
    """Target KL, infinite for ``None``; :meth:`set_target` changes it."""

    def __init__(
        self,
        target: Number | None,
        mode: StopMode = "absolute",
        tolerance: Number = 1.5,
        patience: int = 3,
        fraction: Number = 0.25,
        device: torch.device | str | None = None,
        members: int | None = None,
    ) -> None:
        check_option("mode", mode, get_args(StopMode))
        check_numbers("tolerance", tolerance, above=0)
        check_count("patience", patience, at_least=1)
        check_numbers("fraction", fraction, at_least=0, below=1)
        self.mode: StopMode = mode
        self.tolerance = tolerance
        self.patience = patience
        self.fraction = fraction
        shape = member_shape(members)
        self.target = torch.empty(shape, dtype=torch.float32, device=device)
        self._go_on = torch.ones(shape, dtype=torch.float32, device=device)
        self._count = torch.zeros(shape, dtype=torch.float32, device=device)
        self._limit = torch.ones(shape, dtype=torch.float32, device=device)
        self.on_host = members is None and self._count.is_cpu
        """Whether the host may read the flags."""
        self.set_target(target)
        self.reset(1)

    def set_target(self, target: Number | None) -> None:
        """Change the target KL."""
        if target is not None:
            check_numbers("target", target, above=0)
        assign(self.target, math.inf if target is None else target)

    @torch.no_grad()
    def reset(self, total: int | Tensor) -> None:
        """Clear the flags at the beginning of an update.

        Args:
            total: Minibatches of the update, over all epochs; or each member's.
        """
        if not isinstance(total, Tensor):
            check_count("total", total)
        self._go_on.fill_(1)
        self._count.zero_()
        assign(self._limit, self._most_above(total) + 1)

    @torch.no_grad()
    def observe(self, kl: Tensor) -> Tensor:
        """Count the KL of a minibatch, 0-dim or ``[M]``.

        Returns:
            1 to continue, or 0 once stopped, in the same shape.
        """
        if self.on_host and not kl.item() > self.tolerance * self.target.item() and self._count.item() == 0:
            return self._go_on.clone()  # Nothing is counted.
        above = (kl > self.tolerance * self.target).float()
        self._count.add_(above)
        if self.mode == "consecutive":
            self._count.mul_(above)
        self._go_on.mul_((self._count < self._limit).float())
        return self._go_on.clone()

    @property
    def goes_on(self) -> Tensor:
        """Whether the update has not been stopped; 0-dim or ``[M]``."""
        return self._go_on > 0

    def halt(self) -> None:
        """Stop now."""
        self._go_on.zero_()

    def state_tensors(self) -> list[Tensor]:
        """The tensors of the flags, not copies."""
        return [self._go_on, self._count, self._limit]

    def _most_above(self, total: int | Tensor) -> Number:
        """Largest number of minibatches above, in a row or in total, that does not stop the update."""
        if self.mode == "absolute":
            return 0
        if self.mode == "consecutive":
            return self.patience - 1
        # Rounding: 0.29 * 100 is slightly less than 29, in float32 more so than in float64.
        most = self.fraction * total
        return (most * (1 + 1e-6)).floor() if isinstance(most, Tensor) else math.floor(most + 1e-9)


@documented(KLPenaltySettings)
class KLPenalty:
    """PID-controlled coefficient of a penalty on KL(old‖new), which keeps the KL of updates near a target.

    After each update, from the error ``e = kl / target - 1``, the coefficient becomes ``kp * e + integral +
    kd * (e - previous e)`` within ``[0, max_coef]``, and ``integral`` has grown by ``ki * e``. The integral stops
    growing where the coefficient reaches its bound (anti-windup). Such control of a penalty is due to Stooke, Achiam &
    Abbeel, "Responsive Safety in Reinforcement Learning by PID Lagrangian Methods", ICML 2020 (arXiv 2007.03964).

    The default gains were chosen in simulations of updates whose KL is ``k / (1 + c * coefficient)``, or ``k`` over the
    square, for many ``k`` and ``c``, with noise and a change of ``k`` halfway; the tests repeat them. A derivative gain
    made nearly all of them worse: it amplifies noise.

    While steps are small, normalised advantages call for a coefficient of ``1 / √(2 * target)`` at most, which is 7 for
    a target of 0.01.
    """

    target: Tensor
    """Target KL; :meth:`set_target` changes it."""

    coefficient: Tensor
    """Coefficient of the KL in the loss, 0-dim or ``[M]``; :meth:`update` changes it in place."""

    @takes(KLPenaltySettings)
    def __init__(self, given: KLPenaltySettings) -> None:
        self.kp: Number = given.kp
        self.ki: Number = given.ki
        self.kd: Number = given.kd
        self.max_coef: Number = given.max_coef
        self.init_coef: Number = given.init_coef
        self.members = given.members
        shape = member_shape(given.members)
        self.target = torch.empty(shape, dtype=torch.float32, device=given.device)
        self.coefficient = torch.zeros(shape, dtype=torch.float32, device=given.device)
        self._integral = torch.zeros(shape, dtype=torch.float32, device=given.device)
        self._previous_error = torch.zeros(shape, dtype=torch.float32, device=given.device)
        self._updates = torch.zeros(shape, dtype=torch.float32, device=given.device)
        assign(self.coefficient, given.init_coef)
        assign(self._integral, given.init_coef)
        self.set_target(given.target)

    def set_target(self, target: Number) -> None:
        """Change the target KL."""
        check_numbers("target", target, above=0)
        assign(self.target, target)

    @torch.no_grad()
    def update(self, kl: Tensor) -> None:
        """Adjust the coefficient at the end of an update.

        Args:
            kl: The exact KL(old‖new), averaged over the update, 0-dim or ``[M]``. If it is NaN, nothing changes.
        """
        error = (kl / self.target - 1).clamp_max(_LARGEST_ERROR)
        usable = ~error.isnan()
        error = torch.where(usable, error, self._previous_error)
        change = torch.where(self._updates > 0, error - self._previous_error, 0)
        reaction = self.kp * error + self.kd * change
        grown = self._integral + self.ki * error
        # Anti-windup by conditional integration: at the bound, the integral may only move back.
        up = torch.maximum(self._integral, torch.minimum(grown, self.max_coef - reaction))
        down = torch.minimum(self._integral, torch.maximum(grown, -reaction))
        integral = _bounded(torch.where(error > 0, up, down), self.max_coef)
        coefficient = _bounded(reaction + integral, self.max_coef)
        self.coefficient.copy_(torch.where(usable, coefficient, self.coefficient))
        self._integral.copy_(torch.where(usable, integral, self._integral))
        self._previous_error.copy_(error)
        self._updates.add_(usable.float())

    def state_dict(self) -> dict[str, Tensor]:
        """A copy of the controller's state. Settings, including the target, are not part of it."""
        return {name: tensor.clone() for name, tensor in self.tensors().items()}

    def initial_state_dict(self) -> dict[str, Tensor]:
        """The state before the first update."""
        initial = {"coefficient": self.init_coef, "integral": self.init_coef, "previous_error": 0.0, "updates": 0.0}
        state = self.state_dict()
        for name, tensor in state.items():
            assign(tensor, initial[name])
        return state

    def check_state_dict(self, state_dict: Any) -> None:
        """Raise a ``CheckpointError`` unless this is the state of such a controller. Waits for the state's device."""
        rules = {
            "coefficient": scalars(self.members, at_least=0, at_most=_LARGEST_COEFFICIENT),
            "integral": scalars(self.members, at_least=0, at_most=_LARGEST_COEFFICIENT),
            "previous_error": scalars(self.members, at_least=-_LARGEST_ERROR, at_most=_LARGEST_ERROR),
            "updates": scalars(self.members, at_least=0),
        }
        check("kl_penalty", state_dict, table(rules))

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the controller's state. Waits for the device that the state is on.

        Raises:
            CheckpointError: The state does not fit; nothing has changed.
        """
        self.check_state_dict(state_dict)
        for name, tensor in self.tensors().items():
            load_numbers(tensor, state_dict[name])

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the state by name, not copies."""
        return {
            "coefficient": self.coefficient,
            "integral": self._integral,
            "previous_error": self._previous_error,
            "updates": self._updates,
        }


def _bounded(values: Tensor, most: Number) -> Tensor:
    return torch.clamp_max(values.clamp_min(0), most)
