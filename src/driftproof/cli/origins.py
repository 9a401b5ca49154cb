"""``driftproof train --from``: runs that start from another agent's weights and statistics."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from driftproof.cli import agents
from driftproof.cli.errors import CommandError, say
from driftproof.cli.options import changes

if TYPE_CHECKING:
    from driftproof.config import Config
    from driftproof.ppo import DistributionalPPO
    from driftproof.runs.sources import Sources
    from driftproof.state import Checkpoint

ORIGIN, AGENT = "origin.json", "origin.zip"


@dataclass(frozen=True)
class Origin:
    """Agent that a run starts from.

    Attributes:
        found: The agent on disk.
        checkpoint: Content of its file.
    """

    found: agents.Found
    checkpoint: Checkpoint

    def config(self, env: str | None, overrides: list[str] | None) -> Config:
        """Settings of the agent's run, or of its checkpoint, with overrides applied.

        Raises:
            CommandError: The environment is unknown, or the checkpoint has no settings.
        """
        from driftproof.config import ConfigError
        from driftproof.config.from_agent import config_from

        changed = changes(env, overrides)
        if self.found.folder is not None:
            return self.found.config(changed)
        path = self.found.checkpoint
        if env is None and not any(change.startswith(("env=", "env.id=")) for change in changed):
            raise CommandError(f"{path} does not name its environment: give --env ID, or a CONFIG")
        tree, config = self.checkpoint.tree, self.checkpoint.config
        if not isinstance(config.get("settings"), dict) or not isinstance(config.get("n_envs"), int):
            raise CommandError(f"{path} has no settings to build an agent with: give a CONFIG")
        try:
            normalizer = tree.get("normalizer") or {}
            return config_from(config["settings"], config["n_envs"], normalizer, changed, self.found.trust)
        except ConfigError as error:
            advice = f"these settings come from {path}: give a CONFIG file with the same networks"
            raise ConfigError([*error.problems, advice]) from error

    def sources(self) -> Sources | None:
        """What the agent was trained on; ``None``: unknown."""
        from driftproof.cli import backtesting, scopes

        folder = self.found.folder
        known = None if folder is None else scopes.trained_on(folder, self.found.config())
        if known is None or folder is None:
            return None
        return known.model_copy(update={"trials": backtesting.trials_of(folder)})

    def begin(self, agent: DistributionalPPO) -> dict[str, Any]:
        """Copy the states that fit to the agent, and print a report; returns the record for the run folder."""
        from driftproof.ppo import warm_start
        from driftproof.state import CheckpointError

        try:
            report = warm_start(agent, self.checkpoint)
        except CheckpointError as error:
            raise CommandError(f"--from {self.found.checkpoint}: {error}") from error
        say("\n".join([f"starts from {self.found.checkpoint}", *report]))
        counters = self.checkpoint.tree.get("counters")
        steps = counters.get("num_timesteps") if isinstance(counters, dict) else None
        # A damaged checkpoint may hold integers too long to write as JSON.
        is_count = type(steps) is int and 0 <= steps < 2**53
        where = {"checkpoint": str(self.found.checkpoint.resolve()), "created": self.checkpoint.created}
        return {**where, "num_timesteps": steps if is_count else None, "report": report}


def find(
    source: str | None, runs_dir: Path, member: int | None, best: bool, trusted: list[str] | None
) -> Origin | None:
    """Find the agent that ``--from`` names.

    Raises:
        CommandError: There is no such agent, or ``--member`` or ``--best`` is given without ``--from``.
    """
    from driftproof.state import read

    if source is None:
        if member is not None or best:
            raise CommandError("--member and --best select the agent to start from: give --from RUN too")
        return None
    found = agents.find(source, runs_dir, member, best, trusted)
    checkpoint = read(found.checkpoint)
    if not isinstance(checkpoint.tree, dict):
        raise CommandError(f"{found.checkpoint} does not hold an agent")
    return Origin(found, checkpoint)


def record(folder: Path, agent: DistributionalPPO, origin: dict[str, Any]) -> None:
    """Save the agent that the run starts from, and its origin, in the run folder.

    A run that is interrupted before its first checkpoint restarts from this agent when it is resumed.
    """
    from driftproof.state import write_atomically

    agent.save(folder / AGENT)
    write_atomically(folder / ORIGIN, [json.dumps(origin, indent=2).encode()])


def recorded(folder: Path) -> Checkpoint | None:
    """Checkpoint that a run started from; ``None``: it started from scratch."""
    from driftproof.state import read

    return read(folder / AGENT) if (folder / AGENT).is_file() else None
