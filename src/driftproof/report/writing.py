"""From folders of runs to a page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from driftproof.report.backtest import backtests
from driftproof.report.bundles import bundled
from driftproof.report.charts import Absent, Section
from driftproof.report.drift import drift, forgetting
from driftproof.report.findings import Evidence, Verdict, judged
from driftproof.report.learning import learning
from driftproof.report.outcomes import evaluation, robustness
from driftproof.report.page import render
from driftproof.report.population import hyperparams, population
from driftproof.report.runs import Run, read_runs
from driftproof.report.settings import configuration
from driftproof.report.signs import (
    CRITICS,
    OPTIMIZER,
    POLICY,
    QUANTILES,
    UTILITIES,
    fans,
    others,
    signs,
)
from driftproof.report.summary import cards
from driftproof.runs import EVALUATION
from driftproof.state import write_atomically


def write_report(runs: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str]) -> Path:
    """Write one HTML file that shows what runs did, side by side. It needs nothing but itself, and no network.

    Args:
        runs: Folders of runs, of single agents and of populations. Those of agents that differ in nothing but their
            seed are seen as one, with an interval.
        output: The file; is replaced if it exists.

    Returns:
        Its path.

    Raises:
        FileNotFoundError: A folder, or what makes it one of a run, is missing.
        RunFolderError: A file of a run is damaged; which, and where.
        OSError: The page cannot be written.
    """
    # What was logged may be anything, and where it is no number any more there is a gap.
    with np.errstate(all="ignore"):
        text = _page(read_runs(runs))
    write_atomically(output, [text.encode(errors="replace")])
    return Path(output)


def _page(found: Sequence[Run]) -> str:
    bundles = bundled(found)
    ordered = [run for bundle in bundles for run in bundle.runs]
    fan = fans(
        ordered,
        QUANTILES,
        "What the critics expect",
        "Mean quantiles of the return from here on, over a rollout. Line: median; band: from the 10th to the 90th.",
    )
    utility = fans(
        ordered,
        UTILITIES,
        "UPGD: utility of weights",
        "Line: median; band: from the 10th to the 90th percentile. Weights of high utility are protected.",
    )
    sections: list[Section | Absent] = [
        learning(bundles),
        evaluation(bundles),
        *backtests(bundles),
        robustness(bundles),
        drift(bundles),
        forgetting(bundles),
        population(bundles),
        hyperparams(bundles),
        signs("Critics", "Two critics foresee distributions of returns.", CRITICS, bundles, fan),
        signs("Policy", "How far updates go, and how much the policy explores.", POLICY, bundles),
        signs(
            "Optimizer",
            "Gradient scaling (VGS) and the protection of useful weights (UPGD).",
            OPTIMIZER,
            bundles,
            utility,
        ),
        others(bundles),
        configuration(ordered),
    ]
    notes = [f"{run.name}: {note}" for run in ordered for note in run.notes]
    return render(cards(bundles), [_verdict(run) for run in ordered], sections, notes)


def _verdict(run: Run) -> Verdict:
    """What checks find in a run; of a population, in its best member."""
    life = run.members[run.best]
    metrics = {name: life.column(name)[1] for name in life.metrics}
    name = f"{run.name}, member {run.best}" if run.is_population else run.name
    return judged(name, Evidence(metrics, run.config, run.evaluation, run.labels.get(EVALUATION)))
