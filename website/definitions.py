"""Tells griffe, which does not run the library, about settings and about constructors that are made from them.

A setting is ``name: type = setting(default, "Effect.", …)``, a field of a dataclass (`driftproof.settings.definition`).
``@takes(Settings)`` gives a constructor the signature of such a dataclass, ``@documented(Settings)`` its arguments.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from griffe import Class, DataclassesExtension, Docstring, ExprCall, Extension, Module, Object

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`~?([\w.]+)`")


class Definitions(Extension):
    """Extension of griffe, see ``mkdocs.yml``."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Turn reStructuredText's roles into links, where the target is on the site."""
        if obj.docstring is not None:
            obj.docstring.value = ROLE.sub(_linked, obj.docstring.value)

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        """Give classes the signatures and arguments of their settings."""
        DataclassesExtension().on_package(pkg=pkg)
        classes: list[Any] = _classes(pkg)
        settings = {cls.path for cls in classes if _describe_settings(cls)}
        for cls in classes:
            definition = cls if cls.path in settings else _definition(cls, "documented")
            if definition is None or cls.docstring is None:
                continue
            parameters = definition.members["__init__"].parameters
            if _definition(cls.members.get("__init__"), "takes") is not None:
                cls.members["__init__"].parameters = parameters
            lines = [f"    {each.name}: {each.docstring.value}" for each in parameters if each.docstring]
            cls.docstring.value = "\n".join([cls.docstring.value.rstrip(), "", "Args:", *lines])


def _describe_settings(cls: Any) -> bool:
    """Whether a class defines settings; if so, its parameters get their real defaults and their documentation."""
    if not cls.module.path.startswith("driftproof.settings."):  # importing these needs no torch
        return False
    defined = getattr(import_module(cls.module.path), cls.name)
    fields = dataclasses.fields(defined) if dataclasses.is_dataclass(defined) else ()
    settings = [each for each in fields if "setting" in each.metadata]
    for each in settings:
        parameter = cls.members["__init__"].parameters[each.name]
        parameter.docstring = Docstring(each.metadata["setting"].doc)
        if each.default_factory is not dataclasses.MISSING:
            parameter.default = repr(each.default_factory())
        else:
            parameter.default = None if each.default is dataclasses.MISSING else repr(each.default)
        if each.name in cls.members:
            cls.del_member(each.name)  # it is listed with the arguments
    return bool(settings)


def _linked(match: re.Match[str]) -> str:
    path = match[1]
    name = path.rpartition(".")[2]
    if not path.startswith("driftproof."):
        return f"`{path}`"
    return f'<autoref identifier="{path}" optional><code>{path if name.islower() else name}</code></autoref>'


def _classes(parent: Module | Class) -> list[Class]:
    found: list[Class] = []
    for member in parent.members.values():
        if not member.is_alias and isinstance(member, Module | Class):
            found += [member] if isinstance(member, Class) else []
            found += _classes(member)
    return found


def _definition(decorated: Any, name: str) -> Any:
    """The class in a decorator such as ``@documented(AgentSettings)``."""
    for decorator in getattr(decorated, "decorators", ()):
        value = decorator.value
        if isinstance(value, ExprCall) and str(value.function) == name:
            found = decorated.modules_collection[value.arguments[0].canonical_path]
            return found.final_target if found.is_alias else found
    return None
