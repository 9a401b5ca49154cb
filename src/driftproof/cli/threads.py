"""Number of torch threads, chosen by the size of the networks and minibatches unless it is configured."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from driftproof.config import Config
    from driftproof.ppo import DistributionalPPO

MACS_PER_STEP = 500_000_000
"""Number of parameters times minibatch size up to which one thread is used; see benchmarks/threads.py."""


def use_threads(config: Config, agent: DistributionalPPO | None = None) -> str:
    """Set the number of torch threads; returns it as text, with the reason.

    Args:
        config: The configuration; ``run.threads`` is used if it is set.
        agent: Agent whose size determines the number otherwise; ``None``: one thread.
    """
    import torch

    count, why = 1, "the default; set run.threads for more"
    if config.run.threads is not None:
        count, why = config.run.threads, "run.threads"
    elif "OMP_NUM_THREADS" in os.environ:
        count, why = torch.get_num_threads(), "OMP_NUM_THREADS"
    elif agent is not None:
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        count, why = chosen_threads(agent, os.cpu_count() or 1, load)
    torch.set_num_threads(count)
    return f"{count} torch thread{'s' if count > 1 else ''} ({why})"


def chosen_threads(agent: DistributionalPPO, cores: int, load: float) -> tuple[int, str]:
    """Number of threads for an agent, and the reason.

    Several threads slow down small matrix products, and all products if other processes use the cores.

    Args:
        agent: The agent.
        cores: Cores of the machine.
        load: Average number of processes that use the cores (load average).
    """
    if agent.device.type != "cpu":
        return 1, "the networks are on the GPU"
    from gymnasium import spaces
    from stable_baselines3.common.preprocessing import is_image_space

    space = agent.observation_space
    parts = space.spaces.values() if isinstance(space, spaces.Dict) else [space]
    parameters = sum(each.numel() for each in agent.policy.parameters())
    is_small = parameters * int(agent.batch_size) <= MACS_PER_STEP
    if is_small and not any(is_image_space(part) for part in parts):
        return 1, f"a small network of {parameters:,} parameters; set run.threads for more"
    if load > cores / 2:
        return 1, f"other processes use the cores, load average {load:.1f}; set run.threads for more"
    return cores, f"{parameters:,} parameters; set run.threads for fewer"
