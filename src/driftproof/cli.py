"""The command line: ``driftproof --help``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from driftproof.state import CheckpointError, legacy
from driftproof.state import inspect as inspect_file

app = typer.Typer(
    help="Recurrent distributional PPO that keeps learning when the world changes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

USER_ERROR = 2
"""Exit code when a file or an argument is at fault."""
DAMAGED = 1
"""Exit code of ``inspect`` for a file that cannot be loaded."""


@app.callback()
def _main() -> None:
    pass


@app.command()
def inspect(
    file: Annotated[Path, typer.Argument(help="A checkpoint.")],
    leaves: Annotated[bool, typer.Option("--leaves", help="List every tensor and value.")] = False,
) -> None:
    """What a checkpoint holds, and whether it is intact. Nothing in it is run."""
    inspection = inspect_file(file)
    typer.echo(inspection.render(leaves=leaves))
    if not inspection.intact:
        raise typer.Exit(DAMAGED)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="A file of an earlier format, or of Stable-Baselines3.")],
    target: Annotated[Path, typer.Argument(help="The checkpoint to write.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the target if it exists.")] = False,
) -> None:
    """Write today's format from an older file, with every tensor in it. No code in it is run."""
    if target.exists() and not overwrite:
        raise FileExistsError(f"{target} exists: give another name, or --overwrite")
    typer.echo("\n".join(legacy.convert(source, target)))


def main() -> None:
    """Run a command; mistakes of users are one line."""
    try:
        app()
    except (CheckpointError, OSError) as error:
        print(f"driftproof: {error}", file=sys.stderr)
        sys.exit(USER_ERROR)


if __name__ == "__main__":
    main()
