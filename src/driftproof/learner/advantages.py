"""Advantages and returns of a rollout, and statistics over its real transitions.

A rollout is ``[T, N]``: steps and environments. Leading axes ``[M, T, N]`` never mix, such as members of a population.
"""

from __future__ import annotations

import torch
from torch import Tensor

from driftproof._members import Number, per_member

_ROUNDING = 1e-6
"""A spread that is this small relative to the mean is what float32 makes of equal numbers."""


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    last_values: Tensor,
    dones: Tensor,
    bootstrap_values: Tensor,
    *,
    gamma: Number,
    gae_lambda: Number,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates (Schulman et al., 2016, arXiv 1506.02438), which know time limits.

    Nothing crosses the end of an episode. The value after its last step is 0 if the episode terminated, or that of its
    last observation if it was cut off by a time limit.

    Args:
        rewards: ``[..., T, N]``.
        values: Of the observations before each step, ``[..., T, N]``.
        last_values: Of the observations after the last step, ``[..., N]``.
        dones: Where an episode ended with this step, in whatever way, ``[..., T, N]`` bool.
        bootstrap_values: Of the last observation of each episode that was cut off, at its last step; zero where an
            episode terminated, ignored elsewhere. ``[..., T, N]``.
        gamma: Discount, or one per member ``[M]``.
        gae_lambda: From 0, one step and then the value, to 1, rewards as far as they are known; or one per member.
        valid: Where transitions are real, ``[..., T, N]`` bool; ``None``: everywhere. An environment that resets itself
            in the step after an episode makes one that is not: its advantage is 0, and its return the value.

    Returns:
        Advantages and returns, ``[..., T, N]`` each.
    """
    valid = torch.ones_like(dones) if valid is None else valid
    _check_shapes(rewards, values=values, dones=dones, bootstrap_values=bootstrap_values, valid=valid)
    _check_shapes(rewards[..., 0, :], last_values=last_values)
    gamma, gae_lambda = per_member(gamma, rewards), per_member(gae_lambda, rewards)
    following = torch.cat((values[..., 1:, :], last_values.unsqueeze(-2)), -2)
    next_values = torch.where(dones, bootstrap_values, following)
    advantages = torch.where(valid, rewards + gamma * next_values - values, 0)
    decay = gamma * gae_lambda * (valid & ~dones).to(rewards.dtype)
    # advantages[t] sums `span` errors from t on, and decay[t] is the factor of the one after: both double their reach
    # in every round. A loop over steps launches T kernels instead of a few per doubling.
    steps, span = rewards.shape[-2], 1
    while span < steps:
        head, tail = advantages[..., :-span, :], advantages[..., span:, :]
        extended = torch.addcmul(head, decay[..., : steps - span, :], tail)
        advantages = torch.cat((extended, advantages[..., -span:, :]), -2)
        decay = decay[..., :-span, :] * decay[..., span:, :]
        span *= 2
    return advantages, advantages + values


@torch.no_grad()
def normalize_advantages(advantages: Tensor, valid: Tensor | None = None, eps: float = 1e-8) -> Tensor:
    """Advantages with mean 0 and standard deviation 1 over steps and environments, of each member for itself.

    A single advantage, or several that are equal, are centred only.

    Args:
        advantages: ``[..., T, N]``.
        valid: Which of them count, ``[..., T, N]`` bool; the others become 0. ``None``: all.
        eps: Added to the standard deviation.
    """
    valid = torch.ones_like(advantages, dtype=torch.bool) if valid is None else valid
    _check_shapes(advantages, valid=valid)
    mean, variance = masked_moments(advantages, valid, dim=(-2, -1), correction=1)
    divisor = torch.where(_is_flat(mean, variance), 1, variance.sqrt() + eps)
    return torch.where(valid, (advantages - mean) / divisor, 0)


@torch.no_grad()
def explained_variance(values: Tensor, returns: Tensor, valid: Tensor | None = None) -> Tensor:
    """The share of the variance of returns that the values foresaw: 1 at best, 0 for a constant, below that for worse.

    Args:
        values: ``[..., T, N]``.
        returns: ``[..., T, N]``.
        valid: Which of them count, ``[..., T, N]`` bool; ``None``: all.

    Returns:
        One number, or one per member ``[...]``; 0 where all returns are equal.
    """
    valid = torch.ones_like(returns, dtype=torch.bool) if valid is None else valid
    _check_shapes(returns, values=values, valid=valid)
    mean, variance = masked_moments(returns, valid, dim=(-2, -1))
    _, unexplained = masked_moments(returns - values, valid, dim=(-2, -1))
    flat = _is_flat(mean, variance)
    return torch.where(flat, 0, 1 - unexplained / torch.where(flat, 1, variance))[..., 0, 0]


def masked_moments(x: Tensor, valid: Tensor, dim: tuple[int, ...], correction: int = 0) -> tuple[Tensor, Tensor]:
    """Mean and variance over the valid elements, with their dimensions kept; zeros where there is none."""
    count = valid.sum(dim, keepdim=True)
    mean = torch.where(valid, x, 0).sum(dim, keepdim=True) / count.clamp_min(1)
    squares = torch.where(valid, x - mean, 0).square().sum(dim, keepdim=True)
    return mean, squares / (count - correction).clamp_min(1)


def _is_flat(mean: Tensor, variance: Tensor) -> Tensor:
    return variance <= (_ROUNDING * mean).square()


def _check_shapes(like: Tensor, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.shape != like.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, but the rollout wants {tuple(like.shape)}")
