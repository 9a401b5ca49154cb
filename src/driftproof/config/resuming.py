"""Check that the saved state of a population matches the configuration in its run folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from driftproof._files import RunFolderError
from driftproof.config.model import Config

if TYPE_CHECKING:
    from driftproof.pbt import PBTConfig


def check_is_of(search: PBTConfig, config: Config, run_dir: Path) -> None:
    """Refuse a population that was started with other settings than those of its configuration.

    Args:
        search: The search of the configuration.
        config: The configuration.
        run_dir: Run folder.

    Raises:
        RunFolderError: The settings differ, or the saved state is damaged.
    """
    from driftproof.pbt.saved import config_of
    from driftproof.runs.folder import RunFolder

    folder = RunFolder(run_dir)
    saved = folder.read_state()
    with folder.explaining():
        saved_search = config_of(saved.config)
    different = [
        name
        for name in (item.name for item in dataclasses.fields(search))
        if name not in ("hyperparams", "checkpoint_dir") and getattr(search, name) != getattr(saved_search, name)
    ]
    others = {
        "hyperparams": _search_alike(search, saved_search),
        "checkpoint_dir": _place(search) == _place(saved_search),
        "seed": config.run.seed == saved.seed,
        "synchronous": config.pbt.synchronous == saved.synchronous,
        "total_updates": config.total_updates == saved.total_updates,
    }
    different += [name for name, is_same in others.items() if not is_same]
    if different:
        raise RunFolderError(
            f"{run_dir}: population_state.json was written with another configuration than config.yaml; they differ in "
            f"{', '.join(different)}; restore both from one copy of the run"
        )


def _search_alike(search: PBTConfig, saved_search: PBTConfig) -> bool:
    if len(search.hyperparams) != len(saved_search.hyperparams):
        return False
    pairs = zip(search.hyperparams, saved_search.hyperparams, strict=True)
    # is_whole is only known once the agent exists.
    return all(dataclasses.replace(one, is_whole=other.is_whole) == other for one, other in pairs)


def _place(search: PBTConfig) -> Path | None:
    return None if search.checkpoint_dir is None else Path(search.checkpoint_dir).absolute()
