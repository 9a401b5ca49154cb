"""Checks that optional packages are installed, with one wording of what to install."""

from __future__ import annotations

from importlib.util import find_spec

DISTRIBUTIONS = {"sklearn": "scikit-learn", "stable_baselines3": "stable-baselines3", "yaml": "pyyaml"}
"""Names to install modules by, where they differ."""


class MissingPackageError(ImportError):
    """A package that a part of the library needs is not installed. The message says how to install it."""


def is_installed(module: str) -> bool:
    """Whether a top-level module can be found, without importing it."""
    return find_spec(module) is not None


def require(purpose: str, extra: str, *modules: str) -> None:
    """Raise an error unless all modules are installed. None of them is imported.

    Args:
        purpose: What needs them, the subject of the message.
        extra: Extra of this package that installs them.
        modules: Names of top-level modules.

    Raises:
        MissingPackageError: One of them is not installed.
    """
    missing = [module for module in modules if not is_installed(module)]
    if missing:
        names = [DISTRIBUTIONS.get(module, module) for module in missing]
        listed = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
        raise MissingPackageError(
            f'{purpose} needs {listed}. In a clone of driftproof: pip install ".[{extra}]"; '
            f"elsewhere: pip install {' '.join(names)}",
            name=missing[0],
        )
