"""Reads and writes configurations as YAML; errors name the file and line."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from driftproof import _yaml
from driftproof._files import shortened
from driftproof._trust import Trust
from driftproof.config import keys
from driftproof.config.model import Config, SettingError
from driftproof.config.overrides import ignore_other_backends, put_override
from driftproof.config.ownership import owned
from driftproof.settings.drift import BEFORE

_MOST_PROBLEMS = 20
"""Largest number of errors shown for one configuration."""
_LONGEST_NAME = 100
_NAMING: tuple[keys.Path, ...] = (
    *(("env", "id"), ("env", "drift"), ("policy", "features_extractor_class"), ("policy", "core")),
    *(("critic", "value_head"), ("optimizer", "name"), ("adversarial", "perturbation", "attack_method")),
    *(("pbt", "explore_method"), ("pbt", "address")),
)
"""Settings that can name code to import, or a cluster that runs code."""

_IN_DUMPS: set[keys.Path] = {
    *(("run", "stats_window_size"), ("env", "vectorization"), ("policy", "normalize_images"), ("optimizer", "kwargs")),
    *(("critic", "return_scale_decay"), ("ppo", "kl_stop_fraction"), ("ppo", "skip_limit"), ("ppo", "cuda_graph")),
    *(("ppo", "mixed_precision"), ("adversarial", "epsilon_schedule"), ("pbt", "max_restarts")),
}
"""Settings that files of :func:`dumps` always had, and that nobody writes all of by hand."""


class ConfigError(ValueError):
    """A configuration is invalid.

    Attributes:
        problems: One line per problem: where, and what is wrong.
    """

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))


def load(
    path: str | os.PathLike[str] | None = None, overrides: Iterable[str] = (), trusted: Iterable[str] | Trust = ()
) -> Config:
    """Load the configuration in a file, with overrides; all other settings have their defaults.

    Modules that the file names are imported when something is built from the configuration, if they are trusted. The
    configuration of a run that this user started is trusted as a whole, and so are overrides.

    Args:
        path: A YAML file; ``None``: defaults.
        overrides: Overrides of the file, such as ``"ppo.learning_rate=1e-4"``.
        trusted: Modules that the file may name, with everything inside them.

    Raises:
        ConfigError: The configuration is invalid.
        OSError: The file cannot be read.
    """
    trust = Trust.of(trusted)
    if path is None:
        return loads("", overrides, trusted=trust)
    content = _content(path)
    if (mine := owned(Path(path).parent, content)) is not None:
        trust = replace(trust, is_own=True, home=mine.home)
    return loads(_decoded(path, content), overrides, name=os.fspath(path), trusted=trust)


def read_text(path: str | os.PathLike[str]) -> str:
    """Read the text of a configuration file.

    Raises:
        ConfigError: It is not text, or too long.
        OSError: The file cannot be read.
    """
    return _decoded(path, _content(path))


def _content(path: str | os.PathLike[str]) -> bytes:
    with open(path, "rb") as file:
        content = file.read(_yaml.MAX_BYTES + 1)
    if len(content) > _yaml.MAX_BYTES:
        raise ConfigError([f"{path}: has more than {_yaml.MAX_BYTES:,} bytes, too many for a configuration"])
    return content


def _decoded(path: str | os.PathLike[str], content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path}: is not text in UTF-8 ({error}); save it as UTF-8"]) from error


def loads(text: str, overrides: Iterable[str] = (), name: str = "", trusted: Iterable[str] | Trust = ()) -> Config:
    """:func:`load` from a text; ``name`` is used in errors."""
    trust = Trust.of(trusted)
    raw, lines = _parse(text, name)
    source = _Source(name, lines)
    try:
        placed = keys.placed(raw)
    except keys.ConflictError as error:
        raise ConfigError([source.of(error.second, str(error))]) from error
    is_from_before = placed.origins.keys() >= _IN_DUMPS and "drift" not in placed.data
    in_file = {keys.dotted(path): source.where(placed.origins[path]) for path in _NAMING if path in placed.origins}
    typed: set[keys.Path] = set()
    for override in overrides:
        try:
            typed |= put_override(placed, override, _yaml.value)
        except yaml.YAMLError as error:
            raise ConfigError([f"--set {override}: is not YAML: {_what(error)}"]) from error
        except ValueError as error:
            raise ConfigError([f"--set {override}: {error}"]) from error
    for path, value in ignore_other_backends(placed, typed).items():
        if value != keys.at(Config(), path):
            where, backend = (
                source.of(placed.origins[path], f"{keys.dotted(path)}: {value!r}"),
                placed.data["pbt"]["backend"],
            )
            warnings.warn(f"{where} is ignored: it has no effect with pbt.backend={backend}", stacklevel=2)
    drift = placed.data.get("drift", {})
    if is_from_before and isinstance(drift, dict) and not drift.get("drift_kit"):
        placed.data["drift"] = BEFORE | drift
    source.origins = placed.origins
    try:
        config = Config.model_validate(placed.data)
    except ValidationError as error:
        raise ConfigError(source.problems(error, placed.data)) from error
    return config.with_trust(replace(trust, typed=frozenset(map(keys.dotted, typed)), lines=in_file))


def dumps(config: Config) -> str:
    """The whole configuration as YAML, without comments."""
    return as_yaml(config.model_dump())


def settings_in(text: str, name: str = "") -> dict[Any, Any]:
    """The settings in a YAML text, not validated; ``name`` is used in errors."""
    return _parse(text, name)[0]


def as_yaml(value: Any) -> str:
    """Plain values as YAML, over several lines."""
    return _yaml.dump(value, width=120)


def plain_yaml(value: Any) -> str:
    """A value as one line of YAML."""
    text = _yaml.dump(value, width=10**6, default_flow_style=True)
    return text.removesuffix("\n...\n").rstrip("\n")


def _parse(text: str, name: str) -> tuple[dict[Any, Any], dict[keys.Path, int]]:
    """The content of a YAML text, and the line of every key."""
    place = name or "configuration"
    try:
        node, raw = _yaml.parse(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = place if mark is None else f"{place}:{mark.line + 1}"
        kind = "" if isinstance(error, _yaml.TooMuchError) else "is not YAML: "
        raise ConfigError([f"{where}: {kind}{_what(error)}"]) from error
    lines: dict[keys.Path, int] = {}
    _find_lines(node, (), lines, place)
    if raw is None:
        raw = {}
    if not isinstance(raw, dict):
        raise ConfigError([f"{place}: must hold settings by name, such as 'env: CartPole-v1', not {shortened(raw)}"])
    return raw, lines


def _what(error: yaml.YAMLError) -> str:
    return getattr(error, "problem", None) or str(error).splitlines()[0]


def _find_lines(node: yaml.Node | None, path: keys.Path, lines: dict[keys.Path, int], place: str) -> None:
    inner: keys.Path
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = (*path, str(key.value))
            if inner in lines:
                twice = f"{keys.dotted(inner)} is already set in line {lines[inner]}: remove one"
                raise ConfigError([f"{place}:{key.start_mark.line + 1}: {twice}"])
            lines[inner] = key.start_mark.line + 1
            _find_lines(value, inner, lines, place)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            inner = (*path, index)
            lines[inner] = value.start_mark.line + 1
            _find_lines(value, inner, lines, place)


class _Source:
    """Origins of settings, for errors.

    Args:
        name: Name of the file.
        lines: Line numbers of its keys.
    """

    def __init__(self, name: str, lines: Mapping[keys.Path, int]) -> None:
        self._name, self._lines = name, lines
        self.origins: dict[keys.Path, keys.Path] = {}

    def of(self, origin: keys.Path, message: str) -> str:
        """The message, prefixed by the file and line, or by the command-line option."""
        if origin and str(origin[0]).startswith("--set "):
            return f"{origin[0]}: {message}"
        place = self.where(origin)
        return f"{place}: {message}" if place else message

    def where(self, origin: keys.Path) -> str:
        """File and line of a key, as far as they are known."""
        line = next((self._lines[origin[:n]] for n in range(len(origin), 0, -1) if origin[:n] in self._lines), None)
        return self._name if line is None else f"{self._name or 'configuration'}:{line}"

    def problems(self, error: ValidationError, data: Mapping[str, Any]) -> list[str]:
        items = error.errors(include_url=False)
        more = len(items) - _MOST_PROBLEMS
        shown = [self._problem(item, data) for item in items[:_MOST_PROBLEMS]]
        return [*shown, f"{self._name or 'configuration'}: {more:,} more settings are invalid"] if more > 0 else shown

    def _problem(self, item: Any, data: Mapping[str, Any]) -> str:
        error = item.get("ctx", {}).get("error")
        if isinstance(error, SettingError):
            return self._at(error.path, str(error))
        path = _cleaned(item["loc"], data)
        return self._at(path, f"{keys.dotted(path)}: {_words(item, path)}")

    def _at(self, path: keys.Path, message: str) -> str:
        known = next((path[:n] for n in range(len(path), 0, -1) if path[:n] in self.origins), ())
        inside = next((origin for place, origin in self.origins.items() if place[: len(path)] == path), None)
        if not known and inside is not None and path not in self._lines:
            return self.of(inside, message)
        origin = (*self.origins[known], *path[len(known) :]) if known else path
        return self.of(origin, message)


def _cleaned(loc: Iterable[str | int], data: Any) -> keys.Path:
    """The path in the data, without pydantic's names of union members."""
    path: list[str | int] = []
    for part in loc:
        inside = isinstance(data, list) and isinstance(part, int) and part < len(data)
        if inside or (isinstance(data, Mapping) and part in data):
            data = data[part]
            path.append(part)
    last = list(loc)[-1:]
    if isinstance(data, Mapping) and last and last[0] not in path and last != ["[key]"]:
        path += last  # A missing key is not in the data.
    return tuple(path)


def _words(item: Any, path: keys.Path) -> str:
    if item["type"] == "extra_forbidden":
        # Comparing a long name takes long, and it is not a typing error.
        return f"unknown; {keys.nearest(path)}" if len(str(path[-1])) <= _LONGEST_NAME else "unknown"
    if item["type"] == "missing":
        return "is missing"
    if item["type"] == "model_type":
        return f"must hold settings by name, not {shortened(item['input'])}"
    if item["type"] == "value_error":
        return str(item["ctx"]["error"])
    return f"{item['msg'].replace('Input should', 'should', 1)}, not {shortened(item['input'])}"
