"""All commands. They import what they need when they run, so that ``--help`` is fast."""

from __future__ import annotations

import functools
import logging
import re
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer

from driftproof import __version__
from driftproof.cli import (
    backtesting,
    configuration,
    data,
    evaluation,
    files,
    listing,
    markets,
    pages,
    playing,
    terminal,
    training,
    tuning,
    walking,
)
from driftproof.cli.errors import INTERRUPTED, USER_ERROR, Stopped, as_line, as_lines, is_mistake
from driftproof.cli.interrupts import interrupts

app = typer.Typer(
    help="Recurrent distributional PPO that keeps learning when the world changes.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
_shows_tracebacks = False
_warned: set[str] = set()


@app.callback(invoke_without_command=True)
def _main(
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show the Python traceback of errors.")] = False,
) -> None:
    global _shows_tracebacks
    _shows_tracebacks = traceback
    if version:
        typer.echo(__version__)
        raise typer.Exit


def _interruptible(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command so that it reports an interruption, which Typer would hide."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except KeyboardInterrupt:
            raise Stopped("interrupted") from None

    return run


for _command in (
    training.train,
    tuning.tune,
    evaluation.evaluate,
    playing.play,
    pages.report,
    markets.infer,
    backtesting.backtest,
    walking.walkforward,
    pages.export,
    configuration.config,
    files.inspect,
    files.convert,
):
    app.command()(_interruptible(_command))
app.command("runs")(_interruptible(listing.list_runs))
data.app.command()(_interruptible(data.check))
app.add_typer(data.app, name="data")


def main() -> None:
    """Run a command and show user errors in one line, without a traceback."""
    warnings.showwarning = _show_warning
    warnings.simplefilter("once", UserWarning)
    # Errors of the background writer are raised in this thread too; logging them would print them twice.
    logging.getLogger("driftproof").addHandler(logging.NullHandler())
    threading.excepthook = _show_thread_error
    try:
        app(_arguments(sys.argv[1:]))
    except Stopped as stop:
        _end([as_line(stop)], INTERRUPTED)
    except Exception as error:
        if _shows_tracebacks or not (interrupts.came or is_mistake(error)):
            raise
        if interrupts.came and not is_mistake(error):
            # A library may catch KeyboardInterrupt and raise another error.
            _end(["driftproof: interrupted"], INTERRUPTED)
        _end(as_lines(error), USER_ERROR)


def _arguments(given: list[str]) -> list[str]:
    """Arguments of the command line, where ``--phases`` alone means ``--phases all``."""
    return [
        part
        for i, word in enumerate(given)
        for part in ([word, "all"] if word == "--phases" and given[i + 1 : i + 2] != ["all"] else [word])
    ]


def _end(lines: list[str], code: int) -> NoReturn:
    with interrupts.shielded():
        terminal.leave_if_closed()
        print("\n".join(lines), file=sys.stderr)
        sys.exit(code)


def _show_thread_error(arguments: threading.ExceptHookArgs) -> None:
    if not issubclass(arguments.exc_type, OSError):
        threading.__excepthook__(arguments)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    # Gymnasium's warnings are in colour and begin with "WARN:".
    text = re.sub(r"\x1b\[\d*m(WARN: )?", "", str(message))
    line = as_line(f"warning: {text}")
    if line not in _warned:
        _warned.add(line)
        print(line, file=sys.stderr)
