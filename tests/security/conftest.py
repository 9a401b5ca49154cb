import shutil
import sys

import pytest

from tests.security.strangers import Stranger


@pytest.fixture(scope="session")
def honest(tmp_path_factory):
    stranger = Stranger(tmp_path_factory.mktemp("honest"))
    stranger.train()
    return stranger.run


@pytest.fixture
def stranger(honest, tmp_path, monkeypatch):
    """A run folder of somebody else, in a state in which all commands work; nothing in it may run in this test."""
    stranger = Stranger(tmp_path)
    shutil.copytree(honest, stranger.run)
    monkeypatch.syspath_prepend(stranger.modules)
    known = set(sys.modules)
    yield stranger
    for name in set(sys.modules) - known:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
