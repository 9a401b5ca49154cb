"""Find the agent that a command is given, as a run or as a checkpoint file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from driftproof._files import shortened
from driftproof.cli import runs
from driftproof.cli.errors import CommandError
from driftproof.cli.located import located
from driftproof.cli.options import trust_in
from driftproof.runs import CHECKPOINTS, CONFIG, is_population, own_file

if TYPE_CHECKING:
    from driftproof._trust import Trust
    from driftproof.config import Config
    from driftproof.ppo import DistributionalPPO


@dataclass(frozen=True)
class Found:
    """An agent on disk.

    Attributes:
        checkpoint: Path of its checkpoint.
        folder: Its run folder, if known.
        is_run: Whether a run was given, not a checkpoint file.
        trust: Modules that the agent's files may import classes and functions from.
    """

    checkpoint: Path
    folder: Path | None
    is_run: bool
    trust: Trust

    def config(self, overrides: list[str] | None = None) -> Config:
        """Configuration of its run, or the default configuration, with overrides applied."""
        from driftproof.config import load

        path = None if self.folder is None else own_file(self.folder, CONFIG)
        return load(path, overrides or (), self.trust)

    def config_to_play(self, overrides: list[str] | None = None) -> Config:
        """Configuration as in :meth:`config`, with the current paths of the environment's files.

        Raises:
            CommandError: A file or a module of the environment is missing.
        """
        config = self.config(overrides)
        return config if self.folder is None else located(config, self.folder, overrides or ())

    def load(self, device: str = "cpu") -> DistributionalPPO:
        """Load the agent without an environment. Code in the file is never executed."""
        from driftproof.config.names import foreign
        from driftproof.ppo import DistributionalPPO

        classes = foreign(self.config())
        return DistributionalPPO.load(
            self.checkpoint, device=device, custom_objects=classes, trusted=self.trust, verbose=0
        )


def find(
    run: str, runs_dir: Path, member: int | None = None, best: bool = False, trusted: list[str] | None = None
) -> Found:
    """Find the agent of a run or of a checkpoint file.

    Args:
        run: Folder or name of a run, or path of a checkpoint.
        runs_dir: Folder that holds the run folders.
        member: Member of a population; ``None``: the best.
        best: Use the best checkpoint instead of the last.
        trusted: Modules that the agent's files may import classes and functions from.

    Raises:
        CommandError: There is no such agent.
    """
    path, trust = Path(run), trust_in(trusted)
    if not path.is_file():
        folder = runs.find(run, runs_dir)
        return Found(_checkpoint_of(folder, member, best), folder, is_run=True, trust=trust)
    if member is not None or best:
        raise CommandError("--member and --best select a checkpoint of a run: leave them out with a checkpoint file")
    owner = next((parent for parent in path.resolve().parents if (parent / CONFIG).is_file()), None)
    return Found(path, owner, is_run=False, trust=trust)


def _checkpoint_of(folder: Path, member: int | None, best: bool) -> Path:
    """Last or best checkpoint of a run; for a population, the checkpoint of a member or of the best member.

    Raises:
        CommandError: The run has no such checkpoint.
    """
    if is_population(folder):
        if best:
            raise CommandError(
                f"{folder} is a population: each member keeps only its last checkpoint; leave out --best"
            )
        return _member_of(folder, member)
    if member is not None:
        raise CommandError(f"{folder} is not a population: leave out --member")
    from driftproof.state import CheckpointStore

    store = CheckpointStore(folder / CHECKPOINTS)
    found: Path | None = store.best() if best else store.latest()
    if found is None and best and store.latest() is not None:
        raise CommandError(f"no checkpoint in {folder} has a score, since no episode has ended yet: leave out --best")
    if found is None:
        raise CommandError(f"there is no checkpoint in {folder} yet")
    return found


def _member_of(folder: Path, member: int | None) -> Path:
    from driftproof.runs.folder import RunFolder

    state = RunFolder(folder).read_state()
    if not (saved := state.ranking):
        raise CommandError(f"no member of {folder} has been saved yet")
    if member is None:
        member = saved[0]
    if member not in saved:
        raise CommandError(
            f"member {member} of {folder} has no checkpoint; of members 0 to {len(state.members) - 1}, "
            f"{shortened(sorted(saved))} have been saved"
        )
    name = state.members[member].file
    assert name is not None
    return RunFolder(folder, state.config.checkpoint_dir).member_path(name)
