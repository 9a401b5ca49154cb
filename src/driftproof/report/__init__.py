"""One page that shows what runs did: it needs no network, no server, and nothing that is not in its file."""

from driftproof.report.writing import write_report

__all__ = ["write_report"]
