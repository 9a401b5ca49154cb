"""``driftproof report`` and ``driftproof export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from driftproof.cli import agents, runs
from driftproof.cli.errors import CommandError, say
from driftproof.cli.options import Agent, Best, Member, RunsDir, Trusted
from driftproof.runs import REPORT, own_file


def report(
    run: Annotated[list[str], typer.Argument(metavar="RUN", help="Folders or names of runs to compare.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            help="HTML file to write. Default: report.html in the run folder; for several runs, in --runs-dir.",
        ),
    ] = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Write a self-contained HTML report on one or more runs; it loads nothing from the network."""
    from driftproof.report import write_report

    if output is not None and output.suffix.lower() not in (".html", ".htm"):
        raise CommandError(f"--output {output} must end in .html")
    folders = [runs.find(each, runs_dir) for each in run]
    target = output or own_file(folders[0] if len(folders) == 1 else runs_dir, REPORT)
    try:
        write_report(folders, target)
    except ValueError as error:
        raise CommandError(str(error)) from error
    say(f"written to {target}")


def export(
    run: Agent,
    onnx: Annotated[Path, typer.Option("--onnx", help="ONNX file to write.")],
    member: Member = None,
    best: Best = False,
    runs_dir: RunsDir = Path("runs"),
    trust: Trusted = None,
) -> None:
    """Export an agent to ONNX. Recurrent states are inputs and outputs; observation normalisation is included."""
    from driftproof.export import ExportError, export_onnx

    found = agents.find(run, runs_dir, member, best, trust)
    try:
        export_onnx(found.load(), onnx)
    except (ExportError, ImportError) as error:
        raise CommandError(str(error)) from error
    say(f"{found.checkpoint}: written to {onnx}")
