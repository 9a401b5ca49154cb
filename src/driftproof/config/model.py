"""The whole configuration, and validation across its settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import Field, PrivateAttr, model_validator

from driftproof._arguments import ArgumentError
from driftproof._trust import OWN, Trust, UntrustedError
from driftproof.config.keys import dotted, flat_keys, placed
from driftproof.config.sections import (
    AdversarialSection,
    CriticSection,
    DriftSection,
    EnvSection,
    FromTo,
    OptimizerSection,
    PBTSection,
    PolicySection,
    PPOSection,
    RunSection,
    Section,
    VGSSection,
    place_of,
)
from driftproof.settings.adversarial import (
    AdversarialSettings,
    PerturbationConfig,
    unused_by_adversary,
    unused_by_training_attack,
)
from driftproof.settings.agent import AgentSettings
from driftproof.settings.batches import STEPS_AND_BATCH, Batches, cut
from driftproof.settings.definition import defaults_of, settings_of
from driftproof.settings.optimizers import DEFAULTS, unused_by_optimizer
from driftproof.settings.policy import PolicySettings, unused_by_policy
from driftproof.settings.population import HyperparamConfig, unused_by_search
from driftproof.settings.run import BACKEND_OF, PLACING
from driftproof.settings.schedules import Cosine, Linear
from driftproof.settings.unused import given_in_vain


class SettingError(ValueError):
    """A setting is invalid in combination with others.

    Attributes:
        path: Path of the setting.
    """

    def __init__(self, path: str, message: str) -> None:
        self.path = tuple(int(part) if part.isdecimal() else part for part in path.split("."))
        super().__init__(f"{path}: {message}")


class Config(Section):
    """All settings of a run."""

    run: RunSection = Field(default_factory=RunSection)
    env: EnvSection = Field(default_factory=EnvSection)
    policy: PolicySection = Field(default_factory=PolicySection)
    critic: CriticSection = Field(default_factory=CriticSection)
    ppo: PPOSection = Field(default_factory=PPOSection)
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    vgs: VGSSection = Field(default_factory=VGSSection)
    drift: DriftSection = Field(default_factory=DriftSection)
    adversarial: AdversarialSection = Field(default_factory=AdversarialSection)
    pbt: PBTSection = Field(default_factory=PBTSection)

    _trust: Trust = PrivateAttr(OWN)
    """Trusted modules; pickled with the settings into other processes, and never read from a file."""

    @model_validator(mode="before")
    @classmethod
    def _in_place(cls, data: Any) -> Any:
        """Move settings that were given by alternative names to their sections."""
        return placed(data).data if isinstance(data, Mapping) else data

    @model_validator(mode="after")
    def _fit_together(self) -> Config:
        _check_networks(self)
        if not self.env.normalize_observations:
            _check_default(self.env, "env.clip_observations", "env.normalize_observations: true")
        _check_drift(self.env)
        if not self.vgs.enabled:
            _check_defaults(self.vgs, "vgs", "vgs.enabled: true")
        unused = unused_by_optimizer(self.optimizer.name, self.optimizer.kwargs)
        _refuse(self.optimizer.kwargs, DEFAULTS, unused, "optimizer.kwargs")
        _check_adversarial(self.adversarial)
        _check_search(self.pbt)
        _check_backend(self.pbt)
        _ = self.batches
        self._check_as_constructors_do()
        return self

    def _check_as_constructors_do(self) -> None:
        """Refuse values that the constructors of the agent and its networks would refuse."""
        for definition, spaces in ((AgentSettings, {}), (PolicySettings, _NO_SPACES)):
            values = self.arguments(definition)
            try:
                definition(**spaces, **values)
            except ArgumentError as error:
                known = settings_of(definition)
                section, key = place_of(definition, known[error.name]) if error.name in known else ("policy", "name")
                raise SettingError(f"{section}.{key}", str(error)) from error

    def arguments(self, definition: type[Any]) -> dict[str, Any]:
        """A constructor's arguments that configurations can set; classes are given by name."""
        arguments = {}
        for name, each in settings_of(definition).items():
            if each.about.in_files:
                section, key = place_of(definition, each)
                arguments[name] = _argument(getattr(getattr(self, section), key))
        return arguments

    @property
    def has_memory(self) -> bool:
        """Whether the policy is recurrent."""
        if self.policy.core is not None:
            return bool(self.policy.core != "none")
        return "Lstm" in self.policy.name or "Gru" in self.policy.name

    @property
    def trust(self) -> Trust:
        """Modules that may be imported because a setting names them: all, unless the settings are from a file."""
        return self._trust

    def with_trust(self, trust: Trust) -> Config:
        """A copy with other trusted modules."""
        config = self.model_copy()
        config._trust = trust
        return config

    @property
    def n_steps(self) -> int:
        """Steps per environment and update."""
        given: int | None = self.ppo.n_steps
        return STEPS_AND_BATCH[self.has_memory][0] if given is None else given

    @property
    def batches(self) -> Batches:
        """Division of a rollout into sequences and minibatches."""
        given, has_memory = self.ppo.batch_size, self.has_memory
        batch_size = STEPS_AND_BATCH[has_memory][1] if given is None else given
        try:
            return cut(self.n_steps, self.env.n_envs, batch_size, self.ppo.sequence_length, has_memory)
        except ValueError as error:
            raise SettingError("ppo.sequence_length", str(error)) from error

    @property
    def steps_per_update(self) -> int:
        """Environment steps per update."""
        return self.n_steps * int(self.env.n_envs)

    @property
    def total_updates(self) -> int:
        """Number of updates of the whole training, each on a full rollout."""
        return -(-int(self.run.total_timesteps) // self.steps_per_update)


def _check_backend(pbt: PBTSection) -> None:
    """Refuse options of backends that are not used, and options of Ray that could run code."""
    for name, backend in BACKEND_OF.items():
        if pbt.backend != backend:
            _check_default(pbt, f"pbt.{name}", f"pbt.backend: {backend}")
    for name in pbt.resources_per_member:
        if name not in PLACING:
            raise SettingError(f"pbt.resources_per_member.{name}", f"unknown; it may have {', '.join(PLACING)}")


def _check_networks(config: Config) -> None:
    """Refuse settings of the networks that have no effect because of others."""
    policy, critic, ppo = config.policy, config.critic, config.ppo
    needed = unused_by_policy(critic.value_head, config.has_memory, ppo.use_sde)
    unused = {name: _as_in_files(text) for name, text in needed.items()}
    defaults = defaults_of(PolicySettings)
    for section, part in (("policy", policy), ("critic", critic)):
        _refuse(dict(part), defaults | {name: {} for name in defaults if name.endswith("kwargs")}, unused, section)
    if not config.has_memory and ppo.sequence_length != 1:
        _check_default(ppo, "ppo.sequence_length", f"a recurrent policy; {policy.name} is not recurrent")
    if not ppo.use_sde:
        _check_default(ppo, "ppo.sde_sample_freq", "ppo.use_sde: true")
    if policy.net_arch == []:
        _check_default(policy, "policy.activation_fn", "layers in policy.net_arch")


def _as_in_files(text: str) -> str:
    """``use_sde=True`` as ``ppo.use_sde: true``."""
    known = flat_keys()
    return re.sub(r"(\w+)='?(\w+)'?", lambda found: f"{dotted(known[found[1]])}: {found[2].lower()}", text)


def _check_drift(env: EnvSection) -> None:
    if not env.drift:
        _check_default(env, "env.drift_seed", "env.drift")
        return
    from driftproof.envs import change

    for spec in env.drift:
        try:
            change(spec)
        except UntrustedError:
            continue  # Trust is checked when the environment is built.
        except (TypeError, ValueError) as error:
            raise SettingError("env.drift", str(error)) from error


def _check_adversarial(adversarial: AdversarialSection) -> None:
    if not adversarial.enabled:
        _check_defaults(adversarial, "adversarial", "adversarial.enabled: true")
        return
    if adversarial.adversarial_ratio == 0:
        raise SettingError("adversarial.adversarial_ratio", "0 switches attacks off: use adversarial.enabled: false")
    values, attack = dict(adversarial), dict(adversarial.perturbation)
    _refuse(values, defaults_of(AdversarialSettings), unused_by_adversary(values), "adversarial")
    _refuse(attack, defaults_of(PerturbationConfig), unused_by_training_attack(attack), "adversarial.perturbation")


def _check_search(pbt: PBTSection) -> None:
    for index, item in enumerate(pbt.hyperparams):
        unused = unused_by_search(pbt.explore_method, item.values is not None)
        _refuse(dict(item), defaults_of(HyperparamConfig), unused, f"pbt.hyperparams.{index}")


def _refuse(given: Mapping[str, Any], defaults: Mapping[str, Any], unused: Mapping[str, str], place: str) -> None:
    for name, problem in given_in_vain(given, defaults, unused):
        raise SettingError(f"{place}.{name}", problem)


def _argument(value: Any) -> Any:
    """A constructor's argument from a configuration's value."""
    if isinstance(value, FromTo):
        return {"linear": Linear, "cosine": Cosine}[value.kind](value.start, value.end)
    return value.model_dump() if isinstance(value, Section) else value


_NO_SPACES: dict[str, Any] = {"observation_space": None, "action_space": None}


def _check_defaults(section: Section, path: str, needed: str) -> None:
    """Refuse settings of a section that is switched off."""
    for name in type(section).model_fields:
        if isinstance(part := getattr(section, name), Section):
            _check_defaults(part, f"{path}.{name}", needed)
        elif name != "enabled":
            _check_default(section, f"{path}.{name}", needed)


def _check_default(section: Section, path: str, needed: str) -> None:
    """Refuse a setting that would have no effect."""
    name = path.rpartition(".")[2]
    default = type(section).model_fields[name].get_default(call_default_factory=True)
    if (value := getattr(section, name)) != default:
        raise SettingError(path, f"{value!r} would have no effect: it needs {needed}; remove it")
