"""Converts configurations of the earlier system (``config_pbt_adversarial.yaml``) to today's form."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from driftproof._text import printable
from driftproof.config import earlier, keys
from driftproof.config.files import ConfigError, as_yaml, loads, plain_yaml, settings_in
from driftproof.config.model import Config

_CONTAINERS: tuple[tuple[keys.Path, str], ...] = (
    (("model", "params"), "ppo"),
    (("model",), "model"),
    (("training",), "run"),
)
"""Sections that no longer exist, and the sections here that settings without an equivalent would be in."""


_POPULATION = {
    "explore_strong": "pbt.explore_strong: members that do not exploit keep their hyper-parameters by default; the "
    "earlier system mutated them, as with true",
    "optimizer_exploit_strategy": "pbt.optimizer_exploit_strategy: the donor's optimizer state is copied by default; "
    "the earlier system reset it",
}
"""Defaults that differ from the earlier system's."""
_LONGEST = 100


class Migrated(NamedTuple):
    """A configuration of the earlier system in today's form."""

    text: str
    """YAML, with :attr:`notes` as comments."""
    notes: list[str]
    """Settings that could not be converted or have another meaning here, one line each."""
    config: Config


def migrate(text: str, name: str = "") -> Migrated:
    """Convert a configuration of the earlier system to today's form.

    Args:
        text: YAML.
        name: Name of the file in errors.

    Raises:
        ConfigError: It is not YAML, or the converted settings are invalid.
    """
    migration = _Migration()
    for path, value in _leaves(settings_in(text, name)):
        migration.take(path, value)
    migration.finish()
    ordered = {section: migration.data[section] for section in Config.model_fields if section in migration.data}
    heading = [f"# {printable(line)}" for line in migration.notes]
    result = "\n".join([*heading, as_yaml(ordered) if ordered else ""])
    try:
        return Migrated(result, migration.notes, loads(result, name=f"{name} in today's form" if name else ""))
    except ConfigError as error:
        raise ConfigError([*error.problems, "correct that in the earlier file, then convert it again"]) from error


def _leaves(raw: Mapping[Any, Any], path: keys.Path = ()) -> Iterator[tuple[keys.Path, Any]]:
    """Settings of a file, one by one; sections of the earlier trading environment as a whole."""
    for key, value in raw.items():
        inner = (*path, str(key))
        is_whole = str(key).endswith("_kwargs") or keys.dotted(inner) in earlier.GONE
        if isinstance(value, Mapping) and not is_whole:
            yield from _leaves(value, inner)
        else:
            yield inner, value


def _short(text: str) -> str:
    """A key or value as part of a one-line comment."""
    text = text if text.isprintable() else json.dumps(text)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


class _Migration:
    """Collects the converted settings of an earlier file, and notes."""

    def __init__(self) -> None:
        self.data: dict[str, Any] = {}
        self.notes: list[str] = []
        self._given: dict[str, Any] = {}
        """All settings by name, for those that depend on several."""
        self._rules: dict[str, Callable[[keys.Path, Any], None]] = {
            "optimizer_kwargs": self._optimizer,
            "hyperparams": self._search,
        }

    def take(self, path: keys.Path, value: Any) -> None:
        """Convert one setting."""
        container, section = next(
            ((found, place) for found, place in _CONTAINERS if path[: len(found)] == found), ((), "")
        )
        inner = path[len(container) :]
        if not inner:
            if value is not None:
                self._note(path, value, "it must hold settings by name")
            return
        place = (*((section,) if section and len(inner) == 1 else ()), *inner)
        self._given[str(path[-1])] = value
        if (rule := self._rules.get(str(path[-1]))) is not None:
            rule(path, value)
        elif (gone := earlier.gone(place)) is not None:
            if not earlier.was_harmless(gone, value):
                self._note(path, value, gone.reason)
        elif len(inner) == 1 and str(inner[0]) in earlier.RENAMED:
            self._put(tuple(earlier.RENAMED[str(inner[0])].split(".")), value, path)
        elif (known := keys.place_of(inner, value)) in keys.settings():
            self._put(known, value, path)
        else:
            self._note(path, value, "no equivalent is known")

    def finish(self) -> None:
        """Convert what depends on several settings."""
        self._stop()
        self._epsilon()
        if {"num_atoms", "v_min", "v_max"} & self._given.keys():
            self._put(("critic", "value_head"), "categorical", ("num_atoms",))
        self._checkpoints()
        self._least_entropy()
        if "pbt" in self.data:
            self.notes += [text for name, text in _POPULATION.items() if name not in self.data["pbt"]]
        if "id" not in self.data.get("env", {}):
            self.notes.append("env.id: name the environment, with its arguments in env.kwargs")

    def _put(self, place: keys.Path, value: Any, origin: keys.Path) -> None:
        target = self.data
        for part in place[:-1]:
            target = target.setdefault(str(part), {})
        name = str(place[-1])
        if name in target and target[name] != value:
            self._note(origin, value, f"{keys.dotted(place)} is {plain_yaml(target[name])} already")
            return
        target[name] = value

    def _note(self, path: keys.Path, value: Any, reason: str) -> None:
        self.notes.append(f"{_short(keys.dotted(path))}: {_short(plain_yaml(value))} is left out: {reason}")

    def _forget_notes(self, *names: str) -> None:
        """Remove the notes of settings that were converted after all."""
        self.notes = [note for note in self.notes if not any(f"{name}: " in note for name in names)]

    def _at(self, section: str, name: str) -> Any:
        return self.data.get(section, {}).get(name, getattr(getattr(Config(), section), name))

    def _optimizer(self, path: keys.Path, value: Any) -> None:
        if not isinstance(value, Mapping):
            self._put(("optimizer", "kwargs"), value, path)
            return
        options = dict(value)
        if "lr" in options:
            # In the earlier system the optimizer's lr took precedence.
            lr, other = options.pop("lr"), self.data.get("ppo", {}).pop("learning_rate", None)
            self._put(("ppo", "learning_rate"), lr, (*path, "lr"))
            if other not in (None, lr):
                self._note(("learning_rate",), other, "the optimizer's lr took precedence")
        if options.get("adaptive_noise"):
            formula = {"noise_reference": "gradient", "instant_noise_scale": False}
            if options.get("noise_beta", 0.999) != 0.999:
                options = formula | options
            elif not options.keys() & formula.keys():
                self.notes.append(
                    f"{keys.dotted(path)}.adaptive_noise: noise follows the direction of the step; the earlier formula "
                    "is noise_reference: gradient with instant_noise_scale: false"
                )
        self._put(("optimizer", "kwargs"), options, path)

    def _search(self, path: keys.Path, value: Any) -> None:
        items = []
        for index, item in enumerate(value if isinstance(value, list) else []):
            name = item.get("name") if isinstance(item, Mapping) else None
            if name == "adversarial_ratio":
                self._note(
                    (*path, index), name, "it cannot change while the agent trains: adversarial.adversarial_ratio"
                )
            else:
                items.append({**item, "name": earlier.SEARCHED.get(name, name)} if name else item)
        self._put(("pbt", "hyperparams"), items if isinstance(value, list) else value, path)

    def _stop(self) -> None:
        stops, share = self._given.get("kl_early_stop"), self._given.get("kl_exceed_stop_fraction")
        if stops is False:
            self._put(("ppo", "kl_stop"), None, ("kl_early_stop",))
        elif share is not None and self._at("ppo", "target_kl") is not None:
            self._put(("ppo", "kl_stop"), "fraction", ("kl_exceed_stop_fraction",))
            self._put(("ppo", "kl_stop_fraction"), share, ("kl_exceed_stop_fraction",))
        else:
            return
        self._forget_notes("kl_early_stop", "kl_exceed_stop_fraction")

    def _checkpoints(self) -> None:
        counts = self._given.get("save_freq"), self._at("ppo", "n_steps") or Config().n_steps, self._at("env", "n_envs")
        if all(type(count) is int and count > 0 for count in counts):
            steps, rollout = counts[0], counts[1] * counts[2]
            updates = max(1, round(steps / rollout))
            self._put(("run", "checkpoint_every"), updates, ("training", "save_freq"))
            self._forget_notes("save_freq")
            self.notes.append(
                f"run.checkpoint_every: save_freq: {steps} steps are {updates} updates of {rollout} steps"
            )

    def _least_entropy(self) -> None:
        """Raise a search's lower end to ``ent_coef_min``: lower values are refused here, and were clipped before."""
        least = self._at("ppo", "ent_coef_min")
        for item in self.data.get("pbt", {}).get("hyperparams") or []:
            low = item.get("min_value") if isinstance(item, dict) and item.get("name") == "ent_coef" else None
            if isinstance(low, int | float) and isinstance(least, int | float) and low < least:
                item["min_value"] = least
                self.notes.append(f"pbt.hyperparams: ent_coef is searched from ent_coef_min {least}, not from {low}")

    def _epsilon(self) -> None:
        section = self.data.get("adversarial")
        if not section:
            return
        # In the earlier system it was enabled by default, and epsilon constant by default.
        section.setdefault("enabled", True)
        self._forget_notes("adaptive_epsilon")
        if not section["enabled"]:
            self.data["adversarial"] = {"enabled": False}
        elif not self._given.get("adaptive_epsilon", False):
            if section.pop("epsilon_schedule", "constant") != "constant":
                self.notes.append("adversarial.epsilon_schedule is left out: without adaptive_epsilon it was constant")
            section.pop("epsilon_final", None)
