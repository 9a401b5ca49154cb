"""Settings of population-based training: which hyper-parameters to search, and how."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from driftproof._registry import EXPLORE_METHODS
from driftproof.settings.definition import argument, check_values, defaults_of, setting, settings_of
from driftproof.settings.unused import refuse_unused

if TYPE_CHECKING:
    from driftproof.pbt.explore import ExploreMethod
else:
    ExploreMethod = Any

ExploitMethod: TypeAlias = Literal["truncation", "binary_tournament"]
MetricMode: TypeAlias = Literal["max", "min"]
MetricName: TypeAlias = Literal["mean_reward", "mean_length", "success_rate"]
OptimizerExploitStrategy: TypeAlias = Literal["copy", "reset"]
Value: TypeAlias = bool | int | float | str | None


@dataclass(frozen=True)
class HyperparamConfig:
    """A hyper-parameter that the population searches: a range, or values to choose from."""

    name: str = setting(doc="Name in the agent's hyperparams: learning_rate, optimizer.sigma.")
    min_value: float | None = setting(None, "Smallest value of the range, inclusive.")
    max_value: float | None = setting(None, "Largest value of the range, inclusive.")
    values: Sequence[Any] | None = setting(
        None,
        "Values to choose from, instead of a range; order them so that neighbours are similar.",
        form=list[Value] | None,
    )
    perturbation_factor: float = setting(
        1.2, "A perturbation multiplies or divides by this factor. Larger: faster, coarser search; 1.1 to 2.", above=1
    )
    resample_probability: float = setting(
        0.25, "Probability that explore_method both resamples instead of perturbing.", at_least=0, at_most=1
    )
    is_log_scale: bool = setting(False, "Sample on a logarithmic scale, as for learning rates.")
    is_whole: bool | None = argument(
        None,
        "Whether only integers are valid; the range is then rounded inwards. None: yes if both ends of the range "
        "are int, or if the agent's hyper-parameter is an integer (check_against()).",
    )

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"Invalid name: {self.name!r}; must be the name of a hyper-parameter")
        for name, each in settings_of(HyperparamConfig).items():
            if name != "values":
                each.check(getattr(self, name), f"{name} of {self.name!r}")
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
        """Whether it has a list of values to choose from."""
        return self.values is not None

    @property
    def bounds(self) -> tuple[float, float]:
        """Lower and upper end of the range."""
        if self.min_value is None or self.max_value is None:
            raise TypeError(f"{self.name!r} has values, not a range")
        return self.min_value, self.max_value

    def allows(self, value: Any) -> bool:
        """Whether the search can produce a value."""
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
        if not low < high or not math.isfinite(high - low):
            raise ValueError(
                f"{self.name!r} has min_value={low!r} and max_value={high!r}: min_value must be below max_value"
            )
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
                raise ValueError(f"{self.name!r} has {option}=True, which needs a range, not values")
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise ValueError(f"Invalid values of {self.name!r}: {values!r}; must be a list or tuple")
        for value in values:
            if not isinstance(value, (str, bool, int, float)) and value is not None:
                raise ValueError(f"Invalid values of {self.name!r}: {value!r} is not a number, string, bool or None")
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"Invalid values of {self.name!r}: {value!r} is not finite")
        if len(values) < 2 or len(set(values)) < len(values):
            raise ValueError(f"Invalid values of {self.name!r}: {values!r}; must be two or more, all different")
        object.__setattr__(self, "values", tuple(values))
        object.__setattr__(self, "is_whole", False)


@dataclass(frozen=True)
class PBTConfig:
    """Settings of population-based training."""

    population_size: int = setting(
        10,
        "Number of members. More: wider search, at the cost of one more agent each; 4 to 40.",
        at_least=2,
        at_most=4096,
    )
    perturbation_interval: int = setting(
        5,
        "Updates (not environment steps) between a member's exploit decisions. Shorter: greedier, "
        "noisier comparisons; 1 to 50.",
        at_least=1,
    )
    hyperparams: Sequence[HyperparamConfig] = setting(
        (),
        "Hyper-parameters to search, each with a range or values.",
        form=list[HyperparamConfig],
        file_default=[
            {"name": "learning_rate", "min_value": 3e-5, "max_value": 3e-3, "is_log_scale": True},
            {"name": "ent_coef", "min_value": 1e-5, "max_value": 0.03, "is_log_scale": True},
        ],
    )
    exploit_method: ExploitMethod = setting(
        "truncation",
        "truncation: the worst members take over the state of the best; binary_tournament: a member takes over the "
        "state of a random other member if that is better.",
    )
    explore_method: str | type[ExploreMethod] = setting(
        "both",
        "How explore mutates the donor's hyper-parameters: perturb, resample, both (one of the two at random), pb2 (a "
        "Gaussian process model; needs scikit-learn), or your own class, in configuration files as module:Class.",
        form=str,
        check=EXPLORE_METHODS.name,
    )
    truncation_ratio: float = setting(
        0.2,
        "Share of the population that counts as the worst, and as the best; at least one member each; 0.1 to 0.3.",
        above=0,
        at_most=0.5,  # Above one half, the worst and the best would overlap.
    )
    checkpoint_dir: str | os.PathLike[str] | None = setting(
        None,
        "Folder of the members' checkpoints. None: in memory, or the folder members in the run folder.",
        form=str | None,
    )
    metric_name: str = setting("mean_reward", "Metric of recent episodes that ranks the members.", form=MetricName)
    metric_mode: MetricMode = setting("max", "Whether a larger or a smaller metric is better.")
    ready_percentage: float = setting(
        0.8, "Share of members that must have reported the metric before an exploit decision.", above=0, at_most=1
    )
    min_ready_members: int = setting(
        2, "Smallest number of members that must have reported, whatever the share.", at_least=1
    )
    ready_check_max_wait: int = setting(
        10, "Attempts in a row after which min_ready_members reports are enough.", at_least=1
    )
    optimizer_exploit_strategy: OptimizerExploitStrategy = setting(
        "copy", "Whether exploit copies the donor's optimizer state or resets it."
    )
    explore_strong: bool = setting(
        False, "Also explore the hyper-parameters of members that do not exploit, at the end of each interval."
    )

    def __post_init__(self) -> None:
        check_values(self)
        object.__setattr__(self, "explore_method", EXPLORE_METHODS.name(self.explore_method))
        if self.checkpoint_dir is not None and not isinstance(self.checkpoint_dir, (str, os.PathLike)):
            raise ValueError(f"Invalid checkpoint_dir: {self.checkpoint_dir!r}; must be a path or None")
        if not isinstance(self.metric_name, str) or not self.metric_name:
            raise ValueError(f"Invalid metric_name: {self.metric_name!r}; must be a string")
        if self.min_ready_members > self.population_size:
            raise ValueError(
                f"Invalid min_ready_members: {self.min_ready_members!r}; must be <= population_size, which is "
                f"{self.population_size}"
            )
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
            refuse_unused(vars(item), defaults_of(HyperparamConfig), unused, f"{item.name!r}: ")
        if self.explore_method == "pb2" and all(item.values is not None for item in self.hyperparams):
            raise ValueError(
                'explore_method="pb2" needs a hyper-parameter with a range: give one a min_value and a max_value, '
                'or use "both", "perturb" or "resample"'
            )
        object.__setattr__(self, "hyperparams", tuple(self.hyperparams))


def unused_by_search(explore_method: str, has_values: bool) -> dict[str, str]:
    """Return the settings of a searched hyper-parameter that have no effect, each with the setting that it needs.

    Args:
        explore_method: How the population explores.
        has_values: Whether the hyper-parameter has values to choose from, instead of a range.
    """
    unused: dict[str, str] = {}
    if explore_method not in EXPLORE_METHODS.built_in:
        return unused  # A user's own explore method may use any of them.
    if explore_method == "resample":
        unused["perturbation_factor"] = "explore_method 'both', 'perturb' or 'pb2'"
    if has_values:
        unused["perturbation_factor"] = "a range: with values, explore picks a neighbour"
    if explore_method != "both":
        unused["resample_probability"] = "explore_method 'both'"
    return unused
