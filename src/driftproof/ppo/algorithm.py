"""DistributionalPPO: recurrent PPO with distributional critics, for environments that drift."""

from __future__ import annotations

import inspect
import warnings
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy.typing as npt
import torch
from stable_baselines3.common.policies import BasePolicy

from driftproof.learner.alarm import CalibrationAlarm
from driftproof.learner.entropy import EntropySchedule
from driftproof.learner.initial_weights import InitialWeights
from driftproof.learner.kl import KLPenalty, KLStop
from driftproof.learner.learner import Learner
from driftproof.learner.observation_normalizer import ObservationNormalizer, normalizable
from driftproof.learner.response import DriftResponse
from driftproof.learner.return_scale import ReturnScale, UnitScale
from driftproof.nn.actor_critic import as_policy
from driftproof.nn.policies import NAMED_POLICIES, DistributionalPolicy
from driftproof.optim import VarianceGradientScaler
from driftproof.ppo.generators import Generators
from driftproof.ppo.optimizers import make_optimizer, optimizer_class
from driftproof.ppo.persistence import Persistent
from driftproof.ppo.settings import (
    HyperparameterAttribute,
    add_parts,
    check_device,
    check_heads,
    check_policy,
    check_settings,
    initial_hyperparams,
    is_recurrent,
    penalty_arguments,
    policy_arguments,
    resolved,
)
from driftproof.settings.agent import HYPERPARAMETERS, AgentSettings, EntropySettings, StopMode
from driftproof.settings.batches import STEPS_AND_BATCH, truncation
from driftproof.settings.definition import documented, settings_of, takes
from driftproof.state import Stateful

Self = TypeVar("Self", bound="DistributionalPPO")


_ATTRIBUTES = {
    "policy": "policy_class",
    "kl_stop": "kl_stop_mode",
    "kl_penalty": "kl_penalty_kwargs",
    "stats_window_size": "_stats_window_size",
}
"""Attributes that hold arguments under another name."""
_NOT_STORED = {"env", "device", "_init_setup_model"}
"""Arguments that files do not hold: they belong to the process."""
_STORED = [
    name
    for name in settings_of(AgentSettings)
    if name not in _NOT_STORED and (name == "vgs_kwargs" or not name.startswith("vgs_"))
]

if TYPE_CHECKING:
    # Tells type checkers the agent's attributes, by the definition of its arguments.
    class _Attributes(AgentSettings):
        policy: Any
        kl_stop: Any
        kl_penalty: Any
else:
    _Attributes = object


@documented(AgentSettings)
class DistributionalPPO(Persistent, _Attributes):  # type: ignore[misc]
    """Recurrent PPO with twin distributional critics, plasticity and noise control.

    Used like Stable-Baselines3's PPO, whose arguments keep their names, meanings and defaults. Settings that may change
    while training are in :attr:`hyperparams`.
    """

    policy: DistributionalPolicy
    policy_class: type[DistributionalPolicy]
    n_steps: int
    batch_size: int
    policy_kwargs: dict[str, Any]
    optimizer_kwargs: dict[str, Any]
    vgs_kwargs: dict[str, Any]
    kl_stop_mode: StopMode | None
    kl_penalty_kwargs: dict[str, Any] | None
    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = dict(NAMED_POLICIES)

    _own_settings: ClassVar[tuple[str, ...]] = ()
    """Constructor arguments that a subclass adds."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            parameters = list(inspect.signature(vars(cls)["__init__"]).parameters.values())[1:]
            named = [each.name for each in parameters if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
            known = {*settings_of(AgentSettings), *cls._own_settings}
            cls._own_settings = (*cls._own_settings, *(name for name in named if name not in known))

    @takes(AgentSettings)
    def __init__(self, given: AgentSettings) -> None:
        given = resolved(given)
        self.hyperparams = initial_hyperparams(given)
        super().__init__(
            as_policy(given.policy),
            given.env,
            given.learning_rate,
            policy_kwargs=dict(given.policy_kwargs or {}),
            stats_window_size=given.stats_window_size,
            tensorboard_log=given.tensorboard_log,
            verbose=given.verbose,
            device=given.device,
            support_multi_env=True,
            seed=given.seed,
            use_sde=given.use_sde,
            sde_sample_freq=given.sde_sample_freq,
        )
        for name in _STORED:
            if name not in HYPERPARAMETERS and name != "policy":
                setattr(self, _ATTRIBUTES.get(name, name), getattr(given, name))
        self.kl_penalty_kwargs = penalty_arguments(given)
        default_steps, default_batch = STEPS_AND_BATCH[is_recurrent(self.policy_class, self.policy_kwargs)]
        self.n_steps = default_steps if given.n_steps is None else int(given.n_steps)
        self.batch_size = default_batch if given.batch_size is None else int(given.batch_size)
        self._n_updates = 0
        check_settings(self)
        if given._init_setup_model:
            if self.env is None:
                raise ValueError(
                    "the networks need the spaces of an environment: pass env, or _init_setup_model=False and call "
                    "set_env(env) and _setup_model() later"
                )
            self._setup_model()
            warning = truncation(self.n_steps, self.n_envs, self.batch_size, self.batches)
            if warning is not None and given.batch_size is not None:
                warnings.warn(warning, stacklevel=3)

    def _setup_model(self) -> None:
        """Build networks, optimizer and controllers, once the spaces are known. Further calls do nothing."""
        if self._is_built:
            return
        check_device(self)
        self.set_random_seed(self.seed)
        check_policy(self.policy_class, self.policy_kwargs)
        arguments = policy_arguments(self.policy_kwargs, self.use_sde)
        self.policy = self.policy_class(self.observation_space, self.action_space, **arguments)
        self.policy.to(self.device)
        check_heads(self)
        self.learner = self._make_learner()
        # The name under which Stable-Baselines3 stores it.
        self.policy.optimizer, self.policy.value_scale = self.learner.optimizer, self.learner.return_scale
        self.policy.normalizer = self.learner.normalizer
        add_parts(self)
        self.counters.learner = self.learner
        self.worker.policy, self.worker.seed, self.worker.window = self.policy, self.seed, self._stats_window_size
        if self.learner.drift_alarm is not None:
            self.worker.returns = self.learner.drift_alarm.episodes
        if self.env is not None:
            self.normalizer.attach(self.env)
        components: dict[str, Stateful] = {
            **self.learner.components(),
            "normalizer": self.normalizer,
            "hyperparams": self.hyperparams,
            "counters": self.counters,
            "rollout": self.worker,
            "random": Generators(self.worker, self.device),
        }
        self._built_in = tuple(components)
        for name, component in components.items():
            self.register(name, component)
        self._known_attributes = frozenset(vars(self))
        self._is_built = True
        self._maybe_recommend_cpu()

    def _make_learner(self) -> Learner:
        policy, target = self.policy, self.hyperparams.get("target_kl")
        policy.optimizer_class = optimizer_class(self.optimizer_class)
        policy.optimizer_kwargs = {key: value for key, value in self.optimizer_kwargs.items() if key != "lr"}
        optimizer = make_optimizer(
            policy.optimizer_class,
            policy.parameters(),
            1.0,  # Replaced by the hyper-parameters.
            policy.optimizer_kwargs,
            capturable=self.device.type == "cuda",
        )
        vgs = kl_penalty = adversary = response = None
        if self.variance_gradient_scaling:
            vgs = VarianceGradientScaler(policy.named_parameters(), **self.vgs_kwargs)
        if self.kl_penalty_kwargs is not None:
            kl_penalty = KLPenalty(self.hyperparams["target_kl"], **self.kl_penalty_kwargs, device=self.device)
        if self.adversarial is not None:
            adversary = self.adversarial.build(policy, self.seed)
        if self.drift_response:
            response = DriftResponse(
                self.drift_patience, self.drift_exploration, self.drift_worlds, bool(self.drift_rewiring)
            )
        scale = ReturnScale if policy.predicts_distributions else UnitScale
        return Learner(
            policy,
            optimizer,
            vgs=vgs,
            return_scale=scale(self.return_scale_decay, self.device),
            entropy=EntropySchedule(**{name: getattr(self, name) for name in settings_of(EntropySettings)}),
            kl_stop=KLStop(
                target if self.kl_stop_mode is not None else None,
                self.kl_stop_mode or "absolute",
                patience=3 if self.kl_stop_patience is None else self.kl_stop_patience,
                fraction=0.25 if self.kl_stop_fraction is None else self.kl_stop_fraction,
                device=self.device,
            ),
            kl_penalty=kl_penalty,
            adversary=adversary,
            initial_weights=InitialWeights(policy, self.init_decay) if self.init_decay else None,
            drift_alarm=CalibrationAlarm(self.drift_threshold) if self.drift_alarm else None,
            normalizer=self._make_normalizer(),
            recycle_dormant=self.recycle_dormant or 0.0,
            drift_response=response,
            value_clip_mode=self.value_clip_mode or "mean_only",
            cuda_graph=self.cuda_graph,
            mixed_precision=self.mixed_precision,
        )

    def _make_normalizer(self) -> ObservationNormalizer | None:
        if not self.observation_normalizer:
            return None
        space = self.observation_space
        # Methods of a class that was written for Stable-Baselines3 take observations as they are.
        if self.policy.predicts_distributions and any(normalizable(space)):
            return ObservationNormalizer(space, self.normalizer_memory)
        if self.drift_kit:
            return None  # The kit has other parts.
        raise ValueError(
            f"observation_normalizer=True has nothing to normalise: observations {space} of "
            f"{self.policy_class.__name__}; it needs floating-point numbers and a policy of driftproof"
        )

    def _get_policy_from_name(self, policy_name: str) -> type[BasePolicy]:
        if policy_name not in self.policy_aliases:
            raise ValueError(f"Unknown policy {policy_name!r}; use one of {', '.join(self.policy_aliases)}, or a class")
        return self.policy_aliases[policy_name]

    def predict(
        self,
        observation: npt.NDArray[Any] | dict[str, npt.NDArray[Any]],
        state: tuple[npt.NDArray[Any], ...] | None = None,
        episode_start: npt.NDArray[Any] | None = None,
        deterministic: bool = False,
    ) -> tuple[npt.NDArray[Any], tuple[npt.NDArray[Any], ...] | None]:
        """Actions for observations; see :meth:`DistributionalPolicy.predict`."""
        return self.policy.predict(observation, state, episode_start, deterministic)

    @torch.no_grad()
    def predict_quantiles(
        self,
        observation: npt.NDArray[Any] | dict[str, npt.NDArray[Any]],
        state: tuple[npt.NDArray[Any], ...] | None = None,
        episode_start: npt.NDArray[Any] | None = None,
    ) -> tuple[npt.NDArray[Any], tuple[npt.NDArray[Any], ...] | None]:
        """Quantiles of the λ-returns that the critics predict, in units of rewards.

        Takes the arguments of :meth:`predict`; the state is the critics' recurrent state.

        Returns:
            Quantiles ``[critics, B, quantiles]`` in order, at the levels ``(i + 1/2) / quantiles``, and the state for
            the next call.
        """
        predictions, state = self.policy.predict_distribution(observation, state, episode_start)
        quantiles = [head.quantiles(p) for head, p in zip(self.policy.heads, predictions, strict=True)]
        return self.return_scale.decode(torch.stack(quantiles)).cpu().numpy(), state

    @classmethod
    def setting_names(cls) -> set[str]:
        return {*_STORED, *cls._own_settings}

    def settings(self) -> dict[str, Any]:
        """Constructor arguments of this agent, without environment and device."""
        owned = self.hyperparams
        result: dict[str, Any] = {}
        for name in (*_STORED, *self._own_settings):
            attribute = _ATTRIBUTES.get(name, name)
            if name in HYPERPARAMETERS:
                result[name] = owned.schedule(name) or owned[name] if name in owned else None
            elif hasattr(self, attribute):
                result[name] = getattr(self, attribute)
            else:
                raise TypeError(
                    f"{type(self).__name__} has no attribute {name!r}: store the constructor argument under its "
                    "name, or override settings()"
                )
        named = self.policy_aliases.get(self.policy_class.__name__) is self.policy_class
        written = getattr(self.policy_class, "written", self.policy_class)
        result["policy"] = self.policy_class.__name__ if named else written
        result["kl_penalty"] = False if self.kl_penalty_kwargs is None else self.kl_penalty_kwargs or True
        result["optimizer_kwargs"] = {key: value for key, value in self.optimizer_kwargs.items() if key != "lr"}
        return result

    def state_was_loaded(self) -> None:
        self.hyperparams.advance(self._current_progress_remaining)
        self.learner.tensors_were_replaced()


for _name in HYPERPARAMETERS:
    setattr(DistributionalPPO, _name, HyperparameterAttribute(_name))
