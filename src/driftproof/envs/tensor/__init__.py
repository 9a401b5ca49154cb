"""Environments whose steps are tensors on one device: thousands at once, with nothing copied to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from driftproof._registry import TENSOR_ENVS
from driftproof.envs.tensor.base import TensorEnv, TensorStep

__all__ = ["TensorEnv", "TensorStep", "joined", "make"]


def make(env_id: str, num_envs: int, device: torch.device | str = "cpu", **kwargs: Any) -> TensorEnv:
    """The tensor form of an environment.

    Args:
        env_id: Id of the Gymnasium environment, such as ``"CartPole-v1"``.
        num_envs: Number of environments.
        device: Device of all tensors.
        **kwargs: Arguments of the Gymnasium environment.

    Raises:
        ValueError: The environment has no tensor form.
    """
    # As for gymnasium.make, "module:id" says which module registers the id.
    name = env_id.rpartition(":")[2]
    if name not in TENSOR_ENVS.names:
        raise ValueError(
            f"{env_id!r} has no tensor form; {', '.join(TENSOR_ENVS.names)} have one. Installed packages add theirs by "
            f"entry points of the group {TENSOR_ENVS.group!r}"
        )
    made: TensorEnv = TENSOR_ENVS.load(name)(num_envs, device, **kwargs)
    made.env_id, made.kwargs = name, kwargs
    return made


def joined(envs: Sequence[TensorEnv]) -> TensorEnv:
    """All of these environments as one, which continues as each of them would have.

    Args:
        envs: Environments from :func:`make` with the same id, arguments and device, which have been reset.
    """
    first = envs[0]
    if any((env.env_id, env.kwargs, env.device) != (first.env_id, first.kwargs, first.device) for env in envs):
        raise ValueError("only environments of the same id, arguments and device can be joined")
    whole = make(first.env_id, sum(env.num_envs for env in envs), first.device, **first.kwargs)
    states = [env.state_dict() for env in envs]
    whole.load_state_dict({name: torch.cat([state[name] for state in states]) for name in states[0]})
    return whole
