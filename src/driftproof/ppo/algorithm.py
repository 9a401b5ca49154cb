"""DistributionalPPO: PPO with a memory, and critics that predict distributions, for worlds that change."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy.typing as npt
import torch
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import GymEnv
from torch.optim import Optimizer

from driftproof._arguments import check_count
from driftproof._batches import STEPS_AND_BATCH, truncation
from driftproof._registry import OPTIMIZERS
from driftproof.learner.adversary import AdversarySettings
from driftproof.learner.entropy import DecayStart, EntropySchedule
from driftproof.learner.hyperparams import Schedule
from driftproof.learner.kl import KLPenalty, KLStop, StopMode
from driftproof.learner.learner import Learner
from driftproof.learner.return_scale import ReturnScale, UnitScale
from driftproof.nn.actor_critic import as_policy
from driftproof.nn.heads import ClipMode
from driftproof.nn.policies import NAMED_POLICIES, DistributionalPolicy
from driftproof.optim import VarianceGradientScaler
from driftproof.ppo.generators import Generators
from driftproof.ppo.optimizers import DEFAULT_OPTIMIZER, make_optimizer, optimizer_class, optimizer_in_policy_kwargs
from driftproof.ppo.persistence import Persistent
from driftproof.ppo.settings import (
    Setting,
    check_device,
    check_heads,
    check_mapping,
    check_policy,
    check_settings,
    collect_hyperparams,
    kl_penalty_settings,
    policy_arguments,
    resolve_learning_rate,
)
from driftproof.ppo.vgs_arguments import VGSArguments, resolve_vgs
from driftproof.state import Stateful

if TYPE_CHECKING:
    from typing_extensions import Unpack

Self = TypeVar("Self", bound="DistributionalPPO")


_ATTRIBUTES = {
    "policy": "policy_class",
    "kl_stop": "kl_stop_mode",
    "kl_penalty": "kl_penalty_kwargs",
    "stats_window_size": "_stats_window_size",
}
"""Where arguments are kept, if not under their names."""
_NOT_STORED = {"env", "device", "_init_setup_model"}
"""Arguments that are no settings of the agent: they belong to the process that it is in."""


def _argument_names(kind: type[Any]) -> dict[str, None]:
    """Arguments of a class and of those that its constructor passes arguments on to."""
    names: dict[str, None] = {}
    for each in kind.__mro__:
        if "__init__" in vars(each):
            parameters = list(inspect.signature(vars(each)["__init__"]).parameters.values())[1:]
            named = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
            names |= dict.fromkeys(named)
        if each is DistributionalPPO:
            break
    return names


class DistributionalPPO(Persistent):
    """Recurrent PPO with twin distributional critics, plasticity and noise control.

    Used like Stable-Baselines3's PPO, whose arguments keep their names, meanings and defaults. Settings that may change
    while training are in :attr:`hyperparams`.

    Args:
        policy: ``"MlpLstmPolicy"``, ``"MlpGruPolicy"``, ``"MlpPolicy"`` without memory, their ``Cnn...`` and
            ``MultiInput...`` forms, or a class; one that derives from Stable-Baselines3's ``ActorCriticPolicy`` has its
            own networks, and a critic that predicts one number (:mod:`driftproof.nn.actor_critic`).
        env: A Gymnasium environment or its id, a VecEnv, or a vector environment of Gymnasium or EnvPool.
        learning_rate: 3e-4 if not given; a function of the remaining progress makes a schedule.
        n_steps: Steps of every environment between updates. ``None``: 128 with a recurrent policy, as RecurrentPPO has
            it, and 2048 without, as PPO.
        batch_size: Samples in a minibatch, of whole sequences; the last one may be smaller, and one larger than the
            rollout means all of it. ``None``: 128 with a recurrent policy, 64 without.
        n_epochs: Passes over the rollout. More learn more from it, and move the policy further.
        gamma: Discount. Closer to 1 looks further ahead.
        gae_lambda: Of advantages. Closer to 1: less bias, more noise.
        clip_range: How far probabilities of actions may move in an update; typically 0.1 to 0.3. May be a schedule.
        clip_range_vf: The same for predictions of returns, in their standard deviations; ``None``: not clipped.
        normalize_advantage: To mean 0 and standard deviation 1, once over the rollout.
        ent_coef: Weight of the entropy. Larger explores more; typically 0 to 0.01.
        vf_coef: Weight of the critics' loss.
        max_grad_norm: Gradients are clipped to this norm.
        use_sde: Generalised state-dependent exploration (gSDE) of Box actions: noise that changes as smoothly as the
            state; see :mod:`driftproof.nn.exploration`. With ``policy_kwargs={"log_std_init": -2}`` or so.
        sde_sample_freq: Steps after which its exploration matrices are drawn anew, typically 4 to 64; -1: only when a
            rollout begins. Fewer steps explore more, and less smoothly.
        target_kl: KL divergence that an update aims at, 0.005 to 0.05; ``None``: as far as clipping lets it.
        sequence_length: Steps through which gradients flow back in time; recurrent states carry on over its ends.
            ``None``: up to 128, and half of ``batch_size``. Longer learns longer memories, and is slower. 1 without
            recurrence.
        optimizer_class: ``"adaptive_upgd"``, ``"upgd"``, ``"upgdw"``, ``"adamw"``, ``"adam"``, ``"sgd"``, in any
            spelling (``"AdaptiveUPGD"``), or a class.
        optimizer_kwargs: Its arguments. An ``lr`` among them replaces ``learning_rate``.
        variance_gradient_scaling: Scale gradients down when they are noise; ``None``: yes.
        vgs_kwargs: Arguments of :class:`driftproof.optim.VarianceGradientScaler`.
        value_clip_mode: What ``clip_range_vf`` bounds of a predicted distribution: ``"mean_only"``, which it is if not
            given, ``"mean_and_variance"`` or ``"per_quantile"``.
        cvar_alpha: Advantages from the mean of the worst share ``alpha`` of predicted returns; ``None``: of all.
        kl_stop: How ``target_kl`` ends an update: at the first minibatch 1.5 times beyond it (``"absolute"``), after
            some in a row (``"consecutive"``), at some share of them (``"fraction"``), or not at all (``None``).
        kl_stop_patience: For ``"consecutive"``; ``None``: 3.
        kl_stop_fraction: For ``"fraction"``; ``None``: 0.25.
        kl_penalty: Add the KL divergence to the loss, with a coefficient that is controlled to reach ``target_kl``;
            a mapping: arguments of :class:`driftproof.learner.kl.KLPenalty`.
        ent_coef_final: Decay ``ent_coef`` linearly to this; ``None``: constant.
        ent_coef_min: Lower bound, before and after a boost.
        ent_coef_start: When the decay starts: ``"immediately"`` or on a ``"plateau"`` of returns.
        ent_plateau_patience: Updates without better returns that make a plateau; ``None``: 10.
        ent_boost_factor: Multiplies ``ent_coef`` while the explained variance is bad; 1: never.
        ent_boost_below: Explained variance that counts as bad; ``None``: 0.
        ent_boost_cap: The most that a boost leads to.
        return_scale_decay: Memory of the running scale of returns, per update.
        adversarial: Train against perturbed observations: :class:`driftproof.adversarial.SAPPOConfig`. Not with
            ``cuda_graph``.
        skip_limit: Minibatches in a row with a loss or gradient that is not finite, until training stops.
        cuda_graph: Capture the optimizer step in a CUDA graph.
        mixed_precision: Networks in bfloat16, on CUDA.
        stats_window_size: Episodes that are averaged in the log.
        tensorboard_log: Where to log for TensorBoard.
        policy_kwargs: Arguments of :class:`driftproof.nn.policies.DistributionalPolicy`; ``optimizer_class`` and
            ``optimizer_kwargs`` may be here too, as in Stable-Baselines3.
        verbose: 0: nothing, 1: progress, 2: more.
        seed: Of all random numbers.
        device: ``"auto"``, ``"cpu"``, ``"cuda"``.
        _init_setup_model: ``False``: networks are built later, by ``_setup_model()``.
        vgs: Single items of ``vgs_kwargs`` by flat names, as in configurations: ``vgs_beta``, ``vgs_alpha``,
            ``vgs_warmup_steps``, ...; ``vgs_enabled`` is ``variance_gradient_scaling``.
    """

    policy: DistributionalPolicy
    policy_class: type[DistributionalPolicy]
    _initial: dict[str, Any]
    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = dict(NAMED_POLICIES)

    _CHANGED_ON_LOAD: ClassVar[frozenset[str]] = frozenset(
        (
            *("n_steps", "batch_size", "sequence_length", "normalize_advantage", "skip_limit", "stats_window_size"),
            *("tensorboard_log", "verbose", "seed", "policy_kwargs", "sde_sample_freq"),
        )
    )

    learning_rate = Setting()
    gamma = Setting()
    gae_lambda = Setting()
    clip_range = Setting()
    clip_range_vf = Setting()
    ent_coef = Setting()
    vf_coef = Setting()
    max_grad_norm = Setting()
    target_kl = Setting()
    n_epochs = Setting()
    cvar_alpha = Setting()

    def __init__(
        self,
        policy: str | type[DistributionalPolicy] = "MlpLstmPolicy",
        env: GymEnv | str | None = None,
        learning_rate: float | Schedule | None = None,
        n_steps: int | None = None,
        batch_size: int | None = None,
        n_epochs: int = 10,
        gamma: float = 0.99,
        gae_lambda: float = 0.95,
        clip_range: float | Schedule = 0.2,
        clip_range_vf: float | Schedule | None = None,
        normalize_advantage: bool = True,
        ent_coef: float = 0.0,
        vf_coef: float = 0.5,
        max_grad_norm: float = 0.5,
        use_sde: bool = False,
        sde_sample_freq: int = -1,
        target_kl: float | None = None,
        *,
        sequence_length: int | None = None,
        optimizer_class: str | type[Optimizer] = DEFAULT_OPTIMIZER,
        optimizer_kwargs: Mapping[str, Any] | None = None,
        variance_gradient_scaling: bool | None = None,
        vgs_kwargs: Mapping[str, Any] | None = None,
        value_clip_mode: ClipMode | None = None,
        cvar_alpha: float | None = None,
        kl_stop: StopMode | None = "absolute",
        kl_stop_patience: int | None = None,
        kl_stop_fraction: float | None = None,
        kl_penalty: bool | Mapping[str, float] = False,
        ent_coef_final: float | None = None,
        ent_coef_min: float = 0.0,
        ent_coef_start: DecayStart = "immediately",
        ent_plateau_patience: int | None = None,
        ent_boost_factor: float = 1.0,
        ent_boost_below: float | None = None,
        ent_boost_cap: float | None = None,
        return_scale_decay: float = 0.9,
        adversarial: AdversarySettings | None = None,
        skip_limit: int = 10,
        cuda_graph: bool = False,
        mixed_precision: bool = False,
        stats_window_size: int = 100,
        tensorboard_log: str | None = None,
        policy_kwargs: dict[str, Any] | None = None,
        verbose: int = 0,
        seed: int | None = None,
        device: torch.device | str = "auto",
        _init_setup_model: bool = True,
        **vgs: Unpack[VGSArguments],
    ) -> None:
        check_count("verbose", verbose)
        policy_kwargs, optimizer_class, self.optimizer_kwargs = optimizer_in_policy_kwargs(
            check_mapping("policy_kwargs", policy_kwargs),
            optimizer_class,
            check_mapping("optimizer_kwargs", optimizer_kwargs),
        )
        self.variance_gradient_scaling, self.vgs_kwargs = resolve_vgs(
            variance_gradient_scaling, check_mapping("vgs_kwargs", vgs_kwargs), vgs, _argument_names(DistributionalPPO)
        )
        self.kl_penalty_kwargs = kl_penalty_settings(kl_penalty)
        super().__init__(
            as_policy(policy),
            env,
            resolve_learning_rate(learning_rate, self.optimizer_kwargs),
            policy_kwargs=policy_kwargs,
            stats_window_size=stats_window_size,
            tensorboard_log=tensorboard_log,
            verbose=verbose,
            device=device,
            support_multi_env=True,
            seed=seed,
            use_sde=use_sde,
            sde_sample_freq=sde_sample_freq,
        )
        is_recurrent = self.policy_kwargs.get("core", getattr(self.policy_class, "default_core", "lstm")) != "none"
        default_steps, default_batch = STEPS_AND_BATCH[is_recurrent]
        self.n_steps: int = default_steps if n_steps is None else n_steps
        self.batch_size: int = default_batch if batch_size is None else batch_size
        self.n_epochs = n_epochs
        self.gamma = gamma
        self.gae_lambda = gae_lambda
        self.clip_range = clip_range
        self.clip_range_vf = clip_range_vf
        self.normalize_advantage = normalize_advantage
        self.ent_coef = ent_coef
        self.vf_coef = vf_coef
        self.max_grad_norm = max_grad_norm
        self.target_kl = target_kl
        self.sequence_length = sequence_length
        self.optimizer_class = OPTIMIZERS.name(optimizer_class) if isinstance(optimizer_class, str) else optimizer_class
        self.value_clip_mode: ClipMode | None = value_clip_mode
        self.cvar_alpha = cvar_alpha
        self.kl_stop_mode: StopMode | None = kl_stop
        self.kl_stop_patience = kl_stop_patience
        self.kl_stop_fraction = kl_stop_fraction
        self.entropy_kwargs: dict[str, Any] = {
            "ent_coef_final": ent_coef_final,
            "ent_coef_min": ent_coef_min,
            "ent_coef_start": ent_coef_start,
            "ent_plateau_patience": ent_plateau_patience,
            "ent_boost_factor": ent_boost_factor,
            "ent_boost_below": ent_boost_below,
            "ent_boost_cap": ent_boost_cap,
        }
        self.return_scale_decay = return_scale_decay
        self.adversarial = adversarial
        self.skip_limit = skip_limit
        self.cuda_graph = cuda_graph
        self.mixed_precision = mixed_precision
        self._n_updates = 0
        check_settings(self)
        # Searches give numbers of NumPy, which torch and Python's generator do not take.
        self.n_steps, self.batch_size = int(self.n_steps), int(self.batch_size)
        self.seed = None if seed is None else int(seed)
        self.sde_sample_freq = int(sde_sample_freq)
        if _init_setup_model:
            if self.env is None:
                raise ValueError(
                    "the networks need the spaces of an environment: give env, or _init_setup_model=False and later "
                    "set_env(env) and _setup_model()"
                )
            self._setup_model()
            told = truncation(self.n_steps, self.n_envs, self.batch_size, self.batches)
            if told is not None and batch_size is not None:
                warnings.warn(told, stacklevel=2)

    def _setup_model(self) -> None:
        """Build networks, optimizer and controllers, once the spaces are known. Called again, nothing happens."""
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
        # Stable-Baselines3 looks for them there.
        self.policy.optimizer, self.policy.value_scale = self.learner.optimizer, self.learner.return_scale
        self.hyperparams = collect_hyperparams(self)
        self.counters.learner = self.learner
        self.worker.policy, self.worker.seed, self.worker.window = self.policy, self.seed, self._stats_window_size
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

    def _make_learner(self) -> Learner:
        policy, target = self.policy, self._initial["target_kl"]
        policy.optimizer_class = optimizer_class(self.optimizer_class)
        policy.optimizer_kwargs = {key: value for key, value in self.optimizer_kwargs.items() if key != "lr"}
        optimizer = make_optimizer(
            policy.optimizer_class,
            policy.parameters(),
            1.0,  # The hyper-parameters set it.
            policy.optimizer_kwargs,
            capturable=self.device.type == "cuda",
        )
        vgs = kl_penalty = adversary = None
        if self.variance_gradient_scaling:
            vgs = VarianceGradientScaler(policy.named_parameters(), **self.vgs_kwargs)
        if self.kl_penalty_kwargs is not None:
            kl_penalty = KLPenalty(target, **self.kl_penalty_kwargs, device=self.device)
        if self.adversarial is not None:
            adversary = self.adversarial.build(policy, self.seed)
        scale = ReturnScale if policy.predicts_distributions else UnitScale
        return Learner(
            policy,
            optimizer,
            vgs=vgs,
            return_scale=scale(self.return_scale_decay, self.device),
            entropy=EntropySchedule(**self.entropy_kwargs),
            kl_stop=KLStop(
                target if self.kl_stop_mode is not None else None,
                self.kl_stop_mode or "absolute",
                patience=3 if self.kl_stop_patience is None else self.kl_stop_patience,
                fraction=0.25 if self.kl_stop_fraction is None else self.kl_stop_fraction,
                device=self.device,
            ),
            kl_penalty=kl_penalty,
            adversary=adversary,
            value_clip_mode=self.value_clip_mode or "mean_only",
            cuda_graph=self.cuda_graph,
            mixed_precision=self.mixed_precision,
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
        """What the critics expect: quantiles of λ-returns, in units of rewards.

        The arguments are those of :meth:`predict`, but the state is the critics' own.

        Returns:
            Quantiles ``[critics, B, quantiles]`` in order, at the levels ``(i + 1/2) / quantiles``, and the state for
            the next call.
        """
        predictions, state = self.policy.predict_distribution(observation, state, episode_start)
        quantiles = [head.quantiles(p) for head, p in zip(self.policy.heads, predictions, strict=True)]
        return self.return_scale.decode(torch.stack(quantiles)).cpu().numpy(), state

    @classmethod
    def setting_names(cls) -> set[str]:
        return set(_argument_names(cls)) - _NOT_STORED

    def settings(self) -> dict[str, Any]:
        """Arguments that make an agent like this one, but for its environment and its device."""
        result: dict[str, Any] = {}
        for name in _argument_names(type(self)):
            if name in self.entropy_kwargs:
                result[name] = self.entropy_kwargs[name]
            elif isinstance(getattr(type(self), name, None), Setting):
                result[name] = self._initial[name]
                if self._is_built and name in self.hyperparams:
                    result[name] = self.hyperparams.schedule(name) or self.hyperparams[name]
            elif name not in _NOT_STORED:
                attribute = _ATTRIBUTES.get(name, name)
                if not hasattr(self, attribute):
                    raise TypeError(
                        f"{type(self).__name__} has no attribute {name!r} with what its argument was: set it, or "
                        "override settings()"
                    )
                result[name] = getattr(self, attribute)
        named = self.policy_aliases.get(self.policy_class.__name__) is self.policy_class
        written = getattr(self.policy_class, "written", self.policy_class)
        result["policy"] = self.policy_class.__name__ if named else written
        result["kl_penalty"] = False if self.kl_penalty_kwargs is None else self.kl_penalty_kwargs or True
        result["optimizer_kwargs"] = {key: value for key, value in self.optimizer_kwargs.items() if key != "lr"}
        return result

    def state_was_loaded(self) -> None:
        self.hyperparams.advance(self._current_progress_remaining)
        self.learner.tensors_were_replaced()
