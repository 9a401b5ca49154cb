"""Settings that have no effect beside certain others, and what they need. Without torch, as configurations are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from driftproof._registry import EXPLORE_METHODS

OPTIMIZER_DEFAULTS: dict[str, Any] = {
    "adaptive_noise": False,
    "noise_reference": "direction",
    "noise_beta": 0.999,
    "min_noise_std": 1e-6,
    "instant_noise_scale": True,
    "dampening": 0,
}
"""Of the UPGD optimizers' noise, and of SGD."""
ADVERSARY_DEFAULTS: dict[str, Any] = {"epsilon_schedule": "constant", "epsilon_final": 0.05}
"""Of adversarial training."""
ATTACK_DEFAULTS: dict[str, Any] = {"attack_method": "pgd", "attack_steps": 3, "attack_lr": 0.03, "random_init": True}
"""Of the attacks in adversarial training."""
EXPLORE_DEFAULTS: dict[str, Any] = {"perturbation_factor": 1.2, "resample_probability": 0.25}
"""Of a hyper-parameter that is searched."""

_NOISE = ("noise_reference", "noise_beta", "min_noise_std", "instant_noise_scale")
_AVERAGE = "adaptive_noise=True, noise_reference='gradient' and instant_noise_scale=False"


def unused_by_optimizer(name: str, options: Mapping[str, Any]) -> dict[str, str]:
    """Options of an optimizer that have no effect, each with what it needs.

    Args:
        name: Of the optimizer.
        options: Those that are given; others are at their defaults.
    """
    if name == "sgd":
        return {} if options.get("momentum") else {"dampening": "momentum above 0"}
    if name not in ("adaptive_upgd", "upgd", "upgdw"):
        return {}
    values = OPTIMIZER_DEFAULTS | dict(options)
    if options.get("sigma") == 0:
        return dict.fromkeys(("adaptive_noise", *_NOISE), "sigma above 0")
    if not values["adaptive_noise"]:
        return dict.fromkeys(_NOISE, "adaptive_noise=True") | {"noise_beta": _AVERAGE}
    if values["noise_reference"] != "gradient":
        return {"noise_beta": _AVERAGE, "instant_noise_scale": "noise_reference='gradient'"}
    return {"noise_beta": _AVERAGE} if values["instant_noise_scale"] else {}


def unused_by_adversary(options: Mapping[str, Any]) -> dict[str, str]:
    """Settings of adversarial training that have no effect, each with what it needs."""
    is_constant = (ADVERSARY_DEFAULTS | dict(options))["epsilon_schedule"] == "constant"
    return {"epsilon_final": "epsilon_schedule 'linear' or 'cosine'"} if is_constant else {}


def unused_by_training_attack(options: Mapping[str, Any]) -> dict[str, str]:
    """Settings of the attacks in adversarial training that have no effect, each with what it needs."""
    unused = {
        "random_init": "attacks of one's own: those in training start at random, since their gradient is 0 at first"
    }
    if (ATTACK_DEFAULTS | dict(options))["attack_method"] == "fgsm":
        unused |= dict.fromkeys(("attack_steps", "attack_lr"), "attack_method 'pgd' or 'sgld'")
    return unused


def unused_by_search(explore_method: str, has_values: bool) -> dict[str, str]:
    """Settings of a searched hyper-parameter that have no effect, each with what it needs.

    Args:
        explore_method: Of the population.
        has_values: Whether the hyper-parameter has values to choose from, instead of a range.
    """
    unused: dict[str, str] = {}
    if explore_method not in EXPLORE_METHODS.built_in:
        return unused  # One of the user's own may use anything.
    if explore_method == "resample":
        unused["perturbation_factor"] = "explore_method 'both', 'perturb' or 'pb2'"
    if has_values:
        unused["perturbation_factor"] = "a range: of values, a neighbour is taken"
    if explore_method != "both":
        unused["resample_probability"] = "explore_method 'both'"
    return unused


def given_in_vain(
    given: Mapping[str, Any], defaults: Mapping[str, Any], unused: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Settings without effect that are given another value than their default: the name, and what is wrong with it.

    Args:
        given: The settings.
        defaults: Of all settings that may have no effect.
        unused: Those that have none, with what they need.
    """
    for name, needed in unused.items():
        if name in given and given[name] != defaults[name]:
            yield name, f"{given[name]!r} would have no effect, it is for {needed}; remove it"


def refuse_unused(
    given: Mapping[str, Any], defaults: Mapping[str, Any], unused: Mapping[str, str], place: str = ""
) -> None:
    """Raise a ``ValueError`` if :func:`given_in_vain` finds something.

    Args:
        given: The settings.
        defaults: Of all settings that may have no effect.
        unused: Those that have none, with what they need.
        place: What comes before their names in messages.
    """
    for name, problem in given_in_vain(given, defaults, unused):
        raise ValueError(f"{place}{name}={problem}")


def without_unused(given: Mapping[str, Any], unused: Iterable[str]) -> dict[str, Any]:
    """What is left of settings without those that have no effect, which files of earlier versions may hold."""
    return {name: value for name, value in given.items() if name not in set(unused)}
