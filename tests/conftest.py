"""Every test starts from the same random state, with one thread: two pools on few cores stall each other."""

import atexit
import multiprocessing
import os
import shutil
import tempfile

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile("default", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("default")
torch.set_num_threads(1)

# Before any test module copies the environment: tests have a key of their own, and trust nothing.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="driftproof-tests-")
os.environ.pop("DRIFTPROOF_TRUST", None)
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

from tests import processes  # noqa: E402  It copies the environment.


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_process_is_left():
    """A test that fails leaves no process behind that would train on for ever."""
    before = set(multiprocessing.active_children())
    yield
    processes.end_all()
    for process in set(multiprocessing.active_children()) - before:
        process.kill()
        process.join()
