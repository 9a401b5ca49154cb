"""Options shared by several commands."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from driftproof.cli.errors import CommandError

if TYPE_CHECKING:
    from driftproof._trust import Trust
    from driftproof.config import Config

ConfigFile: TypeAlias = Annotated[
    Path | None, typer.Argument(metavar="CONFIG", help="YAML file; `driftproof config` shows all settings.")
]
EnvId: TypeAlias = Annotated[str | None, typer.Option("--env", help="Gymnasium id, or module:Id; sets env.id.")]
Overrides: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Override a setting, e.g. ppo.learning_rate=1e-4; repeatable."),
]
Defaults: TypeAlias = Annotated[
    bool, typer.Option("--defaults", help="With --env: leave out the starting values for the environment.")
]
Name: TypeAlias = Annotated[
    str | None, typer.Option("--name", help="Name of the run folder. Default: from the environment's id.")
]
RunsDir: TypeAlias = Annotated[Path, typer.Option("--runs-dir", help="Folder that holds the run folders.")]
Resume: TypeAlias = Annotated[
    str | None, typer.Option("--resume", metavar="RUN", help="Folder or name of a run to resume.")
]
From: TypeAlias = Annotated[
    str | None,
    typer.Option("--from", metavar="RUN", help="Start with the weights and statistics of a run or checkpoint."),
]
Agent: TypeAlias = Annotated[str, typer.Argument(metavar="RUN", help="Folder or name of a run, or a checkpoint file.")]
Member: TypeAlias = Annotated[
    int | None, typer.Option("--member", min=0, help="Member of a population. Default: the best.")
]
Best: TypeAlias = Annotated[bool, typer.Option("--best", help="Use the best checkpoint instead of the last.")]
Trusted: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--trust", metavar="MODULE", help="Module that files may import from; repeatable."),
]


def read_config(
    config: Path | None, env: str | None, overrides: list[str] | None, trusted: list[str] | None = None
) -> Config:
    """Configuration given by a command's options.

    Raises:
        CommandError: No configuration is given, or its file does not exist.
    """
    from driftproof.config import load

    if config is None and env is None and not overrides:
        raise CommandError("give a CONFIG file, or --env ID; `driftproof config` shows all settings")
    if config is not None and not config.exists():
        raise CommandError(f"{config}: no such file; to give an environment, use --env ID")
    return load(config, changes(env, overrides), trust_in(trusted))


def read_new(
    config: Path | None,
    env: str | None,
    overrides: list[str] | None,
    trusted: list[str] | None = None,
    defaults: bool = False,
) -> tuple[Config, str]:
    """Configuration given by a command's options, with starting values if only an environment is given.

    The second value tells in one line which starting values were chosen; empty: none were looked for.

    Raises:
        CommandError: No configuration is given, its file does not exist, or ``--defaults`` has nothing to leave out.
    """
    if config is not None or env is None or defaults:
        if defaults and (config is not None or env is None):
            raise CommandError("--defaults leaves out the starting values of --env: give --env ID, and no CONFIG")
        return read_config(config, env, overrides, trusted), ""
    from driftproof.config.starting import load_with_starting_values

    return load_with_starting_values(changes(env, overrides), trust_in(trusted))


def trust_in(modules: list[str] | None) -> Trust:
    """Modules that the user trusts, which may be in the working directory.

    Raises:
        CommandError: A name is not a module name.
    """
    from driftproof._trust import Trust

    try:
        return Trust.of(modules or (), here=os.getcwd())
    except ValueError as error:
        raise CommandError(f"--trust: {error}") from error


def changes(env: str | None, overrides: list[str] | None) -> list[str]:
    """Overrides of a configuration from the command line.

    Raises:
        CommandError: The environment's id is empty.
    """
    if env == "":
        raise CommandError("--env '' must be a Gymnasium id, or module:Id")
    # Quoted, since a colon is syntax in YAML.
    return [*([] if env is None else [f"env.id={json.dumps(env)}"]), *(overrides or [])]


def check_resume(
    resume: str | None, config: Path | None, env: str | None, name: str | None, origin: str | None = None
) -> None:
    """Refuse options that define a new run if ``--resume`` is given."""
    options = {"CONFIG": config, "--env": env, "--name": name, "--from": origin}
    given = [option for option, value in options.items() if value is not None]
    if resume is not None and given:
        raise CommandError(f"--resume uses the configuration in the run folder: leave out {', '.join(given)}")
