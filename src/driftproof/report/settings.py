"""The section about how runs were configured, and what differs between them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from driftproof.report.charts import Absent, Chart, Section, Table, Text
from driftproof.report.runs import Run

_MOST_DIFFERENCES = 60


def configuration(runs: Sequence[Run]) -> Section | Absent:
    """Differences between runs, then all settings and versions."""
    title = "Configuration"
    parts: list[Chart | Table | Text] = []
    if len(runs) > 1:
        parts += _differences(runs)
    versions = _versions(runs)
    parts += [versions] if versions else []
    parts += [Text(f"All settings: {run.name}", run.config_text) for run in runs if run.config_text]
    if not parts:
        return Absent(title, "no run tells its configuration (config.yaml) or versions (a checkpoint)")
    return Section(title, "What the runs were told to do, and with which versions.", parts)


def _differences(runs: Sequence[Run]) -> list[Table]:
    known = [run for run in runs if run.config]
    flat = [_flattened(run.config) for run in known]
    names = list(dict.fromkeys(name for values in flat for name in values))
    rows = [[name, *(values.get(name, "–") for values in flat)] for name in names]
    different = [row for row in rows if len(set(row[1:])) > 1]
    if len(known) < 2 or not different:
        return []
    more = len(different) - _MOST_DIFFERENCES
    caption = f"And {more} more." if more > 0 else ""
    head = ["setting", *(run.name for run in known)]
    return [Table("What differs", head, different[:_MOST_DIFFERENCES], caption, is_text=True)]


def _versions(runs: Sequence[Run]) -> Table | None:
    known = [run for run in runs if run.versions]
    if not known:
        return None
    names = list(dict.fromkeys(name for run in known for name in run.versions))
    rows = [[name, *(run.versions.get(name, "–") for run in known)] for name in names]
    head = ["library", *(run.name for run in known)]
    return Table("Versions", head, rows, "Of the libraries that wrote the newest checkpoint.", is_text=True)


def _flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    result: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            result |= _flattened(value, f"{prefix}{key}.")
        else:
            result[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value, default=str)
    return result
