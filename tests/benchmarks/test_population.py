"""The benchmark of populations on one device: what it measures, keeps and draws."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import population


def rows(units, products="float32"):
    single = population.row("single", units, 1, 0.002, 0.002, 0.003, 0.0001, 1e4)
    many = [population.row("population", units, m, 0.002 + m * 1e-4, 0.002, 0.003, m * 1e-4, m * 1e4) for m in (1, 8)]
    measured = [single, *({**each, "memory_gib": 1.5, "exploit_ms": 0.5} for each in many)]
    return [{"products": products, **each} for each in measured]


def test_tables_and_picture_are_of_what_was_kept(tmp_path):
    kept = {"population": [*rows(128), *rows(256, "bf16")], "machine": "another one"}
    (tmp_path / "population.json").write_text(json.dumps(kept))
    population.main(["--report", "--output", str(tmp_path)])
    page = (tmp_path / "population.md").read_text()
    assert "another one" in page
    assert "| 128 | float32 | single agent | 2.00 | 3.00 | 1.0x | 0.10 | 5 % |  |  | 10,000 |" in page
    assert "| 256 | bf16 | 8 | 2.80 | 3.00 | 5.7x | 0.80 | 29 % | 0.50 | 1.5 | 80,000 |" in page
    assert (tmp_path / "population.png").stat().st_size > 1_000


@pytest.mark.slow
def test_quick_measurements_are_kept(tmp_path):
    tmp_path /= "new"
    population.main(["--quick", "--device", "cpu", "--members", "2", "--output", str(tmp_path)])
    results = json.loads((tmp_path / "population.json").read_text())
    assert [each["kind"] for each in results["population"]] == ["single", "population"]
    assert all(each["rate"] > 0 for part in ("environments", "population") for each in results[part])
    population.main(["--quick", "--parts", "population", "--members", "1", "--units", "8", "--output", str(tmp_path)])
    results = json.loads((tmp_path / "population.json").read_text())
    assert [(each["units"], each["members"]) for each in results["population"]] == [(16, 1), (16, 2), (8, 1), (8, 1)]
