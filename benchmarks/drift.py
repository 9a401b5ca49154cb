"""What drift costs: steps of an environment with one change, relative to the same without, taking turns.

python benchmarks/drift.py                     # a minute
python benchmarks/drift.py --quick             # a few seconds
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import gymnasium
import numpy as np
from common import ratio, show_table, write_result

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


def turn(env: gymnasium.Env) -> Callable[[], float]:
    """Takes so many steps, and returns their time."""
    env.reset(seed=0)
    env.action_space.seed(0)
    actions = [env.action_space.sample() for _ in range(STEPS)]

    def call() -> float:
        start = time.process_time()
        for action in actions:
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()
        return time.process_time() - start

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few seconds, and no file of results")
    args = parser.parse_args()
    sections = []
    for name, changes in CHANGES.items():
        candidates = {"no drift": turn(gymnasium.make(name))}
        candidates |= {label: turn(drifting(name, change, seed=0)) for label, change in changes.items()}
        rounds = [{label: call() for label, call in candidates.items()} for _ in range(3 if args.quick else 40)]
        times = {label: np.array([one[label] for one in rounds[1:]]) for label in candidates}
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
