"""The command line: ``driftproof --help``."""

import sys

from driftproof._requirements import MissingPackageError, require
from driftproof.cli.interrupts import interrupts


def main() -> None:
    """Run a command. Signals are handled even while slow imports run."""
    with interrupts:
        try:
            require("the command line", "cli", "pydantic", "rich", "typer", "yaml")
            from driftproof.cli.app import main as run

            run()
        except MissingPackageError as error:
            sys.exit(f"driftproof: {error}")
        except KeyboardInterrupt:
            with interrupts.shielded():
                from driftproof.cli.errors import INTERRUPTED

                print("driftproof: interrupted", file=sys.stderr)
                sys.exit(INTERRUPTED)


__all__ = ["main"]
