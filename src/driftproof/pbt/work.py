"""What passes between the one who decides and those who train: orders out, reports back."""

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
    """What every order has in common."""

    make_agent: MakeAgent
    metric: Metric
    members: int
    total_updates: int
    optimizer_exploit_strategy: OptimizerExploitStrategy
    make_callback: MakeCallback | None = None


@dataclass(frozen=True)
class Order:
    """What one member is to do next. Trees are files' bytes, which may go anywhere."""

    member: int
    updates: int
    """To train."""
    hyperparams: Mapping[str, Any]
    """In force from now on."""
    restore: bytes | None = None
    """Its whole state as last reported, if it no longer is where it is to train."""
    start_at: int | None = None
    """Begin as a new agent that counts on from so many updates, because its own state is given up."""
    donor: bytes | None = None
    """Whole state of another, whose parameters it takes over."""


@dataclass(frozen=True)
class Report:
    """What came of an order."""

    member: int
    updates: int
    """That it has done by now."""
    performance: float
    state: bytes
    """Its whole state, as a checkpoint file."""
    rows: list[Row]
    not_taken_over: str | None = None
    """Why it kept its own parameters and hyper-parameters."""


@dataclass(frozen=True)
class Failure:
    """Why an order came to nothing."""

    member: int | None
    """Whose; ``None`` if nobody was training."""
    lost: tuple[int, ...]
    """Members that are no longer there. Orders to them are void."""
    reason: str


class Host:
    """Members in this process, each with its own environments and random generators."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._trainees: dict[int, Trainee] = {}
        self._generators: dict[int, dict[str, Any]] = {}
        self._rows: dict[int, _Rows] = {}

    def carry_out(self, order: Order) -> Report | Failure:
        """Train a member as it is told; if that fails, it is gone."""
        try:
            if order.restore is not None or order.start_at is not None or order.member not in self._trainees:
                self._make(order)
            with self._as_member(order.member):
                return self._train(order)
        except Exception:
            self._drop(order.member)
            return Failure(order.member, (order.member,), traceback.format_exc())

    def close(self) -> None:
        """Give up all members and their environments."""
        for member in list(self._trainees):
            self._drop(member)

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
        """Put parameters and hyper-parameters in force; why not, if the member goes on with its own."""
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
        self._drop(order.member)
        work = self._work
        with unchanged_generators():
            agent = work.make_agent(order.member)
            rows = _Rows()
            agent.add_log_output(rows)
            callback = None if work.make_callback is None else work.make_callback()
            trainee = Trainee(agent, work.total_updates, work.metric, callback)
            # From now on its environments are closed whatever goes wrong.
            self._trainees[order.member], self._rows[order.member] = trainee, rows
            if order.restore is not None:
                agent.load_state_tree(read(io.BytesIO(order.restore)).tree)
            elif order.start_at is not None:
                trainee.count_from(order.start_at)
            self._generators[order.member] = dict(agent.components()["random"].state_dict())

    def _drop(self, member: int) -> None:
        trainee = self._trainees.pop(member, None)
        if trainee is not None and trainee.agent.env is not None:
            try:
                trainee.agent.env.close()
            except Exception:
                # What is given up, often because its environment broke, must not take the others along.
                traceback.print_exc()

    @contextmanager
    def _as_member(self, member: int) -> Iterator[None]:
        """With a member's random generators, which nobody else draws from."""
        component = self._trainees[member].agent.components()["random"]
        with unchanged_generators():
            component.load_state_dict(self._generators[member])
            yield
            self._generators[member] = dict(component.state_dict())


class _Rows(KVWriter):
    """Keeps what an agent logs until it is reported."""

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
    """Also one in a tensor; texts, figures and more than one number are not."""
    if isinstance(value, np.ndarray | torch.Tensor):
        return value.ndim == 0
    return isinstance(value, Real | np.bool_)
