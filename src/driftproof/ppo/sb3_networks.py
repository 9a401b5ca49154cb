"""Networks of Stable-Baselines3 and sb3-contrib as those of :class:`driftproof.nn.policies.DistributionalPolicy`.

Both go from features through an optional LSTM and small networks to their heads, under different names. Three things
differ. Our policy has two critics, so SB3's one is copied. Their heads predict quantiles, to which the one value is
widened. Critics without an LSTM start from the features, where sb3-contrib has a linear layer in between, which is
merged into the layer after it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from gymnasium import spaces
from torch import Tensor

from driftproof.state import CheckpointError

_SPREAD = 0.1
"""Standard deviation of weights across quantiles, relative to the size of the value's weights."""

_SAME = {
    "features_extractor.": "features_extractor.",
    "lstm_actor.": "actor_core.recurrence.",
    "lstm_critic.": "critic_core.recurrence.",
    "mlp_extractor.policy_net.": "actor_network.",
    "action_net.": "action_head.",
    "log_std": "log_std",
}
"""Prefixes of SB3's and our names, of tensors that are the same in both."""
_ACTOR_FEATURES, _CRITIC_FEATURES = "pi_features_extractor.", "vf_features_extractor."
_PLACES = (*_SAME, _ACTOR_FEATURES, _CRITIC_FEATURES, "mlp_extractor.value_net.", "value_net.", "critic.")
_LSTM = re.compile(r"lstm_(actor|critic)\.(weight|bias)_(ih|hh)_l\d+")


class SB3Networks:
    """The weights in a file of Stable-Baselines3, and the architecture that follows from them.

    Args:
        state: The policy's state dict.
        name: Name of the file, for errors.

    Raises:
        CheckpointError: They are not of an actor and a critic that can be mapped.
    """

    def __init__(self, state: Mapping[Any, Any], name: str) -> None:
        self._name = name
        self._check(state)
        self.tensors: dict[str, Tensor] = dict(state)
        self.is_recurrent = bool(self._inside("lstm_actor."))
        self.uses_sde = "log_std" in state and state["log_std"].ndim == 2
        features = self._inside("features_extractor.")
        if not _equal(self._inside(_ACTOR_FEATURES) or features, features):
            self._fail("its two copies of the actor's features extractor differ")
        self.shares_features = _equal(self._inside(_CRITIC_FEATURES) or features, features)

    def _check(self, state: Mapping[Any, Any]) -> None:
        for key, value in state.items():
            if not isinstance(key, str) or not isinstance(value, Tensor) or not value.is_floating_point():
                self._fail(f"{_quoted(key)} in its policy is not a tensor of real numbers")
            if value.layout != torch.strided or not value.isfinite().all():
                self._fail(f"{_quoted(key)} in its policy holds numbers that are not finite")
        for key in ("action_net.weight", "action_net.bias", "value_net.weight", "value_net.bias"):
            if key not in state:
                self._fail(f"it has no {key}, so it is not from PPO or RecurrentPPO; it has {_listed(state)}")
        if any(key.startswith("mlp_extractor.shared_net.") for key in state):
            self._fail(
                "its actor and critic share layers (net_arch before Stable-Baselines3 1.8), which is not supported"
            )
        if tuple(state["value_net.bias"].shape) != (1,) or state["value_net.weight"].ndim != 2:
            self._fail("its critic does not predict one value")
        strange = [key for key in state if not key.startswith(_PLACES)]
        strange += [key for key in state if key.startswith("lstm_") and not _LSTM.fullmatch(key)]
        if strange:
            self._fail(f"its tensors {_listed(strange)} are unknown")

    def _fail(self, problem: str) -> NoReturn:
        raise CheckpointError(f"{self._name} cannot be imported: {problem}")

    def _inside(self, prefix: str) -> dict[str, Tensor]:
        return {key.removeprefix(prefix): tensor for key, tensor in self.tensors.items() if key.startswith(prefix)}

    def policy(self, observation_space: spaces.Space[Any]) -> str:
        """The name of the policy that has such networks."""
        if isinstance(observation_space, spaces.Dict):
            kind = "MultiInput"
        else:
            kind = "Cnn" if "features_extractor.cnn.0.weight" in self.tensors else "Mlp"
        return f"{kind}{'Lstm' if self.is_recurrent else ''}Policy"

    def policy_kwargs(self) -> dict[str, Any]:
        """Arguments of the policy, as far as names and shapes determine them."""
        kwargs: dict[str, Any] = {
            "net_arch": {"pi": self._widths("policy_net"), "vf": self._widths("value_net")},
            "share_features_extractor": self.shares_features,
            "features_extractor_kwargs": self._features_kwargs(),
        }
        if self.uses_sde:
            kwargs["full_std"] = self.tensors["log_std"].shape[1] == self.tensors["action_net.bias"].numel()
        if self.is_recurrent:
            hidden = self.tensors.get("lstm_actor.weight_hh_l0")
            if hidden is None or hidden.ndim != 2:
                self._fail("its LSTM lacks weight_hh_l0")
            kwargs["lstm_hidden_size"] = hidden.shape[1]
            kwargs["n_lstm_layers"] = sum(key.startswith("lstm_actor.weight_hh_l") for key in self.tensors)
            kwargs["enable_critic_lstm"] = bool(self._inside("lstm_critic."))
            kwargs["shared_lstm"] = not kwargs["enable_critic_lstm"] and "critic.weight" not in self.tensors
        return kwargs

    def _widths(self, network: str) -> list[int]:
        weights = self._inside(f"mlp_extractor.{network}.")
        layers = {int(key.split(".")[0]): w for key, w in weights.items() if re.fullmatch(r"\d{1,4}\.weight", key)}
        return [w.shape[0] for _, w in sorted(layers.items()) if w.ndim == 2]

    def _features_kwargs(self) -> dict[str, Any]:
        """Output widths of a CNN, or of the CNNs in a combined extractor; other extractors have no arguments."""
        weights = self._inside("features_extractor.")
        if "linear.0.weight" in weights and "cnn.0.weight" in weights:
            return {"features_dim": weights["linear.0.weight"].shape[0]}
        combined = [w for key, w in weights.items() if re.fullmatch(r"extractors\..+\.linear\.0\.weight", key)]
        return {"cnn_output_dim": combined[0].shape[0]} if combined else {}

    def mapped(self, num_quantiles: int, critics: int) -> dict[str, Tensor]:
        """The state of our policy with these networks.

        With a return scale of mean 0 and standard deviation 1, every critic's mean equals SB3's value.
        """
        state = {here: self.tensors[there] for here, there in self.one_to_one().items()}
        network = self._inside("mlp_extractor.value_net.")
        weight, bias = self.tensors["value_net.weight"], self.tensors["value_net.bias"]
        if "critic.weight" in self.tensors and network:
            network["0.weight"], network["0.bias"] = self._merged(network.get("0.weight"), network.get("0.bias"))
        elif "critic.weight" in self.tensors:
            weight, bias = self._merged(weight, bias)
        generator = torch.Generator().manual_seed(0)
        for i in range(critics):
            state |= {f"critics.{i}.network.{key}": tensor for key, tensor in network.items()}
            state[f"critics.{i}.head.linear.weight"] = _widened(weight, num_quantiles, generator)
            state[f"critics.{i}.head.linear.bias"] = bias.expand(num_quantiles).clone()
        return state

    def one_to_one(self) -> dict[str, str]:
        """Tensors that are the same in both: our name to SB3's name."""
        beginnings = dict(_SAME)
        if not self.shares_features:
            beginnings[_CRITIC_FEATURES] = "critic_features_extractor."
        return {
            here + key.removeprefix(there): key
            for there, here in beginnings.items()
            for key in self.tensors
            if key.startswith(there)
        }

    def parameter_names(self) -> list[str]:
        """SB3's names in the order of the optimizer's parameters; shared parameters once."""
        copies = (_ACTOR_FEATURES, _CRITIC_FEATURES) if self.shares_features else (_ACTOR_FEATURES,)
        return [key for key in self.tensors if not key.startswith(copies)]

    def _merged(self, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """One linear layer equal to ``critic`` followed by the next layer."""
        first, offset = self.tensors["critic.weight"], self.tensors.get("critic.bias")
        if weight is None or bias is None or offset is None or first.ndim != 2 or weight.ndim != 2:
            self._fail("its critic has other layers than sb3-contrib's")
        if weight.shape[1] != first.shape[0] or offset.shape != first.shape[:1] or bias.shape != weight.shape[:1]:
            self._fail("layers of its critic do not fit together")
        merged = weight.double() @ first.double()
        return merged.to(weight.dtype), (weight.double() @ offset.double() + bias.double()).to(bias.dtype)


def _widened(weight: Tensor, quantiles: int, generator: torch.Generator) -> Tensor:
    """Weights ``[quantiles, width]`` whose mean is the one row given.

    With equal rows, the two critics would stay identical: same predictions, same gradients. The rows differ by random
    numbers that sum to zero, which preserve the mean and give every quantile of every critic its own gradient. The
    critics then diverge slowly, as they train on the same samples from similar weights.
    """
    row = weight.double()
    noise = torch.randn(quantiles, row.shape[1], generator=generator, dtype=torch.float64)
    noise -= noise.mean(0)
    return (row + _SPREAD * row.square().mean().sqrt() * noise).to(weight.dtype)


def _equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[key]) for key, tensor in one.items())


def _quoted(name: Any) -> str:
    return ascii(name)[:60]


def _listed(names: Iterable[Any]) -> str:
    names = list(names)
    return ", ".join([*map(_quoted, names[:5]), *(["…"] if len(names) > 5 else [])])
