"""Checks that refuse settings that have no effect in combination with the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def given_in_vain(
    given: Mapping[str, Any], defaults: Mapping[str, Any], unused: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Yield settings without effect that differ from their defaults: the name, and a message.

    Args:
        given: The settings.
        defaults: Defaults of all settings that may have no effect.
        unused: Settings without effect, each with the setting that it needs.
    """
    for name, needed in unused.items():
        if name in given and given[name] != defaults[name]:
            yield name, f"{given[name]!r} would have no effect: it needs {needed}; remove it"


def refuse_unused(
    given: Mapping[str, Any], defaults: Mapping[str, Any], unused: Mapping[str, str], place: str = ""
) -> None:
    """Raise a ``ValueError`` if :func:`given_in_vain` finds something.

    Args:
        given: The settings.
        defaults: Defaults of all settings that may have no effect.
        unused: Settings without effect, each with the setting that it needs.
        place: Prefix of their names in messages.
    """
    for name, problem in given_in_vain(given, defaults, unused):
        raise ValueError(f"{place}{name}={problem}")


def without_unused(given: Mapping[str, Any], unused: Iterable[str]) -> dict[str, Any]:
    """Return the settings without those that have no effect, which files of earlier versions may contain."""
    return {name: value for name, value in given.items() if name not in set(unused)}
