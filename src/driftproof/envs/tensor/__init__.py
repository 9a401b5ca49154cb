"""Environments whose steps are tensors on one device: thousands at once, with nothing copied to the host."""

from __future__ import annotations

from typing import Any

import torch

from driftproof._registry import TENSOR_ENVS
from driftproof.envs.tensor.base import TensorEnv, TensorStep

__all__ = ["TensorEnv", "TensorStep", "make"]


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
