"""``driftproof config``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from driftproof.cli.errors import say
from driftproof.cli.options import ConfigFile, EnvId, Overrides, changes

if TYPE_CHECKING:
    from driftproof.config import Config


def config(
    config: ConfigFile = None,
    env: EnvId = None,
    overrides: Overrides = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print a JSON Schema, with which editors complete.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Print all settings instead of checking them.")] = False,
) -> None:
    """Print all settings, or check a CONFIG. To check it, the agent and its environment are built."""
    from driftproof.config import commented_yaml, json_schema, load

    if schema:
        typer.echo(json.dumps(json_schema(), indent=2))
        return
    settings = load(config, changes(env, overrides))
    if full or config is None:
        typer.echo(commented_yaml(settings), nl=False)
        return
    _check(settings)


def _check(settings: Config) -> None:
    from driftproof.config import check
    from driftproof.config.population import PBTSection

    searches = settings.pbt != PBTSection()
    agent = check(settings, is_population=searches)
    count = sum(parameter.numel() for parameter in agent.policy.parameters())
    ppo = settings.ppo
    minibatches = ppo.n_epochs * settings.steps_per_update // ppo.batch_size
    say(
        f"{settings.env.id}: sees {_described(agent.observation_space)}, does {_described(agent.action_space)}\n"
        f"{settings.policy.name} with {count:,} parameters on {agent.device}\n"
        f"{settings.total_updates:,} updates of {settings.steps_per_update:,} steps, {minibatches} minibatches of "
        f"{ppo.batch_size} each, in sequences of {settings.sequence_steps()}"
    )
    if searches:
        names = ", ".join(item.name for item in settings.pbt.hyperparams)
        say(f"a population of {settings.pbt.population_size} searches {names or 'nothing'}")
    say("all settings fit together")


def _described(space: Any) -> str:
    """A space without the numbers of its bounds."""
    return f"{type(space).__name__}{list(space.shape)}" if type(space).__name__ == "Box" else str(space)
