"""Normalisation of observations by their mean and standard deviation, before a policy's networks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from driftproof.nn.types import Observation

LIMIT = 20.0
"""Largest normalised number."""
WHOLE = ""
"""Key of an observation that is not a dict."""


class Moments(NamedTuple):
    """Mean and standard deviation of a part of observations, in double precision."""

    mean: Tensor
    std: Tensor

    def normalize(self, observation: Tensor) -> Tensor:
        """Normalised numbers ``[..., *shape]``, in single precision."""
        mean, std = self.mean.to(observation.device), self.std.to(observation.device)
        return ((observation - mean) / std).clamp_(-LIMIT, LIMIT).float()


class InputNormalizer(Protocol):
    """Statistics of the observations that a policy's networks were trained on."""

    @property
    def moments(self) -> Mapping[str, Moments]:
        """Moments of the parts that are normalised, by key; that of an observation which is no dict is ``""``."""


@dataclass(frozen=True)
class FixedMoments:
    """Statistics of a policy that was loaded without its agent."""

    moments: Mapping[str, Moments]


def normalized(observation: Observation, moments: Mapping[str, Moments]) -> Observation:
    """The observation with its parts normalised."""
    if isinstance(observation, dict):
        return {k: moments[k].normalize(part) if k in moments else part for k, part in observation.items()}
    return moments[WHOLE].normalize(observation) if WHOLE in moments else observation
