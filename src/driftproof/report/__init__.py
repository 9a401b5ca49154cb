"""HTML reports of runs: a single self-contained file that needs no network."""

from driftproof._requirements import require

require("driftproof.report", "report", "gymnasium", "plotly", "pydantic", "stable_baselines3", "yaml")

from driftproof.report.writing import write_report

__all__ = ["write_report"]
