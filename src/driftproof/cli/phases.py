"""``driftproof evaluate --phases``: what an agent achieves in every phase of its environment's drift."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from driftproof._text import printable, shortlist, table
from driftproof.cli.errors import CommandError, say
from driftproof.cli.evaluation import evaluation_env, first_seed, let_drift, normalized, returns_of, summary

if TYPE_CHECKING:
    from stable_baselines3.common.vec_env import VecEnv

    from driftproof.config import Config
    from driftproof.ppo import DistributionalPPO

_MOST_WORLDS = 24
"""Largest number of different values of the drift that an agent is evaluated with."""
_LONGEST = 60


@dataclass
class _World:
    """One combination of values of the drift.

    Attributes:
        time: Steps and episodes at which it first occurs.
        values: Value of each change.
        phases: Numbers of the phases that have these values.
        is_seen: Whether it occurred in training.
        is_last: Whether training ended in it.
    """

    time: tuple[int, int]
    values: dict[str, float]
    phases: list[int] = field(default_factory=list)
    is_seen: bool = False
    is_last: bool = False


class Following:
    """Plays as an agent whose observation normaliser, if it has one, follows shifts of observations as in training.

    Weights stay the same.

    Args:
        agent: The agent; :meth:`restart` gives its normaliser back the state that it has now.
    """

    def __init__(self, agent: DistributionalPPO) -> None:
        self._agent, self._normalizer = agent, agent.learner.normalizer
        self._state = None if self._normalizer is None else self._normalizer.state_dict()

    def restart(self) -> None:
        """Undo what the normaliser has learned since."""
        if self._normalizer is not None and self._state is not None:
            self._normalizer.load_state_dict(self._state)

    def predict(
        self, observation: Any, state: Any = None, episode_start: Any = None, deterministic: bool = False
    ) -> Any:
        """Like the agent's."""
        if self._normalizer is not None:
            self._normalizer.observe(observation, episode_start)
        return self._agent.predict(observation, state, episode_start, deterministic)


def measure_phases(
    agent: DistributionalPPO,
    settings: Config,
    episodes: int,
    seed: int | None = None,
    deterministic: bool = True,
    lasting: Sequence[Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Returns of an agent in every phase of the drift, which is held meanwhile.

    The agent does not learn, but its observation normaliser follows shifts.

    Args:
        agent: The agent.
        settings: Configuration with the environment.
        episodes: Number of episodes in each phase, which begin alike.
        seed: Seed of the first episode; ``None``: one that training does not use.
        deterministic: Whether the agent takes its most probable actions.
        lasting: States of the environments' drift at the end of training.

    Raises:
        CommandError: The environment does not drift.
    """
    from driftproof.ppo.environments import lasting_states

    first = first_seed(settings, seed)
    with evaluation_env(agent, settings, episodes) as venv:
        if not venv.has_attr("drift_moments"):
            raise CommandError(
                f"{settings.env.id} has no drift, and so no phases: leave out --phases, or give a drift, such as --set "
                "'env.drift=[{kind: reward_scale, schedule: {kind: sudden, every: 1000, values: [1, 2]}}]'"
            )
        venv.seed(first)
        venv.reset()
        if is_known := let_drift(venv, lasting):
            assert lasting
            # Values at that number of steps are those of the next step.
            end = max(int(lasting[0]["steps"]) - 1, 0), max(int(lasting[0]["episodes"]), 0)
        else:
            end = max(agent.num_timesteps // settings.env.n_envs - 1, 0), 0
        # All drift like the first one, if each has a seed of its own.
        states = (lasting_states(venv) or [])[:1]
        let_drift(venv, states)
        worlds = _worlds(venv, end, is_known)
        if len(worlds) > _MOST_WORLDS:
            say(f"the drift has {len(worlds):,} different phases, of which {_MOST_WORLDS} are evaluated")
            worlds = _some(worlds)
        seen, player, results = normalized(agent, venv), Following(agent), []
        for world in worlds:
            player.restart()
            let_drift(venv, states)
            _hold(venv, world.time)
            returns = returns_of(player, seen, episodes, first, deterministic)
            steps, drift_episodes = world.time
            told = {"phases": world.phases, "steps": steps, "drift_episodes": drift_episodes, "values": world.values}
            results.append({**told, "is_seen": world.is_seen, "is_last": world.is_last, **summary(returns)})
    return {"episodes": episodes, "env": settings.env.id, "seed": first, "phases": results}


def phase_table(result: Mapping[str, Any]) -> str:
    """Results as a text table."""
    rows = [("phase", "drift", "return", "95% interval", "deviation", "")]
    for each in result["phases"]:
        low, high = each["interval"]
        values = ", ".join(f"{name} {value:.4g}" for name, value in each["values"].items())
        mark = "training ended here" if each["is_last"] else "" if each["is_seen"] else "not seen in training"
        rows.append(
            (
                shortlist(each["phases"]),
                printable(values, _LONGEST),
                f"{each['mean']:.4g}",
                f"[{low:.4g}, {high:.4g}]",
                f"{each['std']:.3g}",
                mark,
            )
        )
    return table(rows)


def _worlds(venv: VecEnv, end: tuple[int, int], is_known: bool) -> list[_World]:
    """All combinations of values that stand for the drift, in the order in which they first occur.

    Args:
        venv: The environments, of which the first is asked.
        end: Steps and episodes at the end of training.
        is_known: Whether training had this drift.
    """
    (times,) = venv.env_method("drift_moments", *end, indices=[0])
    found: dict[tuple[Any, ...], _World] = {}
    for time in sorted({*times, end}):
        _hold(venv, time, indices=[0])
        (drift,) = venv.env_method("get_wrapper_attr", "drift_values", indices=[0])
        phase, values = int(drift.pop("phase")), {str(name): float(value) for name, value in drift.items()}
        world = found.setdefault(tuple(values.items()), _World(time, values))
        if phase not in world.phases:
            world.phases.append(phase)
        world.is_seen |= is_known and time <= end
        world.is_last |= is_known and time == end
    return list(found.values())


def _some(worlds: Sequence[_World]) -> list[_World]:
    """Some worlds, evenly spaced, with the first and the last one and that in which training ended."""
    count, spaces = len(worlds), _MOST_WORLDS - 2
    chosen = {round(i * (count - 1) / spaces) for i in range(spaces + 1)}
    return [world for i, world in enumerate(worlds) if i in chosen or world.is_last]


def _hold(venv: VecEnv, time: tuple[int, int], indices: Sequence[int] | None = None) -> None:
    venv.env_method("set_drift_time", *time, indices=indices, hold=True)
