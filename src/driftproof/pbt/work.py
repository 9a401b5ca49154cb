"""Messages between the runner and its workers: orders out, reports back; and the host that executes orders."""

from __future__ import annotations

import io
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.logger import KVWriter

from driftproof.pbt.member import MakeAgent, MakeCallback, Metric, Trainee
from driftproof.ppo.generators import unchanged_generators
from driftproof.ppo.tree import OWN_PLACE
from driftproof.runs.metrics import Row
from driftproof.settings.population import OptimizerExploitStrategy
from driftproof.state import read, write


@dataclass(frozen=True)
class Work:
    """Settings that all orders share."""

    make_agent: MakeAgent
    metric: Metric
    members: int
    total_updates: int
    optimizer_exploit_strategy: OptimizerExploitStrategy
    make_callback: MakeCallback | None = None
    synchronous: bool = False
    """Whether the result must not depend on the speed of the members."""


@dataclass(frozen=True)
class Order:
    """The next slice of training of one member. States are checkpoint files as bytes, which any transport can carry."""

    member: int
    updates: int
    """Number of updates to train."""
    hyperparams: Mapping[str, Any]
    """Hyper-parameters to train with."""
    restore: bytes | None = None
    """The member's whole state as last reported, if the worker does not have it."""
    start_at: int | None = None
    """Start as a new agent whose counters begin at this number of updates, because its own state is discarded."""
    donor: bytes | None = None
    """Whole state of the donor whose parameters to copy."""
    donor_member: int | None = None
    """The donor itself, instead of its state, where its present state is in the same worker."""


@dataclass(frozen=True)
class Report:
    """Result of an order."""

    member: int
    updates: int
    """Updates that the member has done in total."""
    performance: float
    state: bytes
    """The member's whole state, as a checkpoint file."""
    rows: list[Row]
    not_taken_over: str | None = None
    """Why the exploit failed, so that the member kept its own parameters and hyper-parameters."""


@dataclass(frozen=True)
class Failure:
    """Failure of an order or of a worker."""

    member: int | None
    """Member that was training; ``None``: none was."""
    lost: tuple[int, ...]
    """Members whose state in the worker is lost; their orders are void."""
    reason: str


class Host:
    """Executes orders in this process; each member has its own environments and random generators."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._trainees: dict[int, Trainee] = {}
        self._generators: dict[int, dict[str, Any]] = {}
        self._rows: dict[int, LoggedRows] = {}

    def carry_out(self, order: Order) -> Report | Failure:
        """Execute an order; a member that fails is dropped."""
        try:
            if order.restore is not None or order.start_at is not None or order.member not in self._trainees:
                self._make(order)
            with self._as_member(order.member):
                return self._train(order)
        except Exception:
            self.drop(order.member)
            return Failure(order.member, (order.member,), traceback.format_exc())

    def close(self) -> None:
        """Drop all members and close their environments."""
        for member in list(self._trainees):
            self.drop(member)

    def _train(self, order: Order) -> Report:
        trainee, rows = self._trainees[order.member], self._rows[order.member]
        agent = trainee.agent
        refusal = self._prepare(trainee, order)
        rows.clear()
        performance = trainee.train(order.updates)
        file = io.BytesIO()
        write(file, agent.current_states(), config=agent.config(), exact=agent.worker.is_whole)
        return Report(order.member, trainee.updates, performance, file.getvalue(), rows.taken(), refusal)

    def _prepare(self, trainee: Trainee, order: Order) -> str | None:
        """Apply the donor's parameters and the hyper-parameters; the reason if the exploit failed."""
        if order.donor is None:
            trainee.set_hyperparams(order.hyperparams)
            return None
        strategy = self._work.optimizer_exploit_strategy
        try:
            tree = read(io.BytesIO(order.donor)).tree
            parameters = {name: state for name, state in tree.items() if name not in OWN_PLACE}
            trainee.inherit(parameters, "v2_full_parameters", order.hyperparams, strategy)
        except Exception as error:
            if order.start_at is not None:
                raise
            return f"{type(error).__name__}: {error}"
        return None

    def _make(self, order: Order) -> None:
        self.drop(order.member)
        work = self._work
        with unchanged_generators():
            agent = work.make_agent(order.member)
            rows = LoggedRows()
            agent.add_log_output(rows)
            callback = None if work.make_callback is None else work.make_callback()
            trainee = Trainee(agent, work.total_updates, work.metric, callback)
            # Registered before anything can fail, so that its environments get closed.
            self._trainees[order.member], self._rows[order.member] = trainee, rows
            if order.restore is not None:
                agent.load_state_tree(read(io.BytesIO(order.restore)).tree)
            elif order.start_at is not None:
                trainee.count_from(order.start_at)
            self._generators[order.member] = dict(agent.components()["random"].state_dict())

    def drop(self, member: int) -> None:
        """Close the environments of a member and forget it."""
        trainee = self._trainees.pop(member, None)
        if trainee is not None and trainee.agent.env is not None:
            try:
                trainee.agent.env.close()
            except Exception:
                # Often it is dropped because its environment broke; the other members must not fail with it.
                traceback.print_exc()

    @contextmanager
    def _as_member(self, member: int) -> Iterator[None]:
        """Use a member's random generators inside the block."""
        component = self._trainees[member].agent.components()["random"]
        with unchanged_generators():
            component.load_state_dict(self._generators[member])
            yield
            self._generators[member] = dict(component.state_dict())


class LoggedRows(KVWriter):
    """Collects the metrics that an agent logs, until they are reported."""

    def __init__(self) -> None:
        self._rows: list[Row] = []

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0) -> None:
        numbers = {name: float(x) for name, x in key_values.items() if _is_number(x)}
        self._rows.append({"step": step, **numbers})

    def clear(self) -> None:
        self._rows.clear()

    def taken(self) -> list[Row]:
        return list(self._rows)

    def close(self) -> None:
        pass


def _is_number(value: Any) -> bool:
    """Whether a logged value is a scalar, also in a tensor; texts, figures and arrays are not."""
    if isinstance(value, np.ndarray | torch.Tensor):
        return value.ndim == 0
    return isinstance(value, Real | np.bool_)
