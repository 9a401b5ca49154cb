"""Callbacks that log metrics during training."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from stable_baselines3.common.callbacks import BaseCallback

from driftproof.cli.interrupts import interrupts
from driftproof.runs import DRIFT_RETURN, LENGTH, RETURN, SUCCESS
from driftproof.runs.ranking import episode_mean

if TYPE_CHECKING:
    from driftproof.cli.view import AgentStatus, Screen
    from driftproof.runs.folder import RunFolder
    from driftproof.runs.metrics import Row

_SECONDS_BETWEEN_GLANCES = 0.2


class LogDrift(BaseCallback):
    """Log the drift of the first environment, as reported in its ``info``, and the return of the latest episodes.

    The mean over the last hundred episodes would hide the fall after a change.
    """

    def __init__(self) -> None:
        super().__init__()
        self._returns: list[float] = []

    def _on_rollout_start(self) -> None:
        self._returns.clear()

    def _on_step(self) -> bool:
        self._returns += [float(info["episode"]["r"]) for info in self.locals["infos"] if "episode" in info]
        return True

    def _on_rollout_end(self) -> None:
        drift = self.locals["infos"][0].get("drift", {})
        for name, value in drift.items():
            self.logger.record(f"drift/{name}", float(value))
        if drift and self._returns:
            self.logger.record(DRIFT_RETURN, sum(self._returns) / len(self._returns))


class LogRun(BaseCallback):
    """Write the metrics of every update to the run folder, and show them.

    Stable-Baselines3 would write metrics one update late, and omit those of the last update.

    Args:
        run: The run folder.
        status: Status to update.
        screen: Screen that shows the status.
    """

    def __init__(self, run: RunFolder, status: AgentStatus, screen: Screen) -> None:
        super().__init__()
        self._run, self._status, self._screen = run, status, screen
        self._glanced = 0.0
        self._logged_at = 0

    def _on_training_start(self) -> None:
        self._logged_at = self.model.num_timesteps

    def _on_step(self) -> bool:
        interrupts.check()
        if time.monotonic() - self._glanced > _SECONDS_BETWEEN_GLANCES:
            self._glanced, self._status.steps = time.monotonic(), self.num_timesteps
        return True

    def _on_rollout_start(self) -> None:
        self._log()

    def _on_training_end(self) -> None:
        self._log()

    def _log(self) -> None:
        """Log the last update, if it was completed."""
        model, logger = self.model, self.model.logger
        if model.num_timesteps == self._logged_at or "train/loss" not in logger.name_to_value:
            return
        self._logged_at = self._status.steps = model.num_timesteps
        row: Row = {
            "step": model.num_timesteps,
            "time/steps_per_second": self._status.steps_per_second,
            "time/time_elapsed": self._status.elapsed,
        }
        successes = [{"r": float(success)} for success in model.ep_success_buffer or ()]
        means = {
            RETURN: episode_mean(model.ep_info_buffer),
            LENGTH: episode_mean(model.ep_info_buffer, "l"),
            SUCCESS: episode_mean(successes),
        }
        row |= {name: mean for name, mean in means.items() if mean is not None}
        row |= {name: float(value) for name, value in logger.name_to_value.items()}
        logger.dump(model.num_timesteps)
        self._run.log(0, [row])
        self._status.update(row)
        self._screen.refresh()
