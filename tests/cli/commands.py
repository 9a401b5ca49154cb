"""Commands, as they are run: in a process of their own, or in this one."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

from driftproof.cli.app import main

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200"}
SMALL = [
    *("--set", "env.n_envs=2", "--set", "ppo.n_steps=16", "--set", "ppo.batch_size=32", "--set", "ppo.n_epochs=1"),
    *("--set", "policy.name=MlpPolicy", "--set", "policy.net_arch=[8]", "--set", "vgs.warmup_steps=1"),
    *("--set", "run.evaluation_episodes=2", "--set", "run.threads=1"),
]
"""Settings with which an update takes no time."""


def run(*arguments, **options):
    """Exit code, output and errors of a command."""
    done = subprocess.run(
        [sys.executable, "-m", "driftproof", *map(str, arguments)],
        **{"capture_output": True, "text": True, "check": False, "cwd": ROOT, "env": ENVIRONMENT, **options},
    )
    return done.returncode, done.stdout, done.stderr


def start(*arguments, **options):
    """A command that goes on, in a group of its own, as of a terminal."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    command = [sys.executable, "-m", "driftproof", *map(str, arguments)]
    return subprocess.Popen(command, **{"cwd": ROOT, "env": ENVIRONMENT, **pipes, **options})


def wait_for(condition, process, seconds=120):
    """Until something is so, or the process has ended without it."""
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)


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
