"""``driftproof runs``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import yaml

from driftproof import _yaml
from driftproof._files import DAMAGES, RunFolderError, open_regular, parse_json, read_bytes
from driftproof._text import printable, table
from driftproof.cli.errors import CommandError, say
from driftproof.cli.options import RunsDir
from driftproof.cli.view import number
from driftproof.runs import CONFIG, EVALUATION, METRICS, RETURN, is_population
from driftproof.runs.folder import is_in_use

_TAIL = 2**18
"""Number of bytes read from the end of the metrics file."""


def list_runs(runs_dir: RunsDir = Path("runs")) -> None:
    """List runs: environment, steps, training return, evaluation and its scope, and state."""
    folders = sorted(path.parent for path in runs_dir.glob(f"*/{CONFIG}"))
    if not folders:
        raise CommandError(f"there are no runs in {runs_dir}; give another folder with --runs-dir")
    head = ("run", "environment", "steps", "training return", "evaluation", "evaluated", "state")
    say(table([head, *(_row(folder) for folder in folders)]))


def _row(folder: Path) -> tuple[str, ...]:
    try:
        config = _config(folder)
        last = _last_rows(folder)
        evaluation = _evaluation(folder)
    except (*DAMAGES, RunFolderError, OSError, yaml.YAMLError) as error:
        return (printable(folder.name, 40), "", "", "", "", "", f"damaged: {printable(error, 60)}")
    env, run = config.get("env"), config.get("run")
    env_id = env.get("id", "") if isinstance(env, dict) else env
    total = run.get("total_timesteps") if isinstance(run, dict) else None
    steps = min((int(row.get("step", 0)) for row in last.values()), default=0)
    returns = [value for row in last.values() if isinstance(value := row.get(RETURN), int | float)]
    scope = evaluation.get("scope") or {}
    seen = scope.get("in_sample") if isinstance(scope, dict) else None
    on = "IN SAMPLE" if seen else "not labelled" if seen is None else "not seen in training"
    mean = evaluation.get("mean")
    members = f", {len(last)} members" if is_population(folder) else ""
    is_done = isinstance(total, int) and steps >= total
    return (
        printable(folder.name, 40),
        printable(f"{env_id}{members}", 50),
        f"{steps:,}" + (f" of {total:,}" if isinstance(total, int) and not is_done else ""),
        number(max(returns)) if returns else "–",
        number(float(mean)) if isinstance(mean, int | float) else "–",
        on if isinstance(mean, int | float) else "",
        "training" if is_in_use(folder) else "done" if is_done else "stopped" if last else "not started",
    )


def _config(folder: Path) -> dict[str, Any]:
    config = _yaml.value(read_bytes(folder / CONFIG, _yaml.MAX_BYTES).decode("utf-8"))
    return config if isinstance(config, dict) else {}


def _evaluation(folder: Path) -> dict[str, Any]:
    if not os.path.lexists(folder / EVALUATION):
        return {}
    found = parse_json(read_bytes(folder / EVALUATION), allow_nan=True)
    return found if isinstance(found, dict) else {}


def _last_rows(folder: Path) -> dict[int, dict[str, Any]]:
    """The last logged row of each member."""
    if not os.path.lexists(folder / METRICS):
        return {}
    with open_regular(folder / METRICS) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - _TAIL, 0))
        lines = file.read().decode("utf-8", "replace").splitlines()
    rows = {}
    for line in lines[1:] if size > _TAIL else lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue  # cut off by an interruption
        if isinstance(row, dict) and isinstance(row.get("member"), int):
            rows[row["member"]] = row
    return rows
