"""The page: what is on it, for which runs, and that nothing in them can make it something else."""

from __future__ import annotations

import html
import json
import math
import re

import plotly.graph_objects as go
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driftproof.pbt import Event, PBTRunner, append_events
from driftproof.report import write_report
from driftproof.report.charts import label
from driftproof.runs.folder import RunFolder
from tests.pbt.populations import config, make_agent
from tests.report.folders import (
    HOSTILE,
    STEPS,
    figure,
    figures,
    row,
    titles,
    write_agent,
    write_hostile,
    write_outcomes,
    write_population,
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A population that was really trained."""
    folder = tmp_path_factory.mktemp("runs") / "trained"
    PBTRunner(config(), make_agent, 6, folder, synchronous=True).run()
    return folder


def sections(page):
    return re.findall(r'<section id="[a-z-]+"><h2>(.*?)</h2>', page.read_text())


def assert_valid(page):
    """All figures are such as plotly knows."""
    for drawn in figures(page):
        text = re.sub(r'"@[a-z0-9]+[^"]*"', '"#123456"', json.dumps(drawn))
        plain = json.loads(text)
        go.Figure(plain["data"], plain["layout"])
        assert len(plain["chosenBy"]) == (len(plain["data"]) if plain["choices"] else 0)


def shown(part):
    """All texts of a figure that plotly draws."""
    if isinstance(part, dict):
        hidden = ("legendgroup", "choices", "hovertemplate")
        return [text for key, value in part.items() if key not in hidden for text in shown(value)]
    if isinstance(part, list):
        return [text for value in part for text in shown(value)]
    return [part] if isinstance(part, str) else []


def test_a_trained_population(trained, tmp_path):
    page = write_report([trained], tmp_path / "report.html")
    assert sections(page) == [
        *("Findings", "Learning", "Drift", "Population", "Hyper-parameters", "Critics", "Policy", "Optimizer"),
        *("Other metrics", "Configuration"),
    ]
    shown = {title.partition(": member")[0] for title in titles(page)}
    assert {
        *("Return", "Lineage", "learning_rate", "optimizer.sigma", "What the critics expect", "Versions"),
        *("How far the two critics are apart", "VGS: factor", "UPGD: gate", "UPGD: utility of weights", "Entropy"),
    } <= shown
    text = page.read_text()
    assert "population_size: 3" in text
    assert "No minibatch was skipped" in text
    assert_valid(page)


def test_everything_at_once(tmp_path):
    agent = write_outcomes(write_agent(tmp_path / "agent", phases=4))
    page = write_report([agent, write_population(tmp_path / "population")], tmp_path / "report.html")
    assert sections(page) == [
        *(
            "Findings",
            "Learning",
            "Evaluation",
            "Robustness",
            "Drift",
            "Forgetting",
            "Population",
            "Hyper-parameters",
            "Critics",
        ),
        *("Policy", "Optimizer", "Other metrics", "Configuration"),
    ]
    assert "<h2>Absent</h2>" not in page.read_text()
    assert_valid(page)


def test_what_is_not_there_is_said(tmp_path):
    page = write_report([write_agent(tmp_path / "run", updates=3)], tmp_path / "report.html").read_text()
    absent = html.unescape(page[page.index("<h2>Absent</h2>") :])
    for name in ("Evaluation", "Robustness", "Drift", "Forgetting", "Population"):
        assert f"<li>{name}: no" in absent


@pytest.mark.parametrize("logged", [{}, {"rollout/ep_rew_mean": math.nan}])
def test_a_run_in_which_no_episode_has_ended(tmp_path, logged):
    folder = RunFolder(tmp_path / "run")
    with folder.locked():
        folder.log(0, [{"step": 64, **logged}])
    page = write_report([tmp_path / "run"], tmp_path / "report.html")
    assert sections(page) == ["Findings"]
    assert "no episode has ended" in page.read_text()


class TestLearning:
    def test_the_line_of_an_agent_is_what_it_logged(self, tmp_path):
        page = write_report([write_agent(tmp_path / "run", updates=5)], tmp_path / "report.html")
        (line,) = figure(page, "Return")["data"]
        assert line["x"] == [STEPS * update for update in range(1, 6)]
        assert line["y"] == [10, 20, 30, 40, 50]

    def test_members_have_a_median_a_band_and_the_best(self, tmp_path):
        page = write_report([write_population(tmp_path / "run", members=5)], tmp_path / "report.html")
        low, high, middle, best = figure(page, "Return")["data"]
        assert high["fill"] == "tonexty"
        assert all(a <= b <= c for a, b, c in zip(low["y"], middle["y"], high["y"], strict=True))
        assert best["line"]["dash"] == "dot"

    def test_runs_that_differ_in_their_seed_are_one_line(self, tmp_path):
        paths = [write_agent(tmp_path / f"run{seed}", seed=seed) for seed in range(3)]
        page = write_report(paths, tmp_path / "report.html")
        low, high, middle = figure(page, "Return")["data"]
        assert middle["y"][0] == 11  # of 10, 11 and 12
        assert low["y"][0] == pytest.approx(10.2)
        assert high["y"][0] == pytest.approx(11.8)

    def test_other_runs_have_lines_of_their_own(self, tmp_path):
        paths = [write_agent(tmp_path / name) for name in ("a", "b")]
        (paths[1] / "config.yaml").write_text("env:\n  id: Acrobot-v1\n")
        page = write_report(paths, tmp_path / "report.html")
        data = figure(page, "Return")["data"]
        assert [(line["name"], line["line"]["color"]) for line in data] == [("a", "@run0"), ("b", "@run1")]
        assert "What differs" in titles(page)

    def test_a_bundle_among_others_names_its_runs(self, tmp_path):
        paths = [write_agent(tmp_path / f"run{seed}", seed=seed) for seed in range(2)]
        other = write_population(tmp_path / "other")
        data = figure(write_report([*paths, other], tmp_path / "report.html"), "Return")["data"]
        assert [line["name"] for line in data if line.get("showlegend")] == ["2 runs: run0, run1", "other"]

    def test_every_other_phase_is_shaded(self, tmp_path):
        page = write_report([write_agent(tmp_path / "run", updates=20, phases=4)], tmp_path / "report.html")
        layout = figure(page, "Return")["layout"]
        assert [(shape["x0"], shape["x1"]) for shape in layout["shapes"]] == [
            (6 * STEPS, 11 * STEPS),
            (16 * STEPS, 20 * STEPS),
        ]
        assert [note["text"] for note in layout["annotations"]] == ["0", "1", "2", "3"]

    @pytest.mark.parametrize("others", [0, 2])
    def test_phases_that_others_did_not_have_are_not_shaded(self, tmp_path, others):
        paths = [write_agent(tmp_path / "a", phases=4), write_agent(tmp_path / "b", phases=others)]
        page = write_report(paths, tmp_path / "report.html")
        assert "shapes" not in figure(page, "Return")["layout"]
        assert "Phases are not shaded" in page.read_text()

    def test_long_runs_are_thinned(self, tmp_path):
        path = write_agent(tmp_path / "run", updates=1)
        (path / "metrics.jsonl").write_text(
            "".join(json.dumps({"member": 0, **row(i)}) + "\n" for i in range(1, 5_000))
        )
        page = write_report([path], tmp_path / "report.html")
        assert max(len(trace["x"]) for drawn in figures(page) for trace in drawn["data"]) <= 2_000


def test_hyperparams_of_every_member(tmp_path):
    page = write_report([write_population(tmp_path / "run", members=6)], tmp_path / "report.html")
    drawn = figure(page, "learning_rate")
    assert {trace["name"] for trace in drawn["data"]} == {f"member {i}" for i in range(6)}
    assert drawn["layout"]["yaxis"]["type"] == "log"
    assert [trace["line"]["color"] for trace in drawn["data"]].count("@accent") == 1


def test_hyperparams_that_are_no_numbers(tmp_path):
    path = write_agent(tmp_path / "run")
    events = [
        Event("start", 0, 0, hyperparams={"kind": "a", "flag": True}),
        Event("explore", 0, 4, hyperparams={"kind": "b"}),
    ]
    append_events(path / "population.json", events)
    page = write_report([path], tmp_path / "report.html")
    assert figure(page, "kind")["data"][0]["y"] == ["a", "b", "b"]
    assert_valid(page)


def test_numbers_that_are_none_leave_gaps(tmp_path):
    path = write_outcomes(write_population(tmp_path / "run", members=2, updates=4))
    for value in ("NaN", "null", "-Infinity", "1e999", "1e308"):
        for name in ("evaluation.json", "attacks.json", "phases.json"):
            text = (path / name).read_text()
            changed = re.sub(r'("mean"|"high"): [^,}]+', rf"\1: {value}", text)
            assert changed != text
            (path / name).write_text(changed)
        assert_valid(write_report([path], tmp_path / "report.html"))


def test_failures_are_listed(tmp_path):
    path = write_population(tmp_path / "run")
    append_events(path / "population.json", [Event("restart", 2, 4, detail="the world broke")] * 3)
    page = write_report([path], tmp_path / "report.html")
    assert "Failures and restarts" in titles(page)
    assert "<td>2</td><td>began again</td><td>3×</td><td>4, 4, 4</td><td>the world broke</td>" in page.read_text()


def test_attacks_have_a_line_and_a_row_each(tmp_path):
    page = write_report([write_outcomes(write_agent(tmp_path / "run"))], tmp_path / "report.html")
    data = [trace for trace in figure(page, "Return under attack")["data"] if "name" in trace]
    assert [(line["name"], line["x"], line["y"]) for line in data] == [
        ("random", [0, 0.05, 0.1], [200, 180, 160]),
        ("mad", [0, 0.05, 0.1], [200, 160, 120]),
        ("clean", [0, 0.1], [200, 200]),
    ]
    assert "<td>mad</td><td></td><td>160\n150 to 170</td>" in page.read_text()


def write_drifting(path, returns, phases, **metrics):
    """An agent with these returns and phases, and further metrics, at every update."""
    folder = RunFolder(path)
    with folder.locked():
        for i, (value, number) in enumerate(zip(returns, phases, strict=True)):
            more = {f"drift/{name}": float(values[i]) for name, values in metrics.items()}
            folder.log(0, [row(i + 1, **{"rollout/ep_rew_mean": value, "drift/phase": float(number), **more})])
    return path


class TestDrift:
    RETURNS = (50, 100, 100, 98, 20, 95, 80, 95, 95, 95, 40, 60)
    PHASES = (0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 3, 3)

    def test_recovery_from_every_change(self, tmp_path):
        page = write_report([write_drifting(tmp_path / "run", self.RETURNS, self.PHASES)], tmp_path / "report.html")
        lines = figure(page, "Recovery")["data"]
        assert [line["name"] for line in lines] == ["phase 1", "phase 2", "phase 3"]
        assert lines[0]["x"] == [0, *(STEPS * i for i in range(1, 5))]
        assert lines[0]["y"] == [100, 98, 20, 95, 80]
        table = page.read_text()
        # Back after three updates, though the mean of episodes fell only in the second; never below 72; not back.
        for cells in (("1", 768, 100, 20, 768), ("2", 1792, 80, 95, 0), ("3", 2560, 95, 40, "&gt; 512")):
            text = "".join(f"<td>{cell if isinstance(cell, str) else format(cell, ',')}</td>" for cell in cells)
            assert f"<tr>{text}</tr>" in table
        assert_valid(page)

    def test_recovery_is_of_single_rollouts_where_they_are_known(self, tmp_path):
        """A mean over a hundred episodes hides the fall; a bad rollout at the end of a phase is none."""
        run = write_drifting(tmp_path / "run", [90] * 8, [0, 0, 1, 1, 1, 1, 1, 1])
        rows = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
        for values, cell in (([100, 100, 40, 95, 97, 99, 99, 99], "512"), ([100, 100, 99, 98, 97, 99, 20, 99], "0")):
            written = [json.dumps({**each, "drift/return": value}) for each, value in zip(rows, values, strict=True)]
            (run / "metrics.jsonl").write_text("".join(f"{text}\n" for text in written))
            text = write_report([run], tmp_path / "report.html").read_text()
            assert f"<td>1</td><td>512</td><td>100</td><td>{min(values)}</td><td>{cell}</td>" in text
            assert "means of the latest hundred episodes, which fall late" not in text
        (run / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in rows))
        page = write_report([run], tmp_path / "report.html")
        assert "means of the latest hundred episodes, which fall late" in page.read_text()

    def test_recovery_of_negative_returns(self, tmp_path):
        returns = [-100, -100, -500, -111, -109]
        page = write_report([write_drifting(tmp_path / "run", returns, [0, 0, 1, 1, 1])], tmp_path / "report.html")
        assert "<td>-100</td><td>-500</td><td>768</td>" in page.read_text()

    def test_seeds_are_one_line_and_other_drift_none(self, tmp_path):
        paths = [write_agent(tmp_path / f"run{seed}", seed=seed, phases=2) for seed in range(3)]
        page = write_report(paths, tmp_path / "report.html")
        assert len(figure(page, "Recovery")["data"]) == 1
        paths[0] = write_agent(tmp_path / "other", phases=4)
        page = write_report(paths, tmp_path / "report.html")
        assert "Recovery" not in titles(page)

    def test_alarms_and_responses_are_marks(self, tmp_path):
        alarms = [0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0]
        levels = [0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 3]
        trials = [0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0]
        moves = [0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1]
        path = write_drifting(
            tmp_path / "run", self.RETURNS, self.PHASES, alarm=alarms, level=levels, trial=trials, anchor_moves=moves
        )
        page = write_report([path], tmp_path / "report.html")
        _, *marks = figure(page, "Return")["data"]
        assert [(mark["name"], mark["x"], mark["y"], mark["text"]) for mark in marks] == [
            ("alarm", [5 * STEPS, 11 * STEPS], [20, 40], ["alarm"] * 2),
            (
                "response",
                [5 * STEPS, 11 * STEPS, 12 * STEPS, 6 * STEPS],
                [20, 40, 60, 95],
                ["forgets and explores"] * 2 + ["fresh weights", "tries earlier weights"],
            ),
            ("shift followed", [4 * STEPS], [98], ["shift of observations followed"]),
        ]
        assert {"Alarms", "Response", "Shifts followed"} <= set(titles(page))
        assert_valid(page)

    def test_without_the_kit_and_without_alarms(self, tmp_path):
        page = write_report([write_drifting(tmp_path / "run", self.RETURNS, self.PHASES)], tmp_path / "report.html")
        assert len(figure(page, "Return")["data"]) == 1
        assert "Alarms" not in titles(page)
        path = write_drifting(tmp_path / "kit", self.RETURNS, self.PHASES, alarm=[0] * 12)
        page = write_report([path], tmp_path / "kit.html")
        assert "No agent noticed a harmful change." in page.read_text()

    def test_phases_that_were_evaluated(self, tmp_path):
        page = write_report([write_outcomes(write_agent(tmp_path / "run"))], tmp_path / "report.html")
        drawn = figure(page, "Return by phase")
        assert drawn["layout"]["xaxis"]["ticktext"] == ["0, 2", "1", "3"]
        assert [(trace["name"], trace["x"], trace["y"]) for trace in drawn["data"][1:]] == [
            ("training ended here", [1], [200]),
            ("seen in training", [0], [100]),
            ("not seen", [2], [400]),
        ]
        assert "<td>0, 2: length 0.5</td><td>100\n90 to 110</td>" in page.read_text()


def test_the_summary_tells_the_main_things(tmp_path):
    text = write_report(
        [write_outcomes(write_agent(tmp_path / "run", updates=20))], tmp_path / "report.html"
    ).read_text()
    for fact in (
        "<dt>Training return</dt><dd>200",
        "<dt>Evaluation</dt><dd>200",
        "<dt>Updates</dt><dd>20",
        "<dt>Time</dt><dd>40 s",
    ):
        assert fact in text
    population = write_report([write_population(tmp_path / "many")], tmp_path / "many.html").read_text()
    for fact in (
        "<dt>Best training return</dt>",
        "<dt>Members</dt><dd>4",
        "<dt>Take-overs</dt><dd>",
        '<dt>Time</dt><dd>24 s<small class="word">',
    ):
        assert fact in population


def test_many_steps_are_millions(tmp_path):
    path = write_agent(tmp_path / "run", updates=1, step=12_345_678)
    text = write_report([path], tmp_path / "report.html").read_text()
    assert "<dt>Steps</dt><dd>12.3 M" in text
    assert "12,345,678" in text


class TestHostile:
    @pytest.mark.parametrize("runs", [1, 2])
    def test_nothing_is_taken_for_markup(self, tmp_path, runs):
        paths = [write_hostile(tmp_path / f"<script>alert({i})<") for i in range(runs)]
        for path in paths:
            settings = json.loads((path / "config.yaml").read_text())
            (path / "config.yaml").write_text(json.dumps({**settings, "different": path.name}))
            (path / "checkpoints").mkdir()
            (path / "checkpoints" / "checkpoint_1.zip").write_bytes(b"no zip, which is noted with the name of the run")
        page = write_report(paths, tmp_path / "report.html")
        text = page.read_text()
        assert text.count("<script") == text.count("</script>") == 3
        for wrong in ("<img src=x", "<svg onload", "<a href='javascript", "<script>window", "<script>alert"):
            assert wrong not in text.split('id="figures"')[0]
        assert_valid(page)

    def test_charts_show_names_as_they_are(self, tmp_path):
        path = write_hostile(tmp_path / "run")
        numbers = dict.fromkeys(HOSTILE, 1.0)
        append_events(path / "population.json", [Event("explore", 2, 4, hyperparams=numbers)])
        page = write_report([path], tmp_path / "report.html")
        for drawn in figures(page):
            assert not [text for text in shown(drawn) if re.search("<(?!br>)", text)]
            for trace in drawn["data"]:
                assert "<" not in trace.get("name", "")
                assert not re.search("<(?!br>)", str(trace.get("text", "")))
                # Templates are ours: plotly would fill in names that look like one.
                assert "hacked" not in trace.get("hovertemplate", "")

    @settings(max_examples=30)
    @given(st.text("<>&;'\"%{}$ab é\x00\u2028", min_size=1, max_size=80))
    def test_any_label_is_plain_and_short(self, text):
        shown = label(text)
        assert not set(shown) & set("<>")
        assert len(html.unescape(shown)) <= 48

    def test_only_our_scripts_may_run(self, tmp_path):
        text = write_report([write_agent(tmp_path / "run", updates=2)], tmp_path / "report.html").read_text()
        policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
        assert "default-src 'none'" in policy
        assert policy.count("sha256-") == 2
        assert "unsafe-inline" not in policy.split("style-src")[0]
        assert not re.search(r'(?:src|href)="(?!#)', text.split('id="figures"')[0])
