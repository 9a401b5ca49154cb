"""Fuzzes the reader of checkpoint files and the loader of an agent's state.

Coverage-guided, with atheris, from the corpus next to this file::

    python -m tests.state.fuzz run --inputs 100000
    python -m tests.state.fuzz corpus    # write the corpus anew

An input is one byte that chooses what is fuzzed, and the data:

- a file as it is, for the readers of checkpoints and of earlier formats;
- a manifest and the bytes of tensors, sealed with right sizes and checksums: what is read is given to an agent;
- choices: which places of a real agent's tree get which wrong values.

Anything but a :class:`CheckpointError` with a short printable message is a finding, and so is a changed agent.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import random
import resource
import shutil
import struct
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CORPUS = Path(__file__).parent / "corpus"
FILE, SEALED, PLACES = 0, 1, 2
_SEPARATOR = b"\n----\n"
_MOST_SECONDS = 10.0
_COMPARED_EVERY = 64


class Target:
    """What inputs are given to."""

    def __init__(self, folder: Path) -> None:
        from tests.ppo.test_wrong_states import everything, feed_forward, trained, whole_state

        self._of = whole_state
        self.agents = [trained(feed_forward), trained(everything)]
        self.originals = [agent.state_tree() for agent in self.agents]
        self.before = [self._whole_state(agent) for agent in self.agents]
        self.folder = folder
        self.counts = {"inputs": 0, "refused": 0, "accepted": 0}
        self.slowest = 0.0

    def __call__(self, data: bytes) -> None:
        start = time.process_time()
        self.counts["inputs"] += 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kinds = {FILE: self._file, SEALED: self._sealed, PLACES: self._places}
            kinds[data[0] % 3 if data else FILE](data[1:])
        if self.counts["inputs"] % _COMPARED_EVERY == 0:
            self.check_agents()
        self.slowest = max(self.slowest, time.process_time() - start)
        assert time.process_time() - start < _MOST_SECONDS, "takes too long"

    def _whole_state(self, agent: Any) -> Any:
        # Without the generators of the process, which all agents share.
        state = self._of(agent)
        return {**state, "tree": {name: part for name, part in state["tree"].items() if name != "random"}}

    def check_agents(self) -> None:
        """Raise an error if an agent is not what it was."""
        from driftproof.state import compare

        for agent, before in zip(self.agents, self.before, strict=True):
            differences = compare(self._whole_state(agent), before)
            assert not differences, differences[:3]

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        from driftproof.state import CheckpointError

        try:
            yield
            self.counts["accepted"] += 1
        except CheckpointError as error:
            self.counts["refused"] += 1
            message = str(error)
            assert 0 < len(message) <= 500
            assert message.isprintable()

    def _file(self, data: bytes) -> None:
        from driftproof.state import inspect, legacy, read

        with self._refusing():
            read(io.BytesIO(data))
        with self._refusing():
            assert len(str(inspect(io.BytesIO(data)))) < 10**6
        if data[:1] in (b"P", b"\x80"):
            path = self.folder / "file.pt"
            path.write_bytes(data)
            with self._refusing():
                legacy.read(path)

    def _sealed(self, data: bytes) -> None:
        from driftproof.state import inspect, read

        manifest, _, state = data.partition(_SEPARATOR)
        file = sealed(manifest, state)
        with self._refusing():
            str(inspect(io.BytesIO(file)))
        with self._refusing():
            tree = read(io.BytesIO(file)).tree
            for i in range(len(self.agents)):
                self._give(i, tree)

    def _places(self, data: bytes) -> None:
        from tests.state.wrong_trees import at, places, replaced, wrong_values

        choices = Choices(data)
        which = choices.below(2)
        tree = self.originals[which]
        for _ in range(1 + choices.below(3)):
            paths = list(places(tree))
            path = paths[choices.below(len(paths))]
            options = wrong_values(at(tree, path))
            listed = choices.below(2)
            value = options[choices.below(len(options))] if listed else choices.value(at(tree, path))
            tree = replaced(tree, path, value)
        with self._refusing():
            self._give(which, tree)

    def _give(self, which: int, tree: Any) -> None:
        from driftproof.state import CheckpointError, compare

        agent = self.agents[which]
        generators = agent.components()["random"]
        drawn = generators.state_dict()
        try:
            agent.load_state_tree(tree)
        except CheckpointError:
            assert not compare(generators.state_dict(), drawn)
            raise
        assert all(weights.isfinite().all() for weights in agent.policy.state_dict().values())
        agent.load_state_tree(self.originals[which])
        self.before[which] = self._whole_state(agent)


class Choices:
    """Values that bytes decide about; when there are no more, all are zero."""

    def __init__(self, data: bytes) -> None:
        self._data = io.BytesIO(data)

    def take(self, count: int) -> bytes:
        return self._data.read(count).ljust(count, b"\0")

    def below(self, limit: int) -> int:
        return int.from_bytes(self.take(4), "little") % limit

    def value(self, like: Any) -> Any:
        import numpy as np
        import torch

        kind = self.below(9)
        if kind == 0:
            return int.from_bytes(self.take(1 + self.below(20)), "little", signed=True)
        if kind == 1:
            return struct.unpack("<d", self.take(8))[0]
        if kind == 2:
            return self.take(2 * self.below(20)).decode("utf-16-le", "replace") + chr(0xD800 + self.below(2))
        if kind == 3:
            return [self.value(None) for _ in range(self.below(4))]
        if kind == 4:
            return {self.take(2).hex(): self.value(None) for _ in range(self.below(4))}
        if kind == 5:
            return bool(self.below(2))
        # Tensors of any shape, or of the right one, with other numbers.
        dtypes = [torch.float32, torch.float64, torch.uint8, torch.int64, torch.bool, torch.bfloat16, torch.complex64]
        shape = tuple(self.below(4) for _ in range(self.below(4)))
        dtype = dtypes[self.below(len(dtypes))]
        if kind == 8 and isinstance(like, torch.Tensor | np.ndarray):
            shape, dtype = tuple(like.shape), torch.as_tensor(like).dtype
        tensor = torch.full(shape, struct.unpack("<d", self.take(8))[0], dtype=torch.float64).to(dtype)
        flat = tensor.view(-1)
        if flat.numel() and self.below(2):
            flat[self.below(flat.numel())] = self.below(128)
        is_array = kind == 7 or isinstance(like, np.ndarray)
        return tensor.numpy() if is_array and dtype != torch.bfloat16 else tensor


def sealed(manifest: bytes, state: bytes) -> bytes:
    """A file with right sizes and checksums of a manifest and the bytes of tensors."""
    from driftproof.state._reader import STATE
    from tests.state.hostile import packed

    with contextlib.suppress(ValueError, RecursionError):
        content = json.loads(manifest)
        if isinstance(content, dict):
            content["files"] = {STATE: {"bytes": len(state), "sha256": hashlib.sha256(state).hexdigest()}}
            manifest = json.dumps(content).encode("utf-8", "surrogatepass")
    return packed(manifest, state)


def seeds() -> dict[str, bytes]:
    """The corpus: files of all kinds, sealed trees that are right and wrong, and choices."""
    import torch

    from tests.ppo.test_wrong_states import feed_forward, trained
    from tests.state import hostile
    from tests.state.wrong_trees import replaced

    result = {"file_small": hostile.valid(), "file_empty": hostile.valid({}), "file_bytes": b"PK\x03\x04 no zip"}
    policy = {"actor.weight": torch.zeros(2, 3), "actor.bias": torch.zeros(2)}
    for name, content in {
        "v1": {"format_version": "v1_policy_only", "data": policy},
        "v2": {
            "format_version": "v2_full_parameters",
            "data": {"policy": policy, "policy.optimizer": {"state": {}, "param_groups": []}, "vgs_state": None},
            "step": 10,
            "performance": 1.5,
        },
        "bare": policy,
    }.items():
        file = io.BytesIO()
        torch.save(content, file)
        result[f"file_legacy_{name}"] = file.getvalue()
    result = {name: bytes([FILE]) + data for name, data in result.items()}
    agent = trained(feed_forward)
    tree = agent.state_tree()
    trees = {
        "small": hostile.small_tree(),
        "agent": tree,
        "agent_pos": replaced(tree, ("random", "numpy", "state", "pos"), 2**30),
        "agent_seed": replaced(tree, ("rollout", "running"), {"reset_seed": -5}),
        "agent_successes": replaced(tree, ("rollout", "successes"), "x"),
        "agent_step": replaced(tree, ("counters", "num_timesteps"), 2**200),
        "agent_names": {**tree, "\x1b[31m\u202e\ud800": 1},
    }
    for name, content in trees.items():
        file = hostile.valid(content, config=agent.config() if name == "agent" else None)
        result[f"sealed_{name}"] = bytes([SEALED]) + _SEPARATOR.join(hostile.members(hostile.dated(file)))
    generator = random.Random(0)
    for i in range(8):
        result[f"places_{i}"] = bytes([PLACES]) + generator.randbytes(48)
    return result


def mutated(data: bytes, others: list[bytes], generator: random.Random) -> bytes:
    """Another input that is like this one, for runs without atheris."""
    result = bytearray(data)
    for _ in range(generator.choice([1, 1, 2, 4])):
        place = generator.randrange(1, max(2, len(result)))
        kind = generator.randrange(6)
        if kind == 0 and place < len(result):
            result[place] ^= 1 << generator.randrange(8)
        elif kind == 1:
            result[place:place] = generator.randbytes(generator.randrange(1, 9))
        elif kind == 2:
            del result[place : place + generator.randrange(1, 40)]
        elif kind == 3:
            result[place : place + 4] = generator.choice([b"nul", b"-1", b"1e999", b'"x"', b"[]", b"{}", b"\xff" * 4])
        elif kind == 4:
            other = generator.choice(others)
            start = generator.randrange(len(other))
            result[place : place + 16] = other[start : start + generator.randrange(1, 64)]
        elif result[0] % 3 == PLACES:
            result[1:] = generator.randbytes(48)
    return bytes(result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "corpus"])
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seconds", type=int, default=0, help="stop after this time; 0: when all inputs were tried")
    parser.add_argument("--memory", type=int, default=3000, help="most MiB of memory")
    arguments = parser.parse_args()
    if arguments.command == "corpus":
        CORPUS.mkdir(exist_ok=True)
        for name, data in seeds().items():
            (CORPUS / name).write_bytes(data)
        return
    import atheris

    with atheris.instrument_imports(include=["driftproof.state", "driftproof.ppo", "driftproof.optim.vgs"]):
        import driftproof.ppo  # noqa: F401
    folder = Path(tempfile.mkdtemp())
    target = Target(folder)

    def report() -> None:
        target.check_agents()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        print(json.dumps({**target.counts, "slowest_s": round(target.slowest, 3), "peak_mib": peak}), flush=True)

    def one(data: bytes) -> None:
        target(data)
        if target.counts["inputs"] % 10_000 == 0:
            report()

    try:
        found = folder / "found"
        found.mkdir()
        options = [f"-runs={arguments.inputs}", f"-rss_limit_mb={arguments.memory}", "-timeout=60", "-max_len=65536"]
        options += [f"-max_total_time={arguments.seconds}", f"-artifact_prefix={os.getcwd()}/", "-len_control=0"]
        atheris.Setup([sys.argv[0], *options, str(found), str(CORPUS)], one)
        atheris.Fuzz()
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
