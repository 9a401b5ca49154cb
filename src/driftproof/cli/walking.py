"""``driftproof walkforward``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from driftproof._files import read_json
from driftproof._text import table
from driftproof.cli import agents, backtesting, data, runs, training
from driftproof.cli.data import MARKET
from driftproof.cli.errors import CommandError, Stopped, say
from driftproof.cli.evaluation import write_json
from driftproof.cli.options import ConfigFile, Name, Overrides, Resume, RunsDir, Trusted, check_resume, read_config
from driftproof.runs import BACKTEST, CONFIG, METRICS, own_file

if TYPE_CHECKING:
    from driftproof.backtest.windows import Window
    from driftproof.envs import Bars

PLAN = "walkforward.json"
"""File with the plan of a walk-forward test, in its folder."""


def walkforward(
    config: ConfigFile = None,
    prices: Annotated[Path | None, typer.Argument(metavar="DATA", help="Price file, .csv or .parquet.")] = None,
    train: Annotated[str, typer.Option("--train", help="Training period of each window: 3y, 18mo, 90d.")] = "3y",
    test: Annotated[str, typer.Option("--test", help="Test period after it.")] = "6mo",
    step: Annotated[
        str | None, typer.Option("--step", help="Time from one window to the next. Default: as --test.")
    ] = None,
    expanding: Annotated[bool, typer.Option("--expanding", help="Train on all bars before the test period.")] = False,
    warm: Annotated[bool, typer.Option("--warm", help="Start each training from the previous window's agent.")] = False,
    financing: Annotated[
        float, typer.Option("--financing", min=0, help="Yearly cost of short positions, as a fraction.")
    ] = 0.01,
    overrides: Overrides = None,
    name: Name = None,
    runs_dir: RunsDir = Path("runs"),
    resume: Resume = None,
    trust: Trusted = None,
) -> None:
    """Walk-forward test: train on a window, test on the period that follows, move both forward in time.

    Each window is a separate run in the folder of the test. The test periods together form one out-of-sample backtest.
    """
    if resume is not None:
        check_resume(resume, config, None, name)
        root = runs.find(resume, runs_dir)
    else:
        if config is None or prices is None:
            raise CommandError("give a CONFIG and a price file: driftproof walkforward CONFIG DATA")
        root = _begin(config, prices, overrides, name, runs_dir, trust, train, test, step, expanding, warm, financing)
    _walk(root, trust)


def _begin(
    config: Path,
    prices: Path,
    overrides: list[str] | None,
    name: str | None,
    runs_dir: Path,
    trust: list[str] | None,
    train: str,
    test: str,
    step: str | None,
    expanding: bool,
    warm: bool,
    financing: float,
) -> Path:
    """Check all settings, and create the folder of the test."""
    from driftproof.backtest.windows import windows
    from driftproof.config import check

    market = [f"env.id={MARKET}", f"env.kwargs.data={json.dumps(str(prices.absolute()))}", "run.evaluation_episodes=0"]
    settings = data.record(read_config(config, None, [*market, *(overrides or [])], trust))
    runs.check_free(runs_dir, name, "walkforward")
    try:
        found = windows(_markets(settings), train, test, step, expanding)
    except ValueError as error:
        raise CommandError(str(error)) from error
    (first, *_) = found
    check(read_config(config, None, [*market, *(overrides or []), *_period(first)], trust))
    root = runs.create(runs_dir, name or f"walkforward-{prices.stem.lower()}", settings, "walkforward")
    plan = {"train": train, "test": test, "step": step or test, "expanding": expanding, "warm": warm}
    write_json(root / PLAN, {**plan, "financing": financing})
    say(f"{root}: {len(found)} windows, tests from {first.test[0]} to {found[-1].test[1]}")
    return root


def _markets(settings: Any) -> dict[str, Bars]:
    from driftproof.envs.market import markets_of

    kwargs = settings.env.kwargs
    markets = markets_of(kwargs["data"], kwargs.get("load"))
    return {symbol: bars for symbol, bars in markets.items() if symbol in (kwargs.get("symbols") or markets)}


def _period(window: Window) -> list[str]:
    return ["env.kwargs.split=all", f"env.kwargs.period={json.dumps(list(window.train))}"]


def _walk(root: Path, trust: list[str] | None) -> None:
    """Train the agents of all unfinished windows, then combine their tests."""
    from driftproof.backtest.windows import windows
    from driftproof.cli.options import trust_in
    from driftproof.config import load

    plan = _plan(root)
    settings = load(own_file(root, CONFIG), (), trust_in(trust))
    markets = _markets(settings)
    found = windows(markets, plan.train, plan.test, plan.step, plan.expanding)
    taken: dict[str, dict[tuple[str, str], Any]] = {symbol: {} for symbol in markets}
    for i, window in enumerate(found):
        name, before = _name(i), _name(i - 1)
        when = f"training {' to '.join(window.train)}, test {' to '.join(window.test)}"
        say(f"\nwindow {i + 1} of {len(found)}: {when}")
        try:
            if not (root / name).exists():
                source = str(root / before) if plan.warm and i else None
                training.train(
                    root / CONFIG, overrides=_period(window), name=name, runs_dir=root, source=source, trust=trust
                )
            else:
                training.train(resume=str(root / name), runs_dir=root, trust=trust)
        except Stopped as stop:
            text = str(stop).partition(" Resume:")[0]
            raise Stopped(f"{text} Resume: driftproof walkforward --resume {root}") from None
        for symbol, each in _tested(root / name, settings, markets, window, trust).items():
            taken[symbol][window.test] = each
    _finish(root, settings, plan, markets, found, taken)


def _plan(root: Path) -> Any:
    from pydantic import BaseModel, create_model

    fields: dict[str, Any] = dict.fromkeys(("train", "test", "step"), (str, ...))
    fields |= {"expanding": (bool, ...), "warm": (bool, ...), "financing": (float, ...)}
    model: type[BaseModel] = create_model("Plan", **fields)
    if not (root / PLAN).exists():
        raise CommandError(f"{root} is not a walk-forward test: there is no {PLAN} in it")
    return read_json(own_file(root, PLAN), model)


def _tested(
    folder: Path, settings: Any, markets: dict[str, Bars], window: Window, trust: list[str] | None
) -> dict[str, Any]:
    """Positions of a window's agent in its test, by symbol; the recurrent state starts in the training period."""
    from driftproof.backtest.windows import rows_between
    from driftproof.envs.trading import feature_config
    from driftproof.signals import positions

    features = feature_config(settings.env.kwargs.get("features"))
    agent = agents.find(str(folder), folder.parent, None, False, trust).load()
    seen, tests = {}, {}
    for symbol, bars in markets.items():
        rows = rows_between(bars, window.train[0], window.test[1], features.lookback - 1)
        tests[symbol] = rows_between(bars, *window.test)
        if tests[symbol].start < tests[symbol].stop:
            seen[symbol] = bars.rows(rows)
    taken = positions(agent, seen, features)
    return {symbol: each[len(each) - (tests[symbol].stop - tests[symbol].start) :] for symbol, each in taken.items()}


def _finish(
    root: Path,
    settings: Any,
    plan: Any,
    markets: dict[str, Bars],
    found: list[Window],
    taken: dict[str, dict[tuple[str, str], Any]],
) -> None:
    from driftproof.backtest import backtest
    from driftproof.backtest.engine import Training
    from driftproof.backtest.windows import stitched

    targets = {symbol: stitched(bars, taken[symbol]) for symbol, bars in markets.items()}
    how = "everything before" if plan.expanding else f"the {plan.train} before"
    text = f"walk-forward: {len(found)} agents, each trained on {how} its test of {plan.test}"
    text += ", starting from the previous agent" if plan.warm else ""
    result = backtest(
        markets,
        targets,
        cost=backtesting.cost_of(settings),
        financing=plan.financing,
        training=Training(text=text),
        start=found[0].test[0],
    )
    say()
    say(_windows(result, found))
    say()
    backtesting.show(result)
    write_json(own_file(root, BACKTEST), {"data": settings.env.kwargs["data"], **result.to_dict()})
    _log(root, len(found))
    say(f"\ndone: {root}; driftproof report {root}")


def _log(root: Path, count: int) -> None:
    """Concatenate the metrics of all windows for the report."""
    from driftproof.runs.folder import RunFolder
    from driftproof.runs.metrics import read_metrics

    run, done = RunFolder(root), 0
    with run.locked():
        for i in range(count):
            rows = read_metrics(root / _name(i) / METRICS).get(0, ())
            run.log(0, [{**row, "step": row["step"] + done} for row in rows])
            done += int(rows[-1]["step"]) if rows else 0


def _name(window: int) -> str:
    return f"window_{window:03d}"


def _windows(result: Any, found: list[Window]) -> str:
    """Log-returns in every window."""
    import numpy as np

    part = result.main
    own, market = part.accounts["agent"], part.accounts["buy and hold"]
    rows = [["out of sample", "log-return", "buy and hold", "mean position"]]
    for window in found:
        start, end = (np.datetime64(time, "us") for time in window.test)
        which = (own.start >= start) & (own.start < end)
        if which.any():
            returns = (f"{each.log_returns[which].sum():+.2%}" for each in (own, market))
            rows.append([" to ".join(window.test), *returns, f"{(own.long - own.short)[which].mean():+.2f}"])
    return table(rows, 1)
