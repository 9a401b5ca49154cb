"""``driftproof data check``, and the options with which commands read prices."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from driftproof.cli.errors import USER_ERROR, CommandError, say

if TYPE_CHECKING:
    from driftproof.backtest.engine import Training
    from driftproof.cli.agents import Found
    from driftproof.config import Config

MARKET = "driftproof/Market-v0"
"""Id of the environment with prices from a file."""

Timezone: TypeAlias = Annotated[str | None, typer.Option("--timezone", help="Of timestamps without an offset.")]
MaxGap: TypeAlias = Annotated[
    float | None, typer.Option("--max-gap", min=0, help="Longest time between bars, in days.")
]
Column: TypeAlias = Annotated[
    list[str] | None, typer.Option("--column", metavar="OURS=THEIRS", help="timestamp=Stamp; repeatable.")
]
DayFirst: TypeAlias = Annotated[
    bool | None, typer.Option("--day-first/--month-first", help="Whether 02/03/2024 is in March.")
]
Raw: TypeAlias = Annotated[bool, typer.Option("--raw", help="Do not scale prices to a column of adjusted closes.")]
AnyFrequency: TypeAlias = Annotated[
    bool, typer.Option("--any-frequency", help="Allow bars of another frequency than those trained on.")
]

app = typer.Typer(help="Look at files of prices.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _data() -> None:
    pass


def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Prices: .csv or .parquet.")],
    column: Column = None,
    timezone: Timezone = None,
    day_first: DayFirst = None,
    raw: Raw = False,
    max_gap: MaxGap = None,
) -> None:
    """Show how a file of prices is read, and what looks wrong in it: columns, dates, zone, frequency, gaps, splits."""
    from driftproof.envs import check_market_data

    given = _given(column, timezone, day_first, raw, max_gap)
    try:
        found = check_market_data(file, **given)
    except (ValueError, ImportError) as error:
        raise CommandError(str(error)) from error
    say(str(found))
    if found.refusal is not None:
        raise typer.Exit(USER_ERROR)


def load_options(
    found: Found,
    names: Iterable[str],
    column: list[str] | None,
    timezone: str | None,
    day_first: bool | None,
    raw: bool,
    max_gap: float | None,
    any_frequency: bool,
) -> dict[str, Any]:
    """Arguments of ``load_market_data``: those of the run that the agent was trained in, and those given.

    Args:
        found: The agent.
        names: Names of the data's columns. Recorded names that it does not have are left out, so that its columns are
            recognised as in any file.
        column: Names of columns given, as ``OURS=THEIRS``.
        timezone: Zone given.
        day_first: Order of day and month given.
        raw: Whether prices are not to be adjusted.
        max_gap: Longest gap given.
        any_frequency: Whether bars of another frequency are allowed.
    """
    recorded = dict(found.config().env.kwargs.get("load") or {}) if found.folder is not None else {}
    if any_frequency:
        recorded.pop("frequency", None)
    known = {name.strip().lower() for name in names}
    columns = recorded.pop("columns", None) or {}
    columns = {ours: theirs for ours, theirs in columns.items() if theirs.strip().lower() in known}
    given = _given(column, timezone, day_first, raw, max_gap)
    columns |= given.pop("columns", {})
    return recorded | given | ({"columns": columns} if columns else {})


def record(config: Config) -> Config:
    """The configuration with the decisions that were taken in reading its prices, for its run folder."""
    data = config.env.kwargs.get("data")
    if config.env.id != MARKET or not isinstance(data, str):
        return config
    from driftproof.envs.market_files import recorded_load

    try:
        kwargs = {**config.env.kwargs, "load": recorded_load(data, config.env.kwargs.get("load") or {})}
    except (ValueError, TypeError, ImportError, OSError):
        return config  # The environment will report it.
    recorded: Config = config.model_copy(update={"env": config.env.model_copy(update={"kwargs": kwargs})})
    return recorded


def training_of(found: Found) -> Training | None:
    """What an agent was trained on; ``None`` if it is not known."""
    from driftproof.backtest.engine import Training
    from driftproof.cli import scopes

    if found.folder is None:
        return None
    config = found.config()
    histories = scopes.trained_on(found.folder, config)
    if histories:
        ends = [list(history.symbols.values()) for history in histories]
        spans = tuple((min(first for first, _, _ in each), max(last for _, last, _ in each)) for each in ends)
        return Training(spans, "trained on " + " and ".join(map(scopes.described, histories)))
    is_simulated = config.env.id.rpartition(":")[2] == "driftproof/RegimeMarket-v0"
    return Training(text="trained on simulated prices") if is_simulated and histories is not None else None


def names_of(prices: Path) -> list[str]:
    """Names of a file's columns; of a file that cannot be read none, since reading it will tell."""
    from driftproof.envs.market_files import column_names

    try:
        return column_names(prices)
    except (ValueError, OSError, ImportError):
        return []


def _given(
    column: list[str] | None, timezone: str | None, day_first: bool | None, raw: bool, max_gap: float | None
) -> dict[str, Any]:
    pairs = [item.partition("=") for item in column or ()]
    if wrong := [name + equals + theirs for name, equals, theirs in pairs if not (name and theirs)]:
        raise CommandError(f"--column {wrong[0]} must be a column's name here and in the file, such as timestamp=Date")
    options = {
        "columns": {name: theirs for name, _, theirs in pairs} or None,
        "timezone": timezone,
        "day_first": day_first,
        "adjust": False if raw else None,
        "max_gap": max_gap,
    }
    return {name: value for name, value in options.items() if value is not None}
