"""Backend of the population's runner that trains all members as one, on one device."""

from __future__ import annotations

import io
import math
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from driftproof.pbt.member import Trainee
from driftproof.pbt.vectorized.population import VectorizedPopulation
from driftproof.pbt.work import Failure, LoggedRows, Order, Report, Work
from driftproof.ppo import DistributionalPPO
from driftproof.ppo.generators import unchanged_generators
from driftproof.ppo.tree import OWN_PLACE
from driftproof.state import read, write


class VectorizedBackend:
    """Trains all members in this process at once, as a :class:`VectorizedPopulation`.

    Decisions are for all members at once, as with ``synchronous=True``. An exploit copies along the member axis. A
    member that has diverged reports NaN, and trains again once it has taken over from another.
    """

    trains_together = True

    def __init__(self) -> None:
        self.population: VectorizedPopulation | None = None

    def start(self, work: Work) -> None:
        self._work = work
        self.population = None
        self._orders: dict[int, Order] = {}
        self._results: deque[Report | Failure] = deque()
        self._rows: dict[int, LoggedRows] = {}
        self._callbacks: dict[int, Any] = {}
        self._used: set[int] = set()
        """Members whose agents are no longer as they were made."""
        self._failed: set[int] = set()
        """Members whose state was lost."""

    def submit(self, order: Order) -> None:
        self._orders[order.member] = order

    def wait(self) -> Report | Failure:
        if not self._results:
            orders, self._orders = self._orders, {}
            self._results.extend(self.carry_out(orders))
        return self._results.popleft()

    def hold(self) -> None:
        pass  # Orders start in wait().

    def training(self) -> set[int]:
        members = [(result.member,) if isinstance(result, Report) else result.lost for result in self._results]
        return {member for some in members for member in some}

    def release(self, member: int) -> None:
        pass

    def close(self) -> None:
        if self.population is not None:
            self.population.close()

    def carry_out(self, orders: dict[int, Order]) -> list[Report | Failure]:
        """Execute orders by member, all at once."""
        try:
            population = self._built()
        except Exception:
            return [Failure(min(orders), tuple(orders), traceback.format_exc())]
        failures: dict[int, str] = {}
        refusals = self._prepare(population, orders, failures)
        for member in orders:
            self._rows[member].clear()
        ready = {member: order for member, order in orders.items() if member not in failures}
        callbacks = {member: self._callbacks[member] for member in ready}
        updates = {member: order.updates for member, order in ready.items()}
        goals = {member: _updates(population.agents[member]) + count for member, count in updates.items()}
        for member, error in population.train(updates, self._work.total_updates, callbacks).items():
            failures[member] = "".join(traceback.format_exception(error))
        self._used |= orders.keys()
        results: list[Report | Failure] = []
        for member, order in orders.items():
            if member not in failures:
                try:
                    results.append(self._report(population, order, goals[member], refusals.get(member)))
                    continue
                except Exception:
                    failures[member] = traceback.format_exc()
            self._failed.add(member)
            results.append(Failure(member, (member,), failures[member]))
        return results

    def _built(self) -> VectorizedPopulation:
        if self.population is None:
            self.population = VectorizedPopulation(self._make_agent, self._work.members)
        return self.population

    def _make_agent(self, member: int) -> DistributionalPPO:
        work = self._work
        agent = work.make_agent(member)
        self._rows[member] = LoggedRows()
        agent.add_log_output(self._rows[member])
        self._callbacks[member] = None if work.make_callback is None else work.make_callback()
        return agent

    def _prepare(
        self, population: VectorizedPopulation, orders: dict[int, Order], failures: dict[int, str]
    ) -> dict[int, str]:
        """Restore members, then copy donors and set hyper-parameters; reasons why exploits failed."""
        for member, order in orders.items():
            try:
                self._restore(population, order)
            except Exception:
                failures[member] = traceback.format_exc()
        strategy, refusals = self._work.optimizer_exploit_strategy, {}
        pairs = [(m, o.donor_member) for m, o in orders.items() if o.donor_member is not None and m not in failures]
        population.exploit([target for target, _ in pairs], [source for _, source in pairs], strategy)
        for member, order in orders.items():
            trainee = Trainee(population.agents[member], self._work.total_updates)
            if member in failures:
                continue
            if order.donor is None:
                trainee.set_hyperparams(order.hyperparams)
                continue
            try:
                with unchanged_generators():
                    tree = read(io.BytesIO(order.donor)).tree
                    parameters = {name: state for name, state in tree.items() if name not in OWN_PLACE}
                    trainee = Trainee(population.member(member), self._work.total_updates)
                    trainee.inherit(parameters, "v2_full_parameters", order.hyperparams, strategy)
                population.put(member, trainee.agent)
            except Exception as error:
                if order.start_at is not None:
                    failures[member] = traceback.format_exc()
                refusals[member] = f"{type(error).__name__}: {error}"
        return refusals

    def _restore(self, population: VectorizedPopulation, order: Order) -> None:
        member = order.member
        if member not in self._failed and order.restore is None and order.start_at is None:
            return  # It goes on, or begins.
        tree = None if order.restore is None else read(io.BytesIO(order.restore)).tree
        population.renew(member, tree, as_made=member not in self._used)
        self._used.add(member)
        self._failed.discard(member)
        if order.start_at is not None:
            Trainee(population.agents[member], self._work.total_updates).count_from(order.start_at)

    def _report(self, population: VectorizedPopulation, order: Order, goal: int, refusal: str | None) -> Report:
        member = order.member
        agent = population.member(member)
        trainee = Trainee(agent, self._work.total_updates)
        performance = math.nan
        if member in population.frozen:
            trainee.count_from(goal)
        else:
            with unchanged_generators():
                performance = float(self._work.metric(agent))
        file = io.BytesIO()
        write(file, population.states(member), config=agent.config(), exact=agent.worker.is_whole)
        return Report(member, trainee.updates, performance, file.getvalue(), self._rows[member].taken(), refusal)


class VectorizedHost:
    """Executes orders of some members of a population, which train as one.

    Args:
        work: Settings that all orders share.
        members: The members.
    """

    def __init__(self, work: Work, members: Sequence[int]) -> None:
        self._members = list(members)
        self._backend = VectorizedBackend()
        own = replace(work, make_agent=lambda place: work.make_agent(self._members[place]), members=len(members))
        self._backend.start(own)

    def carry_out(self, orders: Sequence[Order]) -> list[Report | Failure]:
        """Execute orders, all at once."""
        places = [self._members.index(order.member) for order in orders]
        pairs = zip(places, orders, strict=True)
        results = self._backend.carry_out({place: replace(order, member=place) for place, order in pairs})
        return [self._by_member(result) for result in results]

    def close(self) -> None:
        """Close the environments of all members."""
        self._backend.close()

    def _by_member(self, result: Report | Failure) -> Report | Failure:
        if isinstance(result, Report):
            return replace(result, member=self._members[result.member])
        lost = tuple(self._members[place] for place in result.lost)
        return replace(result, member=None if result.member is None else self._members[result.member], lost=lost)


def _updates(agent: DistributionalPPO) -> int:
    return agent.num_timesteps // (agent.n_steps * agent.n_envs)
