"""Who took over from whom: descents, and their order in the picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from driftproof.pbt import Event, read_events
from driftproof.report.lineage import Stay, descent, lineage, order, takeovers
from driftproof.report.runs import Run, read_run
from driftproof.report.series import Life
from tests.report.folders import STEPS, row, write_population


def exploit(member, step, donor, donor_step=None, kind="exploit"):
    return Event(kind, member, step, donor=donor, donor_step=step if donor_step is None else donor_step)


def run_of(events, members=4, updates=10):
    lives = {member: Life([row(update, member) for update in range(1, updates + 1)]) for member in range(members)}
    starts = [Event("start", member, 0, hyperparams={"lr": 10.0**-member}) for member in range(members)]
    return Run("run", Path("run"), lives, Life([]), events=[*starts, *events])


def test_descent_goes_through_donors_of_donors():
    taken = [exploit(1, 4, 0), exploit(2, 6, 1)]
    assert descent(taken, 2, 10) == [Stay(0, 0, 4), Stay(1, 4, 6), Stay(2, 6, 10)]
    assert descent(taken, 3, 10) == [Stay(3, 0, 10)]


def test_a_donor_gives_what_it_had_before_its_own_takeover_of_that_update():
    taken = [exploit(1, 4, 0), exploit(2, 4, 1)]
    assert descent(taken, 2, 10) == [Stay(1, 0, 4), Stay(2, 4, 10)]


def test_a_donor_gives_what_it_reported_last():
    # 1 gave what it had at update 3, before it became 0 at update 4.
    taken = [exploit(1, 4, 0), exploit(2, 6, 1, donor_step=3)]
    assert descent(taken, 2, 10) == [Stay(1, 0, 3), Stay(2, 6, 10)]


def test_two_who_take_over_from_each_other_have_an_end():
    taken = [exploit(0, 2, 1), exploit(1, 4, 0), exploit(0, 6, 1), exploit(1, 6, 0)]
    assert [stay.member for stay in descent(taken, 0, 10)] == [1, 0, 1, 0]


def test_what_was_taken_back_did_not_happen():
    events = [exploit(1, 2, 0), exploit(2, 4, 0), Event("undo", 2, 4, donor=0), exploit(3, 4, 0, kind="replace")]
    assert takeovers(events) == [events[0], events[3]]


def test_a_takeover_from_nobody_is_none():
    run = run_of([Event("exploit", 1, 4)])
    assert takeovers(run.events) == []
    lineage(run, "Lineage", 0)


def test_descents_agree_with_the_schedulers(tmp_path):
    run = read_run(write_population(tmp_path / "run", members=8, updates=20), "run")
    taken = takeovers(read_events(tmp_path / "run" / "population.json"))
    assert len(taken) > 5
    # The reference: carry an origin along with every take-over, all of one update at once.
    origin = {member: [member] for member in range(8)}
    for step in sorted({event.step for event in taken}):
        now = [event for event in taken if event.step == step]
        before = dict(origin)
        for event in now:
            origin[event.member] = [*before[event.donor], event.member]
    for member in range(8):
        assert [stay.member for stay in descent(taken, member, 20)] == origin[member]
        assert sorted(order(run, taken)) == list(range(8))


def test_families_are_neighbours_and_the_best_is_on_top():
    run = run_of([exploit(0, 4, 3), exploit(1, 8, 3)])  # returns rise with the member
    assert run.best == 3
    assert order(run, takeovers(run.events)) == [3, 0, 1, 2]


def test_the_picture_shows_every_takeover():
    events = [exploit(0, 4, 3), exploit(1, 8, 2), Event("restart", 2, 6, detail="killed <b>"), Event("explore", 3, 2)]
    run = run_of(events)
    chart = lineage(run, "Lineage", 0)
    marks = {trace["name"]: trace for trace in chart.data if trace.get("mode") == "markers"}
    assert set(marks) == {"take-over", "mutation", "restart"}
    assert len(marks["take-over"]["x"]) == 2
    assert "member 0 took over from 3" in marks["take-over"]["text"][0]
    assert "killed &lt;b&gt;" in marks["restart"]["text"][0]
    assert marks["restart"]["x"] == [6 * STEPS]
    labels = chart.layout["yaxis"]["ticktext"]
    assert labels == ["3", "0", "2", "1"]
    assert [labels[y] for y in marks["take-over"]["y"]] == ["0", "1"]


def test_cells_are_coloured_by_what_was_so_then():
    run = run_of([exploit(0, 4, 3)])
    chart = lineage(run, "Lineage", 0)
    assert chart.choices == ["return", "lr"]
    returns, rates = chart.data[:2]
    lane = chart.layout["yaxis"]["ticktext"].index("2")
    assert returns["x"] == [update * STEPS for update in range(11)]
    assert returns["z"][lane] == [10 * update + 2 for update in range(1, 11)]
    assert rates["customdata"][lane] == [0.01] * 10
    assert np.allclose(rates["z"][lane], -2)  # on a scale of powers


@pytest.mark.parametrize("members", [1, 2, 32, 100])
def test_any_number_of_members_has_a_picture(members):
    chart = lineage(run_of([], members=members), "Lineage", 0)
    assert len(chart.data[0]["z"]) == members
    assert len(chart.layout["yaxis"]["ticktext"]) <= 64


def test_long_runs_have_cells_of_several_updates():
    run = run_of([], members=2, updates=1000)
    values = np.array(lineage(run, "Lineage", 0).data[0]["z"], dtype=float)
    assert values.shape[1] <= 240
    assert np.isfinite(values).all()
    assert (np.diff(values) > 0).all()
