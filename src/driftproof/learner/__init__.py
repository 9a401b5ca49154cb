"""How PPO learns from rollouts: advantages, losses, controllers and optimizer steps, without environments."""

from driftproof.learner.collector import Collector
from driftproof.learner.learner import Learner, Metrics, TrainingError, UpdateSettings
from driftproof.learner.networks import Policy
from driftproof.learner.rollout import Rollout

__all__ = ["Collector", "Learner", "Metrics", "Policy", "Rollout", "TrainingError", "UpdateSettings"]
