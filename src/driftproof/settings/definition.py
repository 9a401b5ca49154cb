"""Definitions of settings: dataclasses whose fields have type, default, bounds and documentation.

A field created by :func:`setting` is the only definition of that setting. Constructors take their signature from a
definition (:func:`takes`), :func:`check_values` checks values against it, and :mod:`driftproof.config` derives the
configuration sections, their JSON Schema and their documentation from it. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import textwrap
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from driftproof._arguments import ArgumentError, check_count, check_flag, check_number, check_option
from driftproof._members import check_numbers
from driftproof._text import did_you_mean
from driftproof.settings.schedules import Schedule, base_and_schedule

P = ParamSpec("P")
T = TypeVar("T")
Given = TypeVar("Given")
Kind = TypeVar("Kind", bound=type[Any])

LARGE = 1e6
"""Upper bound of numbers used in training; larger values are mistakes."""
LARGEST = 1e15
"""Upper bound of settings that are bounds themselves."""
MOST_UNITS = 2**16
"""Upper bound of sizes, so that a typo or an untrusted file cannot exhaust memory or processes."""
_NOT_SET: Any = object()
_WIDTH = 116


@dataclass(frozen=True)
class Metadata:
    """Metadata of a setting, besides its name, type and default.

    Attributes:
        doc: Effect, direction and typical values, in one or two sentences.
        bounds: Arguments of :func:`driftproof._arguments.check_number`.
        section: Section of the configuration file; ``None``: the definition's section.
        key: Name in the configuration file; ``None``: the same as in Python.
        form: Type in the configuration file, if it differs from the constructor's.
        file_default: Default in the configuration file, if it differs from the constructor's.
        in_files: Whether configuration files have this setting.
        is_hyperparameter: Whether it may change during training, so that population-based training can search it.
        changes_on_load: Whether ``load(path, name=...)`` may change the checkpoint's value.
        fixed: Why it cannot change during training, if there is a particular reason.
        check: Function that returns the value in its normal form, or raises a ``ValueError``.
        pattern: Regular expression in the JSON Schema, for editors.
    """

    doc: str
    bounds: Mapping[str, float]
    section: str | None = None
    key: str | None = None
    form: Any = None
    file_default: Any = _NOT_SET
    in_files: bool = True
    is_hyperparameter: bool = False
    changes_on_load: bool = False
    fixed: str | None = None
    check: Callable[[Any], Any] | None = None
    pattern: str | None = None


@dataclass(frozen=True)
class Setting:
    """One setting of a definition.

    Attributes:
        name: Name in Python.
        type: Type in Python.
        default: Default; ``dataclasses.MISSING`` without one.
        about: Documentation, bounds and other metadata.
    """

    name: str
    type: Any
    default: Any
    about: Metadata

    @property
    def bounds(self) -> Mapping[str, float]:
        """Arguments of :func:`driftproof._arguments.check_number`."""
        return self.about.bounds

    @property
    def has_file_default(self) -> bool:
        """Whether the default in configuration files differs from the constructor's."""
        return self.about.file_default is not _NOT_SET

    @property
    def is_optional(self) -> bool:
        """Whether ``None`` is a valid value."""
        return type(None) in alternatives(self.type)

    @property
    def is_scheduled(self) -> bool:
        """Whether a schedule, a function of the remaining progress, is a valid value."""
        return Schedule in alternatives(self.type)

    @property
    def is_count(self) -> bool:
        """Whether only integers are valid."""
        return int in alternatives(self.type)

    def check(self, value: Any, name: str | None = None, per_member: bool = False) -> None:
        """Raise an error that names the setting unless the value is of its type and within its bounds.

        Args:
            value: Value to check.
            name: Name in messages; ``None``: the setting's name.
            per_member: Whether a tensor with one number per member is valid too.
        """
        name = self.name if name is None else name
        kinds = alternatives(self.type)
        if value is None and self.is_optional:
            return
        if Schedule in kinds and callable(value):
            value, _ = base_and_schedule(name, value)
        if options := [option for kind in kinds if get_origin(kind) is Literal for option in get_args(kind)]:
            check_option(name, value, options)
        elif kinds[0] is bool and len(kinds) == 1 + self.is_optional:
            check_flag(name, value)
        elif int in kinds:
            check_count(name, value, **{key: int(bound) for key, bound in self.bounds.items()})
        elif float in kinds:
            (check_numbers if per_member else check_number)(name, value, **self.bounds)
        elif get_origin(kinds[0]) is _MAPPING and not isinstance(value, Mapping):
            raise TypeError(f"{name} must be a mapping from names to values, not {value!r}")
        if self.about.check is not None:
            try:
                self.about.check(value)
            except ValueError as error:
                raise ArgumentError(f"Invalid {name}: {value!r}; {error}", name) from error


_MAPPING = get_origin(Mapping[str, Any])


def setting(
    default: T = _NOT_SET,
    doc: str = "",
    *,
    factory: Callable[[], T] = _NOT_SET,
    at_least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    **more: Any,
) -> T:
    """Define a setting: a field of a definition.

    Args:
        default: Default; without one, the argument is required.
        doc: Effect, direction and typical values. ``None``, ``True`` and ``False`` become YAML's in configurations.
        factory: Function that creates a mutable default.
        at_least: Smallest value.
        above: Exclusive lower bound.
        below: Exclusive upper bound.
        at_most: Largest value.
        more: See :class:`Metadata`.
    """
    limits = {"at_least": at_least, "above": above, "below": below, "at_most": at_most}
    about = Metadata(doc, {name: bound for name, bound in limits.items() if bound is not None}, **more)
    arguments: dict[str, Any] = {"metadata": {"setting": about}}
    if factory is not _NOT_SET:
        arguments["default_factory"] = factory
    elif default is not _NOT_SET:
        arguments["default"] = default
    made: T = field(**arguments)
    return made


def argument(default: T = _NOT_SET, doc: str = "", **more: Any) -> T:
    """Define a setting that constructors have, but configuration files do not."""
    return setting(default, doc, in_files=False, **more)


def settings_of(definition: type[Any]) -> Mapping[str, Setting]:
    """Return all settings of a definition by name, in the order of the constructor's arguments."""
    known: Mapping[str, Setting] = _settings_of(definition)  # type: ignore[arg-type]
    return known


@functools.cache
def _settings_of(definition: Any) -> Mapping[str, Setting]:
    fields = {each.name: each for each in dataclasses.fields(definition)}
    hints = get_type_hints(definition, localns={"KW_ONLY": object})  # which Python 3.10 does not accept as a type
    return {
        name: Setting(name, hints[name], _default(fields[name]), fields[name].metadata["setting"])
        for name in inspect.signature(definition).parameters
    }


def _default(each: dataclasses.Field[Any]) -> Any:
    return each.default if each.default_factory is dataclasses.MISSING else each.default_factory()


def defaults_of(definition: type[Any]) -> dict[str, Any]:
    """Defaults of all settings that have one."""
    return {
        name: each.default for name, each in settings_of(definition).items() if each.default is not dataclasses.MISSING
    }


def check_values(given: Any) -> None:
    """Raise an error that names the first invalid value of a definition's instance."""
    for name, each in settings_of(type(given)).items():
        each.check(getattr(given, name), per_member=getattr(given, "per_member", False))


def check_names(place: str, given: Iterable[str], known: Iterable[str], owner: str) -> None:
    """Refuse unknown names; the error suggests the nearest known one.

    Args:
        place: Argument that holds these names.
        given: The names.
        known: Valid names.
        owner: Class that takes these names, for messages.

    Raises:
        TypeError: A name is unknown.
    """
    known = list(known)
    for name in given:
        if name not in known:
            raise TypeError(f"{place} has {name!r}, which is not an argument of {owner}; {did_you_mean(name, known)}")


def takes(
    definition: Callable[P, Given],
) -> Callable[[Callable[[Any, Given], None]], Callable[Concatenate[Any, P], None]]:
    """Decorator that gives an ``__init__`` the signature of a definition and passes it a checked instance.

    Type checkers, editors and ``inspect.signature`` see every argument with its type and default. Names in the
    definition's ``absent`` are accepted as ``None`` too.
    """

    def decorate(init: Callable[[Any, Given], None]) -> Callable[Concatenate[Any, P], None]:
        signature = inspect.signature(definition)

        @functools.wraps(init)
        def __init__(self: Any, *args: P.args, **kwargs: P.kwargs) -> None:  # noqa: N807
            for name in list(kwargs):
                if kwargs[name] is None and name in getattr(definition, "absent", ()):
                    del kwargs[name]
                elif name not in signature.parameters:
                    find: Callable[[str], str] | None = getattr(definition, "hint", None)
                    hint = did_you_mean(name, signature.parameters) if find is None else find(name)
                    raise TypeError(f"{type(self).__name__}() got an unexpected keyword argument {name!r}; {hint}")
            init(self, definition(*args, **kwargs))

        parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        __init__.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[parameter, *signature.parameters.values()], return_annotation=None
        )
        return cast(Callable[Concatenate[Any, P], None], __init__)

    return decorate


def documented(definition: type[Any]) -> Callable[[Kind], Kind]:
    """Decorator that appends a definition's arguments to the docstring of a class."""

    def decorate(kind: Kind) -> Kind:
        lines = [
            textwrap.fill(f"{name}: {each.about.doc}", _WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 12)
            for name, each in settings_of(definition).items()
        ]
        kind.__doc__ = f"{(kind.__doc__ or '').rstrip()}\n\n    Args:\n" + "\n".join(lines) + "\n    "
        return kind

    return decorate


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """The types of a union, or the type itself in a tuple."""
    is_union = get_origin(annotation) in (Union, types.UnionType)
    return get_args(annotation) if is_union else (annotation,)
