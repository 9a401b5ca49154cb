"""Names of code in files: imported only if the user trusts the module, and checked before anything is called."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import Any, TypeVar

from driftproof._text import printable

VARIABLE = "DRIFTPROOF_TRUST"
"""Environment variable with names of trusted modules, separated by commas."""

_BUILT_IN = frozenset(
    {"driftproof", "driftproof.envs", "driftproof.optim", "torch.optim", "stable_baselines3.common.torch_layers"}
)
"""Modules of known content. Not their packages: importing ``driftproof.__main__`` would run a command."""
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_SHOWN = 100
"""Largest number of characters of a file's name for code in a message."""

Kind = TypeVar("Kind")


class UntrustedError(ValueError):
    """A file names code that its user has not trusted; nothing was imported."""


class WrongKindError(ValueError):
    """A name refers to an object of the wrong kind; nothing was called."""


@dataclass(frozen=True)
class Trust:
    """Which modules a file may make this process import.

    All instances compare equal: the origin of settings is not part of their value.

    Attributes:
        modules: Modules that the user of this process trusts, with everything inside them.
        is_own: Every module may be imported: the names are the user's own, from a program or a run of theirs.
        here: Folder to search for modules that the user named and that are not installed.
        home: The same for modules of the user's own runs: the folder where the run was started.
        typed: Settings that the user gave, rather than the file.
        lines: File and line of settings, for messages.
    """

    modules: frozenset[str] = field(default=frozenset(), compare=False)
    is_own: bool = field(default=False, compare=False)
    here: str | None = field(default=None, compare=False)
    home: str | None = field(default=None, compare=False)
    typed: frozenset[str] = field(default=frozenset(), compare=False)
    lines: Mapping[str, str] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, modules: Iterable[str] | Trust, here: str | None = None) -> Trust:
        """Trust in these modules, and in those that the environment variable names.

        Raises:
            ValueError: Something is not the name of a module.
        """
        if isinstance(modules, Trust):
            return modules
        if isinstance(modules, str):
            raise TypeError(f"trusted must be names of modules in a list: [{modules!r}]")
        named = {*modules, *filter(None, (name.strip() for name in os.environ.get(VARIABLE, "").split(",")))}
        for name in named:
            if not isinstance(name, str) or not _MODULE.fullmatch(name) or name.endswith(".py"):
                example = str(name).removesuffix(".py").partition(":")[0].replace("/", ".").strip(".") or "my_env"
                raise ValueError(f"{name!r} is not the name of a module; trust one as import names it: {example}")
        return cls(frozenset(named), here=here)

    def has_typed(self, place: str) -> bool:
        """Whether the user gave a setting, alone or with all around it."""
        return any(place == typed or place.startswith(f"{typed}.") for typed in self.typed)

    def names(self, module: str, place: str = "") -> bool:
        """Whether the user named the module, or typed the setting that does."""
        return self.has_typed(place) or any(
            module == trusted or module.startswith(f"{trusted}.") for trusted in self.modules
        )

    def allows(self, module: str, place: str = "") -> bool:
        """Whether the module may be imported because a setting names it."""
        return self.is_own or module in _BUILT_IN or self.names(module, place)

    def check(self, name: str, module: str, place: str = "") -> None:
        """Refuse a name before its module is imported.

        Raises:
            UntrustedError: It is not trusted; the message says how to allow it.
        """
        if self.allows(module, place):
            return
        shown, root = _shortened(module), _shortened(module.partition(".")[0])
        where = f", which {self.lines[place]} names" if place in self.lines else ", which the file names"
        raise UntrustedError(
            f"{_shortened(name)!r} would import and run the module {shown!r}{where}. If it is code that you trust: "
            f"--trust {root}, or trusted=[{root!r}] in Python"
        )

    def imported(self, name: str, module: str, place: str = "") -> ModuleType:
        """Import a module, if it is trusted.

        Raises:
            UntrustedError: It is not trusted.
            Exception: Whatever its import raises.
        """
        self.check(name, module, place)
        if not _MODULE.fullmatch(module):
            raise ImportError(f"{_shortened(module)!r} is not the name of a module")
        self.make_findable(module, place)
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            root = module.partition(".")[0]
            if self.names(module, place) or error.name != root:
                raise
            hint = f"if it lies in the working directory: --trust {root}"
            raise ModuleNotFoundError(f"{error}; {hint}", name=root) from error

    def make_findable(self, module: str, place: str = "") -> None:
        """Make a module importable from the folder in which :meth:`imported` would look for it. Imports nothing.

        Raises:
            UntrustedError: It is not trusted.
        """
        self.check(module, module, place)
        _make_findable(module, self.here if self.names(module, place) else self.home)

    def resolved(self, name: str, kind: type[Kind], place: str = "") -> type[Kind]:
        """The class that ``module:Class`` names.

        Raises:
            UntrustedError: Its module may not be imported.
            WrongKindError: It is not a subclass of ``kind``.
            ImportError: There is no such module, or nothing of that name in it.
        """
        module, _, attribute = name.partition(":")
        found = getattr(self.imported(name, module, place), attribute, None)
        if found is None:
            raise ImportError(f"module {module!r} has no attribute {_shortened(attribute)!r}")
        return of_kind(name, found, kind)


OWN = Trust(is_own=True)
"""For settings that come from the program itself."""


def of_kind(name: str, found: Any, kind: type[Kind]) -> type[Kind]:
    """The object that was found, if it is a subclass of ``kind``.

    Raises:
        WrongKindError: It is not.
    """
    if isinstance(found, type) and issubclass(found, kind):
        return found
    raise WrongKindError(f"{_shortened(name)!r} is not a subclass of {kind.__module__}.{kind.__qualname__}")


def _make_findable(module: str, folder: str | None) -> None:
    """Make a module in a folder importable, unless there is one of that name elsewhere."""
    root = module.partition(".")[0]
    if folder is None or folder in sys.path or root in sys.modules or find_spec(root) is not None:
        return
    if PathFinder.find_spec(root, [folder]) is not None:
        sys.path.append(folder)


def _shortened(text: str) -> str:
    return printable(text, _SHOWN)
