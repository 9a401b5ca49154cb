"""What a population searches for and how, checked when it is written down and against the agent it is for."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from driftproof._arguments import check_count, check_flag, check_number, check_option
from driftproof._registry import EXPLORE_METHODS
from driftproof._unused import EXPLORE_DEFAULTS, refuse_unused, unused_by_search

if TYPE_CHECKING:
    from driftproof.pbt.explore import ExploreMethod
    from driftproof.ppo import Hyperparameters

ExploitMethod: TypeAlias = Literal["truncation", "binary_tournament"]
MetricMode: TypeAlias = Literal["max", "min"]
OptimizerExploitStrategy: TypeAlias = Literal["copy", "reset"]

_EARLIER = {
    "lr": "learning_rate",
    "entropy_coef": "ent_coef",
    "ent_coef_initial": "ent_coef",
    "adversarial_epsilon": "adversary.epsilon",
}
"""Names that searches of the earlier system had, and what they are here."""


@dataclass(frozen=True)
class HyperparamConfig:
    """One hyper-parameter that the population searches: a range, or values to choose from.

    Args:
        name: As in the agent's ``hyperparams``: ``"learning_rate"``, ``"optimizer.sigma"``.
        min_value: Least value of the range, which may be reached.
        max_value: Largest value of the range, which may be reached.
        values: What to choose from, in an order in which neighbours are alike. Instead of a range.
        perturbation_factor: A perturbation multiplies by it, or divides. Larger: faster, coarser search. 1.1 to 2.
        resample_probability: How often ``explore_method="both"`` draws anew instead of perturbing.
        is_log_scale: Draw so that every factor is as likely as any other, as is right for learning rates.
        is_whole: Whether only whole numbers are right. ``None``: if both ends of the range are ``int``;
            :func:`check_against` sets it to what the agent says. The range is then rounded inwards.
    """

    name: str
    min_value: float | None = None
    max_value: float | None = None
    values: Sequence[Any] | None = None
    perturbation_factor: float = 1.2
    resample_probability: float = 0.25
    is_log_scale: bool = False
    is_whole: bool | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"Invalid name: {self.name!r}; must be the name of a hyper-parameter")
        check_number(f"perturbation_factor of {self.name!r}", self.perturbation_factor, above=1)
        check_number(f"resample_probability of {self.name!r}", self.resample_probability, at_least=0, at_most=1)
        check_flag(f"is_log_scale of {self.name!r}", self.is_log_scale)
        if self.is_whole is not None:
            check_flag(f"is_whole of {self.name!r}", self.is_whole)
        if self.values is None:
            self._check_range()
        else:
            self._check_values(self.values)

    @property
    def is_continuous(self) -> bool:
        """Whether it has a range."""
        return self.values is None

    @property
    def is_categorical(self) -> bool:
        """Whether it has values to choose from."""
        return self.values is not None

    @property
    def bounds(self) -> tuple[float, float]:
        """Both ends of the range."""
        if self.min_value is None or self.max_value is None:
            raise TypeError(f"{self.name!r} has values, not a range")
        return self.min_value, self.max_value

    def allows(self, value: Any) -> bool:
        """Whether a search can lead to a value."""
        if self.values is not None:
            return any(value == each and type(value) is type(each) for each in self.values)
        low, high = self.bounds
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and low <= value <= high and (not self.is_whole or value == int(value))

    def _check_range(self) -> None:
        low, high = self.min_value, self.max_value
        if low is None or high is None:
            raise ValueError(
                f"{self.name!r} has min_value={low!r}, max_value={high!r} and no values: give both ends of a range, "
                "or the values to choose from"
            )
        check_number(f"min_value of {self.name!r}", low)
        check_number(f"max_value of {self.name!r}", high)
        if not low < high or not math.isfinite(high - low):
            raise ValueError(f"{self.name!r} has min_value={low!r} and max_value={high!r}: the first must be less")
        if self.is_log_scale and low <= 0:
            raise ValueError(
                f"{self.name!r} has is_log_scale=True and min_value={low!r}: a logarithmic scale needs a min_value > 0"
            )
        whole = self.is_whole
        if whole is None:
            ends: list[Any] = [low, high]
            whole = all(isinstance(end, Integral) for end in ends)
        if whole and math.ceil(low) >= math.floor(high):
            raise ValueError(
                f"{self.name!r} has fewer than two whole numbers from {low!r} to {high!r}: widen the range"
            )
        object.__setattr__(self, "is_whole", whole)
        object.__setattr__(self, "min_value", math.ceil(low) if whole else float(low))
        object.__setattr__(self, "max_value", math.floor(high) if whole else float(high))

    def _check_values(self, values: Sequence[Any]) -> None:
        if self.min_value is not None or self.max_value is not None:
            raise ValueError(
                f"{self.name!r} has values and min_value={self.min_value!r}, max_value={self.max_value!r}: give one or "
                "the other"
            )
        for option in ("is_log_scale", "is_whole"):
            if getattr(self, option):
                raise ValueError(f"{self.name!r} has {option}=True, which is for ranges, and values")
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise ValueError(f"Invalid values of {self.name!r}: {values!r}; must be a list or tuple")
        for value in values:
            if not isinstance(value, (str, bool, int, float)) and value is not None:
                raise ValueError(f"Invalid values of {self.name!r}: {value!r} is not a number, a text, a bool or None")
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"Invalid values of {self.name!r}: {value!r} is not finite")
        if len(values) < 2 or len(set(values)) < len(values):
            raise ValueError(f"Invalid values of {self.name!r}: {values!r}; must be two or more, all different")
        object.__setattr__(self, "values", tuple(values))
        object.__setattr__(self, "is_whole", False)


@dataclass(frozen=True)
class PBTConfig:
    """How a population learns.

    Args:
        population_size: Members. More: wider search, at the cost of each. 4 to 40.
        perturbation_interval: Updates (rollouts learned from, not environment steps) between a member's decisions.
            Shorter: greedier, noisier comparisons.
        hyperparams: What is searched.
        exploit_method: ``"truncation"``: the worst take over from the best. ``"binary_tournament"``: a member meets
            another at random, and takes over from it if that is better.
        explore_method: What happens to the hyper-parameters taken over: ``"perturb"``, ``"resample"``, ``"both"``
            (one of the two, at random), ``"pb2"``, a model of what worked (needs ``driftproof[pbt]``), the name of one
            in an installed package, or a subclass of :class:`driftproof.pbt.ExploreMethod`.
        truncation_ratio: Share of the population that is the worst, and that is the best; at least one member each.
        checkpoint_dir: Where members' parameters are kept. ``None``: in memory.
        metric_name: What ``performance`` is, for records.
        metric_mode: Whether more of it is better.
        ready_percentage: Share of members, 0 to 1, that must have reported before anything is decided.
        min_ready_members: Least number of them, whatever the share.
        ready_check_max_wait: At this try in a row a member no longer waits for the share, only for
            ``min_ready_members``.
        optimizer_exploit_strategy: Whether the donor's optimizer state is taken over or begins anew.
        explore_strong: Explore a member's own hyper-parameters when its interval is over and it takes over nothing.
    """

    population_size: int = 10
    perturbation_interval: int = 5
    hyperparams: Sequence[HyperparamConfig] = ()
    exploit_method: ExploitMethod = "truncation"
    explore_method: str | type[ExploreMethod] = "both"
    truncation_ratio: float = 0.2
    checkpoint_dir: str | os.PathLike[str] | None = None
    metric_name: str = "mean_reward"
    metric_mode: MetricMode = "max"
    ready_percentage: float = 0.8
    min_ready_members: int = 2
    ready_check_max_wait: int = 10
    optimizer_exploit_strategy: OptimizerExploitStrategy = "copy"
    explore_strong: bool = False

    def __post_init__(self) -> None:
        check_count("population_size", self.population_size, at_least=2)
        check_count("perturbation_interval", self.perturbation_interval, at_least=1)
        check_option("exploit_method", self.exploit_method, get_args(ExploitMethod))
        object.__setattr__(self, "explore_method", EXPLORE_METHODS.name(self.explore_method))
        # Above a half, the worst would be among the best.
        check_number("truncation_ratio", self.truncation_ratio, above=0, at_most=0.5)
        if self.checkpoint_dir is not None and not isinstance(self.checkpoint_dir, (str, os.PathLike)):
            raise ValueError(f"Invalid checkpoint_dir: {self.checkpoint_dir!r}; must be a path or None")
        if not isinstance(self.metric_name, str) or not self.metric_name:
            raise ValueError(f"Invalid metric_name: {self.metric_name!r}; must be a text")
        check_option("metric_mode", self.metric_mode, get_args(MetricMode))
        check_number("ready_percentage", self.ready_percentage, above=0, at_most=1)
        check_count("min_ready_members", self.min_ready_members, at_least=1)
        if self.min_ready_members > self.population_size:
            raise ValueError(
                f"Invalid min_ready_members: {self.min_ready_members!r}; must be <= population_size, which is "
                f"{self.population_size}"
            )
        check_count("ready_check_max_wait", self.ready_check_max_wait, at_least=1)
        check_option("optimizer_exploit_strategy", self.optimizer_exploit_strategy, get_args(OptimizerExploitStrategy))
        check_flag("explore_strong", self.explore_strong)
        self._check_hyperparams()

    def _check_hyperparams(self) -> None:
        if isinstance(self.hyperparams, (str, Mapping)) or not isinstance(self.hyperparams, Sequence):
            raise ValueError(f"Invalid hyperparams: {self.hyperparams!r}; must be a list of HyperparamConfig")
        for item in self.hyperparams:
            if not isinstance(item, HyperparamConfig):
                raise ValueError(f"Invalid hyperparams: {item!r} is not a HyperparamConfig")
        names = [item.name for item in self.hyperparams]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"Invalid hyperparams: {', '.join(map(repr, twice))} is given more than once")
        for item in self.hyperparams:
            unused = unused_by_search(str(self.explore_method), item.values is not None)
            refuse_unused(vars(item), EXPLORE_DEFAULTS, unused, f"{item.name!r}: ")
        if self.explore_method == "pb2" and all(item.values is not None for item in self.hyperparams):
            raise ValueError(
                'explore_method="pb2" models ranges, and no hyper-parameter has one; use "both", "perturb" or '
                '"resample", or give one a min_value and a max_value'
            )
        object.__setattr__(self, "hyperparams", tuple(self.hyperparams))


def check_against(
    config: PBTConfig,
    hyperparams: Hyperparameters,
    *,
    vgs_warmup_steps: int | None = None,
    steps_per_interval: int | None = None,
    lower_bounds: Mapping[str, float] | None = None,
) -> PBTConfig:
    """Refuse what the agent would refuse, or silently change, once training is under way.

    Args:
        config: The search.
        hyperparams: Those of the agent.
        vgs_warmup_steps: Optimizer steps before its gradient scaler acts. ``None``: what ``hyperparams`` says.
        steps_per_interval: Optimizer steps that a member makes between two decisions, if known.
        lower_bounds: By name, values below which something else in the agent clips.

    Returns:
        The search, with whole numbers where the agent counts and real ones where it does not.

    Raises:
        ValueError: A name is unknown or cannot change while training, or the agent would refuse a value.
    """
    checked = [_checked(item, hyperparams, dict(lower_bounds or {})) for item in config.hyperparams]
    config = dataclasses.replace(config, hyperparams=checked)
    if vgs_warmup_steps is None and "vgs.warmup_steps" in hyperparams:
        vgs_warmup_steps = int(hyperparams["vgs.warmup_steps"])
    if vgs_warmup_steps and steps_per_interval is not None and steps_per_interval < vgs_warmup_steps:
        per_update = steps_per_interval / config.perturbation_interval
        warnings.warn(
            f"perturbation_interval={config.perturbation_interval} updates are {steps_per_interval} optimizer steps, "
            f"and the variance gradient scaler warms up for {vgs_warmup_steps}: a decision comes before it has acted; "
            f"use a perturbation_interval >= {math.ceil(vgs_warmup_steps / per_update)} or a shorter vgs.warmup_steps",
            stacklevel=2,
        )
    return config


def _checked(
    item: HyperparamConfig, hyperparams: Hyperparameters, lower_bounds: Mapping[str, float]
) -> HyperparamConfig:
    if item.name not in hyperparams:
        raise ValueError(_why_not(item.name, hyperparams))
    if item.name in hyperparams.unused:
        raise ValueError(
            f"{item.name!r} cannot be searched, for it would have no effect: it is for {hyperparams.unused[item.name]}"
        )
    if item.values is None:
        # The registry keeps counts as int and everything else as float.
        item = dataclasses.replace(item, is_whole=isinstance(hyperparams[item.name], int))
        low, high = item.bounds
        places = {f"min_value={low!r}": low, f"max_value={high!r}": high}
    else:
        places = {f"values has {value!r}, which": value for value in item.values}
    for place, value in places.items():
        bound = lower_bounds.get(item.name)
        reason = None
        try:
            hyperparams.check(item.name, value)
        except (ValueError, TypeError) as error:
            reason = str(error)
        if reason is None and bound is not None and value < bound:
            reason = f"whatever is below {bound!r} is raised to it; stay at or above {bound!r}"
        if reason is not None:
            raise ValueError(f"{item.name!r}: {place} would not be in force: {reason}")
    return item


def _why_not(name: str, hyperparams: Hyperparameters) -> str:
    if name in hyperparams.fixed:
        return f"{name!r} cannot be searched, for it cannot change while the agent trains: {hyperparams.fixed[name]}"
    if _EARLIER.get(name) in {*hyperparams, *hyperparams.fixed}:
        return f"the agent has no hyper-parameter {name!r}; it is {_EARLIER[name]!r}"
    known = list(hyperparams)
    near = [k for k in known if k.endswith(f".{name}")] or difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
    return f"the agent has no hyper-parameter {name!r}; {hint}"
