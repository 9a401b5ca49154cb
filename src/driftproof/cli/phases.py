"""``driftproof evaluate --phases all``: returns of an agent in every drift phase of its environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from driftproof._text import printable, shortlist, table
from driftproof.cli.arenas import Following, Subject, World, arena, no_phases, normalized
from driftproof.cli.errors import say
from driftproof.cli.returns import interval_told, play, summary

_MOST_WORLDS = 24
"""Largest number of different drift values that an agent is evaluated with."""
_LONGEST = 60


def measure_phases(
    subject: Subject, episodes: int, seed: int | None = None, deterministic: bool = True
) -> dict[str, Any]:
    """Evaluate an agent in every drift phase; the drift is held fixed during each.

    The weights do not change, but the observation normaliser follows shifts.

    Args:
        subject: The agent and its settings.
        episodes: Number of episodes in each phase; all phases use the same seeds.
        seed: Seed of the first episode; ``None``: one that training does not use.
        deterministic: Whether the agent takes its most probable actions.

    Raises:
        CommandError: The environment does not drift.
    """
    env_id = subject.settings.env.id
    with arena(subject, episodes, seed) as place:
        if not place.drifts:
            raise no_phases(env_id, "--phases")
        scope = place.scope(normalizer="follows")
        worlds = place.worlds()
        if len(worlds) > _MOST_WORLDS:
            say(f"the drift has {len(worlds):,} different phases; {_MOST_WORLDS} of them are evaluated")
            worlds = _some(worlds)
        seen, player, results = normalized(subject.agent, place.venv), Following(subject.agent), []
        for world in worlds:
            player.restart()
            place.hold(world)
            place.restart()
            found = summary(play(player, seen, episodes, place.seed, deterministic), place.times)
            steps, drift_episodes = world.time
            told = {"phases": world.phases, "steps": steps, "drift_episodes": drift_episodes, "values": world.values}
            results.append({**told, "is_seen": world.is_seen, "is_last": world.is_last, **found})
    return {"episodes": episodes, "env": env_id, "seed": place.seed, "scope": scope, "phases": results}


def phase_table(result: Mapping[str, Any]) -> str:
    """Results of :func:`measure_phases` as a text table."""
    rows = [("phase", "drift", "return", "95% interval", "deviation", "")]
    for each in result["phases"]:
        values = ", ".join(f"{name} {value:.4g}" for name, value in each["values"].items())
        mark = "training ended here" if each["is_last"] else "" if each["is_seen"] else "not seen in training"
        rows.append(
            (
                shortlist(each["phases"]),
                printable(values, _LONGEST),
                f"{each['mean']:.4g}",
                interval_told(each),
                f"{each['std']:.3g}",
                mark,
            )
        )
    return table(rows)


def _some(worlds: Sequence[World]) -> list[World]:
    """Evenly spaced selection that includes the first, the last, and the one in which training ended."""
    count, spaces = len(worlds), _MOST_WORLDS - 2
    chosen = {round(i * (count - 1) / spaces) for i in range(spaces + 1)}
    return [world for i, world in enumerate(worlds) if i in chosen or world.is_last]
