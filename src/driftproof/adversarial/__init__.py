"""Observations made worse on purpose: attacks, training against them, and evaluation under them."""

from driftproof.adversarial.attacks import PerturbationConfig, StatePerturbation
from driftproof.adversarial.training import SAPPOConfig

__all__ = ["PerturbationConfig", "SAPPOConfig", "StatePerturbation"]
