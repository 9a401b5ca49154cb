"""``driftproof train``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from driftproof.cli import data, evaluation, origins, runs, scopes, tuned
from driftproof.cli.errors import CommandError, Stopped, say
from driftproof.cli.interrupts import interrupts
from driftproof.cli.options import (
    Best,
    ConfigFile,
    Defaults,
    EnvId,
    From,
    Member,
    Name,
    Overrides,
    Resume,
    RunsDir,
    Trusted,
    check_resume,
    read_new,
)
from driftproof.cli.threads import use_threads
from driftproof.cli.view import AgentStatus, Screen
from driftproof.runs import CHECKPOINTS, CONFIG, is_population
from driftproof.runs.sources import write_sources

if TYPE_CHECKING:
    from driftproof.config import Config
    from driftproof.ppo import DistributionalPPO
    from driftproof.runs.folder import RunFolder


_CHANGEABLE = tuple(
    f"run.{name}"
    for name in ("total_timesteps", "evaluation_episodes", "checkpoint_every", "keep_checkpoints", "threads", "device")
)


def train(
    config: ConfigFile = None,
    env: EnvId = None,
    overrides: Overrides = None,
    defaults: Defaults = False,
    name: Name = None,
    runs_dir: RunsDir = Path("runs"),
    resume: Resume = None,
    source: From = None,
    member: Member = None,
    best: Best = False,
    trust: Trusted = None,
) -> None:
    """Train an agent. Ctrl-C finishes the update, saves, and shows how to resume; a second Ctrl-C stops at once.

    With --env and without a CONFIG, settings begin with values that were measured in that environment, or else in the
    nearest one; --set overrides them, and --defaults leaves them out.

    With --from, training starts from another agent's weights and statistics, and, without a CONFIG, with that agent's
    settings; --env and --set override them.
    """
    check_resume(resume, config, env, name, source)
    if defaults and (resume is not None or (source is not None and config is None)):
        raise CommandError("--defaults leaves out the starting values of --env, which --resume and --from do not use")
    if resume is None:
        from driftproof.config import try_env

        origin = origins.find(source, runs_dir, member, best, trust)
        if origin is None or config is not None:
            settings, told = read_new(config, env, overrides, trust, defaults)
            if told:
                say(told)
        else:
            settings = origin.config(env, overrides)
        runs.check_free(runs_dir, name, "train")
        settings = data.record(settings)
        try_env(settings)
        sources = scopes.plan(settings, origin=origin, trials=tuned.trials_behind(config))
        agent = built(settings)
        began = None if origin is None else origin.begin(agent)
        with runs.created(runs_dir, name, settings, "train") as folder:
            write_sources(folder, sources)
            if began is not None:
                origins.record(folder, agent, began)
            run(agent, settings, folder)
    else:
        folder = runs.find(resume, runs_dir)
        if is_population(folder):
            raise CommandError(f"{folder} is a population: resume it with driftproof tune --resume {folder}")
        settings = runs.read(folder, overrides, _CHANGEABLE, trust)
        scopes.plan(settings, folder)
        run(built(settings), settings, folder)


def run(agent: DistributionalPPO, settings: Config, folder: Path) -> None:
    """Train the agent of a run folder, from its last checkpoint if any, then evaluate it."""
    with _explained(folder):
        has_learned = _learn(agent, settings, folder)
    evaluation.finish(agent, settings, folder, is_new=has_learned)
    agent.env.close()  # type: ignore[union-attr]


def built(settings: Config) -> DistributionalPPO:
    """A new agent."""
    from driftproof.config import build_agent

    with interrupts.held():
        agent = build_agent(settings)
    say(f"{settings.env.id} with {settings.policy.name}, {use_threads(settings, agent)}")
    return agent


def _restore(agent: DistributionalPPO, folder: Path) -> None:
    """Load the last checkpoint, or else the agent that the run started from, if any."""
    from driftproof.ppo.tree import check_layer_norm
    from driftproof.state import CheckpointStore

    store = CheckpointStore(folder / CHECKPOINTS)
    if blocked := [path for path in store.list() if not path.is_file()]:
        # A checkpoint cannot be written to this path.
        raise CommandError(f"{blocked[0]} is not a regular file; remove it, then resume")
    checkpoint = store.load_latest()
    if checkpoint is None and not store.list():
        checkpoint = origins.recorded(folder)
    if checkpoint is not None:
        with _does_not_fit(folder):
            check_layer_norm(agent, checkpoint)
            agent.load_state_tree(checkpoint.tree)
    elif store.list():
        raise CommandError(f"no checkpoint in {store.folder} is readable")


@contextmanager
def _does_not_fit(folder: Path) -> Iterator[None]:
    """Report in one line a checkpoint that does not fit the configuration."""
    from driftproof._files import DAMAGES, described
    from driftproof.state import CheckpointError

    try:
        yield
    except (*DAMAGES, AssertionError, CheckpointError, RuntimeError) as error:
        what = f"the newest checkpoint in {folder / CHECKPOINTS} does not fit the run's {CONFIG}"
        raise CommandError(f"{what}: {described(error)}; restore both from the same backup of the run") from error


def _learn(agent: DistributionalPPO, settings: Config, folder: Path) -> bool:
    """Train to the end, or until interrupted; returns whether any training was left to do."""
    from driftproof.runs.folder import RunFolder

    run = RunFolder(folder)
    with run.locked():
        _restore(agent, folder)
        runs.keep(folder, settings)
        total = settings.total_updates * settings.steps_per_update
        if agent.num_timesteps >= settings.run.total_timesteps:
            return False
        _train(agent, settings, run, total)
    return True


def _train(agent: DistributionalPPO, settings: Config, run: RunFolder, total: int) -> None:
    from stable_baselines3.common.logger import Logger

    from driftproof.cli.callbacks import LogDrift, LogRun
    from driftproof.ppo import SaveCheckpoints

    folder = run.path
    agent.set_logger(Logger(None, []))
    status = AgentStatus(str(folder), agent.num_timesteps, total)
    saving = SaveCheckpoints(
        folder / CHECKPOINTS,
        settings.run.checkpoint_every,
        settings.run.keep_checkpoints,
        restart_environments=settings.run.exact_resume,
    )
    with Screen(status) as screen:

        def stop() -> None:
            agent.pause_at = max(agent.num_timesteps, 1)
            screen.say("finishing this update, then saving; press Ctrl-C again to stop at once")

        with interrupts.asking(stop):
            # Log before saving: a row that is logged twice counts once, but a missing row is lost.
            callbacks = [LogDrift(), LogRun(run, status, screen), saving]
            try:
                left = settings.run.total_timesteps - agent.num_timesteps
                agent.learn(left, callbacks, log_interval=None, reset_num_timesteps=agent.num_timesteps == 0)
            except KeyboardInterrupt:
                saving.wait()
                has_saved = bool(saving.store.list())
                how = "the last checkpoint is" if has_saved else "no checkpoint has been written yet"
                raise _stopped(folder, agent.num_timesteps, total, how) from None
    if interrupts.came and agent.num_timesteps < total:
        how = (
            "saved"
            if agent.worker.is_whole
            else "saved, except episodes in progress (for an exact resume, set run.exact_resume: true)"
        )
        raise _stopped(folder, agent.num_timesteps, total, how)


def _stopped(folder: Path, steps: int, total: int, how: str) -> Stopped:
    where = f"stopped at step {steps:,} of {total:,}; {how} in {folder}"
    return Stopped(f"{where}. Resume: driftproof train --resume {folder}")


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Report training errors in one line, with the remedy."""
    from driftproof.learner.rollout import failure_of_environment
    from driftproof.ppo import TrainingError

    advice = f"earlier checkpoints are intact: fix the cause, then driftproof train --resume {folder}"
    try:
        yield
    except TrainingError as error:
        raise CommandError(f"{error}. Checkpoints are in {folder}") from error
    except Exception as error:
        if failure := failure_of_environment(error):
            raise CommandError(f"{failure}; fix it, then driftproof train --resume {folder}") from error
        if isinstance(error, OSError):
            raise CommandError(f"{error.filename or folder}: {error.strerror or error}; {advice}") from error
        if isinstance(error.__cause__, OSError):  # From a checkpoint that was written in the background.
            raise CommandError(f"{error}; {advice}") from error
        raise
