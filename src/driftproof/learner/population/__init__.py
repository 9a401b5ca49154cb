"""Learners of one architecture as one: their tensors have a leading member axis ``[M, ...]``."""

from driftproof.learner.population.collector import PopulationCollector
from driftproof.learner.population.learner import PopulationLearner
from driftproof.learner.population.random import MemberGenerators
from driftproof.learner.population.rollout import PopulationRollout
from driftproof.learner.population.state import PopulationState

__all__ = ["MemberGenerators", "PopulationCollector", "PopulationLearner", "PopulationRollout", "PopulationState"]
