"""Findings: each check with metrics that trigger it, and with some that do not."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from driftproof.report import findings, write_report
from driftproof.report.counterfactual import outcomes
from driftproof.report.findings import CHECKS, Evidence, judged
from driftproof.report.results import Label, Score
from driftproof.report.runs import read_run
from driftproof.runs.events import Event, write_events
from driftproof.runs.folder import RunFolder
from driftproof.runs.sources import File, History, Sources, write_sources
from tests.report.folders import STEPS, row, write_agent, write_population

ROOT = Path(__file__).parents[2]
UPDATES = 40
UNSEEN = Label("evaluated out of sample on x", False, is_history=True)
NEW = Label("evaluated in new episodes", False)


def constant(value):
    return np.full(UPDATES, float(value))


def some(share, value, other=0.0):
    """One value in the first updates, and another one in the others."""
    return np.where(np.arange(UPDATES) < share * UPDATES, float(value), float(other))


def score(mean, width=1.0, name="agent", length=None):
    return Score(name, mean, mean - width, mean + width, length=length)


def logged(label=None, evaluation=(), config=None, **metrics):
    return Evidence(
        {name.replace("__", "/"): values for name, values in metrics.items()}, config or {}, evaluation, label
    )


HELD = score(4, name="buy and hold")
RANDOM, FLAT = score(20, name="random"), score(0, 0.1, name="flat")
TRAINED = {"rollout__ep_rew_mean": constant(100), "rollout__ep_len_mean": constant(10)}
CASES = {
    findings.in_sample: (logged(Label("x", True)), logged(UNSEEN)),
    findings.worse_than_baseline: (
        logged(evaluation=[score(15), RANDOM]),
        logged(evaluation=[score(25), RANDOM]),
    ),
    findings.worse_than_holding: (
        logged(evaluation=[score(3), HELD]),
        logged(evaluation=[score(5), HELD]),
    ),
    findings.training_gap: (
        logged(UNSEEN, [score(40, length=10)], **TRAINED),
        logged(UNSEEN, [score(160, length=20)], **TRAINED),
    ),
    findings.not_finite: (logged(train__loss=some(0.1, np.nan)), logged(train__loss=constant(1))),
    findings.skipped: (
        logged(train__skipped_minibatches=some(0.1, 1), train__optimizer_steps=constant(40)),
        logged(train__skipped_minibatches=constant(0)),
    ),
    findings.kl_above_target: (
        logged(train__approx_kl=constant(0.07), config={"ppo": {"target_kl": 0.02}}),
        logged(train__approx_kl=constant(0.05), config={"ppo": {"target_kl": 0.02}}),
    ),
    findings.entropy_collapse: (
        logged(train__entropy_loss=-some(0.5, 0.69, 0.01)),
        logged(train__entropy_loss=-some(0.5, 0.69, 0.1)),
    ),
    findings.std_collapse: (logged(train__std=some(0.5, 1, 0.01)), logged(train__std=some(0.5, 1, 0.2))),
    findings.explained_variance: (
        logged(train__explained_variance=constant(0.01)),
        logged(train__explained_variance=some(0.5, 0, 0.6)),
    ),
    findings.critic_warnings: (logged(critic__warning=some(0.3, 1)), logged(critic__warning=some(0.1, 1))),
    findings.vgs_at_cap: (
        logged(vgs__normalized_variance=some(0.3, 50, 5)),
        logged(vgs__normalized_variance=some(0.1, 50, 5)),
    ),
    findings.gate_spread: (logged(upgd__gate_std=constant(0.001)), logged(upgd__gate_std=constant(0.02))),
    findings.drift_alarms: (logged(drift__alarms=some(0.5, 0, 2)), logged(drift__alarms=constant(0))),
}


@pytest.mark.parametrize("check", CHECKS.values(), ids=lambda check: check.__name__)
def test_a_check_finds_what_it_is_for_and_nothing_else(check):
    wrong, right = CASES[check]
    found = check(wrong)
    assert found is not None
    assert all((found.title, found.evidence, found.threshold, found.remedy))
    assert re.search(r"\d", found.evidence) or check is findings.in_sample
    assert check(right) is None
    assert check(Evidence({})) is findings.NOT_CHECKED, "nothing was logged"
    assert [each.title for each in judged("run", wrong).findings] == [found.title]
    names = {each: name for name, each in CHECKS.items()}
    assert names[check] in judged("run", right).passed
    assert judged("run", right).findings == []
    assert len(judged("run", Evidence({})).unchecked) == len(CHECKS), "what was not logged is not in order"


@pytest.mark.parametrize("check", CHECKS.values(), ids=lambda check: check.__name__)
def test_the_guide_has_the_heading(check):
    found = check(CASES[check][0])
    headings = re.findall(r"^## (.*)$", (ROOT / findings.GUIDE).read_text(), re.MULTILINE)
    assert found.anchor in [heading.lower().replace(" ", "-") for heading in headings]


def test_thresholds_are_those_of_the_guide():
    text = (ROOT / findings.GUIDE).read_text()
    for threshold in ("20% of the updates", "below 0.05", "below 0.005", "below 5%", "above 0.1, or above three times"):
        assert threshold in text
    assert (findings.AT_CAP, findings.EXPLAINED, findings.GATE_SPREAD) == (0.2, 0.05, 0.005)
    assert (findings.ENTROPY_LEFT, findings.SMALLEST_STD, findings.KL_OVER_TARGET) == (0.05, 0.05, 3)
    assert (findings.KL_WITHOUT_TARGET, findings.WARNED, findings.GAP) == (0.1, 0.2, 0.5)


def test_entropy_of_continuous_actions_is_not_judged():
    assert (
        findings.entropy_collapse(logged(train__entropy_loss=-some(0.5, 1.4, -2), train__std=constant(0.3)))
        is findings.NOT_CHECKED
    )


def test_separate_intervals_are_an_alarm():
    assert findings.worse_than_baseline(logged(evaluation=[score(15), RANDOM])).severity == "alarm"
    assert findings.worse_than_baseline(logged(evaluation=[score(19), RANDOM])).severity == "warning"
    assert findings.worse_than_baseline(logged(evaluation=[score(15, 0), RANDOM])).severity == "warning", "no interval"
    assert findings.worse_than_baseline(logged(evaluation=[score(-0.5), FLAT])).title == "Worse than staying flat"


def test_the_gap_is_per_step_in_a_history_only():
    """Twice the steps for 80% of the return: less than half per step."""
    evaluation = [score(80, length=20)]
    assert findings.training_gap(logged(UNSEEN, evaluation, **TRAINED)) is not None
    assert findings.training_gap(logged(NEW, evaluation, **TRAINED)) is None
    seen = logged(Label("x", True), [score(1)], **TRAINED)
    assert findings.training_gap(seen) is findings.NOT_CHECKED, "in sample: no gap to see"


def test_few_updates_are_not_judged():
    early = {"train/explained_variance": np.zeros(5), "upgd/gate_std": np.zeros(5), "train/approx_kl": np.ones(5)}
    assert judged("run", Evidence(early)).findings == []


def test_findings_are_on_top_of_the_page(tmp_path):
    run = write_agent(
        tmp_path / "run", **{"upgd/gate_std": 0.001, "train/skipped_minibatches": 1.0, "train/approx_kl": 0.01}
    )
    (run / "evaluation.json").write_text(
        json.dumps({"mean": 1.0, "interval": [0.5, 1.5], "scope": {"text": "IN SAMPLE on x", "in_sample": True}})
    )
    page = write_report([run], tmp_path / "report.html").read_text()
    assert page.index('<section id="findings">') < page.index('<section id="learning">')
    block = page[page.index('<section id="findings">') : page.index('<section id="learning">')]
    assert re.findall(r'<li class="(\w+)">', block) == ["alarm", "warning", "note"]
    assert '<a href="#optimizer">Optimizer</a> · <code>docs/watching_a_run.md#upgd</code>' in block
    assert "In order: losses finite" in block
    assert "Not checked, as too little was logged: " in block


def test_facts_of_the_run(tmp_path):
    run = write_agent(tmp_path / "run")
    history = History(split="train", symbols={"ACME": ("2000-01-03T00:00:00", "2004-12-31T00:00:00", 1250)})
    file = File(setting="env.kwargs.data", path="/data/prices.csv", sha256="0123456789ab" + "0" * 52, bytes=4321)
    write_sources(
        run, Sources(histories=[history], files=[file], started="2026-11-16T17:20:00+00:00", machine="Linux, 2 cores")
    )
    page = write_report([run], tmp_path / "report.html").read_text()
    for fact in (
        "<b>Started</b> 2026-11-16 17:20:00 UTC",
        "<b>Machine</b> Linux, 2 cores",
        "<b>Data</b> /data/prices.csv, 4,321 bytes, sha256 0123456789ab",
        "<b>Trained on</b> train split of ACME, 2000-01-03 to 2004-12-31, 1,250 bars",
        '<dt>Time</dt><dd>40 s<small class="word">128 steps/s',
    ):
        assert fact in page


def test_dates_of_a_configuration_are_written_as_such(tmp_path):
    runs = [write_agent(tmp_path / name, seed=i) for i, name in enumerate("ab")]
    for i, run in enumerate(runs):
        (run / "config.yaml").write_text(f"env:\n  id: x\n  kwargs:\n    dates: [2015-01-0{i + 1}, 2017-01-01]\n")
    page = write_report(runs, tmp_path / "report.html").read_text()
    assert "datetime" not in page[page.index("What differs") :]
    assert "2015-01-02" in page[page.index("What differs") :]


def written(path, returns, taken_at=6):
    """A population of two in which member 1 takes over from member 0, with these returns of member 1."""
    folder = RunFolder(path)
    with folder.locked():
        for update, value in enumerate(returns, 1):
            folder.log(0, [row(update)])
            folder.log(1, [row(update, 1, **{"rollout/ep_rew_mean": float(value)})])
    events = [Event("start", i, 0) for i in range(2)]
    write_events(path / "population.json", [*events, Event("exploit", 1, taken_at, donor=0, donor_step=taken_at)])
    return read_run(path, "run")


def test_takeovers_are_compared_with_the_members_own_trend(tmp_path):
    """Returns that rise by 10 an update anyway are not an achievement of the take-over."""
    (found,) = outcomes(written(tmp_path / "same", [10 * i for i in range(1, 13)]))
    assert (found.step, found.predicted, found.actual) == (6 * STEPS, pytest.approx(120), 120)
    (found,) = outcomes(written(tmp_path / "better", [10] * 6 + [50] * 6))
    assert (found.predicted, found.actual) == (pytest.approx(10), 50)
    assert outcomes(written(tmp_path / "early", [10] * 12, taken_at=3)) == [], "too few returns for a trend"


def test_the_page_tells_how_many_takeovers_beat_the_trend(tmp_path):
    page = write_report([write_population(tmp_path / "run", updates=48, interval=8)], tmp_path / "report.html")
    text = page.read_text()
    assert re.search(r"<dt>Take-overs</dt><dd>\d+<small class=\"word\">\d+ of \d+ beat their own trend", text)
    assert "weak members also recover by themselves" in text
    assert "Take-overs that helped" not in text
