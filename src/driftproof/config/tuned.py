"""The configuration that a search has found, ready to train a single agent with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from driftproof.config import keys
from driftproof.config.model import Config

_BETAS = ("beta1", "beta2")
_DEFAULT_BETAS = (0.9, 0.999)
_ADVERSARY = {
    "adversary.epsilon": ("adversarial", "perturbation", "epsilon"),
    "adversary.robust_kl_coef": ("adversarial", "robust_kl_coef"),
}


def tuned(config: Config, values: Mapping[str, Any]) -> Config:
    """The configuration with these hyper-parameters, and without the search.

    A schedule keeps its course, and begins at the new value.

    Args:
        config: Configuration of the search.
        values: Hyper-parameters by their names in a search, such as ``learning_rate`` or ``optimizer.sigma``.
    """
    data = config.model_dump(exclude={"pbt"})
    for name, value in values.items():
        *sections, key = map(str, place_of(name))
        target: dict[str, Any] = data
        for part in sections:
            target = target.setdefault(part, {})
        if key in _BETAS and key not in target and config.optimizer.name != "adaptive_upgd":
            betas = list(target.get("betas") or _DEFAULT_BETAS)
            betas[_BETAS.index(key)] = value
            target["betas"] = betas
        else:
            target[key] = _scheduled(target.get(key), value)
    found: Config = Config.model_validate(data)
    return found.with_trust(config.trust)


def place_of(name: str) -> keys.Path:
    """The path of a hyper-parameter in configurations."""
    section, _, rest = name.partition(".")
    if section == "optimizer":
        return ("optimizer", "kwargs", rest)
    return _ADVERSARY.get(name) or keys.place_of(tuple(name.split(".")))


def configured(config: Config, name: str) -> Any:
    """The value of a hyper-parameter before the search; ``None`` if the optimizer's default is in force."""
    value: Any = config.model_dump()
    for part in place_of(name):
        value = value.get(part) if isinstance(value, Mapping) else None
    return max(value["start"], value["end"]) if isinstance(value, Mapping) else value


def _scheduled(old: Any, value: Any) -> Any:
    """The new value, or the old schedule with this largest value."""
    if not isinstance(old, Mapping):
        return value
    factor = value / max(old["start"], old["end"])
    return {**old, "start": old["start"] * factor, "end": old["end"] * factor}
