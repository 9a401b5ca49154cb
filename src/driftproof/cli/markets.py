"""``driftproof infer``."""

from __future__ import annotations

import csv
import itertools
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from driftproof.cli import agents, data
from driftproof.cli.data import AnyFrequency, Column, DayFirst, MaxGap, Raw, Timezone
from driftproof.cli.errors import CommandError, say
from driftproof.cli.options import Agent, Best, Member, RunsDir, Trusted
from driftproof.runs import SIGNALS, own_file

if TYPE_CHECKING:
    from collections.abc import Callable


def infer(
    run: Agent,
    prices: Annotated[
        Path | None, typer.Argument(metavar="DATA", help="Prices: .csv or .parquet. None with --stream.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", help=".csv or .parquet. Default: signals.csv in the run's folder.")
    ] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Read CSV line by line, and answer each at once.")] = False,
    buy: Annotated[float, typer.Option("--buy", help="Scores from here on up are BUY.")] = 0.6,
    sell: Annotated[float, typer.Option("--sell", help="Scores from here on down are SELL.")] = -0.6,
    deadzone: Annotated[float, typer.Option("--deadzone", help="Scores closer to 0 are HOLD.")] = 0.1,
    cvar_alpha: Annotated[float | None, typer.Option("--cvar-alpha", help="Share of worst returns of cvar.")] = None,
    timezone: Timezone = None,
    max_gap: MaxGap = None,
    column: Column = None,
    day_first: DayFirst = None,
    raw: Raw = False,
    any_frequency: AnyFrequency = False,
    member: Member = None,
    best: Best = False,
    runs_dir: RunsDir = Path("runs"),
    trust: Trusted = None,
) -> None:
    """Signals for prices: BUY, HOLD or SELL. With them a score, and the returns that the critics expect."""
    if stream != (prices is None):
        raise CommandError("give a file of prices, or --stream to read them from standard input")
    if stream and output is not None:
        raise CommandError("--stream answers on standard output: leave out --output")
    if output is not None and output.suffix.lower() not in (".csv", ".parquet", ".pq"):
        raise CommandError(f"--output {output} must end in .csv or .parquet")
    found = agents.find(run, runs_dir, member, best, trust)
    if (target := output) is None:
        target = Path("signals.csv") if found.folder is None else own_file(found.folder, SIGNALS)
    options: dict[str, Any] = {"buy": buy, "sell": sell, "deadzone": deadzone, "cvar_alpha": cvar_alpha}
    # Checkpoints do not store the features, but the run's configuration does.
    options["features"] = None if found.folder is None else found.config().env.kwargs.get("features")
    lines: Iterable[str] = sys.stdin if stream else ()
    names = [] if prices is None else data.names_of(prices)
    if stream:
        header = sys.stdin.readline()
        lines, names = itertools.chain([header] if header else [], sys.stdin), next(csv.reader([header]), [])
    load = data.load_options(found, names, column, timezone, day_first, raw, max_gap, any_frequency)
    try:
        if stream:
            _stream(found, lines, options, load)
        else:
            _judge(found, prices, target, options, load)
    except (ValueError, ImportError) as error:
        raise CommandError(str(error)) from error


def _judge(found: agents.Found, prices: Any, target: Path, options: dict[str, Any], load: dict[str, Any]) -> None:
    from driftproof.signals import infer

    with _progress() as on_progress:
        signals = infer(found.load(), prices, load=load, on_progress=on_progress, **options)
    signals.write(target)
    counts = {name: int((signals.signal == name).sum()) for name in ("BUY", "HOLD", "SELL")}
    summary = ", ".join(f"{count:,} {name}" for name, count in counts.items())
    say(f"{len(signals):,} rows: {summary}; written to {target}")


def _stream(found: agents.Found, lines: Iterable[str], options: dict[str, Any], load: dict[str, Any]) -> None:
    from driftproof.signals import stream

    load.pop("adjust", None)  # Bars that come one by one are as they are.
    stream(found.load(), lines, partial(print, flush=True), source="standard input", **load, **options)


@contextmanager
def _progress() -> Iterator[Callable[[int, int], object] | None]:
    """Show a progress bar, on a terminal."""
    if not sys.stdout.isatty():
        yield None
        return
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    with Progress(*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn()) as progress:
        task = progress.add_task("rows", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
