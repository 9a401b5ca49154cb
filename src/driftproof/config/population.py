"""Section of a configuration for populations: :class:`driftproof.pbt.PBTConfig` and where members train."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, Field

from driftproof._registry import EXPLORE_METHODS
from driftproof.config._types import Count, Plain, Section, Share, Size

MetricName: TypeAlias = Literal["mean_reward", "mean_length", "success_rate"]
Value: TypeAlias = bool | int | float | str | None


class HyperparamSection(Section):
    """One hyper-parameter that a population searches: a range, or values to choose from."""

    name: str = Field(min_length=1, description="As in the agent's hyperparams: learning_rate, optimizer.sigma.")
    min_value: float | None = Field(None, description="Least value of the range.")
    max_value: float | None = Field(None, description="Largest value of the range.")
    values: list[Value] | None = Field(None, description="What to choose from, instead of a range.")
    perturbation_factor: float = Field(
        1.2, gt=1, description="A perturbation multiplies by it, or divides. Larger: faster, coarser search; 1.1 to 2."
    )
    resample_probability: Share = Field(
        0.25, description="How often explore_method both draws anew instead of perturbing."
    )
    is_log_scale: bool = Field(
        False, description="Draw so that every factor is as likely as any other, as is right for learning rates."
    )


def _searched() -> list[HyperparamSection]:
    return [
        HyperparamSection(name="learning_rate", min_value=3e-5, max_value=3e-3, is_log_scale=True),
        HyperparamSection(name="ent_coef", min_value=1e-5, max_value=0.03, is_log_scale=True),
    ]


class PBTSection(Section):
    """A population, for tune."""

    population_size: Size = Field(
        10, ge=2, le=4096, description="Members. More: wider search, at the cost of each; 4 to 40."
    )
    perturbation_interval: Count = Field(
        5,
        ge=1,
        description="Updates between a member's decisions. Shorter: greedier, noisier comparisons; 1 to 50.",
    )
    hyperparams: list[HyperparamSection] = Field(
        default_factory=_searched, description="What is searched: names, with a range or values."
    )
    exploit_method: Literal["truncation", "binary_tournament"] = Field(
        "truncation",
        description="The worst take over from the best, or a member meets another at random and takes over from it if "
        "that is better.",
    )
    explore_method: Annotated[str, AfterValidator(EXPLORE_METHODS.name)] = Field(
        "both",
        description="What happens to the hyper-parameters taken over: perturb, resample, both (one of the two), a "
        'model of what worked (pb2, needs pip install "driftproof[pbt]"), or a class of your own as module:Class.',
    )
    truncation_ratio: float = Field(
        0.2, gt=0, le=0.5, description="Share of the population that is the worst, and that is the best; 0.1 to 0.3."
    )
    metric_name: MetricName = Field(
        "mean_reward", description="What members are compared by, of their recent episodes."
    )
    metric_mode: Literal["max", "min"] = Field("max", description="Whether more of it is better.")
    ready_percentage: float = Field(
        0.8, gt=0, le=1, description="Share of members that must have reported before anything is decided."
    )
    min_ready_members: Count = Field(2, ge=1, description="Least number of them, whatever the share.")
    ready_check_max_wait: Count = Field(
        10, ge=1, description="At this try in a row a member waits only for min_ready_members."
    )
    optimizer_exploit_strategy: Literal["copy", "reset"] = Field(
        "copy", description="Whether the donor's optimizer state is taken over or begins anew."
    )
    explore_strong: bool = Field(
        False, description="Explore a member's own hyper-parameters when it takes over nothing."
    )
    backend: Literal["inline", "process", "ray"] = Field(
        "process",
        description="Where members train: one after the other, in processes of this machine, or on a Ray cluster.",
    )
    workers: Size | None = Field(
        None, ge=1, description="Processes, for backend process. null: as many as there are cores."
    )
    resources_per_member: Plain = Field(
        default_factory=dict, description="For backend ray: {num_cpus: 2, num_gpus: 0.25}."
    )
    address: str | None = Field(
        None, description="For backend ray: of a running cluster; auto: the one this machine is part of."
    )
    checkpoint_dir: str | None = Field(
        None, description="Where members' states are kept. null: in members of the run's folder."
    )
    synchronous: bool = Field(
        False,
        description="Decide for all members when all have done the same number of updates, so that nothing depends on "
        "who is faster.",
    )
    max_restarts: Count = Field(3, ge=0, description="How often in a row a member may fail before it is given up.")
