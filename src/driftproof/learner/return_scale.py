"""The running scale of returns, in which value heads predict them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from driftproof._members import Number, assign, check_numbers, listed, load_numbers, member_shape, per_member
from driftproof.learner.advantages import masked_moments
from driftproof.nn.heads import Scale
from driftproof.state.schema import check, flag, scalars, table

_LEAST_SPREAD = 1e-6
_LARGEST_MEAN = 1e18
"""Largest return whose square fits into float32."""


class ReturnScale:
    """Exponential moving mean and standard deviation of returns, and the snapshot that decodes values.

    The statistics move with every rollout; the snapshot moves only in :meth:`refresh`, so that all values of a rollout
    and of the update over it are in one scale. Order of use::

        # after the first rollout, before the first update
        scale.observe(returns, valid)
        scale.refresh()
        # during every rollout and update
        values = scale.decode(head.mean(prediction))
        loss = head.loss(prediction, scale.normalize(returns))
        # at the end of every later update
        scale.observe(returns, valid)
        head.rescale(*scale.refresh())

    Then the snapshot equals the statistics. The first rollout sets them outright, so they are unbiased from the start.
    Nothing waits for the device but :meth:`load_state_dict`.

    Args:
        decay: Decay per update; the average spans about ``1 / (1 - decay)`` updates. Closer to 1: a steadier scale that
            follows changes more slowly; typically 0.9 to 0.99.
        device: Device of the statistics.
        members: Number of agents, with returns ``[M, ...]``; ``None``: one, with 0-dim numbers.
    """

    initialised: bool
    """Whether the snapshot is the scale of what the value heads predict."""
    has_statistics: bool
    """Whether returns have been observed."""

    def __init__(
        self, decay: Number = 0.9, device: torch.device | str | None = None, members: int | None = None
    ) -> None:
        check_numbers("decay", decay, at_least=0, below=1)
        self.decay = decay
        self.members = members
        self.initialised = self.has_statistics = False
        shape = member_shape(members)
        self._mean = torch.zeros(shape, dtype=torch.float32, device=device)
        self._variance = torch.zeros(shape, dtype=torch.float32, device=device)
        self._updates = torch.zeros(shape, dtype=torch.float32, device=device)
        self._snapshot_mean = torch.zeros(shape, dtype=torch.float32, device=device)
        self._snapshot_std = torch.ones(shape, dtype=torch.float32, device=device)

    @property
    def value(self) -> Scale:
        """The statistics now; a copy."""
        return Scale(self._mean.clone(), self._std())

    @property
    def snapshot(self) -> Scale:
        """Scale that values are decoded with; a copy."""
        return Scale(self._snapshot_mean.clone(), self._snapshot_std.clone())

    @torch.no_grad()
    def start_from(self, scale: Scale) -> None:
        """Start with value heads that already predict returns in this scale; the first rollout sets the statistics."""
        check_numbers("std", scale.std, above=0)
        check_numbers("mean", scale.mean)
        assign(self._snapshot_mean, scale.mean)
        assign(self._snapshot_std, scale.std)
        self.initialised = True

    @torch.no_grad()
    def forget(self) -> None:
        """Forget the statistics: the next rollout sets them. The snapshot stays, since value heads predict in it."""
        self._updates.zero_()
        self.has_statistics = False

    @torch.no_grad()
    def restart(self) -> None:
        """Begin anew, for value heads that have not learned yet."""
        self.load_state_dict(type(self)(self.decay, members=self.members).state_dict())

    @torch.no_grad()
    def observe(self, returns: Tensor, valid: Tensor | None = None) -> None:
        """Update the statistics with the returns of one rollout; each rollout has the same weight.

        Args:
            returns: Returns in units of rewards, of any shape; of several members ``[M, ...]``.
            valid: Which of them count, bool of the same shape; ``None``: all. If none does, nothing changes,
                nor if their squares are beyond float32.
        """
        valid = torch.ones_like(returns, dtype=torch.bool) if valid is None else valid
        if valid.shape != returns.shape:
            raise ValueError(f"valid has shape {tuple(valid.shape)}, but returns {tuple(returns.shape)}")
        shape = (*self._mean.shape, -1)
        mean, variance = masked_moments(returns.float().reshape(shape), valid.reshape(shape), dim=(-1,))
        counts = valid.reshape(shape).any(-1).float()
        weight = counts * torch.where(self._updates > 0, 1 - self.decay, 1)
        difference = mean.squeeze(-1) - self._mean
        # Equal to averaging returns and their squares, without subtracting two large numbers.
        spread = self._variance + weight * difference.square()
        new_variance = spread.lerp(variance.squeeze(-1), weight)
        new_mean = self._mean + weight * difference
        usable = new_variance.isfinite() & new_mean.isfinite()
        self._variance.copy_(torch.where(usable, new_variance, self._variance))
        self._mean.copy_(torch.where(usable, new_mean, self._mean))
        self._updates.add_(counts * usable)
        self.initialised = self.has_statistics = True

    @torch.no_grad()
    def refresh(self) -> tuple[Scale, Scale]:
        """Make the snapshot equal to the statistics.

        Returns:
            The snapshots before and after, for :meth:`driftproof.nn.heads.ValueHead.rescale`.
        """
        old = self.snapshot
        self._snapshot_mean.copy_(self._mean)
        self._snapshot_std.copy_(self._std())
        return old, self.snapshot

    def normalize(self, returns: Tensor) -> Tensor:
        """Returns in units of the snapshot."""
        return (returns - per_member(self._snapshot_mean, returns)) / per_member(self._snapshot_std, returns)

    def decode(self, normalised: Tensor) -> Tensor:
        """Returns in units of rewards; the inverse of :meth:`normalize`."""
        return per_member(self._snapshot_mean, normalised) + per_member(self._snapshot_std, normalised) * normalised

    def metrics(self) -> dict[str, Tensor]:
        """The statistics as tensors, 0-dim or ``[M]``."""
        return {"return_scale/mean": self._mean.clone(), "return_scale/std": self._std()}

    def state_dict(self) -> dict[str, Any]:
        """A copy of the statistics and the snapshot. ``decay`` is not part of it."""
        return {
            **{name: tensor.clone() for name, tensor in self.tensors().items()},
            "initialised": self.initialised,
        }

    def check_state_dict(self, state_dict: Any) -> None:
        """Raise a ``CheckpointError`` unless this is the state of such a scale. Waits for the device it is on."""
        mean = scalars(self.members, at_least=-_LARGEST_MEAN, at_most=_LARGEST_MEAN)
        rules = {
            "mean": mean,
            "variance": scalars(self.members, at_least=0),
            "updates": scalars(self.members, at_least=0),
            "snapshot_mean": mean,
            "snapshot_std": scalars(self.members, above=0),
            "initialised": flag,
        }
        check("return_scale", state_dict, table(rules))

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore statistics and snapshot. Waits for the device that the state is on.

        Raises:
            CheckpointError: The state does not fit; nothing has changed.
        """
        self.check_state_dict(state_dict)
        self.initialised = bool(state_dict["initialised"])
        self.has_statistics = self.initialised and min(listed(state_dict["updates"])) > 0
        for name, tensor in self.tensors().items():
            load_numbers(tensor, state_dict[name])

    def _std(self) -> Tensor:
        # A smaller spread is rounding of equal returns, or a critic's noise where all rewards are 0: divided by it, the
        # first real reward would be enormous. Returns of rewards as small as a market's are well above.
        flat = self._variance <= _LEAST_SPREAD**2 * (1 + self._mean.square())
        return torch.where(flat, 1, self._variance.sqrt())

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the state by name, not copies."""
        return {
            "mean": self._mean,
            "variance": self._variance,
            "updates": self._updates,
            "snapshot_mean": self._snapshot_mean,
            "snapshot_std": self._snapshot_std,
        }


class UnitScale(ReturnScale):
    """Fixed scale, mean 0 and standard deviation 1, of critics that predict returns in units of rewards."""

    def observe(self, returns: Tensor, valid: Tensor | None = None) -> None:
        """Ignore the returns."""
        self.initialised = self.has_statistics = True
