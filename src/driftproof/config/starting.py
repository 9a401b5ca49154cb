"""Starting values: settings that were measured in known environments, and the choice of the nearest for any other."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from driftproof._trust import Trust
from driftproof.config.files import ConfigError, loads, settings_in
from driftproof.config.model import Config
from driftproof.config.names import make_env

_SMALLEST_IMAGE = 36
"""Height and width from which on a Box of three dimensions counts as an image: what NatureCNN needs."""
_VERSION = re.compile(r"-v\d+$")
_NAMES_ENVIRONMENT = re.compile(r"\s*(env|env\.id|env_id|(env\.|env_)kwargs(\.[^=]*)?)\s*=")
"""Overrides that name the environment, or set its arguments."""


@dataclass(frozen=True)
class StartingValues:
    """Settings for one environment, ``starting_values/<name>.yaml`` in this package.

    Attributes:
        name: Name of the file.
        family: Part of the module or of the id that related environments have in common.
        observations: Kind of observations; see :func:`kind_of_observations`.
        actions: Kind of actions; see :func:`kind_of_actions`.
    """

    name: str
    family: str
    observations: str
    actions: str

    @property
    def text(self) -> str:
        """Content of the file."""
        return (files("driftproof.config") / "starting_values" / f"{self.name}.yaml").read_text("utf-8")

    @property
    def env_id(self) -> str:
        """The environment, without the module that registers it."""
        return _without_module(str(settings_in(self.text)["env"]["id"]))


STARTING_VALUES = {
    name: StartingValues(name, family, observations, actions)
    for name, family, observations, actions in (
        # The first with the same kinds of observations and actions is chosen for environments that are not listed.
        ("acrobot", "classic_control", "vector", "discrete"),
        ("hopper", "mujoco", "vector", "continuous"),
        ("frozenlake", "toy_text", "discrete", "discrete"),
        ("minatar_breakout", "minatar", "grid", "discrete"),
        ("cartpole", "classic_control", "vector", "discrete"),
        ("cartpole_no_velocity", "driftproof", "vector", "discrete"),
        ("halfcheetah", "mujoco", "vector", "continuous"),
        ("inverted_double_pendulum", "mujoco", "vector", "continuous"),
        ("inverted_pendulum", "mujoco", "vector", "continuous"),
        ("lunarlander", "box2d", "vector", "discrete"),
        ("memory_cue", "driftproof", "vector", "discrete"),
        ("minigrid_doorkey", "minigrid", "vector", "discrete"),
        ("minigrid_empty", "minigrid", "vector", "discrete"),
        ("mountaincar", "classic_control", "vector", "discrete"),
        ("pendulum", "classic_control", "vector", "continuous"),
        ("mountaincar_continuous", "classic_control", "vector", "continuous"),
        ("reacher", "mujoco", "vector", "continuous"),
        ("market", "driftproof", "vector", "continuous"),
        ("regime_market", "driftproof", "vector", "continuous"),
        ("repeat_previous", "driftproof", "discrete", "discrete"),
    )
}


@dataclass(frozen=True)
class Choice:
    """Starting values for an environment.

    Attributes:
        values: The values; ``None``: there are none, and the library's defaults are used.
        reason: The choice in one line.
    """

    values: StartingValues | None
    reason: str


def load_with_starting_values(overrides: Iterable[str], trusted: Iterable[str] | Trust = ()) -> tuple[Config, str]:
    """Configuration for the environment in the overrides, and one line about the choice of its starting values.

    Args:
        overrides: Settings that go before the starting values; among them is ``env.id``.
        trusted: Modules that the overrides may name besides those that :func:`driftproof.config.load` allows.

    Raises:
        ConfigError: The configuration is invalid.
    """
    overrides, trust = list(overrides), Trust.of(trusted)
    choice = nearest(_environment(overrides, trust))
    if choice.values is None:
        return loads("", overrides, trusted=trust), choice.reason
    try:
        return loads(choice.values.text, overrides, trusted=trust), choice.reason
    except ConfigError as error:
        loads("", overrides, trusted=trust)  # Raises if the overrides are invalid in any case.
        name = choice.values.env_id
        hint = f"the other settings are the starting values for {name}; --defaults leaves them out"
        raise ConfigError([*error.problems, hint]) from error


def nearest(config: Config) -> Choice:
    """Starting values for the environment of a configuration.

    These are, in this order: those of the same environment, of another version of it, of an environment of its family
    with the same kinds of observations and actions, and of any environment with the same kinds.

    Raises:
        ConfigError: The environment cannot be made, which is only tried if its name is unknown.
    """
    env_id = _without_module(config.env.id)
    by_id = {values.env_id: values for values in STARTING_VALUES.values()}
    if env_id in by_id:
        return _chosen(by_id[env_id])
    if values := {_without_version(known): values for known, values in by_id.items()}.get(_without_version(env_id)):
        return _chosen(values, f", another version of {env_id}" if _VERSION.search(env_id) else "")
    env = make_env(config.env, config.trust)
    try:
        kinds = kind_of_observations(env.observation_space), kind_of_actions(env.action_space)
    finally:
        env.close()
    alike = [each for each in STARTING_VALUES.values() if (each.observations, each.actions) == kinds]
    described = f"{kinds[0]} observations, {kinds[1]} actions"
    if values := next((each for each in alike if each.family == family_of(env_id)), None):
        return _chosen(values, f", the nearest to {env_id} (same family, {described})")
    if alike:
        memory = "without memory (--set policy=MlpLstmPolicy adds it)"
        return _chosen(alike[0], f", the nearest to {env_id} ({described}), {memory}")
    return Choice(None, f"no starting values are known for {env_id} ({described}): using the defaults")


def kind_of_observations(space: Any) -> str:
    """vector, grid, image, discrete, or the name of another type of space."""
    from gymnasium import spaces

    if not isinstance(space, spaces.Box):
        return type(space).__name__.lower()
    if len(space.shape) == 1:
        return "vector"
    is_image = len(space.shape) == 3 and sorted(space.shape)[1] >= _SMALLEST_IMAGE
    return "image" if is_image else "grid"


def kind_of_actions(space: Any) -> str:
    """continuous, discrete, or the name of another type of space."""
    from gymnasium import spaces

    return "continuous" if isinstance(space, spaces.Box) else type(space).__name__.lower()


def family_of(env_id: str) -> str | None:
    """Family of an environment: that of Gymnasium's own by their module, of others by their names."""
    import gymnasium

    spec = gymnasium.registry.get(env_id)
    entry = "" if spec is None or callable(spec.entry_point) else str(spec.entry_point)
    if entry.startswith("gymnasium.envs."):
        return entry.removeprefix("gymnasium.envs.").partition(".")[0].partition(":")[0]
    return next((name for name in ("minatar", "minigrid") if name in env_id.lower()), None)


def _chosen(values: StartingValues, why: str = "") -> Choice:
    return Choice(values, f"starting values for {values.env_id}{why}; --set changes them, --defaults leaves them out")


def _environment(overrides: Iterable[str], trust: Trust) -> Config:
    """The environment that overrides name; all other settings have their defaults."""
    return loads("", [each for each in overrides if _NAMES_ENVIRONMENT.match(each)], trusted=trust)


def _without_module(env_id: str) -> str:
    return env_id.rpartition(":")[2]


def _without_version(env_id: str) -> str:
    return _VERSION.sub("", env_id)
