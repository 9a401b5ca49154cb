"""Settings of variance gradient scaling, :class:`driftproof.optim.VarianceGradientScaler`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from driftproof.settings.definition import LARGEST, argument, check_values, setting

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any

Statistic: TypeAlias = Literal["elementwise", "spatial_mean"]
ApplyTo: TypeAlias = Literal["gradient", "update"]


class MetricLogger(Protocol):
    """Logger of metrics, such as Stable-Baselines3's."""

    def record(self, key: str, value: Any) -> None:
        """Record one metric."""


@dataclass(frozen=True)
class VGSSettings:
    """Arguments of the scaler."""

    parameters: Iterable[Tensor] | Iterable[tuple[str, Tensor]] | None = argument(
        None, "Parameters: tensors, or pairs of name and tensor. None: pass them to update_parameters() later."
    )
    enabled: bool = setting(True, "Whether to scale gradients. If false, no other argument may be set.")
    beta: float = setting(
        0.99,
        "Decay of the moving averages, over about 1 / (1 - beta) steps. A longer window separates noise and signal "
        "better: for pure noise, the ratio of variance to squared mean is about (1 + beta) / (1 - beta).",
        at_least=0,
        below=1,
        is_hyperparameter=True,
    )
    alpha: float = setting(
        0.1,
        "Strength of the scaling: where alpha * normalised variance = 1, the factor is 1/2; 0.01 to 1.",
        at_least=0,
        at_most=LARGEST,
        is_hyperparameter=True,
    )
    eps: float = setting(
        1e-8, "Smallest squared mean in the denominator, relative to the mean squared gradient.", above=0
    )
    warmup_steps: int = setting(
        100,
        "Optimizer steps that only gather statistics, with a factor of 1; 10 to 1000.",
        at_least=0,
        at_most=LARGEST,
        is_hyperparameter=True,
    )
    min_scaling_factor: float = setting(
        0.1, "Smallest scaling factor. Larger limits the effect.", above=0, at_most=1, is_hyperparameter=True
    )
    variance_cap: float = setting(
        50.0, "Upper bound of the normalised variance.", above=0, at_most=LARGEST, is_hyperparameter=True
    )
    statistic: Statistic = setting(
        "elementwise",
        "Statistic of the noise: elementwise, the variance over time of every element, summed over the tensor, at "
        "one more float32 per element; spatial_mean, the variance over time of each tensor's mean, which needs O(1) "
        "memory per tensor, and is blind to noise that cancels within a tensor, such as elements that flip their "
        "signs against each other.",
    )
    apply_to: ApplyTo = setting(
        "gradient",
        "gradient: scale gradients, whose factor Adam-like optimizers mostly cancel; update: scale the "
        "optimizer's step itself.",
    )
    logger: MetricLogger | None = argument(
        None, "Object with record(key, value); gets the metrics as numbers in every step()."
    )

    def __post_init__(self) -> None:
        check_values(self)
