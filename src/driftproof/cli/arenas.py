"""Evaluation environments, whose drift is held in one phase, and the policies evaluated in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from driftproof._files import DAMAGES, described
from driftproof._text import shortlist
from driftproof.cli.errors import CommandError
from driftproof.cli.interrupts import interrupts
from driftproof.cli.scopes import scope_of

if TYPE_CHECKING:
    from stable_baselines3.common.vec_env import VecEnv

    from driftproof.config import Config
    from driftproof.ppo import DistributionalPPO
    from driftproof.runs.sources import Sources

_UNSEEN = 2**30
"""Offset added to the run's seed, so that evaluation and training use different seeds."""


@dataclass(frozen=True)
class Subject:
    """An agent to evaluate, with what is known about its training.

    Attributes:
        agent: The agent.
        settings: Configuration with the environment.
        lasting: States of the environments' drift at the end of training, if known.
        trained: What it was trained on; ``None``: unknown.
    """

    agent: DistributionalPPO
    settings: Config
    lasting: Sequence[Mapping[str, Any]] | None = None
    trained: Sources | None = None


@dataclass
class World:
    """One combination of values that the drift takes.

    Attributes:
        time: Number of steps and of episodes at which it first occurs.
        values: Value of each change.
        phases: Numbers of the phases that have these values.
        is_seen: Whether it occurred in training.
        is_last: Whether training ended in it.
    """

    time: tuple[int, int]
    values: dict[str, float]
    phases: list[int] = field(default_factory=list)
    is_seen: bool = False
    is_last: bool = False

    @property
    def note(self) -> str:
        """Whether training has seen these values."""
        if self.is_last:
            return "where training ended"
        return "seen in training" if self.is_seen else "not seen in training"


class Arena:
    """Environments to evaluate an agent in.

    Args:
        subject: The agent and its settings.
        venv: The environments.
        seed: Seed of the first environment.
    """

    def __init__(self, subject: Subject, venv: VecEnv, seed: int) -> None:
        from driftproof.ppo.environments import lasting_states

        self.subject, self.venv, self.seed = subject, venv, seed
        self.drifts = venv.has_attr("drift_moments")
        self._states: Sequence[Mapping[str, Any]] | None = subject.lasting
        self.is_known, self._end = False, (0, 0)
        if self.drifts:
            venv.seed(seed)
            venv.reset()
            self.is_known = let_drift(venv, subject.lasting)
            if self.is_known:
                assert subject.lasting
                # Values at that number of steps are those of the next step.
                steps, episodes = int(subject.lasting[0]["steps"]), int(subject.lasting[0]["episodes"])
                self._end = max(steps - 1, 0), max(episodes, 0)
            else:
                self._end = max(subject.agent.num_timesteps // subject.settings.env.n_envs - 1, 0), 0
            # Environments with different seeds would drift differently: all follow the first one's drift.
            self._states = (lasting_states(venv) or [])[:1]
        self._time: tuple[int, int] | None = None

    def worlds(self) -> list[World]:
        """All combinations of drift values, in the order in which they first occur."""
        let_drift(self.venv, self._states)
        (times,) = self.venv.env_method("drift_moments", *self._end, indices=[0])
        found: dict[tuple[Any, ...], World] = {}
        for time in sorted({*times, self._end}):
            phase, values = self._look(time)
            world = found.setdefault(tuple(values.items()), World(time, values))
            if phase not in world.phases:
                world.phases.append(phase)
            world.is_seen |= self.is_known and time <= self._end
            world.is_last |= self.is_known and time == self._end
        return list(found.values())

    def enter(self, phase: int | None, normalizer: str = "frozen") -> dict[str, Any]:
        """Select a drift phase, hold it in all episodes, and return the scope of the evaluation.

        Args:
            phase: Number of the phase; ``None``: the one in which training ended.
            normalizer: See :func:`scope_of`.

        Raises:
            CommandError: There is no such phase.
        """
        if not self.drifts:
            if phase is not None:
                raise no_phases(self.subject.settings.env.id, f"--phase {phase}")
            return self.scope(None, normalizer)
        if phase is None:
            self._time = self._end if self.is_known else (0, 0)
            number, values = self._look(self._time)
            note = "where training ended" if self.is_known else "as it is not known where training ended"
        else:
            worlds = self.worlds()
            matching = [world for world in worlds if phase in world.phases]
            if not matching:
                known = shortlist(sorted({each for world in worlds for each in world.phases}), 8)
                raise CommandError(f"--phase {phase}: the drift has the phases {known}")
            world = next((world for world in matching if world.is_last), matching[-1])
            self._time, number, values, note = world.time, phase, world.values, world.note
        return self.scope({"phase": number, "values": values, "note": note}, normalizer)

    def hold(self, world: World) -> None:
        """Hold these drift values in all episodes."""
        self._time = world.time

    def restart(self) -> None:
        """Return to the state from which every policy is evaluated."""
        let_drift(self.venv, self._states)
        if self._time is not None:
            self.venv.env_method("set_drift_time", *self._time, hold=True)

    def _look(self, time: tuple[int, int]) -> tuple[int, dict[str, float]]:
        """Drift phase and drift values at a time."""
        self.venv.env_method("set_drift_time", *time, indices=[0], hold=True)
        (drift,) = self.venv.env_method("get_wrapper_attr", "drift_values", indices=[0])
        return int(drift.pop("phase")), {str(name): float(value) for name, value in drift.items()}

    def scope(self, drift: Mapping[str, Any] | None = None, normalizer: str = "frozen") -> dict[str, Any]:
        """Scope of the evaluation; see :func:`scope_of`."""
        of = self.subject
        return scope_of(of.agent, self.venv, of.settings, self.seed, of.trained, drift=drift, normalizer=normalizer)

    @property
    def times(self) -> dict[str, Sequence[Any]] | None:
        """Timestamps of all rows by symbol; ``None`` unless the environment replays market data."""
        if not self.venv.has_attr("history"):
            return None
        (markets,) = self.venv.get_attr("markets", indices=[0])
        return {symbol: bars.timestamps for symbol, bars in markets.items()}


class Following:
    """Policy of an agent whose observation normaliser, if any, keeps following observation shifts as in training.

    The weights do not change.

    Args:
        agent: The agent; :meth:`restart` resets its normaliser to the present state.
    """

    def __init__(self, agent: DistributionalPPO) -> None:
        self._agent, self._normalizer = agent, agent.learner.normalizer
        self._state = None if self._normalizer is None else self._normalizer.state_dict()
        self._started: Any = None

    def restart(self) -> None:
        """Reset the normaliser to its state at construction."""
        self._started = None
        if self._normalizer is not None and self._state is not None:
            self._normalizer.load_state_dict(self._state)

    def predict(
        self, observation: Any, state: Any = None, episode_start: Any = None, deterministic: bool = False
    ) -> Any:
        """Same as the agent's ``predict``, after updating the normaliser."""
        if self._normalizer is not None:
            # evaluate_policy keeps stepping environments that have finished, with episode_start left set.
            goes_on = ~(episode_start & self._started) if self._started is not None else episode_start | True
            self._started = episode_start.copy()
            if goes_on.any():
                rows = {k: v[goes_on] for k, v in observation.items()} if isinstance(observation, dict) else None
                self._normalizer.observe(observation[goes_on] if rows is None else rows, episode_start[goes_on])
        return self._agent.predict(observation, state, episode_start, deterministic)


@contextmanager
def arena(subject: Subject, episodes: int, seed: int | None = None) -> Iterator[Arena]:
    """Create environments to evaluate an agent in, at most one per episode.

    Args:
        subject: The agent and its settings.
        episodes: Number of episodes.
        seed: Seed of the first environment; ``None``: one that training does not use.

    Raises:
        CommandError: The agent's spaces differ from the environment's.
    """
    from driftproof.cli.played import Played
    from driftproof.config import build_env

    settings = subject.settings
    with interrupts.held():
        envs = build_env(settings, n_envs=min(settings.env.n_envs, episodes), is_evaluation=True)
    venv = Played(envs, settings.env.id)
    try:
        _check_spaces(subject.agent, venv, settings.env.id)
        yield Arena(subject, venv, settings.run.seed + _UNSEEN if seed is None else seed)
    finally:
        venv.close()


def no_phases(env_id: str, option: str) -> CommandError:
    """Error for an environment that does not drift."""
    return CommandError(
        f"{env_id} does not drift and has no phases: leave out {option}, or add a drift, such as --set "
        "'env.drift=[{kind: reward_scale, schedule: {kind: sudden, every: 1000, values: [1, 2]}}]'"
    )


def let_drift(venv: VecEnv, lasting: Sequence[Mapping[str, Any]] | None) -> bool:
    """Restore the environments' drift to its state at the end of training.

    Returns:
        Whether a drift state was restored; otherwise the drift starts from the beginning.
    """
    from driftproof.ppo.environments import restore_lasting

    if not lasting:
        return False
    try:
        return restore_lasting(venv, [lasting[0]] * venv.num_envs)
    except (*DAMAGES, AssertionError, RuntimeError) as error:
        what = f"the drift state in the checkpoint does not fit the environment: {described(error)}"
        raise CommandError(f"{what}; give --env to evaluate without the drift state") from error


def normalized(agent: DistributionalPPO, venv: VecEnv) -> VecEnv:
    """Wrap environments in the agent's observation normaliser, with frozen statistics."""
    from stable_baselines3.common.vec_env import VecNormalize

    wrapped = agent.normalizer.wrapped(venv)
    if isinstance(wrapped, VecNormalize):
        wrapped.training = False
    return wrapped


def _check_spaces(agent: DistributionalPPO, venv: VecEnv, env_id: str) -> None:
    """Refuse environments whose spaces differ from the agent's; observation bounds may differ, as under drift."""
    for what, known, given in (
        ("observation", agent.observation_space, venv.observation_space),
        ("action", agent.action_space, venv.action_space),
    ):
        if _kind(known) != _kind(given):
            raise CommandError(f"the agent has the {what} space {known}, but {env_id} has {given}")


def _kind(space: Any) -> tuple[Any, ...]:
    """Properties that must match; shapes are sorted, since agents have images channels first, environments last."""
    return type(space), sorted(space.shape or ()), getattr(space, "n", None)
