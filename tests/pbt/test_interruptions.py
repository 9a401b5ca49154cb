"""Runs that are cut short at any write, and folders that others have been at meanwhile."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from driftproof.pbt import PBTRunner, read_events, read_metrics
from driftproof.runs import events, folder
from driftproof.runs.folder import RunFolder
from driftproof.state import compare
from tests.pbt.populations import config, make_agent, states

SETTINGS = {"seed": 2, "synchronous": True}


class CutError(BaseException):
    """As from a signal: nobody expects it."""


class Writes:
    """All writes of a run, in their order, of which one is cut short."""

    def __init__(self, monkeypatch):
        self.names, self.cut = [], None
        atomic = self.noted(folder.write_atomically, lambda path, parts: Path(path).name)
        for module in (folder, events):
            monkeypatch.setattr(module, "write_atomically", atomic)
        monkeypatch.setattr(RunFolder, "log", self.noted(RunFolder.log, lambda where, member, rows: f"log {member}"))

    def noted(self, write, name):
        def noting(*args, **options):
            self.names.append(name(*args))
            if self.cut == (len(self.names), "before"):
                raise CutError
            write(*args, **options)
            if self.cut == (len(self.names), "after"):
                raise CutError

        return noting


def left(runner):
    """What a run leaves behind, but for members' states."""
    metrics = read_metrics(runner.run_dir / "metrics.jsonl")
    return {
        "events": runner.scheduler.events,
        "written events": read_events(runner.run_dir / "population.json"),
        "metrics": {member: [row["step"] for row in rows] for member, rows in metrics.items()},
        "files": sorted(path.name for path in (runner.run_dir / "members").iterdir()),
    }


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_run_that_is_cut_at_any_write_goes_on_exactly(tmp_path, monkeypatch, when):
    writes = Writes(monkeypatch)
    whole = PBTRunner(config(), make_agent, 4, tmp_path / "whole", **SETTINGS)
    whole.run()
    names = list(writes.names)
    assert names[-5:] == ["member_0002_000000004.zip", "log 2", "log None", "population_state.json", "population.json"]
    # Those of the first report, of the first decision, and of the last.
    for number in (1, 2, 3, 4, 12, 13, *range(len(names) - 4, len(names) + 1)):
        place = tmp_path / str(number)
        writes.names.clear()
        writes.cut = (number, when)
        with pytest.raises(CutError):
            PBTRunner(config(), make_agent, 4, place, **SETTINGS).run()
        writes.cut = None
        is_taken = (place / "population_state.json").exists()
        again = (
            PBTRunner.resume(place, make_agent) if is_taken else PBTRunner(config(), make_agent, 4, place, **SETTINGS)
        )
        again.run()
        assert left(again) == left(whole), names[number - 1]
        assert not compare(states(again), states(whole)), names[number - 1]


def test_events_that_were_not_written_are_when_a_finished_run_is_resumed(tmp_path):
    PBTRunner(config(), make_agent, 2, tmp_path).run()
    (tmp_path / "population.json").unlink()
    resumed = PBTRunner.resume(tmp_path, make_agent)
    resumed.run()
    assert read_events(tmp_path / "population.json") == resumed.scheduler.events


def test_what_a_killed_writer_left_is_removed(tmp_path):
    PBTRunner(config(), make_agent, 4, tmp_path).run(updates=2)
    (host,) = {folder.write_atomically.__globals__["_HOST"]}
    halves = [tmp_path / place / f".half.{host}.999999999.0123abcd.tmp" for place in (".", "members")]
    for half in halves:
        half.touch()
    PBTRunner.resume(tmp_path, make_agent).run()
    assert not any(half.exists() for half in halves)


def test_a_run_that_another_has_gone_on_with_is_refused(tmp_path):
    stale = PBTRunner(config(), make_agent, 4, tmp_path)
    PBTRunner(config(), make_agent, 4, tmp_path).run(updates=2)
    with pytest.raises(RuntimeError, match="has trained this run since it was loaded"):
        stale.run()
    stale = PBTRunner.resume(tmp_path, make_agent)
    PBTRunner.resume(tmp_path, make_agent).run()
    before = (tmp_path / "population_state.json").read_bytes()
    with pytest.raises(RuntimeError, match="has trained this run since it was loaded"):
        stale.run()
    assert (tmp_path / "population_state.json").read_bytes() == before
    assert PBTRunner.resume(tmp_path, make_agent).updates == [4, 4, 4]


def test_folders_stay_where_they_are_when_the_process_goes_elsewhere(tmp_path, monkeypatch):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    runner = PBTRunner(config(checkpoint_dir="members"), make_agent, 6, "run")
    runner.run(updates=2)
    monkeypatch.chdir(tmp_path / "there")
    runner.run(updates=4)
    resumed = PBTRunner.resume(tmp_path / "here" / "run", make_agent)
    resumed.run()
    assert resumed.updates == [6, 6, 6]
    assert len(list((tmp_path / "here" / "members").glob("member_*.zip"))) == 3
    assert not list((tmp_path / "there").iterdir())


def test_members_of_two_runs_are_kept_apart(tmp_path):
    shared = config(checkpoint_dir=tmp_path / "members")
    first = PBTRunner(shared, make_agent, 2, tmp_path / "first")
    second = PBTRunner(shared, make_agent, 2, tmp_path / "second")
    with first._folder.locked(), pytest.raises(RuntimeError, match="another process is using"):
        second.run()
    first.run()
    with pytest.raises(FileExistsError, match="members of another population"):
        PBTRunner(shared, make_agent, 2, tmp_path / "second")
    assert PBTRunner.resume(tmp_path / "first", make_agent).best.num_timesteps == 64


def test_a_state_that_names_members_of_another_run_is_refused(tmp_path):
    """They would be removed as not in use."""
    PBTRunner(config(checkpoint_dir=tmp_path / "victim"), make_agent, 4, tmp_path / "theirs").run(updates=2)
    there = sorted((tmp_path / "victim").iterdir())
    PBTRunner(config(checkpoint_dir=tmp_path / "own"), make_agent, 4, tmp_path / "run").run(updates=2)
    state = tmp_path / "run" / "population_state.json"
    state.write_text(state.read_text().replace(str(tmp_path / "own"), str(tmp_path / "victim")))
    with pytest.raises(RuntimeError, match="holds members of another run"):
        PBTRunner.resume(tmp_path / "run", make_agent).run()
    assert sorted((tmp_path / "victim").iterdir()) == there


def test_numbers_of_numpy_are_saved(tmp_path):
    counts = config(population_size=np.int64(3), truncation_ratio=np.float32(0.25))
    PBTRunner(counts, make_agent, np.int64(4), tmp_path, seed=np.int32(1)).run(updates=2)
    resumed = PBTRunner.resume(tmp_path, make_agent)
    assert (resumed.total_updates, resumed.seed, resumed.config.truncation_ratio) == (4, 1, 0.25)


@pytest.fixture(scope="module")
def half_done(tmp_path_factory):
    """A run of which every member has trained once, and one takes over from another."""
    place = tmp_path_factory.mktemp("half_done")
    runner = PBTRunner(config(), make_agent, 4, place / "run", **SETTINGS)
    runner.run(updates=2)
    assert any(place.donor for place in runner._places)
    return place / "run"


def damaged(half_done, tmp_path, keys, value):
    """A copy of the run whose state has another value."""
    shutil.copytree(half_done, tmp_path / "run")
    path = tmp_path / "run" / "population_state.json"
    state = json.loads(path.read_text())
    inner = state
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    path.write_text(json.dumps(state))
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (["members", 0, "file"], "../secret.zip"),
        (["members", 0, "file"], "/etc/passwd"),
        (["members", 0, "offered"], "../members/member_0000_000000002.zip"),
        (["members", 0, "donor"], "member_0000_000000002.zip/../../secret.zip"),
        (["members", 0, "file"], 3),
        (["members", 0, "file"], None),
        (["members", 0, "updates"], -2),
        (["members", 0, "updates"], 1e300),
        (["members", 0, "updates"], 10**400),
        (["members", 0, "performance"], "good"),
        (["members", 0, "performance"], 10**400),
        (["members", 0, "waits"], "no"),
        (["members", 0, "hyperparams"], {}),
        (["members", 0, "hyperparams"], 1),
        (["members", 0], {}),
        (["members", 0], "member"),
        (["members"], []),
        (["members"], 5),
        (["total_updates"], 0),
        (["total_updates"], "many"),
        (["seed"], -1),
        (["synchronous"], 1),
        (["saves"], "x"),
        (["config"], None),
        (["config", "population_size"], 10**12),
        (["config", "hyperparams"], [{}]),
        (["config", "surprise"], 1),
        (["scheduler"], []),
        (["scheduler", "generator"], {"bit_generator": "PCG64"}),
        (["scheduler", "members", 0, "id"], 1),
        (["scheduler", "members", 0, "id"], 99),
        (["scheduler", "members", 0, "step"], "2"),
        (["scheduler", "members", 0, "performance"], float("nan")),
        (["scheduler", "members", 0, "performance"], "good"),
        (["scheduler", "members", 0, "lineage"], [[2, "1"]]),
        (["scheduler", "members", 0, "history"], [[2]]),
        (["scheduler", "members", 0, "checkpoint_format"], "v9"),
        (["scheduler", "members", 0, "before_exploit"], {}),
        (["scheduler", "observations"], [{"time": "now", "hyperparams": {}, "change": 0}]),
        (["scheduler", "events"], [1]),
        (["version"], []),
    ],
)
def test_a_damaged_state_is_refused(tmp_path, half_done, keys, value):
    run = damaged(half_done, tmp_path, keys, value)
    (tmp_path / "secret.zip").write_text("secret")
    with pytest.raises(ValueError, match=r"population_state\.json cannot be read"):
        PBTRunner.resume(run, make_agent)


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "null", '"', '{"version": NaN}'])
def test_what_is_no_state_is_refused(tmp_path, text):
    (tmp_path / "population_state.json").write_text(text)
    with pytest.raises(ValueError, match=r"population_state\.json cannot be read"):
        PBTRunner.resume(tmp_path, make_agent)


def test_links_of_members_are_not_followed(tmp_path, half_done):
    shutil.copytree(half_done, tmp_path / "run")
    member = tmp_path / "run" / "members" / "member_0001_000000002.zip"
    outside = tmp_path / "outside.zip"
    member.rename(outside)
    member.symlink_to(outside)
    with pytest.raises(ValueError, match="is a link"):
        PBTRunner.resume(tmp_path / "run", make_agent)
    # Nor is anything written through those that lie where a state is to be.
    member.unlink()
    outside.rename(member)
    outside.write_text("mine")
    runner = PBTRunner.resume(tmp_path / "run", make_agent)
    (member.parent / "member_0001_000000004.zip").symlink_to(outside)
    runner.run()
    assert outside.read_text() == "mine"
