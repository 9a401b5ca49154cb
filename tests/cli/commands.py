"""Commands, as they are run: in a process of their own, or in this one."""

from __future__ import annotations

import sys
import threading
import warnings

from driftproof.cli import main
from tests import processes
from tests.processes import Started

SMALL = [
    *("--set", "env.n_envs=2", "--set", "ppo.n_steps=16", "--set", "ppo.batch_size=32", "--set", "ppo.n_epochs=1"),
    *("--set", "policy.name=MlpPolicy", "--set", "policy.net_arch=[8]", "--set", "vgs.warmup_steps=1"),
    *("--set", "run.evaluation_episodes=2", "--set", "run.threads=1"),
]
"""Settings with which an update takes no time."""


def run(*arguments, **options):
    """Exit code, output and errors of a command."""
    return processes.run([sys.executable, "-m", "driftproof", *arguments], **options)


def start(*arguments, **options):
    """A command that goes on, in a session of its own, as of a terminal."""
    return Started([sys.executable, "-m", "driftproof", *arguments], **options)


def call(capsys, *arguments):
    """The same as :func:`run`, in this process."""
    hook, argv = threading.excepthook, sys.argv
    sys.argv = ["driftproof", *map(str, arguments)]
    capsys.readouterr()
    code = 0
    try:
        with warnings.catch_warnings():
            main()
    except SystemExit as end:
        code = end.code or 0
    finally:
        threading.excepthook, sys.argv = hook, argv
    captured = capsys.readouterr()
    return code, captured.out, captured.err
