"""Options that several commands have."""

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
    Path | None, typer.Argument(metavar="CONFIG", help="A YAML file; `driftproof config` shows all settings.")
]
EnvId: TypeAlias = Annotated[str | None, typer.Option("--env", help="Gymnasium id, or module:Id; env.id.")]
Overrides: TypeAlias = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Change a setting: ppo.learning_rate=1e-4.")
]
Name: TypeAlias = Annotated[str | None, typer.Option("--name", help="Of the run's folder. Default: after the env.")]
RunsDir: TypeAlias = Annotated[Path, typer.Option("--runs-dir", help="Where folders of runs are.")]
Resume: TypeAlias = Annotated[
    str | None, typer.Option("--resume", metavar="RUN", help="Resume a run, by its folder or name.")
]
From: TypeAlias = Annotated[
    str | None,
    typer.Option("--from", metavar="RUN", help="Begin with weights and statistics of a run, or a checkpoint."),
]
Agent: TypeAlias = Annotated[str, typer.Argument(metavar="RUN", help="Folder or name of a run, or a checkpoint.")]
Member: TypeAlias = Annotated[int | None, typer.Option("--member", min=0, help="Of a population. Default: the best.")]
Best: TypeAlias = Annotated[bool, typer.Option("--best", help="The best checkpoint instead of the last.")]
Trusted: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--trust", metavar="MODULE", help="Import code of this module where a file names it; repeatable."),
]


def read_config(
    config: Path | None, env: str | None, overrides: list[str] | None, trusted: list[str] | None = None
) -> Config:
    """The configuration given by a command's options.

    Raises:
        CommandError: No option gives one, or the file does not exist.
    """
    from driftproof.config import load

    if config is None and env is None and not overrides:
        raise CommandError("give a CONFIG file, or --env ID; `driftproof config` shows all settings")
    if config is not None and not config.exists():
        raise CommandError(f"{config}: there is no such file; an environment is given as --env ID")
    return load(config, changes(env, overrides), trust_in(trusted))


def trust_in(modules: list[str] | None) -> Trust:
    """The modules that the user trusts; they may be in the working directory.

    Raises:
        CommandError: A name is not that of a module.
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
    # In quotes, since a colon has a meaning in YAML.
    return [*([] if env is None else [f"env.id={json.dumps(env)}"]), *(overrides or [])]


def check_resume(
    resume: str | None, config: Path | None, env: str | None, name: str | None, origin: str | None = None
) -> None:
    """Refuse options that define a run together with ``--resume``."""
    options = {"CONFIG": config, "--env": env, "--name": name, "--from": origin}
    given = [option for option, value in options.items() if value is not None]
    if resume is not None and given:
        raise CommandError(f"--resume uses the configuration in the run's folder: leave out {', '.join(given)}")
