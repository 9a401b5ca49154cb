"""The models know what the agent, its parts and populations take, with the same defaults and bounds."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields
from typing import get_args

import pytest
from pydantic import ValidationError

from driftproof.adversarial import PerturbationConfig, SAPPOConfig
from driftproof.config import Config, loads
from driftproof.config.agent import KLPenaltySection, PolicyName
from driftproof.config.page import page
from driftproof.config.population import HyperparamSection
from driftproof.config.reference import json_schema
from driftproof.learner.kl import KLPenalty
from driftproof.nn.policies import NAMED_POLICIES, DistributionalPolicy
from driftproof.optim import VarianceGradientScaler
from driftproof.pbt import HyperparamConfig, PBTConfig
from driftproof.ppo import DistributionalPPO
from driftproof.ppo import settings as agent_settings

ELSEWHERE = {
    "policy": "policy.name",
    "env": "the section env",
    "policy_kwargs": "the sections policy and critic",
    "vgs_kwargs": "the section vgs",
    "vgs": "the section vgs, item by item",
    "variance_gradient_scaling": "vgs.enabled",
    "optimizer_class": "optimizer.name",
    "optimizer_kwargs": "optimizer.kwargs",
    "adversarial": "the section adversarial",
    "learning_rate": "ppo.learning_rate, which is not None there",
    "tensorboard_log": "tensorboard in the run's folder",
    "verbose": "the commands show what there is to see",
    "_init_setup_model": "agents are built whole",
    "seed": "run.seed, which is never None",
}
"""Arguments that have no setting of the same name and default, and what they have instead."""


def parameters(kind):
    return {name: part.default for name, part in list(inspect.signature(kind).parameters.items())}


def test_every_argument_of_the_agent_has_its_place():
    config = Config()
    for name, default in parameters(DistributionalPPO).items():
        if name in ELSEWHERE:
            continue
        owners = [part for part in (config.ppo, config.critic, config.run) if hasattr(part, name)]
        assert len(owners) == 1, name
        assert getattr(owners[0], name) == default, name
    assert config.ppo.learning_rate == agent_settings._DEFAULT_LEARNING_RATE


def test_every_argument_of_the_networks_has_its_place():
    config = Config()
    for name, default in parameters(DistributionalPolicy).items():
        if name in ("observation_space", "action_space", "use_sde"):
            continue
        owners = [part for part in (config.policy, config.critic) if hasattr(part, name)]
        assert len(owners) == 1, name
        if name not in ("activation_fn", "features_extractor_kwargs", "lstm_kwargs", "value_head_kwargs"):
            assert getattr(owners[0], name) == default, name
    assert set(get_args(PolicyName)) == set(NAMED_POLICIES)


@pytest.mark.parametrize(
    ("section", "kind", "missing", "added"),
    [
        (Config().vgs, VarianceGradientScaler, {"parameters", "logger"}, set()),
        (KLPenaltySection(), KLPenalty, {"target", "device"}, set()),
    ],
)
def test_parts_take_what_their_classes_take(section, kind, missing, added):
    arguments = parameters(kind)
    assert set(type(section).model_fields) == set(arguments) - missing | added
    for name in type(section).model_fields:
        assert getattr(section, name) == arguments[name], name


@pytest.mark.parametrize(
    ("section", "kind", "missing", "added"),
    [
        (Config().adversarial, SAPPOConfig, set(), {"enabled"}),
        (Config().adversarial.perturbation, PerturbationConfig, set(), set()),
        (
            Config().pbt,
            PBTConfig,
            set(),
            {"backend", "workers", "resources_per_member", "address", "synchronous", "max_restarts"},
        ),
        (HyperparamSection(name="x"), HyperparamConfig, {"is_whole"}, set()),
    ],
)
def test_sections_take_what_their_dataclasses_take(section, kind, missing, added):
    own = {field.name: field.default for field in fields(kind)}
    assert set(type(section).model_fields) == set(own) - missing | added
    for name, default in own.items():
        if default is not MISSING and name not in ("hyperparams", *missing):
            assert getattr(section, name) == default, name


def test_bounds_are_the_agents():
    """What the agent refuses the configuration refuses, and what it takes it takes."""
    config = Config()
    for name, bounds in agent_settings.BOUNDS.items():
        section = "ppo" if hasattr(config.ppo, name) else "critic"
        for kind, bound in bounds.items():
            if bound >= agent_settings._LARGE:
                continue  # Guards against overflow, which the agent alone has.
            inside = {"at_least": bound, "at_most": bound, "above": bound + 0.5, "below": bound - 0.5}[kind]
            outside = {"at_least": bound - 1, "at_most": bound + 1, "above": bound, "below": bound}[kind]
            loads("", [f"{section}.{name}={inside}"])
            with pytest.raises(ValueError, match=name):
                loads("", [f"{section}.{name}={outside}"])
    for name, bounds in agent_settings._VGS_BOUNDS.items():
        for kind, bound in bounds.items():
            if bound >= agent_settings._LARGE:
                continue
            outside = {"at_least": bound - 1, "at_most": bound + 1, "above": bound, "below": bound}[kind]
            with pytest.raises(ValueError, match=name):
                loads("", [f"vgs.{name}={outside}"])


def test_every_setting_is_explained():
    schema = json_schema()
    for definition in schema["$defs"].values():
        for name, part in definition.get("properties", {}).items():
            assert part.get("description") or "$ref" in part, name
            assert part.get("description", "x.")[-1] in ".)}", name
    for name in ("vgs_beta", "population_size", "optimizer_class"):
        assert name in schema["properties"]
    text = page()
    for definition in schema["$defs"].values():
        for name in definition.get("properties", {}):
            assert f"`{name}`" in text or name in ("pi", "vf", "perturbation"), name


def test_configurations_cannot_be_changed():
    with pytest.raises(ValidationError):
        Config().ppo.gamma = 0.5


def test_updates_are_whole_rollouts():
    config = loads("n_steps: 100\nn_envs: 2\nbatch_size: 40\npolicy: MlpPolicy\ntotal_timesteps: 401")
    assert config.steps_per_update == 200
    assert config.total_updates == 3
