"""The state tree, and the files that hold it."""

from driftproof._files import RunFolderError
from driftproof._text import printable
from driftproof.state._atomic import write_atomically
from driftproof.state.files import Checkpoint, CheckpointError, Inspection, inspect, read, write
from driftproof.state.store import AsyncWriter, CheckpointStore
from driftproof.state.tree import (
    Difference,
    Leaf,
    Stateful,
    compare,
    copy_tree,
    describe,
    flatten,
    merge,
    select,
    to_device,
    unflatten,
    without,
)

__all__ = [
    "AsyncWriter",
    "Checkpoint",
    "CheckpointError",
    "CheckpointStore",
    "Difference",
    "Inspection",
    "Leaf",
    "RunFolderError",
    "Stateful",
    "compare",
    "copy_tree",
    "describe",
    "flatten",
    "inspect",
    "merge",
    "printable",
    "read",
    "select",
    "to_device",
    "unflatten",
    "without",
    "write",
    "write_atomically",
]
