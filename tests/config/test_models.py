"""Configurations, constructors and documentation know the same settings, since all are made from their definitions."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
import textwrap
from typing import get_args

import pytest
from pydantic import ValidationError

from driftproof.config import Config, loads
from driftproof.config.page import page
from driftproof.config.reference import json_schema
from driftproof.nn.policies import NAMED_POLICIES, DistributionalPolicy
from driftproof.optim import VarianceGradientScaler
from driftproof.ppo import DistributionalPPO
from driftproof.settings.agent import HYPERPARAMETERS, AgentSettings
from driftproof.settings.definition import settings_of
from driftproof.settings.policy import PolicyName, PolicySettings
from driftproof.settings.scaling import VGSSettings


@pytest.mark.parametrize(
    ("kind", "definition"),
    [
        (DistributionalPPO, AgentSettings),
        (DistributionalPolicy, PolicySettings),
        (VarianceGradientScaler, VGSSettings),
    ],
)
def test_constructors_show_every_argument(kind, definition):
    shown = inspect.signature(kind).parameters
    assert list(shown) == list(settings_of(definition))
    for name, each in settings_of(definition).items():
        default = inspect.Parameter.empty if each.default is dataclasses.MISSING else each.default
        assert shown[name].default == default, name
        assert shown[name].annotation is not inspect.Parameter.empty, name
        assert f"{name}: {each.about.doc[:20]}" in kind.__doc__, name


def test_the_first_arguments_are_those_of_ppo():
    from stable_baselines3 import PPO

    ours, theirs = (list(inspect.signature(kind).parameters.values()) for kind in (DistributionalPPO, PPO))
    shared = {each.name for each in theirs}
    positional = [each.name for each in ours if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert positional == [each.name for each in theirs if each.name in positional]
    assert {"rollout_buffer_class", "rollout_buffer_kwargs"} == shared - {each.name for each in ours}


def test_names_of_classes_are_complete():
    assert set(get_args(PolicyName)) == set(NAMED_POLICIES)


@pytest.mark.parametrize("name", sorted(HYPERPARAMETERS))
def test_constructors_and_configurations_have_one_bound(name):
    """What the one refuses the other refuses, and what it takes it takes."""
    config = Config()
    section = next(each for each in ("ppo", "critic", "drift") if hasattr(getattr(config, each), name))
    beside = ["ppo.kl_stop=absolute"]
    for kind, bound in HYPERPARAMETERS[name].bounds.items():
        step = max(1, abs(bound) * 1e-6)
        inside = {"at_least": bound, "at_most": bound, "above": bound + 0.5, "below": bound - 0.5}[kind]
        outside = {"at_least": bound - step, "at_most": bound + step, "above": bound, "below": bound}[kind]
        inside, outside = (int(x) if HYPERPARAMETERS[name].is_count else x for x in (inside, outside))
        loads("", [f"{section}.{name}={inside}", *beside])
        AgentSettings(**{name: inside})
        with pytest.raises(ValueError, match=name):
            loads("", [f"{section}.{name}={outside}", *beside])
        with pytest.raises(ValueError, match=f"Invalid {name}"):
            AgentSettings(**{name: outside})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ppo: {kl_stop: fraction}", "ppo.kl_stop: kl_stop='fraction' needs target_kl"),
        ("ppo: {kl_penalty: true}", "ppo.kl_penalty: kl_penalty needs target_kl"),
        ("critic: {value_clip_mode: mean_only}", "critic.value_clip_mode: .* needs clip_range_vf"),
        ("ppo: {ent_coef: 0.001, ent_coef_min: 0.01}", "ppo.ent_coef: ent_coef 0.001 is below ent_coef_min"),
        ("ppo: {target_kl: 0.1, kl_penalty: {init_coef: 11}}", "Invalid init_coef: 11"),
        ("policy: {shared_lstm: true}", "shared_lstm=True and enable_critic_lstm=True"),
        ("critic: {value_head: categorical, v_min: 11}", "critic.v_min: Invalid v_min: 11"),
    ],
)
def test_what_constructors_refuse_together_is_refused_when_a_file_is_read(text, message):
    with pytest.raises(ValueError, match=message):
        loads(text)


ADD_ONE = """
import dataclasses
import driftproof.settings.agent as agent
from driftproof.settings.definition import settings_of, setting

@dataclasses.dataclass
class More(agent.AgentSettings):
    curiosity: float = setting(
        0.25, "Weight of curiosity. Larger explores more; 0 to 1.", at_least=0, at_most=1, is_hyperparameter=True
    )

agent.AgentSettings = More
agent.HYPERPARAMETERS = {name: each for name, each in settings_of(More).items() if each.about.is_hyperparameter}

def refused(text, function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except ValueError as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"not refused: {text}")

import inspect, sys
from driftproof.config import Config, commented_yaml, json_schema, loads
from driftproof.config.page import page
assert "torch" not in sys.modules
assert Config().ppo.curiosity == 0.25
assert loads("curiosity: 0.5").ppo.curiosity == 0.5
schema = json_schema()["$defs"]["PPOSection"]["properties"]["curiosity"]
assert (schema["minimum"], schema["maximum"], schema["default"]) == (0, 1, 0.25)
assert "Weight of curiosity. Larger explores more" in commented_yaml()
assert "| `curiosity` | `0.25` | Weight of curiosity." in page()
problem = "my.yaml:1: ppo.curiosity: should be less than or equal to 1, not 2"
refused(problem, loads, "ppo: {curiosity: 2}", name="my.yaml")

from driftproof.config import build_agent
from driftproof.pbt import HyperparamConfig, PBTConfig, check_against
from driftproof.ppo import DistributionalPPO
assert inspect.signature(DistributionalPPO).parameters["curiosity"].default == 0.25
assert "curiosity: Weight of curiosity" in DistributionalPPO.__doc__
problem = "Invalid curiosity: 2; must be a finite number >= 0 and <= 1"
refused(problem, DistributionalPPO, "MlpPolicy", "CartPole-v1", curiosity=2)
made = build_agent(loads("policy: MlpPolicy\\ncuriosity: 0.5\\nrun: {device: cpu}"))
assert made.curiosity == made.hyperparams["curiosity"] == made.settings()["curiosity"] == 0.5
made.hyperparams["curiosity"] = 0.75
made.save(sys.argv[1])
assert DistributionalPPO.load(sys.argv[1], device="cpu").curiosity == 0.75
refused(problem, made.hyperparams.__setitem__, "curiosity", 2)
search = PBTConfig(hyperparams=[HyperparamConfig("curiosity", 0.0, 2.0)])
refused("max_value=2.0 cannot be used: Invalid curiosity", check_against, search, made.hyperparams)
print("everywhere")
"""


def test_a_setting_that_is_defined_once_is_everywhere(tmp_path):
    """One field of the definition reaches constructor, YAML, schema, page, registry, search bounds and files."""
    command = [sys.executable, "-c", textwrap.dedent(ADD_ONE), str(tmp_path / "agent.zip")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "everywhere\n", done.stderr


def test_definitions_need_neither_torch_nor_pydantic():
    code = (
        "import importlib, pkgutil, sys, driftproof.settings as s;"
        "[importlib.import_module(f'driftproof.settings.{each.name}') for each in pkgutil.iter_modules(s.__path__)];"
        "assert not {'torch', 'pydantic', 'stable_baselines3', 'numpy', 'gymnasium'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


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
