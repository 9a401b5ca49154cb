"""What makes an agent learn slowly at first?

    python benchmarks/short.py --quick                    # every variant for a few steps
    python benchmarks/short.py                            # 10 seeds of every variant, an hour on two cores
    python benchmarks/short.py --report                   # table of what has been run

The short tasks of learning_tasks.py, where the first updates decide, with one thing changed at a time: optimizer,
variance gradient scaling, critics, length of sequences, layer normalisation, exploration floor, and how recurrent cores
are initialised. A finished run is kept in short.json at once and not run again.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import common
import learning
import torch
from learning import Entry, Run
from learning_tasks import TASKS
from torch import nn

from driftproof.nn.cores import LSTMCore

ADAM = {"optimizer_class": "adam", "variance_gradient_scaling": False}


def gates(input_gate: float, forget_gate: float, output_gate: float) -> Callable[[LSTMCore], None]:
    """Biases of a new LSTM's gates, instead of +1, -1, +1."""
    biases = torch.tensor([input_gate, forget_gate, 0.0, output_gate]) - torch.tensor([1.0, -1.0, 0.0, 1.0])

    def change(core: LSTMCore) -> None:
        for layer in range(core.layers):
            getattr(core.recurrence, f"bias_ih_l{layer}").data += biases.repeat_interleave(core.units)

    return change


def as_torch(core: LSTMCore) -> None:
    """What torch makes of a new LSTM."""
    core.recurrence.reset_parameters()


def orthogonal(core: LSTMCore) -> None:
    """Orthogonal recurrent weights, gate by gate."""
    for layer in range(core.layers):
        for gate in torch.split(getattr(core.recurrence, f"weight_hh_l{layer}").data, core.units):
            nn.init.orthogonal_(gate)


@dataclass(frozen=True)
class Variant:
    """One thing that is different.

    Attributes:
        changes: Arguments of driftproof's constructor.
        initialise: Called with every new LSTM after its own initialisation.
        algorithm: Of learning.py.
    """

    changes: Mapping[str, Any] = field(default_factory=dict)
    initialise: Callable[[LSTMCore], None] | None = None
    algorithm: str = "driftproof"


OFF = {"drift_kit": False}
"""Of all variants: these tasks are about other parts of the agent."""
NEITHER = {"layer_norm": False, "exploration_floor": 0.0}
SHORTER = {"sequence_length": 32, **NEITHER}
"""Most ablations were made with it, before sequences of 128, layer normalisation and an exploration floor became the
defaults."""

VARIANTS = {
    "RecurrentPPO": Variant(algorithm="RecurrentPPO"),
    "driftproof": Variant(),
    "no exploration floor": Variant({"exploration_floor": 0.0}),
    "no layer norm": Variant({"layer_norm": False}),
    "no layer norm, no exploration floor": Variant(NEITHER),
    "neither of them, observation normaliser": Variant({"observation_normalizer": True, **NEITHER}),
    "neither of them, no noise": Variant({"optimizer_kwargs": {"sigma": 0.0}, **NEITHER}),
    "sequences of 32": Variant(SHORTER),
    "sequences of 32, Adam, no VGS": Variant({**SHORTER, **ADAM}),
    "sequences of 32, no VGS": Variant({**SHORTER, "variance_gradient_scaling": False}),
    "sequences of 32, one critic": Variant({**SHORTER, "policy_kwargs": {"twin_critics": False}}),
    "sequences of 32, LSTM as torch initialises it": Variant(SHORTER, initialise=as_torch),
    "sequences of 32, gate biases 0, 0, 0": Variant(SHORTER, initialise=gates(0, 0, 0)),
    "sequences of 32, gate biases 0, +1, 0": Variant(SHORTER, initialise=gates(0, 1, 0)),
    "sequences of 32, orthogonal recurrent weights": Variant(SHORTER, initialise=orthogonal),
}
COPY_VARIANTS = {
    "driftproof": Variant(),
    "driftproof, GRU": Variant(algorithm="driftproof, GRU"),
    "no layer norm, no exploration floor": Variant(NEITHER),
    "GRU, no layer norm, no exploration floor": Variant(NEITHER, algorithm="driftproof, GRU"),
    "sequences of 32": Variant(SHORTER),
    "GRU, sequences of 32": Variant(SHORTER, algorithm="driftproof, GRU"),
    "sequences of 32, LSTM as torch initialises it": Variant(SHORTER, initialise=as_torch),
    "sequences of 32, gate biases 0, 0, 0": Variant(SHORTER, initialise=gates(0, 0, 0)),
}


@contextlib.contextmanager
def initialised(change: Callable[[LSTMCore], None] | None) -> Iterator[None]:
    """New LSTMs are changed after their own initialisation."""
    own = LSTMCore.initialise

    def initialise(core: LSTMCore) -> None:
        own(core)
        if change is not None:
            change(core)

    LSTMCore.initialise = initialise
    try:
        yield
    finally:
        LSTMCore.initialise = own


def train(run: Run) -> Entry:
    variant = (VARIANTS | COPY_VARIANTS).get(run.label)
    with initialised(None if variant is None else variant.initialise):
        return learning.train(run)


def plan(seeds: int, steps: int | None) -> list[Run]:
    runs = []
    for name, variants in (("short-masked", VARIANTS), ("short-copy", COPY_VARIANTS)):
        for label, variant in variants.items():
            runs += learning.plan(
                {name: TASKS[name]}, [variant.algorithm], seeds, steps, {**OFF, **variant.changes}, label
            )
    for name in ("short-bits", "short-box"):
        for algorithm in TASKS[name].algorithms:
            runs += learning.plan({name: TASKS[name]}, [algorithm], seeds, steps, OFF, label=algorithm)
    # The longest first, so that no core waits for the last one; then seed by seed, in case of an interruption.
    return sorted(runs, key=lambda run: (run.algorithm != "RecurrentPPO", run.seed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few steps of everything; writes no result")
    parser.add_argument("--report", action="store_true", help="run nothing, rebuild the table")
    parser.add_argument("--seeds", type=int, default=10, help="how many, from 0")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--folder", type=Path, default=common.RESULTS, help="of the results; Markdown only by default")
    arguments = parser.parse_args()
    folder, seeds, steps = arguments.folder, arguments.seeds, None
    if arguments.quick:
        folder, seeds, steps = Path("runs") / "short-quick", 1, 1_024
        learning.save(folder / "short.json", {})
    path = folder / "short.json"
    runs = plan(seeds, steps)
    results = learning.load(path) if arguments.report else learning.run_all(runs, path, arguments.workers, train)
    sections = learning.report(results)
    if folder == common.RESULTS:
        note = (
            ". Final return: mean of 20 or 100 episodes of the deterministic policy. Mean return while training: the "
            "area under the learning curve. Interquartile means over seeds and their bootstrap intervals; fewer than "
            "10 seeds: the campaign was not finished. Runs were made on two machines, some beside other work: speeds "
            "differ."
        )
        common.write_result("short", "python benchmarks/short.py", sections, note)


if __name__ == "__main__":
    main()
