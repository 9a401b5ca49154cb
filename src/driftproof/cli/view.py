"""Progress of training: a live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from driftproof._text import printable
from driftproof.cli import terminal
from driftproof.runs import ALARM, ALARMS, ANCHOR_MOVES, LEVEL, PHASE, RESPONSES, RETURN, TRIAL

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from driftproof.pbt import PBTRunner

SIGNS = {
    "training return": RETURN,
    "VGS factor": "vgs/scaling_factor",
    "critic divergence": "critic/divergence",
    "KL": "train/approx_kl",
    "entropy": "train/entropy_loss",
}
"""Names shown for the most important metrics."""

_WIDE = 100
_LEFT_OUT = ("critic divergence", "entropy")
"""Metrics that a population's table omits on a narrow terminal."""
_SECONDS_BETWEEN_LINES = 2.0
_BARS = "▁▂▃▄▅▆▇█"
_HISTORY = 60
_LONGEST_NAME = 100
_NOT_LISTED = (
    *(PHASE, ALARM, ALARMS, LEVEL, TRIAL, "drift/archived", "drift/rewired", "drift/recovered"),
    *(ANCHOR_MOVES, "drift/anchor_undone"),
    *("drift/calibration", "drift/cusum", "drift/episode_return", "drift/typical_return"),
)
"""Drift and alarm metrics that :func:`drift_told` summarises in one line."""


class Status(Protocol):
    """Progress to show."""

    title: str
    """Title of the run."""
    note: str
    """Message that stays visible until the end."""

    def renderable(self) -> RenderableType:
        """The whole status, for a terminal."""

    def lines(self) -> Sequence[str]:
        """Lines about what has changed since the last call."""


class Screen:
    """Display of a status: live on a terminal, elsewhere as lines about what has changed.

    Args:
        status: The status; on a terminal, another thread reads it.
    """

    def __init__(self, status: Status) -> None:
        self._status = status
        self._live: Any = None

    def __enter__(self) -> Screen:
        if sys.stdout.isatty():
            from rich.live import Live

            self._live = Live(get_renderable=self._status.renderable, refresh_per_second=4)
            self._live.start()
        else:
            _print(f"training in {self._status.title}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        terminal.leave_if_closed()
        if self._live is not None:
            self._live.stop()

    def refresh(self) -> None:
        """Show the changed status."""
        if self._live is None:
            for line in self._status.lines():
                _print(line)

    def say(self, note: str) -> None:
        """Show a message; safe in signal handlers."""
        self._status.note = note
        if self._live is None:
            # Raising here would raise inside the code that the signal interrupted.
            with contextlib.suppress(OSError):
                os.write(2, f"driftproof: {note}\n".encode())


def _print(line: str) -> None:
    print(printable(line), flush=True)


def _plain(text: str) -> str:
    """A name from a file or environment as text without markup and control characters."""
    from rich.markup import escape

    return escape(printable(text, _LONGEST_NAME))


class AgentStatus:
    """Status of one agent in training.

    Args:
        title: Title of the run.
        done: Environment steps done before this command.
        total: Environment steps in total.
    """

    def __init__(self, title: str, done: int, total: int) -> None:
        self.title, self.steps, self.total = title, done, total
        self.note = ""
        self._done_before, self._began = done, time.monotonic()
        self._row: Mapping[str, float] = {}
        self._returns: list[float] = []
        self._alarm_at: int | None = None
        self._printed_at = -math.inf

    def update(self, row: Mapping[str, float]) -> None:
        """Set the metrics of the last update."""
        self.steps, self._row = int(row["step"]), dict(row)
        if row.get(ALARM, 0.0) > 0:
            self._alarm_at = self.steps
        if math.isfinite(value := row.get(RETURN, math.nan)):
            self._returns = [*self._returns[1 - _HISTORY :], value]

    @property
    def elapsed(self) -> float:
        """Seconds since training began or was resumed."""
        return time.monotonic() - self._began

    @property
    def steps_per_second(self) -> float:
        return (self.steps - self._done_before) / max(self.elapsed, 1e-9)

    def lines(self) -> list[str]:
        if time.monotonic() - self._printed_at < _SECONDS_BETWEEN_LINES and self.steps < self.total:
            return []
        self._printed_at = time.monotonic()
        told = signs_of(self._row)
        if drift := drift_told(self._row, self._alarm_at):
            told["drift"] = drift
        signs = "".join(f"  {name} {value}" for name, value in told.items())
        pace = f"{self.steps_per_second:,.0f} steps/s  {time_left(self._share, self.elapsed)}".rstrip()
        return [f"step {self.steps:,} of {self.total:,}  {pace}{signs}"]

    @property
    def _share(self) -> float:
        """Fraction of this command's work that is done."""
        return (self.steps - self._done_before) / max(self.total - self._done_before, 1)

    def renderable(self) -> RenderableType:
        from rich.console import Group
        from rich.panel import Panel
        from rich.table import Table

        table = Table.grid(padding=(0, 2))
        for name, value in signs_of(self._row).items():
            table.add_row(f"[dim]{name}", value)
        if len(self._returns) > 1:
            table.add_row("[dim]returns", f"[cyan]{sparkline(self._returns)}")
        if told := drift_told(self._row, self._alarm_at):
            is_answered = self._row.get(LEVEL, 0.0) > 0
            table.add_row("[dim]drift", f"[yellow]{told}" if is_answered else told)
        for name, drift in sorted(self._row.items()):
            if name.startswith("drift/") and name not in _NOT_LISTED:
                table.add_row(f"[dim]{_plain(name)}", number(drift))
        parts: list[RenderableType] = [
            progress_bar(self.steps, self.total, self.steps_per_second, self._share, self.elapsed),
            table,
        ]
        if self.note:
            parts.append(f"[yellow]{self.note}")
        return Panel(Group(*parts), title=_plain(self.title), title_align="left", expand=False)


class PopulationStatus:
    """Status of a population in training.

    Args:
        title: Title of the run.
        size: Number of members.
        total: Updates of each member.
        shown: Names of the searched hyper-parameters.
        steps: Environment steps per update.
        metric: Name of the metric that ranks the members.
    """

    def __init__(self, title: str, size: int, total: int, shown: Sequence[str], steps: int, metric: str) -> None:
        self.title, self.note, self._metric = title, "", metric
        self._size, self._total, self._shown, self._steps = size, total, list(shown), steps
        self._began = time.monotonic()
        self._updates_before: int | None = None
        self._members: list[dict[str, Any]] = []
        self._printed_events: int | None = None
        self._printed_updates = [0] * size
        self._news: list[str] = []

    def update(self, runner: PBTRunner) -> None:
        """Set the state of the population."""
        marks = ["" for _ in range(self._size)]
        for event in runner.scheduler.events:
            if event.kind in ("exploit", "replace"):
                marks[event.member] = f"← {event.donor} at {event.step}"
            elif event.kind == "restart":
                marks[event.member] += " ↻"
            elif event.kind == "undo":
                marks[event.member] += " ↶"
        updates = runner.updates
        if self._updates_before is None:
            self._updates_before = sum(updates)
        self._members = [
            {
                "updates": updates[i],
                "performance": member.performance,
                "hyperparams": dict(member.hyperparams),
                "signs": signs_of(runner.latest.get(i, {})),
                "drift": {name: runner.latest[i][name] for name in (PHASE, ALARMS) if name in runner.latest.get(i, {})},
                "mark": marks[i].strip(),
                "is_best": i == runner.best_member and any(updates),
            }
            for i, member in enumerate(runner.scheduler.members)
        ]
        self._take_news(runner)

    def lines(self) -> list[str]:
        news, self._news = self._news, []
        return news

    def _take_news(self, runner: PBTRunner) -> None:
        events = runner.scheduler.events
        if self._printed_events is None:
            self._printed_events, self._printed_updates = len(events), list(runner.updates)
            return
        for member, updates in enumerate(runner.updates):
            if updates != self._printed_updates[member]:
                signs = signs_of(runner.latest.get(member, {}))
                signs.pop("training return", None)
                signs = {self._metric: number(runner.scheduler.members[member].performance), **signs}
                metrics = "".join(f"  {name} {value}" for name, value in signs.items())
                self._news.append(f"member {member}  update {updates} of {self._total}{metrics}")
        for event in events[self._printed_events :]:
            if event.kind in ("exploit", "replace"):
                changes = [f"{name} {number(old)} → {number(new)}" for name, (old, new) in event.mutated.items()]
                self._news.append("  ".join([f"member {event.member}", f"exploits member {event.donor}", *changes]))
            elif event.kind in ("restart", "undo"):
                self._news.append(f"member {event.member}  {event.kind}  {event.detail}")
        self._printed_events, self._printed_updates = len(events), list(runner.updates)

    def renderable(self) -> RenderableType:
        from rich.console import Group
        from rich.panel import Panel

        done = sum(member["updates"] for member in self._members)
        elapsed, before, total = time.monotonic() - self._began, self._updates_before or 0, self._size * self._total
        rate = (done - before) * self._steps / max(elapsed, 1e-9)
        parts: list[RenderableType] = [
            progress_bar(done, total, rate, (done - before) / max(total - before, 1), elapsed),
            self._table(),
        ]
        if self.note:
            parts.append(f"[yellow]{self.note}")
        return Panel(Group(*parts), title=_plain(self.title), title_align="left", expand=False)

    def _table(self) -> Table:
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        is_narrow = shutil.get_terminal_size().columns < _WIDE
        names = [name for name in SIGNS if name != "training return" and not (is_narrow and name in _LEFT_OUT)]
        told = [member["drift"] for member in self._members]
        drifts = any(PHASE in each for each in told)
        alarms = any(each.get(ALARMS, 0) > 0 or (drifts and ALARMS in each) for each in told)
        drift = [name for name, is_shown in ((PHASE, drifts), (ALARMS, alarms)) if is_shown]
        heads = [re.sub("[ _.]", "\n", _plain(name)) for name in (*names, *self._shown)]
        heads += [name.removeprefix("drift/") for name in drift]
        for head in ("", "updates", _plain(self._metric), *heads):
            table.add_column(head, justify="right", vertical="bottom", no_wrap=True)
        table.add_column("last\nexploit", no_wrap=True)
        # Best member first, so that a small terminal shows it.
        order = sorted(range(len(self._members)), key=lambda i: not self._members[i]["is_best"])
        for i in order:
            member = self._members[i]
            values = [member["signs"].get(name, "") for name in names]
            searched = [_plain(number(member["hyperparams"].get(name))) for name in self._shown]
            style = "bold green" if member["is_best"] else ""
            updates, performance = f"{member['updates']}/{self._total}", number(member["performance"])
            drifted = [number(member["drift"].get(name)) for name in drift]
            table.add_row(str(i), updates, performance, *values, *searched, *drifted, member["mark"], style=style)
        return table


def signs_of(row: Mapping[str, float]) -> dict[str, str]:
    """The most important metrics of a row, as text."""
    signs = {}
    for name, metric in SIGNS.items():
        if metric in row:
            signs[name] = number(-row[metric] if name == "entropy" else row[metric])
    return signs


def drift_told(row: Mapping[str, float], alarm_at: int | None = None) -> str:
    """Drift phase, drift alarms and the agent's responses as text; empty if none are logged.

    Args:
        row: Metrics of an update.
        alarm_at: Step of the last alarm, if known.
    """
    parts = []
    if math.isfinite(phase := row.get(PHASE, math.nan)):
        parts.append(f"phase {phase:g}")
    if (alarms := row.get(ALARMS, 0.0)) > 0 or alarm_at is not None:
        count = f"alarm {alarms:g}" if alarms > 0 else "alarm"
        parts.append(count if alarm_at is None else f"{count}, {int(row['step']) - alarm_at:,} steps ago")
    elif ALARM in row or ALARMS in row:
        parts.append("no alarm")
    if (level := row.get(LEVEL, 0.0)) in range(1, len(RESPONSES)):
        parts.append(RESPONSES[int(level)])
    if row.get(TRIAL, 0.0) > 0:
        parts.append("tries earlier weights")
    if (moves := row.get(ANCHOR_MOVES, 0.0)) > 0:
        parts.append(f"shifts followed {moves:g}")
    return "; ".join(parts)


def number(value: Any) -> str:
    """A number in few digits; a dash if it is missing."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if not isinstance(value, int | float) or isinstance(value, bool):
        return str(value)
    if value == 0 or abs(value) >= 0.01:
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def sparkline(values: Sequence[float]) -> str:
    """Values as a line of bars."""
    low, high = min(values), max(values)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in values)


def progress_bar(done: int, total: int, rate: float, share: float, elapsed: float) -> Table:
    """A progress bar, followed by numbers.

    Args:
        done: Steps done, including those before this command.
        total: Steps in total.
        rate: Steps per second.
        share: Fraction of this command's work that is done.
        elapsed: Seconds since it began.
    """
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    pace = f"{rate:,.0f} steps/s" if share > 0 else "starting"
    numbers = f"{done:,} of {total:,}  {pace}  {clock(elapsed)} elapsed  {time_left(share, elapsed)}".rstrip()
    grid.add_row(ProgressBar(total, min(done, total), width=40), numbers)
    return grid


def time_left(share: float, elapsed: float) -> str:
    """Estimated time left, as text; empty at the start and at the end."""
    return f"{clock(elapsed / share * (1 - share))} left" if 0 < share < 1 else ""


def clock(seconds: float) -> str:
    """A duration as minutes and seconds, or hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"
