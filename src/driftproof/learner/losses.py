"""The losses of PPO as pure functions over samples ``[...]``, or those of several members ``[M, ...]``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from driftproof._members import Number, per_member
from driftproof.learner.kl import approximate_kl
from driftproof.learner.networks import Distribution
from driftproof.learner.rollout import Minibatch
from driftproof.nn.heads import ClipMode, ValueHead
from driftproof.nn.types import Evaluation


class Coefficients(NamedTuple):
    """Hyper-parameters of a step, as numbers, 0-dim tensors, or one per member ``[M]``."""

    clip_range: Number
    clip_range_vf: Number
    ent_coef: Number
    vf_coef: Number
    kl_coef: Number
    max_grad_norm: Number
    exploration_floor: Number = 0.0


class PolicyLoss(NamedTuple):
    """Results of PPO's surrogate objective, per sample ``[...]``."""

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
        log_ratio: Log-probability of the action now, minus that when it was sampled.
        advantages: Advantages of the actions.
        clip_range: Distance of the probability ratio from 1 at which it is clipped; or one per member.
    """
    clip_range = per_member(clip_range, log_ratio)
    ratio = log_ratio.exp()
    # min(A * ratio, A * clipped ratio) bounds the ratio from above where A is positive, else from below. This form has
    # half as many operations to differentiate.
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
    """One critic's loss per sample; with a clip mode, the maximum of the unclipped and the clipped prediction's loss.

    Args:
        head: The critic's head.
        prediction: The critic's prediction now.
        targets: Normalised returns.
        old_prediction: The same critic's prediction during the rollout, for clipping.
        clip_mode: Which part of the prediction is clipped to the old one.
        clip_range: Largest distance from the old one, in standard deviations of returns; or one per member.
    """
    loss = head.loss(prediction, targets)
    if clip_mode is None or old_prediction is None:
        return loss
    clipped = head.clip_to(prediction, old_prediction, clip_mode, clip_range)
    return torch.maximum(loss, head.loss(clipped, targets))


def ppo_losses(
    distribution: Distribution,
    head: ValueHead,
    evaluation: Evaluation,
    batch: Minibatch,
    c: Coefficients,
    clip_mode: ClipMode | None = None,
    kl_penalty: bool = False,
    exploration_floor: bool = False,
    members: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a minibatch, and metrics by name.

    Args:
        distribution: Distribution of actions.
        head: Value head of any critic: those of several critics differ in weights alone.
        evaluation: The networks' outputs for the minibatch now, in float32.
        batch: The minibatch.
        c: Coefficients, which may differ between members.
        clip_mode: Which part of the critics' predictions is clipped to those of the rollout.
        kl_penalty: Whether the loss contains the KL divergence from the distribution that actions were drawn from.
        exploration_floor: Whether the loss contains the distance from a distribution that still explores.
        members: All tensors have a leading member axis. Loss and metrics are then ``[M]``; the gradient of the loss's
            sum is that of each member.
    """
    parameters, valid = evaluation.parameters, batch.valid
    log_probs, entropies = distribution.log_prob_and_entropy(parameters, batch.actions)
    log_ratio = log_probs - batch.log_probs
    surrogate, clipped = policy_loss(log_ratio, batch.advantages, c.clip_range)
    policy_term, entropy = mean(surrogate, valid, members), mean(entropies, valid, members)
    critic_terms = _critic_losses(head, evaluation.predictions, batch, clip_mode, c.clip_range_vf, members)
    loss = policy_term + c.vf_coef * critic_terms.mean(-1)
    if isinstance(c.ent_coef, Tensor) or c.ent_coef:
        loss = loss - c.ent_coef * entropy
    with torch.no_grad():
        approx_kl = mean(approximate_kl(log_ratio.detach()), valid, members)
    kl = approx_kl
    if kl_penalty:
        kl = mean(distribution.kl(batch.parameters, parameters), valid, members)
        loss = loss + c.kl_coef * kl
    metrics = {
        "policy_loss": policy_term,
        "entropy": entropy,
        "approx_kl": approx_kl,
        "kl": kl,
        "clip_fraction": mean(clipped, valid, members),
    }
    if exploration_floor:
        metrics["uniform_divergence"] = mean(distribution.uniform_divergence(parameters), valid, members)
        loss = loss + c.exploration_floor * metrics["uniform_divergence"]
    metrics |= {f"critic_loss_{i}": term for i, term in enumerate(critic_terms.unbind(-1), 1)}
    return loss, metrics


def _critic_losses(
    head: ValueHead,
    predictions: tuple[Tensor, ...],
    batch: Minibatch,
    clip_mode: ClipMode | None,
    clip_range: Number,
    members: bool,
) -> Tensor:
    """Each critic's mean loss ``[critics]``, or ``[M, critics]``, all at once."""
    axis = 1 if members else 0
    now = torch.stack(predictions, axis)
    then = torch.stack(batch.predictions, axis) if batch.predictions else None
    targets = batch.targets.unsqueeze(axis).expand(now.shape[:-1])
    losses = value_loss(head, now, targets, then, clip_mode, clip_range)
    valid = None if batch.valid is None else batch.valid.unsqueeze(axis).expand_as(losses)
    rows = losses.flatten(0, axis)
    means = mean(rows, None if valid is None else valid.flatten(0, axis), members=True)
    return means.view(losses.shape[: axis + 1])
