"""Registries of classes by name: a new one is its own module and a line here. Imports no torch.

Installed packages add names by entry points, and users name classes of their own:

    [project.entry-points."driftproof.value_heads"]
    gaussian = "my_package.heads:GaussianHead"
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import cache
from importlib import import_module, metadata
from typing import Any

from driftproof._text import closest
from driftproof._trust import Trust, WrongKindError, of_kind


class Registry:
    """Classes of one kind by name: built in, of installed packages, and those that the program itself has used.

    Args:
        what: Kind of class, for messages.
        group: Group of entry points in installed packages.
        base: Base class of all of them, as ``module:Class``.
        built_in: Names and their ``module:Class``, imported when first used.
    """

    def __init__(self, what: str, group: str, base: str, built_in: Mapping[str, str]) -> None:
        self.what, self.group, self.built_in = what, group, dict(built_in)
        self._base = base
        self._used: dict[str, type[Any]] = {}

    @property
    def base(self) -> type[Any]:
        """Base class of all of them."""
        found: type[Any] = _found(self._base)
        return found

    @property
    def names(self) -> tuple[str, ...]:
        """All names, built in and of installed packages."""
        return (*self.built_in, *(name for name in self._offered() if name not in self.built_in))

    def name(self, chosen: Any) -> str:
        """Canonical name of a choice in any spelling; of classes without a name, ``module:Class``. Imports nothing.

        Raises:
            ValueError: The name is unknown.
        """
        if isinstance(chosen, str) and ":" in chosen:
            return chosen
        full = f"{chosen.__module__}:{chosen.__qualname__}" if isinstance(chosen, type) else ""
        plain = _plain(str(chosen))
        for is_offered in (False, True):
            known = self._offered() if is_offered else self.built_in  # Looking for installed packages takes time.
            for name, target in known.items():
                if target == full or (not full and _plain(name) == plain):
                    return name
        if full:
            self._used[full] = chosen
            return full
        hint = "use one of" if (near := closest(chosen, self.names)) is None else f"did you mean {near!r}? There are"
        raise ValueError(f"Unknown {self.what} {chosen!r}; {hint} {', '.join(self.names)}, or a class")

    def load(self, chosen: Any, trust: Trust | None = None, place: str = "") -> type[Any]:
        """The class that is chosen.

        Args:
            chosen: A name, ``module:Class``, or the class itself.
            trust: Which modules may be imported because a text names them; ``None``: those that the user's environment
                variable names. Installed packages that offer a name need none.
            place: Name of the setting, for messages.

        Raises:
            UntrustedError: ``module:Class`` of a module that may not be imported.
            WrongKindError: It is not a subclass of the base class.
            ValueError: The name is unknown.
        """
        if isinstance(chosen, type):
            try:
                return of_kind(chosen.__qualname__, chosen, self.base)
            except WrongKindError as error:
                options = f"use one of {', '.join(self.names)}, or a subclass"
                raise WrongKindError(f"Unknown {self.what} {chosen!r}; {error}; {options}") from error
        name = self.name(chosen)
        if name in self._used:
            return of_kind(name, self._used[name], self.base)
        if ":" in name:
            return (trust or Trust.of(())).resolved(name, self.base, place)
        return of_kind(name, _found(self.built_in.get(name) or self._offered()[name]), self.base)

    def _offered(self) -> dict[str, str]:
        here = os.getcwd()
        return _entry_points(self.group, tuple(path for path in sys.path if path and path != here))


@cache
def _entry_points(group: str, paths: tuple[str, ...]) -> dict[str, str]:
    """Names and ``module:Class`` in packages installed there. The working directory is not searched: no trust."""
    found = (point for each in metadata.distributions(path=list(paths)) for point in each.entry_points)
    return {point.name: point.value.replace(" ", "") for point in found if point.group == group}


def _found(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


OPTIMIZERS = Registry(
    "optimizer",
    "driftproof.optimizers",
    "torch.optim:Optimizer",
    {
        "adaptive_upgd": "driftproof.optim.upgd:AdaptiveUPGD",
        "upgd": "driftproof.optim.upgd:UPGD",
        "upgdw": "driftproof.optim.upgd:UPGDW",
        "adamw": "torch.optim.adamw:AdamW",
        "adam": "torch.optim.adam:Adam",
        "sgd": "torch.optim.sgd:SGD",
    },
)
VALUE_HEADS = Registry(
    "value head",
    "driftproof.value_heads",
    "driftproof.nn.heads:ValueHead",
    {
        "quantile": "driftproof.nn.heads:QuantileHead",
        "categorical": "driftproof.nn.heads:CategoricalHead",
    },
)
CORES = Registry(
    "policy core",
    "driftproof.cores",
    "driftproof.nn.cores:Core",
    {
        "lstm": "driftproof.nn.cores:LSTMCore",
        "gru": "driftproof.nn.cores:GRUCore",
        "none": "driftproof.nn.cores:NoCore",
    },
)
EXPLORE_METHODS = Registry(
    "explore method",
    "driftproof.explore_methods",
    "driftproof.pbt.explore:ExploreMethod",
    {
        "both": "driftproof.pbt.explore:Both",
        "perturb": "driftproof.pbt.explore:Perturb",
        "resample": "driftproof.pbt.explore:Resample",
        "pb2": "driftproof.pbt.pb2:PB2",
    },
)
ATTACKS = Registry(
    "attack method",
    "driftproof.attacks",
    "driftproof.adversarial.methods:Attack",
    {
        "pgd": "driftproof.adversarial.methods:PGD",
        "fgsm": "driftproof.adversarial.methods:FGSM",
        "sgld": "driftproof.adversarial.methods:SGLD",
    },
)
CHANGES = Registry(
    "change",
    "driftproof.changes",
    "driftproof.envs.changes:Change",
    {
        "observation_permute": "driftproof.envs.changes:ObservationPermute",
        "observation_scale": "driftproof.envs.changes:ObservationScale",
        "observation_shift": "driftproof.envs.changes:ObservationShift",
        "observation_offset": "driftproof.envs.changes:ObservationOffset",
        "observation_flip": "driftproof.envs.changes:ObservationFlip",
        "observation_noise": "driftproof.envs.changes:ObservationNoise",
        "action_permute": "driftproof.envs.changes:ActionPermute",
        "action_gain": "driftproof.envs.changes:ActionGain",
        "reward_scale": "driftproof.envs.changes:RewardScale",
        "reward_sign": "driftproof.envs.changes:RewardSign",
        "dynamics": "driftproof.envs.dynamics:Dynamics",
    },
)
SCHEDULES = Registry(
    "schedule",
    "driftproof.schedules",
    "driftproof.envs.schedules:Schedule",
    {
        "sudden": "driftproof.envs.schedules:Sudden",
        "gradual": "driftproof.envs.schedules:Gradual",
        "cyclic": "driftproof.envs.schedules:Cyclic",
        "random_walk": "driftproof.envs.schedules:RandomWalk",
    },
)
TENSOR_ENVS = Registry(
    "tensor environment",
    "driftproof.tensor_envs",
    "driftproof.envs.tensor.base:TensorEnv",
    {
        "CartPole-v1": "driftproof.envs.tensor.classic:CartPole",
        "Pendulum-v1": "driftproof.envs.tensor.classic:Pendulum",
        "driftproof/RegimeMarket-v0": "driftproof.envs.tensor.markets:RegimeMarket",
        "driftproof/Market-v0": "driftproof.envs.tensor.markets:Market",
    },
)
