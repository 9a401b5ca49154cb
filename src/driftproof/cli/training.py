"""``driftproof train``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from driftproof.cli import evaluation, runs
from driftproof.cli.errors import INTERRUPTED, CommandError
from driftproof.cli.interrupts import Interrupts
from driftproof.cli.options import (
    ConfigFile,
    EnvId,
    Name,
    Overrides,
    Resume,
    RunsDir,
    check_resume,
    read_config,
    use_threads,
)
from driftproof.cli.view import AgentStatus, Screen

if TYPE_CHECKING:
    from driftproof.config import Config
    from driftproof.pbt.folder import RunFolder
    from driftproof.ppo import DistributionalPPO


_CHANGEABLE = tuple(
    f"run.{name}"
    for name in ("total_timesteps", "evaluation_episodes", "checkpoint_every", "keep_checkpoints", "threads", "device")
)


def train(
    config: ConfigFile = None,
    env: EnvId = None,
    overrides: Overrides = None,
    name: Name = None,
    runs_dir: RunsDir = Path("runs"),
    resume: Resume = None,
) -> None:
    """Train an agent. Ctrl-C finishes the update, saves, and says how to go on; a second one stops at once."""
    check_resume(resume, config, env, name)
    if resume is None:
        settings = read_config(config, env, overrides)
        runs.check_free(runs_dir, name, "train")
        agent = _built(settings)
        folder = runs.create(runs_dir, name, settings, "train")
    else:
        folder = runs.find(resume, runs_dir)
        if runs.is_population(folder):
            raise CommandError(f"{folder} holds a population: driftproof tune --resume {folder}")
        settings = runs.read(folder, overrides, _CHANGEABLE)
        agent = _built(settings)
    from driftproof.pbt.folder import RunFolder

    run = RunFolder(folder)
    try:
        with run.locked():
            if resume is not None:
                _restore(agent, folder)
            has_learned = _learn(agent, settings, folder, run)
    except RuntimeError as error:
        raise _explained(error, folder) from error
    except OSError as error:
        raise CommandError(f"{error.filename or folder}: {error.strerror or error}; {_advice(folder)}") from error
    evaluation.finish(agent, settings, folder, is_new=has_learned)


def _built(settings: Config) -> DistributionalPPO:
    from driftproof.config import build_agent

    use_threads(settings)
    return build_agent(settings)


def _restore(agent: DistributionalPPO, folder: Path) -> None:
    """Put an agent where the last checkpoint is; without one it begins anew."""
    from driftproof.state import CheckpointStore

    checkpoint = CheckpointStore(folder / "checkpoints").load_latest()
    if checkpoint is not None:
        agent.load_state_tree(checkpoint.tree)


def _learn(agent: DistributionalPPO, settings: Config, folder: Path, run: RunFolder) -> bool:
    """Train to the end, or until somebody interrupts; whether there was anything left to do."""
    from stable_baselines3.common.logger import Logger

    from driftproof.cli.callbacks import LogDrift, LogRun
    from driftproof.ppo import SaveCheckpoints

    total = settings.total_updates * settings.steps_per_update
    if agent.num_timesteps >= total:
        return False
    agent.set_logger(Logger(None, []))
    status = AgentStatus(str(folder), agent.num_timesteps, total)
    saving = SaveCheckpoints(
        folder / "checkpoints",
        settings.run.checkpoint_every,
        settings.run.keep_checkpoints,
        restart_environments=settings.run.exact_resume,
    )
    with Screen(status) as screen:

        def stop() -> None:
            agent.pause_at = max(agent.num_timesteps, 1)
            screen.say("finishing this update, then saving; once more stops at once")

        with Interrupts(stop) as interrupts:
            # First what is logged: a row that is written twice counts once, one that is missing is lost.
            callbacks = [LogDrift(), LogRun(run, status, screen), saving]
            try:
                left = settings.run.total_timesteps - agent.num_timesteps
                agent.learn(left, callbacks, log_interval=None, reset_num_timesteps=agent.num_timesteps == 0)
            except KeyboardInterrupt:
                _say_stopped(folder, agent.num_timesteps, total, at_once=True)
    if interrupts.came and agent.num_timesteps < total:
        _say_stopped(folder, agent.num_timesteps, total, is_exact=agent.edge.is_whole)
    return True


def _say_stopped(folder: Path, steps: int, total: int, *, at_once: bool = False, is_exact: bool = True) -> None:
    from driftproof.state import CheckpointStore

    how = "the last checkpoint is in" if at_once else "saved in"
    if at_once and not CheckpointStore(folder / "checkpoints").list():
        how = "no checkpoint was written yet in"
    where = f"stopped at step {steps:,} of {total:,}; {how} {folder}"
    inexact = "" if is_exact else " (with new episodes; with run.exact_resume: true exactly)"
    typer.echo(f"{where}. Go on{inexact}: driftproof train --resume {folder}", err=True)
    raise typer.Exit(INTERRUPTED)


def _advice(folder: Path) -> str:
    return f"what was saved before is whole: when that is mended, driftproof train --resume {folder}"


def _explained(error: RuntimeError, folder: Path) -> Exception:
    """A checkpoint that could not be written in the background, or another process at work."""
    from driftproof.ppo import RolloutError, TrainingError

    if isinstance(error.__cause__, OSError):
        return CommandError(f"{error}; {_advice(folder)}")
    if isinstance(error, RolloutError | TrainingError):
        return CommandError(f"{error}. Checkpoints are in {folder}")
    if "another process" in str(error):
        return CommandError(str(error))
    return error
