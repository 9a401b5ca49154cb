"""Compares an agent trained against attacks on its observations with a plain one, under attack.

pip install ".[mujoco]"                        # in the root of a clone
python examples/robust_agent.py                # a quarter of an hour for each of the two agents
python examples/robust_agent.py --quick        # shows that it runs, not what it learns
"""

from __future__ import annotations

import argparse

from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

from driftproof.adversarial import PerturbationConfig, SAPPOConfig, evaluate_under_attack
from driftproof.ppo import DistributionalPPO, Linear

EPSILON = 0.075
"""Radius of the attacks, in standard deviations of each observation component."""


def train(adversarial: SAPPOConfig | None, steps: int) -> DistributionalPPO:
    env = VecNormalize(make_vec_env("Hopper-v5", 8, seed=0), norm_reward=False)
    agent = DistributionalPPO(
        "MlpPolicy", env, Linear(5e-4), n_steps=256, batch_size=256, seed=0, device="cpu", adversarial=adversarial
    )
    return agent.learn(steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    steps, episodes, warmup = (4_096, 2, 0) if args.quick else (500_000, 50, 10)
    against = SAPPOConfig(
        warmup_updates=warmup,
        epsilon_schedule="linear",
        epsilon_final=EPSILON,
        perturbation=PerturbationConfig(epsilon=EPSILON / 10, attack_lr=EPSILON / 25),
    )
    for name, adversarial in (("plain", None), ("trained against attacks", against)):
        agent = train(adversarial, steps)
        print(f"\n{name}")
        attacks = ["clean", "random", "mad", "critic"]
        print(evaluate_under_attack(agent, make_vec_env("Hopper-v5", 10), attacks, [EPSILON], episodes, seed=1))


if __name__ == "__main__":
    main()
