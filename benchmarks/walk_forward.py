"""Walk-forward tests on twenty years of the S&P 500 and the NASDAQ, with several seeds.

    pip install ".[all]" arch                       # arch ships the prices
    python benchmarks/walk_forward.py               # three seeds of fresh agents, two of warm ones
    python benchmarks/walk_forward.py --quick       # one seed, a few minutes on two cores

Each agent is trained on three years of daily bars (configs/market.yaml) and tested on the six months after them, then
the window moves on by six months: 34 agents for one curve, of which no bar was seen in training. `fresh` agents begin
anew in every window, `warm` ones with the agent of the window before. Costs are 0.02 % of the value traded, and short
positions cost 1 % a year. Nothing was tuned on these prices.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import console, show_table, write_result

CONFIG = Path(__file__).parent.parent / "configs" / "market.yaml"
HEAD = ["", "log-return a year", "volatility", "Sharpe", "drawdown", "turnover", "beyond buy-and-hold a year (95 %)"]


def walk(folder: Path, prices: Path, seed: int, warm: bool, steps: int) -> dict[str, Any]:
    """The out-of-sample part of one walk-forward test, which is done now unless it is in the folder."""
    name = f"{prices.stem}-{'warm' if warm else 'fresh'}-{seed}"
    if not (folder / name / "backtest.json").exists():
        command: list[Any] = [sys.executable, "-m", "driftproof", "walkforward", "--runs-dir", folder]
        if (folder / name).exists():
            command += ["--resume", name]
        else:
            command += [CONFIG, prices, "--train", "3y", "--test", "6mo", "--name", name, "--set", f"run.seed={seed}"]
            command += ["--set", f"run.total_timesteps={steps}", *(["--warm"] if warm else [])]
        subprocess.run([str(word) for word in command], check=True, capture_output=True)
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
    parser.add_argument("--warm-seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=16_384, help="of each training")
    parser.add_argument("--folder", type=Path, help="keeps all runs, to go on after an interruption")
    parser.add_argument("--quick", action="store_true", help="one seed, fewer steps")
    args = parser.parse_args()
    seeds, warm_seeds, steps = (1, 1, 4_096) if args.quick else (args.seeds, args.warm_seeds, args.steps)
    with tempfile.TemporaryDirectory() as place:
        folder = args.folder or Path(place)
        folder.mkdir(parents=True, exist_ok=True)
        parts: dict[str, dict[str, Any]] = {"sp500": {}, "nasdaq": {}}
        for warm, (index, source) in itertools.product((False, True), (("sp500", sp500), ("nasdaq", nasdaq))):
            prices = folder / f"{index}.csv"
            if not prices.exists():
                source.load().to_csv(prices)
            for seed in range(warm_seeds if warm else seeds):
                name = f"{'warm' if warm else 'fresh'} agents, seed {seed}"
                parts[index][name] = walk(folder, prices, seed, warm, steps)
                console.print(index, *row(name, parts[index][name]))
    text = []
    for index, found in parts.items():
        first = next(iter(found.values()))
        rows = [row(name, first, name) for name in ("buy and hold", "volatility-scaled", "flat")]
        rows += [row(name, part) for name, part in found.items()]
        ends = first["performances"]["agent"]
        text.append(show_table(f"{index}, out of sample, {ends['first']} to {ends['last']}", HEAD, rows))
    if not args.quick:
        command = f"python benchmarks/walk_forward.py --seeds {seeds} --warm-seeds {warm_seeds} --steps {steps}"
        write_result("walk_forward", command, text)


if __name__ == "__main__":
    main()
