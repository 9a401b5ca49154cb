"""Recurrent proximal policy optimisation with distributional critics."""

from driftproof._requirements import require

require("driftproof.ppo", "rl", "gymnasium", "stable_baselines3")

from driftproof.learner.hyperparams import Hyperparameters
from driftproof.learner.learner import TrainingError
from driftproof.learner.rollout import RolloutError
from driftproof.ppo.algorithm import DistributionalPPO
from driftproof.ppo.callbacks import SaveCheckpoints
from driftproof.ppo.sb3_import import from_sb3, import_sb3
from driftproof.ppo.tensor_vec_env import TensorVecEnv
from driftproof.ppo.vector_env import GymnasiumVecEnv
from driftproof.ppo.warm_starts import warm_start
from driftproof.settings.schedules import Cosine, Linear

__all__ = [
    "Cosine",
    "DistributionalPPO",
    "GymnasiumVecEnv",
    "Hyperparameters",
    "Linear",
    "RolloutError",
    "SaveCheckpoints",
    "TensorVecEnv",
    "TrainingError",
    "from_sb3",
    "import_sb3",
    "warm_start",
]
