"""The examples run."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
def test_real_prices(monkeypatch, capsys):
    pytest.importorskip("arch")
    monkeypatch.setattr(sys, "argv", ["real_prices.py", "--steps", "1024", "--seeds", "1"])
    runpy.run_path(str(EXAMPLES / "real_prices.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "test: 2015-12-31 to 2018-12-31, 755 days" in printed
    # The index rose from 2043.94 to 2506.85, less the cost of buying.
    assert "buying and holding        +0.097  +0.03     +0.346  +0.91     +0.204  +0.52" in printed
    assert "agent, seed 0" in printed
