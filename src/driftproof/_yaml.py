"""YAML with limits: nested aliases can expand to gigabytes."""

from __future__ import annotations

import re
from typing import Any

import yaml

MAX_BYTES = 256 * 2**10
MAX_DEPTH = 32
MAX_VALUES = 50_000
MAX_CHARACTERS = 2**20
"""Limits of a file, the last two with every alias expanded."""

MAX_INT_CHARACTERS = 100
"""Largest length of an integer: longer ones are slow to parse, and Python does not print them."""

# Every text matches in one way only, which avoids quadratic backtracking.
_FLOAT = re.compile(r"[-+]?(\d[\d_]*(\.[\d_]*)?|\.\d[\d_]*)[eE][-+]?\d+")
_TIMESTAMP = "tag:yaml.org,2002:timestamp"


class TooMuchError(yaml.MarkedYAMLError):
    """The YAML exceeds a limit."""


class Loader(yaml.SafeLoader):
    """Plain values only, and ``1e-4`` is a number, as in YAML 1.2; dates stay texts."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            # While composing and not afterwards: deep nesting would take the scanner seconds.
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise TooMuchError(problem=f"is nested more than {MAX_DEPTH} deep", problem_mark=mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node


def _int(loader: Loader, node: yaml.ScalarNode) -> int:
    if len(node.value) > MAX_INT_CHARACTERS:
        raise TooMuchError(
            problem=f"a whole number has {len(node.value):,} characters, more than {MAX_INT_CHARACTERS}",
            problem_mark=node.start_mark,
        )
    return int(loader.construct_yaml_int(node))


Loader.add_constructor("tag:yaml.org,2002:int", _int)


class Dumper(yaml.SafeDumper):
    """Quotes strings that the loader would read as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _kind in (Loader, Dumper):
    _kind.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != _TIMESTAMP]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"^({_FLOAT.pattern})$"), list("-+0123456789."))


def parse(text: str) -> tuple[yaml.Node | None, Any]:
    """The one document in a text: its nodes, which know their lines, and its value.

    Raises:
        yaml.YAMLError: It is not YAML, exceeds a limit, or holds values that are not plain.
    """
    if len(text) > MAX_BYTES:
        raise TooMuchError(problem=f"has more than {MAX_BYTES:,} characters")
    loader = Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, None
        _measure(node, 1, {})
        return node, _constructed(loader, node)
    finally:
        loader.dispose()


def value(text: str) -> Any:
    """The value of the one document in a text; see :func:`parse`."""
    return parse(text)[1]


def dump(value: Any, **options: Any) -> str:
    """Plain values as YAML that a terminal can show as it stands: control characters are escaped in quotes."""
    text: str = yaml.dump(value, Dumper=Dumper, sort_keys=False, allow_unicode=True, **options)
    if all(line.isprintable() for line in text.split("\n")):
        return text
    escaped: str = yaml.dump(value, Dumper=Dumper, sort_keys=False, allow_unicode=False, **options)
    return escaped


def _constructed(loader: Loader, node: yaml.Node) -> Any:
    try:
        return loader.construct_document(node)
    except yaml.YAMLError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        # From values that do not fit their explicit tags, and from integers with thousands of digits.
        what = "a value cannot be read" if isinstance(error, RecursionError) else f"a value cannot be read ({error})"
        raise yaml.YAMLError(what[:200]) from error


def _measure(node: yaml.Node, depth: int, known: dict[int, tuple[int, int, int] | None]) -> tuple[int, int, int]:
    """Values, characters and depth of a node with all aliases written out.

    Raises:
        yaml.YAMLError: One of them exceeds its limit, or the node contains itself.
    """
    key = id(node)
    if key in known:
        found = known[key]
        if found is None:
            raise _excess(node, "contains itself")
    else:
        if isinstance(node, yaml.ScalarNode) and any("\ud800" <= character <= "\udfff" for character in node.value):
            raise yaml.MarkedYAMLError(
                problem="a lone surrogate, which is not a valid character", problem_mark=node.start_mark
            )
        known[key] = None
        found = known[key] = _sum(node, [_measure(inner, depth + 1, known) for inner in _inside(node)])
    values, characters, height = found
    if depth + height - 1 > MAX_DEPTH:
        raise _excess(node, f"is nested more than {MAX_DEPTH} deep")
    if values > MAX_VALUES:
        raise _excess(node, f"stands for more than {MAX_VALUES:,} values, aliases (*name) written out")
    if characters > MAX_CHARACTERS:
        raise _excess(node, f"stands for more than {MAX_CHARACTERS:,} characters, aliases (*name) written out")
    return found


def _inside(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [inner for pair in node.value for inner in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []


def _sum(node: yaml.Node, inside: list[tuple[int, int, int]]) -> tuple[int, int, int]:
    own = len(node.value) if isinstance(node, yaml.ScalarNode) else 0
    return (
        1 + sum(values for values, _, _ in inside),
        own + sum(characters for _, characters, _ in inside),
        1 + max((height for _, _, height in inside), default=0),
    )


def _excess(node: yaml.Node, what: str) -> TooMuchError:
    return TooMuchError(problem=f"what begins here {what}", problem_mark=node.start_mark)
