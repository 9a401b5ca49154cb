"""Policies: from observations through a recurrent core to distributions of actions and of returns."""

from __future__ import annotations

from driftproof._requirements import require

require("driftproof.nn.policies", "rl", "gymnasium", "stable_baselines3")

import math
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from gymnasium import spaces
from stable_baselines3.common.torch_layers import (
    BaseFeaturesExtractor,
    CombinedExtractor,
    FlattenExtractor,
    NatureCNN,
)
from torch import Tensor, nn

from driftproof._registry import VALUE_HEADS
from driftproof.nn.acting import Acting
from driftproof.nn.cores import (
    Core,
    CoreName,
    NoCore,
    State,
    check_core_options,
    make_core,
    masked_pair,
)
from driftproof.nn.dense import DenseNetworks, dense_networks, is_watched
from driftproof.nn.distributions import Gaussian, distribution_for
from driftproof.nn.exploration import StateDependentExploration
from driftproof.nn.heads import CategoricalHead, QuantileHead, ValueHead
from driftproof.nn.networks import Critic, dense_network, layer_widths, output_width
from driftproof.nn.recycling import recycle
from driftproof.nn.segments import Segments
from driftproof.nn.types import SECOND_CRITIC, Evaluation, Observation, PolicyState, Rewiring, Wiring, map_observation
from driftproof.nn.wiring import rewire, wiring_of
from driftproof.settings.definition import documented, settings_of, takes
from driftproof.settings.policy import PolicySettings

Self = TypeVar("Self", bound="DistributionalPolicy")


@documented(PolicySettings)
class DistributionalPolicy(Acting):
    """Actor and critics: features, a recurrent core, a small network each, and their heads."""

    default_core: ClassVar[CoreName] = "lstm"
    default_extractor: ClassVar[type[BaseFeaturesExtractor]] = FlattenExtractor
    optimizer: torch.optim.Optimizer
    """The agent's optimizer, stored here because Stable-Baselines3 expects it here."""

    @takes(PolicySettings)
    def __init__(self, given: PolicySettings) -> None:
        extractor = self.default_extractor if given.features_extractor_class is None else given.features_extractor_class
        self._check_extractor(extractor, given.observation_space)
        super().__init__(
            given.observation_space,
            given.action_space,
            extractor,
            given.features_extractor_kwargs,
            normalize_images=given.normalize_images,
            squash_output=given.squash_output,
        )
        core = self.default_core if given.core is None else given.core
        activation_fn = nn.Tanh if given.activation_fn is None else given.activation_fn
        self._arguments = {name: getattr(given, name) for name in settings_of(PolicySettings)} | {
            "core": core,
            "activation_fn": activation_fn,
            "features_extractor_class": extractor,
        }
        shared = given.shared_recurrence or given.shared_lstm
        self.distribution = distribution_for(given.action_space, given.squash_output)
        self.activation_fn, self.ortho_init = activation_fn, given.ortho_init
        self.share_features_extractor, self.log_std_init = given.share_features_extractor, given.log_std_init
        self.shared_lstm, self.enable_critic_lstm = given.shared_lstm, given.enable_critic_lstm
        self.lstm_kwargs = dict(given.lstm_kwargs or {})
        check_core_options(core, self.lstm_kwargs)

        self.features_extractor = self.make_features_extractor()
        features = int(self.features_extractor.features_dim)  # Some extractors have NumPy integers.
        self.actor_core = make_core(core, features, given.lstm_hidden_size, given.n_lstm_layers, self.lstm_kwargs)
        actor_arch, critic_arch = layer_widths(given.net_arch, self.features_extractor)
        self.net_arch = {"pi": actor_arch, "vf": critic_arch} if given.net_arch is None else given.net_arch
        self.layer_norm, self.lasting_memory = given.layer_norm, given.lasting_memory
        self.actor_network = self._dense_network(self.actor_core, actor_arch)
        self.action_head = nn.Linear(output_width(self.actor_network, self.actor_core.units), self._outputs())
        self.use_sde = given.use_sde
        self.exploration: StateDependentExploration | None = None
        if given.use_sde:
            if not isinstance(self.distribution, Gaussian):
                raise ValueError(f"use_sde=True needs continuous actions: a Box, not {given.action_space}")
            self.exploration = StateDependentExploration(
                self.action_head.in_features, self.distribution.dim, given.full_std, given.use_expln
            )
            self.log_std = nn.Parameter(self.exploration.initial_log_std(given.log_std_init))
        elif isinstance(self.distribution, Gaussian):
            self.log_std = nn.Parameter(torch.full((self._outputs(),), float(given.log_std_init)))

        # Critics come last, so that the parameters of a single one are the first of two.
        self.critic_features_extractor = None if given.share_features_extractor else self.make_features_extractor()
        critic_core = core if given.enable_critic_lstm else "none"
        self.critic_core: Core | None = None
        if not shared:
            self.critic_core = make_core(
                critic_core, features, given.lstm_hidden_size, given.n_lstm_layers, self.lstm_kwargs
            )

        head_class: type[ValueHead] = VALUE_HEADS.load(given.value_head)
        head_options = {
            QuantileHead: {"num_quantiles": given.num_quantiles, "huber_kappa": given.huber_kappa},
            CategoricalHead: {"num_atoms": given.num_atoms, "v_min": given.v_min, "v_max": given.v_max},
        }.get(head_class, {}) | dict(given.value_head_kwargs or {})

        last_core = self.actor_core if self.critic_core is None else self.critic_core
        networks = [self._dense_network(last_core, critic_arch) for _ in range(2 if given.twin_critics else 1)]
        self.critics = nn.ModuleList(
            [Critic(each, head_class(output_width(each, last_core.units), **head_options)) for each in networks]
        )
        if given.ortho_init:
            self._initialise()
        for each in self._cores():
            each.initialise()

    @classmethod
    def _check_extractor(cls, extractor: Any, observation_space: spaces.Space[Any]) -> None:
        if not isinstance(extractor, type) or not issubclass(extractor, BaseFeaturesExtractor):
            raise TypeError(f"features_extractor_class must be a subclass of BaseFeaturesExtractor, not {extractor!r}")
        wants_dict = issubclass(extractor, CombinedExtractor)
        if issubclass(extractor, FlattenExtractor | NatureCNN | CombinedExtractor) and wants_dict != isinstance(
            observation_space, spaces.Dict
        ):
            core = {"lstm": "LstmPolicy", "gru": "GruPolicy", "none": "Policy"}[cls.default_core]
            right = f"Mlp{core} or Cnn{core}" if wants_dict else f"MultiInput{core}"
            raise ValueError(f"{cls.__name__} does not fit the observation space {observation_space}: use {right}")

    def _dense_network(self, core: Core, widths: list[int]) -> nn.Sequential:
        """Dense layers on the output of a core."""
        # Inputs that are not learned, such as observations, keep their scale.
        is_learned = not isinstance(core, NoCore) or isinstance(self.features_extractor, NatureCNN)
        norms = self.layer_norm, self.layer_norm and is_learned
        return dense_network(core.units, widths, self.activation_fn, *norms)

    def _outputs(self) -> int:
        """Width of the action network's output; a Gaussian's standard deviations are separate parameters."""
        return self.distribution.size // 2 if isinstance(self.distribution, Gaussian) else self.distribution.size

    def _initialise(self) -> None:
        modules: list[tuple[nn.Module, float]] = [
            (self.features_extractor, math.sqrt(2)),
            (self.actor_network, math.sqrt(2)),
            (self.action_head, 0.01),
        ]
        if self.critic_features_extractor is not None:
            modules.append((self.critic_features_extractor, math.sqrt(2)))
        for critic in self._critics():
            modules += [(critic.network, math.sqrt(2)), (critic.head, 1.0)]
        for module, gain in modules:
            for layer in module.modules():
                self.init_weights(layer, gain)

    @property
    def heads(self) -> list[ValueHead]:
        """The value heads, one for each critic."""
        return [critic.head for critic in self._critics()]

    def _critics(self) -> list[Critic]:
        return list(self.critics)  # type: ignore[arg-type]

    @property
    def is_recurrent(self) -> bool:
        """Whether there is a recurrent state."""
        return any(not isinstance(core, NoCore) for core in self._cores())

    def _cores(self) -> list[Core]:
        return [self.actor_core] if self.critic_core is None else [self.actor_core, self.critic_core]

    def initial_state(self, batch: int) -> PolicyState:
        """The initial recurrent state of ``batch`` sequences."""
        critic = () if self.critic_core is None else self.critic_core.initial_state(batch, self.device)
        return PolicyState(self.actor_core.initial_state(batch, self.device), critic)

    def predict_returns(self, memory: Tensor) -> tuple[Tensor, ...]:
        """Each critic's prediction from the output of the critics' core."""
        return tuple(critic(memory) for critic in self.critics)

    def evaluate(
        self,
        observation: Observation,
        state: PolicyState,
        segments: Segments | None = None,
        keep: Tensor | None = None,
    ) -> Evaluation:
        """Evaluate sequences of observations ``[T, B, ...]`` from their initial recurrent state.

        Args:
            observation: Observations.
            state: Recurrent state before the first step.
            segments: Where episodes start, for one call over time.
            keep: 0 where they start ``[T, B]``, for a loop over time with static shapes instead.
        """
        memory, critic_memory = self._memories(observation, state, segments, keep)
        return Evaluation(self._sequence_parameters(memory), self._sequence_predictions(critic_memory))

    def _memories(
        self, observation: Observation, state: PolicyState, segments: Segments | None, keep: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Outputs ``[T, B, units]`` of the actor's and of the critics' core."""
        features = self._sequence_features(observation, self.features_extractor)
        critic_features = features
        if self.critic_features_extractor is not None:
            critic_features = self._sequence_features(observation, self.critic_features_extractor)
        return self.run_cores((features, critic_features), state, segments, keep)

    def run_cores(
        self, features: tuple[Tensor, Tensor], state: PolicyState, segments: Segments | None, keep: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Outputs of the cores for actor and critics, from the features of each."""
        if self.critic_core is None:
            memory = _run(self.actor_core, features[0], state.actor, segments, keep)
            return memory, self._shared(memory)
        if keep is not None:
            return masked_pair((self.actor_core, self.critic_core), features, state, keep)
        memory = self.actor_core(features[0], state.actor, segments)
        return memory, self.critic_core(features[1], state.critic, segments)

    @property
    def has_kernels(self) -> bool:
        """Whether the recurrence is one kernel, so that masks of episode starts are faster than segments."""
        return all(core.has_kernels or isinstance(core, NoCore) for core in self._cores()) and self.is_recurrent

    def dense_networks(self) -> DenseNetworks | None:
        """Dense layers of actor and critics for :meth:`evaluate_dense`, if they can be differentiated by formula."""
        is_plain = (
            self.exploration is None
            and type(self).evaluate is DistributionalPolicy.evaluate
            and type(self).predict_returns is DistributionalPolicy.predict_returns
            and all(type(head).forward is ValueHead.forward for head in self.heads)
            and not any(is_watched(module) for module in self.modules())
        )
        if not is_plain:
            return None
        critics = [[*critic.network, critic.head.linear] for critic in self._critics()]
        return dense_networks([[*self.actor_network, self.action_head], *critics])

    def evaluate_dense(
        self,
        networks: DenseNetworks,
        observation: Observation,
        state: PolicyState,
        segments: Segments | None = None,
        keep: Tensor | None = None,
    ) -> Evaluation:
        """What :meth:`evaluate` returns, with gradients that end at the outputs of these networks."""
        memory, critic_memory = self._memories(observation, state, segments, keep)
        outputs, *predictions = networks([memory, *[critic_memory] * len(self.critics)])
        return Evaluation(self._with_spread(outputs, outputs), tuple(predictions))

    def evaluate_actor(
        self,
        observation: Observation,
        state: PolicyState,
        segments: Segments | None = None,
        keep: Tensor | None = None,
    ) -> Tensor:
        """The parameters that :meth:`evaluate` returns, without evaluating the critics."""
        features = self._sequence_features(observation, self.features_extractor)
        return self._sequence_parameters(_run(self.actor_core, features, state.actor, segments, keep))

    def evaluate_critics(
        self,
        observation: Observation,
        state: PolicyState,
        segments: Segments | None = None,
        keep: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """The predictions that :meth:`evaluate` returns, without evaluating the actor."""
        core, start = (self.actor_core, state.actor) if self.critic_core is None else (self.critic_core, state.critic)
        own = self.critic_features_extractor
        features = self._sequence_features(observation, self.features_extractor if own is None else own)
        memory = _run(core, features, start, segments, keep)
        return self._sequence_predictions(self._shared(memory) if self.critic_core is None else memory)

    def _sequence_parameters(self, memory: Tensor) -> Tensor:
        """Parameters of the actions' distribution ``[T, B, size]``."""
        # Flattened once: given more axes, every dense layer would reshape them to rows and back.
        parameters, _ = self._actor_outputs(memory.flatten(0, 1))
        return parameters.view(*memory.shape[:2], -1)

    def _sequence_predictions(self, memory: Tensor) -> tuple[Tensor, ...]:
        """Each critic's prediction ``[T, B, outputs]``."""
        predictions = self.predict_returns(memory.flatten(0, 1))
        return tuple(prediction.view(*memory.shape[:2], -1) for prediction in predictions)

    def _shared(self, memory: Tensor) -> Tensor:
        """The output of the actor's core for the critics, detached with ``shared_lstm``."""
        return memory.detach() if self.shared_lstm else memory

    def _sequence_features(self, observation: Observation, extractor: BaseFeaturesExtractor) -> Tensor:
        """Features ``[T, B, features]``."""
        first = observation if isinstance(observation, Tensor) else next(iter(observation.values()))
        flat = map_observation(observation, lambda part: part.flatten(0, 1))
        features: Tensor = self.extract_features(flat, extractor)
        return features.view(*first.shape[:2], -1)

    def _features(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """Features for the actor and for the critics ``[B, features]``."""
        features: Tensor = self.extract_features(observation, self.features_extractor)
        if self.critic_features_extractor is None:
            return features, features
        return features, self.extract_features(observation, self.critic_features_extractor)

    def _actor_outputs(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Parameters of the actions' distribution, and the actor's last features, from the output of its core."""
        latent = self.actor_network(memory)
        return self._with_spread(self.action_head(latent), latent), latent

    def _with_spread(self, outputs: Tensor, latent: Tensor) -> Tensor:
        """The distribution's parameters: a Gaussian's means and logarithms of standard deviations."""
        if not isinstance(self.distribution, Gaussian):
            return outputs
        log_std = self.log_std if self.exploration is None else self.exploration.log_std(latent, self.log_std)
        return torch.cat((outputs, log_std.expand_as(outputs)), -1)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As in every module; a state with one critic loads into a policy with two, whose second keeps its weights."""
        if self.lacks_second_critic(state_dict):
            warnings.warn(
                "the state has one critic and this policy two: the second keeps its own weights", stacklevel=2
            )
            second = {key: value for key, value in self.state_dict().items() if key.startswith(SECOND_CRITIC)}
            state_dict = {**state_dict, **second}
        return super().load_state_dict(state_dict, strict, assign)

    def lacks_second_critic(self, state_dict: Mapping[str, Any]) -> bool:
        """Whether a state is that of a policy with one critic, while this one has two."""
        keys = [key for key in state_dict if key.startswith("critics.")]
        return len(self.critics) == 2 and bool(keys) and not any(key.startswith(SECOND_CRITIC) for key in keys)

    def recycle(
        self, observation: Observation, state: PolicyState, segments: Segments | None, threshold: float
    ) -> tuple[Tensor, dict[Tensor, Tensor]]:
        """Recycle units that are dormant in these sequences; see :func:`driftproof.nn.recycling.recycle`."""
        return recycle(self, partial(self.evaluate, observation, state, segments), threshold)

    def wiring(self) -> Wiring | None:
        """What :meth:`rewire` can reorder; ``None``: nothing."""
        return wiring_of(self)

    def rewire(self, found: Rewiring) -> None:
        """Reorder and invert sensors and actions; see :func:`driftproof.nn.wiring.rewire`."""
        rewire(self, found)

    def fresh(self: Self) -> Self:
        """A policy like this one with new random weights, drawn from torch's global generator."""
        return type(self)(**self._get_constructor_parameters())

    def last_parameters(self) -> list[nn.Parameter]:
        """Parameters of heads, of the last layer before them, and of the spread of actions."""
        modules: list[nn.Module] = [self.action_head]
        for network in (self.actor_network, *(critic.network for critic in self._critics())):
            modules += [layer for layer in network if isinstance(layer, nn.Linear)][-1:]
        parameters = [parameter for module in (*modules, *self.heads) for parameter in module.parameters()]
        return [*parameters, *([self.log_std] if hasattr(self, "log_std") else [])]

    def _get_constructor_parameters(self) -> dict[str, Any]:
        """Constructor arguments of this policy. Subclasses add their own."""
        return dict(self._arguments)


class MlpPolicy(DistributionalPolicy):
    """Feed-forward policy."""

    default_core = "none"


class MlpLstmPolicy(DistributionalPolicy):
    """Recurrent policy with an LSTM."""


class MlpGruPolicy(DistributionalPolicy):
    """Recurrent policy with a GRU."""

    default_core = "gru"


class CnnPolicy(MlpPolicy):
    """Feed-forward policy for images."""

    default_extractor = NatureCNN


class CnnLstmPolicy(MlpLstmPolicy):
    """Recurrent policy for images, with an LSTM."""

    default_extractor = NatureCNN


class CnnGruPolicy(MlpGruPolicy):
    """Recurrent policy for images, with a GRU."""

    default_extractor = NatureCNN


class MultiInputPolicy(MlpPolicy):
    """Feed-forward policy for dictionaries of observations."""

    default_extractor = CombinedExtractor


class MultiInputLstmPolicy(MlpLstmPolicy):
    """Recurrent policy for dictionaries of observations, with an LSTM."""

    default_extractor = CombinedExtractor


class MultiInputGruPolicy(MlpGruPolicy):
    """Recurrent policy for dictionaries of observations, with a GRU."""

    default_extractor = CombinedExtractor


NAMED_POLICIES: dict[str, type[DistributionalPolicy]] = {
    kind.__name__: kind
    for kind in (
        *(MlpPolicy, MlpLstmPolicy, MlpGruPolicy),
        *(CnnPolicy, CnnLstmPolicy, CnnGruPolicy),
        *(MultiInputPolicy, MultiInputLstmPolicy, MultiInputGruPolicy),
    )
}
"""Policies by name."""


def _run(core: Core, features: Tensor, start: State, segments: Segments | None, keep: Tensor | None) -> Tensor:
    return core(features, start, segments) if keep is None else core.masked(features, start, keep)
