"""The entropy coefficient over the course of training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from driftproof._arguments import check_count, check_number, check_option
from driftproof._members import Number, check_numbers, listed, member_shape
from driftproof.state.schema import check, count, number, numbers, optional, table

DecayStart: TypeAlias = Literal["immediately", "plateau"]

_PATIENCE = 10


class EntropySchedule:
    """Decays the entropy coefficient linearly, and boosts it while the critic explains little.

    Called once per update, with plain numbers, or tensors ``[M]`` where those of several members differ. The
    coefficient goes from its base to ``ent_coef_final`` as the remaining progress goes to 0 and is kept at
    ``ent_coef_min`` or above; while the explained variance is below ``ent_boost_below`` it is multiplied by
    ``ent_boost_factor``, up to ``ent_boost_cap``. A cap does not lower a coefficient that is above it without a boost.

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
        members: How many agents it serves, with numbers ``[M]``; ``None``: one, with plain numbers.
    """

    def __init__(
        self,
        ent_coef_final: Number | None = None,
        ent_coef_min: Number = 0.0,
        ent_coef_start: DecayStart = "immediately",
        ent_plateau_patience: int | None = None,
        ent_boost_factor: Number = 1.0,
        ent_boost_below: Number | None = None,
        ent_boost_cap: Number | None = None,
        plateau_tolerance: Number = 0.01,
        members: int | None = None,
    ) -> None:
        check_numbers("ent_coef_min", ent_coef_min, at_least=0)
        check_option("ent_coef_start", ent_coef_start, get_args(DecayStart))
        check_numbers("ent_boost_factor", ent_boost_factor, at_least=1)
        check_numbers("plateau_tolerance", plateau_tolerance, at_least=0)
        if ent_coef_final is not None:
            check_numbers("ent_coef_final", ent_coef_final, at_least=ent_coef_min)
        elif ent_coef_start == "plateau":
            raise ValueError('ent_coef_start="plateau" is the start of a decay: give ent_coef_final, where it leads to')
        if ent_plateau_patience is not None:
            check_count("ent_plateau_patience", ent_plateau_patience, at_least=1)
            if ent_coef_start != "plateau":
                raise ValueError(
                    f'ent_plateau_patience={ent_plateau_patience} waits for a plateau: give ent_coef_start="plateau"'
                )
        if ent_boost_below is not None:
            check_numbers("ent_boost_below", ent_boost_below, at_most=1)
        if ent_boost_cap is not None:
            check_numbers("ent_boost_cap", ent_boost_cap, at_least=ent_coef_min)
        for name, given in {"ent_boost_below": ent_boost_below, "ent_boost_cap": ent_boost_cap}.items():
            if given is not None and max(listed(ent_boost_factor)) == 1:
                raise ValueError(f"{name}={given!r} is for a boost: give an ent_boost_factor above 1")
        self.final = ent_coef_final
        self.minimum = ent_coef_min
        self.start: DecayStart = ent_coef_start
        self.plateau_patience = _PATIENCE if ent_plateau_patience is None else ent_plateau_patience
        self.plateau_tolerance = plateau_tolerance
        self.boost_factor = ent_boost_factor
        self.boost_below = 0.0 if ent_boost_below is None else ent_boost_below
        self.boost_cap = ent_boost_cap
        self.members = members
        # In double precision, as plain numbers are; NaN stands for none. The plateau is the progress that remained when
        # it was found.
        shape = member_shape(members)
        self._explained_variance = torch.ones(shape, dtype=torch.float64)
        self._plateau = torch.full(shape, torch.nan, dtype=torch.float64)
        self._best_return = torch.full(shape, torch.nan, dtype=torch.float64)
        self._stale_updates = torch.zeros(shape, dtype=torch.float64)

    @property
    def explained_variance(self) -> Number:
        """Of the critic in the last rollout, which decides about a boost in the next update."""
        return self._plain(self._explained_variance)

    @explained_variance.setter
    def explained_variance(self, value: Number) -> None:
        self._explained_variance = self._wide(value).clone()

    def check(self, base: float) -> None:
        """Raise a ``ValueError`` if this base coefficient, a user's ``ent_coef``, contradicts the schedule."""
        check_number("ent_coef", base, at_least=0)
        if base < (least := max(listed(self.minimum))):
            raise ValueError(
                f"ent_coef {base!r} is below ent_coef_min {least!r}, which would replace it: "
                "raise the one or lower the other"
            )

    def update(self, base: Number, progress_remaining: Number, mean_return: Number | None) -> Number:
        """The coefficient of this update.

        Args:
            base: The coefficient to start from.
            progress_remaining: From 1 at the beginning of training to 0 at its end.
            mean_return: Of recent episodes; ``None`` or NaN if none has ended yet.
        """
        progress = self._wide(progress_remaining).clamp(0, 1)
        if self.start == "plateau" and mean_return is not None:
            self._watch(progress, self._wide(mean_return))
        coefficient = torch.maximum(self._decayed(self._wide(base), progress), self._wide(self.minimum))
        boost = self._explained_variance < self._wide(self.boost_below)
        return self._plain(torch.where(boost, self._boosted(coefficient), coefficient))

    def state_dict(self) -> dict[str, Any]:
        """The plateau, if one was found, and what tells whether there is one. Settings are not part of it."""
        tensors = self._tensors()
        if self.members is not None:
            return {name: tensor.clone() for name, tensor in tensors.items()}
        plain = {name: tensor.item() for name, tensor in tensors.items()}
        plateau, best_return = (None if plain[n] != plain[n] else plain[n] for n in ("plateau", "best_return"))
        stale_updates = int(plain["stale_updates"])
        return {**plain, "plateau": plateau, "best_return": best_return, "stale_updates": stale_updates}

    def check_state_dict(self, state_dict: Any) -> None:
        """Raise a ``CheckpointError`` unless this is the state of such a schedule."""
        rules = {
            "explained_variance": number(finite=False),  # Returns that do not vary leave nothing to explain.
            "plateau": optional(number(at_least=0, at_most=1)),
            "best_return": optional(number()),
            "stale_updates": count(),
        }
        if self.members is not None:
            rules = {
                "explained_variance": numbers((self.members,), finite=False),
                "plateau": numbers((self.members,), at_least=0, at_most=1, finite=False),
                "best_return": numbers((self.members,), finite=False),
                "stale_updates": numbers((self.members,), at_least=0),
            }
        check("entropy", state_dict, table(rules))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue as the saved schedule would have.

        Raises:
            CheckpointError: The state does not fit; nothing has changed.
        """
        self.check_state_dict(state_dict)
        for name in self._tensors():
            saved = state_dict[name]
            setattr(self, f"_{name}", self._wide(torch.nan if saved is None else saved).clone())

    def _tensors(self) -> dict[str, Tensor]:
        return {
            "explained_variance": self._explained_variance,
            "plateau": self._plateau,
            "best_return": self._best_return,
            "stale_updates": self._stale_updates,
        }

    def _watch(self, progress: Tensor, mean_return: Tensor) -> None:
        """Begin the decay where the mean return has not improved for long enough."""
        best = self._best_return
        watched = self._plateau.isnan() & mean_return.isfinite()
        improved = best.isnan() | (mean_return > best + self._wide(self.plateau_tolerance) * best.abs())
        stale = torch.where(improved, 0, self._stale_updates + 1)
        found = watched & ~improved & (stale >= self._wide(self.plateau_patience))
        self._best_return = torch.where(watched & improved, mean_return, best)
        self._stale_updates = torch.where(watched, stale, self._stale_updates)
        self._plateau = torch.where(found, progress, self._plateau)

    def _decayed(self, base: Tensor, progress: Tensor) -> Tensor:
        if self.final is None:
            return base
        begin = torch.ones_like(self._plateau) if self.start == "immediately" else self._plateau
        # More may remain than did at the beginning, if training was prolonged since; or nothing, from the beginning.
        share = torch.where(begin > 0, (progress / begin).clamp_max(1), 0)
        return torch.where(begin.isnan(), base, share * base + (1 - share) * self._wide(self.final))

    def _boosted(self, coefficient: Tensor) -> Tensor:
        boosted = coefficient * self._wide(self.boost_factor)
        # Never lower than without the boost, and so never below the minimum.
        capped = boosted if self.boost_cap is None else torch.minimum(boosted, self._wide(self.boost_cap))
        return torch.maximum(capped, coefficient)

    def _wide(self, value: Number) -> Tensor:
        return torch.as_tensor(value, dtype=torch.float64, device="cpu").expand(member_shape(self.members))

    def _plain(self, value: Tensor) -> Number:
        return value.item() if self.members is None else value.clone()
