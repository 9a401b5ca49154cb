"""Sections of a configuration that make an agent.

They are arguments of :class:`driftproof.ppo.DistributionalPPO`, :class:`driftproof.nn.policies.DistributionalPolicy`
and :class:`driftproof.optim.VarianceGradientScaler`, which say more about them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, Discriminator, Field, Tag, field_validator

from driftproof._registry import CORES, OPTIMIZERS, VALUE_HEADS
from driftproof.config._types import Count, NotNegativeOrSchedule, Plain, PositiveOrSchedule, Section, Share, Size

PolicyName: TypeAlias = Literal[
    "MlpLstmPolicy",
    "MlpGruPolicy",
    "MlpPolicy",
    "CnnLstmPolicy",
    "CnnGruPolicy",
    "CnnPolicy",
    "MultiInputLstmPolicy",
    "MultiInputGruPolicy",
    "MultiInputPolicy",
]
Activation: TypeAlias = Literal["tanh", "relu", "elu", "gelu", "silu", "leaky_relu"]


class Widths(Section):
    """Widths of layers, for the actor and the critics."""

    pi: list[Size] = Field(description="Of the actor.")
    vf: list[Size] = Field(description="Of the critics.")


def _form(value: Any) -> str:
    return "list" if isinstance(value, list) else "widths"


class PolicySection(Section):
    """The networks and their memory."""

    name: PolicyName = Field(
        "MlpLstmPolicy",
        description="Mlp for numbers, Cnn for images, MultiInput for dicts of observations; with an LSTM, a GRU, or "
        "without memory.",
    )
    core: Annotated[str, AfterValidator(CORES.name)] | None = Field(
        None,
        description="The memory, if it is to be another than the name says: lstm, gru, none, or a class of your own as "
        "module:Class.",
    )
    net_arch: (
        Annotated[Annotated[list[Size], Tag("list")] | Annotated[Widths, Tag("widths")], Discriminator(_form)] | None
    ) = Field(
        None,
        description="Widths of the layers behind the memory: a list for actor and critics, or {pi: [...], vf: [...]}. "
        "null: two of 64, and none behind a CNN.",
    )
    activation_fn: Activation = Field("tanh", description="Between these layers.")
    ortho_init: bool = Field(
        True, description="Orthogonal initial weights, small ones for the actions; recurrent weights are torch's."
    )
    lstm_hidden_size: Size = Field(
        128, ge=1, description="Units of the memory, LSTM or GRU. More remember more, and are slower; 32 to 512."
    )
    n_lstm_layers: Size = Field(1, ge=1, description="Its layers; 1 or 2.")
    lstm_kwargs: Plain = Field(
        default_factory=dict,
        description="More arguments of torch's LSTM or GRU: dropout between layers while training, bias.",
    )
    shared_recurrence: bool = Field(
        False, description="One memory for actor and critics, which then learn it together. Faster."
    )
    shared_lstm: bool = Field(
        False,
        description="With enable_critic_lstm: false, as in sb3-contrib: critics see the actor's memory, and only the "
        "actor learns it.",
    )
    enable_critic_lstm: bool = Field(True, description="false: critics without memory of their own.")
    features_extractor_class: str | None = Field(
        None,
        description="From observations to features: FlattenExtractor, NatureCNN, CombinedExtractor, or a class of your "
        "own as module:Class. null: what fits the policy's name.",
    )
    features_extractor_kwargs: Plain = Field(default_factory=dict, description="Its arguments.")
    share_features_extractor: bool = Field(True, description="One extractor for actor and critics.")
    normalize_images: bool = Field(True, description="Divide images by 255.")
    log_std_init: float = Field(
        0.0,
        description="Initial log standard deviation of Box actions, or with ppo.use_sde of the exploration matrix. "
        "Lower explores less at first; -3 to 0.",
    )
    full_std: bool = Field(
        True,
        description="For ppo.use_sde: a standard deviation for every element of the exploration matrix, not one for "
        "every feature.",
    )
    use_expln: bool = Field(False, description="For ppo.use_sde: standard deviations that grow more slowly above 1.")
    squash_output: bool = Field(
        False, description="Box actions by a tanh inside their bounds, instead of clipped to them."
    )

    @property
    def has_memory(self) -> bool:
        """Whether anything is remembered."""
        if self.core is not None:
            return self.core != "none"
        return "Lstm" in self.name or "Gru" in self.name


class CriticSection(Section):
    """What is predicted of returns, and what is made of it."""

    twin_critics: bool = Field(True, description="Two critics, of which the more cautious counts.")
    value_head: Annotated[str, AfterValidator(VALUE_HEADS.name)] = Field(
        "quantile",
        description="What a critic predicts: quantile, quantiles of returns; categorical, probabilities of given "
        "returns; or a class of your own as module:Class.",
    )
    value_head_kwargs: Plain = Field(default_factory=dict, description="Arguments of a value head of your own.")
    num_quantiles: Size = Field(32, ge=1, description="Of a quantile head. More are finer, and slower; 8 to 200.")
    huber_kappa: float = Field(
        0.1,
        gt=0,
        description="Of a quantile head, in units of the return's standard deviation. Larger is smoother, and bends "
        "quantiles towards the mean; up to 1.",
    )
    num_atoms: Size = Field(51, ge=2, description="Of a categorical head; 21 to 101.")
    v_min: float = Field(-10.0, description="First atom, in normalised returns.")
    v_max: float = Field(10.0, description="Last atom.")
    value_clip_mode: Literal["mean_only", "mean_and_variance", "per_quantile"] | None = Field(
        None, description="What ppo.clip_range_vf bounds of a predicted distribution. null: mean_only."
    )
    cvar_alpha: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Advantages from the mean of the worst share of predicted returns. Smaller is more cautious; 0.05 "
        "to 0.5. null: of all.",
    )
    return_scale_decay: float = Field(
        0.9,
        ge=0,
        lt=1,
        description="Memory of the running scale of returns, per update. Larger is steadier, and slower to follow.",
    )


class KLPenaltySection(Section):
    """How the coefficient of a KL penalty is controlled."""

    kp: float = Field(0.1, ge=0, description="Answers to the last update. Larger: quicker, and noisier.")
    ki: float = Field(
        0.4, ge=0, description="Answers to lasting errors. Larger: quicker to settle, until it oscillates."
    )
    kd: float = Field(0.0, ge=0, description="Answers to changes.")
    max_coef: float = Field(10.0, gt=0, description="Largest coefficient.")
    init_coef: float = Field(0.0, ge=0, description="Coefficient of the first update.")


def _penalty_form(value: Any) -> str:
    return "switch" if isinstance(value, bool) else "settings"


class PPOSection(Section):
    """How it learns from rollouts."""

    learning_rate: NotNegativeOrSchedule = Field(
        3e-4,
        description="Size of steps; 1e-5 to 1e-2. May be a schedule: {kind: linear, start: 3e-4, end: 0}, or cosine.",
    )
    n_steps: Count | None = Field(
        None,
        ge=1,
        description="Steps of every environment between updates. null: 128 with a recurrent policy, 2048 without.",
    )
    batch_size: Count | None = Field(
        None,
        ge=1,
        description="Samples in a minibatch, of whole sequences; the last one may be smaller. Larger: steadier, and "
        "faster on the clock; 32 to 4096. null: 128 with a recurrent policy, 64 without.",
    )
    n_epochs: Count = Field(
        10, ge=1, description="Passes over the rollout. More learn more from it, and move the policy further; 3 to 20."
    )
    sequence_length: Count | None = Field(
        None,
        ge=1,
        description="Steps through which gradients flow back in time; recurrent states carry on over its ends. Longer "
        "learns longer memories, and is slower. null: up to 128, and half of batch_size.",
    )
    gamma: Share = Field(0.99, description="Discount. Closer to 1 looks further ahead; 0.9 to 0.999.")
    gae_lambda: Share = Field(0.95, description="Of advantages. Closer to 1: less bias, more noise; 0.9 to 1.")
    clip_range: NotNegativeOrSchedule = Field(
        0.2, description="How far probabilities of actions may move in an update; 0.1 to 0.3. May be a schedule."
    )
    clip_range_vf: PositiveOrSchedule | None = Field(
        None,
        description="The same for predictions of returns, in their standard deviations; 0.1 to 1. null: not clipped.",
    )
    normalize_advantage: bool = Field(True, description="To mean 0 and standard deviation 1, once over the rollout.")
    vf_coef: float = Field(0.5, ge=0, description="Weight of the critics' loss; 0.25 to 1.")
    max_grad_norm: float = Field(0.5, gt=0, description="Gradients are clipped to this norm; 0.3 to 10.")
    use_sde: bool = Field(
        False,
        description="Generalised state-dependent exploration (gSDE) of Box actions: noise that changes as smoothly as "
        "the state, for robots. With policy.log_std_init: -2 or so.",
    )
    sde_sample_freq: Count = Field(
        -1,
        ge=-1,
        description="For use_sde: steps after which exploration matrices are drawn anew; 4 to 64. Fewer explore more, "
        "and less smoothly. -1: only when a rollout begins.",
    )
    target_kl: float | None = Field(
        None,
        gt=0,
        description="KL divergence that an update aims at; 0.005 to 0.05. null: as far as clipping lets it.",
    )
    kl_stop: Literal["absolute", "consecutive", "fraction"] | None = Field(
        "absolute",
        description="How target_kl ends an update: at the first minibatch 1.5 times beyond it, after some in a row, at "
        "some share of them, or not at all (null).",
    )
    kl_stop_patience: Count | None = Field(None, ge=1, description="For consecutive. null: 3.")
    kl_stop_fraction: float | None = Field(None, ge=0, lt=1, description="For fraction. null: 0.25.")
    kl_penalty: Annotated[
        Annotated[bool, Tag("switch")] | Annotated[KLPenaltySection, Tag("settings")], Discriminator(_penalty_form)
    ] = Field(
        False,
        description="Add the KL divergence to the loss, with a coefficient that is controlled to reach target_kl; "
        "true, or settings of the controller: {kp: 0.1, ki: 0.4, kd: 0, max_coef: 10, init_coef: 0}.",
    )
    ent_coef: float = Field(0.0, ge=0, description="Weight of the entropy. Larger explores more; 0 to 0.01.")
    ent_coef_final: float | None = Field(None, ge=0, description="Decay ent_coef linearly to this. null: constant.")
    ent_coef_min: float = Field(0.0, ge=0, description="Lower bound of ent_coef, before and after a boost.")
    ent_coef_start: Literal["immediately", "plateau"] = Field(
        "immediately", description="When the decay starts: at once, or on a plateau of returns."
    )
    ent_plateau_patience: Count | None = Field(
        None, ge=1, description="Updates without better returns that make a plateau. null: 10."
    )
    ent_boost_factor: float = Field(
        1.0, ge=1, description="Multiplies ent_coef while the explained variance is bad; up to 10. 1: never."
    )
    ent_boost_below: float | None = Field(None, le=1, description="Explained variance that counts as bad. null: 0.")
    ent_boost_cap: float | None = Field(None, ge=0, description="The most that a boost leads to. null: any.")
    skip_limit: Count = Field(
        10,
        ge=1,
        description="Minibatches in a row with a loss or gradient that is not finite, until training stops.",
    )
    cuda_graph: bool = Field(False, description="Capture the optimizer step in a CUDA graph. Needs run.device: cuda.")
    mixed_precision: bool = Field(False, description="Networks in bfloat16. Needs run.device: cuda.")


class OptimizerSection(Section):
    """Which optimizer."""

    name: str = Field(
        "adaptive_upgd",
        description=f"{', '.join(OPTIMIZERS.built_in)}, or a class of torch.optim's kind as module:Class. The "
        "UPGD family keeps networks plastic when the world changes.",
    )
    kwargs: Plain = Field(
        default_factory=dict,
        description="Its arguments, such as {sigma: 0.001, weight_decay: 0.001}. An lr here is ppo.learning_rate.",
    )

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        """Names of optimizers in any spelling: ``AdaptiveUPGD`` is ``adaptive_upgd``."""
        return OPTIMIZERS.name(name)


class VGSSection(Section):
    """Variance gradient scaling: smaller steps while gradients are mostly noise."""

    enabled: bool = Field(True, description="Whether gradients are scaled. If not, nothing else may be set here.")
    beta: float = Field(
        0.99,
        ge=0,
        lt=1,
        description="Memory of the averages, about 1 / (1 - beta) steps. Longer tells noise and signal apart better.",
    )
    alpha: float = Field(
        0.1, ge=0, description="Strength: where alpha * normalised variance = 1, the factor is 1/2; 0.01 to 1."
    )
    eps: float = Field(1e-8, gt=0, description="Least signal, relative to the energy of the gradient.")
    warmup_steps: Count = Field(
        100, ge=0, description="Optimizer steps in which averages are gathered and nothing is scaled; 10 to 1000."
    )
    min_scaling_factor: float = Field(0.1, gt=0, le=1, description="Least factor. Larger limits the effect.")
    variance_cap: float = Field(50.0, gt=0, description="Largest normalised variance that counts.")
    statistic: Literal["elementwise", "spatial_mean"] = Field(
        "elementwise",
        description="What is measured: the variance over time of every element, or of each tensor's mean, which is "
        "blind to noise that cancels within a tensor.",
    )
    apply_to: Literal["gradient", "update"] = Field(
        "gradient",
        description="Scale gradients, which Adam-like directions mostly cancel, or the step itself.",
    )
