"""Recurrent distributional PPO that keeps learning when the world changes."""

__version__ = "0.1.0"
