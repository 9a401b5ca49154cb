"""Changes of dynamics: attributes of the environment itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np

from driftproof._arguments import check_flag
from driftproof.envs._specs import nearest
from driftproof.envs.changes import Change

Derive = Callable[[Any], None]

_COMPANIONS = {"model.body_mass": ("model.body_inertia",)}
"""What is proportional to an attribute of a MuJoCo environment, and changes with it."""


@dataclass(frozen=True)
class Dynamics(Change):
    """Attributes of the environment itself change: CartPole's ``length``, MuJoCo's ``model.opt.gravity``.

    What environments compute from such attributes when they are made is computed again: see :func:`derives`.

    Args:
        schedule: Schedule of the factor, or of the value.
        names: One attribute or several, which change alike; with dots for attributes of attributes.
        relative: Whether the schedule gives a factor of the attribute's initial value, or its value. Arrays can only be
            multiplied.
    """

    names: str | Sequence[str] = ()
    relative: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        names = (self.names,) if isinstance(self.names, str) else tuple(self.names)
        object.__setattr__(self, "names", names)
        if not names or not all(isinstance(name, str) and name for name in names):
            raise ValueError(f"Invalid names: {self.names!r}; must be one or more names of attributes")
        # They lead out of the environment, to classes and modules, whose numbers are not its dynamics.
        if special := [name for name in names if any(part.startswith("__") for part in name.split("."))]:
            raise ValueError(f"Invalid names: {special[0]!r}; attributes that begin with __ are not the environment's")
        check_flag("relative", self.relative)

    @property
    def name(self) -> str:
        return f"{self.kind}.{'+'.join(self.names)}"


class Attributes:
    """Attributes of an environment, and their initial values.

    Args:
        env: The environment.
        change: The change of the attributes.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], change: Dynamics) -> None:
        self._world = env.unwrapped
        self._relative = change.relative
        self._derive = _derivation(self._world, change)
        self._originals: dict[str, Any] = {}
        for name in change.names:
            for attribute in (name, *_COMPANIONS.get(name, ())):
                original = self._get(attribute)
                if isinstance(original, np.ndarray) and not change.relative:
                    raise ValueError(f"{attribute!r} is an array, which can be multiplied only: relative=True")
                self._originals[attribute] = original.copy() if isinstance(original, np.ndarray) else original
                # To raise errors now instead of during training.
                self._put(attribute, original)

    @property
    def names(self) -> list[str]:
        """Names of the attributes."""
        return list(self._originals)

    def set(self, value: float) -> None:
        """Set all attributes to the value, or to their initial values times the value."""
        for name, original in self._originals.items():
            self._put(name, original * value if self._relative else value)
        if self._derive is not None:
            self._derive(self._world)

    def _put(self, name: str, value: Any) -> None:
        *path, last = name.split(".")
        owner: Any = self._world
        for part in path:
            owner = getattr(owner, part)
        if isinstance(value, np.ndarray):
            getattr(owner, last)[...] = value
        else:
            setattr(owner, last, value)

    def _get(self, name: str) -> Any:
        owner, seen = self._world, type(self._world).__name__
        for part in name.split("."):
            if not hasattr(owner, part):
                raise AttributeError(
                    f"{seen} has no attribute {part!r}{nearest(part, _numbers(owner))}; numbers it has: "
                    f"{', '.join(_numbers(owner)) or 'none'}"
                )
            owner, seen = getattr(owner, part), f"{seen}.{part}"
        if not _is_number(owner):
            raise TypeError(f"{seen} is {owner!r}: only numbers, and arrays of real numbers, can change")
        return owner


def derives(*class_names: str) -> Callable[[Derive], Derive]:
    """Register a function that computes again what environments of these classes derive from attributes.

    It gets the environment without its wrappers, after attributes have changed.
    """

    def register(function: Derive) -> Derive:
        _DERIVED.update(dict.fromkeys(class_names, function))
        return function

    return register


_DERIVED: dict[str, Derive] = {}


@derives("CartPoleEnv")
def _cart_pole(env: Any) -> None:
    env.total_mass = env.masspole + env.masscart
    env.polemass_length = env.masspole * env.length


@derives("MujocoEnv")
def _mujoco(env: Any) -> None:
    import mujoco

    # With new data: the environment's own data must not be changed.
    if not hasattr(env, "_scratch_data"):
        env._scratch_data = mujoco.MjData(env.model)
    mujoco.mj_setConst(env.model, env._scratch_data)


def _derivation(world: Any, change: Dynamics) -> Derive | None:
    if all(name.startswith(("model.opt.", "model.geom_friction")) for name in change.names):
        return None  # Nothing is derived from these.
    for kind in type(world).__mro__:
        if kind.__name__ in _DERIVED:
            return _DERIVED[kind.__name__]
    return None


def _is_number(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return bool(np.issubdtype(value.dtype, np.floating))
    return isinstance(value, int | float | np.floating | np.integer) and not isinstance(value, bool)


def _numbers(owner: Any) -> list[str]:
    return [name for name in dir(owner) if not name.startswith("_") and _is_number(getattr(owner, name, None))]
