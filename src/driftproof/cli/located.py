"""Find the files and modules of a run that was moved or is used from another folder."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from driftproof.cli.errors import CommandError
from driftproof.runs.sources import File, Sources, file_of, read_sources

if TYPE_CHECKING:
    from driftproof.config import Config


def located(config: Config, folder: Path, overrides: Collection[str] = ()) -> Config:
    """Configuration of a run with the current paths of its files.

    A file that is missing at its configured path is looked up at its path when the run was started, and next to
    the run folder; its checksum must match.

    Args:
        config: The configuration.
        folder: Run folder.
        overrides: Overrides of the configuration; files that they name are not looked up.

    Raises:
        CommandError: A file or a module is missing.
    """
    sources = read_sources(folder)
    if sources is None:
        return config
    _check_modules(config, sources)
    env = config.env.model_dump()
    for file in sources.files:
        given = _value(env, file.setting)
        if not isinstance(given, str) or any(override.startswith(f"{file.setting}=") for override in overrides):
            continue
        if Path(given).is_file():
            if not _is_same(file, Path(given)):
                warnings.warn(f"{given} has changed since the run was started", UserWarning, stacklevel=2)
            continue
        found = next((path for path in _candidates(file, given, folder) if _is_same(file, path)), None)
        if found is None:
            raise CommandError(
                f"{given}, a file of this run, is missing: it was {file.path} ({file.bytes:,} bytes, sha256 "
                f"{file.sha256[:12]}) when the run was started. Put it there or next to {folder}, or give its path: "
                f"--set {file.setting}=PATH"
            )
        _set(env, file.setting, str(found))
    moved = type(config.env).model_validate(env)
    return config if moved == config.env else config.model_copy(update={"env": moved})


def is_same_data(before: Config, config: Config, folder: Path) -> bool:
    """Whether the environments of two configurations differ only in the paths of identical files."""
    sources = read_sources(folder)
    if sources is None:
        return False
    old, new = before.env.model_dump(), config.env.model_dump()
    for file in sources.files:
        given = _value(new, file.setting)
        if not isinstance(given, str) or not Path(given).is_file() or not _is_same(file, Path(given)):
            return False
        _set(new, file.setting, _value(old, file.setting))
    return bool(old == new)


def _candidates(file: File, given: str, folder: Path) -> Iterator[Path]:
    name = os.path.basename(given)
    for path in (Path(file.path), folder / name, folder.parent / name, folder.resolve().parent.parent / name):
        if path.is_file():
            yield path


def _is_same(file: File, path: Path) -> bool:
    return path.stat().st_size == file.bytes and file_of(file.setting, path).sha256 == file.sha256


def _check_modules(config: Config, sources: Sources) -> None:
    from driftproof.config.names import named_modules

    needed = set(named_modules(config))
    for module in sources.modules:
        root = module.name.partition(".")[0]
        places = [Path(place) for place in (os.getcwd(), config.trust.home) if place]
        is_here = any((place / f"{root}.py").is_file() or (place / root).is_dir() for place in places)
        if module.name in needed and not is_here and importlib.util.find_spec(root) is None:
            raise CommandError(
                f"the run needs the module {module.name}, which was {module.path}: copy it into this folder or one on "
                f"PYTHONPATH, and add --trust {root}"
            )


def _value(env: dict[str, Any], setting: str) -> Any:
    value: Any = env
    for part in setting.split(".")[1:]:
        value = value[int(part)] if isinstance(value, list) else value.get(part) if isinstance(value, dict) else None
    return value


def _set(env: dict[str, Any], setting: str, value: Any) -> None:
    *parts, last = setting.split(".")[1:]
    target: Any = env
    for part in parts:
        target = target[int(part)] if isinstance(target, list) else target[part]
    target[int(last) if isinstance(target, list) else last] = value
