"""Worlds of a drift response: weights, with what belongs to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from driftproof.learner.rewiring import Starts, TransitionModel
from driftproof.nn.normalization import WHOLE
from driftproof.nn.types import SECOND_CRITIC
from driftproof.state import Stateful, copy_tree
from driftproof.state.schema import Rule, like

PARTS = ("policy", "initial_weights", "return_scale", "observations")
"""Components that belong together: heads predict in the scale of returns, networks read normalised observations."""


class Worlds:
    """Copies an agent's weights with what belongs to them, and puts copies into the agent.

    Args:
        parts: Components of the agent, by name.
        model: Model of the world's steps.
    """

    def __init__(self, parts: Mapping[str, Stateful], model: TransitionModel | None) -> None:
        self._parts = {name: parts[name] for name in PARTS if name in parts}
        self._model = model

    def copy(self) -> dict[str, Any]:
        """A copy of the present weights and what belongs to them."""
        states: dict[str, Any] = copy_tree({name: dict(part.state_dict()) for name, part in self._parts.items()})
        return states if self._model is None else {**states, "model": {**self._model.state_dict(), "recent": []}}

    def put(self, world: Mapping[str, Any]) -> None:
        """Copy weights, and what belongs to them, into the agent."""
        for name, part in self._parts.items():
            part.load_state_dict(copy_tree(world[name]))
        if self._model is not None:
            self._model.load_state_dict(world["model"])

    def whole(self, world: Any) -> Any:
        """The world, with the policy's own second critic where its weights have none."""
        if world is None:
            return None
        own = copy_tree(dict(self._parts["policy"].state_dict()))
        return {**world, "policy": {**own, **world["policy"]}}

    def rules(self) -> dict[str, Rule]:
        """Schemas of a world's parts."""
        model = {} if self._model is None else {"model": self._model.rule()}
        return {**{name: _rule(part) for name, part in self._parts.items()}, **model}


def starts_of(world: Mapping[str, Any]) -> Starts:
    """Mean and variance of first observations in a world."""
    statistics = world["observations"][WHOLE]
    return Starts(*(statistics[name].cpu().numpy() for name in ("start_mean", "start_variance")))


def _rule(part: Stateful) -> Rule:
    """Schema of a component's state; weights with one critic fit a policy with two."""

    def rule(value: Any, path: tuple[Any, ...]) -> None:
        if callable(check_own := getattr(part, "check_state_dict", None)):
            check_own(value)
            return
        own = dict(part.state_dict())
        if isinstance(value, Mapping) and not any(str(key).startswith(SECOND_CRITIC) for key in value):
            own = {key: each for key, each in own.items() if not key.startswith(SECOND_CRITIC)}
        like(own)(value, path)

    return rule
