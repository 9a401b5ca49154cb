"""The configuration of an agent in a checkpoint, for files outside of run folders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from driftproof._trust import Trust
from driftproof.config.build import ACTIVATIONS
from driftproof.config.files import ConfigError, loads
from driftproof.config.model import Config
from driftproof.config.names import EXTRACTORS
from driftproof.config.sections import CriticSection, DriftSection, PolicySection, PPOSection, settings_in
from driftproof.settings.drift import DriftSettings

_SCHEDULES = {"Linear": "linear", "Cosine": "cosine"}


def config_from(
    settings: Mapping[str, Any],
    n_envs: int,
    normalizer: Mapping[str, Any],
    overrides: Iterable[str] = (),
    trusted: Iterable[str] | Trust = (),
) -> Config:
    """A configuration that builds an agent with the settings of one in a checkpoint.

    Args:
        settings: ``config["settings"]`` of the checkpoint, plain values.
        n_envs: Number of environments that it was trained in.
        normalizer: State of its observation normaliser; empty if it has none.
        overrides: Overrides such as ``"env.id=CartPole-v1"``; checkpoints do not name the environment.
        trusted: Modules that overrides may name.

    Raises:
        ConfigError: A setting cannot be written in a configuration, or does not fit.
    """
    kwargs = dict(_mapping(settings.get("policy_kwargs")))
    if kwargs.get("shared_lstm") and kwargs.get("enable_critic_lstm", True):
        # In earlier checkpoints shared_lstm had this meaning, unlike in sb3-contrib.
        kwargs["shared_recurrence"] = kwargs.pop("shared_lstm")
    env: dict[str, Any] = {"n_envs": n_envs}
    if normalizer:
        env |= {"normalize_observations": True, "clip_observations": _mapping(normalizer).get("clip_obs", 10.0)}
    raw: dict[str, Any] = {"env": env}
    raw["ppo"] = _section(PPOSection, settings)
    raw["critic"] = _section(CriticSection, {**settings, **kwargs})
    drift = DriftSettings.of_file(settings)
    raw["drift"] = _section(DriftSection, {key: drift.get(each.name) for key, each in settings_in("drift").items()})
    raw["policy"] = {"name": settings.get("policy"), **_section(PolicySection, kwargs)}
    raw["optimizer"] = {
        "name": _class_name(settings.get("optimizer_class"), "optimizer.name"),
        "kwargs": _plain(settings.get("optimizer_kwargs") or {}, "optimizer.kwargs"),
    }
    is_scaled = settings.get("variance_gradient_scaling", True)
    raw["vgs"] = {"enabled": is_scaled, **(_mapping(settings.get("vgs_kwargs")) if is_scaled else {})}
    if adversarial := settings.get("adversarial"):
        raw["adversarial"] = {"enabled": True, **_fields(adversarial)}
    raw["run"] = {name: settings[name] for name in ("seed", "stats_window_size") if settings.get(name) is not None}
    try:
        text = yaml.safe_dump(raw)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: integers with thousands of digits
        raise ConfigError(["the settings in the checkpoint are not plain values"]) from error
    return loads(text, overrides, "the checkpoint", trusted)


def _section(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a section that are set."""
    names = [name for name in kind.model_fields if values.get(name) is not None and name != "name"]
    return {name: _plain(values[name], name) for name in names}


def _plain(value: Any, place: str) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(part, place) for part in value]
    if not isinstance(value, Mapping):
        return value
    if "$class" in value or "$foreign" in value:
        return _class_name(value, place)
    if "$schedule" in value:
        return _schedule(value, place)
    return {key: _plain(part, place) for key, part in value.items()}


def _class_name(value: Any, place: str) -> str:
    """The name of a class in configurations."""
    if isinstance(value, str):
        return value
    full = str(_mapping(value).get("$class", ""))
    name = full.rpartition(".")[2]
    if place == "optimizer.name" and full:
        return name
    known = {**{torch_name: ours for ours, torch_name in ACTIVATIONS.items()}, **{each: each for each in EXTRACTORS}}
    if name not in known:
        raise ConfigError([f"{place}: the checkpoint's class has no name in configurations: give a CONFIG file"])
    return known[name]


def _schedule(value: Mapping[str, Any], place: str) -> Any:
    kind = value["$schedule"]
    if kind == "ConstantSchedule":
        return value.get("val")
    if kind == "LinearSchedule" and value.get("end_fraction") == 1:
        kind = "Linear"
    if kind not in _SCHEDULES:
        raise ConfigError([f"{place}: the checkpoint's schedule cannot be written in a configuration"])
    return {"kind": _SCHEDULES[kind], "start": value.get("start"), "end": value.get("end")}


def _fields(value: Any) -> dict[str, Any]:
    """Fields of a saved dataclass of settings."""
    return {
        name: _fields(part) if isinstance(part, Mapping) else part
        for name, part in _mapping(value).items()
        if name != "$config"
    }


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
