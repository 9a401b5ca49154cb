"""Create, find and read run folders."""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from driftproof._text import closest
from driftproof.cli.errors import CommandError, Stopped
from driftproof.cli.interrupts import interrupts
from driftproof.cli.located import is_same_data, located
from driftproof.cli.options import trust_in
from driftproof.runs import CONFIG, has_saved, own_file

if TYPE_CHECKING:
    from driftproof.config import Config

_SHOWN = 10
"""Largest number of runs listed in a message."""


def check_free(runs_dir: Path, name: str | None, command: str) -> None:
    """Refuse the name of an existing run.

    Args:
        runs_dir: Folder that holds the run folders.
        name: Name of the run; ``None``: a free one will be chosen.
        command: Command that would resume the run.
    """
    if name is None:
        return
    if not name or name in (".", "..") or "/" in name or "\\" in name:
        raise CommandError(
            f"--name {name!r} must be a folder name, not a path; choose the parent folder with --runs-dir"
        )
    folder = runs_dir / name
    if folder.exists():
        raise CommandError(
            f"{folder} exists: choose another --name, or resume it: driftproof {command} --resume {folder}"
        )


def create(runs_dir: Path, name: str | None, config: Config, command: str) -> Path:
    """Create the folder of a new run and write its configuration there.

    From then on the configuration and all modules that it names are trusted, as written by this user.

    Raises:
        CommandError: The name is taken, or the folder cannot be written.
        ConfigError: The configuration names an untrusted module, even one that this run does not use.
    """
    from driftproof.config import dumps
    from driftproof.config.names import check_address, check_names, home_of
    from driftproof.config.ownership import mark
    from driftproof.state import write_atomically

    check_free(runs_dir, name, command)
    check_names(config)
    check_address(config)
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
        folder = _made(runs_dir, config.env.id) if name is None else runs_dir / name
        if name is not None:
            folder.mkdir()
        content = dumps(config).encode()
        try:
            mark(folder, [content], home_of(config))
            write_atomically(folder / CONFIG, [content])
        except BaseException:
            discard(folder)
            raise
    except FileExistsError:
        if not runs_dir.is_dir():
            raise CommandError(f"--runs-dir {runs_dir} is a file: give a folder") from None
        raise CommandError(f"{runs_dir / (name or '')} exists: choose another --name, or another --runs-dir") from None
    except OSError as error:
        raise CommandError(
            f"cannot write a run to {runs_dir}: {error.strerror}; choose another folder with --runs-dir"
        ) from error
    return folder


@contextmanager
def created(runs_dir: Path, name: str | None, config: Config, command: str) -> Iterator[Path]:
    """Create the folder of a new run; remove it if the run is interrupted before anything is saved.

    Raises:
        CommandError: The name is taken, or the folder cannot be written.
        Stopped: The run was interrupted before anything was saved.
    """
    folder = None
    try:
        with interrupts.held():
            folder = create(runs_dir, name, config, command)
        yield folder
    except (KeyboardInterrupt, Stopped):
        if folder is None or has_saved(folder):
            raise
        with interrupts.shielded():
            discard(folder)
        raise Stopped(f"stopped before anything was saved; {folder} was removed") from None


def discard(folder: Path) -> None:
    """Remove the folder of a run that has saved nothing."""
    shutil.rmtree(folder)


def _made(runs_dir: Path, env_id: str) -> Path:
    """Create a folder named after the environment, with a number if the name is taken."""
    plain = re.sub(r"[^a-z0-9.]+", "-", env_id.rpartition(":")[2].lower()).strip("-.") or "run"
    number = 1
    while True:
        folder = runs_dir / (plain if number == 1 else f"{plain}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder


def find(run: str | Path, runs_dir: Path) -> Path:
    """Find a run folder by its path or name.

    Raises:
        CommandError: There is no such run.
    """
    for folder in (Path(run), runs_dir / run):
        if (folder / CONFIG).is_file():
            return folder
    if Path(run).is_dir():
        raise CommandError(f"{run} is not a run folder: there is no {CONFIG} in it")
    names = sorted(path.parent.name for path in runs_dir.glob(f"*/{CONFIG}"))
    raise CommandError(f"there is no run {str(run)!r}{_instead(str(run), names, runs_dir)}")


def _instead(name: str, names: list[str], runs_dir: Path) -> str:
    """Suggest a similar name, or list the runs."""
    if (near := closest(name, names)) is not None:
        return f"; did you mean {near!r}?"
    shown = [*names[:_SHOWN], *([f"{len(names) - _SHOWN} more"] if len(names) > _SHOWN else [])]
    return f"; the runs in {runs_dir} are {', '.join(shown)}" if names else ""


def read(
    folder: Path, overrides: list[str] | None, changeable: Collection[str], trusted: list[str] | None = None
) -> Config:
    """Configuration of a run to resume, with overrides applied; :func:`keep` saves it.

    Args:
        folder: Run folder.
        overrides: Overrides of its configuration.
        changeable: Settings that may change when a run is resumed.
        trusted: Modules that the configuration may import from.

    Raises:
        CommandError: An override changes another setting.
    """
    from driftproof.config import keys, load

    path = own_file(folder, CONFIG)
    before, config = load(path), load(path, overrides or (), trust_in(trusted))
    changed = [keys.dotted(path) for path in keys.settings() if keys.at(before, path) != keys.at(config, path)]
    if changed == ["env.kwargs"] and is_same_data(before, config, folder):
        changed = []  # Only the path of the data has changed.
    if wrong := [name for name in changed if name not in changeable]:
        can = ", ".join(changeable)
        raise CommandError(f"{wrong[0]} cannot change when a run is resumed; these can: {can}")
    return located(config, folder, overrides or ())


def keep(folder: Path, config: Config) -> None:
    """Save the settings of a resumed run, after checking that it can be resumed."""
    from driftproof.config import dumps, load
    from driftproof.config.ownership import mark, owned
    from driftproof.state import write_atomically

    path = own_file(folder, CONFIG)
    before = load(path)
    if is_same_data(before, config, folder):
        config = config.model_copy(
            update={"env": before.env}
        )  # The current path of the data is not a setting of the run.
    if before == config:
        return
    old, new = path.read_bytes(), dumps(config).encode()
    if (mine := owned(folder, old)) is not None:
        mark(folder, [old, new], mine.home)
    write_atomically(path, [new], follow_links=False)
