"""HTML reports of runs: a single self-contained file that needs no network."""

from driftproof.report.writing import write_report

__all__ = ["write_report"]
