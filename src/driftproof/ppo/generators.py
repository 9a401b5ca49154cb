"""Random generators of the process and of environments: saved, restored or left unchanged."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from driftproof.ppo.environments import generator_states, restore_generators
from driftproof.ppo.worker import Worker
from driftproof.state.generators import check_generators_within, numpy_generator, python_generator, torch_generator
from driftproof.state.schema import anything, check, items, mapping, numbers, optional, table


class Generators:
    """Random generators of Python, NumPy, torch and the environments.

    Args:
        worker: Worker with the environments.
        device: The agent's device.
    """

    def __init__(self, worker: Worker, device: torch.device) -> None:
        self._worker, self._device = worker, device

    def state_dict(self) -> dict[str, Any]:
        """States of all generators, except those of environments that do not expose them."""
        version, words, gauss = random.getstate()
        # As an array: 624 separate numbers would take up most of the file.
        state: dict[str, Any] = {"python": (version, np.array(words, np.uint32), gauss)}
        state["numpy"] = np.random.get_state(legacy=False)
        state["torch"] = torch.get_rng_state()
        state["cuda"] = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        state["environments"] = None if self._worker.env is None else generator_states(self._worker.env)
        return state

    def check_state_dict(self, state_dict: Any) -> None:
        """Raise a ``CheckpointError`` unless every state is valid for its generator."""
        own: Any = np.random.get_state(legacy=False)
        device = self._device
        # The state of another kind of device is ignored.
        cuda = torch_generator(device) if device.type == "cuda" else numbers((None,), [torch.uint8])
        rules = {
            "python": python_generator,
            "numpy": numpy_generator(own["bit_generator"]),
            "torch": torch_generator(torch.device("cpu")),
            "cuda": optional(cuda),
            "environments": optional(items(mapping(anything))),
        }
        check("random", state_dict, table(rules))
        check_generators_within(state_dict["environments"], ("random", "environments"))
        here = None if self._worker.env is None else generator_states(self._worker.env)
        given = state_dict["environments"]
        if here is not None and given is not None and len(here) == len(given):
            for i, (present, each) in enumerate(zip(here, given, strict=True)):
                numpy_generator(present["bit_generator"])(each, ("random", "environments", i))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the states of all generators."""
        self.check_state_dict(state_dict)
        version, words, gauss = state_dict["python"]
        random.setstate((version, tuple(words.tolist()), gauss))
        np.random.set_state(state_dict["numpy"])
        torch.set_rng_state(state_dict["torch"].cpu())
        if state_dict["cuda"] is not None and self._device.type == "cuda":
            torch.cuda.set_rng_state(state_dict["cuda"].cpu(), self._device)
        env, states = self._worker.env, state_dict["environments"]
        if env is not None and states is not None and len(states) == env.num_envs:
            restore_generators(env, states)


@contextlib.contextmanager
def unchanged_generators() -> Iterator[None]:
    """Leave the process's random generators as they were."""
    restore = _process_generators()
    try:
        yield
    finally:
        restore()


@contextlib.contextmanager
def restored_on_error() -> Iterator[None]:
    """Leave the process's random generators as they were if something fails."""
    restore = _process_generators()
    try:
        yield
    except BaseException:
        restore()
        raise


def _process_generators() -> Callable[[], None]:
    """Returns a function that restores the process's random generators."""
    python, array, tensor = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(array)
        torch.set_rng_state(tensor)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)

    return restore
