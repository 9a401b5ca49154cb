"""The losses of PPO as pure functions over samples ``[...]``, or those of several members ``[M, ...]``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from driftproof._members import Number, per_member
from driftproof.nn.heads import ClipMode, ValueHead


class PolicyLoss(NamedTuple):
    """What the surrogate objective of PPO says, per sample ``[...]``."""

    loss: Tensor
    clipped: Tensor


def mean(values: Tensor, valid: Tensor | None, members: bool = False) -> Tensor:
    """The mean over samples without those where ``valid`` is 0; with ``members``, each member's ``[M]``."""
    if members:
        values, valid = values.flatten(1), None if valid is None else valid.flatten(1)
        return values.mean(1) if valid is None else (values * valid).sum(1) / valid.sum(1).clamp_min(1)
    if valid is None:
        return values.mean()
    return (values * valid).sum() / valid.sum().clamp_min(1)


def policy_loss(log_ratio: Tensor, advantages: Tensor, clip_range: Number) -> PolicyLoss:
    """PPO's clipped surrogate (Schulman et al., 2017, arXiv 1707.06347).

    Args:
        log_ratio: Log-probability of the action now, less that when it was taken.
        advantages: How much better than expected the action was.
        clip_range: The ratio of probabilities may leave 1 by this much before there is no more to gain; or per member.
    """
    clip_range = per_member(clip_range, log_ratio)
    ratio = log_ratio.exp()
    # min(A * ratio, A * clipped ratio) bounds the ratio from above where A is positive, else from below. So written, it
    # has half as many operations to differentiate.
    worse = advantages < 0
    low, high = torch.where(worse, 1 - clip_range, -torch.inf), torch.where(worse, torch.inf, 1 + clip_range)
    loss = ratio.clamp(low, high) * -advantages
    return PolicyLoss(loss, ((ratio.detach() - 1).abs() > clip_range).to(loss.dtype))


def value_loss(
    head: ValueHead,
    prediction: Tensor,
    targets: Tensor,
    old_prediction: Tensor | None = None,
    clip_mode: ClipMode | None = None,
    clip_range: Number = 0.0,
) -> Tensor:
    """One critic's loss per sample; with a clip mode the larger of the plain one and that of the clipped prediction.

    Args:
        head: The critic's head.
        prediction: What it says now.
        targets: Normalised returns.
        old_prediction: What the same critic said during the rollout, for clipping.
        clip_mode: What of the prediction is kept near the old one.
        clip_range: How near, in standard deviations of returns; a number, or one per member.
    """
    loss = head.loss(prediction, targets)
    if clip_mode is None or old_prediction is None:
        return loss
    clipped = head.clip_to(prediction, old_prediction, clip_mode, clip_range)
    return torch.maximum(loss, head.loss(clipped, targets))
