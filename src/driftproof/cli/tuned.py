"""Results of ``driftproof tune``: the best values, ``best.yaml``, and ``--confirm``."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from driftproof._text import shortlist, table
from driftproof.cli import runs, scopes
from driftproof.cli.backtesting import trials_of
from driftproof.cli.errors import CommandError, say
from driftproof.cli.provenance import provenance
from driftproof.cli.view import number
from driftproof.runs import CONFIG, EVALUATION, own_file
from driftproof.runs.sources import write_sources

if TYPE_CHECKING:
    from driftproof.config import Config
    from driftproof.pbt import PBTRunner
    from driftproof.runs.events import Event

BEST = "best.yaml"
CONFIRMED = "confirm.json"
_EDGE = 0.02
"""Fraction of a search range, on its scale, within which a value counts as at the edge."""
_SEEDS_FROM = 5_000
"""Offset added to the run's seed for ``--confirm``; members use seeds 10,000 apart."""
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""97.5% quantiles of Student's t distribution with 1 to 30 degrees of freedom."""


def show_best(runner: PBTRunner, settings: Config, folder: Path) -> None:
    """Print the best member's hyper-parameters, and write them as a configuration for training."""
    from driftproof.config.tuned import configured

    best = runner.best_member
    member = runner.scheduler.members[best]
    values = {item.name: member.hyperparams[item.name] for item in settings.pbt.hyperparams}
    if not values:
        return
    past = list(ancestry(runner.scheduler.events, best))
    rows = [("hyper-parameter", "best", "configured", "searched", "history of the best member and its ancestors")]
    for item in settings.pbt.hyperparams:
        steps = [hyperparams[item.name] for hyperparams in past if item.name in hyperparams]
        changes = [number(value) for i, value in enumerate(steps) if i == 0 or value != steps[i - 1]]
        before = configured(settings, item.name)
        told = number(values[item.name]) + (" (at the edge)" if _is_at_edge(item, values[item.name]) else "")
        rows.append((item.name, told, "default" if before is None else number(before), _range(item), _arrows(changes)))
    score = number(member.performance)
    metric = settings.pbt.metric_name.replace("_", " ").replace("mean reward", "training return")
    say(f"best of {len(runner.updates)} members: member {best}, {metric} {score}")
    say(table(rows))
    say(f"to train with them: driftproof train {write_best(settings, values, folder)}")


def write_best(settings: Config, values: Mapping[str, Any], folder: Path) -> Path:
    """Write a configuration with these hyper-parameters; returns its path."""
    from driftproof.config import dumps
    from driftproof.config.ownership import mark, owned
    from driftproof.config.tuned import tuned
    from driftproof.state import write_atomically

    found = ", ".join(f"{name} {number(value)}" for name, value in values.items())
    content = f"# Found by driftproof tune: {found}\n{dumps(tuned(settings, values))}".encode()
    current = own_file(folder, CONFIG).read_bytes()
    if (mine := owned(folder, current)) is not None:
        mark(folder, [current, content], mine.home)
    path = own_file(folder, BEST)
    write_atomically(path, [content], follow_links=False)
    return path


def trials_behind(config: Path | None) -> int:
    """Number of trials that a configuration was selected from: those of the search, if it is a ``best.yaml``."""
    from driftproof.runs import is_population

    is_best = config is not None and config.name == BEST and is_population(config.parent)
    return trials_of(config.parent) if config is not None and is_best else 1


def ancestry(events: Sequence[Event], member: int) -> Iterator[Mapping[str, Any]]:
    """Hyper-parameters of a member and of the members whose state it inherited, oldest first."""
    found: list[Mapping[str, Any]] = []
    until, is_undone = math.inf, False
    for event in reversed(events):
        if event.member != member or event.step > until:
            continue
        if event.kind == "undo":
            is_undone = True
        elif event.kind in ("exploit", "replace") and is_undone:
            is_undone = False
        elif event.hyperparams:
            found.append(event.hyperparams)
            if event.kind in ("exploit", "replace") and event.donor is not None:
                member, until = event.donor, event.step if event.donor_step is None else event.donor_step
    return iter(found[::-1])


def confirm(settings: Config, folder: Path, seeds: int) -> None:
    """Train agents with the best values and with the configured ones, and print the difference.

    Args:
        settings: Configuration of the search.
        folder: Its run folder, with ``best.yaml``; the agents are trained in its subfolder ``confirm``.
        seeds: Number of agents with each set of values.
    """
    from driftproof.config import load
    from driftproof.config.tuned import tuned

    if not (folder / BEST).is_file():
        raise CommandError(f"there is no {BEST} in {folder}: no hyper-parameters were searched; set pbt.hyperparams")
    kinds = {"best": load(own_file(folder, BEST), trusted=settings.trust), "configured": tuned(settings, {})}
    means: dict[str, list[float]] = {name: [] for name in kinds}
    for i in range(seeds):
        for name, config in kinds.items():
            means[name].append(_trained(config, settings.run.seed + _SEEDS_FROM + 100 * i, folder, f"{name}-{i}"))
    result = compared(means["best"], means["configured"])
    scope = json.loads((folder / "confirm" / "best-0" / EVALUATION).read_text())["scope"]
    show_difference(result, scope)
    _write(folder, {"scope": scope, **result})


def _trained(config: Config, seed: int, folder: Path, name: str) -> float:
    """Mean evaluation return of an agent, which is trained first unless it has been already."""
    from driftproof.cli import training

    run = config.run.model_copy(update={"seed": seed, "evaluation_episodes": config.run.evaluation_episodes or 20})
    config = config.model_copy(update={"run": run})
    place = folder / "confirm" / name
    if not (place / CONFIG).is_file():
        runs.create(place.parent, name, config, "train")
        write_sources(place, provenance(config, scopes.training_histories(config)))
    if not (place / EVALUATION).is_file():
        training.run(training.built(config), config, place)
    mean = json.loads((place / EVALUATION).read_text())["mean"]
    return math.nan if mean is None else float(mean)


def compared(best: Sequence[float], configured: Sequence[float]) -> dict[str, Any]:
    """Difference of mean returns, paired by seed, with its 95% interval by Student's t; ``None`` for a single seed."""
    differences = [a - b for a, b in zip(best, configured, strict=True)]
    count = len(differences)
    mean = math.fsum(differences) / count
    interval = None
    if count > 1:
        spread = math.sqrt(math.fsum((each - mean) ** 2 for each in differences) / (count - 1) / count)
        half = spread * (_T[count - 2] if count - 2 < len(_T) else 1.96 + 2.4 / (count - 1))
        interval = [mean - half, mean + half]
    return {"best": list(best), "configured": list(configured), "difference": mean, "interval": interval}


def show_difference(result: Mapping[str, Any], scope: Mapping[str, Any]) -> None:
    """Print the result of ``--confirm``."""
    scopes.show(scope)
    rows = [("", "return", "of each seed")]
    for name in ("best", "configured"):
        values = result[name]
        rows.append(
            (name, f"{math.fsum(values) / len(values):.4g}", shortlist([f"{value:.4g}" for value in values], 10))
        )
    say(table(rows))
    difference, interval, count = result["difference"], result["interval"], len(result["best"])
    if interval is None:
        say(f"difference of returns {difference:.4g}; no interval: only one seed")
        return
    low, high = interval
    verdict = (
        "the search found better values"
        if low > 0
        else "the search found worse values"
        if high < 0
        else (f"{count} seeds are too few to tell which are better")
    )
    say(f"difference of returns {difference:.4g}, 95% interval [{low:.4g}, {high:.4g}] over {count} seeds: {verdict}")


def _write(folder: Path, result: Mapping[str, Any]) -> None:
    from driftproof.cli.evaluation import write_json

    path = own_file(folder, CONFIRMED)
    write_json(path, result)
    say(f"written to {path}; the agents are in {folder / 'confirm'}")


def _is_at_edge(item: Any, value: Any) -> bool:
    if item.min_value is None or item.max_value is None or not isinstance(value, int | float):
        return False
    low, high, at = (float(each) for each in (item.min_value, item.max_value, value))
    if item.is_log_scale:
        low, high, at = math.log(low), math.log(high), math.log(at)
    return min(at - low, high - at) <= _EDGE * (high - low)


def _range(item: Any) -> str:
    if item.values is not None:
        return shortlist([number(value) for value in item.values], 6)
    scale = ", log scale" if item.is_log_scale else ""
    return f"{number(item.min_value)} to {number(item.max_value)}{scale}"


def _arrows(values: Sequence[str]) -> str:
    shown = values if len(values) <= 8 else [*values[:3], "…", *values[-4:]]
    return " → ".join(shown)
