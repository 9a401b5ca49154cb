"""Generalised state-dependent exploration (gSDE): noise of Box actions that is a function of the state.

Raffin, Kober & Stulp, "Smooth Exploration for Robotic Reinforcement Learning", CoRL 2021 (arXiv 2005.05719).

Noise drawn at every step makes a robot jitter. Here an action deviates from its mean by ``latent @ weights``, where
``latent`` are the actor's last features and the weights, a random *exploration matrix*, stay the same for many steps:
similar states get similar deviations. Over all matrices, the action at a state is Gaussian with the variance
``latent² @ std²``. The rest of the library sees a Gaussian with a state-dependent standard deviation and standardised
noise that is correlated over time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

_EPSILON = 1e-6
"""Smallest variance of an action, needed where all features are 0."""


class StateDependentExploration(nn.Module):
    """Standard deviations and noise of actions from the actor's features.

    The logarithms of the matrix's standard deviations, which are learned, belong to the policy and are passed in.

    Args:
        features: Width of the actor's last features.
        dim: Size of an action.
        full_std: A standard deviation for every element of the matrix, instead of one for every feature.
        use_expln: Let standard deviations above 1 grow with the logarithm of the parameter instead of exponentially.
    """

    matrices: Tensor
    """Current exploration matrices ``[N, features, dim]``, one for each environment, in standard deviations.

    Saved with the worker that acts, not with the weights: their number is that of the environments.
    """

    def __init__(self, features: int, dim: int, full_std: bool = True, use_expln: bool = False) -> None:
        super().__init__()
        self.features, self.dim, self.full_std, self.use_expln = features, dim, full_std, use_expln
        self.register_buffer("matrices", torch.randn(1, features, dim), persistent=False)

    def initial_log_std(self, value: float) -> Tensor:
        """Initial value of the parameter, ``[features, dim]`` or ``[features, 1]``."""
        return torch.full((self.features, self.dim if self.full_std else 1), float(value))

    def draw(self, envs: int) -> None:
        """Draw new exploration matrices, one for each environment."""
        # Outside of inference mode, since they outlast the rollout.
        with torch.inference_mode(False):
            self.matrices = torch.randn(envs, self.features, self.dim, device=self.matrices.device)

    def put_in_force(self, matrices: Tensor) -> None:
        """Use these exploration matrices from now on, for any number of environments.

        Raises:
            ValueError: They have another shape than ``[N, features, dim]``, or are not finite; nothing has changed.
        """
        expected = (self.features, self.dim)
        if not isinstance(matrices, Tensor) or matrices.dim() != 3 or matrices.shape[1:] != expected:
            shape = tuple(matrices.shape) if isinstance(matrices, Tensor) else matrices
            raise ValueError(f"exploration matrices must have the shape [N, {expected[0]}, {expected[1]}], not {shape}")
        if not len(matrices) or not matrices.isfinite().all():
            raise ValueError("exploration matrices must be finite, and there must be at least one")
        self.matrices = matrices.to(self.matrices)

    def std(self, log_std: Tensor) -> Tensor:
        """Standard deviations of the matrix's elements, ``[features, dim]`` or ``[features, 1]``."""
        if not self.use_expln:
            return log_std.exp()
        # The branch that torch.where does not choose must be finite too, or its gradient is NaN.
        above = log_std.clamp_min(0)
        return torch.where(log_std > 0, above.log1p() + 1, log_std.clamp_max(0).exp())

    def log_std(self, latent: Tensor, log_std: Tensor) -> Tensor:
        """Logarithms of the actions' standard deviations, ``[..., dim]`` or ``[..., 1]``.

        Gradients go to the parameter, but not to the features, which would otherwise shrink where noise does harm.

        Args:
            latent: The actor's last features ``[..., features]``.
            log_std: The parameter.
        """
        # Autocast would round the sum to bfloat16.
        with torch.autocast(latent.device.type, enabled=False):
            variance = latent.detach().to(log_std.dtype).square() @ self.std(log_std).square()
        return (variance + _EPSILON).log() / 2

    def stepper(self, log_std: Tensor) -> Callable[[Tensor], Tensor]:
        """:meth:`log_std` without gradients, as a function; the parameter must not change while it is used."""
        variances = self.std(log_std.detach()).square()
        return lambda latent: torch.add(latent.square() @ variances, _EPSILON).log().mul(0.5)

    def noise(self, latent: Tensor, log_std: Tensor, action_log_std: Tensor) -> Tensor:
        """Standardised noise ``[B, dim]``: how far, in their standard deviations, actions are from their means.

        Each row uses its environment's matrix; if the number of rows differs from that of environments, the first.

        Args:
            latent: The actor's last features ``[B, features]``.
            log_std: The parameter.
            action_log_std: Result of :meth:`log_std` for these features.
        """
        return _standardised(latent, self.matrices * self.std(log_std), action_log_std)

    def rollout_noise(self, envs: int, sample_freq: int, log_std: Tensor) -> Callable[[int, Tensor, Tensor], Tensor]:
        """:meth:`noise` for a whole rollout, in which the parameter does not change, with matrices drawn as needed.

        Args:
            envs: Parallel environments.
            sample_freq: Steps between draws; -1: one draw at the start of the rollout.
            log_std: The parameter.

        Returns:
            A function of the step's index, the features, and the logarithms of the actions' standard deviations.
        """
        std, weights = self.std(log_std.detach()), self.matrices

        def noise(step: int, latent: Tensor, action_log_std: Tensor) -> Tensor:
            nonlocal weights
            if step == 0 or (sample_freq > 0 and step % sample_freq == 0):
                self.draw(envs)
                weights = self.matrices * std
            return _standardised(latent, weights, action_log_std)

        return noise


def _standardised(latent: Tensor, weights: Tensor, action_log_std: Tensor) -> Tensor:
    """Deviations from the mean by features ``[B, features]`` and weights ``[N, features, dim]``, over the std."""
    if len(latent) == len(weights) > 1:
        deviation = torch.bmm(latent.unsqueeze(1), weights).squeeze(1)
    else:
        deviation = latent @ weights[0]
    return deviation * (-action_log_std).exp()
