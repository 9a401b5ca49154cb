"""Values, advantages and returns of a rollout, from the critics' predictions in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from driftproof._members import Number, per_member
from driftproof.learner.advantages import gae
from driftproof.learner.return_scale import ReturnScale
from driftproof.nn.heads import ValueHead

Predictions = tuple[Tensor, ...]
"""Predictions of each critic ``[..., outputs]``."""


class Experience(NamedTuple):
    """Rewards, episode ends and predictions of a rollout ``[T, N]``, or of several members' ``[M, T, N]``.

    Attributes:
        rewards: Rewards.
        dones: Where an episode terminated or was truncated.
        truncated: Where it was truncated.
        valid: Which steps are transitions.
        predictions: Predictions before each step.
        bootstraps: Predictions for the last observations of truncated episodes.
        last_predictions: Predictions after the last step ``[N]``.
    """

    rewards: Tensor
    dones: Tensor
    truncated: Tensor
    valid: Tensor
    predictions: Predictions
    bootstraps: Predictions
    last_predictions: Predictions


class Estimates(NamedTuple):
    """Values, advantages and returns of a rollout, in units of rewards ``[T, N]``, or ``[M, T, N]``.

    Attributes:
        by_critic: Values of each critic.
        values: Minimum over the critics; with ``optimism``, their mean, or less.
        advantages: Advantages of the actions taken; from CVaR values if ``cvar_alpha`` is set, and from values that
            grow with the critics' disagreement if ``optimism`` is.
        returns: λ-returns, the targets of the critics.
    """

    by_critic: list[Tensor]
    values: Tensor
    advantages: Tensor
    returns: Tensor


@torch.no_grad()
def estimate(
    heads: Sequence[ValueHead],
    scale: ReturnScale,
    experience: Experience,
    *,
    gamma: Number,
    gae_lambda: Number,
    optimism: Number | None = None,
    cvar_alpha: Number | None = None,
) -> Estimates:
    """Values, advantages and returns from the critics' predictions during the rollout.

    Args:
        heads: Value heads of the critics.
        scale: Scale of returns.
        experience: The rollout.
        gamma: Discount.
        gae_lambda: λ of GAE.
        optimism: Weight of half of the critics' distance, added to their mean; ``None``: the minimum.
        cvar_alpha: Worst share of returns that advantages are computed from; ``None``: all.
    """

    def estimates(alpha: Number | None, optimism: Number | None) -> Estimates:
        by_critic = values_by_critic(heads, scale, experience.predictions, alpha)
        values = joined(by_critic, optimism)
        ends = joined(values_by_critic(heads, scale, experience.bootstraps, alpha), optimism)
        advantages, returns = gae(
            experience.rewards,
            values,
            joined(values_by_critic(heads, scale, experience.last_predictions, alpha), optimism),
            experience.dones,
            torch.where(experience.truncated, ends, 0),
            gamma=gamma,
            gae_lambda=gae_lambda,
            valid=experience.valid,
        )
        return Estimates(by_critic, values, advantages, returns)

    # Optimism and CVaR are for the advantages only: critics trained on such returns would compound the bias at
    # every step. Below 0, optimism is the pessimism that the minimum is, in both.
    if optimism is None:
        pessimism: Number | None = None
    else:
        pessimism = optimism.clamp_max(0) if isinstance(optimism, Tensor) else min(optimism, 0.0)
    expected = estimates(None, pessimism)
    is_pessimistic = optimism is None or (not isinstance(optimism, Tensor) and optimism <= 0)
    if cvar_alpha is None and is_pessimistic:
        return expected
    return expected._replace(advantages=estimates(cvar_alpha, optimism).advantages)


def values_by_critic(
    heads: Sequence[ValueHead], scale: ReturnScale, predictions: Predictions, alpha: Number | None = None
) -> list[Tensor]:
    """Values of each critic in units of rewards: the mean, or CVaR, the mean of the worst share ``alpha``."""
    pairs = zip(heads, predictions, strict=True)
    means = [head.mean(p) if alpha is None else head.cvar(p, alpha) for head, p in pairs]
    return [scale.decode(value) for value in means]


def joined(values: list[Tensor], optimism: Number | None = None) -> Tensor:
    """The critics' minimum; or their mean plus ``optimism`` times half of their distance; -1 is the minimum."""
    if len(values) == 1:
        return values[0]
    first, second = values
    if optimism is None:
        return torch.minimum(first, second)
    if isinstance(optimism, Tensor):
        return (first + second) / 2 + per_member(optimism / 2, first) * (first - second).abs()
    return torch.add((first + second) / 2, (first - second).abs(), alpha=optimism / 2)
