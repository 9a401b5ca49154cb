"""The whole configuration, and which of its settings go together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, PrivateAttr, model_validator

from driftproof._batches import STEPS_AND_BATCH, Batches, cut
from driftproof._trust import OWN, Trust
from driftproof._unused import (
    ADVERSARY_DEFAULTS,
    ATTACK_DEFAULTS,
    EXPLORE_DEFAULTS,
    OPTIMIZER_DEFAULTS,
    given_in_vain,
    unused_by_adversary,
    unused_by_optimizer,
    unused_by_search,
    unused_by_training_attack,
)
from driftproof.config._types import Section
from driftproof.config.agent import CriticSection, OptimizerSection, PolicySection, PPOSection, VGSSection
from driftproof.config.keys import placed
from driftproof.config.population import PBTSection
from driftproof.config.world import AdversarialSection, EnvSection, RunSection

_OF_HEAD = {"num_quantiles": "quantile", "huber_kappa": "quantile"} | dict.fromkeys(
    ("num_atoms", "v_min", "v_max"), "categorical"
)
OF_MEMORY = (
    *("lstm_hidden_size", "n_lstm_layers", "lstm_kwargs"),
    *("shared_recurrence", "shared_lstm", "enable_critic_lstm"),
)
OF_SDE = ("full_std", "use_expln")


class SettingError(ValueError):
    """A setting is wrong because of others.

    Attributes:
        path: Its place.
    """

    def __init__(self, path: str, message: str) -> None:
        self.path = tuple(int(part) if part.isdecimal() else part for part in path.split("."))
        super().__init__(f"{path}: {message}")


class Config(Section):
    """Everything that makes a run."""

    run: RunSection = Field(default_factory=RunSection)
    env: EnvSection = Field(default_factory=EnvSection)
    policy: PolicySection = Field(default_factory=PolicySection)
    critic: CriticSection = Field(default_factory=CriticSection)
    ppo: PPOSection = Field(default_factory=PPOSection)
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    vgs: VGSSection = Field(default_factory=VGSSection)
    adversarial: AdversarialSection = Field(default_factory=AdversarialSection)
    pbt: PBTSection = Field(default_factory=PBTSection)

    _trust: Trust = PrivateAttr(OWN)
    """Travels with the settings into other processes; no file can set it."""

    @model_validator(mode="before")
    @classmethod
    def _in_place(cls, data: Any) -> Any:
        """Settings that were given by other names."""
        return placed(data).data if isinstance(data, Mapping) else data

    @model_validator(mode="after")
    def _fit_together(self) -> Config:
        for name, head in _OF_HEAD.items():
            if self.critic.value_head != head:
                _check_default(self.critic, f"critic.{name}", f"for critic.value_head: {head}")
        if not self.policy.has_memory:
            with_memory = f"for policies with memory; {self.policy.name} has none"
            for name in OF_MEMORY:
                _check_default(self.policy, f"policy.{name}", with_memory)
            if self.ppo.sequence_length != 1:
                _check_default(self.ppo, "ppo.sequence_length", with_memory)
        if not self.ppo.use_sde:
            for section, path in (
                (self.ppo, "ppo.sde_sample_freq"),
                *((self.policy, f"policy.{name}") for name in OF_SDE),
            ):
                _check_default(section, path, "for ppo.use_sde: true")
        if not self.env.normalize_observations:
            _check_default(self.env, "env.clip_observations", "for env.normalize_observations: true")
        if self.policy.net_arch == []:
            _check_default(self.policy, "policy.activation_fn", "for layers in policy.net_arch")
        if not self.env.drift:
            _check_default(self.env, "env.drift_seed", "for env.drift")
        if not self.vgs.enabled:
            _check_defaults(self.vgs, "vgs", "for vgs.enabled: true")
        _check_optimizer(self.optimizer)
        _check_adversarial(self.adversarial)
        _check_search(self.pbt)
        _check_backend(self.pbt)
        _ = self.batches
        return self

    @property
    def trust(self) -> Trust:
        """Which modules may be imported because a setting names them: any, unless the settings are from a file."""
        return self._trust

    def with_trust(self, trust: Trust) -> Config:
        """The same settings, of which some modules may be imported."""
        config = self.model_copy()
        config._trust = trust
        return config

    @property
    def n_steps(self) -> int:
        """Steps of every environment between updates."""
        given = self.ppo.n_steps
        return STEPS_AND_BATCH[self.policy.has_memory][0] if given is None else given

    @property
    def batches(self) -> Batches:
        """How a rollout is cut into sequences and minibatches."""
        given, has_memory = self.ppo.batch_size, self.policy.has_memory
        batch_size = STEPS_AND_BATCH[has_memory][1] if given is None else given
        try:
            return cut(self.n_steps, self.env.n_envs, batch_size, self.ppo.sequence_length, has_memory)
        except ValueError as error:
            raise SettingError("ppo.sequence_length", str(error)) from error

    @property
    def steps_per_update(self) -> int:
        """Environment steps between updates."""
        return self.n_steps * self.env.n_envs

    @property
    def total_updates(self) -> int:
        """Updates that make up the training: whole rollouts."""
        return -(-self.run.total_timesteps // self.steps_per_update)


def _check_backend(pbt: PBTSection) -> None:
    """Refuse options of another backend than the one that is used."""
    if pbt.backend != "process":
        _check_default(pbt, "pbt.workers", "for pbt.backend: process")
    if pbt.backend != "ray":
        for name in ("resources_per_member", "address"):
            _check_default(pbt, f"pbt.{name}", "for pbt.backend: ray")


def _check_optimizer(optimizer: OptimizerSection) -> None:
    unused = unused_by_optimizer(optimizer.name, optimizer.kwargs)
    _refuse(optimizer.kwargs, OPTIMIZER_DEFAULTS, unused, "optimizer.kwargs")


def _check_adversarial(adversarial: AdversarialSection) -> None:
    if not adversarial.enabled:
        _check_defaults(adversarial, "adversarial", "for adversarial.enabled: true")
        return
    if adversarial.adversarial_ratio == 0:
        raise SettingError("adversarial.adversarial_ratio", "0 attacks nothing: use adversarial.enabled: false")
    values, attack = dict(adversarial), dict(adversarial.perturbation)
    _refuse(values, ADVERSARY_DEFAULTS, unused_by_adversary(values), "adversarial")
    _refuse(attack, ATTACK_DEFAULTS, unused_by_training_attack(attack), "adversarial.perturbation")


def _check_search(pbt: PBTSection) -> None:
    for index, item in enumerate(pbt.hyperparams):
        unused = unused_by_search(pbt.explore_method, item.values is not None)
        _refuse(dict(item), EXPLORE_DEFAULTS, unused, f"pbt.hyperparams.{index}")


def _refuse(given: Mapping[str, Any], defaults: Mapping[str, Any], unused: Mapping[str, str], place: str) -> None:
    for name, problem in given_in_vain(given, defaults, unused):
        raise SettingError(f"{place}.{name}", problem)


def _check_defaults(section: Section, path: str, what_for: str) -> None:
    """Refuse settings of a section that is switched off."""
    for name in type(section).model_fields:
        if isinstance(part := getattr(section, name), Section):
            _check_defaults(part, f"{path}.{name}", what_for)
        elif name != "enabled":
            _check_default(section, f"{path}.{name}", what_for)


def _check_default(section: Section, path: str, what_for: str) -> None:
    """Refuse a setting that would have no effect."""
    name = path.rpartition(".")[2]
    default = type(section).model_fields[name].get_default(call_default_factory=True)
    if (value := getattr(section, name)) != default:
        raise SettingError(path, f"{value!r} would have no effect, it is {what_for}; remove it")
