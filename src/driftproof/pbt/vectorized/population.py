"""A population of agents that act and learn together."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.type_aliases import MaybeCallback

from driftproof._arguments import ArgumentError, check_count
from driftproof.learner.learner import UpdateSettings
from driftproof.learner.population import MemberGenerators, PopulationLearner, PopulationRollout, PopulationState
from driftproof.learner.rollout import failure_of_environment
from driftproof.nn.policies import DistributionalPolicy
from driftproof.pbt.member import MakeAgent
from driftproof.pbt.vectorized.host_rollouts import HostRollouts
from driftproof.pbt.vectorized.tensor_rollouts import TensorRollouts
from driftproof.ppo import DistributionalPPO, TensorVecEnv
from driftproof.ppo.environments import renormalized
from driftproof.ppo.generators import unchanged_generators
from driftproof.ppo.tree import OWN_PLACE
from driftproof.state import copy_tree


class VectorizedPopulation:
    """Agents of one architecture whose networks, optimizers and controllers are tensors ``[M, ...]`` on one device.

    A member trains as it would alone, up to rounding: hyper-parameters, environments, counters and, on a CPU, random
    numbers are its own. Hyper-parameters are those of its agent, ``population.agents[i].hyperparams``.

    A member that diverges, to weights that are not finite or to ``skip_limit`` skipped minibatches in a row, goes back
    to its weights of the last :meth:`write` and is *frozen*: it does not train until :meth:`exploit` or :meth:`put`
    replaces it.

    Args:
        make_agent: Returns the agent of a member, by its id, with its own environments. Agents may differ in numbers.
            If they have tensor environments, all members act in one, on the device.
        members: Number of members M.

    Raises:
        ArgumentError: Agents differ in more than numbers, or have parts that no population can have.
    """

    def __init__(self, make_agent: MakeAgent, members: int) -> None:
        check_count("members", members, at_least=1)
        self._make_agent = make_agent
        self.agents: list[DistributionalPPO] = []
        self._random: list[dict[str, Any]] = []
        """Random generators of each member, as its agent's component saves them."""
        try:
            for member in range(members):
                agent, generators = self._made(member)
                self.agents.append(agent)
                self._random.append(generators)
            first = self.agents[0]
            for agent in self.agents:
                _check(agent, first)
            self.state = PopulationState([agent.learner for agent in self.agents])
            self.generators = MemberGenerators([each["torch"] for each in self._random], self.state.device)
            self.generators.device_state = self._random[0]["cuda"]
            self.learner = PopulationLearner(self.state, self.generators)
            shape = (first.n_steps, first.n_envs, first.batches.sequence_length)
            self.rollout = PopulationRollout(self.state.policy, *shape)
            kind = TensorRollouts if isinstance(first.env, TensorVecEnv) else HostRollouts
            self.rollouts: HostRollouts | TensorRollouts
            self.rollouts = kind(self.agents, self.state, self.rollout, self.generators)
        except BaseException:
            self.close()
            raise
        self.frozen: set[int] = set()
        """Members that have diverged."""

    @property
    def members(self) -> int:
        """Number of members."""
        return self.state.members

    def _made(self, member: int) -> tuple[DistributionalPPO, dict[str, Any]]:
        with unchanged_generators():
            agent = self._make_agent(member)
            return agent, dict(agent.components()["random"].state_dict())

    def renew(self, member: int, tree: Mapping[str, Any] | None = None, as_made: bool = False) -> None:
        """Make a member's agent anew, after a failure or in another process.

        Args:
            member: The member.
            tree: State to restore; ``None``: it starts as a new agent.
            as_made: Whether the agent is still as it was made, and need not be made again.
        """
        agent, generators = self.agents[member], self._random[member]
        if not as_made:
            _close(agent)
            agent, generators = self._made(member)
            # Registered before anything can fail, so that its environments get closed.
            self.agents[member], self.state.learners[member] = agent, agent.learner
        if tree is not None:
            with unchanged_generators():
                agent.load_state_tree(tree)
                generators = dict(agent.components()["random"].state_dict())
        self._read(member, generators)

    def member(self, i: int) -> DistributionalPPO:
        """A member's agent in its present state: an agent like any other, until the population trains on."""
        self.write([i])
        return self.agents[i]

    def put(self, i: int, agent: DistributionalPPO) -> None:
        """Let a member continue as an agent: its whole state, except for the random generators."""
        own = self.agents[i]
        if agent is not own:
            tree = agent.state_tree()
            with unchanged_generators():
                own.load_state_tree({**tree, "random": own.components()["random"].state_dict()})
        now = {"torch": self.generators.states[i], "cuda": self.generators.device_state}
        self._read(i, {**self._random[i], **now})

    def _read(self, member: int, generators: Mapping[str, Any]) -> None:
        self._random[member] = dict(generators)
        self.generators.states[member] = generators["torch"]
        self.generators.device_state = generators["cuda"]
        self.state.read(member)
        self.rollouts.read(member)
        self.frozen.discard(member)
        self.learner.diverged[member] = False

    def write(self, members: Iterable[int]) -> None:
        """Copy the present state of members into their agents."""
        for member in members:
            self.state.write(member)
            self.rollouts.write(member)

    def states(self, member: int) -> dict[str, Any]:
        """The state tree of a member's agent as of the last :meth:`write`, not copied."""
        tree = self.agents[member].current_states()
        own = {**self._random[member], "torch": self.generators.states[member]}
        if not self.generators.is_single:
            own["cuda"] = self.generators.device_state
        names = ("python", "numpy", "torch", "cuda")
        return {**tree, "random": {**tree["random"], **{name: own[name] for name in names}}}

    def exploit(
        self, targets: Sequence[int], sources: Sequence[int], optimizer: str = "copy", restart: bool = True
    ) -> None:
        """Copy what members have learned: ``targets[k]`` becomes like ``sources[k]`` was before the call.

        Networks, optimizers and controllers are copied along the member axis on the device. Counters, environments and
        random generators stay.

        Args:
            targets: Members to overwrite, all different.
            sources: Their donors.
            optimizer: ``"copy"`` the donor's optimizer moments, or ``"reset"`` them.
            restart: Reset the recurrent states of the running episodes, which other weights began.
        """
        if not targets:
            return
        self.state.copy(targets, sources, reset_optimizer=optimizer == "reset")
        if restart:
            self.rollouts.restart(targets)
        learned, overwritten = self.state.components, set(targets)
        donors = {}
        for source in set(sources):
            parts = self.agents[source].components()
            names = [name for name in parts if name not in learned and name not in OWN_PLACE]
            states = {name: dict(parts[name].state_dict()) for name in names}
            # Targets get copies: only a donor that is a target itself must be copied before.
            donors[source] = copy_tree(states) if source in overwritten else states
        for target, source in zip(targets, sources, strict=True):
            agent = self.agents[target]
            parts = agent.components()
            for name, state in donors[source].items():
                parts[name].load_state_dict(copy_tree(state))
            if agent.normalizer.is_used and agent.env is not None and agent._last_obs is not None:
                agent._last_obs = renormalized(agent.env)
            self.frozen.discard(target)
            self.learner.diverged[target] = False

    def learn(self, total_updates: int, callback: MaybeCallback = None) -> None:
        """Train all members for some updates, which schedules run over.

        Args:
            total_updates: Number of updates.
            callback: Callback of the first member's training.
        """
        callbacks = {member: callback if member == 0 else None for member in range(self.members)}
        failures = self.train(dict.fromkeys(callbacks, total_updates), total_updates, callbacks)
        for member, error in failures.items():
            raise RuntimeError(f"member {member} failed") from error
        self.write(range(self.members))

    def train(
        self, updates: Mapping[int, int], total_updates: int, callbacks: Mapping[int, MaybeCallback]
    ) -> dict[int, Exception]:
        """Train some of the members; nothing of the others changes.

        Args:
            updates: Number of updates of each member that trains.
            total_updates: Updates of the whole training; schedules run over them.
            callbacks: Callback of each of them.

        Returns:
            Members that failed, each with the error. Their state is undefined: :meth:`renew` them.
        """
        with unchanged_generators(), self.generators.of_device():
            return self._train(updates, total_updates, callbacks)

    def _train(
        self, updates: Mapping[int, int], total_updates: int, callbacks: Mapping[int, MaybeCallback]
    ) -> dict[int, Exception]:
        failures: dict[int, Exception] = {}
        begun: dict[int, BaseCallback] = {}
        for member in updates:
            try:
                begun[member] = self._begin(member, total_updates, callbacks[member])
            except Exception as error:
                failures[member] = error
        for iteration in range(max(updates.values(), default=0)):
            active = {
                member: callback
                for member, callback in begun.items()
                if member not in failures and member not in self.frozen and iteration < updates[member]
            }
            if not active:
                break
            failures |= self.rollouts.collect(active)
            settings = self._settings([m for m in active if m not in failures], iteration + 1, failures)
            trained = [member for member in active if member not in failures]
            if trained:
                self._update(trained, settings)
        for member, callback in begun.items():
            agent = self.agents[member]
            if member in failures and failure_of_environment(failures[member]) is not None:
                agent._last_obs = None
            elif member not in failures:
                agent.worker.in_rollout = False
                callback.on_training_end()
        return failures

    def _begin(self, member: int, total_updates: int, callback: MaybeCallback) -> BaseCallback:
        """Set up a member's training, as ``learn`` and ``resume`` do."""
        agent = self.agents[member]
        steps = total_updates * agent.n_steps * agent.n_envs
        is_new = agent.num_timesteps == 0
        if is_new or agent._last_obs is None:
            agent.worker.state = agent.worker.reset_seed = None
        with self.generators.of(member):
            remaining = steps if is_new else steps - agent.num_timesteps
            starts_episodes = is_new or agent._last_obs is None
            _, made = agent._setup_learn(remaining, callback, is_new)
            if starts_episodes:
                self.rollouts.read(member)
            made.on_training_start({"self": agent, "total_timesteps": steps}, {})
        return made

    def _settings(
        self, members: Sequence[int], iteration: int, failures: dict[int, Exception]
    ) -> dict[int, UpdateSettings]:
        """Settings of the members' next update; logs what the last one has recorded."""
        settings = {}
        for member in members:
            agent = self.agents[member]
            try:
                agent._update_current_progress_remaining(agent.num_timesteps, agent._total_timesteps)
                agent.dump_logs(iteration)
                settings[member] = agent.begin_update()
            except Exception as error:
                failures[member] = error
        return settings

    def _update(self, trained: Sequence[int], settings: Mapping[int, UpdateSettings]) -> None:
        active = [member in trained for member in range(self.members)]
        # Those of others have no effect, but must fit.
        some = settings[trained[0]]
        every = [settings.get(member, some) for member in range(self.members)]
        metrics = self.learner.update(self.rollout, every, active)
        self.rollouts.finish_update()
        for member in trained:
            self.agents[member].end_update(metrics[member])
            self.agents[member].worker.in_rollout = False
            if self.learner.diverged[member]:
                self.frozen.add(member)
                self.state.read(member)
                self.state.skipped_in_a_row[member] = 0
            elif self.agents[member].learner.weights_were_replaced:
                self.rollouts.restart([member])

    def close(self) -> None:
        """Close the environments of all members."""
        for agent in self.agents:
            _close(agent)


def _close(agent: DistributionalPPO) -> None:
    if agent.env is not None:
        try:
            agent.env.close()
        except Exception:
            # Often it is closed because it broke; the other members must not fail with it.
            traceback.print_exc()


def _check(agent: DistributionalPPO, first: DistributionalPPO) -> None:
    """Refuse agents that cannot train as one."""
    if not isinstance(agent.policy, DistributionalPolicy):
        raise ArgumentError(
            f"{agent.policy_class.__name__} was written for Stable-Baselines3 and does not support several members at "
            "once"
        )
    if type(agent.policy).evaluate is not DistributionalPolicy.evaluate:
        raise ArgumentError(
            f"{agent.policy_class.__name__} has its own evaluate(), which does not support several members at once"
        )
    for name in ("n_steps", "n_envs", "batch_size", "sequence_length", "value_clip_mode", "mixed_precision"):
        if getattr(agent, name) != getattr(first, name):
            raise ArgumentError(f"members of one population need the same {name}", name)
    shapes, expected = ({n: t.shape for n, t in each.policy.state_dict().items()} for each in (agent, first))
    if shapes != expected:
        raise ArgumentError("members of one population need networks of the same shapes")
    if agent.learner.components().keys() != first.learner.components().keys():
        raise ArgumentError("members of one population need the same components")
