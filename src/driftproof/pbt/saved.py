"""The configuration of a saved population."""

from __future__ import annotations

from driftproof._files import shortened
from driftproof.runs.population_state import SavedConfig, SavedPopulation
from driftproof.settings.population import HyperparamConfig, PBTConfig, unused_by_search
from driftproof.settings.unused import without_unused


def config_of(saved: SavedConfig) -> PBTConfig:
    """The configuration of the search.

    Raises:
        ValueError: A setting is invalid.
    """
    # Earlier versions accepted settings without effect, which are refused now.
    hyperparams = [
        HyperparamConfig(
            **without_unused(item.model_dump(), unused_by_search(saved.explore_method, item.values is not None))
        )
        for item in saved.hyperparams
    ]
    return PBTConfig(**{**saved.model_dump(), "hyperparams": hyperparams})


def check_values(saved: SavedPopulation, config: PBTConfig) -> None:
    """Raise unless the hyper-parameters of all members are in the search space.

    Args:
        saved: The saved population.
        config: Configuration of the search, as :func:`driftproof.pbt.check_against` returned it.

    Raises:
        ValueError: A member has others.
    """
    searched = {item.name: item for item in config.hyperparams}
    for held in (*(place.hyperparams for place in saved.members), *saved.scheduler.all_hyperparams()):
        if held.keys() != searched.keys():
            raise ValueError(f"a member has the hyper-parameters {shortened(list(held))}, not those of the search")
        for name, value in held.items():
            if not searched[name].allows(value):
                raise ValueError(f"a member has {name} = {shortened(value)}, which is outside the search space")
