"""Folders of runs: what is read, and what is said of folders that are none or are damaged."""

from __future__ import annotations

import json
from functools import partial

import pytest

from driftproof.report import write_report
from driftproof.report.runs import Run, read_run, read_runs
from driftproof.report.series import Life
from tests.report.folders import STEPS, row, write_agent, write_outcomes, write_population


def test_a_population_tells_who_is_best(tmp_path):
    run = read_run(write_population(tmp_path / "run"), "run")
    returns = {member: life.last("rollout/ep_rew_mean") for member, life in run.members.items()}
    assert run.best == max(returns, key=returns.get)
    assert run.ranking == sorted(returns, key=lambda member: -returns[member])
    assert (run.is_population, run.steps_per_update, run.last_step) == (True, STEPS, 12 * STEPS)


def test_the_best_is_who_the_population_takes_for_it():
    lives = {member: Life([row(1, member)]) for member in range(3)}
    run = partial(Run, "run", None, lives, Life([]))
    assert run(performance={0: 3.0, 1: float("nan"), 2: 1.0}).ranking == [0, 2, 1]
    assert run(performance={0: 3.0, 1: 2.0, 2: 1.0}, lower_is_better=True).best == 2


@pytest.mark.parametrize("every", [1, 3])
def test_updates_are_counted_also_if_not_all_were_logged(every):
    rows = [row(update) for update in range(every, 13, every)]
    assert Run("run", None, {0: Life(rows)}, Life([])).steps_per_update == STEPS


def test_outcomes_are_read(tmp_path):
    run = read_run(write_outcomes(write_agent(tmp_path / "run")), "run")
    assert [(score.name, score.mean, score.episodes) for score in run.evaluation] == [
        ("agent", 200, 3),
        ("random", 20, 2),
    ]
    assert [score.epsilon for score in run.attacks] == [0, 0.05, 0.1, 0.05, 0.1]
    assert run.config["env"]["id"] == "CartPole-v1"


def test_an_evaluation_may_have_a_mean_only(tmp_path):
    path = write_agent(tmp_path / "run")
    (path / "evaluation.json").write_text('{"mean": 3.5}')
    (score,) = read_run(path, "run").evaluation
    assert (score.mean, score.low, score.high, score.episodes) == (3.5, 3.5, 3.5, None)


def test_runs_of_one_name_are_told_apart(tmp_path):
    paths = [write_agent(tmp_path / place / "run", updates=2) for place in ("a", "b")]
    assert [run.name for run in read_runs(paths)] == ["a/run", "b/run"]


EVENTS = '{"format": "driftproof population", "version": 1, "events": ['


class TestDamage:
    def test_no_folders(self, tmp_path):
        with pytest.raises(ValueError, match="name at least one folder"):
            write_report([], tmp_path / "report.html")

    def test_one_path_instead_of_several(self, tmp_path):
        with pytest.raises(TypeError, match=r"sequence of folders, such as \['runs/a'\]"):
            write_report("runs/a", tmp_path / "report.html")

    def test_no_such_folder(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"nowhere: there is no such folder"):
            write_report([tmp_path / "nowhere"], tmp_path / "report.html")

    def test_a_file_instead_of_a_folder(self, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(NotADirectoryError, match="file is not a folder"):
            write_report([tmp_path / "file"], tmp_path / "report.html")

    def test_a_folder_of_something_else(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"is not the folder of a run: there is no metrics\.jsonl"):
            write_report([tmp_path], tmp_path / "report.html")

    def test_twice_the_same(self, tmp_path):
        path = write_agent(tmp_path / "run", updates=2)
        with pytest.raises(ValueError, match="named twice"):
            write_report([path, tmp_path / "." / "run"], tmp_path / "report.html")

    @pytest.mark.parametrize("content", ["", "\n", '{"member": 0, "st', '{"member": null, "step": 4}\n'])
    def test_no_metrics_yet(self, tmp_path, content):
        (tmp_path / "metrics.jsonl").write_text(content)
        with pytest.raises(ValueError, match=r"metrics\.jsonl has no metrics of an agent"):
            write_report([tmp_path], tmp_path / "report.html")

    @pytest.mark.parametrize(
        "line",
        ["[1]", "3", '{"step": 1}', '{"member": 0}', '{"member": "a", "step": 1}', '{"member": 0, "step": 1, "a": "b"}',
         '{"member": 0, "step": null}', '{"member": 0, "step": 1e999}', '{"member": 0, "step": 1, "a": [1]}',
         f'{{"member": 0, "step": {10**30}}}', f'{{"member": 0, "step": 1, "a": {"9" * 5000}}}',
         '{"member": -1, "step": 1}', '{"member": 5000, "step": 1}', '{"member": 0, "step": -1}'],
    )  # fmt: skip
    def test_rows_that_are_none(self, tmp_path, line):
        path = write_agent(tmp_path / "run", updates=2)
        with open(path / "metrics.jsonl", "a") as file:
            file.write(line + "\n")
        with pytest.raises(ValueError, match=r"metrics\.jsonl, line 3: not a row of metrics"):
            write_report([path], tmp_path / "report.html")

    def test_metrics_that_are_no_text(self, tmp_path):
        (tmp_path / "metrics.jsonl").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ValueError, match=r"metrics\.jsonl, line 1: not a row of metrics \(it is not text"):
            write_report([tmp_path], tmp_path / "report.html")

    @pytest.mark.parametrize(
        ("name", "content", "match"),
        [
            ("config.yaml", "a: [1", "config.yaml cannot be read"),
            ("config.yaml", "a: &a {b: *a}", "config.yaml cannot be read: what begins here contains itself"),
            ("config.yaml", "a: " + "[" * 3000, "config.yaml cannot be read: is nested more than 32 deep"),
            ("config.yaml", "- 1", "config.yaml cannot be read: it is not a mapping"),
            ("population.json", "{}", "population.json cannot be read: format: is missing"),
            (
                "population.json",
                f'{EVENTS} {{"kind": "start", "member": "a", "step": 0}}]}}',
                "events.0.member: should be a valid integer, not 'a'",
            ),
            (
                "population.json",
                f'{EVENTS} {{"kind": "undo", "member": 0, "step": 0, "mutated": 3}}]}}',
                "events.0.mutated: should be a valid dictionary, not 3",
            ),
            ("population_state.json", "{", "population_state.json cannot be read"),
            ("population_state.json", '{"version": 2}', "population_state.json cannot be read: saves: is missing"),
            ("population_state.json", '{"version": 99}', "population_state.json was written by a newer driftproof"),
            ("evaluation.json", "{", "evaluation.json cannot be read"),
            ("evaluation.json", "{}", "evaluation.json cannot be read: mean: is missing"),
            ("evaluation.json", '{"mean": 1, "baselines": {"a": 3}}', "evaluation.json cannot be read"),
            ("evaluation.json", "[]", "evaluation.json cannot be read"),
            ("evaluation.json", '{"mean": 1, "baselines": [3]}', "evaluation.json cannot be read"),
            ("attacks.json", '{"results": [{"attack": "mad"}]}', "read: results.0.epsilon: is missing"),
            ("attacks.json", '{"results": 3}', "attacks.json cannot be read"),
            ("phases.json", "[]", "phases.json cannot be read"),
            ("phases.json", '{"phases": [{"phases": ["a"]}]}', "phases.0.mean: is missing"),
        ],
    )
    def test_a_damaged_file_is_named(self, tmp_path, name, content, match):
        path = write_agent(tmp_path / "run", updates=2)
        (path / name).write_text(content)
        with pytest.raises(ValueError, match=match):
            write_report([path], tmp_path / "report.html")
        assert not (tmp_path / "report.html").exists()

    def test_a_damaged_checkpoint_is_a_note(self, tmp_path):
        path = write_agent(tmp_path / "run", updates=2)
        (path / "checkpoints").mkdir()
        (path / "checkpoints" / "checkpoint_000000000001.zip").write_bytes(b"no zip")
        page = write_report([path], tmp_path / "report.html").read_text()
        assert "run: versions of libraries:" in page
        assert "checkpoint_000000000001.zip" in page

    def test_an_output_that_cannot_be(self, tmp_path):
        path = write_agent(tmp_path / "run", updates=2)
        with pytest.raises(OSError, match="exists and is not a regular file"):
            write_report([path], tmp_path)


def test_a_run_that_is_still_writing_can_be_looked_at(tmp_path):
    path = write_agent(tmp_path / "run", updates=3)
    with open(path / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"member": 0, "step": 4 * STEPS})[:-4])
    assert read_run(path, "run").last_step == 3 * STEPS
