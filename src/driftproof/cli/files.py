"""``driftproof inspect`` and ``driftproof convert``."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from driftproof.cli import agents
from driftproof.cli.errors import USER_ERROR, CommandError, say
from driftproof.cli.options import Agent, Best, EnvId, Member, Overrides, RunsDir, Trusted, read_config

if TYPE_CHECKING:
    from driftproof.config import Config
    from driftproof.ppo import DistributionalPPO
    from driftproof.state.legacy import LegacyCheckpoint


def inspect(
    run: Agent,
    leaves: Annotated[bool, typer.Option("--leaves", help="List every tensor and value.")] = False,
    member: Member = None,
    best: Best = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Show what a checkpoint holds, and whether it is intact. No code in it is run."""
    from driftproof.state import inspect as inspect_file

    inspection = inspect_file(agents.find(run, runs_dir, member, best).checkpoint)
    say(inspection.render(leaves=leaves))
    if not inspection.intact:
        raise typer.Exit(USER_ERROR)


def convert(
    source: Annotated[Path, typer.Argument(help="A checkpoint of an earlier format, or a Stable-Baselines3 zip.")],
    target: Annotated[Path, typer.Argument(help="The checkpoint to write.")],
    env: EnvId = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="CONFIG", help="A YAML file with the old agent's settings.")
    ] = None,
    overrides: Overrides = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the target if it exists.")] = False,
    trust: Trusted = None,
) -> None:
    """Convert an older file to a checkpoint of today's format. Anything left out is listed; no code in it is run.

    The agent is built for the environment with the settings given, and gets every tensor whose name and shape match.
    For PPO and RecurrentPPO of Stable-Baselines3, networks and settings come from the file. The new file is a complete
    checkpoint for `load`, `evaluate` and `train --from`.
    """
    from driftproof.state import legacy

    if _is_of_today(source):
        raise CommandError(f"{source} already has today's format: there is nothing to convert")
    target = target if target.suffix else target.with_suffix(".zip")
    if target.exists() and not overwrite:
        raise FileExistsError(f"{target} exists: give another name, or --overwrite")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # It is in the report.
        found = legacy.read(source)
    if config is None and env is None and not overrides:
        raise CommandError(
            f"{source} does not name the agent's environment: give --env ID, and --config FILE if its networks had "
            "other settings than the defaults"
        )
    agent, report = _converted(found, read_config(config, env, overrides, trust))
    try:
        agent.save(target)
    finally:
        agent.env.close()  # type: ignore[union-attr]
    say("\n".join([f"{source}: {found.format}", *report, f"written: {target}"]))


def _converted(found: LegacyCheckpoint, settings: Config) -> tuple[DistributionalPPO, list[str]]:
    """An agent with the states of the file that fit, and a report in lines."""
    from driftproof.config import build_agent
    from driftproof.ppo.legacy import adopt
    from driftproof.ppo.sb3_import import is_of_sb3

    if is_of_sb3(found):
        return _imported(found.source, settings)
    if settings.drift.layer_norm is None:
        # Networks of that time had none.
        settings = settings.model_copy(update={"drift": settings.drift.model_copy(update={"layer_norm": False})})
    agent = build_agent(settings)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # It is in the report.
            return agent, adopt(agent, found)
    except BaseException:
        agent.env.close()  # type: ignore[union-attr]
        raise


def _imported(source: str, settings: Config) -> tuple[DistributionalPPO, list[str]]:
    """An agent imported from Stable-Baselines3, with the file's settings where none are given."""
    from driftproof.config.build import build_agent_env
    from driftproof.config.given import given_arguments
    from driftproof.ppo import import_sb3

    env = build_agent_env(settings)
    try:
        agent, report = import_sb3(source, env, **given_arguments(settings))
    except BaseException:
        env.close()
        raise
    return agent, report


def _is_of_today(path: Path) -> bool:
    from driftproof.state import CheckpointError, inspect

    try:
        inspect(path)
    except CheckpointError:
        return False
    return True
