"""The drift alarm: detects that returns have fallen below what the critics predict.

The probability integral transform of a return is the share of the predicted quantiles below it. Its mean over a
rollout, the *calibration*, is about 0.5 while the critics are right, more while the agent improves, and close to 0 when
the world has changed for the worse. Critics learn the lower returns within a few updates, so that the calibration shows
only a transient; and a transient alone is no proof, since critics err in a stationary world too. Hence a second
statistic, the mean return of completed episodes. Both are standardised and summed up by one-sided CUSUM charts (Page,
1954). The alarm needs both, or twice the evidence of returns: critics that learn the lower returns within one update
show nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from driftproof.learner.episode_returns import FEW_EPISODES, LARGEST_RETURN, LOOK, EpisodeReturns, Look, bounded
from driftproof.learner.rollout import Rollout
from driftproof.nn.heads import ValueHead
from driftproof.state.schema import check, count, number, optional, table

_LEAST_SPREAD = 0.1
"""Standard deviation of the calibration, at least: it is autocorrelated, and so varies little between updates."""
_LEAST_DROP = 0.2
"""Standard deviation of returns, at least, as a share of what the agent has gained over its first rollout."""
_LARGEST_DEVIATION = {"calibration": 5.0, "return": 5.0}
"""Bounds of standardised deviations, below the threshold: no single rollout raises the alarm."""
_OF_FEW = 3.0
"""Bound of deviations of returns in rollouts with fewer than ``FEW_EPISODES`` completed episodes."""
_TRANSIENT = 0.3
"""Threshold of the calibration, relative to that of returns: critics may learn the new returns in a single update."""
_ALONE = 2.0
"""Threshold of returns without the calibration, relative to that with it."""
_IMPROVING = 2.0
"""Standard deviations of the calibration above 0.5 at which critics predict too little: returns alone prove nothing."""
_SUSPICIOUS = 0.25
"""Value of both sums, in units of their thresholds, above which references are frozen."""
LARGEST_LENGTH = 1e6
"""Longer episodes count as so long."""
_REARMED = 5
"""Updates after a response that only the references learn from: their spread has a lower bound, unlike at first."""
_ROUNDING = 0.01
"""Standard deviation of returns, at least, relative to their size."""


@torch.no_grad()
def calibration(heads: Sequence[ValueHead], predictions: Sequence[Tensor], targets: Tensor, valid: Tensor) -> Tensor:
    """Mean probability integral transform of returns in the critics' predicted distributions, 0-dim.

    Args:
        heads: Value heads of the critics.
        predictions: Predictions of each critic ``[T, N, outputs]``.
        targets: Normalised returns ``[T, N]``.
        valid: Which samples count ``[T, N]``.
    """
    below = torch.stack([head.below(p, targets) for head, p in zip(heads, predictions, strict=True)]).mean(0)
    return torch.where(valid, below, 0).sum() / valid.sum().clamp_min(1)


class CalibrationAlarm:
    """Alarm of a harmful change: the critics predict too much, and episodes return less than before.

    Each update gives a calibration ``u`` and, if episodes were completed, their mean return ``R``. Both have a
    reference, the average of about ``memory`` updates, and a standard deviation, from differences of successive
    updates, so that learning does not widen it. With ``z`` the standardised amount by which ``u`` is below its
    reference, and below 0.5, the CUSUM ``S = max(0, S + z - slack)`` grows while the critics predict too much; another
    grows while ``R`` is below its reference. The alarm is raised once the second is above ``threshold`` and the first,
    which has less time to grow, above a part of it, or once the second is above twice the threshold. Improvement makes
    both smaller.

    Rollouts with fewer than four completed episodes and 800 steps are put together until there are as many; "update"
    stands for that. References are frozen while both sums are above a quarter of their thresholds. After an alarm,
    :meth:`restart` clears the sums and the reference of returns, since a changed world has another level; that of the
    calibration is about the critics and stays. There is no alarm while episodes never end.

    Args:
        threshold: Level of the sums. Larger: fewer false alarms, and later ones.
        slack: Standard deviations below the reference that are no evidence.
        memory: Updates that the references average.
        warmup: Updates at the beginning, and after an alarm, that only the references learn from, 5 if the response
            to it has ended; those of more than 800 steps count for more.
    """

    def __init__(self, threshold: float = 7.0, slack: float = 0.5, memory: float = 10, warmup: int = 20) -> None:
        self.threshold, self.slack, self.memory, self.warmup = threshold, slack, memory, warmup
        self.episodes = EpisodeReturns()
        self.alarms = 0
        """Alarms so far."""
        self.untrained: float | None = None
        """Mean return of the first completed episodes: what a policy earns that has not learned yet."""
        self.mean_return: float | None = None
        """Mean return of the episodes completed in the last update; ``None``: there were none, or it is not whole."""
        self.last_return: float | None = None
        """The last mean return that there was."""
        self.completed: npt.NDArray[np.float64] = np.zeros(0)
        """Returns of the episodes completed in the last rollout."""
        self.has_seen = False
        """Whether the last rollout made an update whole."""
        self._look = Look()
        self._age = 0.0
        """Updates since the beginning, or since the last alarm."""
        self._sums = {"calibration": 0.0, "return": 0.0}
        self._calibration, self._return, self._rate = _Reference(), _Reference(), _Reference()

    @property
    def cusum(self) -> float:
        """The sums in units of their thresholds: above 1 the alarm is raised."""
        return max(self._of_both, self._sums["return"] / _ALONE / self.threshold)

    @property
    def _of_both(self) -> float:
        """The smaller one of both sums, in units of their thresholds."""
        return min(self._sums["calibration"] / _TRANSIENT, self._sums["return"]) / self.threshold

    @property
    def is_quiet(self) -> bool:
        """Whether the critics do not predict too much, or returns are not lower than usual."""
        return self._of_both == 0

    @property
    def typical_return(self) -> float | None:
        """Reference of the mean return; ``None`` until episodes were completed."""
        return self._return.mean if self._return.updates else None

    @property
    def typical_length(self) -> float:
        """Reference of the length of episodes."""
        return 1 / max(self._rate.mean, 1 / LARGEST_LENGTH)

    @property
    def noise(self) -> float:
        """Standard deviation of the mean return between updates."""
        typical = self._return.mean
        gained = 0.0 if self.untrained is None else abs(typical - self.untrained)
        return max(self._return.std, _LEAST_DROP * gained, _ROUNDING * abs(typical), 1e-12)

    def update(self, calibration: float, rollout: Rollout) -> bool:
        """Take the numbers of a rollout; returns whether returns are so low that the world seems to have changed.

        Args:
            calibration: Result of :func:`calibration`.
            rollout: Rollout of the update, of which the completed episodes are read.
        """
        self.completed = bounded(self.episodes.of(rollout))
        self.mean_return, self.has_seen, look = None, False, self._look
        if not math.isfinite(calibration):
            return False
        look.add(rollout, self.completed, calibration)
        if not look.is_enough:
            return False
        self._look = Look()
        return self.observe(look.calibration / look.steps, look.mean_return, look.episodes, look.steps)

    def observe(
        self, calibration: float, mean_return: float | None, episodes: int = FEW_EPISODES, steps: int = LOOK
    ) -> bool:
        """Take the evidence of an update.

        Args:
            calibration: Result of :func:`calibration`.
            mean_return: Mean return of the completed episodes; ``None``: there were none.
            episodes: Number of completed episodes.
            steps: Number of transitions.
        """
        self._age += max(1.0, steps / LOOK)
        self.mean_return, self.has_seen = mean_return, True
        below = min(self._calibration.mean_or(0.5), 0.5) - calibration
        self._add("calibration", below / max(self._calibration.std, _LEAST_SPREAD))
        if mean_return is not None:
            self.last_return = mean_return
            self.untrained = mean_return if self.untrained is None else self.untrained
            bound = _LARGEST_DEVIATION["return"] if episodes >= FEW_EPISODES else _OF_FEW
            self._add("return", min(bound, (self._return.mean_or(mean_return) - mean_return) / self.noise))
        if calibration > 0.5 + _IMPROVING * max(self._calibration.std, _LEAST_SPREAD):
            self._sums["return"] = min(self._sums["return"], _ALONE * self.threshold)
        if self.cusum > 1:
            return True
        if self._of_both <= _SUSPICIOUS:
            self._calibration.observe(calibration, self.memory)
            self._rate.observe(episodes / steps, self.memory)
            if mean_return is not None:
                self._return.observe(mean_return, self.memory)
        return False

    def weights_were_replaced(self) -> None:
        """Do not count what other weights began."""
        self.episodes.weights_were_replaced()
        self._look = Look()

    def dismiss(self) -> None:
        """Clear the sums: the world has not changed, and the references are still right."""
        self._sums = dict.fromkeys(self._sums, 0.0)

    def restart(self) -> None:
        """Restart after an alarm; the reference of the calibration is kept."""
        self._sums = dict.fromkeys(self._sums, 0.0)
        self._return, self._rate, self._age = _Reference(), _Reference(), 0.0

    def rearm(self) -> None:
        """After a response, which has ended: the next change may come soon."""
        self._age = max(self._age, self.warmup - _REARMED)

    def metrics(self) -> dict[str, float]:
        """Numbers of the last update, by the names that are logged."""
        known = {"drift/episode_return": self.mean_return, "drift/typical_return": self.typical_return}
        return {
            "drift/cusum": self.cusum,
            **{name: value for name, value in known.items() if value is not None},
        }

    def state_dict(self) -> dict[str, Any]:
        """The sums and their references. Settings and running episodes are not part of it."""
        return {
            "alarms": self.alarms,
            "age": self._age,
            "untrained": self.untrained,
            "mean_return": self.mean_return,
            "last_return": self.last_return,
            "look": asdict(self._look),
            "sums": dict(self._sums),
            "calibration": self._calibration.state_dict(),
            "return": self._return.state_dict(),
            "rate": self._rate.state_dict(),
        }

    @staticmethod
    def initial_state_dict() -> dict[str, Any]:
        """The state before the first update."""
        return CalibrationAlarm().state_dict()

    def check_state_dict(self, state_dict: Any) -> None:
        """Raise a ``CheckpointError`` unless this is the state of such an alarm."""
        value = number(at_least=-LARGEST_RETURN, at_most=LARGEST_RETURN)
        spread = number(at_least=0, at_most=LARGEST_RETURN**2)
        reference = table({"mean": value, "variance": spread, "last": value, "updates": count()})
        rules = {
            "alarms": count(),
            "age": number(at_least=0, at_most=LARGEST_RETURN),
            "untrained": optional(value),
            "mean_return": optional(value),
            "last_return": optional(value),
            "look": Look.rule(),
            "sums": table(dict.fromkeys(self._sums, number(at_least=0, at_most=LARGEST_RETURN))),
            "calibration": reference,
            "return": reference,
            "rate": reference,
        }
        check("drift_alarm", state_dict, table(rules))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state.

        Raises:
            CheckpointError: The state does not fit; nothing has changed.
        """
        self.check_state_dict(state_dict)
        self.alarms, self._age = int(state_dict["alarms"]), float(state_dict["age"])
        self.untrained, self.mean_return = state_dict["untrained"], state_dict["mean_return"]
        self.last_return, self._look = state_dict["last_return"], Look(**state_dict["look"])
        self._sums = dict(state_dict["sums"])
        self._calibration = _Reference(**state_dict["calibration"])
        self._return, self._rate = _Reference(**state_dict["return"]), _Reference(**state_dict["rate"])

    def _add(self, name: str, deviation: float) -> None:
        if self._age <= self.warmup:
            return
        bound = _LARGEST_DEVIATION[name]
        bounded = max(-bound, min(bound, deviation))
        self._sums[name] = max(0.0, self._sums[name] + bounded - self.slack)


@dataclass
class _Reference:
    """Exponential moving average, unbiased from the start, and spread between successive values."""

    mean: float = 0.0
    variance: float = 0.0
    last: float = 0.0
    updates: int = 0

    @property
    def std(self) -> float:
        return math.sqrt(self.variance)

    def mean_or(self, otherwise: float) -> float:
        return self.mean if self.updates else otherwise

    def observe(self, value: float, memory: float) -> None:
        self.updates += 1
        weight = max(1 / memory, 1 / self.updates)
        self.mean += weight * (value - self.mean)
        if self.updates > 1:
            # Independent values differ by twice their variance; a trend adds little to it.
            self.variance += max(1 / memory, 1 / (self.updates - 1)) * (0.5 * (value - self.last) ** 2 - self.variance)
        self.last = value

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)
