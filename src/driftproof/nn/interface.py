"""Public methods of a policy, with the names of Stable-Baselines3 and sb3-contrib."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO, ClassVar, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, FlattenExtractor
from stable_baselines3.common.utils import get_device
from torch import Tensor, nn

from driftproof.nn.cores import Core, State, mask_state
from driftproof.nn.distributions import ActionDistribution
from driftproof.nn.files import ValueScale, read_policy, write_policy
from driftproof.nn.heads import ValueHead
from driftproof.nn.normalization import FixedMoments, InputNormalizer, normalized
from driftproof.nn.policy_distribution import PolicyDistribution
from driftproof.nn.types import Observation, batch_size

Self = TypeVar("Self", bound="PolicyInterface")


class RNNStates(NamedTuple):
    """Recurrent states of actor and critics, as sb3-contrib has them: hidden and cell state ``[layers, n, units]``.

    Critics without their own core have the actor's.
    """

    pi: State
    vf: State


class PolicyInterface(BasePolicy):
    """Predictions and evaluations with networks that a subclass builds.

    Feed-forward policies have the signatures of Stable-Baselines3's ``ActorCriticPolicy``, recurrent ones those of
    sb3-contrib's ``RecurrentActorCriticPolicy``: with recurrent states and flags of episode starts, observations of
    whole sequences concatenated, and states returned with actions and distributions. Without states, every observation
    is the first of an episode.
    """

    predicts_distributions: ClassVar[bool] = True
    """Whether critics predict distributions of normalised returns, rather than a mean in units of rewards."""
    distribution: ActionDistribution
    features_extractor: BaseFeaturesExtractor
    critic_features_extractor: BaseFeaturesExtractor | None
    actor_core: Core
    critic_core: Core | None
    action_head: nn.Linear
    value_scale: ValueScale | None = None
    """The agent's return scale, in units of which critics predict.

    Without it, values are in these units and not in those of rewards.
    """
    lasting_memory: bool = False
    """Whether the recurrent state outlasts episodes: flags of episode starts are then ignored."""
    normalizer: InputNormalizer | None = None
    """The agent's normaliser of observations.

    Public methods normalise the observations that they get; ``stepper()`` and ``evaluate...()`` of sequences take
    normalised ones, as rollouts hold them.
    """

    @property
    @abstractmethod
    def heads(self) -> list[ValueHead]:
        """The value heads, one for each critic."""

    @property
    @abstractmethod
    def is_recurrent(self) -> bool:
        """Whether there is a recurrent state."""

    @abstractmethod
    def predict_returns(self, memory: Tensor) -> tuple[Tensor, ...]:
        """Each critic's prediction from the output of the critics' core."""

    @abstractmethod
    def choose(self, parameters: Tensor, latent: Tensor, deterministic: bool) -> Tensor:
        """Actions for the environments."""

    @abstractmethod
    def _features(self, observation: Observation) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def _actor_outputs(self, memory: Tensor) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def _shared(self, memory: Tensor) -> Tensor: ...

    @abstractmethod
    def _noise(self, parameters: Tensor, latent: Tensor) -> Tensor: ...

    @property
    def features_dim(self) -> int:
        """Width of the features."""
        return int(self.features_extractor.features_dim)

    @property
    def pi_features_extractor(self) -> BaseFeaturesExtractor:
        """The actor's features extractor."""
        return self.features_extractor

    @property
    def vf_features_extractor(self) -> BaseFeaturesExtractor:
        """The critics' features extractor, which may be the actor's."""
        own = self.critic_features_extractor
        return self.features_extractor if own is None else own

    @property
    def action_net(self) -> nn.Linear:
        """Output layer with the parameters of actions."""
        return self.action_head

    @property
    def lstm_actor(self) -> nn.LSTM | nn.GRU | None:
        """The actor's recurrent network; ``None`` without one."""
        return getattr(self.actor_core, "recurrence", None)

    @property
    def lstm_critic(self) -> nn.LSTM | nn.GRU | None:
        """The critics' own recurrent network; ``None`` without one."""
        return getattr(self.critic_core, "recurrence", None)

    @property
    def lstm_hidden_state_shape(self) -> tuple[int, int, int]:
        """Shape of the recurrent state of one sequence."""
        return (self.actor_core.layers, 1, self.actor_core.units)

    def normalized(self, observation: Observation) -> Observation:
        """Observations as the networks take them."""
        return observation if self.normalizer is None else normalized(observation, self.normalizer.moments)

    def forward(
        self,
        obs: Observation,
        lstm_states: Any = None,
        episode_starts: Tensor | None = None,
        deterministic: bool = False,
    ) -> tuple[Any, ...]:
        """Actions, values ``[n, 1]`` and log-probabilities ``[n]``; of a recurrent policy, the states after them too.

        Args:
            obs: Observations ``[n, ...]``.
            lstm_states: :class:`RNNStates` before them, of a recurrent policy. Of others, ``deterministic``.
            episode_starts: 1 where an episode starts and the state is reset ``[n]``.
            deterministic: Choose the most probable actions.
        """
        if isinstance(lstm_states, bool):  # policy(obs, True), as in Stable-Baselines3
            lstm_states, deterministic = None, lstm_states
        before = self._rnn_states(lstm_states, obs)
        features, critic_features = self._features(self.normalized(obs))
        memory, after = _run(self.actor_core, features, before.pi, self._resets(episode_starts))
        critic_memory, critic_after = self._shared(memory), after
        if self.critic_core is not None:
            critic_memory, critic_after = _run(
                self.critic_core, critic_features, before.vf, self._resets(episode_starts)
            )
        distribution = self._distribution(memory)
        actions = distribution.get_actions(deterministic)
        log_prob = distribution.log_prob(actions)
        result = actions.reshape((-1, *(self.action_space.shape or ()))), self._values(critic_memory), log_prob
        return (*result, RNNStates(after, critic_after or after)) if self.is_recurrent else result

    def evaluate_actions(
        self,
        obs: Observation,
        actions: Tensor,
        lstm_states: Any = None,
        episode_starts: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Values ``[n, 1]``, log-probabilities of actions ``[n]`` and entropies ``[n]``, with gradients.

        Args:
            obs: Observations ``[n, ...]``.
            actions: Actions from :meth:`forward`, or as environments take them.
            lstm_states: :class:`RNNStates` before them, of a recurrent policy.
            episode_starts: 1 where an episode starts ``[n]``.
        """
        before = self._rnn_states(lstm_states, obs)
        features, critic_features = self._features(self.normalized(obs))
        memory, _ = _run(self.actor_core, features, before.pi, self._resets(episode_starts))
        critic_memory = self._shared(memory)
        if self.critic_core is not None:
            critic_memory, _ = _run(self.critic_core, critic_features, before.vf, self._resets(episode_starts))
        distribution = self._distribution(memory)
        return self._values(critic_memory), distribution.log_prob(actions), distribution.entropy()

    def get_distribution(
        self, obs: Observation, lstm_states: Any = None, episode_starts: Tensor | None = None
    ) -> PolicyDistribution | tuple[PolicyDistribution, State]:
        """The distribution of actions; of a recurrent policy, with the actor's state after them.

        Args:
            obs: Observations ``[n, ...]``.
            lstm_states: The actor's state before them, ``RNNStates.pi``, of a recurrent policy.
            episode_starts: 1 where an episode starts ``[n]``.
        """
        before = self._core_state(self.actor_core, getattr(lstm_states, "pi", lstm_states), obs)
        features: Tensor = self.extract_features(self.normalized(obs), self.features_extractor)
        memory, after = _run(self.actor_core, features, before, self._resets(episode_starts))
        distribution = self._distribution(memory)
        return (distribution, after) if self.is_recurrent else distribution

    def predict_values(self, obs: Observation, lstm_states: Any = None, episode_starts: Tensor | None = None) -> Tensor:
        """Values ``[n, 1]``: the minimum over the critics' mean returns, in units of rewards.

        Without an agent, they are in standard deviations of returns; see :attr:`value_scale`.

        Args:
            obs: Observations ``[n, ...]``.
            lstm_states: The critics' state before them, ``RNNStates.vf``, of a recurrent policy.
            episode_starts: 1 where an episode starts ``[n]``.
        """
        core = self.actor_core if self.critic_core is None else self.critic_core
        before = self._core_state(core, getattr(lstm_states, "vf", lstm_states), obs)
        features: Tensor = self.extract_features(self.normalized(obs), self.vf_features_extractor)
        memory, _ = _run(core, features, before, self._resets(episode_starts))
        return self._values(self._shared(memory) if self.critic_core is None else memory)

    def extract_features(self, obs: Any, features_extractor: BaseFeaturesExtractor) -> Any:
        """Features of observations ``[n, ...]``, which are preprocessed first."""
        if (
            type(features_extractor) is FlattenExtractor
            and isinstance(self.observation_space, spaces.Box)
            and obs.dim() == 2
            and obs.dtype is torch.float32
            and not features_extractor._forward_hooks
        ):
            return obs
        return super().extract_features(obs, features_extractor)

    def _distribution(self, memory: Tensor) -> PolicyDistribution:
        parameters, latent = self._actor_outputs(memory)
        return PolicyDistribution(self.distribution, parameters, lambda: self._noise(parameters, latent))

    def _values(self, memory: Tensor) -> Tensor:
        predictions = zip(self.heads, self.predict_returns(memory), strict=True)
        value = torch.stack([head.mean(prediction) for head, prediction in predictions]).amin(0)
        if self.value_scale is not None:
            scale = self.value_scale.snapshot
            value = value * scale.std + scale.mean
        return value.unsqueeze(-1)

    def _rnn_states(self, states: Any, obs: Observation) -> RNNStates:
        pi, vf = (None, None) if states is None else states
        critics = () if self.critic_core is None else self._core_state(self.critic_core, vf, obs)
        return RNNStates(self._core_state(self.actor_core, pi, obs), critics)

    def _core_state(self, core: Core, state: Any, obs: Observation) -> State:
        """The given state after a check; zeros for sequences of one step if there is none."""
        batch = batch_size(obs)
        if state is None or core.parts == 0:
            return core.initial_state(batch, self.device)
        shapes = [tuple(getattr(part, "shape", ())) for part in state]
        sequences = shapes[0][1] if shapes and len(shapes[0]) == 3 else 0
        if shapes != [(core.layers, sequences, core.units)] * core.parts or not sequences or batch % sequences:
            raise ValueError(
                f"lstm_states must be {core.parts} tensors of shape ({core.layers}, n, {core.units}), for n sequences "
                f"that {batch} observations make up, not {shapes}"
            )
        return tuple(torch.as_tensor(part, device=self.device, dtype=torch.float32) for part in state)

    @torch.no_grad()
    def predict(
        self,
        observation: npt.NDArray[Any] | dict[str, npt.NDArray[Any]],
        state: tuple[npt.NDArray[Any], ...] | None = None,
        episode_start: npt.NDArray[Any] | None = None,
        deterministic: bool = False,
    ) -> tuple[npt.NDArray[Any], tuple[npt.NDArray[Any], ...] | None]:
        """Actions for observations, one or a batch.

        Args:
            observation: One observation, or a batch.
            state: State from the last call; ``None`` at the beginning.
            episode_start: Where a new episode starts and the state is reset.
            deterministic: Choose the most probable action instead of a random one.

        Returns:
            The actions, of the action space's dtype, and the state for the next call: arrays ``[layers, B, units]``,
            ``None`` for feed-forward policies.
        """
        given: Any = observation
        if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], dict):
            raise ValueError(
                "the observation is a tuple of observation and info, as Gymnasium's reset() returns it: pass the first "
                "of the two (you are mixing Gym API with that of VecEnv, whose reset() returns observations only)"
            )
        self.set_training_mode(False)
        tensors, vectorised = self.obs_to_tensor(observation)
        before = self._given_state(self.actor_core, state, batch_size(tensors), episode_start)
        features: Tensor = self.extract_features(self.normalized(tensors), self.features_extractor)
        memory, after = self.actor_core.step(features, before)
        chosen = self.choose(*self._actor_outputs(memory), deterministic).cpu().numpy()
        actions = chosen.astype(self.action_space.dtype, copy=False)
        if not vectorised:
            actions = actions.squeeze(axis=0)
        return actions, tuple(part.cpu().numpy() for part in after) or None

    @torch.no_grad()
    def predict_distribution(
        self,
        observation: npt.NDArray[Any] | dict[str, npt.NDArray[Any]],
        state: tuple[npt.NDArray[Any], ...] | None = None,
        episode_start: npt.NDArray[Any] | None = None,
    ) -> tuple[tuple[Tensor, ...], tuple[npt.NDArray[Any], ...] | None]:
        """Each critic's prediction of normalised returns ``[B, outputs]``, and the critics' state for the next call.

        Takes the arguments of :meth:`predict`; the state is the critics', not the actor's.
        """
        self.set_training_mode(False)
        tensors, _ = self.obs_to_tensor(observation)
        core = self.actor_core if self.critic_core is None else self.critic_core
        before = self._given_state(core, state, batch_size(tensors), episode_start)
        features: Tensor = self.extract_features(self.normalized(tensors), self.vf_features_extractor)
        memory, after = core.step(features, before)
        return self.predict_returns(memory), tuple(part.cpu().numpy() for part in after) or None

    def _resets(self, episode_starts: Tensor | None) -> Tensor | None:
        """Where the recurrent state is reset."""
        return None if self.lasting_memory else episode_starts

    def _given_state(
        self,
        core: Core,
        state: tuple[npt.NDArray[Any], ...] | None,
        batch: int,
        episode_start: npt.NDArray[Any] | None,
    ) -> State:
        if state is None or core.parts == 0:
            return core.initial_state(batch, self.device)
        shape = (core.layers, batch, core.units)
        if len(state) != core.parts or any(part.shape != shape for part in state):
            raise ValueError(
                f"state must be {core.parts} arrays of shape {shape}, as the last call returned them, "
                f"not {[getattr(part, 'shape', part) for part in state]}"
            )
        tensors = tuple(torch.as_tensor(part, device=self.device) for part in state)
        if episode_start is None:
            return tensors
        starts = np.asarray(episode_start)
        if starts.shape not in ((), (1,), (batch,)):
            raise ValueError(f"episode_start must be one flag for each of {batch} observations, not {episode_start!r}")
        if self.lasting_memory:
            return tensors
        keep = 1 - torch.as_tensor(starts, device=self.device, dtype=torch.float32)
        return mask_state(tensors, keep.reshape(-1, 1).expand(batch, 1))

    @abstractmethod
    def _get_constructor_parameters(self) -> dict[str, Any]:
        """Constructor arguments of this policy."""

    def save(self, path: str | os.PathLike[str] | BinaryIO) -> None:
        """Write the policy, without its agent, as tensors and plain values.

        Args:
            path: File name, or an open file.
        """
        moments = None if self.normalizer is None else self.normalizer.moments
        write_policy(path, self._get_constructor_parameters(), self.state_dict(), self.value_scale, moments)

    @classmethod
    def load(
        cls: type[Self],
        path: str | os.PathLike[str] | BinaryIO,
        device: torch.device | str = "auto",
        custom_objects: Mapping[str, Any] | None = None,
        trusted: Iterable[str] = (),
    ) -> Self:
        """Load a policy that :meth:`save` wrote.

        Args:
            path: File name, or an open file.
            device: Device of the policy.
            custom_objects: Classes that the file holds by name only, by argument, such as
                ``{"features_extractor_class": Mine}``.
            trusted: Modules that such classes may be imported from.

        Raises:
            CheckpointError: The file has another format, or does not fit this class.
        """
        policy, scale, moments = read_policy(cls, path, get_device(device), custom_objects or {}, trusted)
        policy.value_scale, policy.normalizer = scale, None if moments is None else FixedMoments(moments)
        policy.set_training_mode(False)
        return policy


def _run(core: Core, features: Tensor, state: State, episode_starts: Tensor | None) -> tuple[Tensor, State]:
    """Run concatenated sequences ``[n, features]``: outputs ``[n, units]`` and the states after them."""
    if core.parts == 0:
        return features, state
    sequences = state[0].shape[1]
    inputs = features.reshape(sequences, -1, core.features).transpose(0, 1)  # [T, B, features]
    keep = torch.ones(inputs.shape[:2], device=features.device)
    if episode_starts is not None:
        keep = 1 - torch.as_tensor(episode_starts, device=features.device).reshape(sequences, -1).t().to(keep)
    if keep[1:].all():
        outputs, state = core.run(inputs, mask_state(state, keep[0].unsqueeze(-1)))
    else:
        steps = []
        for i in range(len(inputs)):
            output, state = core.run(inputs[i : i + 1], mask_state(state, keep[i].unsqueeze(-1)))
            steps.append(output)
        outputs = torch.cat(steps)
    return outputs.transpose(0, 1).flatten(0, 1), state
