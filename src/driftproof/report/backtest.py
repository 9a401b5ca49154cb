"""Section about backtests: equity and drawdown of agents in markets, next to baselines."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from driftproof._files import read_json
from driftproof.report.bundles import Bundle, titled
from driftproof.report.charts import Absent, Chart, Section, Table, Text, Trace, label
from driftproof.report.runs import Run
from driftproof.runs import BACKTEST, own_file

_AGENT, _MARKET = "agent", "buy and hold"
_STYLES = {_MARKET: "@muted", "volatility-scaled": "@muted/0.55"}
"""Colours of baselines; staying flat is the line at 1."""
_MOST_POINTS = 20_000

_Name = Annotated[str, Field(max_length=200)]
_Number = Annotated[float, Field(allow_inf_nan=False)]
_Curve = Annotated[list[_Number | None], Field(max_length=_MOST_POINTS)]


class _Performance(BaseModel):
    first: _Name
    last: _Name
    bars: Annotated[int, Field(ge=2, le=10**12)]
    log_return: _Number
    annual_return: _Number | None
    volatility: _Number
    sharpe: _Number | None
    sharpe_error: _Number | None
    max_drawdown: _Number
    turnover: _Number
    costs: _Number
    financing: _Number


class _Group(BaseModel):
    bars: _Number
    log_return: _Number
    buy_and_hold: _Number
    exposure: _Number


class _Curves(BaseModel):
    time: Annotated[list[_Name], Field(max_length=_MOST_POINTS)]
    equity: Annotated[dict[_Name, _Curve], Field(max_length=20)]
    drawdown: _Curve
    position: _Curve


class _Part(BaseModel):
    label: _Name
    sample: Literal["in sample", "out of sample", "unknown"]
    performances: Annotated[dict[_Name, _Performance], Field(min_length=1, max_length=20)]
    years: Annotated[dict[_Name, _Group], Field(max_length=1000)]
    regimes: Annotated[dict[_Name, _Group], Field(max_length=20)]
    costs: Annotated[dict[_Name, _Performance], Field(max_length=20)]
    excess: tuple[_Number | None, _Number | None, _Number | None]
    deflated: _Number | None
    curves: _Curves

    @property
    def text(self) -> str:
        first = next(iter(self.performances.values()))
        return f"{self.label}, {first.first} to {first.last}"


class _Training(BaseModel):
    text: Annotated[str, Field(max_length=10_000)]


class Backtest(BaseModel):
    """What ``driftproof backtest`` and ``walkforward`` write, as far as it is drawn."""

    parts: Annotated[list[_Part], Field(min_length=1, max_length=100)]
    cost: _Number
    financing: _Number
    trials: Annotated[int, Field(ge=1, le=10**9)]
    training: _Training


def read_backtest(run: Run) -> Backtest | None:
    """The last backtest of a run; ``None`` if there is none.

    Raises:
        RunFolderError: The file is damaged.
    """
    path = own_file(run.path, BACKTEST)
    return read_json(path, Backtest, advice="remove it, or test the run again") if os.path.lexists(path) else None


def backtests(bundles: Sequence[Bundle]) -> list[Section | Absent]:
    """Equity, drawdown and figures of all runs with a backtest; nothing unless there are runs in markets."""
    title = "Backtest"
    found = [(run, bundle.colour, test) for bundle in bundles for run in bundle.runs if (test := read_backtest(run))]
    if not found:
        is_market = any(_is_market(run) for bundle in bundles for run in bundle.runs)
        return [Absent(title, "no run has a backtest (driftproof backtest RUN DATA)")] if is_market else []
    parts: list[Chart | Table | Text] = []
    labels = []
    for run, colour, test in found:
        parts += [draw(run, bundles, test, colour) for draw in (_equity, _drawdown, _years, _positions)]
        parts += [_cost_table(run, bundles, test), *_figures(run, bundles, test), _regime_table(run, bundles, test)]
        own = [f"{run.name}: {part.text}" if len(found) > 1 else part.text for part in test.parts]
        labels += [f"{text} ({_told(test, part)})" for text, part in zip(own, test.parts, strict=True)]
    costs = [f"{run.name}: {_costs(test)}" if len(found) > 1 else _costs(test) for run, _, test in found]
    lead = "What the agent would have earned at these prices, after costs. Shaded: prices that it was trained on."
    return [Section(title, lead, parts, costs, columns=2, labels=labels)]


def _is_market(run: Run) -> bool:
    env = run.config.get("env")
    return isinstance(env, dict) and str(env.get("id")).endswith("Market-v0")


def _told(test: Backtest, part: _Part) -> str:
    mean, low, high = part.excess
    luck = "0" if test.trials == 1 else f"the best of {test.trials} trials without skill"
    told = [] if part.deflated is None else [f"probability of a Sharpe ratio above {luck}: {part.deflated:.0%}"]
    if mean is not None and low is not None and high is not None:
        told.insert(0, f"beyond buy and hold {mean:+.1%} a year, 95% interval {low:+.1%} to {high:+.1%}")
    return "; ".join(told) or f"best of {test.trials}"


def _costs(test: Backtest) -> str:
    return (
        f"{test.training.text}. Costs {test.cost:.3%} of the value traded, short positions {test.financing:.1%} a year."
    )


def _equity(run: Run, bundles: Sequence[Bundle], test: Backtest, colour: str) -> Chart:
    """Equity over all parts, one after the other."""
    data: list[Trace] = []
    for name in (_AGENT, *_STYLES):
        times: list[str] = []
        values: list[float | None] = []
        level = 1.0
        for part in test.parts:
            curve = part.curves.equity.get(name)
            if curve is None or len(curve) != len(part.curves.time):
                continue
            times += part.curves.time
            values += [None if value is None else level * value for value in curve]
            level = next((value for value in reversed(values) if value is not None), level)
        width = 2.5 if name == _AGENT else 1.5
        data.append({**_line(times, values, name, _STYLES.get(name, colour), width), "showlegend": True})
    positive = [value for trace in data for value in trace["y"] if value]
    is_wide = bool(positive) and max(positive) > 5 * min(positive)
    layout = {**_dates(test), "yaxis": {"type": "log" if is_wide else "linear", "tickformat": "~g"}}
    caption = "Value of an account that begins with 1, after costs."
    return Chart(titled("Equity", run, bundles), caption, data, layout, 340, span=2)


def _drawdown(run: Run, bundles: Sequence[Bundle], test: Backtest, colour: str) -> Chart:
    times = [time for part in test.parts for time in part.curves.time]
    values = [value for part in test.parts for value in part.curves.drawdown]
    data = [{**_line(times, values, "drawdown", colour, 1.5), "fill": "tozeroy", "fillcolor": f"{colour}/0.18"}]
    layout = {**_dates(test), "yaxis": {"tickformat": ".0%"}}
    return Chart(titled("Drawdown", run, bundles), "Loss since the last peak of each part.", data, layout, 340)


def _line(times: list[str], values: list[Any], name: str, colour: str, width: float) -> Trace:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": times,
        "y": values,
        "name": label(name),
        "line": {"color": colour, "width": width},
        "hovertemplate": "%{y:.4g}",
    }


def _dates(test: Backtest) -> dict[str, Any]:
    """A layout with an axis of dates, and the time of training shaded."""
    shapes = []
    for part in test.parts:
        if part.sample == "in sample" and part.curves.time:
            place = {"type": "rect", "xref": "x", "yref": "paper", "y0": 0, "y1": 1, "layer": "below"}
            ends = {"x0": part.curves.time[0], "x1": part.curves.time[-1]}
            shapes.append({**place, **ends, "fillcolor": "@phase", "line": {"width": 0}})
    return {"xaxis": {"type": "date", "title": {"text": ""}, "hoverformat": "%Y-%m-%d"}, "shapes": shapes}


def _positions(run: Run, bundles: Sequence[Bundle], test: Backtest, colour: str) -> Chart:
    times = [time for part in test.parts for time in part.curves.time]
    values = [value for part in test.parts for value in part.curves.position]
    data = [{**_line(times, values, "position", colour, 1.0), "line": {"color": colour, "width": 1, "shape": "hv"}}]
    layout = {**_dates(test), "yaxis": {"range": [-1.05, 1.05]}}
    caption = "Share of the account that is held: 1 is long, -1 short. Every step is a trade."
    return Chart(titled("Position", run, bundles), caption, data, layout, 340)


def _figures(run: Run, bundles: Sequence[Bundle], test: Backtest) -> list[Table]:
    """A table for each part of the time."""
    head = ["who", "log-return", "per year", "volatility", "Sharpe", "drawdown", "turnover a year", "costs"]
    tables = []
    for part in test.parts:
        rows = []
        for name, each in part.performances.items():
            rest = [f"{each.turnover:.1f}", f"{each.costs + each.financing:.1%}"]
            shares = [f"{each.log_return:+.1%}", _annual(each), f"{each.volatility:.1%}"]
            rows.append([name, *shares, _sharpe(each), f"{each.max_drawdown:.0%}", *rest])
        caption = "Sharpe ratio: per year, with its standard error. Costs: of trading and of short positions."
        tables.append(Table(titled(_when(part), run, bundles), head, rows, caption, span=0))
    return tables


def _when(part: _Part) -> str:
    word = "IN SAMPLE" if part.sample == "in sample" else part.sample.capitalize()
    first = next(iter(part.performances.values()))
    return f"{word}, {first.first[:10]} to {first.last[:10]}"


def _main(test: Backtest) -> _Part:
    """The longest part that the agent was not trained on, or else the longest."""
    unseen = [part for part in test.parts if part.sample == "out of sample"]
    return max(unseen or test.parts, key=lambda part: next(iter(part.performances.values())).bars)


def _sharpe(each: _Performance) -> str:
    error = "" if each.sharpe_error is None else f" ± {each.sharpe_error:.2f}"
    return "–" if each.sharpe is None else f"{each.sharpe:+.2f}{error}"


def _annual(each: _Performance) -> str:
    return "–" if each.annual_return is None else f"{each.annual_return:+.1%}"


def _cost_table(run: Run, bundles: Sequence[Bundle], test: Backtest) -> Table:
    part = _main(test)
    rows = [[factor, _annual(each), _sharpe(each), f"{each.costs:.1%}"] for factor, each in part.costs.items()]
    head = ["costs", "per year", "Sharpe", "paid"]
    caption = f"{_when(part)}: the same positions."
    return Table(titled("At multiples of the costs", run, bundles), head, rows, caption, span=1)


def _regime_table(run: Run, bundles: Sequence[Bundle], test: Backtest) -> Table:
    part = _main(test)
    rows = [
        [name, f"{each.bars:,.0f}", f"{each.log_return:+.1%}", f"{each.buy_and_hold:+.1%}", f"{each.exposure:+.2f}"]
        for name, each in part.regimes.items()
    ]
    head = ["regime", "bars", "log-return", "buy and hold", "mean position"]
    caption = f"{_when(part)}. Trend of the last 63 bars, and whether their volatility is above its median so far."
    return Table(titled("By regime", run, bundles), head, rows, caption, span=0)


def _years(run: Run, bundles: Sequence[Bundle], test: Backtest, colour: str) -> Chart:
    """Log-returns by year; years of training are pale."""
    data: list[Trace] = []
    for i, part in enumerate(test.parts):
        opacity = 0.35 if part.sample == "in sample" else 1.0
        for name, own in ((_AGENT, colour), (_MARKET, "@muted")):
            key = "log_return" if name == _AGENT else "buy_and_hold"
            data.append(
                {
                    "type": "bar",
                    "x": [f"{year}-07-01" if year.isdecimal() else year for year in part.years],
                    "y": [getattr(each, key) for each in part.years.values()],
                    "name": label(name),
                    "legendgroup": name,
                    "offsetgroup": name,
                    "showlegend": i == len(test.parts) - 1,
                    "marker": {"color": own, "opacity": opacity},
                    "hovertemplate": f"{label(part.label)}: %{{y:.1%}}",
                }
            )
    layout = {**_dates(test), "yaxis": {"tickformat": ".0%"}, "barmode": "group"}
    caption = "Log-return of each calendar year, after costs."
    return Chart(titled("By year", run, bundles), caption, data, layout, 340)
