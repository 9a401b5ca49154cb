"""``driftproof inspect`` and ``driftproof convert``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from driftproof.cli import agents
from driftproof.cli.errors import USER_ERROR, CommandError
from driftproof.cli.options import Agent, Best, Member, RunsDir


def inspect(
    run: Agent,
    leaves: Annotated[bool, typer.Option("--leaves", help="List every tensor and value.")] = False,
    member: Member = None,
    best: Best = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """What a checkpoint holds, and whether it is intact. Nothing in it is run."""
    from driftproof.state import inspect as inspect_file

    inspection = inspect_file(agents.find(run, runs_dir, member, best).checkpoint)
    typer.echo(inspection.render(leaves=leaves))
    if not inspection.intact:
        raise typer.Exit(USER_ERROR)


def convert(
    source: Annotated[Path, typer.Argument(help="A file of an earlier format, or of Stable-Baselines3.")],
    target: Annotated[Path, typer.Argument(help="The checkpoint to write.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the target if it exists.")] = False,
) -> None:
    """Write today's format from an older file. Every tensor goes over; no code in it is run."""
    from driftproof.state import legacy

    if _is_of_today(source):
        raise CommandError(f"{source} has today's format already: there is nothing to convert")
    if target.exists() and not overwrite:
        raise FileExistsError(f"{target} exists: give another name, or --overwrite")
    typer.echo("\n".join(legacy.convert(source, target)))


def _is_of_today(path: Path) -> bool:
    from driftproof.state import CheckpointError, inspect

    try:
        inspect(path)
    except CheckpointError:
        return False
    return True
