"""``driftproof backtest``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from driftproof._text import shortlist, table
from driftproof.cli import agents, data
from driftproof.cli.data import AnyFrequency, Column, DayFirst, MaxGap, Raw, Timezone
from driftproof.cli.errors import CommandError, say
from driftproof.cli.evaluation import write_json
from driftproof.cli.options import Agent, Best, Member, RunsDir, Trusted
from driftproof.runs import BACKTEST, EVENTS, is_population, own_file

if TYPE_CHECKING:
    from driftproof.backtest import Backtest, Part, Performance
    from driftproof.config import Config

_COST = 0.0002
"""Default cost of trading: commission and slippage of the market environments."""


def backtest(
    run: Agent,
    prices: Annotated[Path, typer.Argument(metavar="DATA", help="Price file, .csv or .parquet.")],
    start: Annotated[str | None, typer.Option("--start", metavar="DATE", help="First day, inclusive.")] = None,
    end: Annotated[str | None, typer.Option("--end", metavar="DATE", help="Last day, exclusive.")] = None,
    cost: Annotated[
        float | None,
        typer.Option("--cost", min=0, help="Trading cost as a fraction of the value traded. Default: the run's."),
    ] = None,
    financing: Annotated[
        float, typer.Option("--financing", min=0, help="Yearly cost of short positions, as a fraction.")
    ] = 0.01,
    trials: Annotated[
        int | None,
        typer.Option(
            "--trials",
            min=1,
            help="Trials this agent was selected from, for the deflated Sharpe ratio. Default: those recorded, "
            "of its population or of the search behind its best.yaml.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder to write equity and trade tables and backtest.json to.")
    ] = None,
    format: Annotated[Literal["csv", "parquet"], typer.Option("--format", help="File format of the tables.")] = "csv",
    column: Column = None,
    timezone: Timezone = None,
    day_first: DayFirst = None,
    raw: Raw = False,
    max_gap: MaxGap = None,
    any_frequency: AnyFrequency = False,
    member: Member = None,
    best: Best = False,
    runs_dir: RunsDir = Path("runs"),
    trust: Trusted = None,
) -> None:
    """Backtest an agent on a price file, after costs, next to baselines.

    Results on prices that the agent was trained on are marked IN SAMPLE.
    """
    found = agents.find(run, runs_dir, member, best, trust)
    load = data.load_options(found, data.names_of(prices), column, timezone, day_first, raw, max_gap, any_frequency)
    try:
        result = _run(found, prices, load, cost, financing, start, end, trials)
    except (ValueError, ImportError) as error:
        raise CommandError(str(error)) from error
    say(f"{found.checkpoint} on {prices}: {shortlist(result.symbols)}")
    show(result)
    content = {"checkpoint": str(found.checkpoint), "data": str(prices), **result.to_dict()}
    if out is not None:
        say(f"written to {', '.join(str(path) for path in write(result, content, out, format))}")
    if found.folder is not None and found.is_run:
        write_json(own_file(found.folder, BACKTEST), content)


def _run(
    found: agents.Found,
    prices: Path,
    load: dict[str, Any],
    cost: float | None,
    financing: float,
    start: str | None,
    end: str | None,
    trials: int | None,
) -> Backtest:
    from driftproof.backtest import backtest
    from driftproof.envs.market import markets_of
    from driftproof.signals import positions

    config = None if found.folder is None else found.config()
    features = None if config is None else config.env.kwargs.get("features")
    markets = markets_of(prices, load)
    count, others = _trials(found)
    return backtest(
        markets,
        positions(found.load(), markets, features),
        cost=cost_of(config) if cost is None else cost,
        financing=financing,
        training=data.training_of(found),
        start=start,
        end=end,
        trials=trials or count,
        trial_targets=[positions(other.load(), markets, features) for other in others],
    )


def cost_of(config: Config | None) -> float:
    """Cost of trading in a run's market, as a fraction of the value traded."""
    kwargs = {} if config is None else config.env.kwargs
    return float(kwargs.get("commission", _COST / 2)) + float(kwargs.get("slippage", _COST / 2))


def _trials(found: agents.Found) -> tuple[int, list[agents.Found]]:
    """Number of trials that an agent was selected from, and the trials whose agents still exist."""
    from dataclasses import replace

    from driftproof.runs.folder import RunFolder

    if found.folder is None or not found.is_run:
        return 1, []
    if not is_population(found.folder):
        return trials_of(found.folder), []
    state = RunFolder(found.folder).read_state()
    folder = RunFolder(found.folder, state.config.checkpoint_dir)
    files = [state.members[member].file for member in state.ranking]
    saved = [replace(found, checkpoint=folder.member_path(file)) for file in files if file is not None]
    return trials_of(found.folder), saved


def trials_of(folder: Path) -> int:
    """Number of trials that the agent of a run was selected from.

    In a population, each set of hyper-parameters that a member started or continued with is a trial.
    """
    from driftproof.runs.events import read_events
    from driftproof.runs.folder import RunFolder
    from driftproof.runs.sources import read_sources

    sources = read_sources(folder)
    before = 1 if sources is None else sources.trials
    if not is_population(folder):
        return before
    changes = [event for event in read_events(folder / EVENTS) if event.kind in ("exploit", "explore", "replace")]
    return max(before, len(RunFolder(folder).read_state().members) + len(changes))


def show(result: Backtest) -> None:
    """Print a backtest."""
    fees = f"costs {result.cost:.4%} of the value traded, short positions {result.financing:.2%} a year"
    say(f"{result.training.text}\n{fees}")
    for part in result.parts:
        own = part.performances["agent"]
        label = f"{part.label}, {own.first} to {own.last}, {own.bars:,} bars"
        typer.echo()
        typer.secho(label, fg=None if part.sample == "out of sample" else "red", bold=True)
        say(_performances(part))
    part = result.main
    own = part.performances["agent"]
    where = f"{part.label}, {own.first} to {own.last}"
    mean, low, high = part.excess
    typer.echo()
    typer.secho(where, fg=None if part.sample == "out of sample" else "red", bold=True)
    say(
        f"log-return beyond buy and hold, per year: {mean:+.2%}, 95% interval {low:+.2%} to {high:+.2%}\n"
        f"probability that the Sharpe ratio is above 0: {_percent(own.probability)}; above the best of {result.trials} "
        f"without skill (deflated): {_percent(part.deflated)}"
    )
    for title, groups in (("year", part.years), ("regime", part.regimes)):
        rows = [[title, "bars", "log-return", "buy and hold", "Sharpe", "mean position"]]
        for name, each in groups.items():
            returns = (f"{each[key]:+.2%}" for key in ("log_return", "buy_and_hold"))
            rows.append([name, f"{each['bars']:.0f}", *returns, f"{each['sharpe']:+.2f}", f"{each['exposure']:+.2f}"])
        say(f"\n{where}, by {title}\n{table(rows, 1)}")
    rows = [["costs", "log-return", "per year", "Sharpe", "drawdown", "costs paid"]]
    for name, per in part.costs.items():
        numbers = [f"{per.log_return:+.2%}", _signed(per.annual_return), _ratio(per.sharpe, None)]
        rows.append([name, *numbers, f"{per.max_drawdown:.1%}", f"{per.costs:.2%}"])
    say(f"\n{where}, at multiples of the costs\n{table(rows, 1)}")


def _performances(part: Part) -> str:
    """Statistics of all accounts side by side, then of the agent in each market."""
    rows = [["", *part.performances], *zip(_ROWS, *map(_cells, part.performances.values()), strict=True)]
    text = table(rows, 1)
    if part.markets:
        several = [["agent in", *_ROWS[:6]], *([symbol, *_cells(each)[:6]] for symbol, each in part.markets.items())]
        text += "\n\n" + table(several[: _MOST_MARKETS + 1], 1)
    return text


_MOST_MARKETS = 20
"""Largest number of markets shown one by one; the files list all of them."""
_ROWS = (
    *(
        "return",
        "log-return",
        "return per year",
        "volatility per year",
        "Sharpe ratio ± error",
        "Sortino ratio ± error",
    ),
    *("largest drawdown", "longest drawdown", "turnover per year", "costs paid", "financing paid"),
    *("exposure", "bars long", "bars short", "hit rate"),
)


def _cells(each: Performance) -> list[str]:
    return [
        *map(_signed, (each.simple_return, each.log_return, each.annual_return)),
        f"{each.volatility:.2%}",
        _ratio(each.sharpe, each.sharpe_error),
        _ratio(each.sortino, each.sortino_error),
        f"{each.max_drawdown:.2%}",
        f"{each.drawdown_days:,.0f} days",
        f"{each.turnover:.1f}",
        *(f"{value:.2%}" for value in (each.costs, each.financing)),
        *(f"{value:.0%}" for value in (each.exposure, each.long, each.short)),
        _percent(each.hit_rate),
    ]


def _ratio(value: float | None, error: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:+.2f}" + ("" if error is None else f" ± {error:.2f}")


def _signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+.2%}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def write(result: Backtest, content: dict[str, Any], folder: Path, format: str) -> list[Path]:
    """Write equity tables, trade tables and all statistics to a folder; returns the paths."""
    from driftproof.backtest.files import equity_table, trades_table, write_table

    folder.mkdir(parents=True, exist_ok=True)
    tables = {"equity": equity_table(result), "trades": trades_table(result)}
    paths = [write_table(folder / f"{name}.{format}", columns) for name, columns in tables.items()]
    write_json(folder / BACKTEST, content)
    return [*paths, folder / BACKTEST]
