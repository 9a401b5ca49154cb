"""Make a release: its version, its part of the changelog, a commit and a tag. Nothing is published.

python scripts/release.py 0.2.0 --dry-run   # what would change
python scripts/release.py 0.2.0
"""

from __future__ import annotations

import argparse
import datetime
import difflib
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSION = re.compile(r'^version = "(\d+\.\d+\.\d+)"$', re.MULTILINE)
NEXT = """
Tagged {tag}. To publish it:
  make dist                                 # builds and checks the tagged commit
  git push origin HEAD {tag}
  build/release/bin/twine upload dist/*
To undo it before that: git tag --delete {tag} && git reset --hard HEAD~1"""


def main(arguments: list[str], root: Path = ROOT) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="for example 0.2.0")
    parser.add_argument("--dry-run", action="store_true", help="show what would change, and change nothing")
    given = parser.parse_args(arguments)
    tag = f"v{given.version}"
    _check_repository(root, tag)
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    changes = {
        "pyproject.toml": with_version((root / "pyproject.toml").read_text(), given.version),
        "CHANGELOG.md": with_release((root / "CHANGELOG.md").read_text(), given.version, today),
    }
    for name, text in changes.items():
        before = (root / name).read_text().splitlines()
        print("\n".join(difflib.unified_diff(before, text.splitlines(), name, name, lineterm="", n=1)))
    if given.dry_run:
        print(f"\nWould commit this as 'release: {given.version}' and tag it {tag}; nothing was changed.")
        return
    for name, text in changes.items():
        (root / name).write_text(text)
    _git(root, "commit", "--quiet", "--message", f"release: {given.version}", *changes)
    _git(root, "tag", "--annotate", tag, "--message", f"driftproof {given.version}")
    print(NEXT.format(tag=tag))


def with_version(project: str, version: str) -> str:
    """``pyproject.toml`` with another version, which must not be an older one."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise SystemExit(f"{version!r} is no version: expected three numbers, such as 0.2.0")
    (current,) = VERSION.findall(project)
    if _numbers(version) < _numbers(current):
        raise SystemExit(f"{version} is older than {current} in pyproject.toml")
    return VERSION.sub(f'version = "{version}"', project)


def with_release(changelog: str, version: str, date: str) -> str:
    """The changelog, where everything under "Unreleased" has become a release."""
    match = re.search(r"^## Unreleased\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if match is None or not match[1].strip():
        raise SystemExit('CHANGELOG.md has nothing under "## Unreleased"')
    if re.search(rf"^## {re.escape(version)}\b", changelog, re.MULTILINE):
        raise SystemExit(f"CHANGELOG.md has a part about {version} already")
    return changelog.replace("## Unreleased\n", f"## Unreleased\n\n## {version} ({date})\n", 1)


def _check_repository(root: Path, tag: str) -> None:
    if changed := _git(root, "status", "--porcelain"):
        raise SystemExit(f"there are changes that are not committed:\n{changed}")
    if _git(root, "tag", "--list", tag):
        raise SystemExit(f"the tag {tag} exists")


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def _git(root: Path, *arguments: str) -> str:
    ran = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise SystemExit(f"git {' '.join(arguments)}: {ran.stderr.strip() or ran.stdout.strip()}")
    return ran.stdout.strip()


if __name__ == "__main__":
    main(sys.argv[1:])
