"""The user's own modules, which Ray brings to the other nodes of a cluster."""

from __future__ import annotations

import site
import sysconfig
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from driftproof.config.model import Config
from driftproof.config.names import findable_modules


def runtime_env(config: Config) -> dict[str, Any]:
    """Ray's runtime environment for a population: with the user's own modules, and nothing of the current folder."""
    return {"working_dir": None, "py_modules": own_modules(config)}


def own_modules(config: Config) -> list[str]:
    """Files and folders of modules that the configuration names or the user trusts, and that are not installed.

    Nothing is imported. All nodes of a cluster are expected to have the same packages installed.
    """
    roots = {module.partition(".")[0] for module in findable_modules(config)}
    paths = {path for root in roots if (path := _path_of(root)) is not None}
    return sorted(str(path) for path in paths if path.exists() and not _is_installed(path))


def _path_of(root: str) -> Path | None:
    """File of a module, or folder of a package, from which it can be copied."""
    try:
        spec: ModuleSpec | None = find_spec(root)
    except ValueError:  # It has no specification, as __main__.
        return None
    if spec is None:
        return None
    if spec.submodule_search_locations is not None:
        folders = list(spec.submodule_search_locations)
        return Path(folders[0]).absolute() if len(folders) == 1 else None
    return Path(spec.origin).absolute() if spec.origin and spec.origin.endswith(".py") else None


def _is_installed(path: Path) -> bool:
    """Whether it belongs to Python, to an installed package, or to this library."""
    found = sysconfig.get_paths()
    libraries = [found[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders = [*libraries, *site.getsitepackages(), site.getusersitepackages()]
    return path == Path(__file__).parents[1] or any(Path(folder) in path.parents for folder in folders)
