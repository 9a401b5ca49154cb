"""From an environment of your own to an agent, a population and a report.

    python examples/own_environment.py             # two minutes on two cores
    python examples/own_environment.py --quick     # shows that it runs, not what it learns

The task is to keep a room at 20 °C with a heater that wears out: its output at the same power shrinks over a season,
is not observed, and is restored when the heater is serviced. Only a recurrent policy can infer the power it needs.
"""

from __future__ import annotations

import argparse
from typing import Any

import gymnasium
import numpy as np
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

from driftproof.pbt import HyperparamConfig, PBTConfig, PBTRunner
from driftproof.ppo import DistributionalPPO
from driftproof.report import write_report


class Room(gymnasium.Env[np.ndarray, np.ndarray]):
    """Keep a room at 20 °C. The wear of its heater persists across episodes."""

    observation_space = gymnasium.spaces.Box(-10, 10, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self) -> None:
        self.gain = 1.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.inside, self.outside, self.left = 15.0 + 5 * self.np_random.random(), 5 * self.np_random.normal(), 100
        return self._seen(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        power = (float(np.clip(action[0], -1, 1)) + 1) / 2
        self.inside += 6 * self.gain * power + 0.1 * (self.outside - self.inside)
        self.outside += 0.2 * self.np_random.normal()
        self.gain = 1.0 if self.gain < 0.4 else self.gain * 0.9999
        self.left -= 1
        return self._seen(), -abs(self.inside - 20) / 10, False, self.left == 0, {"gain": self.gain}

    def _seen(self) -> np.ndarray:
        return np.array([(self.inside - 20) / 5, self.outside / 5], np.float32)

    # With these two methods, an interrupted training resumes exactly, in the middle of an episode.
    def state_dict(self) -> dict[str, float]:
        return {"gain": self.gain, "inside": self.inside, "outside": self.outside, "left": self.left}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.gain, self.inside, self.outside = state["gain"], state["inside"], state["outside"]
        self.left = int(state["left"])


def make_agent(member: int) -> DistributionalPPO:
    """Builds a member's agent, with its own environments. Any function of the member's index will do."""
    env = make_vec_env(Room, 8, seed=100 * member)
    return DistributionalPPO("MlpLstmPolicy", env, n_steps=100, batch_size=200, n_epochs=4, gamma=0.95, seed=member)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="runs/room")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    updates, every = (4, 2) if args.quick else (40, 5)

    agent = make_agent(0)
    before, _ = evaluate_policy(agent, make_vec_env(Room, 4, seed=10_000), 20)
    agent.learn(updates * 800)
    after, _ = evaluate_policy(agent, make_vec_env(Room, 4, seed=10_000), 20)
    print(f"one agent: {before:.1f} before training, {after:.1f} after {agent.num_timesteps:,} steps")

    config = PBTConfig(
        population_size=4,
        perturbation_interval=every,
        hyperparams=[
            HyperparamConfig("learning_rate", 1e-4, 3e-3, is_log_scale=True),
            HyperparamConfig("ent_coef", 1e-5, 1e-2, is_log_scale=True),
        ],
    )
    runner = PBTRunner(config, make_agent, updates, args.folder, backend="process")
    best = runner.run()
    result, _ = evaluate_policy(best, make_vec_env(Room, 4, seed=10_000), 20)
    print(f"best of a population: {result:.1f}, learning rate {best.hyperparams['learning_rate']:.1e}")
    print(f"page: {write_report([args.folder], 'room.html')}")


if __name__ == "__main__":  # processes are spawned, and import this file
    main()
