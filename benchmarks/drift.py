"""What drift costs: steps of an environment with one change, relative to the same without, taking turns.

python benchmarks/drift.py                     # a minute
python benchmarks/drift.py --quick             # a few seconds
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import gymnasium
import numpy as np
from common import alternate, ratio, show_table, write_result

from driftproof.envs import (
    ActionGain,
    ActionPermute,
    Change,
    Cyclic,
    Dynamics,
    ObservationNoise,
    ObservationPermute,
    ObservationScale,
    RandomWalk,
    RewardScale,
    Sudden,
    drifting,
)

STEPS = 500
ALWAYS = Cyclic(0.9, 1.1, 1000)
CHANGES: dict[str, dict[str, Change]] = {
    "CartPole-v1": {
        "ObservationScale": ObservationScale(ALWAYS),
        "ObservationNoise": ObservationNoise(Cyclic(0.0, 0.01, 1000)),
        "ObservationPermute": ObservationPermute(Sudden(every=100)),
        "ActionPermute": ActionPermute(Sudden(every=100, values=[0, 1])),
        "RewardScale, random walk": RewardScale(RandomWalk(0.9, 1.1, 0.01)),
        "Dynamics of length": Dynamics(ALWAYS, "length"),
    },
    "Hopper-v5": {
        "ActionGain": ActionGain(ALWAYS),
        "Dynamics of friction": Dynamics(ALWAYS, "model.geom_friction"),
        "Dynamics of masses": Dynamics(ALWAYS, "model.body_mass"),
        "Dynamics of masses, every 100 steps": Dynamics(Sudden(every=100, low=0.9, high=1.1), "model.body_mass"),
    },
}


def turn(env: gymnasium.Env) -> Callable[[], None]:
    env.reset(seed=0)
    env.action_space.seed(0)
    actions = [env.action_space.sample() for _ in range(STEPS)]

    def call() -> None:
        for action in actions:
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few seconds, and no file of results")
    args = parser.parse_args()
    sections = []
    for name, changes in CHANGES.items():
        candidates = {"no drift": turn(gymnasium.make(name))}
        candidates |= {label: turn(drifting(name, change, seed=0)) for label, change in changes.items()}
        times = alternate(candidates, rounds=3 if args.quick else 20, repeats=1 if args.quick else 3)
        plain = np.median(times["no drift"]) / STEPS * 1e6
        rows = [
            [label, f"{plain * ratio(times, label, 'no drift'):.1f}", f"{ratio(times, label, 'no drift'):.2f}"]
            for label in candidates
        ]
        sections.append(show_table(name, ["", "µs a step", "times no drift"], rows))
    if not args.quick:
        write_result("drift", " ".join(["python", *sys.argv]), sections)


if __name__ == "__main__":
    main()
