"""What a terminal shows, and the lines where there is none."""

from __future__ import annotations

import pytest
from rich.console import Console

from driftproof.cli.view import AgentStatus, PopulationStatus, number, sparkline
from driftproof.pbt import PBTRunner
from tests.pbt.populations import config, make_agent


def shown(status, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    console = Console(width=width)
    with console.capture() as capture:
        console.print(status.renderable())
    return capture.get()


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """A population that was watched, and the lines about it."""
    searched = ["learning_rate", "optimizer.sigma"]
    status, lines = PopulationStatus("runs/some", 3, 6, searched, 32, "return"), []
    runner = PBTRunner(config(), make_agent, 6, tmp_path_factory.mktemp("run"), synchronous=True)

    def watch(runner):
        status.update(runner)
        lines.extend(status.lines())

    runner.on_change = watch
    runner.run()
    return status, lines, runner


def test_every_report_and_every_decision_is_a_line(told):
    _, lines, runner = told
    reports = [line for line in lines if "update" in line]
    assert len(reports) == 9
    assert reports[-1].startswith(f"member {reports[-1].split()[1]}  update 6 of 6  return ")
    assert all(sign in reports[-1] for sign in ("VGS factor", "critic divergence", "KL", "entropy"))
    took_over = [event for event in runner.scheduler.events if event.kind == "exploit"]
    assert took_over
    assert [line.split("  ")[:2] for line in lines if "exploits member" in line] == [
        [f"member {event.member}", f"exploits member {event.donor}"] for event in took_over
    ]


def test_a_population_is_legible_on_narrow_and_wide_terminals(told, monkeypatch):
    status, _, runner = told
    last = {event.member: event for event in runner.scheduler.events if event.kind == "exploit"}
    for width in (80, 140):
        text = shown(status, width, monkeypatch)
        assert max(map(len, text.splitlines())) <= width
        assert "…" not in text
        for member, event in last.items():
            assert f"← {event.donor} at {event.step}" in text, member
        for member in range(3):
            assert number(runner.scheduler.members[member].hyperparams["learning_rate"]) in text
        assert ("entropy" in text) == (width == 140)
    status.note = "finishing"
    assert "finishing" in shown(status, 80, monkeypatch)


def test_one_agent(monkeypatch):
    status = AgentStatus("runs/one", 0, 1000)
    assert "0 of 1,000" in shown(status, 80, monkeypatch)
    for step in range(1, 5):
        status.update({"step": step * 100, "rollout/ep_rew_mean": step, "train/entropy_loss": -0.5, "drift/phase": 2.0})
    text = shown(status, 80, monkeypatch)
    for part in ("400 of 1,000", "steps/s", "return", "4", "entropy", "0.5", "▁▃▆█", "phase 2"):
        assert part in text, part
    assert status.lines()[0].startswith("step 400 of 1,000  ")
    assert status.lines() == [], "not too often"
    status.update({"step": 1000})
    assert status.lines(), "the end is told"


def test_drift_alarms_and_responses_are_told(monkeypatch):
    status = AgentStatus("runs/one", 0, 1000)
    quiet = {"drift/alarm": 0.0, "drift/alarms": 0.0, "drift/level": 0.0, "drift/cusum": 0.1, "drift/calibration": 0.2}
    status.update({"step": 100, "drift/phase": 1.0, "drift/gravity": 9.8, **quiet})
    text = shown(status, 80, monkeypatch)
    assert "phase 1; no alarm" in text
    assert "drift/gravity" in text
    assert "cusum" not in text
    status.update(
        {"step": 200, "drift/phase": 2.0, **quiet, "drift/alarm": 1.0, "drift/alarms": 1.0, "drift/level": 1.0}
    )
    status.update({"step": 500, "drift/phase": 2.0, **quiet, "drift/alarms": 1.0, "drift/level": 2.0})
    told = "phase 2; alarm 1, 300 steps ago; partly fresh weights"
    assert told in shown(status, 80, monkeypatch)
    assert told in status.lines()[0]
    status.update({"step": 1000, "drift/anchor_moves": 3.0, "drift/level": float("nan"), "drift/trial": 1.0})
    assert "drift alarm, 800 steps ago; tries earlier weights; shifts followed 3" in status.lines()[0]


def test_phases_and_alarms_of_members_are_columns(told, monkeypatch):
    _, _, runner = told
    status = PopulationStatus("runs/some", 3, 6, [], 32, "return")
    status.update(runner)
    assert "alarms" not in shown(status, 140, monkeypatch)
    monkeypatch.setitem(runner.latest, 1, {**runner.latest[1], "drift/phase": 17.0, "drift/alarms": 23.0})
    status.update(runner)
    text = shown(status, 140, monkeypatch)
    for part in ("phase", "alarms", "17", "23"):
        assert part in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((0.0, "0"), (3, "3"), (0.12345, "0.123"), (-12.34, "-12.3"), (1234567.0, "1,234,567"), (0.0005, "5e-4")),
        *((6.46e-05, "6.5e-5"), (None, "–"), (float("nan"), "–"), ("adam", "adam"), (True, "True")),
    ],
)
def test_numbers_are_short(value, text):
    assert number(value) == text


def test_sparklines_survive_what_does_not_change():
    assert sparkline([1, 1, 1]) == "▁▁▁"
