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

    Distances are in units of the policy's inputs: normalised observations with ``VecNormalize``, pixel values from 0 to
    1 for images that the policy divides by 255. See Madry et al., 2018, arXiv 1706.06083 (``"pgd"``), Goodfellow et
    al., 2015, arXiv 1412.6572 (``"fgsm"``), Welling & Teh, 2011, and Zhang et al., 2020, arXiv 2003.08938 (``"sgld"``).
    """

    epsilon: float = setting(
        0.075,
        "Radius of the perturbation, in units of the policy's inputs; 0.01 to 0.2. 0: no perturbation.",
        at_least=0,
        at_most=LARGE,
    )
    attack_steps: int = setting(
        3,
        "Steps of PGD and SGLD. More steps find stronger attacks; each costs a forward and a backward pass. 1 to 10 "
        "in training, 10 to 100 in evaluation. FGSM takes one step.",
        at_least=1,
    )
    attack_lr: float = setting(
        0.03,
        "Step size of the attack at this epsilon; it scales with the current epsilon. FGSM always steps to the "
        "boundary of the ball.",
        above=0,
    )
    random_init: bool = setting(
        True,
        "Start from a random point in the ball instead of the clean observation. Objectives whose gradient is zero "
        "at the clean observation always start from a random point.",
    )
    norm_type: NormType = setting(
        "linf",
        "Norm of the ball: every element may change by up to epsilon (linf), or the observation vector as a whole "
        "(l2; in a dictionary, each entry separately).",
    )
    clip_min: float | None = setting(
        None, "Lower bound of perturbed observations, unless the clean one is below it. None: no bound."
    )
    clip_max: float | None = setting(
        None, "Upper bound of perturbed observations, unless the clean one is above it. None: no bound."
    )
    attack_method: str | type[Attack] = setting(
        "pgd",
        "pgd (projected gradient ascent), fgsm (one step to the boundary of the ball), sgld (gradient ascent with "
        "decaying noise), or your own class, in configuration files as module:Class.",
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

    SA-PPO: PPO trains on clean observations, and a regularisation term penalises how much the policy's distribution
    changes under the worst perturbation inside the ball (Zhang et al., 2020, arXiv 2003.08938).
    """

    adversarial_ratio: float = setting(
        0.5,
        "Share of each minibatch that is attacked; at least one sequence unless 0. A larger share gives a less "
        "noisy gradient, and is slower.",
        at_least=0,
        at_most=1,
        fixed="it determines how minibatches are split",
    )
    robust_kl_coef: float = setting(
        0.1,
        "Coefficient of KL(clean‖attacked) and, times vf_coef, of the critics' difference. Larger makes the policy "
        "smoother; too large, and it no longer solves its task. 0.01 to 3.",
        at_least=0,
        at_most=LARGE,
    )
    warmup_updates: int = setting(
        10, "Warm-up updates without attacks, in which the policy learns the task.", at_least=0
    )
    attack_policy: bool = setting(True, "Whether to attack and smooth the action distribution.")
    attack_value: bool = setting(True, "Whether to attack and smooth the critics' predictions.")
    epsilon_schedule: EpsilonSchedule = setting(
        "constant", "Schedule of the radius from perturbation.epsilon to epsilon_final over training."
    )
    epsilon_final: float = setting(
        0.05,
        "Radius at the end of training, for the schedules linear and cosine. If it is larger than epsilon, "
        "attacks grow stronger.",
        at_least=0,
        at_most=LARGE,
    )
    perturbation: PerturbationConfig = setting(
        factory=PerturbationConfig,
        doc="Settings of the attack: initial radius, and how it searches for the worst perturbation.",
    )

    def __post_init__(self) -> None:
        check_values(self)
        if not isinstance(self.perturbation, PerturbationConfig):
            raise TypeError(f"perturbation must be a PerturbationConfig, not {self.perturbation!r}")
        if not (self.attack_policy or self.attack_value):
            raise ValueError(
                "attack_policy=False and attack_value=False leave nothing to attack: set one of them to True"
            )
        refuse_unused(vars(self), defaults_of(AdversarialSettings), unused_by_adversary(vars(self)))
        attack = vars(self.perturbation)
        refuse_unused(attack, defaults_of(PerturbationConfig), unused_by_training_attack(attack), "perturbation: ")
        if self.epsilon_schedule != "constant" and self.perturbation.epsilon == 0 == self.epsilon_final:
            raise ValueError(
                f"epsilon_schedule={self.epsilon_schedule!r} has no effect, because epsilon and epsilon_final are "
                "both 0: set one of them above 0"
            )


def unused_by_adversary(options: Mapping[str, Any]) -> dict[str, str]:
    """Settings of adversarial training that have no effect, each with the setting that it needs."""
    is_constant = options.get("epsilon_schedule", AdversarialSettings.epsilon_schedule) == "constant"
    return {"epsilon_final": "epsilon_schedule 'linear' or 'cosine'"} if is_constant else {}


def unused_by_training_attack(options: Mapping[str, Any]) -> dict[str, str]:
    """Settings of the attacks in adversarial training that have no effect, each with the setting that it needs."""
    unused = {
        "random_init": "an attack class of your own: in training, built-in attacks always start from a random point, "
        "since their gradient at the clean observation is 0"
    }
    if options.get("attack_method", PerturbationConfig.attack_method) == "fgsm":
        unused |= dict.fromkeys(("attack_steps", "attack_lr"), "attack_method 'pgd' or 'sgld'")
    return unused
