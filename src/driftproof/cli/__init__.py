"""The command line: ``driftproof --help``."""

import sys

from driftproof.cli.interrupts import interrupts


def main() -> None:
    """Run a command. Signals are handled even while slow imports run."""
    with interrupts:
        try:
            from driftproof.cli.app import main as run

            run()
        except KeyboardInterrupt:
            with interrupts.shielded():
                from driftproof.cli.errors import INTERRUPTED

                print("driftproof: interrupted", file=sys.stderr)
                sys.exit(INTERRUPTED)


__all__ = ["main"]
