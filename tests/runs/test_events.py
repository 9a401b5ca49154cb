"""population.json grows, and is whole at any time."""

import json

import pytest

from driftproof.pbt import Event, append_events, read_events

START = Event("start", 1, 0, hyperparams={"lr": 0.1})
TAKEN = Event(
    "exploit",
    1,
    10,
    donor=0,
    donor_step=9,
    format="v2_full_parameters",
    mutated={"lr": [0.3, 0.36]},
    hyperparams={"lr": 0.36},
)


def test_events_are_added_at_the_end_and_read_back(tmp_path):
    path = tmp_path / "run" / "population.json"
    append_events(path, [])
    assert not path.exists()
    assert read_events(path) == []
    append_events(path, [START])
    append_events(path, iter([TAKEN, Event("restart", 1, 11, detail="killed")]))
    assert read_events(path) == [START, TAKEN, Event("restart", 1, 11, detail="killed")]
    assert [item.name for item in path.parent.iterdir()] == ["population.json"]


def test_the_file_is_json_that_tells_who_took_what_from_whom(tmp_path):
    append_events(tmp_path / "population.json", [START, TAKEN])
    content = json.loads((tmp_path / "population.json").read_text())
    assert content["events"][1] == {
        "kind": "exploit",
        "member": 1,
        "step": 10,
        "donor": 0,
        "donor_step": 9,
        "format": "v2_full_parameters",
        "mutated": {"lr": [0.3, 0.36]},
        "hyperparams": {"lr": 0.36},
        "detail": "",
    }


def test_what_cannot_be_written_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "population.json"
    append_events(path, [START])
    with pytest.raises(ValueError):
        append_events(path, [Event("start", 2, 0, hyperparams={"lr": float("nan")})])
    with pytest.raises(TypeError):
        append_events(path, [Event("start", 2, 0, hyperparams={"lr": object()})])
    assert read_events(path) == [START]


HEAD = b'{"format": "driftproof population", "version": 1'


@pytest.mark.parametrize("wrong", [{"step": 1}, {"kind": "?", "member": 1, "step": 1}, {**TAKEN.as_dict(), "a": 1}])
def test_what_is_no_event_is_refused(wrong):
    assert Event.from_dict(TAKEN.as_dict()) == TAKEN
    with pytest.raises(ValueError, match="not an event of a population"):
        Event.from_dict(wrong)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"format": "other", "version": 1, "events": []}',
        b'{"format": "driftproof population", "version": 2, "events": []}',
        HEAD + b"}",
        HEAD + b', "events": [{"kind": "start", "member": 1}]}',
        HEAD + b', "events": [{"kind": "?", "member": 1, "step": 1}]}',
        HEAD + b', "events": [{"kind": "start", "member": 1, "step": 1, "a": 1}]}',
    ],
)
def test_a_file_that_is_no_record_is_named_and_left_alone(content, tmp_path):
    path = tmp_path / "population.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"population\.json cannot be read"):
        read_events(path)
    with pytest.raises(ValueError, match=r"population\.json cannot be read"):
        append_events(path, [START])
    assert path.read_bytes() == content
