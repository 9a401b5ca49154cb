"""Settings of the agent, :class:`driftproof.ppo.DistributionalPPO`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from driftproof._arguments import ArgumentError
from driftproof._members import check_numbers, listed
from driftproof._text import did_you_mean
from driftproof.settings.definition import (
    LARGE,
    LARGEST,
    argument,
    check_names,
    check_values,
    setting,
    settings_of,
)
from driftproof.settings.drift import DriftSettings
from driftproof.settings.optimizers import DEFAULT_OPTIMIZER, OPTIONS
from driftproof.settings.policy import PolicyName, PolicySettings
from driftproof.settings.schedules import Schedule

if TYPE_CHECKING:
    import torch
    from stable_baselines3.common.type_aliases import GymEnv
    from torch.optim import Optimizer

    from driftproof.learner.adversary import AdversarySettings
    from driftproof.nn.policies import DistributionalPolicy

    Device: TypeAlias = torch.device | str
else:
    GymEnv = Optimizer = AdversarySettings = DistributionalPolicy = Device = Any

StopMode: TypeAlias = Literal["absolute", "consecutive", "fraction"]
ClipMode: TypeAlias = Literal["mean_only", "mean_and_variance", "per_quantile"]
DecayStart: TypeAlias = Literal["immediately", "plateau"]

DEFAULT_LEARNING_RATE = 3e-4
_SHAPE = "it determines the shape of rollouts and minibatches"


@dataclass(frozen=True)
class KLPenaltySettings:
    """Settings of the PID controller of the KL penalty's coefficient."""

    per_member: ClassVar[bool] = True
    target: float = argument(doc="Target KL divergence; 0.005 to 0.05.", above=0)
    kp: float = setting(0.1, "Proportional gain. Larger reacts faster, and is noisier.", at_least=0)
    ki: float = setting(0.4, "Integral gain. Larger settles faster; too large oscillates.", at_least=0)
    kd: float = setting(0.0, "Derivative gain.", at_least=0)
    max_coef: float = setting(
        10.0,
        "Largest coefficient. From there, the integral term needs at most max_coef / ki updates to return to 0.",
        above=0,
    )
    init_coef: float = setting(0.0, "Coefficient of the first update.", at_least=0)
    device: Device | None = argument(None, "Device of the controller's state.")
    members: int | None = argument(None, "Number of members. None: a single agent, with 0-dim tensors.", at_least=1)

    def __post_init__(self) -> None:
        check_values(self)
        check_numbers("init_coef", self.init_coef, at_most=self.max_coef)


@dataclass(kw_only=True)
class EntropySettings:
    """Schedule of the entropy coefficient over training."""

    per_member: ClassVar[bool] = True
    ent_coef_final: float | None = setting(
        None, "Final value of a linear decay of ent_coef. None: constant.", at_least=0
    )
    ent_coef_min: float = setting(0.0, "Lower bound of ent_coef, before and after a boost.", at_least=0)
    ent_coef_start: DecayStart = setting(
        "immediately", "When the decay starts: at once, or on a plateau of the mean return."
    )
    ent_plateau_patience: int | None = setting(
        None,
        "Updates without a better mean return that count as a plateau. Larger: the decay starts later, and "
        "noise triggers it less. None: 10.",
        at_least=1,
    )
    ent_boost_factor: float = setting(
        1.0, "Factor of ent_coef while the explained variance is low; up to 10. 1: no boost.", at_least=1
    )
    ent_boost_below: float | None = setting(None, "Explained variance below which to boost. None: 0.", at_most=1)
    ent_boost_cap: float | None = setting(None, "Largest coefficient after a boost. None: no cap.", at_least=0)

    def __post_init__(self) -> None:
        check_values(self)
        for name in ("ent_coef_final", "ent_boost_cap"):
            if (value := getattr(self, name)) is not None:
                check_numbers(name, value, at_least=self.ent_coef_min)
        if self.ent_coef_final is None and self.ent_coef_start == "plateau":
            raise _conflict(
                "ent_coef_start",
                'ent_coef_start="plateau" needs ent_coef_final: set it to the value at the end of the decay',
            )
        if self.ent_plateau_patience is not None and self.ent_coef_start != "plateau":
            raise _conflict(
                "ent_plateau_patience",
                f'ent_plateau_patience={self.ent_plateau_patience} needs ent_coef_start="plateau"',
            )
        for name in ("ent_boost_below", "ent_boost_cap"):
            if (value := getattr(self, name)) is not None and max(listed(self.ent_boost_factor)) == 1:
                raise _conflict(name, f"{name}={value!r} needs an ent_boost_factor above 1")


@dataclass
class AgentSettings(EntropySettings, DriftSettings):
    """Arguments of the agent. Those that Stable-Baselines3's PPO has keep its names, order, meanings and defaults."""

    per_member = False
    policy: str | type[DistributionalPolicy] = setting(
        "MlpLstmPolicy",
        "Mlp for vectors, Cnn for images, MultiInput for Dict observations; with an LSTM, a GRU, or feed-forward. "
        "In Python also a class; a subclass of Stable-Baselines3's ActorCriticPolicy keeps its own networks and its "
        "scalar critic.",
        section="policy",
        key="name",
        form=PolicyName,
    )
    env: GymEnv | str | None = argument(
        None, "A Gymnasium environment or its id, a VecEnv, or a vector environment of Gymnasium or EnvPool."
    )
    learning_rate: float | Schedule | None = setting(
        None,
        "Learning rate; 1e-5 to 1e-2. May be a schedule: a function of the remaining progress, in configurations "
        "{kind: linear, start: 3e-4, end: 0}, or cosine. None: 3e-4.",
        file_default=DEFAULT_LEARNING_RATE,
        at_least=0,
        at_most=LARGE,
        is_hyperparameter=True,
    )
    n_steps: int | None = setting(
        None,
        "Steps of every environment per rollout. None: 128 with a recurrent policy, as in RecurrentPPO, and 2048 "
        "without, as in PPO.",
        at_least=1,
        changes_on_load=True,
        fixed=_SHAPE,
    )
    batch_size: int | None = setting(
        None,
        "Samples per minibatch, in whole sequences; the last minibatch may be smaller, and a batch_size above the "
        "rollout's size uses the whole rollout. Larger: less noisy gradients, and less time per update; 32 to 4096. "
        "None: 128 with a recurrent policy, 64 without.",
        at_least=1,
        changes_on_load=True,
        fixed=_SHAPE,
    )
    n_epochs: int = setting(
        10,
        "Passes over each rollout. More passes learn more from it, and change the policy more; 3 to 20.",
        at_least=1,
        at_most=LARGE,
        is_hyperparameter=True,
    )
    gamma: float = setting(
        0.99,
        "Discount factor. Closer to 1 looks further ahead; 0.9 to 0.999.",
        at_least=0,
        at_most=1,
        is_hyperparameter=True,
    )
    gae_lambda: float = setting(
        0.95,
        "λ of generalised advantage estimation. Closer to 1: less bias, more variance; 0.9 to 1.",
        at_least=0,
        at_most=1,
        is_hyperparameter=True,
    )
    clip_range: float | Schedule = setting(
        0.2,
        "Clip range of PPO's probability ratio around 1; 0.1 to 0.3. May be a schedule.",
        at_least=0,
        at_most=LARGEST,
        is_hyperparameter=True,
    )
    clip_range_vf: float | Schedule | None = setting(
        None,
        "Clip range of the value function, in standard deviations of returns; 0.1 to 1. None: no clipping.",
        above=0,
        at_most=LARGEST,
        is_hyperparameter=True,
    )
    normalize_advantage: bool = setting(
        True, "Normalise advantages to mean 0 and standard deviation 1, once over the rollout.", changes_on_load=True
    )
    ent_coef: float = setting(
        0.0,
        "Entropy coefficient of the loss. Larger explores more; 0 to 0.01.",
        at_least=0,
        at_most=LARGE,
        is_hyperparameter=True,
    )
    vf_coef: float = setting(
        0.5,
        "Value-function coefficient: weight of the critics' loss; 0.25 to 1.",
        at_least=0,
        at_most=LARGE,
        is_hyperparameter=True,
    )
    max_grad_norm: float = setting(
        0.5, "Maximum norm of the gradient, by clipping; 0.3 to 10.", above=0, at_most=LARGEST, is_hyperparameter=True
    )
    use_sde: bool = setting(
        False,
        "Generalised state-dependent exploration (gSDE) of Box actions: noise that is a smooth function of the state, "
        "for robots. Use it with log_std_init of about -2.",
    )
    sde_sample_freq: int = setting(
        -1,
        "For use_sde: steps between samples of the exploration matrices; 4 to 64. Fewer explore more, and less "
        "smoothly. -1: once per rollout.",
        at_least=-1,
        changes_on_load=True,
    )
    target_kl: float | None = setting(
        None,
        "Target KL divergence between the policies before and after an update; 0.005 to 0.05. None: only "
        "clipping limits the change.",
        above=0,
        at_most=LARGEST,
        is_hyperparameter=True,
    )
    _: KW_ONLY
    sequence_length: int | None = setting(
        None,
        "Steps of truncated backpropagation through time; the recurrent state carries over between sequences. "
        "Longer learns longer dependencies, and is slower. 1 without recurrence. None: at most 128, and at most "
        "half of batch_size.",
        at_least=1,
        changes_on_load=True,
        fixed=_SHAPE,
    )
    optimizer_class: str | type[Optimizer] = argument(
        DEFAULT_OPTIMIZER,
        'Optimizer: "adaptive_upgd", "upgd", "upgdw", "adamw", "adam", "sgd", in any spelling ("AdaptiveUPGD"), or a '
        "class.",
        fixed="an optimizer cannot load the state of another",
    )
    optimizer_kwargs: Mapping[str, Any] | None = argument(
        None, "Arguments of the optimizer. An lr among them replaces learning_rate."
    )
    variance_gradient_scaling: bool | None = argument(
        None, "Variance gradient scaling: scale gradients down when they are mostly noise. None: yes."
    )
    vgs_kwargs: Mapping[str, Any] | None = argument(None, "Arguments of driftproof.optim.VarianceGradientScaler.")
    value_clip_mode: ClipMode | None = setting(
        None, "What clip_range_vf clips in the predicted distribution. None: mean_only.", section="critic"
    )
    cvar_alpha: float | None = setting(
        None,
        "Compute advantages from the CVaR of the predicted returns, the mean of their worst share of this size. "
        "Smaller is more risk-averse; 0.05 to 0.5. None: from the mean.",
        above=0,
        at_most=1,
        section="critic",
        is_hyperparameter=True,
    )
    return_scale_decay: float = setting(
        0.9,
        "Decay per update of the running mean and standard deviation of returns. Larger is steadier, and adapts "
        "more slowly.",
        at_least=0,
        below=1,
        section="critic",
    )
    kl_stop: StopMode | None = setting(
        "absolute",
        "When an update stops early: at the first minibatch whose KL exceeds 1.5 * target_kl (absolute), after "
        "several in a row (consecutive), when a share of all minibatches exceed it (fraction), or never (None).",
    )
    kl_stop_patience: int | None = setting(None, "For kl_stop consecutive: minibatches in a row. None: 3.", at_least=1)
    kl_stop_fraction: float | None = setting(
        None, "For kl_stop fraction: share of the minibatches. None: 0.25.", at_least=0, below=1
    )
    kl_penalty: bool | Mapping[str, float] = setting(
        False,
        "Add the KL divergence to the loss; a PID controller sets its coefficient to keep it at target_kl. True, or "
        "settings of the controller: {kp: 0.1, ki: 0.4, kd: 0, max_coef: 10, init_coef: 0}.",
        form=bool | KLPenaltySettings,
    )
    adversarial: AdversarySettings | None = argument(
        None, "Adversarial training on perturbed observations: driftproof.adversarial.SAPPOConfig. Not with cuda_graph."
    )
    skip_limit: int = setting(
        10,
        "Training stops with an error after this many consecutive minibatches with a NaN or infinite loss or gradient.",
        at_least=1,
        changes_on_load=True,
    )
    cuda_graph: bool = setting(False, "Capture the optimizer step in a CUDA graph. Needs device cuda.")
    mixed_precision: bool = setting(False, "Run the networks in bfloat16. Needs device cuda.")
    stats_window_size: int = setting(
        100, "Number of recent episodes that the log averages over.", at_least=1, section="run", changes_on_load=True
    )
    tensorboard_log: str | os.PathLike[str] | None = argument(
        None, "Folder for TensorBoard's logs.", changes_on_load=True
    )
    policy_kwargs: Mapping[str, Any] | None = argument(
        None,
        "Arguments of driftproof.nn.policies.DistributionalPolicy; optimizer_class and optimizer_kwargs may be here "
        "too, as in Stable-Baselines3.",
        changes_on_load=True,
    )
    verbose: int = argument(0, "Output: 0 none, 1 info, 2 debug.", at_least=0, changes_on_load=True)
    seed: int | None = argument(None, "Seed of all random number generators.", at_least=0, changes_on_load=True)
    device: Device = argument("auto", 'Device of the networks: "auto", "cpu", "cuda".')
    _init_setup_model: bool = argument(True, "False: build the networks later, with _setup_model().")
    vgs_enabled: bool | None = argument(None, "Alias of variance_gradient_scaling.")
    vgs_beta: float | None = argument(
        None, "Same as beta in vgs_kwargs, under its name in configuration files; likewise the vgs_ arguments below."
    )
    vgs_alpha: float | None = argument(None, "Same as alpha in vgs_kwargs.")
    vgs_eps: float | None = argument(None, "Same as eps in vgs_kwargs.")
    vgs_warmup_steps: int | None = argument(None, "Same as warmup_steps in vgs_kwargs.")
    vgs_min_scaling_factor: float | None = argument(None, "Same as min_scaling_factor in vgs_kwargs.")
    vgs_variance_cap: float | None = argument(None, "Same as variance_cap in vgs_kwargs.")
    vgs_statistic: str | None = argument(None, "Same as statistic in vgs_kwargs.")
    vgs_apply_to: str | None = argument(None, "Same as apply_to in vgs_kwargs.")

    def __post_init__(self) -> None:
        EntropySettings.__post_init__(self)
        DriftSettings.__post_init__(self)
        if not isinstance(self.tensorboard_log, str | os.PathLike | None):
            raise TypeError(f"tensorboard_log must be a path, not {self.tensorboard_log!r}")
        self._check_stop()
        if self.value_clip_mode is not None and self.clip_range_vf is None:
            raise _conflict("value_clip_mode", f"value_clip_mode={self.value_clip_mode!r} needs clip_range_vf")
        if not isinstance(self.kl_penalty, bool | Mapping):
            raise TypeError(
                f"kl_penalty must be True, False or a mapping from names to values, not {self.kl_penalty!r}"
            )
        if isinstance(self.kl_penalty, Mapping):
            known = [name for name, each in settings_of(KLPenaltySettings).items() if each.about.in_files]
            check_names("kl_penalty", self.kl_penalty, known, "KLPenalty")
            KLPenaltySettings(target=1.0, **dict[str, Any](self.kl_penalty))
        if self.has_kl_penalty and self.target_kl is None:
            raise _conflict("kl_penalty", "kl_penalty needs target_kl: set it, for example to 0.02")
        if self.adversarial is not None and self.cuda_graph:
            raise _conflict(
                "cuda_graph", "cuda_graph=True cannot capture adversarial attacks: remove cuda_graph or adversarial"
            )
        if self.ent_coef < self.ent_coef_min:
            raise _conflict(
                "ent_coef",
                f"ent_coef {self.ent_coef!r} is below ent_coef_min {self.ent_coef_min!r}, which would replace it: "
                "raise ent_coef or lower ent_coef_min",
            )

    @property
    def has_kl_penalty(self) -> bool:
        """Whether the KL divergence is part of the loss."""
        return self.kl_penalty is not False

    def _check_stop(self) -> None:
        mode, target = self.kl_stop, self.target_kl
        if mode not in (None, "absolute") and target is None:
            raise _conflict("kl_stop", f"kl_stop={mode!r} needs target_kl")
        if mode is None and target is not None and not self.has_kl_penalty:
            raise _conflict(
                "target_kl",
                f"target_kl={target!r} has no effect with kl_stop=None and without kl_penalty: set one of them",
            )
        for name, needed in {"kl_stop_patience": "consecutive", "kl_stop_fraction": "fraction"}.items():
            if (value := getattr(self, name)) is not None and mode != needed:
                raise _conflict(name, f'{name}={value} needs kl_stop="{needed}", not {mode!r}')

    absent: ClassVar[tuple[str, ...]] = ("rollout_buffer_class", "rollout_buffer_kwargs")
    """Arguments of Stable-Baselines3 that can only have their default, ``None``."""

    @staticmethod
    def hint(name: str) -> str:
        """Hint for an unknown argument."""
        if name in _EARLIER:
            return f"it is {_EARLIER[name]}"
        for holder, names in {"policy_kwargs": settings_of(PolicySettings), "optimizer_kwargs": OPTIONS}.items():
            if name in names:
                return f"it belongs in {holder}: {holder}={{{name!r}: ...}}"
        return did_you_mean(name, settings_of(AgentSettings), "see its documentation for the valid arguments")


def _conflict(name: str, message: str) -> ArgumentError:
    """Return the error for a setting that conflicts with others."""
    return ArgumentError(message, name)


_EARLIER = {
    "ent_coef_initial": "ent_coef",
    "entropy_coef": "ent_coef",
    "lr": "learning_rate",
    "use_twin_critics": "policy_kwargs={'twin_critics': ...}",
    "kl_early_stop": "kl_stop",
    "kl_exceed_stop_fraction": "kl_stop='fraction' with kl_stop_fraction",
    **dict.fromkeys(
        AgentSettings.absent,
        "not supported: the rollout buffer is fixed; read its contents through model.rollout_buffer",
    ),
}
"""Arguments of the earlier system and of Stable-Baselines3, and their names here."""

HYPERPARAMETERS = {name: each for name, each in settings_of(AgentSettings).items() if each.about.is_hyperparameter}
"""Settings of the agent that may change during training."""
