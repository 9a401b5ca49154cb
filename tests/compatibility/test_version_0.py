"""Files of the version before modules were rearranged load, go on, and give the same numbers (write_version_0.py)."""

import json
import shutil
from pathlib import Path

import pytest

from driftproof.ppo import DistributionalPPO

from . import write_version_0 as writer

FILES = Path(__file__).parent / "version_0"
EXPECTED = json.loads((FILES / "expected.json").read_text())


def flat(values, path=""):
    if isinstance(values, dict):
        return {k: v for key, value in values.items() for k, v in flat(value, f"{path}/{key}").items()}
    if isinstance(values, list):
        return {k: v for i, value in enumerate(values) for k, v in flat(value, f"{path}/{i}").items()}
    return {path: values}


def assert_same(actual, expected):
    # Other processors round otherwise in the last bits.
    assert flat(json.loads(json.dumps(actual))) == pytest.approx(flat(expected), rel=1e-4, abs=1e-6)


ADDED_SINCE = {"exploration_floor": 0.0}
"""Hyper-parameters that agents of that time did not have, and what they are without effect."""


def numbers_of(agent):
    numbers = writer.numbers_of(agent)
    for name, value in ADDED_SINCE.items():
        assert numbers["hyperparams"].pop(name) == value
    return numbers


def test_an_agent_is_what_it_was_and_learns_on_as_it_did():
    agent = DistributionalPPO.load(FILES / "agent", env=writer.make_env())
    assert_same(numbers_of(agent), EXPECTED["loaded"])
    agent.learn(writer.WHOLE, reset_num_timesteps=False)
    assert_same(numbers_of(agent), EXPECTED["resumed"])


@pytest.mark.parametrize(("name", "command"), [("training", "train"), ("population", "tune")])
def test_an_interrupted_run_ends_as_it_would_have(name, command, tmp_path):
    shutil.copytree(FILES / "runs" / name, tmp_path / name)
    writer.call(command, "--resume", str(tmp_path / name))
    assert_same(writer.final_weights(tmp_path / name), EXPECTED[name])
