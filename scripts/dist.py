"""Build the sdist and the wheel in ``dist/``, check them, and use the wheel in an empty environment: `make dist`.

Needs ``build`` and ``twine`` beside the interpreter that runs it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
SHORT = "env.n_envs=2 ppo.n_steps=32 ppo.batch_size=32 run.total_timesteps=192"
"""Settings of a training with three updates."""


def main() -> None:
    shutil.rmtree(DIST, ignore_errors=True)
    _run(sys.executable, "-m", "build", "--outdir", DIST)
    (sdist,), (wheel,) = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
    _run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel)
    with tempfile.TemporaryDirectory() as folder:
        check_contents(sdist, wheel, Path(folder))
        use(wheel, Path(folder))
    print(f'checked: {sdist}\nchecked: {wheel}\nto install it: pip install "{wheel}[all]"')


def check_contents(sdist: Path, wheel: Path, folder: Path) -> None:
    """Compare both files with the repository; the wheel was built from the sdist."""
    _run(sys.executable, "-m", "build", "--wheel", "--outdir", folder, ROOT)
    (from_tree,) = folder.glob("*.whl")
    built, expected = contents_of(wheel), contents_of(from_tree)
    if differing := [name for name in sorted(built | expected) if built.get(name) != expected.get(name)]:
        raise SystemExit(f"the sdist builds another wheel than the repository: {', '.join(differing)}")
    tracked = set(_output("git", "ls-files").splitlines())
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    if unknown := names - tracked - {"PKG-INFO"}:
        raise SystemExit(f"the sdist has files that git does not: {', '.join(sorted(unknown))}")


def contents_of(wheel: Path) -> dict[str, bytes]:
    """All files of a wheel by their name."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def use(wheel: Path, folder: Path) -> None:
    """Install the core alone, then everything, and run what the README shows in a folder elsewhere."""
    venv.create(folder / "venv", with_pip=True)
    programs = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
    python, driftproof = programs / "python", programs / "driftproof"
    install = (python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt")
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    _run(*install, wheel, cwd=elsewhere)
    shutil.copy(ROOT / "tests" / "bare.py", elsewhere)
    _run(python, "bare.py", "--really", cwd=elsewhere)
    _run(*install, f"{wheel}[all]", cwd=elsewhere)
    (elsewhere / "readme.py").write_text(code_of((ROOT / "README.md").read_text()))
    _run(python, "readme.py", cwd=elsewhere)
    _run(driftproof, "--help", cwd=elsewhere)
    overrides = [part for setting in SHORT.split() for part in ("--set", setting)]
    _run(driftproof, "train", "--env", "CartPole-v1", *overrides, "--name", "short", cwd=elsewhere)


def code_of(page: str) -> str:
    """All Python blocks of a Markdown page, as one program."""
    return "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))


def _run(*command: object, cwd: Path = ROOT) -> None:
    print("$", *command, flush=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if code := subprocess.run([*map(str, command)], cwd=cwd, env=environment, check=False).returncode:
        raise SystemExit(f"failed with exit code {code}: {' '.join(map(str, command))}")


def _output(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main()
