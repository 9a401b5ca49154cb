"""Validation of the agent's settings, and which of them can change while it trains."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import VecEnv, unwrap_vec_normalize
from torch import Tensor
from torch.optim import Optimizer

from driftproof._arguments import ArgumentError
from driftproof._registry import OPTIMIZERS
from driftproof.envs.tensor.base import TensorEnv
from driftproof.learner.adversary import check_adversarial
from driftproof.learner.hyperparams import Hyperparameter, Hyperparameters
from driftproof.nn.actor_critic import AdaptedPolicy, as_policy
from driftproof.nn.heads import QuantileHead
from driftproof.nn.policies import NAMED_POLICIES, DistributionalPolicy
from driftproof.optim import UPGD, UPGDW, AdaptiveUPGD, VarianceGradientScaler
from driftproof.ppo.optimizers import check_options, optimizer_class, optimizer_in_policy_kwargs, unused_options
from driftproof.ppo.sb3_views import Scheduled
from driftproof.ppo.tensor_vec_env import TensorVecEnv
from driftproof.settings.adversarial import AdversarialSettings
from driftproof.settings.agent import DEFAULT_LEARNING_RATE, HYPERPARAMETERS, AgentSettings
from driftproof.settings.definition import check_names, defaults_of, settings_of
from driftproof.settings.optimizers import BOUNDS as OPTIMIZER_BOUNDS
from driftproof.settings.policy import PolicySettings, unused_by_policy
from driftproof.settings.scaling import VGSSettings
from driftproof.settings.schedules import base_and_schedule
from driftproof.settings.unused import without_unused

if TYPE_CHECKING:
    from driftproof.ppo.algorithm import DistributionalPPO

VGS_HYPERPARAMETERS = {name: each for name, each in settings_of(VGSSettings).items() if each.about.is_hyperparameter}
_VGS_PREFIX = "vgs_"
"""Prefix of the agent's arguments that are single items of ``vgs_kwargs``."""
_OFF = {name: value for name, value in AgentSettings.off().items() if value is not None}
_OPTIONAL = [
    name
    for name, each in HYPERPARAMETERS.items()
    if each.is_optional and not each.has_file_default and name not in _OFF
]
"""Hyper-parameters that may be ``None``; most of the drift kit are numbers once the agent is built."""
_NOT_GIVEN = "the agent was constructed without it"


class HyperparameterAttribute:
    """An attribute of the agent that is a hyper-parameter: reads and writes go to ``hyperparams``."""

    def __init__(self, name: str) -> None:
        self.name, self.setting = name, HYPERPARAMETERS[name]

    def __get__(self, agent: Any, owner: type | None = None) -> Any:
        if agent is None:
            return self
        owned = agent.hyperparams
        if self.name not in owned:
            return None
        if self.setting.is_scheduled and self.name != "learning_rate":
            return Scheduled(owned[self.name], owned.schedule(self.name))
        return owned[self.name]

    def __set__(self, agent: Any, value: Any) -> None:
        owned = agent.hyperparams
        if self.name in _OPTIONAL and (value is None or self.name not in owned):
            set_optional(agent, self.name, value)
        elif callable(value) and not isinstance(value, Scheduled) and self.setting.is_scheduled:
            owned.set_schedule(self.name, value)
        else:
            owned[self.name] = value


def resolved(given: AgentSettings) -> AgentSettings:
    """Arguments of an agent in canonical form, from all the forms in which they may be given."""
    policy_kwargs, optimizer, optimizer_kwargs = optimizer_in_policy_kwargs(
        given.policy_kwargs or {}, given.optimizer_class, given.optimizer_kwargs or {}
    )
    is_scaled, vgs_kwargs = _resolved_vgs(given)
    parts = given.parts(is_recurrent(given.policy, policy_kwargs))
    if not getattr(as_policy(given.policy), "predicts_distributions", True):
        # Networks of a class that was written for Stable-Baselines3 are its own, and get observations as they are.
        of_networks = ("layer_norm", "recycle_dormant", "observation_normalizer", "drift_rewiring")
        parts |= {name: _OFF[name] for name in of_networks if getattr(given, name) is None}
    is_on_device = isinstance(given.env, TensorEnv | TensorVecEnv)
    if not given.drift_rewiring and (is_on_device or _is_normalized(given.env)):
        # Populations keep observations of the former on the device; those of the latter move as VecNormalize learns.
        of_raw = ("observation_normalizer", "drift_rewiring")
        parts |= {name: _OFF[name] for name in of_raw if getattr(given, name) is None}
    inner = policy_kwargs.get("layer_norm")
    if inner is not None and given.layer_norm not in (None, inner):
        raise ArgumentError(
            f"layer_norm={given.layer_norm!r} and policy_kwargs['layer_norm']={inner!r} are two values of one setting"
        )
    parts["layer_norm"] = parts["layer_norm"] if inner is None else inner
    if parts["layer_norm"]:
        policy_kwargs["layer_norm"] = True
    return replace(
        given,
        learning_rate=_resolved_learning_rate(given.learning_rate, optimizer_kwargs),
        policy_kwargs=policy_kwargs,
        optimizer_class=OPTIMIZERS.name(optimizer) if isinstance(optimizer, str) else optimizer,
        optimizer_kwargs=optimizer_kwargs,
        variance_gradient_scaling=is_scaled,
        vgs_kwargs=vgs_kwargs,
        **parts,
        # Hyper-parameter searches pass NumPy numbers, which torch and Python's generator do not accept.
        seed=None if given.seed is None else int(given.seed),
        sde_sample_freq=int(given.sde_sample_freq),
    )


def _is_normalized(env: Any) -> bool:
    """Whether ``VecNormalize`` normalises the observations of an environment."""
    wrapper = unwrap_vec_normalize(env) if isinstance(env, VecEnv) else None
    return wrapper is not None and wrapper.norm_obs


def is_recurrent(policy: Any, policy_kwargs: Mapping[str, Any]) -> bool:
    """Whether a policy, given as a name or a class, has a recurrent core with these arguments."""
    kind = NAMED_POLICIES.get(policy) if isinstance(policy, str) else as_policy(policy)
    core = policy_kwargs.get("core")  # None, too, is the policy's own.
    return bool((getattr(kind, "default_core", "lstm") if core is None else core) != "none")


def _resolved_vgs(given: AgentSettings) -> tuple[bool, dict[str, Any]]:
    """Whether gradients are scaled, and the arguments of the scaler, from all their argument names.

    Raises:
        ValueError: One setting has two values.
    """
    arguments = dict(given.vgs_kwargs or {})
    for key in settings_of(VGSSettings):
        value = getattr(given, _VGS_PREFIX + key, None)
        if value is None:
            continue
        if key in arguments and arguments[key] != value:
            raise ValueError(
                f"{_VGS_PREFIX}{key}={value!r} and vgs_kwargs[{key!r}]={arguments[key]!r} are two values of one setting"
            )
        if key != "enabled":
            arguments[key] = value
    switch, enabled = given.variance_gradient_scaling, given.vgs_enabled
    if switch is not None and enabled is not None and switch != enabled:
        raise ValueError(f"variance_gradient_scaling={switch!r} and vgs_enabled={enabled!r} are the same setting")
    is_scaled = enabled if switch is None else switch
    return True if is_scaled is None else is_scaled, arguments


def check_keywords(argument: str, given: Iterable[str], kinds: Iterable[type[Any]], taken: Iterable[str]) -> None:
    """Refuse keyword arguments that a class does not have; the error suggests the nearest name.

    Args:
        argument: Argument of the agent whose keys they are.
        given: Names of the keyword arguments.
        kinds: The class, and those that its constructor passes arguments on to.
        taken: Arguments that the agent itself passes.
    """
    kinds = list(kinds)
    known = [
        name
        for kind in kinds
        for name, parameter in inspect.signature(kind).parameters.items()
        if name not in taken and parameter.kind is not parameter.VAR_KEYWORD
    ]
    check_names(argument, given, known, kinds[0].__name__)


def penalty_arguments(given: AgentSettings) -> dict[str, Any] | None:
    """Arguments of the KL penalty; ``None`` without one."""
    if isinstance(given.kl_penalty, bool):
        return {} if given.kl_penalty else None
    return dict(given.kl_penalty)


def _resolved_learning_rate(learning_rate: Any, optimizer_kwargs: Mapping[str, Any]) -> Any:
    """The learning rate, from the agent's or the optimizer's arguments."""
    lr = optimizer_kwargs.get("lr")
    if lr is None:
        return DEFAULT_LEARNING_RATE if learning_rate is None else learning_rate
    if learning_rate is not None and learning_rate != lr:
        raise ValueError(
            f"two learning rates: learning_rate={learning_rate!r} and optimizer_kwargs['lr']={lr!r}; give one of them"
        )
    return lr


def check_settings(agent: DistributionalPPO) -> None:
    """Refuse arguments that do not fit the agent's classes, its environment or its device."""
    optimizer_class(agent.optimizer_class)
    check_options(agent.optimizer_class, agent.optimizer_kwargs)
    check_adversarial(agent.adversarial)
    if agent.normalize_advantage and agent.env is not None and agent.n_steps * agent.n_envs == 1:
        raise ArgumentError(
            "n_steps * n_envs = 1: advantages of a single sample cannot be normalised; use longer rollouts, or "
            "normalize_advantage=False"
        )
    if agent.vgs_kwargs and not agent.variance_gradient_scaling:
        raise ValueError("vgs_kwargs are given, but variance_gradient_scaling is off")
    check_keywords("vgs_kwargs", agent.vgs_kwargs, [VarianceGradientScaler], taken=("parameters",))
    if agent.vgs_kwargs.get("enabled") is False and len(agent.vgs_kwargs) > 1:
        raise ValueError("vgs_kwargs has enabled=False, so nothing else in it has an effect: remove the rest")
    _check_adapted(agent)
    _warn_of_exploration(agent)
    check_device(agent)


def without_unused_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a file without those that have no effect, which earlier versions accepted."""
    result = dict(settings)
    options, scaler = result.get("optimizer_kwargs"), result.get("vgs_kwargs")
    if isinstance(options, Mapping) and "optimizer_class" in result:
        result["optimizer_kwargs"] = without_unused(options, unused_options(result["optimizer_class"], options))
    if isinstance(scaler, Mapping) and scaler.get("enabled") is False:
        result["vgs_kwargs"] = {"enabled": False}
    networks = result.get("policy_kwargs")
    if isinstance(networks, Mapping) and networks.get("shared_lstm") and networks.get("enable_critic_lstm", True):
        # Earlier versions gave it this meaning, unlike sb3-contrib.
        others = {name: value for name, value in networks.items() if name != "shared_lstm"}
        result["policy_kwargs"] = {**others, "shared_recurrence": True}
    return result


def _check_adapted(agent: DistributionalPPO) -> None:
    """Refuse settings that a policy written for Stable-Baselines3 does not support."""
    if getattr(agent.policy_class, "predicts_distributions", True):
        return
    for name, value in {
        "use_sde": agent.use_sde,
        "layer_norm": agent.layer_norm,
        "recycle_dormant": agent.recycle_dormant,
        "cuda_graph": agent.cuda_graph,
        "cvar_alpha": agent.hyperparams.get("cvar_alpha"),
    }.items():
        if value:
            raise ArgumentError(
                f"{name}={value!r} needs a policy of driftproof, but {agent.policy_class.__name__} derives from "
                "ActorCriticPolicy: derive it from driftproof.nn.policies.MlpPolicy"
            )


def _warn_of_exploration(agent: DistributionalPPO) -> None:
    """Warn of settings of gSDE without gSDE, which Stable-Baselines3 accepts."""
    if agent.use_sde:
        return
    given = {"sde_sample_freq": agent.sde_sample_freq, **agent.policy_kwargs}
    defaults = defaults_of(AgentSettings) | defaults_of(PolicySettings)
    for name in ("sde_sample_freq", *unused_by_policy(use_sde=False)):
        if given.get(name, defaults[name]) != defaults[name]:
            warnings.warn(f"{name}={given[name]!r} has no effect without use_sde=True", stacklevel=5)


def check_device(agent: DistributionalPPO) -> None:
    """Refuse settings that need CUDA on other devices."""
    for name in ("cuda_graph", "mixed_precision"):
        if getattr(agent, name) and agent.device.type != "cuda":
            raise ValueError(f"{name}=True needs device='cuda', not {agent.device.type!r}")


def check_policy(policy: Any, kwargs: Mapping[str, Any]) -> None:
    """Refuse classes that are not policies, and unknown arguments."""
    if not isinstance(policy, type) or not issubclass(policy, DistributionalPolicy | AdaptedPolicy):
        raise TypeError(f"policy must be a name or a subclass of DistributionalPolicy, not {policy!r}")
    if "use_sde" in kwargs:
        raise TypeError("policy_kwargs has 'use_sde', which is an argument of the agent: pass it to the agent")
    if issubclass(policy, AdaptedPolicy):
        taken = ("observation_space", "action_space", "lr_schedule", "optimizer_class", "optimizer_kwargs")
        check_keywords("policy_kwargs", kwargs, [policy.written, ActorCriticPolicy], taken=taken)
        return
    check_keywords("policy_kwargs", kwargs, [policy, DistributionalPolicy], taken=("observation_space", "action_space"))
    head = kwargs.get("value_head", PolicySettings.value_head)
    has_memory = kwargs.get("core", policy.default_core) != "none"
    for name, needed in unused_by_policy(head, has_memory).items():
        if name in kwargs:
            found = f"; {policy.__name__} is not recurrent" if "recurrent" in needed else f", not {head!r}"
            raise ValueError(f"policy_kwargs has {name!r}, which is for {needed}{found}")


def policy_arguments(policy_kwargs: Mapping[str, Any], use_sde: bool) -> dict[str, Any]:
    """Arguments of the policy besides its spaces: ``policy_kwargs`` and the agent's ``use_sde``."""
    # Users' own policies need not support gSDE.
    return {**policy_kwargs, "use_sde": True} if use_sde else dict(policy_kwargs)


def check_heads(agent: DistributionalPPO) -> None:
    """Refuse a clip mode that the value heads do not support."""
    if agent.value_clip_mode == "per_quantile" and not isinstance(agent.policy.heads[0], QuantileHead):
        raise ValueError("value_clip_mode='per_quantile' needs value_head='quantile' in policy_kwargs")


def initial_hyperparams(given: AgentSettings) -> Hyperparameters:
    """The agent's own hyper-parameters; :func:`add_parts` adds those of its parts."""
    entries: dict[str, Hyperparameter] = {}
    for name, each in HYPERPARAMETERS.items():
        if (value := getattr(given, name)) is not None:
            base, schedule = base_and_schedule(name, value)
            entries[name] = Hyperparameter(
                base, each.bounds, whole=each.is_count, schedule=schedule, neutral=_OFF.get(name)
            )
    # A base below the minimum would have no effect.
    entries["ent_coef"].bounds = {**HYPERPARAMETERS["ent_coef"].bounds, "at_least": given.ent_coef_min}
    fixed = {
        name: each.about.fixed
        for definition in (PolicySettings, AdversarialSettings)
        for name, each in settings_of(definition).items()
        if each.about.fixed is not None
    }
    fixed |= {
        name: each.about.fixed or "it is fixed when the agent is constructed"
        for name, each in settings_of(AgentSettings).items()
        if name not in entries
    }
    fixed |= {name: _NOT_GIVEN for name in HYPERPARAMETERS if name not in entries}
    return Hyperparameters(entries, fixed)


def add_parts(agent: DistributionalPPO) -> None:
    """Connect hyper-parameters to the agent's optimizer and controllers, and add those of these parts."""
    owned, optimizer, vgs = agent.hyperparams, agent.policy.optimizer, agent.vgs
    owned.act("learning_rate", partial(_set_group, optimizer, "lr"))
    if "target_kl" in owned:
        owned.act("target_kl", partial(_set_target_kl, agent))
    unused = unused_options(type(optimizer), optimizer.defaults)
    for key, value in optimizer.defaults.items():
        # UPGD has no momentum: its entry is for schedulers of torch.
        skipped = key == "lr" or (key == "momentum" and isinstance(optimizer, UPGD))
        if not skipped and type(value) in (int, float):
            # Bounds are unknown for optimizers of other libraries.
            bounds = OPTIMIZER_BOUNDS.get(key, {"at_least": 0} if value >= 0 else {})
            if key == "eps" and not isinstance(optimizer, UPGDW | AdaptiveUPGD):
                bounds = {"at_least": 0, "at_most": bounds["at_most"]}
            # Dampening has no effect until momentum is set.
            needed = None if key == "dampening" else unused.get(key)
            apply = partial(_set_group, optimizer, key)
            owned.add(f"optimizer.{key}", Hyperparameter(value, bounds, apply=apply, unused=needed))
    for i, value in enumerate(optimizer.defaults.get("betas", ())):
        bounds, apply = OPTIMIZER_BOUNDS["beta1"], partial(_set_beta, optimizer, i)
        owned.add(f"optimizer.beta{i + 1}", Hyperparameter(value, bounds, apply=apply))
    for key, each in VGS_HYPERPARAMETERS.items():
        if vgs is None:
            owned.remove(f"vgs.{key}", "variance_gradient_scaling is off")
            continue
        needed = None if vgs.enabled else "vgs_kwargs with enabled=True"
        entry = Hyperparameter(
            getattr(vgs, key), each.bounds, whole=each.is_count, apply=partial(setattr, vgs, key), unused=needed
        )
        owned.add(f"vgs.{key}", entry)
    if agent.adversary is not None:
        for key, entry in agent.adversary.hyperparameters().items():
            owned.add(f"adversary.{key}", entry)
    else:
        for key in ("epsilon", "robust_kl_coef"):
            owned.remove(f"adversary.{key}", "adversarial training is off")


def set_optional(agent: DistributionalPPO, name: str, value: Any) -> None:
    """Set a hyper-parameter that may be ``None``; adds or removes it."""
    each, is_built = HYPERPARAMETERS[name], agent._is_built
    if value is None:
        if is_built:
            _check_removable(agent, name)
        agent.hyperparams.remove(name, _NOT_GIVEN)
    else:
        each.check(value)
        base, schedule = base_and_schedule(name, value)
        apply = partial(_set_target_kl, agent) if name == "target_kl" and is_built else None
        agent.hyperparams.add(name, Hyperparameter(base, each.bounds, schedule=schedule, apply=apply))
    if name == "target_kl" and value is None and is_built:
        agent.kl_stop.set_target(None)


def _check_removable(agent: DistributionalPPO, name: str) -> None:
    if name == "target_kl" and agent.kl_penalty is not None:
        raise ValueError("target_kl cannot be None: the agent's kl_penalty needs a target")
    if name == "clip_range_vf" and agent.value_clip_mode is not None:
        raise ValueError(f"clip_range_vf cannot be None: value_clip_mode={agent.value_clip_mode!r} needs it")


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
