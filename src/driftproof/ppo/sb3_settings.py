"""Settings from files of Stable-Baselines3: plain values as they are, classes and schedules by fixed tables."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import stable_baselines3.common.torch_layers as layers
from stable_baselines3.common.utils import LinearSchedule
from torch import nn

from driftproof._arguments import check_count, check_flag, check_number
from driftproof.ppo.sb3_networks import SB3Networks
from driftproof.settings.agent import HYPERPARAMETERS
from driftproof.settings.schedules import Linear, Schedule
from driftproof.state import CheckpointError

_NUMBERS = ("gamma", "gae_lambda", "ent_coef", "vf_coef", "max_grad_norm", "target_kl")
_COUNTS = ("n_steps", "batch_size", "n_epochs")
_ACTIVATIONS = (
    *(nn.Tanh, nn.ReLU, nn.ELU, nn.GELU, nn.SiLU, nn.LeakyReLU, nn.SELU, nn.CELU, nn.Mish, nn.ReLU6, nn.Hardtanh),
    *(nn.Sigmoid, nn.Softplus, nn.Softsign, nn.Hardswish, nn.LogSigmoid, nn.Tanhshrink, nn.PReLU),
)
_CLASSES: dict[str, dict[str, type[Any]]] = {
    key: {str(kind): kind for kind in kinds}
    for key, kinds in {
        "activation_fn": _ACTIVATIONS,
        "features_extractor_class": (layers.FlattenExtractor, layers.NatureCNN, layers.CombinedExtractor),
    }.items()
}
"""Classes by their descriptions in the file. A description is compared as text; nothing is imported for it."""
_FROM_WEIGHTS = (
    *("net_arch", "lstm_hidden_size", "n_lstm_layers", "shared_lstm", "enable_critic_lstm"),
    *("share_features_extractor", "features_extractor_kwargs", "log_std_init", "ortho_init", "full_std"),
)
"""Arguments of policies that follow from the weights, or are replaced by them."""
_NUMBER = r"(\d+(?:\.\d*)?(?:e[-+]?\d+)?)"
_CONSTANT = re.compile(rf"ConstantSchedule\(val={_NUMBER}\)")
_LINEAR = re.compile(rf"LinearSchedule\(start={_NUMBER}, end={_NUMBER}, end_fraction={_NUMBER}\)")
_LARGEST = 2**24
"""Largest plausible count; larger ones in a file are ignored."""
_UNREADABLE = "is a function, which a file only holds as a pickle"


class SB3Settings:
    """Settings of an agent from those in a file.

    Args:
        data: Result of :func:`driftproof.state.sb3.read_data`.
        networks: Weights in the file, which show whether the policy is recurrent and uses gSDE.
        optimizer_lr: The optimizer's last learning rate, if known.
        name: Name of the file, for errors.

    Raises:
        CheckpointError: The algorithm is not supported.
    """

    def __init__(self, data: Mapping[str, Any], networks: SB3Networks, optimizer_lr: Any, name: str) -> None:
        self.arguments: dict[str, Any] = {}
        """Arguments of :class:`driftproof.ppo.DistributionalPPO`."""
        self.policy_kwargs: dict[str, Any] = {}
        """Arguments of the policy that do not follow from the weights."""
        self.report: list[str] = []
        """Lines about what could not be loaded."""
        self._data, self._name = data, name
        self._networks = networks
        policy_class = data.get("policy_class")
        if isinstance(policy_class, dict) and "maskable" in str(policy_class.get("__module__")):
            raise CheckpointError(
                f"{name} cannot be imported: it is of MaskablePPO, and driftproof's policies do not mask actions"
            )
        self._take_plain()
        if networks.uses_sde:
            self.arguments["use_sde"] = True
            self._take("sde_sample_freq", _check_count, at_least=-1, at_most=_LARGEST)
        self._take_learning_rate(optimizer_lr)
        self._take_clip_ranges()
        self._take_policy_kwargs()

    @property
    def num_timesteps(self) -> int:
        """Number of steps it was trained for."""
        steps = self._data.get("num_timesteps")
        return int(steps) if steps is not None and _is_valid(_check_count, steps, at_most=2**62) else 0

    def _take_plain(self) -> None:
        for key in _NUMBERS:
            self._take(key, check_number, **HYPERPARAMETERS[key].bounds)
        for key in _COUNTS:
            self._take(key, _check_count, at_least=1, at_most=_LARGEST)
        self._take("normalize_advantage", check_flag)
        self._take("seed", _check_count, at_most=2**32 - 1)
        self._take("_stats_window_size", _check_count, at_least=1, at_most=_LARGEST)

    def _take(self, key: str, check: Callable[..., None], **bounds: float) -> None:
        value = self._data.get(key)
        if value is None:
            return
        if _is_valid(check, value, **bounds):
            self.arguments[key.removeprefix("_")] = value
        else:
            self.report.append(f"{key}: the file's value is invalid; using the default")

    def _take_learning_rate(self, optimizer_lr: Any) -> None:
        rate = self._data.get("learning_rate")
        if isinstance(rate, dict):
            rate = _schedule(rate, "learning_rate") or _schedule(self._data.get("lr_schedule"), "learning_rate")
        if callable(rate) or _is_positive("learning_rate", rate):
            self.arguments["learning_rate"] = rate
        elif _is_positive("learning_rate", optimizer_lr):
            self.arguments["learning_rate"] = float(optimizer_lr)
            self.report.append(f"learning_rate: {_UNREADABLE}; using {optimizer_lr:g}, the optimizer's last one")
        elif "learning_rate" in self._data:
            self.report.append(f"learning_rate: {_UNREADABLE}; using the default")

    def _take_clip_ranges(self) -> None:
        clip_range = self._data.get("clip_range")
        found = _schedule(clip_range, "clip_range") if isinstance(clip_range, dict) else clip_range
        if callable(found) or _is_positive("clip_range", found):
            self.arguments["clip_range"] = found
        elif clip_range is not None:
            self.report.append(f"clip_range: {_UNREADABLE}; using the default")
        if self._data.get("clip_range_vf") is not None:
            self.report.append(
                "clip_range_vf: not loaded; the file has units of rewards, driftproof standard deviations of returns"
            )

    def _take_policy_kwargs(self) -> None:
        given = self._data.get("policy_kwargs")
        kinds: dict[str, type[Any]] = {"normalize_images": bool}
        kinds |= {"use_expln": bool, "squash_output": bool} if self._networks.uses_sde else {}
        kinds |= {"lstm_kwargs": dict} if self._networks.is_recurrent else {}
        for key, value in given.items() if isinstance(given, dict) else ():
            if key in _CLASSES:
                self.policy_kwargs[key] = _CLASSES[key].get(value) if isinstance(value, str) else None
            elif key in kinds and isinstance(value, kinds[key]):
                self.policy_kwargs[key] = value
            elif key not in (*_FROM_WEIGHTS, "use_sde", ":type:"):
                self.report.append(f"policy_kwargs.{ascii(key)[1:61]}: not loaded")

    def policy_classes(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of the policy: classes that the file names, and those that the caller passes.

        Raises:
            CheckpointError: The file names an unknown class, and the caller passes none.
        """
        for key, kind in self.policy_kwargs.items():
            if kind is None and key not in given:
                raise CheckpointError(
                    f"{self._name} cannot be imported: its {key} is not one of Stable-Baselines3's or torch's; "
                    f"pass the class: from_sb3(path, env, policy_kwargs={{{key!r}: ...}})"
                )
        return {**self.policy_kwargs, **given}


def _schedule(described: Any, setting: str) -> float | Schedule | None:
    """A schedule from its description; ``None`` if it is unknown or invalid for the setting."""
    text = described.get("value_schedule") if isinstance(described, dict) else None
    if not isinstance(text, str) or len(text) > 200:
        return None
    if constant := _CONSTANT.fullmatch(text):
        return float(constant[1])
    if not (linear := _LINEAR.fullmatch(text)):
        return None
    start, end, fraction = map(float, linear.groups())
    if not 0 < fraction <= 1 or not all(
        _is_valid(check_number, x, **HYPERPARAMETERS[setting].bounds) for x in (start, end)
    ):
        return None
    if max(start, end) == 0:
        return None
    return Linear(start, end) if fraction == 1 else LinearSchedule(start, end, fraction)


def _is_positive(setting: str, value: Any) -> bool:
    return _is_valid(check_number, value, **HYPERPARAMETERS[setting].bounds) and value > 0


def _check_count(name: str, value: Any, at_most: int, at_least: int = 0) -> None:
    check_count(name, value, at_least=at_least)
    check_number(name, value, at_most=at_most)


def _is_valid(check: Callable[..., None], value: Any, **bounds: float) -> bool:
    try:
        check("", value, **bounds)
    except (ValueError, OverflowError):
        return False
    return True
