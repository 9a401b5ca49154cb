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
        Path | None, typer.Argument(metavar="DATA", help="Price file, .csv or .parquet; omitted with --stream.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", help="File to write, .csv or .parquet. Default: signals.csv in the run folder."),
    ] = None,
    stream: Annotated[
        bool, typer.Option("--stream", help="Read CSV lines from standard input and print a signal after each.")
    ] = False,
    buy: Annotated[float, typer.Option("--buy", help="Lowest score for BUY.")] = 0.6,
    sell: Annotated[float, typer.Option("--sell", help="Highest score for SELL.")] = -0.6,
    deadzone: Annotated[float, typer.Option("--deadzone", help="HOLD if |score| is below this.")] = 0.1,
    cvar_alpha: Annotated[
        float | None,
        typer.Option(
            "--cvar-alpha", help="Fraction of the worst returns averaged in cvar. Default: the agent's, or 0.1."
        ),
    ] = None,
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
    """Compute trading signals (BUY, HOLD, SELL) from prices, with scores and the critics' return quantiles."""
    if stream != (prices is None):
        raise CommandError("give either a price file, or --stream to read prices from standard input")
    if stream and output is not None:
        raise CommandError("--stream writes to standard output: leave out --output")
    if output is not None and output.suffix.lower() not in (".csv", ".parquet", ".pq"):
        raise CommandError(f"--output {output} must end in .csv or .parquet")
    found = agents.find(run, runs_dir, member, best, trust)
    if (target := output) is None:
        target = Path("signals.csv") if found.folder is None else own_file(found.folder, SIGNALS)
    options: dict[str, Any] = {"buy": buy, "sell": sell, "deadzone": deadzone, "cvar_alpha": cvar_alpha}
    # The features are stored in the run's configuration, not in checkpoints.
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

    load.pop("adjust", None)  # Streamed bars cannot be adjusted.
    stream(found.load(), lines, partial(print, flush=True), source="standard input", **load, **options)


@contextmanager
def _progress() -> Iterator[Callable[[int, int], object] | None]:
    """Show a progress bar if the output is a terminal."""
    if not sys.stdout.isatty():
        yield None
        return
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    with Progress(*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn()) as progress:
        task = progress.add_task("rows", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
