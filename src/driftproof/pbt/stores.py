"""Stores of members' parameters, from which other members copy."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Any, Protocol, get_args

from driftproof.ppo.migration import EARLIER_STATES
from driftproof.runs.population_state import CheckpointFormat as CheckpointFormat
from driftproof.state import CheckpointError, copy_tree, legacy, read, write


class TreeStore(Protocol):
    """Stores the latest parameters of each member."""

    def put(self, member_id: int, tree: Any, step: int, format: CheckpointFormat) -> None:
        """Store a copy of a member's parameters, replacing the former ones."""

    def get(self, member_id: int) -> tuple[Any, CheckpointFormat]:
        """A copy of a member's parameters, and their format.

        Raises:
            KeyError: There are none.
        """


class MemoryStore:
    """Stores parameters in the memory of this process."""

    def __init__(self) -> None:
        self._trees: dict[int, tuple[Any, CheckpointFormat]] = {}

    def put(self, member_id: int, tree: Any, step: int, format: CheckpointFormat) -> None:
        self._trees[member_id] = copy_tree(tree), format

    def get(self, member_id: int) -> tuple[Any, CheckpointFormat]:
        if member_id not in self._trees:
            raise KeyError(f"no parameters of member {member_id} in memory")
        tree, kind = self._trees[member_id]
        return copy_tree(tree), kind


class FolderStore:
    """Stores parameters in checkpoint files such as ``member_0003.zip``, written atomically.

    Without such a file, one of earlier versions is read: ``member_3.pt``, or the highest step of
    ``member_3_step_500.pt``.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._warned_of: set[str] = set()

    def put(self, member_id: int, tree: Any, step: int, format: CheckpointFormat) -> None:
        write(self.path(member_id), tree, config={"member": member_id, "step": step, "format": format})

    def get(self, member_id: int) -> tuple[Any, CheckpointFormat]:
        path = self.path(member_id)
        if not path.exists():
            return self._get_legacy(member_id)
        checkpoint = read(path)
        kind: Any = checkpoint.config.get("format")
        if kind not in get_args(CheckpointFormat):
            raise CheckpointError(f"{path} is a checkpoint, but not of a member of a population")
        return checkpoint.tree, kind

    def path(self, member_id: int) -> Path:
        return self.folder / f"member_{member_id:04d}.zip"

    def _get_legacy(self, member_id: int) -> tuple[Any, CheckpointFormat]:
        pattern = re.compile(rf"member_0*{member_id}(?:_step_?(?P<step>\d+))?\.pt")
        matches = [match for match in map(pattern.fullmatch, self._names()) if match]
        if not matches:
            raise KeyError(f"no parameters of member {member_id} in {self.folder}")
        latest = max(matches, key=lambda match: int(match["step"] or 0))
        with warnings.catch_warnings():
            if latest[0] in self._warned_of:
                warnings.simplefilter("ignore", FutureWarning)
            found = legacy.read(self.folder / latest[0])
        self._warned_of.add(latest[0])
        if found.is_policy_only:
            return found.components["policy"], "v1_policy_only"
        # None for missing components, as in files of agents without them.
        absent = () if "hyperparams" in found.components else EARLIER_STATES
        return {**dict.fromkeys([*absent, *found.empty]), **found.components}, "v2_full_parameters"

    def _names(self) -> list[str]:
        try:
            return sorted(os.listdir(self.folder))
        except FileNotFoundError:
            return []
