"""Forks commands that signal themselves at a defined point, for tests: each begins with all imports done.

    python -m tests.cli.nursery

For each line of JSON on its input it forks a process that runs a command, and says that process's exit code.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import threading

POINTS = {
    "building": "driftproof.config:build_agent",
    "building population": "driftproof.config:build_population",
    "making the folder": "driftproof.state:write_atomically",
    "restoring": "driftproof.cli.training:_restore",
    "beginning": "driftproof.ppo.algorithm:DistributionalPPO.learn",
    "rollout": "driftproof.ppo.base:collect",
    "update": "driftproof.learner.learner:Learner.update",
    "saving": "driftproof.state.store:CheckpointStore.save_serialized",
    "end of training": "driftproof.ppo.callbacks:SaveCheckpoints._on_training_end",
    "starting a worker": "driftproof.pbt.backends:_Worker.__init__",
    "report": "driftproof.pbt.runner:PBTRunner._receive",
    "evaluating": "stable_baselines3.common.evaluation:evaluate_policy",
    "loading": "driftproof.ppo:DistributionalPPO.load",
}


def signal_at(point, signals, call):
    """Have this process sent signals when a function is called for the nth time."""
    module, _, path = POINTS[point].partition(":")
    owner = importlib.import_module(module)
    *owners, name = path.split(".")
    for part in owners:
        owner = getattr(owner, part)
    function, calls = getattr(owner, name), [0]

    def signalling(*args, **kwargs):
        calls[0] += 1
        if calls[0] == call:
            send(signals)
        return function(*args, **kwargs)

    setattr(owner, name, signalling)


def send(signals):
    """One after the other, each after the one before has been answered."""
    assert len(signals) == 1 or threading.current_thread() is threading.main_thread()
    with contextlib.ExitStack() as stack:
        for number in reversed(signals):
            stack.callback(os.kill, os.getpid(), number)


def run_command(order):
    os.setsid()
    for stream, path in ((1, order["output"]), (2, order["errors"])):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    signal_at(order["point"], order["signals"], order["call"])
    sys.argv = ["driftproof", *order["arguments"]]
    from driftproof.cli import main

    main()


def main():
    # Whatever commands import; nothing that starts a thread.
    import torch._dynamo
    import torch.utils.tensorboard

    import driftproof.adversarial
    import driftproof.cli.app
    import driftproof.cli.callbacks
    import driftproof.config
    import driftproof.runs.folder  # noqa: F401

    torch.set_num_threads(1)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            run_command(json.loads(line))
            os._exit(99)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
