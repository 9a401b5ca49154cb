"""Signals per second: histories of one market and of several, from memory and from file to file, and bars one by one.

    python benchmarks/infer.py                # a million bars, about 5 minutes
    python benchmarks/infer.py --quick        # 50,000 bars, and no file of results

The agent has the default network, two LSTMs of 128 units and two critics, unless a row says otherwise; it is not
trained, which makes no difference to speed. Bars are those of a market with regimes. Where the agent observes its
position, bars have to be judged one after the other. Numbers are medians of `--rounds` turns: by the clock, which
counts whatever else the machine does, and in processor time, which does not. The last column is what the busier thread
allows.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from common import console, show_table, write_result

from driftproof.envs import Bars, regime_bars, write_csv
from driftproof.ppo import DistributionalPPO
from driftproof.signals import infer, stream

TURNS = ("bars/s", "actor's thread, µs/bar", "critics' thread, µs/bar", "bars/s if each has a core")
NUMBERS = ("score", "p10", "p50", "p90", "cvar")


def make_agent(policy: str = "MlpLstmPolicy", position: bool = False) -> DistributionalPPO:
    env = gymnasium.make("driftproof/RegimeMarket-v0", observe_position=position)
    return DistributionalPPO(policy, env, n_steps=64, batch_size=64, seed=0, device="cpu", drift_kit=False)


def markets(rows: int, count: int) -> dict[str, Bars]:
    return {f"M{i:02}": regime_bars(rows // count, seed=i, symbol=f"M{i:02}") for i in range(count)}


def speed(rows: int, rounds: int, call: Callable[..., object], *args: Any) -> list[str]:
    """Rows per second by the clock, and processor time per row of the caller's thread and of all others."""
    turns = []
    for _ in range(rounds):
        clocks = time.perf_counter, time.thread_time, time.process_time
        before = [clock() for clock in clocks]
        call(*args)
        turns.append([clock() - start for clock, start in zip(clocks, before, strict=True)])
    elapsed, own, total = np.median(turns, axis=0) / rows
    other = max(total - own, 0.0)
    return [f"{1 / elapsed:,.0f}", f"{own * 1e6:.1f}", f"{other * 1e6:.1f}", f"{1 / max(own, other):,.0f}"]


def histories(rows: int, rounds: int) -> str:
    table = []
    for name, options, share in (
        ("LSTM", {}, 1),
        ("LSTM, position observed", {"position": True}, 4),
        ("GRU", {"policy": "MlpGruPolicy"}, 4),
        ("no memory", {"policy": "MlpPolicy"}, 1),
    ):
        agent = make_agent(**options)
        for count in (1, 16):
            data = markets(rows // share, count)
            turns = speed(rows // share, rounds, infer, agent, data)
            table.append([name, str(count), f"{rows // share:,}", *turns])
    return show_table("Histories in memory", ["", "markets", "bars", *TURNS], table)


def files(rows: int, rounds: int, folder: Path) -> str:
    import pyarrow.parquet

    agent, (bars,) = make_agent(), markets(rows, 1).values()
    agent.save(folder / "agent")
    write_csv(folder / "bars.csv", bars)
    columns: dict[str, Any] = {"timestamp": bars.timestamps}
    columns |= dict(zip(("open", "high", "low", "close", "volume"), bars.prices, strict=True))
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "bars.parquet")
    table = []
    for ending in ("csv", "parquet"):
        turns = speed(rows, rounds, from_file_to_file, folder, ending)
        table.append([f"{ending} to {ending}", f"{rows:,}", *turns])
    return show_table("File to file, with loading the agent", ["", "bars", *TURNS], table)


def from_file_to_file(folder: Path, ending: str) -> None:
    infer(folder / "agent", folder / f"bars.{ending}").write(folder / f"signals.{ending}")


def streaming(rows: int, rounds: int, folder: Path) -> str:
    table = []
    for name, options in (("LSTM", {}), ("LSTM, position observed", {"position": True})):
        agent, (bars,) = make_agent(**options), markets(rows, 1).values()
        write_csv(folder / "stream.csv", bars)
        lines = (folder / "stream.csv").read_text().splitlines()
        answers: list[str] = []
        turns = speed(rows, rounds, stream, agent, lines, answers.append)
        last = answers[-rows:]
        found = np.array([[float(cell or "nan") for cell in line.split(",")[4:]] for line in last])
        together = infer(agent, bars)
        expected = np.stack([getattr(together, number) for number in NUMBERS], 1)
        table.append([name, f"{rows:,}", *turns, f"{np.nanmax(np.abs(found - expected)):.1e}"])
    columns = ["", "bars", *TURNS, "farthest from infer"]
    return show_table("Bars one by one", columns, table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    if args.quick:
        args.rows, args.rounds = 50_000, 1
    console.print(f"{torch.get_num_threads()} threads of torch; infer itself uses two threads")
    with tempfile.TemporaryDirectory() as folder:
        sections = [
            histories(args.rows, args.rounds),
            files(args.rows, args.rounds, Path(folder)),
            streaming(min(args.rows, 5_000), args.rounds, Path(folder)),
        ]
    if not args.quick:
        write_result("infer", " ".join(["python", *sys.argv]), sections)


if __name__ == "__main__":
    main()
