"""The entropy coefficient over the course of training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

from driftproof._arguments import check_count, check_number, check_option
from driftproof.state.schema import check, count, number, optional, table

DecayStart: TypeAlias = Literal["immediately", "plateau"]

_PATIENCE = 10


class EntropySchedule:
    """Decays the entropy coefficient linearly, and boosts it while the critic explains little.

    Called once per update, with plain numbers. The coefficient goes from its base to ``ent_coef_final`` as the
    remaining progress goes to 0 and is kept at ``ent_coef_min`` or above; while the explained variance is below
    ``ent_boost_below`` it is multiplied by ``ent_boost_factor``, up to ``ent_boost_cap``. A cap does not lower a
    coefficient that is above it without a boost.

    Args:
        ent_coef_final: Coefficient at the end of training; ``None``: stays at the base.
        ent_coef_min: Least coefficient.
        ent_coef_start: When the decay begins: ``"immediately"``, or on a ``"plateau"`` of the mean return, from
            wherever training is by then.
        ent_plateau_patience: Updates without improvement that make a plateau. Larger: later, and less easily fooled.
            ``None``: 10.
        ent_boost_factor: Factor while the explained variance is bad, at least 1; 1: no boost.
        ent_boost_below: Explained variance that is bad; ``None``: 0.
        ent_boost_cap: Largest coefficient that a boost leads to; ``None``: any.
        plateau_tolerance: Relative improvement of the mean return that counts as one.
    """

    explained_variance: float
    """Of the critic in the last rollout, which decides about a boost in the next update."""

    def __init__(
        self,
        ent_coef_final: float | None = None,
        ent_coef_min: float = 0.0,
        ent_coef_start: DecayStart = "immediately",
        ent_plateau_patience: int | None = None,
        ent_boost_factor: float = 1.0,
        ent_boost_below: float | None = None,
        ent_boost_cap: float | None = None,
        plateau_tolerance: float = 0.01,
    ) -> None:
        check_number("ent_coef_min", ent_coef_min, at_least=0)
        check_option("ent_coef_start", ent_coef_start, get_args(DecayStart))
        check_number("ent_boost_factor", ent_boost_factor, at_least=1)
        check_number("plateau_tolerance", plateau_tolerance, at_least=0)
        if ent_coef_final is not None:
            check_number("ent_coef_final", ent_coef_final, at_least=ent_coef_min)
        elif ent_coef_start == "plateau":
            raise ValueError('ent_coef_start="plateau" is the start of a decay: give ent_coef_final, where it leads to')
        if ent_plateau_patience is not None:
            check_count("ent_plateau_patience", ent_plateau_patience, at_least=1)
            if ent_coef_start != "plateau":
                raise ValueError(
                    f'ent_plateau_patience={ent_plateau_patience} waits for a plateau: give ent_coef_start="plateau"'
                )
        if ent_boost_below is not None:
            check_number("ent_boost_below", ent_boost_below, at_most=1)
        if ent_boost_cap is not None:
            check_number("ent_boost_cap", ent_boost_cap, at_least=ent_coef_min)
        for name, given in {"ent_boost_below": ent_boost_below, "ent_boost_cap": ent_boost_cap}.items():
            if given is not None and ent_boost_factor == 1:
                raise ValueError(f"{name}={given!r} is for a boost: give an ent_boost_factor above 1")
        self.final = ent_coef_final
        self.minimum = ent_coef_min
        self.start: DecayStart = ent_coef_start
        self.plateau_patience = _PATIENCE if ent_plateau_patience is None else ent_plateau_patience
        self.plateau_tolerance = plateau_tolerance
        self.boost_factor = ent_boost_factor
        self.boost_below = 0.0 if ent_boost_below is None else ent_boost_below
        self.boost_cap = ent_boost_cap
        self.explained_variance = 1.0
        self._plateau: float | None = None  # the progress that remained when it was found
        self._best_return: float | None = None
        self._stale_updates = 0

    def check(self, base: float) -> None:
        """Raise a ``ValueError`` if this base coefficient, a user's ``ent_coef``, contradicts the schedule."""
        check_number("ent_coef", base, at_least=0)
        if base < self.minimum:
            raise ValueError(
                f"ent_coef {base!r} is below ent_coef_min {self.minimum!r}, which would replace it: "
                "raise the one or lower the other"
            )

    def update(self, base: float, progress_remaining: float, mean_return: float | None) -> float:
        """The coefficient of this update.

        Args:
            base: The coefficient to start from.
            progress_remaining: From 1 at the beginning of training to 0 at its end.
            mean_return: Of recent episodes; ``None`` or NaN if none has ended yet.
        """
        progress = min(max(progress_remaining, 0.0), 1.0)
        if self.start == "plateau" and mean_return is not None and math.isfinite(mean_return):
            self._watch(progress, mean_return)
        coefficient = max(self._decayed(base, progress), self.minimum)
        if self.explained_variance < self.boost_below:
            coefficient = self._boosted(coefficient)
        return coefficient

    def state_dict(self) -> dict[str, Any]:
        """The plateau, if one was found, and what tells whether there is one. Settings are not part of it."""
        return {
            "explained_variance": self.explained_variance,
            "plateau": self._plateau,
            "best_return": self._best_return,
            "stale_updates": self._stale_updates,
        }

    def check_state_dict(self, state_dict: Any) -> None:
        """Raise a ``CheckpointError`` unless this is the state of such a schedule."""
        rules = {
            "explained_variance": number(finite=False),  # Returns that do not vary leave nothing to explain.
            "plateau": optional(number(at_least=0, at_most=1)),
            "best_return": optional(number()),
            "stale_updates": count(),
        }
        check("entropy", state_dict, table(rules))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue as the saved schedule would have.

        Raises:
            CheckpointError: The state does not fit; nothing has changed.
        """
        self.check_state_dict(state_dict)
        self.explained_variance = float(state_dict["explained_variance"])
        self._plateau, self._best_return = state_dict["plateau"], state_dict["best_return"]
        self._stale_updates = state_dict["stale_updates"]

    def _watch(self, progress: float, mean_return: float) -> None:
        """Begin the decay if the mean return has not improved for long enough."""
        if self._plateau is not None:
            return
        best = self._best_return
        if best is None or mean_return > best + self.plateau_tolerance * abs(best):
            self._best_return, self._stale_updates = float(mean_return), 0
            return
        self._stale_updates += 1
        if self._stale_updates >= self.plateau_patience:
            self._plateau = progress

    def _decayed(self, base: float, progress: float) -> float:
        begin = 1.0 if self.start == "immediately" else self._plateau
        if self.final is None or begin is None:
            return base
        # More may remain than did at the beginning, if training was prolonged since; or nothing, from the beginning.
        share = min(progress / begin, 1.0) if begin > 0 else 0.0
        return share * base + (1 - share) * self.final

    def _boosted(self, coefficient: float) -> float:
        boosted = coefficient * self.boost_factor
        # Never lower than without the boost, and so never below the minimum.
        return boosted if self.boost_cap is None else max(min(boosted, self.boost_cap), coefficient)
