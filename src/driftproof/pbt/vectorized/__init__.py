"""A population whose members train as one, in tensors with a leading member axis on one device."""

from driftproof.pbt.vectorized.population import VectorizedPopulation

__all__ = ["VectorizedPopulation"]
