"""Attack methods that search for the worst observation in a ball: PGD, FGSM and SGLD."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from driftproof.adversarial.balls import Draws, GeneratorDraws, Size, unit_scale

if TYPE_CHECKING:
    from driftproof.settings.adversarial import PerturbationConfig


class Attack:
    """A search by steps along gradients, each followed by a projection into the ball.

    Args:
        config: Settings of the search.
        generator: Source of its random numbers.
    """

    def __init__(self, config: PerturbationConfig, generator: torch.Generator | None) -> None:
        self.config, self.generator = config, generator
        self.draws: Draws = GeneratorDraws(generator)
        """Random numbers from the generator, or those of a population's members."""

    def plan(self, radius: Size, starts_anywhere: bool) -> tuple[int, Size]:
        """Number and length of the steps.

        Args:
            radius: Current radius of the ball.
            starts_anywhere: Whether the search starts at a random point of the ball instead of its centre.
        """
        config = self.config
        in_proportion = config.attack_lr if config.epsilon == 0 else radius * (config.attack_lr / config.epsilon)
        return config.attack_steps, in_proportion

    def direction(self, gradient: Tensor, rank: int, step: int) -> Tensor:
        """The direction to ascend, of any length, from the objective's gradient.

        Args:
            gradient: Gradient of the objective ``[..., *shape]``.
            rank: Number of axes of one observation.
            step: Number of the step, from 0.
        """
        return gradient


class PGD(Attack):
    """Projected gradient ascent (Madry et al., 2018, arXiv 1706.06083)."""


class FGSM(Attack):
    """One step to the surface of the ball (Goodfellow et al., 2015, arXiv 1412.6572)."""

    def plan(self, radius: Size, starts_anywhere: bool) -> tuple[int, Size]:
        return 1, radius * 2 if starts_anywhere else radius


class SGLD(Attack):
    """Ascent with noise that fades (Welling & Teh, 2011; in SA-PPO, Zhang et al., 2020, arXiv 2003.08938)."""

    def direction(self, gradient: Tensor, rank: int, step: int) -> Tensor:
        noise = self.draws.normal(gradient)
        return unit_scale(gradient, rank) + noise * (math.sqrt(2 * self.config.attack_lr) / (step + 2))
