"""``driftproof inspect`` and ``driftproof convert``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from driftproof.cli.errors import USER_ERROR


def inspect(
    file: Annotated[Path, typer.Argument(help="A checkpoint.")],
    leaves: Annotated[bool, typer.Option("--leaves", help="List every tensor and value.")] = False,
) -> None:
    """What a checkpoint holds, and whether it is intact. Nothing in it is run."""
    from driftproof.state import inspect as inspect_file

    inspection = inspect_file(file)
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

    if target.exists() and not overwrite:
        raise FileExistsError(f"{target} exists: give another name, or --overwrite")
    typer.echo("\n".join(legacy.convert(source, target)))
