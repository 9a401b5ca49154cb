"""The same search with Ray Tune's PBT around Stable-Baselines3's PPO, as its documentation has it, and with ours."""

from __future__ import annotations

import functools
import os
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pbt_tasks import learner, normalized
from stable_baselines3 import PPO
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecNormalize

from driftproof.pbt import HyperparamConfig, PBTConfig, PBTRunner, ProcessBackend

TASK = "LunarLander-v3"
RANGES = {"learning_rate": (1e-5, 3e-3), "clip_range": (0.05, 0.4), "ent_coef": (1e-5, 3e-2)}
"""Searched on a logarithmic scale by both."""
MEMBERS, INTERVAL = 4, 4
"""Updates between decisions."""
WORKERS = 2


def steps_per_update() -> int:
    return 256 * 8


def score(agent: Any, env: VecNormalize, episodes: int = 50) -> float:
    """Mean return of deterministic episodes with the statistics that the agent was trained with."""
    env.training = False
    env.seed(1_000_000)
    return float(evaluate_policy(agent, env, episodes, deterministic=True, warn=False)[0])


def ours(seed: int, updates: int) -> dict[str, Any]:
    ranges = [HyperparamConfig(name, low, high, is_log_scale=True) for name, (low, high) in RANGES.items()]
    config = PBTConfig(
        population_size=MEMBERS, perturbation_interval=INTERVAL, hyperparams=ranges, truncation_ratio=0.25
    )
    with tempfile.TemporaryDirectory() as folder:
        make = functools.partial(learner, TASK, seed)
        runner = PBTRunner(config, make, updates, folder, seed=seed, backend=ProcessBackend(WORKERS))
        best = runner.run()
        exploits = runner.scheduler.statistics()["exploits"]
    return {"return": score(best, best.get_env()), "exploits": exploits}


def with_ray_tune(seed: int, updates: int) -> dict[str, Any]:
    import ray
    from ray import tune
    from ray.tune.schedulers import PopulationBasedTraining

    class Trial(tune.Trainable):
        """SB3's PPO with everything that SB3 saves: the model with its optimizer, and VecNormalize's statistics."""

        def setup(self, config: dict[str, Any]) -> None:
            torch.set_num_threads(1)
            env = normalized(TASK, 8)
            settings = {name: config[name] for name in RANGES}
            network = {"net_arch": [64, 64]}
            self.agent = PPO(
                "MlpPolicy",
                env,
                n_steps=256,
                batch_size=256,
                n_epochs=6,
                gae_lambda=0.98,
                policy_kwargs=network,
                seed=1000 * seed + config["member"],
                device="cpu",
                **settings,
            )

        def step(self) -> dict[str, float]:
            self.agent.learn(INTERVAL * steps_per_update(), reset_num_timesteps=False)
            assert self.agent.policy.optimizer.param_groups[0]["lr"] == self.config["learning_rate"]
            assert self.agent.clip_range(1) == self.config["clip_range"]
            returns = [episode["r"] for episode in self.agent.ep_info_buffer]
            return {"mean_reward": float(np.mean(returns)) if returns else -1e9}

        def save_checkpoint(self, checkpoint_dir: str) -> None:
            self.agent.save(os.path.join(checkpoint_dir, "agent.zip"))
            self.agent.get_env().save(os.path.join(checkpoint_dir, "normalizer.pkl"))

        def load_checkpoint(self, checkpoint_dir: str) -> None:
            env = VecNormalize.load(os.path.join(checkpoint_dir, "normalizer.pkl"), normalized(TASK, 8).venv)
            # What the scheduler mutated, which the file would overwrite.
            settings = {name: self.config[name] for name in RANGES}
            self.agent = PPO.load(os.path.join(checkpoint_dir, "agent.zip"), env, "cpu", custom_objects=settings)

    distributions = {name: tune.loguniform(low, high) for name, (low, high) in RANGES.items()}
    scheduler = PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=1,
        quantile_fraction=0.25,
        hyperparam_mutations=distributions,
    )
    random.seed(seed)
    np.random.seed(seed)
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    ray.init(
        num_cpus=WORKERS,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}},
    )
    try:
        with tempfile.TemporaryDirectory() as folder:
            tuner = tune.Tuner(
                tune.with_resources(Trial, {"cpu": 1}),
                param_space={**distributions, "member": tune.randint(0, 1000)},
                tune_config=tune.TuneConfig(metric="mean_reward", mode="max", scheduler=scheduler, num_samples=MEMBERS),
                run_config=tune.RunConfig(
                    storage_path=folder,
                    stop={"training_iteration": updates // INTERVAL},
                    verbose=0,
                    checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=True),
                ),
            )
            results = tuner.fit()
            if results.errors:
                raise results.errors[0]
            best = results.get_best_result(scope="last")
            with best.checkpoint.as_directory() as checkpoint:
                venv = normalized(TASK, 8).venv
                env = VecNormalize.load(os.path.join(checkpoint, "normalizer.pkl"), venv)
                agent = PPO.load(os.path.join(checkpoint, "agent.zip"), device="cpu")
                return {"return": score(agent, env), "exploits": scheduler._num_perturbations}
    finally:
        ray.shutdown()
