"""DistributionalPPO: PPO with a memory, and critics that predict distributions, for worlds that change."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import gymnasium
import numpy as np
import numpy.typing as npt
import torch
from gymnasium import Env
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback
from stable_baselines3.common.utils import check_for_correct_spaces
from stable_baselines3.common.vec_env import VecEnv, unwrap_vec_normalize
from torch.optim import Optimizer

from driftproof._arguments import ArgumentError, check_count, check_number
from driftproof._batches import STEPS_AND_BATCH, Batches, cut, truncation
from driftproof._optimizer_names import optimizer_name
from driftproof.learner.adversary import Adversary, AdversarySettings
from driftproof.learner.entropy import DecayStart, EntropySchedule
from driftproof.learner.graph import GraphedStep
from driftproof.learner.hyperparams import Schedule
from driftproof.learner.kl import KLPenalty, KLStop, StopMode
from driftproof.learner.return_scale import ReturnScale, UnitScale
from driftproof.learner.rollout import Rollout, failure_of_environment
from driftproof.learner.step import OptimizerStep
from driftproof.nn.actor_critic import as_policy
from driftproof.nn.heads import ClipMode
from driftproof.nn.policies import NAMED_POLICIES, DistributionalPolicy
from driftproof.nn.types import PolicyState
from driftproof.optim import VarianceGradientScaler
from driftproof.ppo.collection import collect
from driftproof.ppo.generators import Generators
from driftproof.ppo.normalizer import Normalizer
from driftproof.ppo.optimizers import DEFAULT_OPTIMIZER, make_optimizer, optimizer_class, optimizer_in_policy_kwargs
from driftproof.ppo.persistence import Persistent
from driftproof.ppo.progress import Counters, Edge
from driftproof.ppo.sb3_views import RolloutView
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
from driftproof.ppo.spaces import check_spaces
from driftproof.ppo.training import update
from driftproof.ppo.vector_env import as_vec_env
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


_said: set[str] = set()


def _say_once(text: str) -> None:
    """Warn once in a process."""
    if text not in _said:
        _said.add(text)
        warnings.warn(text, stacklevel=4)


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
    state: PolicyState
    """What is remembered of the running episodes."""
    pause_at: int | None = None
    """Training returns after the update that reaches this step, its plan kept; :meth:`resume` goes on with it."""
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
        self.optimizer_class = optimizer_name(optimizer_class) if isinstance(optimizer_class, str) else optimizer_class
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
        if "policy" in self.__dict__:
            return
        check_device(self)
        self.set_random_seed(self.seed)
        check_policy(self.policy_class, self.policy_kwargs)
        arguments = policy_arguments(self.policy_kwargs, self.use_sde)
        self.policy = self.policy_class(self.observation_space, self.action_space, **arguments)
        self.policy.to(self.device)
        check_heads(self)
        self.policy.optimizer_class = optimizer_class(self.optimizer_class)
        self.policy.optimizer_kwargs = {key: value for key, value in self.optimizer_kwargs.items() if key != "lr"}
        self.policy.optimizer = make_optimizer(
            self.policy.optimizer_class,
            self.policy.parameters(),
            1.0,  # The hyper-parameters set it.
            self.policy.optimizer_kwargs,
            capturable=self.device.type == "cuda",
        )
        self.vgs: VarianceGradientScaler | None = None
        if self.variance_gradient_scaling:
            self.vgs = VarianceGradientScaler(self.policy.named_parameters(), **self.vgs_kwargs)
            if self.vgs.apply_to == "update":
                self.vgs.attach(self.policy.optimizer)
        scale = ReturnScale if self.policy.predicts_distributions else UnitScale
        self.return_scale = self.policy.value_scale = scale(self.return_scale_decay, self.device)
        self.entropy = EntropySchedule(**self.entropy_kwargs)
        target = self._initial["target_kl"]
        self.kl_stop = KLStop(
            target if self.kl_stop_mode is not None else None,
            self.kl_stop_mode or "absolute",
            patience=3 if self.kl_stop_patience is None else self.kl_stop_patience,
            fraction=0.25 if self.kl_stop_fraction is None else self.kl_stop_fraction,
            device=self.device,
        )
        self.kl_penalty: KLPenalty | None = None
        if self.kl_penalty_kwargs is not None:
            self.kl_penalty = KLPenalty(target, **self.kl_penalty_kwargs, device=self.device)
        self.adversary: Adversary | None = None
        if self.adversarial is not None:
            self.adversary = self.adversarial.build(self.policy, self.seed)
        self.hyperparams = collect_hyperparams(self)
        self._step = self._make_step()
        self._take_step: OptimizerStep | GraphedStep = self._step
        if self.cuda_graph:
            self._take_step = GraphedStep(self._step, self._captured_settings)
        self._rollout: Rollout | None = None
        self._forget = True
        self._in_rollout = False
        self.normalizer = Normalizer()
        if self.env is not None:
            self.normalizer.attach(self.env)
        self.counters, self.edge = Counters(self), Edge(self)
        possible: dict[str, Stateful | None] = {
            "policy": self.policy,
            "optimizer": self.policy.optimizer,
            "vgs": self.vgs,
            "kl_penalty": self.kl_penalty,
            "return_scale": self.return_scale,
            "entropy": self.entropy,
            "normalizer": self.normalizer,
            "adversary": self.adversary,
            "hyperparams": self.hyperparams,
            "counters": self.counters,
            "rollout": self.edge,
            "random": Generators(self),
        }
        components = {name: component for name, component in possible.items() if component is not None}
        self._built_in = tuple(components)
        for name, component in components.items():
            self.register(name, component)
        self._known_attributes = frozenset((*vars(self), "state"))

    @property
    def batches(self) -> Batches:
        """How a rollout is cut into sequences and minibatches."""
        if not self.policy.is_recurrent and self.sequence_length not in (None, 1):
            raise ValueError(
                f"sequence_length={self.sequence_length} is for recurrent policies; "
                f"{type(self.policy).__name__} is none"
            )
        return cut(self.n_steps, self.n_envs, self.batch_size, self.sequence_length, self.policy.is_recurrent)

    @property
    def optimizer_steps_per_update(self) -> int:
        """Minibatches of all epochs of an update."""
        return int(self.n_epochs) * self.batches.per_epoch

    def _captured_settings(self) -> dict[str, float]:
        """Hyper-parameters that a captured step does not read from tensors."""
        return {name: value for name, value in self.hyperparams.items() if "." in name}

    def _clip_mode(self) -> ClipMode | None:
        if self._initial["clip_range_vf"] is None:
            return None
        return self.value_clip_mode or "mean_only"

    def clip_mode_changed(self) -> None:
        """See to it that predictions are clipped from now on, or no longer."""
        self._step.clip_mode = self._clip_mode()
        self.state_was_loaded()

    def _make_step(self) -> OptimizerStep:
        def autocast() -> contextlib.AbstractContextManager[object]:
            if not self.mixed_precision:
                return contextlib.nullcontext()
            return torch.autocast(self.device.type, torch.bfloat16)

        return OptimizerStep(
            self.policy,
            self.policy.optimizer,
            self.vgs,
            self.kl_stop,
            self._clip_mode(),
            self.kl_penalty is not None,
            autocast,
            self.adversary,
        )

    def _get_policy_from_name(self, policy_name: str) -> type[BasePolicy]:
        if policy_name not in self.policy_aliases:
            raise ValueError(f"Unknown policy {policy_name!r}; use one of {', '.join(self.policy_aliases)}, or a class")
        return self.policy_aliases[policy_name]

    @staticmethod
    def _wrap_env(env: GymEnv, verbose: int = 0, monitor_wrapper: bool = True) -> VecEnv:
        env = as_vec_env(env) or env
        if isinstance(env, Env | VecEnv):
            check_spaces(env.observation_space, env.action_space)
        wrapped = BaseAlgorithm._wrap_env(env, verbose, monitor_wrapper)
        normalizer = unwrap_vec_normalize(wrapped)
        if normalizer is not None and normalizer.norm_reward:
            _say_once(
                "VecNormalize scales rewards, which is not needed here: the agent keeps a running scale of returns and "
                "follows that of the wrapper; norm_reward=False shows values in units of rewards"
            )
        return wrapped

    def set_env(self, env: GymEnv, force_reset: bool = True) -> None:
        """Train in another environment from now on.

        Args:
            env: The environment, with the same spaces as before, and as many of them, if there was one.
            force_reset: Begin with new episodes; ``False``: it is where the last one was.
        """
        env = self._wrap_env(gymnasium.make(env) if isinstance(env, str) else env, self.verbose)
        if "normalizer" in self.__dict__:
            env = self.normalizer.wrapped(env)
        if hasattr(self, "observation_space"):
            check_for_correct_spaces(env, self.observation_space, self.action_space)
        else:
            self.observation_space, self.action_space = env.observation_space, env.action_space
        if self.env is not None and env.num_envs != self.n_envs:
            raise ArgumentError(
                f"set_env() got {env.num_envs} environments for an agent with {self.n_envs}: rollouts and minibatches "
                "would have another size; save the agent and use load(path, env), which takes any number"
            )
        if "normalizer" in self.__dict__:
            self.normalizer.attach(env)
            self.edge.reset_seed = None
        # Files may come from another number of environments: memories and the room for rollouts belong to it.
        force_reset = force_reset or getattr(self, "n_envs", None) != env.num_envs
        self.n_envs = env.num_envs
        super().set_env(env, force_reset)
        self._rollout = None

    def reset_lstm_states_to_initial(self) -> None:
        """Forget what is remembered of the running episodes, as if they began with the next step."""
        self._forget = True
        if self._last_episode_starts is not None and self._last_obs is not None:
            self.state = self.policy.initial_state(self.n_envs)
            self._last_episode_starts = np.ones(self.n_envs, dtype=bool)

    def learn(
        self: Self,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int | None = 1,
        tb_log_name: str = "DistributionalPPO",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> Self:
        """Train for at least this many steps of environments, in whole rollouts.

        Args:
            total_timesteps: Steps, all environments together.
            callback: Called at every step.
            log_interval: Updates between log entries; ``None``: none, callbacks may write them.
            tb_log_name: Name of the run.
            reset_num_timesteps: Count from zero, and reset environments; otherwise go on.
            progress_bar: Show one.
        """
        if self.env is None:
            raise ValueError("there is no environment to learn from: call set_env(env) first")
        if "policy" not in self.__dict__:
            raise ValueError("there are no networks yet: call _setup_model() first")
        check_number("total_timesteps", total_timesteps, at_least=0)
        if log_interval is not None:
            check_count("log_interval", log_interval, at_least=1)
        if reset_num_timesteps or self._last_obs is None:
            self._forget, self.edge.reset_seed = True, None
        # The name that callbacks of Stable-Baselines3 look for.
        total_timesteps, callbacks = self._setup_learn(
            total_timesteps, callback, reset_num_timesteps, tb_log_name, progress_bar
        )
        callbacks.on_training_start(locals(), globals())
        iteration = 0
        while self.num_timesteps < min(total_timesteps, self.pause_at or total_timesteps):
            if not self.collect_rollouts(self.env, callbacks):
                break
            iteration += 1
            self._update_current_progress_remaining(self.num_timesteps, total_timesteps)
            if log_interval is not None and iteration % log_interval == 0:
                self.dump_logs(iteration)
            self.train()
            self._in_rollout = False
        callbacks.on_training_end()
        return self

    def dump_logs(self, iteration: int = 0) -> None:
        """Write what was logged up to now.

        Args:
            iteration: Rollouts of this training, to be logged too; 0: unknown.
        """
        OnPolicyAlgorithm.dump_logs(self, iteration)  # type: ignore[arg-type]

    @property
    def lr_schedule(self) -> Schedule:
        """The learning rate as a function of the remaining progress; another one may be set."""
        return partial(self.hyperparams.at, "learning_rate")

    @lr_schedule.setter
    def lr_schedule(self, schedule: Schedule) -> None:
        self.hyperparams.set_schedule("learning_rate", schedule)

    @property
    def rollout_buffer(self) -> RolloutView:
        """The last rollout, by Stable-Baselines3's names."""
        return RolloutView(self, self._room())

    def collect_rollouts(
        self,
        env: VecEnv,
        callback: BaseCallback,
        rollout_buffer: RolloutView | None = None,
        n_rollout_steps: int | None = None,
    ) -> bool:
        """Act for one rollout, which :attr:`rollout_buffer` then shows.

        Args:
            env: The agent's environments.
            callback: Called at every step; :meth:`_setup_learn` makes one.
            rollout_buffer: Is not needed: rollouts have one place.
            n_rollout_steps: Is not needed either, it is ``n_steps``.

        Returns:
            Whether training goes on.
        """
        if n_rollout_steps not in (None, self.n_steps):
            raise ValueError(f"n_rollout_steps={n_rollout_steps}: rollouts have n_steps={self.n_steps} steps")
        if self._forget:
            self.state, self._forget = self.policy.initial_state(self.n_envs), False
        try:
            return collect(self, env, callback, self._room())
        except Exception as error:
            if failure_of_environment(error) is not None:
                # Whatever state the environments are in, the next rollout begins with new episodes.
                self._last_obs = None
            raise

    def _room(self) -> Rollout:
        """Room for rollouts, of the shape that settings and environments ask for."""
        shape = (self.n_steps, self.n_envs, self.batches.sequence_length)
        if self._rollout is None or self._rollout.shape != shape:
            self._rollout = Rollout(self.policy, *shape)
        return self._rollout

    def train(self) -> None:
        """One update: several epochs over the rollout."""
        assert self._rollout is not None
        update(self, self._rollout)

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

    def resume(
        self: Self,
        callback: MaybeCallback = None,
        log_interval: int | None = 1,
        tb_log_name: str = "DistributionalPPO",
        progress_bar: bool = False,
    ) -> Self:
        """Train on to the total that the last :meth:`learn` planned, here or before the agent was saved.

        The arguments are those of :meth:`learn`.
        """
        if self._total_timesteps <= self.num_timesteps:
            raise ValueError(
                f"{self.num_timesteps} of {self._total_timesteps} planned steps are done: nothing is left to resume; "
                "use learn(total_timesteps, reset_num_timesteps=False) for more"
            )
        remaining = self._total_timesteps - self.num_timesteps
        return self.learn(remaining, callback, log_interval, tb_log_name, False, progress_bar)

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
                if "hyperparams" in self.__dict__ and name in self.hyperparams:
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
        if isinstance(self._take_step, GraphedStep):
            self._take_step.forget()
