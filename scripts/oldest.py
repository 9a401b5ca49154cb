"""Print the oldest versions that pyproject.toml promises, as constraints for pip: `make test-oldest`.

Arguments replace some: ``python scripts/oldest.py torch==2.13.0``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest installs it

ROOT = Path(__file__).parents[1]
NOT_FOR_USERS = {"bench", "dev", "docs"}
"""Extras for developers: their tools are pinned in constraints.txt, and no older versions are promised to work."""


def main(replacements: Sequence[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    requirements = project["dependencies"] + [each for name in extras.keys() - NOT_FOR_USERS for each in extras[name]]
    constraints = oldest(requirements) | {each.partition("==")[0]: each for each in replacements}
    print("\n".join(sorted(constraints.values())))


def oldest(requirements: Iterable[str]) -> dict[str, str]:
    """``name==x`` for every ``name>=x``, by name.

    Raises:
        ValueError: A requirement has no lower bound.
    """
    found = {}
    for requirement in requirements:
        if requirement.startswith("driftproof["):
            continue
        match = re.fullmatch(r"([\w.-]+)(?:\[[\w,]+\])?>=([\w.]+)", requirement)
        if match is None:
            raise ValueError(f"{requirement!r} in pyproject.toml is not of the form NAME>=VERSION")
        found[match[1]] = f"{match[1]}=={match[2]}"
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
