"""Whether the state of a population in a run folder is that of the configuration beside it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from driftproof._files import RunFolderError
from driftproof.config.model import Config

if TYPE_CHECKING:
    from driftproof.pbt import PBTConfig


def check_is_of(search: PBTConfig, config: Config, run_dir: Path) -> None:
    """Refuse a population that was begun with other settings than its configuration says.

    Args:
        search: What the configuration says is searched.
        config: The configuration.
        run_dir: Folder of the run.

    Raises:
        RunFolderError: It was, or its state is damaged.
    """
    from driftproof.pbt.saved import config_of
    from driftproof.runs.folder import RunFolder

    folder = RunFolder(run_dir)
    saved = folder.read_state()
    with folder.explaining():
        begun = config_of(saved.config)
    different = [
        name
        for name in (item.name for item in dataclasses.fields(search))
        if name not in ("hyperparams", "checkpoint_dir") and getattr(search, name) != getattr(begun, name)
    ]
    others = {
        "hyperparams": _search_alike(search, begun),
        "checkpoint_dir": _place(search) == _place(begun),
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


def _search_alike(search: PBTConfig, begun: PBTConfig) -> bool:
    if len(search.hyperparams) != len(begun.hyperparams):
        return False
    pairs = zip(search.hyperparams, begun.hyperparams, strict=True)
    # Which of them are counts, the agent has said since.
    return all(dataclasses.replace(one, is_whole=other.is_whole) == other for one, other in pairs)


def _place(search: PBTConfig) -> Path | None:
    return None if search.checkpoint_dir is None else Path(search.checkpoint_dir).absolute()
