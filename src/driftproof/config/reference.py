"""Reference of all settings: as commented YAML, and as a JSON Schema for editors."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from driftproof.config import keys
from driftproof.config.files import plain_yaml
from driftproof.config.model import Config

_WIDTH = 110


def commented_yaml(config: Config | None = None) -> str:
    """A configuration (by default all defaults) as YAML, with a comment on every setting."""
    return "\n".join(_yaml_lines(config or Config(), 0)) + "\n"


def json_schema() -> dict[str, Any]:
    """JSON Schema of configurations, including the names that work without a section."""
    schema = Config.model_json_schema()
    definitions = schema["$defs"]
    for name, path in keys.flat_keys().items():
        part: Any = schema
        for key in path:
            part = part["properties"][key]
            part = definitions[part["$ref"].rpartition("/")[2]] if "$ref" in part else part
        schema["properties"][name] = {
            **part,
            "description": f"Same as {keys.dotted(path)}. {part.get('description', '')}",
        }
    for section, name in keys.SHORT.items():
        reference = {"$ref": schema["properties"][section]["$ref"]}
        definition = definitions[reference["$ref"].rpartition("/")[2]]
        short = {"description": f"The same as {{{name}: ...}}.", "type": definition["properties"][name]["type"]}
        schema["properties"][section] = {"anyOf": [reference, short], "description": definition["description"]}
    schema["title"] = "driftproof"
    return schema


def _yaml_lines(section: BaseModel, depth: int) -> Iterator[str]:
    indent = "  " * depth
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel) and keys.is_section(info.annotation):
            if depth == 0:
                yield f"\n# {doc(info.annotation)}" if name != "run" else f"# {doc(info.annotation)}"
            else:
                yield from _comment(info.description or "", indent)
            yield f"{indent}{name}:"
            yield from _yaml_lines(value, depth + 1)
            continue
        yield from _comment(f"{info.description} {options(info.annotation).replace('`', '')}".strip(), indent)
        shown = plain(value)
        if isinstance(shown, list) and shown and isinstance(shown[0], dict):
            yield f"{indent}{name}:"
            yield from (f"{indent}  - {plain_yaml(item)}" for item in shown)
        else:
            yield f"{indent}{name}: {plain_yaml(shown)}"


def plain(value: Any) -> Any:
    """A setting as plain values; defaults inside of sections are left out."""
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_defaults=True)
    return [plain(item) for item in value] if isinstance(value, list) else value


def _comment(text: str, indent: str) -> Iterator[str]:
    yield from (f"{indent}# {line}" for line in textwrap.wrap(text, _WIDTH - len(indent), break_on_hyphens=False))


def doc(model: Any) -> str:
    """Description of a section."""
    return " ".join(inspect.getdoc(model).split())  # type: ignore[union-attr]


def options(annotation: Any) -> str:
    """The possible values of a setting with a fixed choice, as text."""
    parts = [annotation, *get_args(annotation)]
    found = [option for part in parts if get_origin(part) is Literal for option in get_args(part)]
    return f"One of {', '.join(f'`{option}`' for option in found)}." if found else ""
