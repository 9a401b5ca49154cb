"""The methods of drift_suite.py: Stable-Baselines3's PPO and driftproof's agent, on the same backbone.

Actor and critics apart, three layers of 256, LeakyReLU(0.1), torch's own initialisation, rollouts of 800 steps of one
environment. SB3 has the settings that were published with Continual Gym Control. OURS are those of driftproof, the
same in all environments; they were tuned on the first two tasks of CartPole and Acrobot with other seeds.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from drift_scenarios import ITERATION
from stable_baselines3 import PPO
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import VecEnv, VecNormalize
from torch import nn

from driftproof.ppo import DistributionalPPO
from driftproof.settings.agent import AgentSettings
from driftproof.settings.definition import settings_of
from driftproof.settings.drift import DriftSettings

WIDTHS = [256, 256, 256]

SB3: dict[str, Any] = {
    "learning_rate": 1e-3,
    "batch_size": 32,
    "n_epochs": 5,
    "clip_range": 0.2,
    "ent_coef": 0.01,
    "vf_coef": 0.5,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "max_grad_norm": 1e9,
}
"""As published; no gradient is as long as ``max_grad_norm``. Advantages are normalised over the iteration."""

OURS: dict[str, Any] = {
    "learning_rate": 1e-3,
    "batch_size": 128,
    "n_epochs": 5,
    "ent_coef": 0.01,
    "gamma": 0.99,
    "gae_lambda": 0.95,
}
"""Settings of driftproof's agent besides its defaults."""

L2_INIT = 1e-2
"""Weight of the squared distance from the initial weights."""


@dataclass(frozen=True)
class Method:
    """A way of learning.

    Attributes:
        title: For tables.
        ours: Whether it is driftproof's agent, or Stable-Baselines3's PPO.
        settings: Arguments of the constructor, besides SB3 or OURS.
        policy: Name of the policy.
        vec_normalize: Whether observations are normalised by ``VecNormalize``.
        layer_norm: Whether SB3's networks have layer normalisation.
        l2_init: Weight of the decay towards initial weights, of SB3's optimizer.
        restarts: Whether it is told of every new task, and starts it with a new agent.
        members: Agents of a population, which share the steps; 1: there is none.
    """

    title: str
    ours: bool = True
    settings: Mapping[str, Any] = field(default_factory=dict)
    policy: str = "MlpPolicy"
    vec_normalize: bool = False
    layer_norm: bool = False
    l2_init: float = 0.0
    restarts: bool = False
    members: int = 1

    @property
    def missing(self) -> str | None:
        """Settings that this version of the agent does not have."""
        lacking = [name for name in self.settings if self.ours and name not in settings_of(AgentSettings)]
        return ", ".join(lacking) or None

    def arguments(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of the constructor that are in force, for the record too."""
        base = OURS if self.ours else SB3
        return {**base, **self.settings, **(overrides if self.ours else {})}

    def parts(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """Values of the drift kit's parts in force, for the record."""
        given = {k: v for k, v in self.arguments(overrides).items() if k in settings_of(DriftSettings)}
        return DriftSettings(**given).parts() if self.ours else {}

    def make(self, env: VecEnv, seed: int, overrides: Mapping[str, Any]) -> BaseAlgorithm:
        """A new agent in an environment.

        Args:
            env: The environment.
            seed: Seed of the agent and of the environment's episodes.
            overrides: Settings of driftproof's agent instead of its own.
        """
        arguments = {"env": env, "n_steps": ITERATION, "seed": seed, "device": "cpu", "verbose": 0}
        network = {
            "net_arch": {"pi": WIDTHS, "vf": WIDTHS},
            "activation_fn": LeakyReLU,
            "ortho_init": False,
        }
        given = self.arguments(overrides)
        if self.ours:
            network |= given.pop("policy_kwargs", {})
            with warnings.catch_warnings():  # One smaller minibatch of 13 does no harm.
                warnings.filterwarnings("ignore", "batch_size=.* does not divide")
                return DistributionalPPO(self.policy, policy_kwargs=network, **arguments, **given)
        network |= {"optimizer_class": L2InitAdam, "optimizer_kwargs": {"l2_init": self.l2_init}}
        policy = LayerNormPolicy if self.layer_norm else ActorCriticPolicy
        return PPO(
            policy,
            policy_kwargs=network,
            normalize_advantage=False,
            rollout_buffer_class=NormalizedAdvantages,
            **arguments,
            **given,
        )

    def wrapped(self, env: VecEnv) -> VecEnv:
        """The environment as the agent sees it."""
        return VecNormalize(env, norm_reward=False) if self.vec_normalize else env


class LeakyReLU(nn.LeakyReLU):
    def __init__(self) -> None:
        super().__init__(0.1)


class NormalizedAdvantages(RolloutBuffer):
    """Advantages are normalised over the whole iteration, not over every minibatch as in Stable-Baselines3."""

    def compute_returns_and_advantage(self, last_values: torch.Tensor, dones: Any) -> None:
        super().compute_returns_and_advantage(last_values, dones)
        self.advantages = (self.advantages - self.advantages.mean()) / (self.advantages.std() + 1e-8)


class LayerNormPolicy(ActorCriticPolicy):
    """With layer normalisation, without parameters, before every activation."""

    def _build_mlp_extractor(self) -> None:
        super()._build_mlp_extractor()
        for name in ("policy_net", "value_net"):
            layers = []
            for module in getattr(self.mlp_extractor, name):
                layers.append(module)
                if isinstance(module, nn.Linear):
                    layers.append(nn.LayerNorm(module.out_features, elementwise_affine=False))
            setattr(self.mlp_extractor, name, nn.Sequential(*layers).to(self.device))


class L2InitAdam(torch.optim.Adam):
    """Adam of a loss plus the squared distance from the initial weights.

    Kumar et al. 2023, https://arxiv.org/abs/2308.11958.

    Args:
        params: Parameters, whose present values are the initial ones.
        l2_init: Weight of the squared distance.
        kwargs: Arguments of Adam.
    """

    def __init__(self, params: Any, l2_init: float = 0.0, **kwargs: Any) -> None:
        super().__init__(params, **kwargs)
        self.l2_init = l2_init
        self.initial = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if self.l2_init:
            for group, initial in zip(self.param_groups, self.initial, strict=True):
                for parameter, first in zip(group["params"], initial, strict=True):
                    if parameter.grad is not None:
                        parameter.grad.add_(parameter - first, alpha=2 * self.l2_init)
        return super().step(closure)


def kit_parts() -> dict[str, Any]:
    """Parts of the drift kit, each with its value without the kit."""
    with_kit, without = DriftSettings(drift_kit=True).parts(), DriftSettings(drift_kit=False).parts()
    return {name: value for name, value in without.items() if value != with_kit[name]}


KIT, NO_KIT = {"drift_kit": True}, {"drift_kit": False}
METHODS: dict[str, Method] = {
    "sb3": Method("SB3 PPO", ours=False),
    "sb3-vecnormalize": Method("SB3 PPO, VecNormalize", ours=False, vec_normalize=True),
    "sb3-layernorm": Method("SB3 PPO, LayerNorm", ours=False, layer_norm=True),
    "sb3-l2init": Method("SB3 PPO, L2 init", ours=False, l2_init=L2_INIT),
    "sb3-oracle": Method("SB3 PPO, new at every switch (told)", ours=False, restarts=True),
    "ours": Method("driftproof without kit", settings=NO_KIT),
    "memory": Method("driftproof without kit, LSTM", settings=NO_KIT, policy="MlpLstmPolicy"),
    "oracle": Method("driftproof without kit, new at every switch (told)", settings=NO_KIT, restarts=True),
    "kit": Method("driftproof", settings=KIT),
    "population-2": Method("driftproof, 2 members share the steps", settings=KIT, members=2),
    "kit-memory": Method("driftproof, LSTM", settings=KIT, policy="MlpLstmPolicy"),
    **{
        f"kit-minus-{name.replace('_', '-')}": Method(f"driftproof minus {name}", settings={**KIT, name: value})
        for name, value in kit_parts().items()
    },
}
