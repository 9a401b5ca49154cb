"""Advantages and returns of a rollout, and statistics over its real transitions.

A rollout is ``[T, N]``: steps and environments. A leading member axis ``[M, T, N]`` holds independent
agents, such as the members of a population.
"""

from __future__ import annotations

import torch
from torch import Tensor

from driftproof._members import Number, per_member

_ROUNDING = 1e-6
"""Relative to the mean, a standard deviation this small is float32 rounding of equal numbers."""


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
    """Generalised advantage estimates (Schulman et al., 2016, arXiv 1506.02438) with bootstrapping at time limits.

    Estimates do not cross the end of an episode. The value after its last step is 0 if the episode terminated, or the
    value of its last observation if a time limit truncated it.

    Args:
        rewards: Rewards ``[..., T, N]``.
        values: Values of the observations before each step, ``[..., T, N]``.
        last_values: Values of the observations after the last step, ``[..., N]``.
        dones: Where an episode terminated or was truncated at this step, ``[..., T, N]`` bool.
        bootstrap_values: At the last step of each truncated episode, the value of its last observation; zero where
            an episode terminated, ignored elsewhere. ``[..., T, N]``.
        gamma: Discount, or one per member ``[M]``.
        gae_lambda: λ of GAE, from 0 (one-step TD error) to 1 (Monte Carlo returns); or one per member.
        valid: Which steps are real transitions, ``[..., T, N]`` bool; ``None``: all. The step in which a vector
            environment resets itself is none: its advantage is 0, and its return equals the value.

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
    """Advantages with mean 0 and standard deviation 1 over steps and environments, per member.

    A single advantage, or several equal ones, are centred only.

    Args:
        advantages: Advantages ``[..., T, N]``.
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
    """Share of the returns' variance that the values explain: 1 at best, 0 for a constant, negative for worse.

    Args:
        values: Predicted values ``[..., T, N]``.
        returns: Returns ``[..., T, N]``.
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
    """Mean and variance over the valid elements, reduced dimensions kept; zeros where no element is valid."""
    count = valid.sum(dim, keepdim=True)
    mean = torch.where(valid, x, 0).sum(dim, keepdim=True) / count.clamp_min(1)
    squares = torch.where(valid, x - mean, 0).square().sum(dim, keepdim=True)
    return mean, squares / (count - correction).clamp_min(1)


def _is_flat(mean: Tensor, variance: Tensor) -> Tensor:
    return variance <= (_ROUNDING * mean).square()


def _check_shapes(like: Tensor, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.shape != like.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {tuple(like.shape)} as the rollout has")
