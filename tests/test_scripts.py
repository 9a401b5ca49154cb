"""What `make dist`, `make test-oldest` and a release do, as far as it takes no network."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from scripts import oldest, release

ROOT = Path(__file__).parents[1]
PROJECT = '[project]\nname = "x"\nversion = "0.1.0"\n\n[tool.other]\nversion = "9"\n'
CHANGELOG = "# Changelog\n\n## Unreleased\n\n### Added\n\n- A thing.\n\n## 0.1.0 (2020-01-01)\n\n- All.\n"


def git(folder, *arguments):
    return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def repository(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "somebody")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "somebody@example.org")
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    return tmp_path


def test_a_release_is_a_version_a_changelog_a_commit_and_a_tag(repository, capsys):
    release.main(["0.2.0"], repository)
    assert 'version = "0.2.0"\n\n[tool.other]\nversion = "9"' in (repository / "pyproject.toml").read_text()
    changelog = (repository / "CHANGELOG.md").read_text()
    assert changelog.startswith("# Changelog\n\n## Unreleased\n\n## 0.2.0 (2")
    assert changelog.endswith(")\n\n### Added\n\n- A thing.\n\n## 0.1.0 (2020-01-01)\n\n- All.\n")
    assert git(repository, "status", "--porcelain") == ""
    assert git(repository, "log", "--format=%s", "v0.2.0") == "release: 0.2.0\nfirst\n"
    assert "git push origin HEAD v0.2.0" in capsys.readouterr().out


def test_a_dry_run_shows_the_changes_and_makes_none(repository, capsys):
    release.main(["0.2.0", "--dry-run"], repository)
    assert '-version = "0.1.0"\n+version = "0.2.0"' in capsys.readouterr().out
    assert git(repository, "status", "--porcelain") == git(repository, "tag") == ""
    assert (repository / "pyproject.toml").read_text() == PROJECT


@pytest.mark.parametrize(
    ("version", "error"),
    [("0.0.9", "older than 0.1.0"), ("0.1.0", "has a part about 0.1.0"), ("0.2", "is no version")],
)
def test_impossible_versions_are_refused(repository, version, error):
    with pytest.raises(SystemExit, match=error):
        release.main([version], repository)
    assert git(repository, "status", "--porcelain") == git(repository, "tag") == ""


def test_uncommitted_changes_and_used_tags_are_refused(repository):
    (repository / "new.py").touch()
    with pytest.raises(SystemExit, match=r"not committed:\n\?\? new.py"):
        release.main(["0.2.0"], repository)
    (repository / "new.py").unlink()
    git(repository, "tag", "v0.2.0")
    with pytest.raises(SystemExit, match=r"the tag .* exists"):
        release.main(["0.2.0"], repository)


def test_a_release_needs_changes():
    with pytest.raises(SystemExit, match="nothing under"):
        release.with_release("# Changelog\n\n## Unreleased\n\n## 0.1.0 (2020-01-01)\n", "0.2.0", "2020-01-02")


def test_this_repository_can_be_released():
    project, changelog = (ROOT / "pyproject.toml").read_text(), (ROOT / "CHANGELOG.md").read_text()
    assert '\nversion = "99.0.0"\n' in release.with_version(project, "99.0.0")
    assert "## Unreleased\n\n## 99.0.0 (2020-01-01)\n\n### " in release.with_release(changelog, "99.0.0", "2020-01-01")


def test_oldest_versions_are_those_of_the_project(capsys):
    oldest.main(["torch==2.13.0"])
    constraints = capsys.readouterr().out.splitlines()
    project = (ROOT / "pyproject.toml").read_text()
    assert "torch==2.13.0" in constraints
    assert {"numpy", "gymnasium", "ray"} < {line.partition("==")[0] for line in constraints}
    assert all(line.replace("==", ">=") in project for line in constraints if line != "torch==2.13.0")
    with pytest.raises(ValueError, match="numpy<3"):
        oldest.oldest(["numpy<3"])
