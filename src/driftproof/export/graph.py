"""One step of an agent as a pure function of tensors: observation and recurrent states in, action and states out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from driftproof.nn.distributions import Bernoulli, Gaussian
from driftproof.nn.heads import CategoricalHead, ValueHead
from driftproof.nn.normalization import LIMIT, Moments
from driftproof.nn.types import Observation, PolicyState
from driftproof.ppo import DistributionalPPO

_PARTS = {0: (), 1: ("hidden",), 2: ("hidden", "cell")}
"""Names of the tensors of a core's recurrent state."""


class StepGraph(nn.Module):
    """An agent's deterministic step; recurrent states are inputs and outputs.

    Args:
        agent: The agent, on the CPU. Its weights are used, not copied.

    Attributes:
        inputs: Names of the inputs: parts of the (raw) observation, then the recurrent states.
        outputs: Names of the outputs.
        keys: Keys of a dict of observations; ``""`` for an observation that is not a dict.
        states: Shapes ``[layers, units]`` of the recurrent states, by the names of their inputs.
    """

    def __init__(self, agent: DistributionalPPO) -> None:
        super().__init__()
        if not agent.policy.predicts_distributions:
            raise TypeError(
                f"{type(agent.policy).__name__} derives from Stable-Baselines3's ActorCriticPolicy, whose networks are "
                "not known here: export policies of driftproof"
            )
        agent.policy.set_training_mode(False)
        self.policy = agent.policy
        space = agent.observation_space
        self.keys = list(space) if isinstance(space, spaces.Dict) else [""]
        statistics = agent.normalizer.state_dict()
        moments = {} if self.policy.normalizer is None else self.policy.normalizer.moments
        self._normalisers = nn.ModuleList(
            [nn.Sequential(_normaliser(statistics, key), _own_normaliser(moments, key)) for key in self.keys]
        )
        cores = {"actor": self.policy.actor_core}
        if self.policy.critic_core is not None:
            cores["critic"] = self.policy.critic_core
        self.states = {
            f"{name}_{part}": (core.layers, core.units) for name, core in cores.items() for part in _PARTS[core.parts]
        }
        distribution = self.policy.distribution
        self._options = [distribution.size]
        if isinstance(agent.action_space, spaces.MultiDiscrete):
            self._options = [int(n) for n in agent.action_space.nvec.flat]
        described = ("mean", "std") if isinstance(distribution, Gaussian) else ("probabilities",)
        self.inputs = (*(f"observation_{key}" if key else "observation" for key in self.keys), *self.states)
        self.outputs = ("action", *described, "quantiles", *(f"next_{name}" for name in self.states))
        scale = agent.return_scale.snapshot
        self._mean, self._std = float(scale.mean), float(scale.std)
        self._step = self.policy.stepper(by_module=True)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The outputs for the inputs, both in the order of their names."""
        seen, state = tensors[: len(self.keys)], tensors[len(self.keys) :]
        parts = {key: normalise(part) for key, normalise, part in zip(self.keys, self._normalisers, seen, strict=True)}
        observation: Observation = parts[""] if self.keys == [""] else parts
        split = self.policy.actor_core.parts
        parameters, memory, after, _ = self._step(observation, PolicyState(state[:split], state[split:]))
        distribution = self.policy.distribution
        action = distribution.to_env(distribution.mode(parameters))
        predictions = zip(self.policy.heads, self.policy.predict_returns(memory), strict=True)
        quantiles = torch.stack([_quantiles(head, prediction) for head, prediction in predictions], 1)
        quantiles = self._mean + self._std * quantiles
        return action, *self.describe(parameters), quantiles, *after.actor, *after.critic

    def describe(self, parameters: Tensor) -> tuple[Tensor, ...]:
        """The action distribution: mean and standard deviation, or probabilities."""
        distribution = self.policy.distribution
        if isinstance(distribution, Gaussian):
            mean, log_std = parameters.chunk(2, -1)
            return mean, log_std.exp()
        if isinstance(distribution, Bernoulli):
            return (parameters.sigmoid(),)
        return (torch.cat([logits.softmax(-1) for logits in torch.split(parameters, self._options, -1)], -1),)


class _Normaliser(nn.Module):
    """Normalisation as in ``VecNormalize`` and the agent, in their precision."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Tensor, std: Tensor, limit: float) -> None:
        super().__init__()
        self.limit = limit
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def forward(self, observation: Tensor) -> Tensor:
        return ((observation.double() - self.mean) / self.std).clamp(-self.limit, self.limit).float()


def _normaliser(statistics: Mapping[str, Any], key: str) -> nn.Module:
    if not statistics or not statistics["norm_obs"] or key not in statistics["obs_rms"]:
        return nn.Identity()
    mean, var = (torch.as_tensor(statistics["obs_rms"][key][name], dtype=torch.float64) for name in ("mean", "var"))
    return _Normaliser(mean, var.add(statistics["epsilon"]).sqrt(), statistics["clip_obs"])


def _own_normaliser(moments: Mapping[str, Moments], key: str) -> nn.Module:
    return _Normaliser(*moments[key], LIMIT) if key in moments else nn.Identity()


def _quantiles(head: ValueHead, prediction: Tensor) -> Tensor:
    """The head's quantiles, computed without a binary search, for which ONNX has no operator."""
    if not isinstance(head, CategoricalHead):
        return head.quantiles(prediction)
    cumulative = prediction.softmax(-1).cumsum(-1)
    levels = (head.places + 0.5) / head.places.numel()
    reached = (cumulative.unsqueeze(-2) < levels.unsqueeze(-1)).sum(-1)
    return head.support[reached.clamp_max(head.places.numel() - 1)]
