"""How well do the starting values of `driftproof train --env ID` work?

    python benchmarks/starting_values.py --quick                     # every environment for a few steps
    python benchmarks/starting_values.py                             # everything, about an hour on one core
    python benchmarks/starting_values.py --only cartpole pendulum    # some of them
    python benchmarks/starting_values.py --report                    # the table of what has been run

Trains and evaluates as the command does, with several seeds. A finished run is kept in starting_values.json at once,
and not run again unless its starting values have changed, so a campaign can be interrupted. Writes the results, and the
table in docs/starting_values.md. examples/minatar_and_minigrid.py registers MinAtar and MiniGrid.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import learning
import numpy as np
import torch

from driftproof.cli.arenas import Subject
from driftproof.cli.evaluation import measure
from driftproof.config import build_agent
from driftproof.config.files import loads, settings_in
from driftproof.config.starting import STARTING_VALUES
from driftproof.envs import regime_bars, write_csv

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "starting_values.md"
EXAMPLES = ROOT / "examples"
EPISODES, LONG = 30, {"halfcheetah": 10, "swimmer": 10}
"""Of an evaluation; fewer where all have a thousand steps and hardly differ."""


@dataclass(frozen=True)
class Run:
    """One training with starting values and a seed."""

    name: str
    seed: int
    changes: tuple[str, ...] = ()
    episodes: int = EPISODES

    @property
    def key(self) -> str:
        return f"{self.name}/{self.seed}"

    @property
    def settings(self) -> dict[str, Any]:
        """What runs with different seeds must have in common."""
        return {
            "values": settings_in(STARTING_VALUES[self.name].text),
            "changes": list(self.changes),
            "episodes": self.episodes,
        }


def train(run: Run) -> learning.Entry:
    """Train as ``driftproof train`` does, and evaluate in new episodes."""
    torch.set_num_threads(1)
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    with tempfile.TemporaryDirectory() as folder:
        return trained_in(Path(folder), run)


def trained_in(folder: Path, run: Run) -> learning.Entry:
    # Environment i of a run is seeded with seed + i: far apart, so that no two runs share one.
    overrides = [*run.changes, f"run.seed={1000 * run.seed}", "run.device=cpu"]
    if run.name == "market":
        # As examples/made_up_prices.py does; the last 30% of each series are held out for the evaluation.
        made_up = (regime_bars(bars, seed=10**6 + i, symbol=f"S{i}") for i, bars in enumerate((3_000, 2_000)))
        write_csv(folder / "prices.csv", *made_up)
        overrides.append(f"env.kwargs.data={folder / 'prices.csv'}")
    config = loads(STARTING_VALUES[run.name].text, overrides, trusted=["minatar_and_minigrid"])
    agent = build_agent(config)
    start = time.process_time()
    agent.learn(config.run.total_timesteps)
    seconds = time.process_time() - start
    result = measure(Subject(agent, config), run.episodes)
    agent.env.close()
    (baseline, untrained), *_ = result["baselines"].items()
    return {
        "name": run.name,
        "seed": run.seed,
        "settings": run.settings,
        "final": result["mean"],
        "baseline": {baseline: untrained["mean"]},
        "steps": agent.num_timesteps,
        "seconds": round(seconds, 1),
        "steps_per_second": round(agent.num_timesteps / seconds, 1),
    }


def up_to_date(results: Mapping[str, learning.Entry], runs: Sequence[Run]) -> dict[str, learning.Entry]:
    """Results without those of other settings."""
    settings = {run.key: learning.as_json(run.settings) for run in runs}
    return {key: entry for key, entry in results.items() if entry["settings"] == settings.get(key, entry["settings"])}


COLUMNS = ["environment", "policy", "steps", "random", "return", "lowest to highest", "seeds", "minutes"]
START, END = "<!-- table -->", "<!-- end of table -->"
NOTE = (
    "Return: mean of the deterministic policy in new episodes after training; the mean over seeds (0, 1000, 2000) ± "
    "their standard deviation. Random: the same of random actions or, in markets, of buying and holding. Minutes: "
    "processor time of one training on one core, without the evaluation. `Market-v0`: with made-up prices."
)


def rows(results: Mapping[str, learning.Entry]) -> list[list[str]]:
    """A row of the table for each environment."""
    table = []
    for name, values in sorted(STARTING_VALUES.items()):
        wanted = learning.as_json(settings_in(values.text))
        entries = [e for e in results.values() if e["name"] == name and e["settings"]["values"] == wanted]
        if not entries:
            continue
        config = loads(values.text, entries[0]["settings"]["changes"])
        returns = [entry["final"] for entry in entries]
        mean = float(np.mean(returns))
        spread = f" ± {number(np.std(returns, ddof=1), mean)}" if len(returns) > 1 else ""
        table.append(
            [
                f"`{values.env_id}`",
                config.policy.name.removesuffix("Policy"),
                f"{config.run.total_timesteps:,}",
                number(np.mean([next(iter(entry["baseline"].values())) for entry in entries])),
                f"{number(mean)}{spread}",
                f"{number(min(returns))} to {number(max(returns))}",
                str(len(entries)),
                f"{np.mean([entry['seconds'] for entry in entries]) / 60:.1f}",
            ]
        )
    return table


def number(value: float, like: float | None = None) -> str:
    """At most three digits, unless there are more before the point; as many decimals as another number has."""
    size = abs(value if like is None else like)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2
    return f"{round(value, digits) + 0.0:,.{digits}f}"  # + 0.0: not -0


def put_into_page(table: str) -> None:
    """Replace the table of the documentation's page."""
    page = PAGE.read_text()
    before, rest = page.split(START)
    lines = table.split("\n\n", 1)[1]
    note = f"{NOTE} {common.machine()}. `python benchmarks/starting_values.py`"
    PAGE.write_text(f"{before}{START}\n\n{lines}\n{note}\n\n{END}{rest.split(END)[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few steps of everything; writes no result")
    parser.add_argument("--report", action="store_true", help="run nothing, rebuild the table")
    parser.add_argument("--only", nargs="+", choices=STARTING_VALUES, default=list(STARTING_VALUES), metavar="NAME")
    parser.add_argument("--seeds", type=int, default=3, help="how many, from 0")
    parser.add_argument("--workers", type=int, default=1, help="processes of one thread each")
    parser.add_argument("--folder", type=Path, default=common.RESULTS, help="of the results; tables only by default")
    arguments = parser.parse_args()
    folder, seeds, changes, episodes = arguments.folder, arguments.seeds, (), EPISODES
    if arguments.quick:
        folder, seeds, changes, episodes = Path("runs") / "starting-values-quick", 1, ("run.total_timesteps=4_096",), 2
        learning.save(folder / "starting_values.json", {})
    path = folder / "starting_values.json"
    runs = [
        Run(name, seed, changes, min(episodes, LONG.get(name, episodes)))
        for seed in range(seeds)
        for name in arguments.only
    ]
    if not arguments.report:
        learning.save(path, up_to_date(learning.load(path), runs))
        learning.run_all(runs, path, arguments.workers, train)
    results = learning.load(path)
    table = common.show_table("Starting values", COLUMNS, rows(results))
    if folder == common.RESULTS:
        common.write_result("starting_values", "python benchmarks/starting_values.py", [table], f". {NOTE}")
        put_into_page(table)


if __name__ == "__main__":
    main()
