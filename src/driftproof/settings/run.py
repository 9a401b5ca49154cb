"""Settings that only configuration files have: run, environments, optimizer by name, and a population's backend."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from driftproof._registry import OPTIMIZERS
from driftproof.settings.definition import MOST_UNITS, setting
from driftproof.settings.optimizers import DEFAULT_OPTIMIZER

DEVICE = r"^(auto|cpu|cuda(:\d+)?)$"


def _device(name: str) -> str:
    if not re.search(DEVICE, name):
        raise ValueError(f"must be auto, cpu, cuda, or a device with its index such as cuda:1, not {name!r}")
    return name


@dataclass(frozen=True)
class RunSettings:
    """Settings of a run: length, seed, device and checkpoints."""

    total_timesteps: int = setting(
        100_000, "Total steps of all environments together; in a population, of each member.", at_least=1
    )
    seed: int = setting(0, "Seed of all random number generators.", at_least=0)
    device: str = setting(
        "auto",
        "auto (a GPU if there is one), cpu, cuda, or one of several GPUs, such as cuda:1.",
        check=_device,
        pattern=DEVICE,
    )
    threads: int | None = setting(
        None,
        "Threads of torch, in every process. None: OMP_NUM_THREADS if it is set, else one for small networks and "
        "one per core for others; each process of a population uses its share of the cores.",
        at_least=1,
        at_most=1024,
    )
    checkpoint_every: int = setting(1, "Updates between checkpoints.", at_least=1)
    keep_checkpoints: int | None = setting(5, "Number of checkpoints to keep, besides the best. None: all.", at_least=1)
    exact_resume: bool = setting(
        False,
        "At every checkpoint, seed and reset environments whose state cannot be saved, so that a resumed run equals "
        "an uninterrupted one bit for bit. This ends their running episodes.",
    )
    evaluation_episodes: int = setting(20, "Evaluation episodes after training. 0: none.", at_least=0)


@dataclass(frozen=True)
class EnvSettings:
    """Settings of the environment."""

    id: str = setting(
        "CartPole-v1",
        "Gymnasium id; for your own environment module:Id, where importing the module registers the id.",
    )
    kwargs: dict[str, Any] = setting(factory=dict, doc="Arguments of the environment.")
    evaluation_kwargs: dict[str, Any] = setting(
        factory=dict,
        doc="Arguments of the environment that differ in evaluation, such as {split: test}. Without a split, "
        "driftproof/Market-v0 is evaluated on the bars held out from training.",
    )
    n_envs: int = setting(
        1,
        "Number of parallel environments. More are faster, up to the number of cores.",
        at_least=1,
        at_most=MOST_UNITS,
    )
    vectorization: Literal["in_process", "processes", "device"] = setting(
        "in_process",
        "How to step environments: one after the other (in_process), each in its own process, which pays off for "
        "slow ones (processes), or all at once as tensors on run.device, for CartPole-v1, Pendulum-v1 and the "
        "markets (device). Evaluation always uses in_process.",
    )
    normalize_observations: bool = setting(
        False, "Subtract the running mean of observations, and divide by their running standard deviation."
    )
    clip_observations: float = setting(
        10.0,
        "Normalised observations are clipped to [-clip_observations, clip_observations]. Needs normalize_observations.",
        above=0,
    )
    last_step: bool = setting(
        False, "Add the last action, its reward and an episode-start flag to the observations; for lasting_memory."
    )
    drift: list[dict[str, Any]] = setting(
        factory=list,
        doc="Drift of the environment, a list such as [{kind: dynamics, names: length, schedule: {kind: sudden, "
        "values: [1, 2], every: 10000}}]; see the documentation of drift.",
    )
    drift_seed: int | None = setting(
        None, "Seed of random drift. None: run.seed. All environments drift alike.", at_least=0
    )


@dataclass(frozen=True)
class OptimizerSettings:
    """Settings of the optimizer."""

    name: str = setting(
        DEFAULT_OPTIMIZER,
        f"{', '.join(OPTIMIZERS.built_in)}, or an optimizer class in torch.optim's style as module:Class. The UPGD "
        "family preserves the networks' plasticity when the environment drifts.",
        check=OPTIMIZERS.name,
    )
    kwargs: dict[str, Any] = setting(
        factory=dict,
        doc="Arguments of the optimizer, such as {sigma: 0.001, weight_decay: 0.001}. An lr here is ppo.learning_rate.",
    )


@dataclass(frozen=True)
class BackendSettings:
    """Settings of the backend that trains the members of a population."""

    backend: Literal["inline", "process", "ray", "vectorized"] = setting(
        "process",
        "Where members train: one after the other (inline), in processes of this machine (process), on a Ray "
        "cluster (ray), or all at once on one device with synchronous decisions (vectorized).",
    )
    workers: int | None = setting(
        None, "Processes, for backend process. None: as many as there are cores.", at_least=1, at_most=MOST_UNITS
    )
    resources_per_member: dict[str, Any] = setting(
        factory=dict, doc="For backend ray: resources of each member, such as {num_cpus: 2, num_gpus: 0.25}."
    )
    address: str | None = setting(
        None, "For backend ray: address of a running cluster; auto: the one this machine is part of."
    )
    members_per_actor: int = setting(
        1,
        "For backend ray: members per actor, which train as one vectorised group and share one resources_per_member.",
        at_least=1,
        at_most=MOST_UNITS,
    )
    synchronous: bool = setting(
        False,
        "Decide on exploit for all members once all have done the same number of updates, so that results do not "
        "depend on which member is faster.",
    )
    max_restarts: int = setting(3, "Consecutive failures after which a member is not restarted.", at_least=0)


BACKEND_OF = {"workers": "process", "resources_per_member": "ray", "address": "ray", "members_per_actor": "ray"}
"""Backends by the settings that only they use."""
PLACING = (
    *("num_cpus", "num_gpus", "memory", "resources", "accelerator_type", "label_selector", "scheduling_strategy"),
)
"""Ray's options of an actor that files may give: they say where it runs, and nothing else."""


@dataclass(frozen=True)
class Switch:
    """Switch of adversarial training."""

    enabled: bool = setting(
        False, "Whether to train against attacks. If false, no other setting of this section may be set."
    )
