"""Sections of a configuration for the world, attacks on what is seen of it, and the run."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator

from driftproof._registry import ATTACKS
from driftproof._trust import UntrustedError
from driftproof.config._types import Count, Plain, Section, Share, Size

_DEVICE = r"^(auto|cpu|cuda(:\d+)?)$"


class EnvSection(Section):
    """The world to learn in."""

    id: str = Field(
        "CartPole-v1",
        min_length=1,
        description="A Gymnasium id; of your own environments as module:Id, where importing the module registers it.",
    )
    kwargs: Plain = Field(default_factory=dict, description="Arguments for making it.")
    evaluation_kwargs: Plain = Field(
        default_factory=dict,
        description="Arguments that are others when it is made for evaluation, such as {split: test}.",
    )
    n_envs: Size = Field(1, ge=1, description="How many of it at a time. More are faster, up to the cores' limit.")
    vectorization: Literal["in_process", "processes"] = Field(
        "in_process", description="One after the other, or each in a process of its own, which pays for slow ones."
    )
    normalize_observations: bool = Field(
        False, description="Subtract the running mean of observations, and divide by their running deviation."
    )
    clip_observations: float = Field(
        10.0, gt=0, description="Normalised observations are clipped to this. Needs normalize_observations."
    )
    drift: list[Plain] = Field(
        default_factory=list,
        description="What changes about it, a list such as [{kind: dynamics, names: length, schedule: {kind: sudden, "
        "values: [1, 2], every: 10000}}]; see docs on drifting worlds.",
    )
    drift_seed: Count | None = Field(
        None, ge=0, description="Of what is random about the drift. null: run.seed; all environments drift alike."
    )

    @field_validator("drift")
    @classmethod
    def _can_be_made(cls, drift: list[Plain]) -> list[Plain]:
        if drift:
            from driftproof.envs import change

            for spec in drift:
                try:
                    change(spec)
                except UntrustedError:
                    continue  # Whether its module may be imported is known when the environment is made.
                except TypeError as error:
                    raise ValueError(str(error)) from error
        return drift


class PerturbationSection(Section):
    """How far an observation may be moved, and how the worst place for it is searched."""

    epsilon: float = Field(
        0.075, ge=0, description="Radius of the ball, in units of what the policy sees; 0.01 to 0.2. 0: nothing moves."
    )
    attack_steps: Count = Field(
        3, ge=1, description="Steps of the search. More find worse places, at the price of a pass each; 1 to 10."
    )
    attack_lr: float = Field(0.03, gt=0, description="Length of a step.")
    random_init: bool = Field(True, description="Start from a random point in the ball.")
    norm_type: Literal["linf", "l2"] = Field(
        "linf", description="Every number may move by epsilon, or all of an observation together."
    )
    clip_min: float | None = Field(None, description="Perturbed observations are never below it. null: any.")
    clip_max: float | None = Field(None, description="The same above.")
    attack_method: Annotated[str, AfterValidator(ATTACKS.name)] = Field(
        "pgd",
        description="pgd, projected gradient ascent; fgsm, one step to the surface; sgld, ascent with noise that "
        "fades; or a class of your own as module:Class.",
    )


class AdversarialSection(Section):
    """Training against perturbed observations, SA-PPO."""

    enabled: bool = Field(False, description="Whether to. If not, nothing else may be set here.")
    adversarial_ratio: Share = Field(
        0.5, description="Share of each minibatch that is attacked. More is steadier and slower."
    )
    robust_kl_coef: float = Field(
        0.1,
        ge=0,
        description="Weight of how much the policy changes under attack. More makes it smoother, at some point too "
        "smooth to do its task; 0.01 to 3.",
    )
    warmup_updates: Count = Field(10, ge=0, description="Updates before the first attack.")
    attack_policy: bool = Field(True, description="Whether the distribution of actions is attacked and smoothed.")
    attack_value: bool = Field(True, description="Whether the critics' predictions are.")
    epsilon_schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="How the radius goes from perturbation.epsilon to epsilon_final over training."
    )
    epsilon_final: float = Field(0.05, ge=0, description="Where it ends, unless constant.")
    perturbation: PerturbationSection = Field(
        default_factory=PerturbationSection, description="How far, and how the worst place is searched."
    )


class RunSection(Section):
    """What is trained, where it is written."""

    total_timesteps: Count = Field(
        100_000, ge=1, description="Steps of all environments together; of each member of a population."
    )
    seed: Count = Field(0, ge=0, description="Of all random numbers.")
    device: str = Field(
        "auto",
        json_schema_extra={"pattern": _DEVICE},
        description="auto (a GPU if there is one), cpu, cuda, or one of several, cuda:1.",
    )
    threads: Count | None = Field(
        None,
        ge=1,
        le=1024,
        description="Of torch, in every process. null: as many as torch likes, or in processes of a population their "
        "share of the cores; 1 is often the fastest for small networks.",
    )
    checkpoint_every: Count = Field(1, ge=1, description="Updates between checkpoints.")
    keep_checkpoints: Count | None = Field(5, ge=1, description="How many to keep, besides the best. null: all.")
    exact_resume: bool = Field(
        False,
        description="Restart environments that do not tell where they are at every checkpoint, so that a run that is "
        "interrupted goes on to the same end, bit by bit. It costs running episodes.",
    )
    evaluation_episodes: Count = Field(20, ge=0, description="Played after training. 0: none.")
    stats_window_size: Count = Field(100, ge=1, description="Episodes that are averaged in the log.")

    @field_validator("device")
    @classmethod
    def _is_known(cls, device: str) -> str:
        if not re.search(_DEVICE, device):
            raise ValueError(f"must be auto, cpu, cuda, or one of several such as cuda:1, not {device!r}")
        return device
