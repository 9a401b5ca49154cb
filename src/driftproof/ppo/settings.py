"""The agent's settings: which are right, which go together, and which of them can change while it trains."""

from __future__ import annotations

import difflib
import inspect
import os
import warnings
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

from stable_baselines3.common.policies import ActorCriticPolicy
from torch import Tensor
from torch.optim import Optimizer

from driftproof._arguments import ArgumentError, check_count, check_flag, check_number, check_option
from driftproof._unused import without_unused
from driftproof.learner.adversary import check_adversarial
from driftproof.learner.entropy import EntropySchedule
from driftproof.learner.hyperparams import Hyperparameter, Hyperparameters, Schedule, base_and_schedule
from driftproof.learner.kl import KLPenalty, StopMode
from driftproof.nn.actor_critic import AdaptedPolicy
from driftproof.nn.heads import CLIP_MODES, QuantileHead
from driftproof.nn.policies import DistributionalPolicy
from driftproof.optim import UPGDW, AdaptiveUPGD, VarianceGradientScaler
from driftproof.ppo.optimizers import check_options, optimizer_class, unused_options
from driftproof.ppo.sb3_views import Scheduled

if TYPE_CHECKING:
    from driftproof.ppo.algorithm import DistributionalPPO

_DEFAULT_LEARNING_RATE = 3e-4

_LARGE = 1e6
"""Whatever is larger is a mistake, and would leave nothing of the networks."""
_LARGEST = 1e15
"""Of numbers that only bound others."""

BOUNDS: dict[str, dict[str, float]] = {
    "learning_rate": {"at_least": 0, "at_most": _LARGE},
    "gamma": {"at_least": 0, "at_most": 1},
    "gae_lambda": {"at_least": 0, "at_most": 1},
    "clip_range": {"at_least": 0, "at_most": _LARGEST},
    "clip_range_vf": {"above": 0, "at_most": _LARGEST},
    "ent_coef": {"at_least": 0, "at_most": _LARGE},
    "vf_coef": {"at_least": 0, "at_most": _LARGE},
    "max_grad_norm": {"above": 0, "at_most": _LARGEST},
    "target_kl": {"above": 0, "at_most": _LARGEST},
    "n_epochs": {"at_least": 1, "at_most": _LARGE},
    "cvar_alpha": {"above": 0, "at_most": 1},
}
"""Of hyper-parameters."""
_VGS_BOUNDS: dict[str, dict[str, float]] = {
    "alpha": {"at_least": 0, "at_most": _LARGEST},
    "beta": {"at_least": 0, "below": 1},
    "min_scaling_factor": {"above": 0, "at_most": 1},
    "variance_cap": {"above": 0, "at_most": _LARGEST},
    "warmup_steps": {"at_least": 0, "at_most": _LARGEST},
}
_OPTIMIZER_BOUNDS: dict[str, dict[str, float]] = {
    **{key: {"at_least": 0, "below": 1} for key in ("beta1", "beta2", "beta_utility", "noise_beta", "momentum")},
    "temperature": {"above": 0, "at_most": _LARGE},
    **{key: {"at_least": 0, "at_most": _LARGE} for key in ("weight_decay", "sigma", "eps", "min_noise_std")},
    "dampening": {"at_least": -_LARGE, "at_most": _LARGE},
}
_COUNTS = (
    "n_steps",
    "batch_size",
    "n_epochs",
    "sequence_length",
    "skip_limit",
    "stats_window_size",
)
_FLAGS = ("normalize_advantage", "use_sde", "variance_gradient_scaling", "cuda_graph", "mixed_precision")
_OPTIONAL = ("clip_range_vf", "target_kl", "cvar_alpha")
_NOT_GIVEN = "it was not given when the agent was made"
SCHEDULED = ("learning_rate", "clip_range", "clip_range_vf")

_HEAD_ARGUMENTS = {
    **dict.fromkeys(("num_quantiles", "huber_kappa"), "quantile"),
    **dict.fromkeys(("num_atoms", "v_min", "v_max"), "categorical"),
}
_MEMORY_ARGUMENTS = (
    *("lstm_hidden_size", "n_lstm_layers", "lstm_kwargs"),
    *("shared_recurrence", "shared_lstm", "enable_critic_lstm"),
)

_BUILT_IN = "it is built into the networks"
_SHAPE = "it is the shape of rollouts and minibatches"
_FIXED = {
    "n_steps": _SHAPE,
    "batch_size": _SHAPE,
    "sequence_length": _SHAPE,
    **dict.fromkeys(
        (
            "lstm_hidden_size",
            "n_lstm_layers",
            "net_arch",
            "num_quantiles",
            "huber_kappa",
            "num_atoms",
            "v_min",
            "v_max",
        ),
        _BUILT_IN,
    ),
    "twin_critics": _BUILT_IN,
    "adversarial_ratio": "it decides how minibatches are cut",
    "optimizer_class": "the state of one optimizer is of no use to another",
}


class Setting:
    """An attribute of the agent that is a hyper-parameter: reads and writes go to the one owner, ``hyperparams``.

    Until there is one, because networks are built in a second phase, values wait in ``_initial``.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, agent: Any, owner: type | None = None) -> Any:
        if agent is None:
            return self
        owned = agent.__dict__.get("hyperparams")
        if owned is not None and self.name in owned:
            if self.name in SCHEDULED[1:]:
                return Scheduled(owned[self.name], owned.schedule(self.name))
            return owned[self.name]
        return agent.__dict__.setdefault("_initial", {}).get(self.name)

    def __set__(self, agent: Any, value: Any) -> None:
        owned = agent.__dict__.get("hyperparams")
        if owned is None:
            agent.__dict__.setdefault("_initial", {})[self.name] = value
        elif self.name in _OPTIONAL and (value is None or self.name not in owned):
            set_optional(agent, self.name, value)
        elif callable(value) and not isinstance(value, Scheduled) and self.name in SCHEDULED:
            owned.set_schedule(self.name, value)
        else:
            owned[self.name] = value


def check_mapping(name: str, value: Any) -> dict[str, Any]:
    """A copy of an argument that maps names to values; ``None`` is none."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a mapping from names to values, not {value!r}")
    return dict(value)


def check_keywords(argument: str, given: Iterable[str], kinds: Iterable[type[Any]], taken: Iterable[str]) -> None:
    """Refuse names that a class does not know with the nearest that it does.

    Args:
        argument: Whose keys they are.
        given: The names.
        kinds: The class, and those that its constructor passes arguments on to.
        taken: Arguments that the agent gives itself.
    """
    kinds = list(kinds)
    known = [
        name
        for kind in kinds
        for name, parameter in inspect.signature(kind).parameters.items()
        if name not in taken and parameter.kind is not parameter.VAR_KEYWORD
    ]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise TypeError(f"{argument} has {name!r}, which {kinds[0].__name__} does not know; {hint}")


def kl_penalty_settings(kl_penalty: Any) -> dict[str, Any] | None:
    """Arguments of the penalty; ``None`` without one."""
    if isinstance(kl_penalty, bool):
        return {} if kl_penalty else None
    if not isinstance(kl_penalty, Mapping):
        raise TypeError(f"kl_penalty must be True, False or a mapping from names to values, not {kl_penalty!r}")
    check_keywords("kl_penalty", kl_penalty, [KLPenalty], taken=("target", "device"))
    return dict(kl_penalty)


def resolve_learning_rate(learning_rate: float | Schedule | None, optimizer_kwargs: Mapping[str, Any]) -> Any:
    """The learning rate that rules: of the agent, or of the optimizer's arguments."""
    lr = optimizer_kwargs.get("lr")
    if lr is None:
        return _DEFAULT_LEARNING_RATE if learning_rate is None else learning_rate
    if learning_rate is not None and learning_rate != lr:
        raise ValueError(
            f"two learning rates: learning_rate={learning_rate!r} and optimizer_kwargs['lr']={lr!r}; give one of them"
        )
    return lr


def check_settings(agent: DistributionalPPO) -> None:
    """Raise an error that names the argument that is wrong, or the arguments that contradict each other."""
    initial = agent._initial
    for name, bounds in BOUNDS.items():
        value = initial[name]
        if value is None and name in _OPTIONAL:
            continue
        if callable(value) and name in SCHEDULED:
            value, _ = base_and_schedule(name, value)
        check_number(name, value, **bounds)
    check_number("return_scale_decay", agent.return_scale_decay, at_least=0, below=1)
    for name in _COUNTS:
        count = agent._stats_window_size if name == "stats_window_size" else getattr(agent, name)
        if count is not None or name != "sequence_length":
            check_count(name, count, at_least=1)
    if agent.seed is not None:
        check_count("seed", agent.seed)
    for name in _FLAGS:
        check_flag(name, getattr(agent, name))
    if not isinstance(agent.tensorboard_log, str | os.PathLike | None):
        raise TypeError(f"tensorboard_log must be a path, not {agent.tensorboard_log!r}")
    optimizer_class(agent.optimizer_class)
    check_options(agent.optimizer_class, agent.optimizer_kwargs)
    check_adversarial(agent.adversarial)
    _check_combinations(agent)
    EntropySchedule(**agent.entropy_kwargs).check(initial["ent_coef"])


def without_unused_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a file without those that have no effect, which earlier versions took and which are refused now."""
    result = dict(settings)
    options, scaler = result.get("optimizer_kwargs"), result.get("vgs_kwargs")
    if isinstance(options, Mapping) and "optimizer_class" in result:
        result["optimizer_kwargs"] = without_unused(options, unused_options(result["optimizer_class"], options))
    if isinstance(scaler, Mapping) and scaler.get("enabled") is False:
        result["vgs_kwargs"] = {"enabled": False}
    networks = result.get("policy_kwargs")
    if isinstance(networks, Mapping) and networks.get("shared_lstm") and networks.get("enable_critic_lstm", True):
        # It had this meaning, which sb3-contrib does not give it.
        others = {name: value for name, value in networks.items() if name != "shared_lstm"}
        result["policy_kwargs"] = {**others, "shared_recurrence": True}
    return result


def _check_combinations(agent: DistributionalPPO) -> None:
    initial = agent._initial
    if agent.normalize_advantage and agent.env is not None and agent.n_steps * agent.n_envs == 1:
        raise ArgumentError(
            "n_steps * n_envs = 1: advantages of a single sample cannot be normalised; use longer rollouts, or "
            "normalize_advantage=False"
        )
    _check_stop(agent)
    if agent.value_clip_mode is not None:
        check_option("value_clip_mode", agent.value_clip_mode, CLIP_MODES)
        if initial["clip_range_vf"] is None:
            raise ValueError(f"value_clip_mode={agent.value_clip_mode!r} needs clip_range_vf, by how much to clip")
    if agent.kl_penalty_kwargs is not None and initial["target_kl"] is None:
        raise ValueError("kl_penalty needs target_kl, the KL divergence that it is to reach")
    if agent.vgs_kwargs and not agent.variance_gradient_scaling:
        raise ValueError("vgs_kwargs are given, but variance_gradient_scaling is off")
    check_keywords("vgs_kwargs", agent.vgs_kwargs, [VarianceGradientScaler], taken=("parameters",))
    if agent.vgs_kwargs.get("enabled") is False and len(agent.vgs_kwargs) > 1:
        raise ValueError("vgs_kwargs has enabled=False, and then nothing else in it has an effect")
    if agent.adversarial is not None and agent.cuda_graph:
        raise ValueError("cuda_graph=True does not capture attacks: leave out cuda_graph, or adversarial")
    _check_adapted(agent)
    _check_exploration(agent)
    check_device(agent)


def _check_adapted(agent: DistributionalPPO) -> None:
    """Refuse what a policy that was written for Stable-Baselines3 does not do."""
    if getattr(agent.policy_class, "predicts_distributions", True):
        return
    for name, value in {
        "use_sde": agent.use_sde,
        "cuda_graph": agent.cuda_graph,
        "cvar_alpha": agent._initial["cvar_alpha"],
    }.items():
        if value:
            raise ArgumentError(
                f"{name}={value!r} is for policies of driftproof; {agent.policy_class.__name__} derives from "
                "ActorCriticPolicy: derive it from driftproof.nn.policies.MlpPolicy"
            )


def _check_exploration(agent: DistributionalPPO) -> None:
    """Warn of settings of gSDE without it: Stable-Baselines3 takes them."""
    check_count("sde_sample_freq", agent.sde_sample_freq, at_least=-1)
    if agent.use_sde:
        return
    given = {"sde_sample_freq": agent.sde_sample_freq, **agent.policy_kwargs}
    for name, default in {"sde_sample_freq": -1, "full_std": True, "use_expln": False}.items():
        if given.get(name, default) != default:
            warnings.warn(f"{name}={given[name]!r} has no effect without use_sde=True", stacklevel=5)


def _check_stop(agent: DistributionalPPO) -> None:
    mode, target = agent.kl_stop_mode, agent._initial["target_kl"]
    patience, fraction = agent.kl_stop_patience, agent.kl_stop_fraction
    if mode is not None:
        check_option("kl_stop", mode, get_args(StopMode))
    if mode not in (None, "absolute") and target is None:
        raise ValueError(f"kl_stop={mode!r} needs target_kl, the KL divergence to stop at")
    if mode is None and target is not None and agent.kl_penalty_kwargs is None:
        raise ValueError(f"target_kl={target!r} has no use with kl_stop=None and without kl_penalty: give one of them")
    if patience is not None:
        check_count("kl_stop_patience", patience, at_least=1)
        if mode != "consecutive":
            raise ValueError(f'kl_stop_patience={patience} is for kl_stop="consecutive", not {mode!r}')
    if fraction is not None:
        check_number("kl_stop_fraction", fraction, at_least=0, below=1)
        if mode != "fraction":
            raise ValueError(f'kl_stop_fraction={fraction} is for kl_stop="fraction", not {mode!r}')


def check_device(agent: DistributionalPPO) -> None:
    """Refuse what only CUDA can do elsewhere."""
    for name in ("cuda_graph", "mixed_precision"):
        if getattr(agent, name) and agent.device.type != "cuda":
            raise ValueError(f"{name}=True needs device='cuda', not {agent.device.type!r}")


def check_policy(policy: Any, kwargs: Mapping[str, Any]) -> None:
    """Refuse classes that are no policies, and unknown arguments."""
    if not isinstance(policy, type) or not issubclass(policy, DistributionalPolicy | AdaptedPolicy):
        raise TypeError(f"policy must be a name or a subclass of DistributionalPolicy, not {policy!r}")
    if "use_sde" in kwargs:
        raise TypeError("policy_kwargs has 'use_sde', which is an argument of the agent: give it there")
    if issubclass(policy, AdaptedPolicy):
        taken = ("observation_space", "action_space", "lr_schedule", "optimizer_class", "optimizer_kwargs")
        check_keywords("policy_kwargs", kwargs, [policy.written, ActorCriticPolicy], taken=taken)
        return
    check_keywords("policy_kwargs", kwargs, [policy, DistributionalPolicy], taken=("observation_space", "action_space"))
    head = kwargs.get("value_head", "quantile")
    for name, needed in _HEAD_ARGUMENTS.items():
        if name in kwargs and head != needed:
            raise ValueError(f"policy_kwargs has {name!r}, which is for value_head={needed!r}, not {head!r}")
    for name in _MEMORY_ARGUMENTS:
        if name in kwargs and kwargs.get("core", policy.default_core) == "none":
            raise ValueError(
                f"policy_kwargs has {name!r}, which is for policies with memory; {policy.__name__} has none"
            )


def policy_arguments(policy_kwargs: Mapping[str, Any], use_sde: bool) -> dict[str, Any]:
    """What a policy is made with, besides its spaces: ``policy_kwargs``, and what the agent knows of exploration."""
    # Policies of one's own need not know of gSDE.
    return {**policy_kwargs, "use_sde": True} if use_sde else dict(policy_kwargs)


def check_heads(agent: DistributionalPPO) -> None:
    """Refuse to clip what the value heads do not have."""
    if agent.value_clip_mode == "per_quantile" and not isinstance(agent.policy.heads[0], QuantileHead):
        raise ValueError("value_clip_mode='per_quantile' needs value_head='quantile' in policy_kwargs")


def collect_hyperparams(agent: DistributionalPPO) -> Hyperparameters:
    """All numbers that may change while the agent trains, with the places where they act."""
    initial, optimizer, vgs = agent._initial, agent.policy.optimizer, agent.vgs
    entries: dict[str, Hyperparameter] = {}
    for name, bounds in BOUNDS.items():
        if initial[name] is not None:
            base, schedule = base_and_schedule(name, initial[name])
            entries[name] = Hyperparameter(base, bounds, whole=name == "n_epochs", schedule=schedule)
    entries["learning_rate"].apply = partial(_set_group, optimizer, "lr")
    # Below it, what is set would not be in force.
    entries["ent_coef"].bounds = {**BOUNDS["ent_coef"], "at_least": float(agent.entropy.minimum)}
    if "target_kl" in entries:
        entries["target_kl"].apply = partial(_set_target_kl, agent)
    unused = unused_options(type(optimizer), optimizer.defaults)
    for key, value in optimizer.defaults.items():
        if key != "lr" and type(value) in (int, float):
            # Of others' optimizers it is not known what is right.
            bounds = _OPTIMIZER_BOUNDS.get(key, {"at_least": 0} if value >= 0 else {})
            if key == "eps" and isinstance(optimizer, UPGDW | AdaptiveUPGD):
                bounds = {"above": 0, "at_most": _LARGE}  # torch's own optimizers take 0, these do not.
            # Without momentum dampening has no effect, until momentum is set.
            needed = None if key == "dampening" else unused.get(key)
            apply = partial(_set_group, optimizer, key)
            entries[f"optimizer.{key}"] = Hyperparameter(value, bounds, apply=apply, unused=needed)
    for i, value in enumerate(optimizer.defaults.get("betas", ())):
        bounds = _OPTIMIZER_BOUNDS["beta1"]
        entries[f"optimizer.beta{i + 1}"] = Hyperparameter(value, bounds, apply=partial(_set_beta, optimizer, i))
    if vgs is not None:
        needed = None if vgs.enabled else "a scaler that is enabled"
        for key, bounds in _VGS_BOUNDS.items():
            apply = partial(setattr, vgs, key)
            entries[f"vgs.{key}"] = Hyperparameter(
                getattr(vgs, key), bounds, whole=key == "warmup_steps", apply=apply, unused=needed
            )
    if agent.adversary is not None:
        entries |= {f"adversary.{key}": entry for key, entry in agent.adversary.hyperparameters().items()}
    fixed = {
        name: _NOT_GIVEN if name in _OPTIONAL else "it is set when the agent is made"
        for name in inspect.signature(type(agent)).parameters
        if name not in entries
    }
    if vgs is None:
        fixed |= {f"vgs.{key}": "variance_gradient_scaling is off" for key in _VGS_BOUNDS}
    if agent.adversary is None:
        fixed |= dict.fromkeys(("adversary.epsilon", "adversary.robust_kl_coef"), "adversarial training is off")
    return Hyperparameters(entries, fixed | _FIXED)


def set_optional(agent: DistributionalPPO, name: str, value: Any) -> None:
    """Let a hyper-parameter that may be ``None`` act from now on, or no longer."""
    if value is None:
        _check_removable(agent, name)
        agent.hyperparams.remove(name, _NOT_GIVEN)
    else:
        base, schedule = base_and_schedule(name, value) if name in SCHEDULED else (value, None)
        check_number(name, base, **BOUNDS[name])
        apply = partial(_set_target_kl, agent) if name == "target_kl" else None
        agent.hyperparams.add(name, Hyperparameter(base, BOUNDS[name], schedule=schedule, apply=apply))
    agent._initial[name] = value
    if name == "target_kl" and value is None:
        agent.kl_stop.set_target(None)


def _check_removable(agent: DistributionalPPO, name: str) -> None:
    if name == "target_kl" and agent.kl_penalty is not None:
        raise ValueError("target_kl=None: the agent's kl_penalty needs the KL divergence that it is to reach")
    if name == "clip_range_vf" and agent.value_clip_mode is not None:
        raise ValueError(f"clip_range_vf=None: value_clip_mode={agent.value_clip_mode!r} needs it")


def _set_group(optimizer: Optimizer, key: str, value: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group[key], Tensor):
            group[key].fill_(value)
        else:
            group[key] = value


def _set_beta(optimizer: Optimizer, index: int, value: float) -> None:
    for group in optimizer.param_groups:
        betas = list(group["betas"])
        betas[index] = value
        group["betas"] = tuple(betas)


def _set_target_kl(agent: DistributionalPPO, value: float) -> None:
    if agent.kl_stop_mode is not None:
        agent.kl_stop.set_target(value)
    if agent.kl_penalty is not None:
        agent.kl_penalty.set_target(value)
