"""Evaluation environments whose errors are shown in one line."""

from __future__ import annotations

import contextlib

from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn

from driftproof.cli.errors import CommandError
from driftproof.cli.interrupts import interrupts
from driftproof.config.names import describe_error


class Played(VecEnvWrapper):
    """Wrapper that raises environment errors as :class:`CommandError`.

    Args:
        venv: The environments.
        env_id: Id of the environment.
    """

    def __init__(self, venv: VecEnv, env_id: str) -> None:
        super().__init__(venv)
        self._env_id, self._is_broken = env_id, False

    def reset(self) -> VecEnvObs:
        try:
            return self.venv.reset()
        except Exception as error:
            raise self._broken(error) from error

    def step_wait(self) -> VecEnvStepReturn:
        interrupts.check()
        try:
            return self.venv.step_wait()
        except Exception as error:
            raise self._broken(error) from error

    def close(self) -> None:
        # A worker process that has died cannot be closed; its error is already being raised.
        with contextlib.suppress(*((EOFError, OSError) if self._is_broken else ())):
            super().close()

    def _broken(self, error: Exception) -> CommandError:
        self._is_broken = True
        return CommandError(f"{self._env_id} failed during evaluation: {describe_error(error)}; fix it and retry")
