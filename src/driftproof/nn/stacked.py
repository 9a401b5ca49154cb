"""Policies of one architecture as one: every weight has a leading member axis ``[M, ...]``.

A population's members act and learn in a few batched products, instead of one call for each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from driftproof.nn.cores import Core, GRUCore, LSTMCore, NoCore
from driftproof.nn.grouped import linear
from driftproof.nn.heads import Scale
from driftproof.nn.segments import Segments
from driftproof.nn.types import Evaluation, Observation, PolicyState, Step, map_observation

if TYPE_CHECKING:
    from driftproof.nn.policies import DistributionalPolicy

Weights = Mapping[str, Tensor]


class StackedPolicy:
    """Actor and critics of ``M`` members, which differ in weights alone.

    Args:
        like: A policy of that architecture. Its own weights are not used.
        weights: Weights by their names in the policy's ``state_dict``, each ``[M, ...]``. They may change in place.

    Raises:
        ValueError: The policy has parts without a stacked form.
    """

    def __init__(self, like: DistributionalPolicy, weights: Weights) -> None:
        _check(like)
        self.like, self.weights = like, weights
        self.members = len(next(iter(weights.values())))
        self._of: dict[str, dict[str, Tensor]] = {}
        """Weights of a module by their names in it, by the module's name."""
        self._calls: dict[str, tuple[_Named, dict[str, Tensor]]] = {}

    def with_weights(self, weights: Weights) -> StackedPolicy:
        """The same policies with other weights in place of those of these names."""
        return StackedPolicy(self.like, {**self.weights, **weights})

    def part(self, first: int, last: int) -> StackedPolicy:
        """The policies of members ``first`` to ``last - 1``; their weights are views."""
        return StackedPolicy(self.like, {name: weight.detach()[first:last] for name, weight in self.weights.items()})

    def initial_state(self, batch: int) -> PolicyState:
        """The recurrent state ``[M, layers, B, units]`` at the start of ``batch`` episodes of each member."""
        single = self.like.initial_state(batch)
        return PolicyState(*(tuple(p.new_zeros(self.members, *p.shape) for p in parts) for parts in single))

    def evaluate(self, observation: Observation, state: PolicyState, keep: Tensor | None = None) -> Evaluation:
        """Evaluate sequences of observations ``[M, T, B, ...]`` from their initial recurrent state.

        Args:
            observation: Observations.
            state: Recurrent state before the first step.
            keep: 0 where an episode starts ``[M, T, B]``; ``None``: nowhere after the first step.
        """
        cores = {
            f"module.{name}": w for name, w in self.weights.items() if name.startswith(("actor_core", "critic_core"))
        }
        memory, critic_memory = functional_call(
            _Named(self.like), cores, ("run_cores", self._features(observation, 3), state, None, keep)
        )
        return Evaluation(self._actor_outputs(memory)[0], self.predict_returns(critic_memory))

    def evaluate_actor(
        self, observation: Observation, state: PolicyState, segments: Segments | None = None, keep: Tensor | None = None
    ) -> Tensor:
        """The parameters that :meth:`evaluate` returns, without evaluating the critics; segments are not supported."""
        assert segments is None
        return self._actor_outputs(self._run("actor_core", "features_extractor", observation, state.actor, keep))[0]

    def evaluate_critics(
        self, observation: Observation, state: PolicyState, segments: Segments | None = None, keep: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """The predictions that :meth:`evaluate` returns, without evaluating the actor; segments are not supported."""
        assert segments is None
        own = self.like.critic_features_extractor is not None
        extractor = "critic_features_extractor" if own else "features_extractor"
        if self.like.critic_core is not None:
            return self.predict_returns(self._run("critic_core", extractor, observation, state.critic, keep))
        memory = self._run("actor_core", extractor, observation, state.actor, keep)
        return self.predict_returns(memory.detach() if self.like.shared_lstm else memory)

    def _run(
        self, core: str, extractor: str, observation: Observation, state: tuple[Tensor, ...], keep: Tensor | None
    ) -> Tensor:
        """Output of a core ``[M, T, B, units]``."""
        memory: Tensor = self._call(core, "masked", self._extracted(extractor, observation, 3), state, keep)
        return memory

    def step(self, observation: Observation, state: PolicyState) -> Step:
        """One step of acting, for observations ``[M, B, ...]``."""
        features, critic_features = self._features(observation, 2)
        memory, actor = self._call("actor_core", "step", features, state.actor)
        critic_memory, critic = memory, state.critic
        if self.like.critic_core is not None:
            critic_memory, critic = self._call("critic_core", "step", critic_features, state.critic)
        parameters, latent = self._actor_outputs(memory)
        return Step(parameters, critic_memory, PolicyState(actor, critic), latent)

    def predict_returns(self, memory: Tensor) -> tuple[Tensor, ...]:
        """Each critic's prediction ``[M, ..., outputs]`` from the output of the critics' core."""
        networks: list[Any] = [critic.network for critic in self.like.critics]
        # Normalisation of the inputs has no weights: it is the same for all critics.
        norm = getattr(networks[0], "input_norm", None)
        memory = memory if norm is None else norm(memory)
        predictions = []
        for i, network in enumerate(networks):
            latent = self._dense(f"critics.{i}.network", network, memory, skip="input_norm")
            predictions.append(self._call(f"critics.{i}.head", "forward", latent))
        return tuple(predictions)

    def rescale(self, old: Scale, new: Scale) -> None:
        """Change the value heads so that decoded predictions stay the same under new scales ``[M]``."""
        for i in range(len(self.like.critics)):
            self._call(f"critics.{i}.head", "rescale", old, new)

    def _features(self, observation: Observation, leading: int) -> tuple[Tensor, Tensor]:
        """Features of actor and critics ``[M, ..., features]``, of observations with this many leading axes."""
        features = self._extracted("features_extractor", observation, leading)
        if self.like.critic_features_extractor is None:
            return features, features
        return features, self._extracted("critic_features_extractor", observation, leading)

    def _extracted(self, name: str, observation: Observation, leading: int) -> Tensor:
        extractor: Any = getattr(self.like, name)
        first = observation if isinstance(observation, Tensor) else next(iter(observation.values()))
        shape = first.shape[:leading]
        features: Tensor
        if not self._weights_of(name):
            flat = map_observation(observation, lambda part: part.flatten(0, leading - 1))
            features = self.like.extract_features(flat, extractor)
        else:
            rows = map_observation(observation, lambda part: part.flatten(1, leading - 1))
            inputs = _Extraction(self.like, extractor)
            features = torch.vmap(lambda w, x: functional_call(inputs, w, (x,)), randomness="different")(
                {f"extractor.{key}": weight for key, weight in self._weights_of(name).items()}, rows
            )
        return features.view(*shape, -1)

    def _actor_outputs(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Parameters of the actions' distribution, and the actor's last features."""
        latent = self._dense("actor_network", self.like.actor_network, memory)
        head = self._weights_of("action_head")
        outputs = linear(latent, head["weight"], head["bias"])
        if (log_std := self.weights.get("log_std")) is not None:  # A Gaussian's.
            log_std = log_std.view(self.members, *(1,) * (outputs.dim() - 2), -1)
            outputs = torch.cat((outputs, log_std.expand_as(outputs)), -1)
        return outputs, latent

    def _dense(self, name: str, network: nn.Sequential, values: Tensor, skip: str | None = None) -> Tensor:
        for key, layer in network.named_children():
            if key == skip:
                continue
            weights = self._weights_of(f"{name}.{key}")
            if type(layer) is nn.Linear:
                values = linear(values, weights["weight"], weights.get("bias"))
            elif not weights:
                values = layer(values)
            else:
                values = torch.vmap(lambda w, x, layer=layer: functional_call(layer, w, (x,)))(weights, values)
        return values

    def _call(self, name: str, method: str, *arguments: Any) -> Any:
        """Call a method of a module, with the stacked weights in place of its own."""
        if name not in self._calls:
            weights = {f"module.{key}": weight for key, weight in self._weights_of(name).items()}
            self._calls[name] = _Named(self.like.get_submodule(name)), weights
        return functional_call(*self._calls[name], (method, *arguments))

    def _weights_of(self, module: str) -> dict[str, Tensor]:
        if module not in self._of:
            start = f"{module}."
            self._of[module] = {n.removeprefix(start): w for n, w in self.weights.items() if n.startswith(start)}
        return self._of[module]


class _Named(nn.Module):
    """Calls a method of a module by its name, as ``functional_call`` calls modules only."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, name: str, *arguments: Any) -> Any:
        return getattr(self.module, name)(*arguments)


class _Extraction(nn.Module):
    """Preprocesses observations of a policy, and extracts features from them."""

    def __init__(self, policy: DistributionalPolicy, extractor: Any) -> None:
        super().__init__()
        self.extractor = extractor
        self._policy = (policy,)  # Not a submodule.

    def forward(self, observation: Observation) -> Tensor:
        features: Tensor = self._policy[0].extract_features(observation, self.extractor)
        return features


def _check(policy: DistributionalPolicy) -> None:
    """Refuse policies that have parts without a stacked form."""
    if policy.exploration is not None:
        raise ValueError("use_sde=True is not supported for several members at once: leave it out")
    cores: list[Core] = [core for core in (policy.actor_core, policy.critic_core) if core is not None]
    for core in cores:
        if type(core) not in (LSTMCore, GRUCore, NoCore):
            raise ValueError(
                f"the core {type(core).__name__} does not support several members at once: use lstm, gru or none"
            )
    if any(isinstance(module, nn.modules.batchnorm._NormBase) for module in policy.modules()):
        raise ValueError("batch normalisation is not supported for several members at once: use layer_norm")
