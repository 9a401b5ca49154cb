"""How the files in version_0 were written, by the version whose layout of modules was another.

    python -m tests.compatibility.write_version_0 FOLDER

A checkpoint of an agent with every component, the folder of a training and that of a population, both interrupted, and
``expected.json``: what the same version made of each when it went on. A later version must make the same of them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from driftproof.adversarial import PerturbationConfig, SAPPOConfig
from driftproof.cli.app import app
from driftproof.ppo import DistributionalPPO
from tests.ppo.resuming import continuous_walk

WHOLE = 128
TRAINING = ["env.id=CartPole-v1", "env.n_envs=2", "env.normalize_observations=true", "ppo.n_steps=16"]
TRAINING += ["ppo.batch_size=16", "ppo.n_epochs=2", "ppo.learning_rate={kind: linear, start: 1e-3, end: 0}"]
TRAINING += ["policy.lstm_hidden_size=4", "policy.net_arch=[4]", "critic.num_quantiles=4", "vgs.warmup_steps=2"]
TRAINING += ["ppo.target_kl=0.05", "ppo.kl_penalty=true", "run.seed=3", f"run.total_timesteps={WHOLE}"]
POPULATION = ["pbt.population_size=3", "pbt.backend=inline", "pbt.perturbation_interval=1", "pbt.synchronous=true"]
POPULATION += ["pbt.min_ready_members=3", "pbt.truncation_ratio=0.34"]


def make_env() -> VecNormalize:
    return VecNormalize(DummyVecEnv([continuous_walk] * 2), norm_reward=False)


def make_agent() -> DistributionalPPO:
    """One with every component."""
    return DistributionalPPO(
        "MlpLstmPolicy",
        make_env(),
        n_steps=16,
        batch_size=16,
        n_epochs=2,
        learning_rate=1e-3,
        clip_range_vf=0.2,
        target_kl=0.05,
        kl_penalty=True,
        ent_coef=0.01,
        ent_coef_final=0.001,
        cvar_alpha=0.5,
        optimizer_kwargs={"sigma": 0.01, "weight_decay": 0.01},
        vgs_kwargs={"warmup_steps": 2},
        adversarial=SAPPOConfig(perturbation=PerturbationConfig(epsilon=0.05)),
        policy_kwargs={"lstm_hidden_size": 4, "net_arch": [4], "num_quantiles": 4},
        seed=3,
    )


def numbers_of(agent: DistributionalPPO) -> dict[str, object]:
    """What tells agents apart: what they do, what they expect, and their weights."""
    observations = np.linspace(-1, 1, 10, dtype=np.float32).reshape(5, 2)
    actions, _ = agent.predict(observations, deterministic=True)
    quantiles, _ = agent.predict_quantiles(observations)
    weights = {name: float(value.double().sum()) for name, value in agent.policy.state_dict().items()}
    moments = agent.policy.optimizer.state_dict()["state"]
    sums = [float(t.double().sum()) for s in moments.values() for t in s.values() if isinstance(t, torch.Tensor)]
    values = {"actions": np.asarray(actions).tolist(), "quantiles": quantiles.tolist(), "weights": weights}
    return {**values, "moments": sums, "hyperparams": dict(agent.hyperparams), "steps": agent.num_timesteps}


def call(*arguments: str) -> None:
    """The command line, in this process."""
    from typer.testing import CliRunner

    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    if result.exit_code == 9:
        raise SystemExit(9)
    assert result.exit_code == 0, result.output


def options(settings: list[str]) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


def final_weights(folder: Path) -> dict[str, dict[str, float]]:
    """Sums of the weights in a run's last checkpoint; of each member, in a population."""
    from driftproof.state import read

    newest = {path.name.rpartition("_")[0]: path for path in sorted(folder.rglob("*_*.zip"))}
    weights = {place: read(path).tree["policy"] for place, path in newest.items()}
    return {place: {name: float(t.double().sum()) for name, t in policy.items()} for place, policy in weights.items()}


@contextlib.contextmanager
def killed_in_update(number: int) -> Iterator[None]:
    """The process ends in the given update, as if it were killed."""
    train, updates = DistributionalPPO.train, itertools.count(1)

    def train_or_end(agent: DistributionalPPO) -> None:
        if next(updates) == number:
            raise SystemExit(9)
        train(agent)

    DistributionalPPO.train = train_or_end  # type: ignore[method-assign]
    try:
        with contextlib.suppress(SystemExit):
            yield
    finally:
        DistributionalPPO.train = train  # type: ignore[method-assign]


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    agent = make_agent().learn(WHOLE * 2)
    agent.save(folder / "agent")
    expected = {"loaded": numbers_of(agent)}
    expected["resumed"] = numbers_of(agent.learn(WHOLE, reset_num_timesteps=False))
    runs = folder / "runs"
    for name, command, settings in (("training", "train", TRAINING), ("population", "tune", TRAINING + POPULATION)):
        with killed_in_update(3 if name == "training" else 8):
            call(command, *options(settings), "--name", name, "--runs-dir", str(runs))
        shutil.rmtree(runs / name / "tensorboard")
        shutil.copytree(runs / name, folder / "resumed" / name)
        call(command, "--resume", str(folder / "resumed" / name))
        expected[name] = final_weights(folder / "resumed" / name)
    shutil.rmtree(folder / "resumed")
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
