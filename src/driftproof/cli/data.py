"""``driftproof data check``, and the options for reading price files."""

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
"""Id of the environment that replays prices from a file."""

Timezone: TypeAlias = Annotated[
    str | None, typer.Option("--timezone", help="Time zone of timestamps without a UTC offset.")
]
MaxGap: TypeAlias = Annotated[float | None, typer.Option("--max-gap", min=0, help="Longest gap between bars, in days.")]
Column: TypeAlias = Annotated[
    list[str] | None, typer.Option("--column", metavar="OURS=THEIRS", help="timestamp=Stamp; repeatable.")
]
DayFirst: TypeAlias = Annotated[
    bool | None, typer.Option("--day-first/--month-first", help="Read 02/03/2024 as 2 March, or as 3 February.")
]
Raw: TypeAlias = Annotated[bool, typer.Option("--raw", help="Do not adjust prices to the column of adjusted closes.")]
AnyFrequency: TypeAlias = Annotated[
    bool, typer.Option("--any-frequency", help="Accept bars of another frequency than in training.")
]

app = typer.Typer(help="Check price files.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _data() -> None:
    pass


def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Price file, .csv or .parquet.")],
    column: Column = None,
    timezone: Timezone = None,
    day_first: DayFirst = None,
    raw: Raw = False,
    max_gap: MaxGap = None,
) -> None:
    """Show how a price file is read (columns, dates, time zone, frequency), and suspect data: gaps, splits."""
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
    """Arguments of ``load_market_data``: those of the agent's run, overridden by those given.

    Args:
        found: The agent.
        names: Column names of the data. Recorded names that are missing there are dropped, so that its columns are
            recognised automatically.
        column: Names of columns given, as ``OURS=THEIRS``.
        timezone: Time zone given.
        day_first: Whether dates are given with the day first.
        raw: Whether to leave prices unadjusted.
        max_gap: Longest gap given.
        any_frequency: Whether to accept bars of another frequency than in training.
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
    """Copy of a configuration that records how its price file was read, for the run folder."""
    data = config.env.kwargs.get("data")
    if config.env.id != MARKET or not isinstance(data, str):
        return config
    from driftproof.envs.market_files import recorded_load

    try:
        kwargs = {**config.env.kwargs, "load": recorded_load(data, config.env.kwargs.get("load") or {})}
        kwargs |= _common_split(kwargs)
    except (ValueError, TypeError, ImportError, OSError):
        return config  # The environment will report it.
    recorded: Config = config.model_copy(update={"env": config.env.model_copy(update={"kwargs": kwargs})})
    return recorded


def _common_split(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Dates that hold out the last 30% of all bars, if markets begin or end at different times and no split is given.

    Fractions of each market's own rows would train on one market at the time on which another is evaluated.
    """
    import numpy as np

    from driftproof.envs.market import MarketEnv, markets_of

    if {"split", "fractions", "dates", "period"} & set(kwargs):
        return {}
    markets = markets_of(kwargs["data"], kwargs["load"])
    stamps = [bars.timestamps for symbol, bars in markets.items() if symbol in (kwargs.get("symbols") or markets)]
    if len({(times[0], times[-1]) for times in stamps}) < 2:
        return {}
    times = np.sort(np.concatenate(stamps))
    dates = [str(times[int(len(times) * share)].astype("M8[s]")).removesuffix("T00:00:00") for share in (0.7, 0.85)]
    try:
        for split in ("train", "held_out"):
            MarketEnv(**kwargs, split=split, dates=dates)
    except ValueError:
        return {}  # A market lacks bars before or after.
    say(f"markets begin or end at different times: all are split at {dates[0]}, which holds out 30% of all bars")
    return {"dates": dates}


def training_of(found: Found) -> Training | None:
    """Description of the data an agent was trained on; ``None``: unknown."""
    from driftproof.backtest.engine import Training
    from driftproof.cli import scopes

    if found.folder is None:
        return None
    config = found.config()
    seen = scopes.trained_on(found.folder, config)
    if seen is None or not seen.is_complete:
        return None
    if histories := seen.histories:
        ends = [list(history.symbols.values()) for history in histories]
        spans = tuple((min(first for first, _, _ in each), max(last for _, last, _ in each)) for each in ends)
        return Training(spans, "trained on " + " and ".join(map(scopes.described, histories)))
    is_simulated = config.env.id.rpartition(":")[2] == "driftproof/RegimeMarket-v0"
    return Training(text="trained on simulated prices") if is_simulated else None


def names_of(prices: Path) -> list[str]:
    """Column names of a file; empty if it cannot be read, since loading it will raise the error."""
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
        raise CommandError(
            f"--column {wrong[0]} must be OURS=THEIRS: our name of a column and its name in the file, "
            "such as timestamp=Date"
        )
    options = {
        "columns": {name: theirs for name, _, theirs in pairs} or None,
        "timezone": timezone,
        "day_first": day_first,
        "adjust": False if raw else None,
        "max_gap": max_gap,
    }
    return {name: value for name, value in options.items() if value is not None}
