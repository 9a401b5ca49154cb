"""``driftproof tune``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from driftproof.cli import data, evaluation, runs, scopes, tuned
from driftproof.cli.errors import CommandError, Stopped, say
from driftproof.cli.interrupts import interrupts
from driftproof.cli.options import (
    ConfigFile,
    EnvId,
    Name,
    Overrides,
    Resume,
    RunsDir,
    Trusted,
    check_resume,
    read_config,
)
from driftproof.cli.threads import use_threads
from driftproof.cli.view import PopulationStatus, Screen
from driftproof.runs import is_population, is_single
from driftproof.runs.sources import write_sources

if TYPE_CHECKING:
    from driftproof.config import Config
    from driftproof.pbt import PBTRunner
    from driftproof.ppo import DistributionalPPO


_CHANGEABLE = (
    *("run.evaluation_episodes", "run.threads", "run.device"),
    *("pbt.backend", "pbt.workers", "pbt.resources_per_member", "pbt.address"),
    *("pbt.members_per_actor", "pbt.max_restarts"),
)


def tune(
    config: ConfigFile = None,
    env: EnvId = None,
    overrides: Overrides = None,
    name: Name = None,
    runs_dir: RunsDir = Path("runs"),
    resume: Resume = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            "--confirm",
            metavar="N",
            min=1,
            help="Then train N agents with the best values and N with the configured ones, and compare.",
        ),
    ] = None,
    trust: Trusted = None,
) -> None:
    """Tune hyper-parameters by population-based training. Ctrl-C lets members finish, saves, and shows how to resume.

    The best values are printed and written to best.yaml in the run folder, a CONFIG for driftproof train.
    """
    check_resume(resume, config, env, name)
    if resume is None:
        settings = data.record(read_config(config, env, overrides, trust))
        runs.check_free(runs_dir, name, "tune")
        _check(settings)
        sources = scopes.plan(settings)
        with runs.created(runs_dir, name, settings, "tune") as folder:
            write_sources(folder, sources)
            try:
                runner = _population(settings, folder)
            except Exception:
                runs.discard(folder)
                raise
            _run(runner, settings, folder, seeds, is_new_folder=True)
    else:
        folder = runs.find(resume, runs_dir)
        if is_single(folder):
            raise CommandError(f"{folder} is a single agent: resume it with driftproof train --resume {folder}")
        settings = runs.read(folder, overrides, _CHANGEABLE, trust)
        scopes.plan(settings, folder)
        runner = _population(settings, folder)
        runs.keep(folder, settings)
        _run(runner, settings, folder, seeds)


def _run(runner: PBTRunner, settings: Config, folder: Path, seeds: int | None, is_new_folder: bool = False) -> None:
    """Train, evaluate the best agent, and with ``--confirm`` train agents with its hyper-parameters."""
    from driftproof.pbt import CannotStartError

    is_new = min(runner.updates) < runner.total_updates
    try:
        best = _train(runner, settings, folder)
    except CannotStartError:
        if is_new_folder:
            runs.discard(folder)
        raise
    tuned.show_best(runner, settings, folder)
    evaluation.finish(best, settings, folder, is_new=is_new)
    if best.env is not None:
        best.env.close()
    if seeds is not None:
        tuned.confirm(settings, folder, seeds)


def _check(settings: Config) -> None:
    """Check the settings before the run folder is created."""
    from driftproof.config import check

    check(settings, is_population=True)


def _population(settings: Config, folder: Path) -> PBTRunner:
    from driftproof.cli.callbacks import LogDrift
    from driftproof.config import build_population

    threads = use_threads(settings)
    if settings.pbt.backend == "process" and settings.run.threads is None:
        threads = "each process with its share of the cores"
    say(f"{settings.pbt.population_size} members, backend {settings.pbt.backend}: {threads}")
    with interrupts.held():
        return build_population(settings, folder, resume=is_population(folder), callback=LogDrift)


def _train(runner: PBTRunner, settings: Config, folder: Path) -> DistributionalPPO:
    """Train to the end, or until interrupted; returns the best agent."""
    from driftproof.pbt import CannotStartError, FolderTakenError

    searched = [item.name for item in settings.pbt.hyperparams]
    size, total = settings.pbt.population_size, settings.total_updates
    metric = settings.pbt.metric_name.replace("_", " ").replace("mean reward", "training return")
    status = PopulationStatus(str(folder), size, total, searched, settings.steps_per_update, metric)
    with Screen(status) as screen:

        def stop() -> None:
            runner.stop()
            screen.say("finishing the members in training, then saving; press Ctrl-C again to stop at once")

        def show(runner: PBTRunner) -> None:
            interrupts.renew()
            interrupts.check()
            status.update(runner)
            screen.refresh()

        runner.on_change = show
        with interrupts.asking(stop):
            try:
                best = runner.run()
            except KeyboardInterrupt:
                raise _stopped(folder, runner.updates, total) from None
            except (CannotStartError, FolderTakenError):
                raise
            except RuntimeError as error:
                raise _explained(error, folder) from error
            except OSError as error:
                where = error.filename or folder
                raise CommandError(
                    f"{where}: {error.strerror}; fix it, then driftproof tune --resume {folder}"
                ) from error
    if interrupts.came and min(runner.updates) < total:
        raise _stopped(folder, runner.updates, total)
    return best


def _stopped(folder: Path, updates: list[int], total: int) -> Stopped:
    done = f"stopped after {sum(updates):,} of {total * len(updates):,} updates; saved in {folder}"
    return Stopped(f"{done}. Resume: driftproof tune --resume {folder}")


def _explained(error: RuntimeError, folder: Path) -> CommandError:
    """Error that ended a run, in one line."""
    lines = str(error).strip().splitlines()
    what = lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"
    return CommandError(f"{what}; fix it, then driftproof tune --resume {folder}")
