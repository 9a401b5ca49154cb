"""The entropy coefficient over the course of training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from driftproof._members import Number, member_shape
from driftproof.settings.agent import EntropySettings
from driftproof.settings.definition import argument, documented, takes
from driftproof.state.schema import Rule, check, count, number, numbers, optional, table

_PATIENCE = 10
_STATE = table(
    {
        "explained_variance": number(finite=False),  # NaN when all returns are equal.
        "plateau": optional(number(at_least=0, at_most=1)),
        "best_return": optional(number()),
        "stale_updates": count(),
    }
)


@dataclass(kw_only=True)
class EntropyArguments(EntropySettings):
    """Arguments of the schedule."""

    plateau_tolerance: float = argument(0.01, "Smallest relative improvement of the mean return.", at_least=0)
    members: int | None = argument(
        None, "Number of agents, with numbers [M]. None: one agent, with plain numbers.", at_least=1
    )


@documented(EntropyArguments)
class EntropySchedule:
    """Decays the entropy coefficient linearly, and boosts it while the critic explains little.

    Called once per update, with plain numbers, or tensors ``[M]`` where those of several members differ. The
    coefficient goes from its base to ``ent_coef_final`` as the remaining progress goes to 0 and is kept at
    ``ent_coef_min`` or above; while the explained variance is below ``ent_boost_below`` it is multiplied by
    ``ent_boost_factor``, up to ``ent_boost_cap``. A cap does not lower a coefficient that is above it without a boost.
    """

    @takes(EntropyArguments)
    def __init__(self, given: EntropyArguments) -> None:
        self.final: Number | None = given.ent_coef_final
        self.minimum: Number = given.ent_coef_min
        self.start = given.ent_coef_start
        self.plateau_patience = _PATIENCE if given.ent_plateau_patience is None else given.ent_plateau_patience
        self.plateau_tolerance: Number = given.plateau_tolerance
        self.boost_factor: Number = given.ent_boost_factor
        self.boost_below: Number = 0.0 if given.ent_boost_below is None else given.ent_boost_below
        self.boost_cap: Number | None = given.ent_boost_cap
        self.members = given.members
        # In double precision, as plain numbers are; NaN stands for None. The plateau is the remaining progress at which
        # it was found.
        shape = member_shape(given.members)
        self._explained_variance = torch.ones(shape, dtype=torch.float64)
        self._plateau = torch.full(shape, torch.nan, dtype=torch.float64)
        self._best_return = torch.full(shape, torch.nan, dtype=torch.float64)
        self._stale_updates = torch.zeros(shape, dtype=torch.float64)

    @property
    def explained_variance(self) -> Number:
        """Explained variance of the critic in the last rollout, which decides on a boost in the next update."""
        return self._plain(self._explained_variance)

    @explained_variance.setter
    def explained_variance(self, value: Number) -> None:
        self._explained_variance = self._wide(value).clone()

    def update(self, base: Number, progress_remaining: Number, mean_return: Number | None) -> Number:
        """Compute the entropy coefficient of this update.

        Args:
            base: Coefficient at the start of the decay.
            progress_remaining: From 1 at the beginning of training to 0 at its end.
            mean_return: Mean return of recent episodes; ``None`` or NaN if none has ended yet.
        """
        progress = self._wide(progress_remaining).clamp(0, 1)
        if self.start == "plateau" and mean_return is not None:
            self._watch(progress, self._wide(mean_return))
        coefficient = torch.maximum(self._decayed(self._wide(base), progress), self._wide(self.minimum))
        boost = self._explained_variance < self._wide(self.boost_below)
        return self._plain(torch.where(boost, self._boosted(coefficient), coefficient))

    def state_dict(self) -> dict[str, Any]:
        """The plateau, if one was found, and the statistics that detect it. Settings are not part of it."""
        tensors = self._tensors()
        if self.members is not None:
            return {name: tensor.clone() for name, tensor in tensors.items()}
        plain = {name: tensor.item() for name, tensor in tensors.items()}
        plateau, best_return = (None if plain[n] != plain[n] else plain[n] for n in ("plateau", "best_return"))
        stale_updates = int(plain["stale_updates"])
        return {**plain, "plateau": plateau, "best_return": best_return, "stale_updates": stale_updates}

    def check_state_dict(self, state_dict: Any) -> None:
        """Raise a ``CheckpointError`` unless this is the state of such a schedule."""
        check("entropy", state_dict, _STATE if self.members is None else self._state_of_members())

    def _state_of_members(self) -> Rule:
        shape = (self.members,)
        return table(
            {
                "explained_variance": numbers(shape, finite=False),
                "plateau": numbers(shape, at_least=0, at_most=1, finite=False),
                "best_return": numbers(shape, finite=False),
                "stale_updates": numbers(shape, at_least=0),
            }
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue as the saved schedule would have.

        Raises:
            CheckpointError: The state does not fit; nothing has changed.
        """
        self.check_state_dict(state_dict)
        for name in self._tensors():
            saved = torch.nan if state_dict[name] is None else state_dict[name]
            # Numbers without a detour: an exploit of a population loads the schedules of many members.
            is_plain = self.members is None and not isinstance(saved, Tensor)
            loaded = torch.tensor(saved, dtype=torch.float64) if is_plain else self._wide(saved).clone()
            setattr(self, f"_{name}", loaded)

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
        # Training may have been prolonged since the start of the decay, or there was no progress left at its start.
        share = torch.where(begin > 0, (progress / begin).clamp_max(1), 0)
        return torch.where(begin.isnan(), base, share * base + (1 - share) * self._wide(self.final))

    def _boosted(self, coefficient: Tensor) -> Tensor:
        boosted = coefficient * self._wide(self.boost_factor)
        # A cap below the unboosted coefficient must not lower it.
        capped = boosted if self.boost_cap is None else torch.minimum(boosted, self._wide(self.boost_cap))
        return torch.maximum(capped, coefficient)

    def _wide(self, value: Number) -> Tensor:
        return torch.as_tensor(value, dtype=torch.float64, device="cpu").expand(member_shape(self.members))

    def _plain(self, value: Tensor) -> Number:
        return value.item() if self.members is None else value.clone()
