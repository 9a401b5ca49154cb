"""``driftproof infer``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from driftproof.cli import agents
from driftproof.cli.errors import CommandError, say
from driftproof.cli.options import Agent, Best, Member, RunsDir, Trusted
from driftproof.runs import SIGNALS, own_file

if TYPE_CHECKING:
    from collections.abc import Callable


def infer(
    run: Agent,
    data: Annotated[Path | None, typer.Argument(help="Prices: .csv or .parquet. None with --stream.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", help=".csv or .parquet. Default: signals.csv in the run's folder.")
    ] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Read CSV line by line, and answer each at once.")] = False,
    buy: Annotated[float, typer.Option("--buy", help="Scores from here on up are BUY.")] = 0.6,
    sell: Annotated[float, typer.Option("--sell", help="Scores from here on down are SELL.")] = -0.6,
    deadzone: Annotated[float, typer.Option("--deadzone", help="Scores closer to 0 are HOLD.")] = 0.1,
    cvar_alpha: Annotated[float | None, typer.Option("--cvar-alpha", help="Share of worst returns of cvar.")] = None,
    timezone: Annotated[str | None, typer.Option("--timezone", help="Of timestamps without an offset.")] = None,
    max_gap: Annotated[float | None, typer.Option("--max-gap", min=0, help="Longest time between bars, days.")] = None,
    column: Annotated[
        list[str] | None, typer.Option("--column", metavar="OURS=THEIRS", help="timestamp=Date; repeatable.")
    ] = None,
    member: Member = None,
    best: Best = False,
    runs_dir: RunsDir = Path("runs"),
    trust: Trusted = None,
) -> None:
    """Signals for prices: BUY, HOLD or SELL. With them a score, and the returns that the critics expect."""
    if stream != (data is None):
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
    load = {"timezone": timezone, "max_gap": max_gap, "columns": _columns(column)}
    try:
        if stream:
            _stream(found, options, load)
        else:
            _judge(found, data, target, options, load)
    except (ValueError, ImportError) as error:
        raise CommandError(str(error)) from error


def _judge(found: agents.Found, data: Any, target: Path, options: dict[str, Any], load: dict[str, Any]) -> None:
    from driftproof.signals import infer

    with _progress() as on_progress:
        signals = infer(found.load(), data, load=load, on_progress=on_progress, **options)
    signals.write(target)
    counts = {name: int((signals.signal == name).sum()) for name in ("BUY", "HOLD", "SELL")}
    summary = ", ".join(f"{count:,} {name}" for name, count in counts.items())
    say(f"{len(signals):,} rows: {summary}; written to {target}")


def _stream(found: agents.Found, options: dict[str, Any], load: dict[str, Any]) -> None:
    from driftproof.signals import stream

    stream(found.load(), sys.stdin, partial(print, flush=True), source="standard input", **load, **options)


def _columns(given: list[str] | None) -> dict[str, str] | None:
    pairs = [item.partition("=") for item in given or ()]
    if wrong := [name + equals + theirs for name, equals, theirs in pairs if not (name and theirs)]:
        raise CommandError(f"--column {wrong[0]} must be a column's name here and in the file, such as timestamp=Date")
    return {name: theirs for name, _, theirs in pairs} or None


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
