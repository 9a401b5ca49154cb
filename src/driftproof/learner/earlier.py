"""Weights of earlier times, at which returns were as usual: the longer ago, the fewer are kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from driftproof.learner.rewiring import TransitionModel
from driftproof.learner.worlds import starts_of
from driftproof.state.schema import Rule, count, items, table

World = dict[str, Any]
_INTERVAL = 16
"""Updates in which returns are as usual, after which weights are kept."""
_LEAST_GAIN = 0.2
"""By how much the model of their world must explain the last transitions better."""


class EarlierWeights:
    """Keeps weights of earlier times, and tells which of them fit a world that has changed.

    Training in one world spoils weights for others, without anybody noticing while that world lasts: dynamics become
    easier, then harder than ever. Which of the earlier weights are worth a trial is up to the model of their world: it
    must explain the present one clearly better than that of the last good weights does.

    Args:
        limit: How many are kept.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.worlds: list[World] = []
        """Weights with what belongs to them, and the ``time`` when they were the last good ones, oldest first."""
        self.time = 0
        """Updates in which returns were as usual."""

    def observe(self, good: World) -> None:
        """Take the last good weights of an update."""
        self.time += 1
        if self.limit and self.time % _INTERVAL == 0:
            self.worlds.append({**good, "time": self.time})
            if len(self.worlds) > self.limit:
                del self.worlds[self._least_needed()]

    def _least_needed(self) -> int:
        """The one whose neighbours are closest in time, relative to how long ago that is; never the last."""
        ages = [max(self.time - world["time"], 0) + _INTERVAL for world in self.worlds]
        gaps = [older / younger for older, younger in zip(ages, ages[2:], strict=False)]
        return 1 + gaps.index(min(gaps)) if gaps else 0

    def fitting(self, model: TransitionModel, good: World, least_return: float) -> list[World]:
        """The earlier weights whose world is most like the present one, if it is more like it than the last one was.

        Args:
            model: Of the last transitions.
            good: The last good weights.
            least_return: What they must have earned.
        """
        limit = _misfit(model, good) - _LEAST_GAIN
        found = [(_misfit(model, world), i) for i, world in enumerate(self.worlds) if world["return"] >= least_return]
        best, index = min(found, default=(limit, 0))
        if not best < limit:
            return []
        return [{name: part for name, part in self.worlds[index].items() if name != "time"}]

    def state_dict(self) -> dict[str, Any]:
        """The weights, and the time."""
        return {"worlds": list(self.worlds), "time": self.time}

    @staticmethod
    def rule(of_world: Mapping[str, Rule]) -> Rule:
        """Schema of :meth:`state_dict`."""
        return table({"worlds": items(table({**of_world, "time": count()})), "time": count()})

    def load_state_dict(self, state: dict[str, Any], whole: Callable[[World], World]) -> None:
        """Restore a checked state.

        Args:
            state: The state, which becomes a part of this.
            whole: Adds to a world what its weights lack.
        """
        self.worlds, self.time = [whole(world) for world in state["worlds"]], state["time"]


def _misfit(model: TransitionModel, world: Mapping[str, Any]) -> float:
    return model.misfit(world["model"], starts_of(world))
