"""The command line: ``driftproof --help``."""

from driftproof.cli.app import main

__all__ = ["main"]
