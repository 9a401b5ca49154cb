"""The scenarios of drift_suite.py: environments, what changes in them, and when; and the recorder of returns.

A scenario has tasks of equal length, counted in iterations of 800 steps; nobody announces a task to the agent. A seed
draws the tasks, the same for all methods. Continual Gym Control is that of C-CHAIN (https://arxiv.org/abs/2506.00592)
and TRAC: a random vector is added to all observations of a task, and none in the first one; episodes end after 400
steps, whatever the environment's own limit, and at the end of every iteration.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import TransformReward

from driftproof.envs import (
    ActionGain,
    ActionPermute,
    Change,
    Cyclic,
    Dynamics,
    Gradual,
    ObservationFlip,
    ObservationOffset,
    ObservationPermute,
    ObservationScale,
    RewardScale,
    RewardSign,
    Sudden,
    drifting,
)

ITERATION = 800
"""Steps of an iteration, which is a rollout."""
LIMIT = 400
"""Steps of an episode."""

Changes = Callable[[int, np.random.Generator], Sequence[Change]]
"""From the steps of a task and the seed's random numbers to the changes of the environment."""


@dataclass(frozen=True)
class World:
    """An environment.

    Attributes:
        id: Gymnasium's id.
        random: Mean return of a random policy, which chance and collapse are measured from.
        level: Mean return of a trained agent where nothing drifts.
        iterations: Iterations of a task, enough to learn it.
        limit: Steps of an episode.
        divisor: Rewards are divided by it for training; scores are raw.
        package: Package that it needs.
        kwargs: Arguments of ``gymnasium.make``.
    """

    id: str
    random: float
    level: float
    iterations: int
    limit: int = LIMIT
    divisor: float = 20.0
    package: str | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)

    def make(self) -> gymnasium.Env[Any, Any]:
        return gymnasium.make(self.id, max_episode_steps=-1, disable_env_checker=True, **self.kwargs)


CARTPOLE = World("CartPole-v1", random=24, level=380, iterations=100)
ACROBOT = World("Acrobot-v1", random=-400, level=-90, iterations=100)
LUNAR = World("LunarLander-v3", random=-192, level=120, iterations=200, package="Box2D")
MOUNTAIN = World("MountainCar-v0", random=-400, level=-130, iterations=200)
PENDULUM = World("Pendulum-v1", random=-1208, level=-250, iterations=200, limit=200)
CHEETAH = World("HalfCheetah-v5", random=-280, level=1000, iterations=250, limit=1000, divisor=1.0, package="mujoco")
MARKET = World("driftproof/RegimeMarket-v0", random=0.0, level=0.3, iterations=200, limit=512, divisor=0.01)
WORLDS = {"cartpole": CARTPOLE, "acrobot": ACROBOT, "lunarlander": LUNAR, "mountaincar": MOUNTAIN}
SENSORS = {"cartpole": 4, "acrobot": 6, "lunarlander": 8, "mountaincar": 2}
"""Numbers of an observation."""


@dataclass(frozen=True)
class Scenario:
    """An environment and its changes.

    Attributes:
        title: For tables.
        world: The environment.
        changes: Its changes.
        tasks: Number of tasks.
        iterations: Iterations of a task.
        group: Of scenarios, for ``--scenarios``.
        cut: Whether episodes end at the end of every iteration, as published.
        raw: Whether scores are of rewards before the changes.
        first: Tasks that are like the first one; the return to them is what is remembered.
        judged: Tasks whose returns can be compared with the environment's level; None: all.
        is_sudden: Whether the world changes between tasks, not during them.
    """

    title: str
    world: World
    changes: Changes
    tasks: int
    iterations: int
    group: str
    cut: bool = False
    raw: bool = False
    first: tuple[int, ...] = (0,)
    judged: tuple[int, ...] | None = None
    is_sudden: bool = True

    @property
    def task_steps(self) -> int:
        return self.iterations * ITERATION

    @property
    def steps(self) -> int:
        return self.tasks * self.task_steps

    @property
    def missing(self) -> str | None:
        """Package that is not installed."""
        package = self.world.package
        return package if package is not None and importlib.util.find_spec(package) is None else None

    def scaled(self, scale: float = 1.0, tasks: int | None = None) -> Scenario:
        """With shorter tasks, at least one iteration each, and only the first ones."""
        iterations = max(1, round(self.iterations * scale))
        return replace(self, iterations=iterations, tasks=min(self.tasks, tasks or self.tasks))

    def make(self, seed: int) -> tuple[gymnasium.Env[Any, Any], Recorder]:
        """The environment for training, and the recorder in it.

        Args:
            seed: Seed of the tasks.
        """
        env: gymnasium.Env[Any, Any] = Cut(self.world.make(), self.world.limit, ITERATION if self.cut else None)
        changes = self.changes(self.task_steps, np.random.default_rng([seed, 18]))
        if not self.raw and changes:
            env = drifting(env, changes, seed=seed)
        env = recorder = Recorder(env, self.task_steps)
        if self.raw:
            env = drifting(env, changes, seed=seed)
        return TransformReward(env, lambda reward: float(reward) / self.world.divisor), recorder


class Cut(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Ends episodes after some steps, and at the end of every iteration; both are truncations.

    Args:
        env: The environment.
        limit: Steps of an episode.
        iteration: Steps of an iteration; None: episodes are not cut there. ``info["cut"]`` tells when one is.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], limit: int, iteration: int | None) -> None:
        super().__init__(env)
        self.limit, self.iteration = limit, iteration
        self.steps = self.age = 0

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        self.age = 0
        return self.env.reset(**kwargs)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.steps += 1
        self.age += 1
        truncated = truncated or self.age >= self.limit
        if not (terminated or truncated) and self.iteration is not None and self.steps % self.iteration == 0:
            truncated, info = True, {**info, "cut": True}
        return observation, reward, terminated, truncated, info


class Recorder(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Sums returns of episodes by iteration, in two ways of counting.

    Published: all episodes that end in an iteration, also those that are cut at its end. Plain: whole episodes, which
    are not cut and lie within one task.

    Args:
        env: The environment.
        task_steps: Steps of a task.
        iteration: Steps of an iteration.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], task_steps: int, iteration: int = ITERATION) -> None:
        super().__init__(env)
        self.task_steps, self.iteration = task_steps, iteration
        self.steps = self.start = 0
        self.total = 0.0
        self.sums: dict[str, list[float]] = {"published": [], "plain": []}
        self.counts: dict[str, list[int]] = {"published": [], "plain": []}

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        if self.steps > self.start:  # Somebody gave up the episode, as an agent that starts anew.
            self._end(whole=False)
        return self.env.reset(**kwargs)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if self.steps % self.iteration == 0:
            for name in self.sums:
                self.sums[name].append(0.0)
                self.counts[name].append(0)
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.steps += 1
        self.total += float(reward)
        if terminated or truncated:
            self._end(whole=not info.get("cut", False))
        return observation, reward, terminated, truncated, info

    def _end(self, whole: bool) -> None:
        within_task = self.start // self.task_steps == (self.steps - 1) // self.task_steps
        for name in ("published", "plain") if whole and within_task else ("published",):
            self.sums[name][-1] += self.total
            self.counts[name][-1] += 1
        self.start, self.total = self.steps, 0.0

    def records(self) -> dict[str, Any]:
        """Everything but the running episode. No ``state_dict``: that would stand for the environment's whole state."""
        return {"steps": self.steps, "sums": self.sums, "counts": self.counts}

    def continue_from(self, state: Mapping[str, Any]) -> None:
        """Continue with a new episode."""
        self.steps = self.start = int(state["steps"])
        self.total = 0.0
        self.sums = {name: list(values) for name, values in state["sums"].items()}
        self.counts = {name: list(values) for name, values in state["counts"].items()}

    def returns(self) -> dict[str, list[Any]]:
        """By counting: mean return of every iteration, None where no episode ended; and the numbers of episodes."""
        means = {
            name: [
                round(total / count, 4) if count else None for total, count in zip(sums, self.counts[name], strict=True)
            ]
            for name, sums in self.sums.items()
        }
        return {**means, "episodes": list(self.counts["plain"])}


def nothing(task_steps: int, rng: np.random.Generator) -> Sequence[Change]:
    return ()


def offsets(deviation: float) -> Changes:
    return lambda steps, rng: [ObservationOffset(Sudden(every=steps), deviation=deviation)]


def permuted_and_flipped(steps: int, rng: np.random.Generator) -> Sequence[Change]:
    return [ObservationPermute(Sudden(every=steps)), ObservationFlip(Sudden(every=steps))]


def gains(size: int, tasks: int = 5) -> Changes:
    """Every sensor has a gain of its own, between a fifth and five, log-uniform."""

    def changes(steps: int, rng: np.random.Generator) -> Sequence[Change]:
        values = np.exp(rng.uniform(-np.log(5), np.log(5), (size, tasks - 1)))
        return [
            ObservationScale(Sudden(every=steps, values=[1.0, *map(float, row)]), indices=[i])
            for i, row in enumerate(values)
        ]

    return changes


def sudden(make: Callable[[Sudden], Change], *values: float) -> Changes:
    """One value a task."""
    return lambda steps, rng: [make(Sudden(every=steps, values=values or None))]


def dynamics(names: str, *values: float) -> Changes:
    return sudden(lambda schedule: Dynamics(schedule, names), *values)


def gradual(names: str, end: float) -> Changes:
    """Constant in the first task, then linear over two tasks, then constant."""
    return lambda steps, rng: [Dynamics(Gradual(1.0, end, over=2 * steps, begin=steps), names)]


def cyclic(names: str, end: float) -> Changes:
    """There within a task, and back within the next."""
    return lambda steps, rng: [Dynamics(Cyclic(1.0, end, period=2 * steps), names)]


def regimes(steps: int, rng: np.random.Generator) -> Sequence[Change]:
    """Markets of trends, then of reversion, and so on: what pays in one loses in the other."""
    trends, reversions = (3.0, 0.1), (0.1, 3.0)
    return [
        Dynamics(Sudden(every=steps, values=trends), "parameters.trend_duration"),
        Dynamics(Sudden(every=steps, values=reversions), "parameters.reversion_duration"),
    ]


def frictions(tasks: int) -> Changes:
    """Log-uniform from a fiftieth of the usual one to twice."""

    def changes(steps: int, rng: np.random.Generator) -> Sequence[Change]:
        values = np.exp(rng.uniform(np.log(0.02), np.log(2.0), tasks - 1))
        return [Dynamics(Sudden(every=steps, values=[1.0, *map(float, values)]), "model.geom_friction")]

    return changes


def again(steps: int, rng: np.random.Generator) -> Sequence[Change]:
    """Permuted and flipped, and back, and again in the same way."""
    schedule = Sudden(every=steps, values=[0, 1])
    return [ObservationPermute(schedule), ObservationFlip(schedule)]


def short(title: str, world: World, changes: Changes, group: str, tasks: int = 5, **more: Any) -> Scenario:
    return Scenario(title, world, changes, tasks, world.iterations, group, **more)


def _of_all_worlds() -> dict[str, Scenario]:
    """Those that all environments with discrete actions have."""
    made = {
        f"stationary-{name}": replace(
            short(f"Stationary: {world.id}", world, nothing, "stationary", tasks=1), iterations=2 * world.iterations
        )
        for name, world in {**WORLDS, "pendulum": PENDULUM}.items()
    }
    for name, world in WORLDS.items():
        tasks, iterations, deviation = (5, 400, 0.02) if name == "mountaincar" else (10, 200, 2.0)
        made[f"continual-{name}"] = Scenario(
            f"Continual Gym Control: {world.id}", world, offsets(deviation), tasks, iterations, "continual", cut=True
        )
    for name, world in WORLDS.items():
        title = f"Observations permuted and sign-flipped: {world.id}"
        made[f"permute-flip-{name}"] = short(title, world, permuted_and_flipped, "permute-flip")
    for name, world in WORLDS.items():
        made[f"gains-{name}"] = short(f"Gains of observations: {world.id}", world, gains(SENSORS[name]), "gains")
    return made


BACK_AND_FORTH: dict[str, Any] = {"first": (0, 2, 4)}
SCENARIOS: dict[str, Scenario] = {
    **_of_all_worlds(),
    "actions-cartpole": short(
        "Actions permuted, and back: CartPole-v1", CARTPOLE, sudden(ActionPermute, 0, 1), "actions", **BACK_AND_FORTH
    ),
    "actions-lunarlander": short("Actions permuted: LunarLander-v3", LUNAR, sudden(ActionPermute), "actions"),
    "actuator-pendulum": short(
        "Actuator gain 1, 0.5, -1, 0.7, -0.5: Pendulum-v1",
        PENDULUM,
        sudden(ActionGain, 1, 0.5, -1, 0.7, -0.5),
        "actions",
    ),
    "length-cartpole": short(
        "Pole length times 1, 4, 0.3, 6, 2, sudden: CartPole-v1",
        CARTPOLE,
        dynamics("length", 1, 4, 0.3, 6, 2),
        "dynamics",
    ),
    "gravity-cartpole": short(
        "Gravity times 1 to 4, gradual: CartPole-v1",
        CARTPOLE,
        gradual("gravity", 4.0),
        "dynamics",
        tasks=4,
        is_sudden=False,
    ),
    "mass-cartpole": short(
        "Mass of the pole times 1 to 20, cyclic: CartPole-v1",
        CARTPOLE,
        cyclic("masspole", 20.0),
        "dynamics",
        tasks=4,
        is_sudden=False,
    ),
    "mass-acrobot": short(
        "Mass of the lower link times 1, 2, 0.5, 3, 0.3, sudden: Acrobot-v1",
        ACROBOT,
        dynamics("LINK_MASS_2", 1, 2, 0.5, 3, 0.3),
        "dynamics",
    ),
    "gravity-lunarlander": short(
        "Gravity times 1, 0.3, 1.15, 0.2, 0.8, sudden: LunarLander-v3",
        LUNAR,
        dynamics("gravity", 1, 0.3, 1.15, 0.2, 0.8),
        "dynamics",
    ),
    "gravity-mountaincar": short(
        "Gravity times 1 to 1.4, cyclic: MountainCar-v0",
        MOUNTAIN,
        cyclic("gravity", 1.4),
        "dynamics",
        tasks=4,
        is_sudden=False,
    ),
    "friction-halfcheetah": Scenario(
        "Friction times 0.02 to 2, sudden: HalfCheetah-v5", CHEETAH, frictions(5), 5, CHEETAH.iterations, "mujoco"
    ),
    "reward-scale-cartpole": short(
        "Rewards times 1, 10, 0.1, 100, 1: CartPole-v1",
        CARTPOLE,
        sudden(RewardScale, 1, 10, 0.1, 100, 1),
        "rewards",
        raw=True,
    ),
    "reward-scale-acrobot": short(
        "Rewards times 1, 10, 0.1, 100, 1: Acrobot-v1",
        ACROBOT,
        sudden(RewardScale, 1, 10, 0.1, 100, 1),
        "rewards",
        raw=True,
    ),
    "reward-sign-cartpole": short(
        "Sign of rewards flipped, and back: CartPole-v1",
        CARTPOLE,
        sudden(RewardSign, 1, -1),
        "rewards",
        judged=(0, 2, 4),
        **BACK_AND_FORTH,
    ),
    **{
        f"recurrence-{name}": short(
            f"A-B-A-B-A, B permuted and sign-flipped: {world.id}", world, again, "recurrence", **BACK_AND_FORTH
        )
        for name, world in WORLDS.items()
        if name != "mountaincar"
    },
    "market": short("Regime market: trends, reversion, ...", MARKET, regimes, "market", judged=(), **BACK_AND_FORTH),
}
GROUPS = tuple(dict.fromkeys(scenario.group for scenario in SCENARIOS.values()))
