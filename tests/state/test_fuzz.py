"""Random inputs for the reader and the loader: one kind of error, nothing changed, little memory and time."""

import json
import random
import resource
import subprocess
import sys

import pytest

from tests.state import fuzz


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return fuzz.Target(tmp_path_factory.mktemp("fuzz"))


def corpus():
    return {path.name: path.read_bytes() for path in sorted(fuzz.CORPUS.iterdir())}


@pytest.mark.parametrize("name", sorted(corpus()))
def test_the_corpus(target, name):
    target(corpus()[name])
    target.check_agents()


def test_two_thousand_inputs(target):
    generator, known = random.Random(0), list(corpus().values())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Choices are the costly ones, as an agent looks at them.
    weights = [1 if data[0] % 3 == fuzz.PLACES else 3 for data in known]
    for data in generator.choices(known, weights, k=2000):
        target(fuzz.mutated(data, known, generator))
    target.check_agents()
    assert target.counts["refused"] > 1500
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500 * 1024
    assert target.slowest < 2


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_one_hundred_thousand_inputs_that_coverage_guides(tmp_path):
    command = [sys.executable, "-m", "tests.state.fuzz", "run", "--inputs", "100000"]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr[-3000:]
    last = json.loads([line for line in finished.stdout.splitlines() if line.startswith("{")][-1])
    assert last["inputs"] >= 90_000
    assert last["slowest_s"] < 10
