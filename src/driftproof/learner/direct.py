"""PPO's losses with their gradients by formula: a third of the time that autograd takes for small minibatches.

:func:`driftproof.learner.losses.ppo_losses` says what they mean. Autograd remains for what depends on the kind of
action, but for one choice: from log-probabilities and entropies to the parameters of the distribution.
"""

from __future__ import annotations

import torch
from torch import Tensor

from driftproof.learner.kl import approximate_kl
from driftproof.learner.losses import Coefficients
from driftproof.learner.networks import Distribution
from driftproof.learner.rollout import Minibatch
from driftproof.nn.heads import QuantileHead
from driftproof.nn.types import Evaluation


def direct_losses(
    distribution: Distribution,
    head: QuantileHead,
    evaluation: Evaluation,
    batch: Minibatch,
    c: Coefficients,
    exploration_floor: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and metrics of ``ppo_losses``, after its backward pass.

    Neither predictions nor the KL divergence are clipped or penalised, and all samples are valid.

    Args:
        distribution: Distribution of actions.
        head: Value head of any critic.
        evaluation: The networks' outputs for the minibatch now; the predictions are leaves, which get gradients.
        batch: The minibatch.
        c: Coefficients, as numbers or 0-dim tensors.
        exploration_floor: Whether the loss contains the distance from a distribution that still explores.
    """
    likelihood = distribution.likelihood(evaluation.parameters, batch.actions)
    with torch.no_grad():
        log_ratio = likelihood.log_prob - batch.log_probs
        policy_term, gradient, metrics = _policy_loss(log_ratio, batch.advantages, c.clip_range)
        metrics["entropy"] = likelihood.entropy.mean()
        critic_terms = _critic_losses(head, evaluation.predictions, batch.targets, c.vf_coef)
        loss = policy_term + c.vf_coef * critic_terms.mean()
        if isinstance(c.ent_coef, Tensor) or c.ent_coef:
            loss = loss - c.ent_coef * metrics["entropy"]
        if exploration_floor:
            metrics["uniform_divergence"] = likelihood.uniform_divergence()
            loss = loss + c.exploration_floor * metrics["uniform_divergence"]
    likelihood.backward(gradient, -c.ent_coef, c.exploration_floor if exploration_floor else 0.0)
    metrics |= {f"critic_loss_{i}": term for i, term in enumerate(critic_terms.unbind(), 1)}
    return loss, metrics


def _policy_loss(
    log_ratio: Tensor, advantages: Tensor, clip_range: float | Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate, its gradient with respect to the log-probabilities, and metrics."""
    ratio, costs = log_ratio.exp(), -advantages
    bounded = ratio.clamp(1 - clip_range, 1 + clip_range)  # type: ignore[arg-type]
    free, clipped = ratio * costs, bounded * costs
    surrogate = torch.maximum(free, clipped).mean()
    # The ratio is its own derivative, and a clipped one is constant.
    gradient = torch.where(free >= clipped, free, 0).div_(free.numel())
    approx_kl = approximate_kl(log_ratio).mean()
    share = (bounded != ratio).to(ratio.dtype).mean()
    return (
        surrogate,
        gradient,
        {"policy_loss": surrogate, "approx_kl": approx_kl, "kl": approx_kl, "clip_fraction": share},
    )


def _critic_losses(
    head: QuantileHead, predictions: tuple[Tensor, ...], targets: Tensor, coefficient: float | Tensor
) -> Tensor:
    """Each critic's mean quantile Huber loss ``[critics]``; sets the gradients of the predictions."""
    below, above = head.tilts
    errors = torch.stack(predictions) - targets.unsqueeze(-1)
    bounded = errors.clamp(-head.huber_kappa, head.huber_kappa)
    # The Huber loss is bounded * (error - bounded / 2), and its derivative is the bounded error.
    tilted = torch.where(errors > 0, above, below).mul_(bounded)
    losses = errors.sub_(bounded, alpha=0.5).mul_(tilted).flatten(1).sum(1) / targets.numel()
    for prediction, gradient in zip(
        predictions, tilted.mul_(coefficient / (len(predictions) * targets.numel())).unbind(), strict=True
    ):
        prediction.grad = gradient
    return losses
