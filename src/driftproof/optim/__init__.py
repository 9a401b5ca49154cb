"""Optimizers that keep a network plastic, and scaling of noisy gradients. Plain PyTorch: nothing of RL is imported."""

from driftproof.optim.upgd import UPGD, UPGDW, AdaptiveUPGD
from driftproof.optim.vgs import VarianceGradientScaler

__all__ = ["UPGD", "UPGDW", "AdaptiveUPGD", "VarianceGradientScaler"]
