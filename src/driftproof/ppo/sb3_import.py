"""Import of files of Stable-Baselines3's PPO and sb3-contrib's RecurrentPPO. No pickle in them is opened."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import gymnasium
import torch
from gymnasium import spaces
from stable_baselines3.common.type_aliases import GymEnv
from torch import Tensor
from torch.optim import Optimizer

from driftproof._arguments import check_number
from driftproof.nn.heads import Scale
from driftproof.optim import UPGDW, AdaptiveUPGD
from driftproof.ppo.algorithm import DistributionalPPO
from driftproof.ppo.components import load_state
from driftproof.ppo.generators import unchanged_generators
from driftproof.ppo.sb3_networks import SB3Networks
from driftproof.ppo.sb3_settings import SB3Settings
from driftproof.ppo.settings import policy_arguments
from driftproof.settings.drift import BEFORE
from driftproof.state import CheckpointError, legacy, printable
from driftproof.state.sb3 import read_data

_MOMENTS: dict[type[Optimizer], tuple[str, str]] = {
    torch.optim.Adam: ("exp_avg", "exp_avg_sq"),
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq"),
    UPGDW: ("exp_avg", "exp_avg_sq"),
    AdaptiveUPGD: ("first_moment", "sec_moment"),
}
"""Names of Adam's two moments in the state of each optimizer."""
_TAKEN = ("policy", "policy.optimizer")
_NOT_IN_THE_FILE = (
    "value head: the mean of every critic's quantiles is the value in the file",
    "not in the file: return scale, gradient scaling (begin with the next rollout)",
    "not in the file: statistics of VecNormalize; if it was trained with them, use driftproof.ppo.from_sb3(path, env) "
    "with your VecNormalize around env",
)


class SB3Import(NamedTuple):
    """An imported agent, and a report in lines of what was loaded and what was not."""

    agent: DistributionalPPO
    report: list[str]


def is_of_sb3(found: legacy.LegacyCheckpoint) -> bool:
    """Whether a file is of Stable-Baselines3, with an actor and a critic that predicts one value."""
    value = found.components["policy"].get("value_net.bias")
    return found.format == "stable_baselines3" and isinstance(value, Tensor) and tuple(value.shape) == (1,)


def from_sb3(
    path: str | os.PathLike[str],
    env: GymEnv | str,
    *,
    reward_scale: float = 1.0,
    adam_moments: bool = False,
    device: torch.device | str = "auto",
    **settings: Any,
) -> DistributionalPPO:
    """Import an agent from a zip file of Stable-Baselines3's PPO or sb3-contrib's RecurrentPPO.

    It acts as the one in the file does, and its critics predict the same values, as the mean of their quantiles.
    Settings are those in the file where they are plain values, else the defaults. Pickles in the file are never opened.

    Args:
        path: The file.
        env: The environment that the agent was trained in, or another with the same spaces. Statistics of observations
            are not in the file: if there were any, put your ``VecNormalize`` with them around it.
        reward_scale: Factor of the file's values. If rewards were divided by a running standard deviation
            (``VecNormalize(norm_reward=True)``), use that: ``sqrt(ret_rms.var + epsilon)``.
        adam_moments: Load the file's moments of Adam, for parameters that are the same in both. They are of gradients
            that were clipped together with those of a value loss in units of rewards. Where that loss was large they
            are far smaller than the gradients to come, and the first steps are too long; where rewards were normalised
            they are about right.
        device: Device of the agent.
        settings: Arguments of :class:`DistributionalPPO` that replace those in the file.

    Raises:
        CheckpointError: The file is damaged, has another format, or its networks cannot be converted or do not fit.
    """
    imported = import_sb3(path, env, reward_scale=reward_scale, adam_moments=adam_moments, device=device, **settings)
    return imported.agent


def import_sb3(
    path: str | os.PathLike[str],
    env: GymEnv | str,
    *,
    reward_scale: float = 1.0,
    adam_moments: bool = False,
    device: torch.device | str = "auto",
    **settings: Any,
) -> SB3Import:
    """:func:`from_sb3` with a report of what was loaded and what was not."""
    check_number("reward_scale", reward_scale, above=0)
    name = os.fspath(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # The report has it.
        found = legacy.read(path)
    if found.format != "stable_baselines3":
        raise CheckpointError(f"{name} is not a zip file of Stable-Baselines3: its format is {found.format}")
    networks = SB3Networks(found.components["policy"], name)
    optimizer = found.components.get("policy.optimizer", {})
    read = SB3Settings(read_data(path), networks, _learning_rate(optimizer), name)
    kwargs = {**networks.policy_kwargs(), **read.policy_classes(dict(settings.get("policy_kwargs") or {}))}
    if kwargs.get("value_head", "quantile") != "quantile":
        raise ValueError(
            'policy_kwargs["value_head"] must be "quantile": the value in the file becomes the mean of quantiles'
        )
    made = gymnasium.make(env) if isinstance(env, str) else env
    try:
        # The file's networks were trained without layer normalisation, also if the caller wants the rest of the kit.
        drift = {"layer_norm": False} if settings.get("drift_kit") else BEFORE
        arguments = {**drift, "policy": networks.policy(_observation_space(made)), **read.arguments, **settings}
        arguments |= {"policy_kwargs": kwargs, "device": device, "_init_setup_model": False}
        agent = DistributionalPPO(env=made, **arguments)
        report = [*read.report, _build(agent, networks, name)]
    except BaseException:
        if made is not env:
            made.close()
        raise
    agent.return_scale.start_from(Scale(0.0, reward_scale))
    agent.num_timesteps = read.num_timesteps
    agent.state_was_loaded()
    report.append(_take_moments(agent, networks, optimizer) if adam_moments else "policy.optimizer: begins anew")
    report += [f"{printable(part, 80)}: not loaded" for part in found.components if part not in _TAKEN]
    return SB3Import(agent, [*report, *_NOT_IN_THE_FILE])


def _learning_rate(optimizer: Mapping[str, Any]) -> Any:
    groups = optimizer.get("param_groups")
    first = groups[0] if isinstance(groups, list) and groups else None
    return first.get("lr") if isinstance(first, dict) else None


def _observation_space(env: Any) -> spaces.Space[Any]:
    """Observation space of a single environment, also where there are several."""
    space: spaces.Space[Any] = getattr(env, "single_observation_space", env.observation_space)
    return space


def _build(agent: DistributionalPPO, networks: SB3Networks, name: str) -> str:
    """Build the agent's networks, with the weights of the file."""
    kwargs = agent.policy_kwargs
    state = networks.mapped(kwargs.get("num_quantiles", 32), 2 if kwargs.get("twin_critics", True) else 1)
    _check_fits(agent, state, name)
    agent._setup_model()
    own = agent.policy.state_dict()
    typed = {key: state[key].to(tensor.dtype) for key, tensor in own.items()}
    load_state(agent.policy, {"policy": agent.policy}, {"policy": typed}, exact_match=True)
    return f"policy: {agent.policy_class.__name__}, all {len(networks.tensors)} tensors loaded"


def _check_fits(agent: DistributionalPPO, state: Mapping[str, Tensor], name: str) -> None:
    """Compare weights with networks on the meta device, which take no memory.

    Raises:
        CheckpointError: They do not fit networks for this environment.
    """
    try:
        with unchanged_generators(), torch.device("meta"):
            kwargs = policy_arguments(agent.policy_kwargs, agent.use_sde)
            policy = agent.policy_class(agent.observation_space, agent.action_space, **kwargs)
    except (ValueError, TypeError, AssertionError, RuntimeError) as error:
        raise CheckpointError(f"{name} cannot be imported for this environment: {error}") from error
    wanted = {key: tuple(tensor.shape) for key, tensor in policy.state_dict().items()}
    given = {key: tuple(tensor.shape) for key, tensor in state.items()}
    differing = sorted(key for key in wanted.keys() | given.keys() if wanted.get(key) != given.get(key))
    if differing:
        lines = [
            f"{key[:80]} is {given.get(key, 'missing')} in the file and {wanted.get(key, 'missing')} here"
            for key in differing[:3]
        ]
        more = f", and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise CheckpointError(
            f"{name} does not fit observations {_short(agent.observation_space)} and actions "
            f"{_short(agent.action_space)}: {'; '.join(lines)}{more}. Pass the environment that it was trained in"
        )


def _short(space: Any) -> str:
    return str(space)[:80]


def _take_moments(agent: DistributionalPPO, networks: SB3Networks, state: Mapping[Any, Any]) -> str:
    """Load the moments of Adam into the optimizer, for parameters that are the same in both."""
    optimizer = agent.policy.optimizer
    moments = _MOMENTS.get(type(optimizer))
    if moments is None:
        return f"policy.optimizer: begins anew, since {type(optimizer).__name__} has no moments of Adam"
    sb3_indices = {name: index for index, name in enumerate(networks.parameter_names())}
    same, entries = networks.one_to_one(), state.get("state")
    taken: dict[int, dict[str, Tensor]] = {}
    for index, (name, parameter) in enumerate(agent.policy.named_parameters()):
        entry = entries.get(sb3_indices[same[name]]) if isinstance(entries, dict) and name in same else None
        if entry is not None and _is_adam(entry, parameter):
            first, second = moments
            taken[index] = {"step": entry["step"], first: entry["exp_avg"], second: entry["exp_avg_sq"]}
    given = {"state": taken, "param_groups": optimizer.state_dict()["param_groups"]}
    load_state(agent.policy, {"optimizer": optimizer}, {"optimizer": given}, exact_match=True)
    count = len(list(agent.policy.parameters()))
    return f"policy.optimizer: moments of Adam loaded for {len(taken)} of {count} parameters; others begin anew"


def _is_adam(entry: Any, parameter: Tensor) -> bool:
    """Whether a state is Adam's, of a parameter of this shape."""
    if not isinstance(entry, dict) or not {"step", "exp_avg", "exp_avg_sq"} <= entry.keys():
        return False
    first, second, step = entry["exp_avg"], entry["exp_avg_sq"], entry["step"]
    if not all(isinstance(t, Tensor) and t.is_floating_point() and t.isfinite().all() for t in (first, second, step)):
        return False
    return (
        first.shape == second.shape == parameter.shape and bool((second >= 0).all()) and step.numel() == 1 and step > 0
    )
