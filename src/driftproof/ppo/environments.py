"""State of environments: saved with an agent and restored when its training is resumed.

Environments that offer ``state_dict`` and ``load_state_dict`` continue where they were, unless their attribute
``continues`` is false. Wrappers of Gymnasium and Stable-Baselines3 that have a state are restored too.

State that outlives episodes, such as how far an environment has drifted, is its ``lasting_state``: a dict that can be
read and set, also where environments restart. Its ``specification`` identifies what it is a state of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    SubprocVecEnv,
    VecCheckNan,
    VecEnv,
    VecEnvWrapper,
    VecExtractDictObs,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
    VecTransposeImage,
)

from driftproof.learner.rollout import HostObservation
from driftproof.ppo.tensor_vec_env import TensorVecEnv
from driftproof.ppo.vector_env import GymnasiumVecEnv
from driftproof.state.schema import (
    Rule,
    anything,
    count,
    items,
    like,
    mapping,
    number,
    numbers,
    optional,
    row,
    table,
    text,
)

_ENV_WRAPPERS: dict[type, str] = {Monitor: "rewards", TimeLimit: "_elapsed_steps"}
"""Wrappers of single environments, and the attribute that holds their state within an episode."""

_VEC_WRAPPERS: dict[type[VecEnvWrapper], tuple[str, ...]] = {
    VecNormalize: ("old_obs", "returns"),
    VecMonitor: ("episode_returns", "episode_lengths", "episode_count"),
    VecTransposeImage: (),
    VecExtractDictObs: (),
    VecCheckNan: (),
}
"""Wrappers of vector environments, and their attributes with the state of running episodes."""


_STATEFUL_WRAPPERS = (
    *("FrameStackObservation", "DelayObservation", "MaxAndSkipObservation", "TimeAwareObservation"),
    *("NormalizeObservation", "NormalizeReward", "StickyAction", "RepeatAction", "RecordEpisodeStatistics"),
    *("AtariPreprocessing", "MaxAndSkipEnv", "EpisodicLifeEnv", "StickyActionEnv", "NoopResetEnv", "AtariWrapper"),
)
"""Wrappers with state of an episode that cannot be read."""


def can_continue(env: VecEnv) -> bool:
    """Whether the state of all environments, and of the wrappers around them, can be saved."""
    base, wrappers = env.unwrapped, list(_wrappers(env))
    if not isinstance(base, TensorVecEnv | DummyVecEnv | SubprocVecEnv) or not _offer_states(base):
        return False
    if sum(isinstance(wrapper, VecNormalize) for wrapper in wrappers) > 1:
        return False  # Only one of them is part of the agent's state.
    if not all(_is_known(wrapper) or hasattr(type(wrapper), "state_dict") for wrapper in wrappers):
        return False
    if isinstance(base, TensorVecEnv):
        return True
    chains = base.env_method("__str__")
    return not any(f"<{name}<" in chain for name in _STATEFUL_WRAPPERS for chain in chains)


def environment_states(env: VecEnv) -> dict[str, Any] | None:
    """States of all environments and wrappers; ``None`` if one of them cannot be saved."""
    if not can_continue(env):
        return None
    base = env.unwrapped
    wrappers = [[type(wrapper).__name__, _wrapper_state(wrapper)] for wrapper in _wrappers(env)]
    if isinstance(base, TensorVecEnv):
        return {"environments": [{"environment": state} for state in base.states()], "wrappers": wrappers}
    states = [{"environment": state} for state in base.env_method("state_dict")]
    for kind, name in _ENV_WRAPPERS.items():
        wrapped = [i for i, is_wrapped in enumerate(base.env_is_wrapped(kind)) if is_wrapped]
        for i, value in zip(wrapped, base.env_method("get_wrapper_attr", name, indices=wrapped), strict=True):
            states[i][name] = value
    return {"environments": states, "wrappers": wrappers}


def check_environment_states(env: VecEnv | None, envs: int, states: Any, path: tuple[Any, ...]) -> None:
    """Raise a ``CheckpointError`` unless these are states of ``envs`` environments, and of the wrappers around them.

    The content of environments' own states is not checked.
    """
    inner: dict[str, Rule] = {"rewards": items(number()), "_elapsed_steps": optional(count())}
    states_of = table({"environment": anything}, inner)
    wrappers: Rule = items(row(text, mapping(anything)))
    table({"environments": items(states_of, envs), "wrappers": wrappers})(states, path)
    here = [] if env is None or env.num_envs != envs else list(_wrappers(env))
    if [type(each).__name__ for each in here] != [name for name, _ in states["wrappers"]]:
        return  # Nothing to restore.
    for i, wrapper in enumerate(here):
        if _is_known(wrapper):
            _wrapper_rule(wrapper)(states["wrappers"][i][1], (*path, "wrappers", i, 1))


def _wrapper_rule(wrapper: VecEnvWrapper) -> Rule:
    if not isinstance(wrapper, VecNormalize):
        return like(_wrapper_state(wrapper))
    # Before the first reset, arrays have no shape yet.
    space, envs = wrapper.venv.observation_space, wrapper.num_envs
    parts = space.spaces if isinstance(space, spaces.Dict) else {"": space}
    rules = {key: numbers((envs, *(part.shape or ())), [np.dtype(part.dtype)]) for key, part in parts.items()}
    observations = table(rules) if isinstance(space, spaces.Dict) else rules[""]
    return table({"old_obs": observations, "returns": numbers((envs,))})


def restore_environments(env: VecEnv, states: Mapping[str, Any]) -> bool:
    """Restore the states of all environments; ``False`` if these environments do not fit them."""
    base, wrappers = env.unwrapped, list(_wrappers(env))
    if not can_continue(env) or [name for name, _ in states["wrappers"]] != [type(each).__name__ for each in wrappers]:
        return False
    inner = [state["environment"] for state in states["environments"]]
    if isinstance(base, TensorVecEnv) != all(isinstance(state, Mapping) and "seeds" in state for state in inner):
        return False  # Tensor environments and others have different states.
    without_learning(env)
    if isinstance(base, TensorVecEnv):
        base.load_states(inner)
    else:
        _restore_each(base, states["environments"])
    for wrapper, (_, state) in zip(wrappers, states["wrappers"], strict=True):
        _restore_wrapper(wrapper, state)
    return True


def _restore_each(base: VecEnv, states: Sequence[Mapping[str, Any]]) -> None:
    for i, state in enumerate(states):
        base.env_method("load_state_dict", state["environment"], indices=[i])
        for kind, name in _ENV_WRAPPERS.items():
            if name in state and all(base.env_is_wrapped(kind, indices=[i])):
                # A Monitor appends to its list of rewards, which a file may hold as a tuple.
                value = list(state[name]) if isinstance(state[name], tuple) else state[name]
                base.env_method("set_wrapper_attr", name, value, indices=[i])


def lasting_states(env: VecEnv) -> list[dict[str, Any]] | None:
    """``lasting_state`` of all environments; ``None`` if they have none."""
    base = env.unwrapped
    if not isinstance(base, DummyVecEnv | SubprocVecEnv | GymnasiumVecEnv) or not base.has_attr("lasting_state"):
        return None
    return base.get_attr("lasting_state")


def restore_lasting(env: VecEnv, states: Sequence[Mapping[str, Any]]) -> bool:
    """Restore ``lasting_state`` of all environments; ``False`` if these environments do not fit it."""
    base, here = env.unwrapped, lasting_states(env)
    # Compared here, as an error would end an environment's process.
    if here is None or [state["specification"] for state in here] != [state["specification"] for state in states]:
        return False
    if isinstance(base, GymnasiumVecEnv):
        base.env.unwrapped.set_attr("lasting_state", list(states))
    else:
        for i, state in enumerate(states):
            base.env_method("set_wrapper_attr", "lasting_state", state, indices=[i])
    return True


def without_learning(env: VecEnv) -> HostObservation:
    """Reset without updating the statistics of observations."""
    normalizers = [wrapper for wrapper in _wrappers(env) if isinstance(wrapper, VecNormalize)]
    training = [normalizer.training for normalizer in normalizers]
    for normalizer in normalizers:
        normalizer.training = False
    try:
        return env.reset()  # type: ignore[return-value]
    finally:
        for normalizer, before in zip(normalizers, training, strict=True):
            normalizer.training = before


def generator_states(env: VecEnv) -> list[dict[str, Any]] | None:
    """States of the environments' random generators; ``None`` if they cannot be accessed."""
    base = env.unwrapped
    if not isinstance(base, DummyVecEnv | SubprocVecEnv) or not base.has_attr("np_random"):
        return None
    return [generator.bit_generator.state for generator in base.get_attr("np_random")]


def restore_generators(env: VecEnv, states: Sequence[Mapping[str, Any]]) -> None:
    """Restore every environment's random generator."""
    base = env.unwrapped
    if generator_states(env) is None:
        return
    for i, (generator, state) in enumerate(zip(base.get_attr("np_random"), states, strict=True)):
        generator.bit_generator.state = state
        # From another process, get_attr() returns copies.
        base.set_attr("np_random", generator, indices=[i])


def renormalized(env: VecEnv) -> HostObservation | None:
    """The last observations, normalised with the present statistics; ``None`` if further wrappers changed them."""
    for wrapper in _wrappers(env):
        if isinstance(wrapper, VecNormalize):
            return wrapper.normalize_obs(wrapper.get_original_obs())
        if not isinstance(wrapper, VecMonitor | VecCheckNan):
            return None
    return None


def _wrappers(env: VecEnv) -> Iterator[VecEnvWrapper]:
    """Wrappers of a vector environment, outermost first."""
    while isinstance(env, VecEnvWrapper):
        yield env
        env = env.venv


def _offer_states(base: VecEnv) -> bool:
    if not all(base.has_attr(name) for name in ("state_dict", "load_state_dict")):
        return False
    return all(base.get_attr("continues")) if base.has_attr("continues") else True


def _is_known(wrapper: VecEnvWrapper) -> bool:
    return isinstance(wrapper, VecFrameStack) or type(wrapper) in _VEC_WRAPPERS


def _wrapper_state(wrapper: VecEnvWrapper) -> dict[str, Any]:
    if isinstance(wrapper, VecFrameStack):
        stacked = wrapper.stacked_obs
        if hasattr(stacked, "sub_stacked_observations") and stacked.sub_stacked_observations:
            return {key: part.stacked_obs for key, part in stacked.sub_stacked_observations.items()}
        return {"": stacked.stacked_obs}
    if type(wrapper) in _VEC_WRAPPERS:
        return {name: getattr(wrapper, name) for name in _VEC_WRAPPERS[type(wrapper)]}
    own: dict[str, Any] = wrapper.state_dict()
    return own


def _restore_wrapper(wrapper: VecEnvWrapper, state: Mapping[str, Any]) -> None:
    if isinstance(wrapper, VecFrameStack):
        for key, value in state.items():
            stacked: Any = wrapper.stacked_obs
            (stacked.sub_stacked_observations[key] if key else stacked).stacked_obs = value
    elif type(wrapper) in _VEC_WRAPPERS:
        for name in _VEC_WRAPPERS[type(wrapper)]:
            setattr(wrapper, name, state[name])
    else:
        wrapper.load_state_dict(state)
