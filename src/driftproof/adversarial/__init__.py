"""Adversarial attacks on observations: training against them, and evaluation under them."""

from driftproof._requirements import require

require("driftproof.adversarial", "rl", "gymnasium", "stable_baselines3")

from driftproof.adversarial.attacks import StatePerturbation
from driftproof.adversarial.evaluation import AttackResult, Robustness, evaluate_under_attack
from driftproof.adversarial.learned import train_adversary
from driftproof.adversarial.training import SAPPOConfig
from driftproof.settings.adversarial import PerturbationConfig

__all__ = [
    "AttackResult",
    "PerturbationConfig",
    "Robustness",
    "SAPPOConfig",
    "StatePerturbation",
    "evaluate_under_attack",
    "train_adversary",
]
