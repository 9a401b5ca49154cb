"""Settings of attacks on observations, and of training against them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from driftproof._registry import ATTACKS
from driftproof.settings.definition import LARGE, check_values, defaults_of, setting
from driftproof.settings.unused import refuse_unused

if TYPE_CHECKING:
    from driftproof.adversarial.methods import Attack
else:
    Attack = Any

NormType: TypeAlias = Literal["linf", "l2"]
EpsilonSchedule: TypeAlias = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class PerturbationConfig:
    """Perturbation of observations: its size, and how the attack searches for the worst one.

    Distances are in units of the policy's inputs: of the normalised observation with ``VecNormalize``, of brightness
    from 0 to 1 in images that the policy divides by 255. See Madry et al., 2018, arXiv 1706.06083 (``"pgd"``),
    Goodfellow et al., 2015, arXiv 1412.6572 (``"fgsm"``), Welling & Teh, 2011, and Zhang et al., 2020, arXiv 2003.08938
    (``"sgld"``).
    """

    epsilon: float = setting(
        0.075,
        "Radius of the perturbation, in units of the policy's inputs; 0.01 to 0.2. 0: no perturbation.",
        at_least=0,
        at_most=LARGE,
    )
    attack_steps: int = setting(
        3,
        "Steps of PGD and SGLD. More find stronger attacks, at a forward and a backward pass each; 1 to 10 in "
        "training, 10 to 100 in evaluation. FGSM takes one.",
        at_least=1,
    )
    attack_lr: float = setting(
        0.03,
        "Length of a step at this epsilon; it scales with the current epsilon. FGSM always steps to the surface.",
        above=0,
    )
    random_init: bool = setting(
        True,
        "Start from a random point in the ball instead of the clean observation. Objectives whose gradient vanishes at "
        "the clean observation always do.",
    )
    norm_type: NormType = setting(
        "linf",
        "Norm of the ball: every number may change by epsilon (linf), or an observation as a whole, each part of a "
        "dictionary separately (l2).",
    )
    clip_min: float | None = setting(
        None, "Lower bound of perturbed observations, unless the clean one is below it. None: no bound."
    )
    clip_max: float | None = setting(
        None, "Upper bound of perturbed observations, unless the clean one is above it. None: no bound."
    )
    attack_method: str | type[Attack] = setting(
        "pgd",
        "pgd, projected gradient ascent; fgsm, one step to the surface; sgld, ascent with decaying noise; or a class "
        "of your own, in configurations as module:Class.",
        form=str,
        check=ATTACKS.name,
    )

    def __post_init__(self) -> None:
        check_values(self)
        if isinstance(self.attack_method, str):
            object.__setattr__(self, "attack_method", ATTACKS.name(self.attack_method))
        else:
            ATTACKS.load(self.attack_method)
        if self.clip_min is not None and self.clip_max is not None and not self.clip_min < self.clip_max:
            raise ValueError(f"clip_min={self.clip_min!r} must be below clip_max={self.clip_max!r}")


@dataclass(frozen=True)
class AdversarialSettings:
    """Settings of adversarial training.

    PPO trains on clean observations; a term of the loss penalises how much the policy's distribution changes under the
    worst small perturbation: SA-PPO (Zhang et al., 2020, arXiv 2003.08938).
    """

    adversarial_ratio: float = setting(
        0.5,
        "Share of each minibatch that is attacked; at least one sequence unless 0. More is less noisy, and slower.",
        at_least=0,
        at_most=1,
        fixed="it decides how minibatches are cut",
    )
    robust_kl_coef: float = setting(
        0.1,
        "Weight of KL(clean‖attacked) and, times vf_coef, of the critics' difference. More makes the policy smoother, "
        "at some point too smooth to do its task; 0.01 to 3.",
        at_least=0,
        at_most=LARGE,
    )
    warmup_updates: int = setting(
        10, "Updates before the first attack, in which the policy learns the task.", at_least=0
    )
    attack_policy: bool = setting(True, "Whether the distribution of actions is attacked and smoothed.")
    attack_value: bool = setting(True, "Whether the critics' predictions are attacked and smoothed.")
    epsilon_schedule: EpsilonSchedule = setting(
        "constant", "Schedule of the radius from perturbation.epsilon to epsilon_final over training."
    )
    epsilon_final: float = setting(
        0.05,
        "Radius at the end of training, unless constant. It may be larger than epsilon: attacks then grow stronger.",
        at_least=0,
        at_most=LARGE,
    )
    perturbation: PerturbationConfig = setting(
        factory=PerturbationConfig, doc="The attack: initial radius, and how the worst perturbation is searched."
    )

    def __post_init__(self) -> None:
        check_values(self)
        if not isinstance(self.perturbation, PerturbationConfig):
            raise TypeError(f"perturbation must be a PerturbationConfig, not {self.perturbation!r}")
        if not (self.attack_policy or self.attack_value):
            raise ValueError("attack_policy=False and attack_value=False leave nothing to attack: set one to True")
        refuse_unused(vars(self), defaults_of(AdversarialSettings), unused_by_adversary(vars(self)))
        attack = vars(self.perturbation)
        refuse_unused(attack, defaults_of(PerturbationConfig), unused_by_training_attack(attack), "perturbation: ")
        if self.epsilon_schedule != "constant" and self.perturbation.epsilon == 0 == self.epsilon_final:
            raise ValueError(f"epsilon_schedule={self.epsilon_schedule!r} leads from an epsilon of 0 to one of 0")


def unused_by_adversary(options: Mapping[str, Any]) -> dict[str, str]:
    """Settings of adversarial training that have no effect, each with what it needs."""
    is_constant = options.get("epsilon_schedule", AdversarialSettings.epsilon_schedule) == "constant"
    return {"epsilon_final": "epsilon_schedule 'linear' or 'cosine'"} if is_constant else {}


def unused_by_training_attack(options: Mapping[str, Any]) -> dict[str, str]:
    """Settings of the attacks in adversarial training that have no effect, each with what it needs."""
    unused = {
        "random_init": "an attack of your own: built-in ones start at random in training, where their gradient is 0"
    }
    if options.get("attack_method", PerturbationConfig.attack_method) == "fgsm":
        unused |= dict.fromkeys(("attack_steps", "attack_lr"), "attack_method 'pgd' or 'sgld'")
    return unused
