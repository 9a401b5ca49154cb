"""A stranger's run folder, and a canary that dies if anything in it runs."""

from __future__ import annotations

import copy
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from driftproof.config import build_agent, loads
from driftproof.ppo import SaveCheckpoints
from driftproof.state import CheckpointStore, read, write

SETTINGS: dict[str, Any] = {
    "env": {"id": "CartPole-v1", "n_envs": 2},
    "policy": {"name": "MlpPolicy", "net_arch": [8]},
    "ppo": {"n_steps": 16, "batch_size": 32, "n_epochs": 1},
    "vgs": {"warmup_steps": 1},
    "drift": {"rewiring": False},  # It depends on the networks, whose classes the tests replace.
    "pbt": {"population_size": 2, "backend": "inline"},
    "run": {"total_timesteps": 64, "evaluation_episodes": 1, "threads": 1, "device": "cpu"},
}

_started: list[str] = []


def _notice(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn"):
        _started.append(repr(arguments))


sys.addaudithook(_notice)


class Stranger:
    """Files of somebody else.

    ``evil.py``, which is importable, leaves a file where it is imported, and so does each thing in it that is called.

    Args:
        folder: Where to.
    """

    def __init__(self, folder: Path) -> None:
        self.run, self.modules, self.canary = folder / "run", folder / "modules", folder / "canary"
        self.module("evil", "import pathlib\npathlib.Path({canary!r}).touch()\n")

    def module(self, name: str, code: str) -> None:
        """Write a module that leaves ``{canary!r}``."""
        path = self.modules.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code.format(canary=str(self.canary)))

    def train(self) -> None:
        """An honest run."""
        agent = build_agent(loads(yaml.safe_dump(SETTINGS)))
        agent.learn(32, SaveCheckpoints(self.run / "checkpoints"))
        agent.env.close()
        self.configure({})
        (self.run / "metrics.jsonl").write_text('{"member": 0, "step": 32}\n')

    @property
    def checkpoint(self) -> Path:
        path = CheckpointStore(self.run / "checkpoints").latest()
        assert path is not None
        return path

    def configure(self, changes: Mapping[str, Mapping[str, Any]]) -> Path:
        """Write the configuration, with some settings changed."""
        settings = copy.deepcopy(SETTINGS)
        for section, values in changes.items():
            settings.setdefault(section, {}).update(values)
        self.run.mkdir(exist_ok=True)
        path = self.run / "config.yaml"
        path.write_text(yaml.safe_dump(settings))
        return path

    def tamper(self, change: Callable[[dict[str, Any]], Any]) -> None:
        """Change what the checkpoint's manifest says of the agent; its checksums are right."""
        checkpoint = read(self.checkpoint)
        config = copy.deepcopy(dict(checkpoint.config))
        change(config)
        write(self.checkpoint, checkpoint.tree, config=config)

    def without_checkpoint(self) -> None:
        shutil.rmtree(self.run / "checkpoints")

    def assert_nothing_ran(self) -> None:
        assert not self.canary.exists()
        assert not [event for event in _started if str(self.canary) in event]
