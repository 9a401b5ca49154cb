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
    """Show the contents of a checkpoint and verify its checksums. Code in it is never executed."""
    from driftproof.state import inspect as inspect_file

    inspection = inspect_file(agents.find(run, runs_dir, member, best).checkpoint)
    say(inspection.render(leaves=leaves))
    if not inspection.intact:
        raise typer.Exit(USER_ERROR)


def convert(
    source: Annotated[Path, typer.Argument(help="A checkpoint in an earlier format, or a Stable-Baselines3 zip.")],
    target: Annotated[Path, typer.Argument(help="The checkpoint to write.")],
    env: EnvId = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="CONFIG", help="A YAML file with the old agent's settings.")
    ] = None,
    overrides: Overrides = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the target if it exists.")] = False,
    trust: Trusted = None,
) -> None:
    """Convert a file in an earlier format, or of Stable-Baselines3, to a checkpoint. Code in it is never executed.

    An agent is built for the given environment and settings, and every tensor whose name and shape match is copied; the
    rest is listed. For PPO and RecurrentPPO of Stable-Baselines3, networks and settings are read from the file. The
    result is a complete checkpoint for `load`, `evaluate` and `train --from`.
    """
    from driftproof.state import legacy

    if _is_of_today(source):
        raise CommandError(f"{source} is in the present format: there is nothing to convert")
    target = target if target.suffix else target.with_suffix(".zip")
    if target.exists() and not overwrite:
        raise FileExistsError(f"{target} exists: give another name, or --overwrite")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # The report lists it.
        found = legacy.read(source)
    if config is None and env is None and not overrides:
        raise CommandError(
            f"{source} does not name its environment: give --env ID, and --config FILE if its networks did not have "
            "the default settings"
        )
    agent, report = _converted(found, read_config(config, env, overrides, trust))
    try:
        agent.save(target)
    finally:
        agent.env.close()  # type: ignore[union-attr]
    say("\n".join([f"{source}: {found.format}", *report, f"written: {target}"]))


def _converted(found: LegacyCheckpoint, settings: Config) -> tuple[DistributionalPPO, list[str]]:
    """Build an agent, copy the states that fit, and return it with the lines of a report."""
    from driftproof.config import build_agent
    from driftproof.ppo.legacy import adopt
    from driftproof.ppo.sb3_import import is_of_sb3

    if is_of_sb3(found):
        return _imported(found.source, settings)
    if settings.drift.layer_norm is None:
        # Networks of earlier formats had no layer normalisation.
        settings = settings.model_copy(update={"drift": settings.drift.model_copy(update={"layer_norm": False})})
    agent = build_agent(settings)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # The report lists it.
            return agent, adopt(agent, found)
    except BaseException:
        agent.env.close()  # type: ignore[union-attr]
        raise


def _imported(source: str, settings: Config) -> tuple[DistributionalPPO, list[str]]:
    """Import an agent from Stable-Baselines3; given settings override those of the file."""
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
