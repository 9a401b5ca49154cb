"""Environments that drift: observations, actions, rewards and dynamics change over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.utils import RecordConstructorArgs

from driftproof._arguments import check_count
from driftproof._registry import CHANGES
from driftproof._trust import Trust
from driftproof.envs._specs import of_kind
from driftproof.envs.changes import ActionChange, Change, Dice, ObservationChange, RewardChange
from driftproof.envs.dynamics import Attributes, Dynamics
from driftproof.envs.schedules import Course, schedule


def change(spec: Any, trust: Trust | None = None, place: str = "") -> Change:
    """Build a change from plain values, such as ``{"kind": "reward_scale", "schedule": {...}}``.

    Args:
        spec: The values, where both ``kind`` may also be ``module:Class``; or a change.
        trust: Modules that ``kind`` may name.
        place: Path of the values in a configuration, for messages.
    """
    if isinstance(spec, Change):
        return spec
    if isinstance(spec, Mapping) and isinstance(spec.get("schedule"), Mapping):
        spec = {**spec, "schedule": schedule(spec["schedule"], trust, place)}
    made: Change = of_kind(CHANGES, spec, trust, place)
    return made


def saves_state(env: gymnasium.Env[Any, Any]) -> bool:
    """Whether an environment can save its whole state: it has the methods, and no wrapper inside says otherwise."""
    if not (env.has_wrapper_attr("state_dict") and env.has_wrapper_attr("load_state_dict")):
        return False
    return bool(env.get_wrapper_attr("continues")) if env.has_wrapper_attr("continues") else True


class DriftWrapper(gymnasium.Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """Lets an environment drift: its observations, actions, rewards or dynamics.

    Time is counted in steps, or episodes, of this environment, across resets. Values are constant during a step, from
    its action to its observation. ``info["drift"]`` has the value of every change by name, and the ``"phase"``, the sum
    of the phases of all schedules.

    Args:
        env: The environment.
        changes: Changes, or their plain values, see :func:`change`; applied in this order.
        seed: Seed of the drift: environments with the same seed drift alike. ``None``: taken from the first ``reset``
            with a seed, which differs between the environments of a vector.
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        changes: Sequence[Change | Mapping[str, Any]],
        seed: int | None = None,
    ) -> None:
        self.changes = tuple(map(change, changes))
        RecordConstructorArgs.__init__(self, changes=self.specification, seed=seed)
        gymnasium.Wrapper.__init__(self, env)
        if seed is not None:
            check_count("seed", seed)
        space = env.observation_space
        for each in self.changes:
            each.check(env)
            if isinstance(each, ObservationChange):
                space = each.widened(space)
        self.observation_space = space
        self._drifts_inside = env.has_wrapper_attr("drift_names")
        inside = env.get_wrapper_attr("drift_names") if self._drifts_inside else []
        self.drift_names = _numbered([*inside, *(each.name for each in self.changes)])
        """Names in ``info["drift"]``, besides the phase."""
        self._names = self.drift_names[len(inside) :]
        self._attributes = [Attributes(env, each) if isinstance(each, Dynamics) else None for each in self.changes]
        deeper = env.get_wrapper_attr("drifting_attributes") if env.has_wrapper_attr("drifting_attributes") else []
        own = [name for each in self._attributes if each is not None for name in each.names]
        self.drifting_attributes: list[str] = [*deeper, *own]
        """Attributes of the environment that change, here and in wrappers inside."""
        _check_once(self.drifting_attributes)
        self._steps, self._episodes, self._is_held = 0, -1, False
        self._seed: int | None = None
        self._courses: list[Course] = []
        self._dice: list[Dice] = []
        self._drift: dict[str, Any] = {}
        if seed is not None:
            self._begin(int(seed))
            self._go_on()

    @property
    def specification(self) -> list[dict[str, Any]]:
        """All changes as plain values."""
        return [each.to_dict() for each in self.changes]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if self._seed is None:
            self._begin(int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed)
        self._episodes += not self._is_held
        self._go_on()
        observation, info = self.env.reset(seed=seed, options=options)
        return self._observed(observation), self._with_drift(info)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._seed is None:
            raise gymnasium.error.ResetNeeded("call reset() before step()")
        for each, course, dice in self._acting:
            action = each.act(action, course.value, dice, self.action_space)
        observation, reward, terminated, truncated, info = self.env.step(action)
        reward = float(reward)
        for rewarding, course in self._rewarding:
            reward = rewarding.reward(reward, course.value)
        observation, info = self._observed(observation), self._with_drift(info)
        self._steps += not self._is_held
        self._go_on()
        return observation, reward, terminated, truncated, info

    @property
    def drift_values(self) -> dict[str, Any]:
        """Phase and values that are in force, as ``info["drift"]`` of the next step will tell."""
        inside = self.env.get_wrapper_attr("drift_values") if self._drifts_inside else {}
        return {**inside, **self._drift, "phase": inside.get("phase", 0) + self._drift.get("phase", 0)}

    def drift_moments(self, steps: int, episodes: int = 0) -> list[tuple[int, int]]:
        """Times whose values stand for the drift up to a time, as pairs of steps and episodes.

        They are the :meth:`moments <driftproof.envs.Schedule.moments>` of all schedules. If some count steps and others
        episodes, one is converted to the other by the mean length of an episode.

        Args:
            steps: Steps of this environment.
            episodes: Episodes in which they were done.
        """
        found = set(self.env.get_wrapper_attr("drift_moments")(steps, episodes)) if self._drifts_inside else {(0, 0)}
        for each in self.changes:
            if each.schedule.unit == "steps":
                found |= {(time, time * episodes // max(steps, 1)) for time in each.schedule.moments(steps)}
            else:
                found |= {(time * steps // max(episodes, 1), time) for time in each.schedule.moments(episodes)}
        return sorted(found)

    def set_drift_time(self, steps: int, episodes: int = 0, *, hold: bool = False) -> None:
        """Go to a time of the drift, earlier or later, without playing.

        Args:
            steps: Steps of this environment so far.
            episodes: Number of the running episode; the next ``reset`` begins the one after it.
            hold: Whether to stay there, so that neither steps nor episodes are counted, until another time or
                ``lasting_state`` is set.
        """
        check_count("steps", steps)
        check_count("episodes", episodes)
        if self._seed is None:
            raise gymnasium.error.ResetNeeded("call reset() before set_drift_time(), or give the drift a seed")
        if self._drifts_inside:
            self.env.get_wrapper_attr("set_drift_time")(steps, episodes, hold=hold)
        if steps < self._steps or episodes < self._episodes:
            self._begin(self._seed)
        self._steps, self._episodes, self._is_held = steps, episodes, hold
        self._go_on()

    @property
    def continues(self) -> bool:
        """Whether the environment inside can save its state, so that :meth:`state_dict` is complete."""
        return saves_state(self.env)

    @property
    def lasting_state(self) -> dict[str, Any]:
        """State of the drift, here and in wrappers inside; it outlasts episodes and restarts of environments."""
        inside = self.env.get_wrapper_attr("lasting_state") if self.env.has_wrapper_attr("lasting_state") else None
        return {
            "specification": self.specification if inside is None else [*inside["specification"], *self.specification],
            "seed": self._seed,
            "steps": self._steps,
            "episodes": self._episodes,
            "is_held": self._is_held,
            "courses": [course.state_dict() for course in self._courses],
            "dice": [dice.generator.bit_generator.state for dice in self._dice],
            "inside": inside,
        }

    @lasting_state.setter
    def lasting_state(self, state: Mapping[str, Any]) -> None:
        here = self.lasting_state["specification"]
        if state["specification"] != here:
            raise ValueError(f"the state is of another drift: {state['specification']}, and this one is {here}")
        if state["inside"] is not None:
            self.env.set_wrapper_attr("lasting_state", state["inside"])
        self._steps, self._episodes, self._seed = state["steps"], state["episodes"], None
        self._is_held = bool(state.get("is_held", False))  # missing in files of earlier versions
        if state["seed"] is None:
            return
        self._begin(state["seed"])
        for course, dice, own, generator in zip(
            self._courses, self._dice, state["courses"], state["dice"], strict=True
        ):
            course.load_state_dict(own, self._time(course))
            dice.generator.bit_generator.state = generator
        self._go_on()

    def state_dict(self) -> dict[str, Any]:
        """State of the drift and, if it can be saved, of the environment inside."""
        inside = self.env.get_wrapper_attr("state_dict")() if self.continues else None
        return {"drift": self.lasting_state, "environment": inside}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a saved state; an environment inside that cannot save its state is left unchanged."""
        if (state_dict["environment"] is not None) != self.continues:
            raise ValueError("the state and this environment differ: one of them cannot go on where it was")
        # First the dynamics, then the environment's state.
        self.lasting_state = state_dict["drift"]
        if state_dict["environment"] is not None:
            self.env.get_wrapper_attr("load_state_dict")(state_dict["environment"])

    def _begin(self, seed: int) -> None:
        self._seed = seed
        # Numbered after the changes of wrappers inside, which have the same seed and must not drift alike.
        numbers = range(len(self.drift_names) - len(self._names), len(self.drift_names))
        self._courses = [Course(each.schedule, (seed, i)) for i, each in zip(numbers, self.changes, strict=True)]
        self._dice = [Dice((seed, i)) for i in numbers]
        running = list(zip(self.changes, self._courses, self._dice, strict=True))
        self._acting = [(each, course, dice) for each, course, dice in running if isinstance(each, ActionChange)]
        self._observing = [
            (each, course, dice) for each, course, dice in running if isinstance(each, ObservationChange)
        ]
        self._rewarding = [(each, course) for each, course, _ in running if isinstance(each, RewardChange)]
        self._drift = {}

    def _time(self, course: Course) -> int:
        return self._steps if course.schedule.unit == "steps" else max(self._episodes, 0)

    def _go_on(self) -> None:
        """Update all schedules and attributes to the current time."""
        before, self._drift = self._drift, {"phase": 0}
        for name, course, attributes in zip(self._names, self._courses, self._attributes, strict=True):
            course.go_to(self._time(course))
            self._drift["phase"] += course.phase
            self._drift[name] = course.value
            if attributes is not None and before.get(name) != course.value:
                attributes.set(course.value)

    def _observed(self, observation: Any) -> Any:
        for each, course, dice in self._observing:
            observation = each.observe(observation, course.value, dice, self.observation_space)
        return observation

    def _with_drift(self, info: dict[str, Any]) -> dict[str, Any]:
        inside = info.get("drift", {"phase": 0})
        return {**info, "drift": {**inside, **self._drift, "phase": inside["phase"] + self._drift["phase"]}}


def drifting(
    env: gymnasium.Env[Any, Any] | str,
    drift: Change | Mapping[str, Any] | Sequence[Change | Mapping[str, Any]],
    seed: int | None = None,
    **kwargs: Any,
) -> DriftWrapper:
    """Make a drifting environment.

    Args:
        env: The environment, or its id.
        drift: Changes, or plain values such as ``{"kind": "dynamics", "names": "length", "schedule":
            {"kind": "sudden", "values": [1, 2], "every": 10_000}}``.
        seed: Seed of the drift; see :class:`DriftWrapper`.
        kwargs: Arguments of ``gymnasium.make``, if ``env`` is an id.
    """
    if isinstance(env, gymnasium.vector.VectorEnv):
        raise TypeError(
            f"{type(env).__name__} is many environments: let each of them drift, as in gymnasium.make_vec(id, n, "
            'vectorization_mode="sync", wrappers=[lambda env: drifting(env, ...)])'
        )
    if not isinstance(env, str) and kwargs:
        raise TypeError(f"{', '.join(kwargs)}: arguments of gymnasium.make, but env is made already")
    made = gymnasium.make(env, **kwargs) if isinstance(env, str) else env
    return DriftWrapper(made, [drift] if isinstance(drift, Change | Mapping) else drift, seed)


def _numbered(names: Sequence[str]) -> list[str]:
    """The names, with numbers for repeated ones."""
    return [name if name not in names[:i] else f"{name}_{names[:i].count(name) + 1}" for i, name in enumerate(names)]


def _check_once(names: Sequence[str]) -> None:
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{', '.join(sorted(twice))}: an attribute can change in one way only")
