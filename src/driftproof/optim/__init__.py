"""Optimizers that keep a network plastic, and scaling of noisy gradients. Imports PyTorch only, nothing of RL."""

from driftproof.optim.upgd import UPGD, UPGDW, AdaptiveUPGD
from driftproof.optim.vgs import VarianceGradientScaler

__all__ = ["UPGD", "UPGDW", "AdaptiveUPGD", "VarianceGradientScaler"]
