"""Checks of policies' arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from driftproof._arguments import ArgumentError
from driftproof.nn.cores import Core, check_core_options


def check_sharing(
    shared_recurrence: bool, shared_lstm: bool, enable_critic_lstm: bool, share_features_extractor: bool
) -> None:
    """Refuse arguments of sharing between actor and critics that contradict each other."""
    if shared_recurrence and shared_lstm:
        raise ArgumentError(
            "shared_recurrence=True and shared_lstm=True are two ways of sharing: give the first if critics shall "
            "learn the memory too, or the second"
        )
    if shared_recurrence and not enable_critic_lstm:
        raise ArgumentError(
            "shared_recurrence=True gives critics the actor's memory; enable_critic_lstm=False takes it"
        )
    if shared_lstm and enable_critic_lstm:
        raise ArgumentError(
            "shared_lstm=True and enable_critic_lstm=True are two memories for the critics: use shared_lstm=True, "
            "enable_critic_lstm=False to let only the actor learn the memory, or shared_recurrence=True to let "
            "critics learn it too"
        )
    if (shared_recurrence or shared_lstm) and not share_features_extractor:
        raise ArgumentError(
            "critics that share the actor's memory share its features: share_features_extractor=False has no use"
        )


def core_options(core: str | type[Core], lstm_kwargs: Any) -> dict[str, Any]:
    """A copy of a core's further arguments, checked."""
    if not isinstance(lstm_kwargs, Mapping | None):
        raise ArgumentError(f"Invalid lstm_kwargs: {lstm_kwargs!r}; must be a mapping from names to values")
    options = dict(lstm_kwargs or {})
    check_core_options(core, options)
    return options
