"""Walk-forward tests on twenty years of the S&P 500 and the NASDAQ, with several seeds.

    pip install driftproof arch                     # arch ships the prices
    python benchmarks/walk_forward.py               # three seeds of each
    python benchmarks/walk_forward.py --quick       # one seed, a few minutes on two cores

Each agent is trained on three years of daily bars (configs/market.yaml) and tested on the six months after them, then
the window moves on by six months: 34 agents for one curve, of which no bar was seen in training. `fresh` agents begin
anew in every window, `warm` ones with the agent of the window before. Costs are 0.02 % of the value traded, and short
positions cost 1 % a year. Nothing was tuned on these prices.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import console, show_table, write_result

CONFIG = Path(__file__).parent.parent / "configs" / "market.yaml"
HEAD = ["", "log-return a year", "volatility", "Sharpe", "drawdown", "turnover", "beyond buy-and-hold a year (95 %)"]


def walk(folder: Path, prices: Path, seed: int, warm: bool, steps: int) -> dict[str, Any]:
    """The out-of-sample part of one walk-forward test."""
    name = f"{prices.stem}-{'warm' if warm else 'fresh'}-{seed}"
    command = [sys.executable, "-m", "driftproof", "walkforward", CONFIG, prices, "--train", "3y", "--test", "6mo"]
    options = ["--runs-dir", folder, "--name", name, "--set", f"run.seed={seed}"]
    options += ["--set", f"run.total_timesteps={steps}", *(["--warm"] if warm else [])]
    subprocess.run([str(word) for word in command + options], check=True, capture_output=True)
    (part,) = json.loads((folder / name / "backtest.json").read_text())["parts"]
    return dict(part)


def row(name: str, part: dict[str, Any], who: str = "agent") -> list[str]:
    each = part["performances"][who]
    years = each["bars"] / each["bars_per_year"]
    sharpe = "" if each["sharpe"] is None else f"{each['sharpe']:+.2f} ± {each['sharpe_error']:.2f}"
    mean, low, high = part["excess"]
    return [
        name,
        f"{each['log_return'] / years:+.2%}",
        f"{each['volatility']:.1%}",
        sharpe,
        f"{each['max_drawdown']:.0%}",
        f"{each['turnover']:.0f}",
        f"{mean:+.1%} ({low:+.1%} to {high:+.1%})" if who == "agent" else "",
    ]


def main() -> None:
    from arch.data import nasdaq, sp500

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16_384, help="of each training")
    parser.add_argument("--quick", action="store_true", help="one seed, fewer steps")
    args = parser.parse_args()
    seeds, steps = (1, 4_096) if args.quick else (args.seeds, args.steps)
    text, began = [], time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for index, source in (("sp500", sp500), ("nasdaq", nasdaq)):
            prices = folder / f"{index}.csv"
            source.load().to_csv(prices)
            rows: list[list[str]] = []
            for warm in (False, True):
                for seed in range(seeds):
                    part = walk(folder, prices, seed, warm, steps)
                    if not rows:
                        names = ("buy and hold", "volatility-scaled", "flat")
                        rows += [row(name, part, name) for name in names]
                        ends = part["performances"]["agent"]
                    rows.append(row(f"{'warm' if warm else 'fresh'} agents, seed {seed}", part))
                    console.print(*rows[-1])
            title = f"{index}, out of sample, {ends['first']} to {ends['last']}"
            text.append(show_table(title, HEAD, rows))
    text.append(f"{steps:,} steps in each window; {(time.monotonic() - began) / 60:.0f} minutes.")
    if not args.quick:
        write_result("walk_forward", f"python benchmarks/walk_forward.py --seeds {seeds} --steps {steps}", text)


if __name__ == "__main__":
    main()
