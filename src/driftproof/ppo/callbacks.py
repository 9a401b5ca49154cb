"""Callbacks for training."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

from stable_baselines3.common.callbacks import BaseCallback

from driftproof._arguments import check_count, check_flag
from driftproof.runs.ranking import episode_mean
from driftproof.state import AsyncWriter, CheckpointStore

if TYPE_CHECKING:
    from driftproof.ppo.algorithm import DistributionalPPO

_SEEDS = 2**31


class SaveCheckpoints(BaseCallback):
    """Saves the agent between updates, so that training can be resumed exactly.

    Stable-Baselines3's ``CheckpointCallback`` saves in the middle of a rollout, whose first half is then lost.

    Environments without ``state_dict`` cannot be restored. With ``restart_environments``, all of them are seeded and
    reset at every checkpoint, so that resumed training equals uninterrupted training. It costs the running episodes:
    they end without a terminal reward, and none is longer than the steps between checkpoints.

    Args:
        folder: Folder of the checkpoints.
        every: Updates between checkpoints.
        keep_last: Number of checkpoints to keep, besides the best; ``None``: all.
        restart_environments: Start new episodes at every checkpoint.
        background: Write in a background thread.
        mode: Whether the best mean return of episodes is the largest or the smallest.
        verbose: 1: print a line for every checkpoint.
    """

    model: DistributionalPPO

    def __init__(
        self,
        folder: str | os.PathLike[str],
        every: int = 1,
        keep_last: int | None = 5,
        restart_environments: bool = False,
        background: bool = True,
        mode: Literal["max", "min"] = "max",
        verbose: int = 0,
    ) -> None:
        super().__init__(verbose)
        check_count("every", every, at_least=1)
        check_flag("restart_environments", restart_environments)
        check_flag("background", background)
        self.store = CheckpointStore(folder, keep_last, mode)
        self.every = every
        self.restart_environments = restart_environments
        self.background = background
        self._writer: AsyncWriter | None = None
        self._saved_at = 0

    def _on_training_start(self) -> None:
        if self.model.num_timesteps == 0 and self.store.list():
            raise ValueError(
                f"{self.store.folder} holds the checkpoints of another run: choose another folder, or resume that "
                "run with DistributionalPPO.load(path, env).resume(...)"
            )
        # Do not save again the checkpoint that training starts from.
        self._saved_at = self.model.num_timesteps
        if self.background and self._writer is None:
            self._writer = AsyncWriter(self.store)

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:
        steps, updates = self.model.num_timesteps, self._updates()
        if steps != self._saved_at and updates % self.every == 0:
            self._save()

    def _on_training_end(self) -> None:
        # In the middle of a rollout, the checkpoint after the last update is the one to resume from.
        if self.model.num_timesteps != self._saved_at and not self.model.worker.in_rollout:
            self._save()
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def wait(self) -> None:
        """Wait until all checkpoints are on disk; call it also after an exception has ended the training.

        Raises:
            RuntimeError: A checkpoint could not be written.
        """
        if self._writer is not None:
            self._writer.wait()

    def _updates(self) -> int:
        """Updates of the whole training, so that resumed training saves at the same ones."""
        return self.model.num_timesteps // (self.model.n_steps * self.model.n_envs)

    def _save(self) -> None:
        agent = self.model
        if self.restart_environments and self._updates() % self.every == 0:
            agent.worker.restart(((agent.seed or 0) * 1_000_003 + agent.num_timesteps) % _SEEDS)
        self._saved_at = agent.num_timesteps
        saver = self._writer or self.store
        saver.save(
            agent.current_states(),
            agent.num_timesteps,
            config=agent.config(),
            exact=agent.worker.is_whole,
            score=episode_mean(agent.ep_info_buffer),
        )
        if self.verbose:
            print(f"checkpoint at step {agent.num_timesteps} in {self.store.folder}")
