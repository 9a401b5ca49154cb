"""Configurations of all kinds."""

from __future__ import annotations

import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from driftproof.config import Config, keys

_PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def _numbers(kind, metadata):
    bounds = {}
    for part in metadata:
        for name, key in (("ge", "min_value"), ("gt", "min_value"), ("le", "max_value"), ("lt", "max_value")):
            if hasattr(part, name):
                bounds[key] = getattr(part, name)
                if name in ("gt", "lt"):
                    bounds["exclude_" + ("min" if name == "gt" else "max")] = True
    if kind is int:
        return st.integers(bounds.get("min_value", -(10**6)), bounds.get("max_value", 10**9))
    return st.floats(allow_nan=False, allow_infinity=False, **bounds)


def values(annotation: Any, metadata=()) -> st.SearchStrategy[Any]:
    """Values of a setting, as YAML has them."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *more = get_args(annotation)
        bounds = [part for part in more if isinstance(part, annotated_types.BaseMetadata)]
        fields = [part for each in more for part in getattr(each, "metadata", ())]
        return values(inner, (*metadata, *bounds, *fields))
    if origin in (Union, types.UnionType):
        return st.one_of([values(part, metadata) for part in get_args(annotation)])
    if origin is Literal:
        return st.sampled_from(get_args(annotation))
    if origin is list:
        return st.lists(values(get_args(annotation)[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(st.text(), _PLAIN, max_size=3)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return section(annotation)
    if annotation is str:
        least = max((part.min_length for part in metadata if hasattr(part, "min_length")), default=0)
        return st.text(min_size=least)
    simple = {bool: st.booleans(), type(None): st.none()}
    return simple[annotation] if annotation in simple else _numbers(annotation, metadata)


def section(model: type[BaseModel]) -> st.SearchStrategy[dict[str, Any]]:
    """Some settings of a section, and all that it needs."""
    parts = {name: values(info.annotation, info.metadata) for name, info in model.model_fields.items()}
    needed = {name: part for name, part in parts.items() if model.model_fields[name].is_required()}
    return st.fixed_dictionaries(needed, optional={n: p for n, p in parts.items() if n not in needed})


def _setting(path: keys.Path) -> st.SearchStrategy[Any]:
    model: Any = Config
    for part in path[:-1]:
        model = model.model_fields[part].annotation
    info = model.model_fields[path[-1]]
    return values(info.annotation, info.metadata)


_HARD = {("optimizer", "name"), ("env", "drift")}
"""Names and specifications, of which few are right."""


@st.composite
def configs(draw) -> Config:
    """A configuration in which some settings are not at their defaults."""
    paths = [path for path in keys.settings() if path not in _HARD]
    # What is switched off takes no settings.
    data: dict[str, Any] = {"adversarial": {"enabled": True}} if draw(st.booleans()) else {}
    for path in draw(st.lists(st.sampled_from(paths), max_size=8, unique=True)):
        target = data
        for part in path[:-1]:
            target = target.setdefault(part, {})
        before, target[path[-1]] = target.get(path[-1]), draw(_setting(path))
        try:
            Config(**data)
        except ValidationError:
            # Does not go together with what is there.
            target[path[-1]] = before
            if before is None:
                del target[path[-1]]
    return Config(**data)
