"""Resolves environments and classes that a configuration names. :mod:`driftproof._trust` decides about imports."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from driftproof._files import shortened
from driftproof._registry import ATTACKS, CORES, EXPLORE_METHODS, OPTIMIZERS, VALUE_HEADS
from driftproof._text import closest
from driftproof._trust import Kind, Trust, UntrustedError, WrongKindError
from driftproof.config.files import ConfigError
from driftproof.config.keys import at
from driftproof.config.model import Config
from driftproof.config.sections import EnvSection

if TYPE_CHECKING:
    import gymnasium
    from gymnasium.envs.registration import EnvSpec
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor

EXTRACTORS = ("FlattenExtractor", "NatureCNN", "CombinedExtractor")
_PLACE_OF_EXTRACTOR = "policy.features_extractor_class"
CHOSEN = {
    "policy.core": (CORES, "core"),
    "critic.value_head": (VALUE_HEADS, "value_head"),
    "optimizer.name": (OPTIMIZERS, "optimizer_class"),
    "adversarial.perturbation.attack_method": (ATTACKS, "attack_method"),
    "pbt.explore_method": (EXPLORE_METHODS, None),
}
"""Settings that are names in a registry or ``module:Class``, with their registries and arguments of the agent."""
MARKET = "driftproof/Market-v0"
_LOCAL_CLUSTERS = (None, "auto", "local")
_LOADERS = ("shimmy",)
"""Packages whose environments import what their arguments name."""


def check_names(config: Config) -> None:
    """Refuse names of untrusted modules before any is imported.

    Raises:
        ConfigError: A module is not trusted; the message says how to allow it.
    """
    _check_is_module(config.env.id)
    problems = []
    for place, name, module in _named(config):
        try:
            config.trust.check(name, module, place)
        except UntrustedError as error:
            problems.append(f"{place}: {error}")
    if problems:
        raise ConfigError(problems)


def home_of(config: Config) -> str | None:
    """The folder from which modules that the configuration names were imported, if they are not installed."""
    trust = config.trust
    folders = (trust.here if trust.names(module, place) else trust.home for place, _, module in _named(config))
    return next((folder for folder in folders if folder in sys.path), None)


def named_modules(config: Config) -> list[str]:
    """Modules that the configuration names."""
    return [module for _, _, module in _named(config)]


def findable_modules(config: Config) -> list[str]:
    """Modules that the configuration names or the user trusts; after this, ``find_spec`` finds them.

    Raises:
        UntrustedError: A module is not trusted.
    """
    places = {module: place for place, _, module in _named(config)} | dict.fromkeys(config.trust.modules, "")
    for module, place in places.items():
        config.trust.make_findable(module, place)
    return list(places)


def _named(config: Config) -> Iterator[tuple[str, str, str]]:
    """Paths of the settings that name a module, the names, and the modules."""
    if ":" in (env := config.env.id):
        yield "env.id", env, env.rpartition(":")[0]
    if ":" in (extractor := config.policy.features_extractor_class or ""):
        yield _PLACE_OF_EXTRACTOR, extractor, _module(extractor)
    for place in CHOSEN:
        if ":" in (name := at(config, tuple(place.split("."))) or ""):
            yield place, name, _module(name)
    for index, spec in enumerate(config.env.drift):
        kinds = [part.get("kind") for part in (spec, spec.get("schedule")) if isinstance(part, Mapping)]
        for name in kinds:
            if isinstance(name, str) and ":" in name:
                yield f"env.drift.{index}", name, _module(name)


def check_address(config: Config) -> None:
    """Refuse to connect to a Ray cluster that only a file names: a cluster can run code in connected processes.

    Raises:
        ConfigError: The user did not give the address.
    """
    place, address, trust = "pbt.address", config.pbt.address, config.trust
    if address in _LOCAL_CLUSTERS or trust.is_own or trust.has_typed(place):
        return
    where = trust.lines.get(place, "the file")
    raise ConfigError(
        [
            f"{place}: {where} names a Ray cluster at {address[:100]!r}, which could run code on this machine. If it "
            f"is yours, give the address yourself: --set {place}=ADDRESS"
        ]
    )


def features_extractor(config: Config) -> type[BaseFeaturesExtractor] | None:
    """The class of the features extractor; ``None``: the default of the policy."""
    import stable_baselines3.common.torch_layers as layers

    name = config.policy.features_extractor_class
    if name is None:
        return None
    if name in EXTRACTORS:
        known: type[BaseFeaturesExtractor] = getattr(layers, name)
        return known
    if ":" not in name:
        raise ConfigError(
            [f"{_PLACE_OF_EXTRACTOR}: {name[:100]!r} is not one of {', '.join(EXTRACTORS)}, or module:Class"]
        )
    return _class(config, _PLACE_OF_EXTRACTOR, name, layers.BaseFeaturesExtractor)


def chosen(config: Config, place: str) -> Any:
    """The value of a setting with a registry: a registered name, or the class of ``module:Class``."""
    name = at(config, tuple(place.split(".")))
    return _class(config, place, name, CHOSEN[place][0].base) if name is not None and ":" in name else name


def foreign(config: Config) -> dict[str, Any]:
    """User-defined classes, for ``DistributionalPPO.load(..., custom_objects=...)``."""
    classes: dict[str, Any] = {}
    for place, (_, argument) in CHOSEN.items():
        if argument is not None and isinstance(found := chosen(config, place), type):
            classes[argument] = found
    if ":" in (config.policy.features_extractor_class or ""):
        classes["features_extractor_class"] = features_extractor(config)
    return classes


def make_env(section: EnvSection, trust: Trust, is_evaluation: bool = False) -> gymnasium.Env[Any, Any]:
    """Make an environment by its id.

    Args:
        section: Settings of the environment.
        trust: Modules that may be imported.
        is_evaluation: Whether it is for evaluation.

    Raises:
        ConfigError: The environment cannot be made, or needs an untrusted module.
    """
    import gymnasium

    module, _, name = section.id.rpartition(":")
    kwargs = evaluation_kwargs(section) if is_evaluation else section.kwargs
    _check_is_module(section.id)
    if module:
        try:
            trust.imported(section.id, module, "env.id")
        except UntrustedError as error:
            raise ConfigError([f"env.id: {error}"]) from error
        except Exception as error:
            what = str(error) if isinstance(error, ImportError | SyntaxError) else describe_error(error)
            raise ConfigError([f"env.id: {section.id!r} cannot be imported: {what}"]) from error
    _check_registered(section, name, trust)
    try:
        return gymnasium.make(name, **kwargs)
    except gymnasium.error.UnregisteredEnv as error:
        raise ConfigError([f"env.id: {_unknown(module, name)}"]) from error
    except gymnasium.error.Error as error:
        # Gymnasium's message says how to install what an environment needs.
        raise ConfigError([f"env.id: {section.id!r} cannot be made: {error}"]) from error
    except (TypeError, ValueError) as error:
        raise ConfigError([f"env: {section.id!r} cannot be made with {shortened(kwargs, 200)}: {error}"]) from error
    except Exception as error:
        raise ConfigError([f"env: {section.id!r} cannot be made: {describe_error(error)}"]) from error


def evaluation_kwargs(section: EnvSection) -> dict[str, Any]:
    """Arguments of the environment for evaluation.

    Without a ``split``, a market is evaluated on the bars that training does not see, or on all bars of other data.
    """
    kwargs: dict[str, Any] = section.kwargs | section.evaluation_kwargs
    if section.id.rpartition(":")[2] == MARKET and "split" not in kwargs:
        fractions = kwargs.get("fractions")
        is_all_for_training = isinstance(fractions, list) and fractions[:1] == [1] and kwargs.get("dates") is None
        if "data" in section.evaluation_kwargs:
            return kwargs | {"split": "all"}
        if not is_all_for_training:
            return kwargs | {"split": "held_out"}
    return kwargs


def describe_error(error: Exception) -> str:
    """Description of an error in user code: its type, file, line and message."""
    from driftproof.ppo.collection import PROCESS_ENDED

    place = traceback.extract_tb(error.__traceback__)[-1]
    what = PROCESS_ENDED if isinstance(error, EOFError) else str(error)
    return f"{type(error).__name__} in {place.filename}:{place.lineno}: {what}"


def _check_is_module(env_id: str) -> None:
    file, _, name = env_id.partition(":")
    if file.endswith(".py"):
        example = f"{Path(file).stem}:{name or 'Name-v0'}"
        raise ConfigError([f"env.id: {env_id!r} names a file; name the module as import does: {example}"])


def _module(name: str) -> str:
    return name.partition(":")[0]


def _class(config: Config, place: str, name: str, kind: type[Kind]) -> type[Kind]:
    try:
        return config.trust.resolved(name, kind, place)
    except (UntrustedError, WrongKindError) as error:
        raise ConfigError([f"{place}: {error}"]) from error
    except ImportError as error:
        raise ConfigError([f"{place}: {name!r} cannot be imported: {error}"]) from error
    except Exception as error:
        raise ConfigError([f"{place}: {name!r} cannot be imported: {describe_error(error)}"]) from error


def _check_registered(section: EnvSection, name: str, trust: Trust) -> None:
    """Refuse an id for which Gymnasium would import an untrusted module.

    Ids of Gymnasium itself, and of modules that are already imported, need no trust.
    """
    spec = _registered(name)
    if spec is None or trust.is_own:
        return
    entry: Any = spec.entry_point
    module = str(getattr(entry, "__module__", "")) if callable(entry) else _module(str(entry))
    root = _module(module).partition(".")[0]
    is_loaded = module in sys.modules and root not in _LOADERS
    try:
        if root not in ("gymnasium", "driftproof") and not is_loaded:
            trust.check(name, module, "env.id")
        if root in _LOADERS:
            for place, kwargs in (("env.kwargs", section.kwargs), ("env.evaluation_kwargs", section.evaluation_kwargs)):
                inner = str(kwargs.get("env_id", ""))
                if ":" in inner:
                    trust.check(inner, _module(inner), f"{place}.env_id")
    except UntrustedError as error:
        raise ConfigError([f"env.id: {error}"]) from error


def _registered(name: str) -> EnvSpec | None:
    """The registered environment of an id; without a version, the latest one."""
    import gymnasium
    from gymnasium.envs.registration import find_highest_version, get_env_id, parse_env_id

    try:
        namespace, plain, version = parse_env_id(name)
    except gymnasium.error.Error:
        return None
    if version is None and (latest := find_highest_version(namespace, plain)) is not None:
        name = get_env_id(namespace, plain, latest)
    return gymnasium.registry.get(name)


def _unknown(module: str, name: str) -> str:
    """Error message for an unknown environment, with the most similar id (compared without versions)."""
    import gymnasium

    known = {_without_version(each): each for each in gymnasium.registry}
    near = closest(_without_version(name), known)
    meant = "" if near is None else ":".join(filter(None, (module, known[near])))
    hint = f"; did you mean {meant!r}?" if meant else "."
    own = (
        f"Importing {module} does not register it"
        if module
        else f"Your own: module:{name}, where importing the module registers it"
    )
    return f"there is no environment {name!r}{hint} {own}"


def _without_version(env_id: str) -> str:
    return re.sub(r"-v\d+$", "", env_id.lower())
