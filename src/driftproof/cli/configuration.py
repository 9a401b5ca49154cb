"""``driftproof config``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from driftproof.cli.errors import CommandError, say
from driftproof.cli.options import ConfigFile, Defaults, EnvId, Overrides, Trusted, changes, read_new, trust_in

if TYPE_CHECKING:
    from driftproof.config import Config


def config(
    config: ConfigFile = None,
    env: EnvId = None,
    overrides: Overrides = None,
    defaults: Defaults = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print a JSON Schema, for completion in editors.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Print all settings instead of checking them.")] = False,
    migrate: Annotated[
        bool,
        typer.Option("--migrate", help="Convert a CONFIG of the earlier system (model:, training:) and print it."),
    ] = False,
    trust: Trusted = None,
) -> None:
    """Print all settings, or check a CONFIG by building the agent and its environment.

    With --env and without a CONFIG, the settings are those that driftproof train would use.
    """
    from driftproof.config import commented_yaml, json_schema, load

    if migrate:
        if config is None or schema or full or env or overrides or defaults:
            raise CommandError("--migrate converts a CONFIG file: give the file, and no other options")
        _migrate(config)
        return
    if schema:
        typer.echo(json.dumps(json_schema(), indent=2))
        return
    told = ""
    if env is None and not defaults:
        settings = load(config, changes(env, overrides), trust_in(trust))
    else:
        settings, told = read_new(config, env, overrides, trust, defaults)
    if told:
        typer.echo(f"# {told}")
    if full or config is None:
        typer.echo(commented_yaml(settings), nl=False)
        return
    _check(settings)


def _migrate(path: Path) -> None:
    """Print a file converted to the present format; settings that were dropped are listed in comments."""
    from driftproof.config import migrate, read_text

    migrated = migrate(read_text(path), str(path))
    typer.echo(migrated.text, nl=False)
    if migrated.notes:
        typer.echo(f"driftproof: the comments at the top hold {len(migrated.notes)} notes", err=True)


def _check(settings: Config) -> None:
    from driftproof.config import check
    from driftproof.config.sections import PBTSection

    searches = settings.pbt != PBTSection()
    agent = check(settings, is_population=searches)
    count = sum(parameter.numel() for parameter in agent.policy.parameters())
    cut = settings.batches
    say(
        f"{settings.env.id}: observations {_described(agent.observation_space)}, "
        f"actions {_described(agent.action_space)}\n"
        f"{settings.policy.name} with {count:,} parameters on {agent.device}\n"
        f"{settings.total_updates:,} updates of {settings.steps_per_update:,} steps, "
        f"{agent.optimizer_steps_per_update} minibatches of {cut.per_batch * cut.sequence_length} samples each, in "
        f"sequences of {cut.sequence_length}"
    )
    if searches:
        names = ", ".join(item.name for item in settings.pbt.hyperparams)
        say(f"a population of {settings.pbt.population_size} searches {names or 'nothing'}")
    say("the configuration is valid")


def _described(space: Any) -> str:
    """A space as text, without its bounds."""
    return f"{type(space).__name__}{list(space.shape)}" if type(space).__name__ == "Box" else str(space)
