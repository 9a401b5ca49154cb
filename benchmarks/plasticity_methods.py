"""Update rules for many small networks at once, for benchmarks/plasticity.py.

A member is one network with a configuration and a seed of its own; its weights are a row of ``[M, weights]``.
Configurations of one rule are updated together, with settings of their own for each member.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from driftproof.optim import functional


@dataclass(frozen=True)
class Config:
    """One method with all its settings; settings that a rule does not know are 0."""

    method: str
    lr: float
    decay: float = 0.0
    sigma: float = 0.0
    beta_utility: float = 0.9
    gate: str = "anchored"
    temperature: float = 1.0
    gaussian: bool = False

    @property
    def label(self) -> str:
        """The settings in words, as far as they matter for the method."""
        words = [f"lr {self.lr:g}"]
        words += [f"decay {self.decay:g}"] if self.decay else []
        words += [f"σ {self.sigma:g}"] if self.sigma else []
        if "UPGD" in self.method and self.temperature > 0:
            words += [f"β {self.beta_utility:g}"]
            words += [f"{self.gate} gate"] if self.gate != "anchored" else []
            words += [f"τ {self.temperature:g}"] if self.temperature != 1.0 else []
        words += ["Gaussian noise"] if self.gaussian else []
        return ", ".join(words)

    @property
    def kind(self) -> tuple[object, ...]:
        """Configurations of one kind share a rule. Noise is dear, so that those without it keep to themselves."""
        return RULES[self.method].__name__, self.gate, self.gaussian, self.sigma > 0


class Rule:
    """Base: updates all weights of its members, which are one row each.

    Args:
        configs: The configuration of each member.
        weights: ``[M, weights]``, updated in place.
        layers: Views into the same memory, weights ``[M, in, out]`` and biases ``[M, 1, out]`` of each layer.
    """

    def __init__(self, configs: Sequence[Config], weights: Tensor, layers: list[Tensor]) -> None:
        self.weights = weights
        self.layers = layers
        self.lr, self.decay, self.sigma = (
            torch.tensor([getattr(c, name) for c in configs]).view(-1, 1) for name in ("lr", "decay", "sigma")
        )

    def step(self, grads: Tensor, hidden: list[Tensor]) -> None:
        """Update with gradients ``[M, weights]``; ``hidden`` are the activations ``[M, 1, units]``."""
        raise NotImplementedError


class SGD(Rule):
    """Plain gradient descent."""

    def step(self, grads: Tensor, hidden: list[Tensor]) -> None:
        self.weights.addcmul_(self.lr, grads, value=-1)


class L2(Rule):
    """Gradient descent with weights drawn to zero."""

    def step(self, grads: Tensor, hidden: list[Tensor]) -> None:
        self.weights.mul_(1 - self.lr * self.decay).addcmul_(self.lr, grads, value=-1)


class L2Init(Rule):
    """Gradient descent with weights drawn to where they began (Kumar et al., arXiv 2308.11958)."""

    def __init__(self, configs: Sequence[Config], weights: Tensor, layers: list[Tensor]) -> None:
        super().__init__(configs, weights, layers)
        self.initial = weights.clone()

    def step(self, grads: Tensor, hidden: list[Tensor]) -> None:
        pull = self.weights.sub(self.initial).mul_(self.decay).add_(grads)
        self.weights.addcmul_(self.lr, pull, value=-1)


class ShrinkAndPerturb(Rule):
    """Gradient descent, with shrinking and Gaussian noise in every step (Ash & Adams, arXiv 1910.08475)."""

    def step(self, grads: Tensor, hidden: list[Tensor]) -> None:
        noisy = torch.randn_like(grads).mul_(self.sigma).add_(grads)
        self.weights.mul_(1 - self.lr * self.decay).addcmul_(self.lr, noisy, value=-1)


class Adam(Rule):
    """Adam, with decoupled decay where there is any."""

    def __init__(self, configs: Sequence[Config], weights: Tensor, layers: list[Tensor]) -> None:
        super().__init__(configs, weights, layers)
        self.first, self.second = torch.zeros_like(weights), torch.zeros_like(weights)
        self.count = 0

    def step(self, grads: Tensor, hidden: list[Tensor]) -> None:
        self.count += 1
        self.first.lerp_(grads, 0.1)
        self.second.mul_(0.999).addcmul_(grads, grads, value=0.001)
        root = (self.second / (1 - 0.999**self.count)).sqrt_().add_(1e-8)
        direction = torch.div(self.first, root, out=root)
        self.weights.mul_(1 - self.lr * self.decay)
        self.weights.addcmul_(self.lr, direction, value=-1 / (1 - 0.9**self.count))


class ContinualBackprop(SGD):
    """Gradient descent that replaces the least useful mature hidden units (Dohare et al., Nature 2024)."""

    rate = 1e-4
    maturity = 100
    memory = 0.99

    def __init__(self, configs: Sequence[Config], weights: Tensor, layers: list[Tensor]) -> None:
        super().__init__(configs, weights, layers)
        widths = [layer.shape[2] for layer in layers[:-2:2]]
        self.utility = [torch.zeros(len(configs), width) for width in widths]
        self.age = [torch.zeros(len(configs), width) for width in widths]
        self.due = [torch.zeros(len(configs)) for _ in widths]

    def step(self, grads: Tensor, hidden: list[Tensor]) -> None:
        super().step(grads, hidden)
        for i, activations in enumerate(hidden):
            contribution = activations.squeeze(1).abs() * self.layers[2 * i + 2].abs().sum(2)
            self.utility[i].lerp_(contribution, 1 - self.memory)
            mature = self.age[i].add_(1) > self.maturity
            self.due[i].add_(mature.sum(1), alpha=self.rate)
            if self.due[i].max() >= 1:
                self._replace(i, mature)

    def _replace(self, i: int, mature: Tensor) -> None:
        incoming, bias, outgoing = self.layers[2 * i : 2 * i + 3]
        score = torch.where(mature, self.utility[i] / (1 - self.memory ** self.age[i]), torch.inf)
        bound = incoming.shape[1] ** -0.5
        for member in torch.nonzero(self.due[i] >= 1).flatten().tolist():
            unit = int(score[member].argmin())
            incoming[member, :, unit].uniform_(-bound, bound)
            bias[member, :, unit] = 0
            outgoing[member, unit] = 0
            self.utility[i][member, unit] = 0
            self.age[i][member, unit] = 0
            self.due[i][member] -= 1


class UPGDFamily(Rule):
    """UPGD, and with moments AdaptiveUPGD and UPGDW, through the functional core of the library."""

    betas: tuple[float, float] | None = None

    def __init__(self, configs: Sequence[Config], weights: Tensor, layers: list[Tensor]) -> None:
        super().__init__(configs, weights, layers)
        first = configs[0]
        self.noise = gaussian_noise if first.gaussian else functional.draw_noise
        settings = functional.Settings(
            lr=shared([c.lr for c in configs]),
            weight_decay=shared([c.decay for c in configs]),
            sigma=shared([c.sigma for c in configs]),
            beta_utility=shared([c.beta_utility for c in configs]),
            betas=self.betas,
            gate=first.gate,
            temperature=shared([c.temperature for c in configs]),
        )
        zeros = [torch.zeros_like(weights) for _ in range(3)]
        self.group = functional.Group(
            settings,
            params=[weights],
            utilities=zeros[:1],
            steps=[torch.zeros(())],
            first_moments=zeros[1:2] if self.betas else [],
            second_moments=zeros[2:] if self.betas else [],
        )
        self.scratch = functional.Scratch()

    def step(self, grads: Tensor, hidden: list[Tensor]) -> None:
        self.group.grads = [grads]
        functional.upgd_step([self.group], members=True, noise=self.noise, scratch=self.scratch)


class AdamUPGD(UPGDFamily):
    betas = (0.9, 0.999)


def shared(values: list[float]) -> functional.Scalar:
    """One number if all members have the same, which is faster, else a tensor ``[M]``."""
    return values[0] if len(set(values)) == 1 else torch.tensor(values)


def gaussian_noise(count: int, device: torch.device) -> functional.RawNoise:
    return functional.RawNoise(torch.randn(count, device=device), 1.0)


RULES: dict[str, type[Rule]] = {
    "SGD": SGD,
    "SGD + L2": L2,
    "SGD + L2 to init": L2Init,
    "shrink and perturb": ShrinkAndPerturb,
    "Adam": Adam,
    "AdamW": Adam,
    "continual backprop": ContinualBackprop,
    "UPGD": UPGDFamily,
    "UPGD, frozen gate": UPGDFamily,
    "AdaptiveUPGD": AdamUPGD,
    "UPGDW": AdamUPGD,
}
