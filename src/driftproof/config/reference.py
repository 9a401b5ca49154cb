"""All settings explained: as commented YAML, as a JSON Schema for editors, and as a page of documentation.

``python -m driftproof.config.reference > docs/configuration.md`` writes the page.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from driftproof.config import keys
from driftproof.config._types import FromTo
from driftproof.config.files import plain_yaml
from driftproof.config.model import Config
from driftproof.config.population import HyperparamSection

_WIDTH = 110
_INTRODUCTION = """\
# Configuration

A run is made by one YAML file. Whatever is not in it is at its default; what is on the command line goes before what is in
the file:

```
driftproof config > my.yaml                     # all settings with their defaults and what they do
driftproof config my.yaml                       # is it right? The agent and its environment are built, and the search checked
driftproof config --schema > driftproof.json    # for editors
driftproof train my.yaml --set ppo.learning_rate=1e-4 --set env.n_envs=8
```

A key that does not exist is an error that names the nearest one, with file and line. So is a setting that would have no effect,
and numbers that do not fit together. An editor with the YAML language server completes and checks what you type if the file
begins with

```yaml
# yaml-language-server: $schema=driftproof.json
```

From Python:

```python
from driftproof.config import Config, build_agent, dumps, loads

config = loads("env: CartPole-v1", ["ppo.n_steps=128", "env.n_envs=2"])
assert config == Config(env={"id": "CartPole-v1", "n_envs": 2}, ppo={"n_steps": 128})
assert loads(dumps(config)) == config
agent = build_agent(config)
```

**Short forms.** `env: CartPole-v1` is `env: {id: CartPole-v1}`; so it is with `policy` and `optimizer` for their names, and with
`vgs` and `adversarial` for whether they are enabled.

**Without sections.** Names that are clear without their section may stand at the top of the file, as arguments of
`DistributionalPPO` and `PBTConfig` do: `learning_rate`, `population_size`, `vgs_beta` for `vgs.beta`; all of them are
[below](#names-without-a-section). A setting that is given twice, with two values, is an error.

**Numbers** may be written `1e-4` and `1_000_000`.

**Code.** Environments (`module:Id`), features extractors and optimizers (`module:Class`) of your own are imported when an agent is
built, from the working directory too. A configuration from somebody else can thus run code that lies on your machine, as
`gymnasium.make` can; checkpoints cannot.
"""


def commented_yaml(config: Config | None = None) -> str:
    """A configuration, by default that of defaults, with what every setting does."""
    return "\n".join(_yaml_lines(config or Config(), 0)) + "\n"


def json_schema() -> dict[str, Any]:
    """For editors, with the names that work without a section."""
    schema = Config.model_json_schema()
    definitions = schema["$defs"]
    for name, path in keys.flat_keys().items():
        part: Any = schema
        for key in path:
            part = part["properties"][key]
            part = definitions[part["$ref"].rpartition("/")[2]] if "$ref" in part else part
        schema["properties"][name] = {**part, "description": f"Is {keys.dotted(path)}. {part.get('description', '')}"}
    for section, name in keys.SHORT.items():
        reference = {"$ref": schema["properties"][section]["$ref"]}
        definition = definitions[reference["$ref"].rpartition("/")[2]]
        short = {"description": f"The same as {{{name}: ...}}.", "type": definition["properties"][name]["type"]}
        schema["properties"][section] = {"anyOf": [reference, short], "description": definition["description"]}
    schema["title"] = "driftproof"
    return schema


def page() -> str:
    """The page of documentation."""
    lines = [_INTRODUCTION]
    for name, info in Config.model_fields.items():
        lines += _section(name, info.annotation, level=2)
    lines += _section("Items of `pbt.hyperparams`", HyperparamSection, level=3)
    lines += _section("Schedules", FromTo, level=3)
    lines += ["## Names without a section", "", "| | |", "|---|---|"]
    lines += [f"| `{name}` | `{keys.dotted(path)}` |" for name, path in sorted(keys.flat_keys().items())]
    return "\n".join(lines) + "\n"


def _yaml_lines(section: BaseModel, depth: int) -> Iterator[str]:
    indent = "  " * depth
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel) and keys.is_section(info.annotation):
            if depth == 0:
                yield f"\n# {_doc(info.annotation)}" if name != "run" else f"# {_doc(info.annotation)}"
            else:
                yield from _comment(info.description or "", indent)
            yield f"{indent}{name}:"
            yield from _yaml_lines(value, depth + 1)
            continue
        yield from _comment(f"{info.description} {_options(info.annotation).replace('`', '')}".strip(), indent)
        plain = _plain(value)
        if isinstance(plain, list) and plain and isinstance(plain[0], dict):
            yield f"{indent}{name}:"
            yield from (f"{indent}  - {plain_yaml(item)}" for item in plain)
        else:
            yield f"{indent}{name}: {plain_yaml(plain)}"


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_defaults=True)
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _comment(text: str, indent: str) -> Iterator[str]:
    yield from (f"{indent}# {line}" for line in textwrap.wrap(text, _WIDTH - len(indent), break_on_hyphens=False))


def _doc(model: Any) -> str:
    return " ".join(inspect.getdoc(model).split())  # type: ignore[union-attr]


def _section(title: str, model: Any, level: int) -> list[str]:
    head = f"{'#' * level} `{title}`" if level == 2 else f"{'#' * level} {title}"
    lines = [head, "", _doc(model), "", "| setting | default | |", "|---|---|---|"]
    inner = []
    for name, info in model.model_fields.items():
        if keys.is_section(info.annotation):
            inner.append((f"`{title}.{name}`", info.annotation))
            continue
        default = "" if info.is_required() else f"`{_default(info.get_default(call_default_factory=True))}`"
        options = _options(info.annotation)
        text = f"{info.description} {options}".strip()
        lines.append(f"| `{name}` | {default} | {text.replace('|', chr(92) + '|')} |")
    lines.append("")
    for name, part in inner:
        lines += _section(name, part, level + 1)
    return lines


def _default(value: Any) -> str:
    return plain_yaml(_plain(value))


def _options(annotation: Any) -> str:
    """What may be chosen, of settings with a list of possibilities."""
    parts = [annotation, *get_args(annotation)]
    options = [option for part in parts if get_origin(part) is Literal for option in get_args(part)]
    return f"One of {', '.join(f'`{option}`' for option in options)}." if options else ""


if __name__ == "__main__":
    print(page(), end="")
