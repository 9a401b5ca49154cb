"""Settings of the networks, :class:`driftproof.nn.policies.DistributionalPolicy`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from driftproof._arguments import ArgumentError, check_number
from driftproof._registry import CORES, VALUE_HEADS
from driftproof.settings.definition import MOST_UNITS, argument, check_values, setting

if TYPE_CHECKING:
    from gymnasium.spaces import Space
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
    from torch import nn

    from driftproof.nn.cores import Core
    from driftproof.nn.heads import ValueHead

    AnySpace: TypeAlias = Space[Any]
    Module: TypeAlias = nn.Module
else:
    AnySpace = BaseFeaturesExtractor = Core = Module = ValueHead = Any

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

_BUILT_IN = "it is built into the networks"
_OF_HEAD = {
    **dict.fromkeys(("num_quantiles", "huber_kappa"), "quantile"),
    **dict.fromkeys(("num_atoms", "v_min", "v_max"), "categorical"),
}
_RECURRENT = (
    *("lstm_hidden_size", "n_lstm_layers", "lstm_kwargs"),
    *("shared_recurrence", "shared_lstm", "enable_critic_lstm", "lasting_memory"),
)
_OF_SDE = ("full_std", "use_expln")


@dataclass(frozen=True)
class Widths:
    """Layer widths of the actor and the critics."""

    pi: list[int] = setting(doc="Widths of the actor's layers.", at_least=1, at_most=MOST_UNITS)
    vf: list[int] = setting(doc="Widths of the critics' layers.", at_least=1, at_most=MOST_UNITS)


@dataclass(frozen=True)
class PolicySettings:
    """Arguments of the networks."""

    observation_space: AnySpace = argument(doc="Observation space.")
    action_space: AnySpace = argument(doc="Action space: Discrete, MultiDiscrete, MultiBinary or Box.")
    _: KW_ONLY
    core: str | type[Core] | None = setting(
        None,
        "Recurrent core, if not the one in the policy's name: lstm, gru, none, or your own class, in configuration "
        "files as module:Class.",
        form=str | None,
        check=CORES.name,
    )
    net_arch: Sequence[int] | Mapping[str, Sequence[int]] | None = setting(
        None,
        "Widths of the layers after the recurrent core: a list for actor and critics, or {pi: [...], vf: [...]}. "
        "None: [64, 64], and no layer after a CNN.",
        at_least=1,
        at_most=MOST_UNITS,
        form=list[int] | Widths | None,
        fixed=_BUILT_IN,
    )
    activation_fn: type[Module] | None = setting(
        None, "Activation between these layers. None: tanh.", form=Activation, file_default="tanh"
    )
    ortho_init: bool = setting(
        True,
        "Orthogonal initialisation, with small weights of the action layer; the recurrent core has its own "
        "initialisation.",
    )
    lstm_hidden_size: int = setting(
        128,
        "Hidden units of the LSTM or GRU. More have a larger capacity, and are slower; 32 to 512.",
        at_least=1,
        at_most=MOST_UNITS,
        fixed=_BUILT_IN,
    )
    n_lstm_layers: int = setting(
        1, "Layers of the LSTM or GRU; 1 or 2.", at_least=1, at_most=MOST_UNITS, fixed=_BUILT_IN
    )
    lstm_kwargs: Mapping[str, Any] | None = setting(
        None,
        "Further arguments of the recurrent core; for LSTM and GRU those of torch: dropout between layers in "
        "training, bias.",
    )
    shared_recurrence: bool = setting(
        False, "Use one recurrent core for actor and critics, trained by both losses. Faster."
    )
    shared_lstm: bool = setting(
        False,
        "With enable_critic_lstm=False, as in sb3-contrib: critics use the actor's recurrent core, and only the actor "
        "trains it.",
    )
    enable_critic_lstm: bool = setting(True, "False: critics have no recurrent core of their own.")
    lasting_memory: bool = setting(
        False,
        "Keep the recurrent state when an episode ends, so that the agent can recognise regimes that return. Use it "
        "with env.last_step.",
    )
    features_extractor_class: type[BaseFeaturesExtractor] | None = setting(
        None,
        "Features extractor of observations: FlattenExtractor, NatureCNN, CombinedExtractor, or your own class, in "
        "configuration files as module:Class. None: the one of the policy's name.",
        form=str | None,
    )
    features_extractor_kwargs: Mapping[str, Any] | None = setting(
        None, "Arguments of the features extractor, except the observation space."
    )
    share_features_extractor: bool = setting(True, "One features extractor for actor and critics.")
    normalize_images: bool = setting(True, "Divide images by 255.")
    use_sde: bool = argument(
        False, "gSDE: exploration of Box actions by noise that is a function of the state. Set by the agent."
    )
    log_std_init: float = setting(
        0.0,
        "Initial log standard deviation of Box actions, or with use_sde of the exploration matrix. Lower explores less "
        "at first; -3 to 0.",
    )
    full_std: bool = setting(
        True,
        "For use_sde: one standard deviation per element of the exploration matrix instead of one per feature.",
    )
    use_expln: bool = setting(False, "For use_sde: standard deviations that grow more slowly above 1.")
    squash_output: bool = setting(False, "Squash Box actions into their bounds with a tanh, instead of clipping them.")
    layer_norm: bool = argument(
        False,
        "Layer normalisation without parameters before each activation, and on the output of a recurrent core or a "
        "CNN. Set by the agent.",
        fixed=_BUILT_IN,
    )
    twin_critics: bool = setting(
        True, "Two critics; advantages use the smaller of their values.", section="critic", fixed=_BUILT_IN
    )
    value_head: str | type[ValueHead] = setting(
        "quantile",
        "Distribution that a critic predicts: quantile (quantiles of returns), categorical (probabilities of fixed "
        "atoms), or your own class, in configuration files as module:Class.",
        section="critic",
        form=str,
        check=VALUE_HEADS.name,
    )
    value_head_kwargs: Mapping[str, Any] | None = setting(
        None, "Further arguments of your own value head class.", section="critic"
    )
    num_quantiles: int = setting(
        32,
        "Quantiles of a quantile head. More are finer, and slower; 8 to 200.",
        at_least=1,
        at_most=MOST_UNITS,
        section="critic",
        fixed=_BUILT_IN,
    )
    huber_kappa: float = setting(
        0.1,
        "Threshold of a quantile head's Huber loss, in units of the return's standard deviation. Larger is "
        "smoother, and biases quantiles towards the mean; up to 1.",
        above=0,
        section="critic",
        fixed=_BUILT_IN,
    )
    num_atoms: int = setting(
        51,
        "Atoms of a categorical head; 21 to 101.",
        at_least=2,
        at_most=MOST_UNITS,
        section="critic",
        fixed=_BUILT_IN,
    )
    v_min: float = setting(-10.0, "Smallest atom, in normalised returns.", section="critic", fixed=_BUILT_IN)
    v_max: float = setting(10.0, "Largest atom, in normalised returns.", section="critic", fixed=_BUILT_IN)

    def __post_init__(self) -> None:
        check_values(self)
        check_number("v_min", self.v_min, below=self.v_max)
        self._check_sharing()

    def _check_sharing(self) -> None:
        if self.shared_recurrence and self.shared_lstm:
            raise ArgumentError(
                "shared_recurrence=True and shared_lstm=True exclude each other: use shared_recurrence=True to let "
                "the critics train the recurrent core too, shared_lstm=True to let only the actor train it"
            )
        if self.shared_recurrence and not self.enable_critic_lstm:
            raise ArgumentError(
                "shared_recurrence=True shares the actor's recurrent core with the critics, "
                "enable_critic_lstm=False gives them none: remove one of the two"
            )
        if self.shared_lstm and self.enable_critic_lstm:
            raise ArgumentError(
                "shared_lstm=True and enable_critic_lstm=True give the critics two recurrent cores: use "
                "shared_lstm=True, enable_critic_lstm=False to let only the actor train the core, or "
                "shared_recurrence=True to let critics train it too"
            )
        if (self.shared_recurrence or self.shared_lstm) and not self.share_features_extractor:
            raise ArgumentError(
                "critics that share the actor's core share its features: share_features_extractor=False has no effect"
            )


def unused_by_policy(value_head: str | None = None, has_memory: bool = True, use_sde: bool = True) -> dict[str, str]:
    """Return the settings of the networks that have no effect, each with the setting that it needs.

    Args:
        value_head: Name of the value head; ``None``: unknown.
        has_memory: Whether the policy is recurrent.
        use_sde: Whether the policy uses gSDE.
    """
    unused = {name: f"value_head={head!r}" for name, head in _OF_HEAD.items() if value_head not in (None, head)}
    if not has_memory:
        unused |= dict.fromkeys(_RECURRENT, "recurrent policies")
    if not use_sde:
        unused |= dict.fromkeys(_OF_SDE, "use_sde=True")
    return unused
