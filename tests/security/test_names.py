"""Names in files of strangers are data: nothing is imported or called because a file says so."""

from __future__ import annotations

import os
import pickle
import shutil
import sys

import cloudpickle
import gymnasium
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.torch_layers import FlattenExtractor

from driftproof.config import AgentMaker, Config, ConfigError, build_agent, build_env, build_population, load, loads
from driftproof.ppo import DistributionalPPO, manifest
from driftproof.state import CheckpointError
from tests.cli.commands import call
from tests.security.strangers import SETTINGS

COMMANDS = {
    "evaluate": ["evaluate", "{run}"],
    "evaluate a checkpoint": ["evaluate", "{checkpoint}"],
    "infer": ["infer", "{run}", "prices.csv"],
    "export": ["export", "{run}", "--onnx", "{run}/agent.onnx"],
    "train": ["train", "--resume", "{run}"],
}
MINE = """
import subprocess
from subprocess import Popen
from stable_baselines3.common.torch_layers import FlattenExtractor
import pathlib

class Extractor(FlattenExtractor):
    pass

def explode(*args, **kwargs):
    pathlib.Path({canary!r}).touch()

class Bomb:
    def __init__(self, *args, **kwargs):
        explode()
"""
"""A module that its user trusts, with things in it that must not be called."""


def foreign(name):
    return {"$foreign": name}


def refused(capsys, stranger, *command):
    """The one line with which a command refuses; nothing has run."""
    values = {"run": stranger.run, "checkpoint": stranger.checkpoint if (stranger.run / "checkpoints").exists() else ""}
    code, _, errors = call(capsys, *(str(part).format(**values) for part in command))
    stranger.assert_nothing_ran()
    assert code == 1, errors
    assert "Traceback" not in errors
    assert all(line.startswith("driftproof: ") and len(line) < 1000 for line in errors.splitlines()), errors
    return errors


def put(*path):
    """A change of a manifest: the last argument at the place that the others name."""
    *places, last, value = path

    def change(config):
        for place in places:
            config = config[place]
        config[last] = value

    return change


class TestTheBreakInOfTheAudit:
    """``subprocess.Popen`` as features extractor, and an observation space whose keys spell a command."""

    @pytest.fixture(autouse=True)
    def _plant(self, stranger):
        stranger.configure({"policy": {"name": "MultiInputPolicy", "features_extractor_class": "subprocess:Popen"}})

        def plant(config):
            command = {key: spaces.Box(-1, 1, (1,)) for key in ("touch", str(stranger.canary))}
            config["observation_space"] = manifest.encode(spaces.Dict(command))
            config["settings"]["policy"] = "MultiInputPolicy"
            config["settings"]["policy_kwargs"]["features_extractor_class"] = foreign("subprocess.Popen")

        stranger.tamper(plant)

    @pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
    def test_commands_that_build_the_agent(self, stranger, capsys, command):
        said = refused(capsys, stranger, *command)
        assert (
            "policy.features_extractor_class: 'subprocess:Popen' would import and run the module 'subprocess'" in said
        )
        assert f"which {stranger.run}/config.yaml:" in said
        assert "--trust subprocess, or trusted=['subprocess'] in Python" in said

    def test_tune(self, stranger, capsys):
        stranger.without_checkpoint()
        assert "would import and run the module 'subprocess'" in refused(capsys, stranger, "tune", "--resume", "{run}")
        with pytest.raises(ConfigError, match="would import"):
            build_population(load(stranger.run / "config.yaml"), stranger.run)
        stranger.assert_nothing_ran()

    @pytest.mark.parametrize("command", ["report", "inspect"])
    def test_commands_that_only_read(self, stranger, capsys, command):
        assert call(capsys, command, stranger.run)[0] == 0
        stranger.assert_nothing_ran()

    @pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
    def test_trust_does_not_make_a_process_an_extractor(self, stranger, capsys, command):
        said = refused(capsys, stranger, *command, "--trust", "subprocess")
        assert "is not a subclass of stable_baselines3.common.torch_layers.BaseFeaturesExtractor" in said

    def test_the_checkpoint_alone(self, stranger, tmp_path, capsys):
        alone = shutil.copy(stranger.checkpoint, tmp_path / "alone.zip")
        said = refused(capsys, stranger, "evaluate", alone, "--env", "CartPole-v1")
        assert "subprocess.Popen, which the file holds by name only" in said
        said = refused(capsys, stranger, "evaluate", alone, "--env", "CartPole-v1", "--trust", "subprocess")
        assert "is not a subclass of" in said

    def test_in_python(self, stranger):
        for options in ({}, {"trusted": ["subprocess"]}, {"custom_objects": {"Popen": __import__("subprocess").Popen}}):
            with pytest.raises(CheckpointError, match=r"which the file holds by name only|is not a subclass of"):
                DistributionalPPO.load(stranger.checkpoint, device="cpu", **options)
        stranger.assert_nothing_ran()


@pytest.mark.parametrize(
    ("section", "setting", "name"),
    [
        ("optimizer", "name", "evil:Adam"),
        ("policy", "features_extractor_class", "evil:Net"),
        ("policy", "features_extractor_class", "os.path:evil"),
        ("policy", "core", "evil:Core"),
        ("critic", "value_head", "evil:Head"),
        ("optimizer", "name", "driftproof.__main__:main"),
        ("optimizer", "name", "torch.optim.evil:Adam"),
    ],
)
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_modules_of_a_configuration(section, setting, name, command, stranger, capsys):
    stranger.configure({section: {setting: name}})
    assert f"{section}.{setting}: '{name}' would import" in refused(capsys, stranger, *command)


@pytest.mark.parametrize("command", ["evaluate", "evaluate a checkpoint", "train"])
def test_modules_of_drifts_and_attacks(command, stranger, capsys):
    sudden = {"kind": "sudden", "every": 1}
    for change in (
        {"kind": "evil:Change", "schedule": sudden},
        {"kind": "reward_scale", "schedule": {"kind": "evil:Schedule"}},
    ):
        stranger.configure({"env": {"drift": [change]}})
        assert "'evil:" in refused(capsys, stranger, *COMMANDS[command])
    stranger.configure({"adversarial": {"enabled": True, "perturbation": {"attack_method": "evil:Attack"}}})
    assert "adversarial.perturbation.attack_method: 'evil:" in refused(capsys, stranger, *COMMANDS[command])


def test_modules_of_explore_methods(stranger, capsys):
    stranger.configure({"pbt": {"explore_method": "evil:Explore"}})
    for command in ("train", "tune"):
        said = refused(capsys, stranger, command, stranger.run / "config.yaml")
        assert "pbt.explore_method: 'evil:Explore' would import" in said
    assert call(capsys, "evaluate", stranger.run)[0] == 0
    stranger.assert_nothing_ran()


@pytest.mark.parametrize("command", ["evaluate", "evaluate a checkpoint", "train"])
@pytest.mark.parametrize("name", ["evil:CartPole-v1", "evil.inner:CartPole-v1", "evil:evil:X-v0", ":evil:X-v0"])
def test_modules_of_environments(name, command, stranger, capsys):
    stranger.configure({"env": {"id": name}})
    assert f"env.id: '{name}' would import" in refused(capsys, stranger, *COMMANDS[command])


def test_what_is_not_needed_is_not_asked_for(stranger, capsys):
    stranger.configure({"env": {"id": "evil:CartPole-v1"}})
    assert call(capsys, "evaluate", stranger.run, "--env", "CartPole-v1")[0] == 0
    stranger.assert_nothing_ran()


def test_all_names_are_told_at_once(stranger, capsys):
    stranger.configure({"env": {"id": "evil:X-v0"}, "optimizer": {"name": "evil:Adam"}})
    assert refused(capsys, stranger, "train", "--resume", "{run}").count("would import") == 2


def test_names_under_other_keys(stranger, tmp_path, capsys):
    for text in ("env: 'evil:X-v0'", "env_id: 'evil:X-v0'", "optimizer_class: 'evil:Adam'", "optimizer: 'evil:Adam'"):
        (tmp_path / "file.yaml").write_text(text)
        for command in ("train", "tune", "config"):
            assert "would import" in refused(capsys, stranger, command, tmp_path / "file.yaml")


def test_a_name_in_one_place_trusts_no_other(stranger, capsys):
    stranger.configure({"optimizer": {"name": "evil:Adam"}})
    assert "optimizer.name: 'evil:Adam'" in refused(capsys, stranger, "evaluate", "{run}", "--env", "CartPole-v1")
    said = refused(capsys, stranger, "evaluate", "{run}", "--trust", "evi", "--trust", "evil_too")
    assert "would import" in said


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"policy": {"name": "evil:Policy"}}, "policy.name"),
        ({"policy": {"name": "evil.Policy"}}, "policy.name"),
        ({"policy": {"activation_fn": "evil.Tanh"}}, "policy.activation_fn"),
        ({"policy": {"activation_fn": "evil:Tanh"}}, "policy.activation_fn"),
        ({"policy": {"activation_fn": "torch.nn.modules.activation.Tanh"}}, "policy.activation_fn"),
        ({"policy": {"features_extractor_class": "evil.Net"}}, "is not one of FlattenExtractor"),
        ({"policy": {"optimizer_class": "evil:Adam"}}, "policy.optimizer_class"),
        ({"pbt": {"metric_name": "evil:metric"}}, "pbt.metric_name"),
    ],
)
def test_names_where_the_table_is_fixed(changes, problem, stranger, capsys):
    stranger.configure(changes)
    assert problem in refused(capsys, stranger, "train", "--resume", "{run}", "--trust", "evil")


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.system ['{}']", "!!python/name:evil.Net", "!evil 1"])
def test_tags_of_yaml(tag, stranger, capsys):
    with open(stranger.run / "config.yaml", "a") as file:
        file.write(f"\ncritic: {tag.format(f'touch {stranger.canary}')}\n")
    assert "is not YAML" in refused(capsys, stranger, "evaluate", "{run}")
    call(capsys, "report", stranger.run)
    stranger.assert_nothing_ran()


@pytest.mark.parametrize(
    "change",
    [
        put("settings", "env", "evil:CartPole-v1"),
        put("settings", "policy", foreign("evil.Policy")),
        put("settings", "policy", {"$class": "evil.Policy"}),
        put("settings", "policy", {"$class": "torch.optim.adam.Adam"}),
        put("settings", "optimizer_class", foreign("evil.Adam")),
        put("settings", "optimizer_class", foreign("evil." + "A" * 10_000)),
        put("settings", "optimizer_class", foreign(["evil.Adam"])),
        put("settings", "optimizer_class", {"$class": "evil.Adam"}),
        put("settings", "optimizer_class", {"$class": "torch.nn.modules.activation.Tanh"}),
        put("settings", "optimizer_class", "evil:Adam"),
        put("settings", "adversarial", {"$config": "evil"}),
        put("settings", "adversarial", {"$config": "evil.Config", "epsilon": 1}),
        put("settings", "learning_rate", {"$schedule": "evil.Linear", "start": 1}),
        put("settings", "learning_rate", {"$class": "torch.optim.adam.Adam"}),
        put("settings", "learning_rate", foreign("evil.schedule")),
        put("settings", "policy_kwargs", "activation_fn", {"$class": "subprocess.Popen"}),
        put("settings", "policy_kwargs", "activation_fn", {"$class": "torch.optim.adam.Adam"}),
        put("settings", "policy_kwargs", "activation_fn", {"$schedule": "Linear", "start": 1}),
        put("settings", "policy_kwargs", "activation_fn", "evil.Tanh"),
        put("settings", "policy_kwargs", "features_extractor_class", "evil:Net"),
        put("settings", "policy_kwargs", "features_extractor_class", [foreign("evil.Net")]),
        put("settings", "policy_kwargs", "features_extractor_kwargs", {"features_dim": foreign("evil.Net")}),
        put("settings", "policy_kwargs", "optimizer_class", foreign("evil.Adam")),
        put("settings", "optimizer_kwargs", {"lr": foreign("evil.lr")}),
        put("settings", "vgs_kwargs", {"logger": foreign("evil.logger")}),
        put("observation_space", {"$foreign": "evil.Space"}),
        put("observation_space", {"$space": {"kind": "evil:Space"}}),
        put("class", "evil.DistributionalPPO"),
    ],
)
def test_names_in_a_checkpoint(change, stranger, capsys):
    stranger.tamper(change)
    for options in ([], ["--env", "CartPole-v1"]):
        refused(capsys, stranger, "evaluate", "{checkpoint}", *options)
    with pytest.raises(CheckpointError) as error:
        DistributionalPPO.load(stranger.checkpoint, device="cpu")
    assert len(str(error.value)) < 1000
    stranger.assert_nothing_ran()


class TestTrustedModules:
    @pytest.fixture(autouse=True)
    def _write(self, stranger):
        stranger.module("mine", MINE)
        stranger.module("package.inner", MINE)

    def test_a_trusted_module_may_be_named(self, stranger, capsys, monkeypatch):
        for name in ("mine:Extractor", "package.inner:Extractor"):
            stranger.configure({"policy": {"features_extractor_class": name}})
            for trusted in (name.partition(":")[0], name.partition(".")[0].partition(":")[0]):
                code, _, errors = call(capsys, "evaluate", stranger.run, "--trust", "other", "--trust", trusted)
                assert code == 0, errors
                monkeypatch.setenv("DRIFTPROOF_TRUST", f"other, {trusted}")
                assert call(capsys, "evaluate", stranger.run)[0] == 0
                config = load(stranger.run / "config.yaml")
                assert type(build_agent(config).policy.features_extractor).__name__ == "Extractor"
                monkeypatch.delenv("DRIFTPROOF_TRUST")
                assert "would import" in refused(capsys, stranger, "evaluate", "{run}")
        stranger.assert_nothing_ran()

    @pytest.mark.parametrize("name", ["Popen", "explode", "Bomb", "subprocess", "FlattenExtractor.__init__", "nothing"])
    @pytest.mark.parametrize(
        "place", ["policy.features_extractor_class", "optimizer.name", "policy.core", "critic.value_head"]
    )
    def test_but_only_for_things_of_the_kind_that_belongs_there(self, name, place, stranger, capsys):
        section, _, setting = place.partition(".")
        stranger.configure({section: {setting: f"mine:{name}"}})
        said = refused(capsys, stranger, "evaluate", "{run}", "--trust", "mine")
        assert "is not a subclass of" in said or "has no attribute" in said

    @pytest.mark.parametrize("name", ["Popen", "explode", "Bomb", "subprocess", "subprocess.Popen", "nothing"])
    @pytest.mark.parametrize(
        "place",
        [
            ("settings", "policy"),
            ("settings", "optimizer_class"),
            ("settings", "learning_rate"),
            ("settings", "policy_kwargs", "activation_fn"),
            ("settings", "policy_kwargs", "core"),
            ("settings", "policy_kwargs", "features_extractor_class"),
            ("settings", "policy_kwargs", "features_extractor_kwargs"),
            ("settings", "policy_kwargs", "value_head"),
        ],
        ids=lambda place: place[-1],
    )
    def test_in_checkpoints_too(self, name, place, stranger):
        stranger.tamper(put(*place, foreign(f"mine.{name}")))
        with pytest.raises(CheckpointError):
            DistributionalPPO.load(stranger.checkpoint, device="cpu", trusted=["mine"])
        stranger.assert_nothing_ran()

    @pytest.mark.parametrize("place", ["core", "value_head"])
    def test_texts_in_checkpoints_import_nothing(self, place, stranger):
        stranger.tamper(put("settings", "policy_kwargs", place, "evil:Thing"))
        with pytest.raises(CheckpointError, match="would import"):
            DistributionalPPO.load(stranger.checkpoint, device="cpu", trusted=["mine"])
        stranger.assert_nothing_ran()

    def test_classes_of_trusted_modules_load(self, stranger):
        stranger.tamper(put("settings", "policy_kwargs", "features_extractor_class", foreign("mine.Extractor")))
        with pytest.raises(CheckpointError, match=r"trusted=\['mine'\]"):
            DistributionalPPO.load(stranger.checkpoint, device="cpu")
        agent = DistributionalPPO.load(stranger.checkpoint, device="cpu", trusted=["mine"])
        assert type(agent.policy.features_extractor).__name__ == "Extractor"

    def test_given_classes_are_checked_too(self, stranger):
        stranger.tamper(put("settings", "policy_kwargs", "features_extractor_class", foreign("mine.Extractor")))
        for wrong in (torch.optim.Adam, print, FlattenExtractor(spaces.Box(-1, 1, (4,))), dict):
            with pytest.raises(CheckpointError, match="is not a subclass of"):
                DistributionalPPO.load(stranger.checkpoint, device="cpu", custom_objects={"Extractor": wrong})

    def test_a_given_function_is_not_moved_to_another_place(self, stranger):
        called = []
        for place in ("policy", "optimizer_class"):
            stranger.tamper(put("settings", place, foreign("learning_rate")))
            with pytest.raises(CheckpointError, match="is not a subclass of"):
                DistributionalPPO.load(
                    stranger.checkpoint, device="cpu", custom_objects={"learning_rate": called.append}
                )
        assert called == []

    @pytest.mark.parametrize("name", ["mine.py", "./mine", "mine:Extractor", "", "a..b", "1"])
    def test_trust_takes_names_of_modules(self, name, stranger, capsys):
        assert "is not the name of a module" in refused(capsys, stranger, "evaluate", "{run}", "--trust", name)
        with pytest.raises(ValueError, match="not the name of a module"):
            loads("", trusted=[name])
        with pytest.raises(TypeError, match=r"\['mine'\]"):
            loads("", trusted="mine")


class TestEnvironments:
    def test_a_name_that_the_user_typed_is_imported(self, stranger, capsys):
        stranger.module("worlds", "import gymnasium\ngymnasium.register('Typed-v0', "
                        "'gymnasium.envs.classic_control:CartPoleEnv', max_episode_steps=20)\n")  # fmt: skip
        for typed in (["--env", "worlds:Typed-v0"], ["--set", "env.id='worlds:Typed-v0'"]):
            code, _, errors = call(capsys, "evaluate", stranger.run, *typed)
            assert code == 0, errors
        del gymnasium.registry["Typed-v0"]

    @pytest.mark.parametrize("setting", ["kwargs", "evaluation_kwargs"])
    @pytest.mark.parametrize("trusted", [[], ["--trust", "shimmy"], ["--env", "GymV21Environment-v0"]])
    def test_environments_that_make_what_their_arguments_name(self, setting, trusted, stranger, capsys, monkeypatch):
        stranger.module("shimmy.compatibility", "import importlib\n\ndef make(env_id, make_kwargs=None):\n"
                        "    importlib.import_module(env_id.partition(':')[0])\n")  # fmt: skip
        for entry in ("shimmy.compatibility:make", None):
            if entry is None:  # Registered by its import, as a function.
                import shimmy.compatibility

                entry = shimmy.compatibility.make
            spec = gymnasium.envs.registration.EnvSpec("GymV21Environment-v0", entry)
            monkeypatch.setitem(gymnasium.registry, "GymV21Environment-v0", spec)
            for env_id in ("GymV21Environment-v0", "GymV21Environment"):
                stranger.configure({"env": {"id": env_id, setting: {"env_id": "evil:X-v0"}}})
                said = refused(capsys, stranger, "evaluate", "{run}", *trusted)
                assert "would import and run the module" in said

    def test_ids_that_lead_to_modules_nobody_has_imported(self, stranger, capsys, monkeypatch):
        spec = gymnasium.envs.registration.EnvSpec("Hidden-v0", "evil:Env")
        monkeypatch.setitem(gymnasium.registry, "Hidden-v0", spec)
        stranger.configure({"env": {"id": "Hidden-v0"}})
        assert "'Hidden-v0' would import and run the module 'evil'" in refused(capsys, stranger, "evaluate", "{run}")

    def test_ids_of_this_program_need_no_trust(self, monkeypatch):
        class Registered(gymnasium.envs.classic_control.CartPoleEnv):
            pass

        monkeypatch.setitem(gymnasium.registry, "Mine-v0", gymnasium.envs.registration.EnvSpec("Mine-v0", Registered))
        build_env(loads("env: Mine-v0")).close()

    @pytest.mark.parametrize("names", ["__class__.__init__.__code__", "spec.__class__", "__dict__", "a.__b__.c"])
    def test_drift_stays_in_the_environment(self, names, stranger, capsys):
        schedule = {"kind": "sudden", "values": [1, 2], "every": 3}
        stranger.configure({"env": {"drift": [{"kind": "dynamics", "names": names, "schedule": schedule}]}})
        assert "begin with __" in refused(capsys, stranger, "evaluate", "{run}")

    def test_a_cluster_must_be_typed(self, stranger, capsys):
        stranger.without_checkpoint()
        stranger.configure({"pbt": {"backend": "ray", "address": "ray://203.0.113.1:10001"}})
        said = refused(capsys, stranger, "tune", "--resume", "{run}")
        assert "names a Ray cluster at 'ray://203.0.113.1:10001'" in said
        assert "--set pbt.address=ADDRESS" in said


class TestTrustTravels:
    @pytest.mark.parametrize("pickler", [pickle, cloudpickle])
    def test_with_the_configuration_into_other_processes(self, pickler, stranger):
        text = "optimizer: {name: 'evil:Adam'}"
        for config in (loads(text), loads(text).model_copy(), loads(text).model_copy(update={"run": Config().run})):
            with pytest.raises(ConfigError, match="would import"):
                pickler.loads(pickler.dumps(AgentMaker(config)))(0)
        stranger.assert_nothing_ran()
        trusting = pickler.loads(pickler.dumps(AgentMaker(loads(text, trusted=["evil"]))))
        with pytest.raises(ConfigError, match="has no attribute 'Adam'"):
            trusting(0)
        assert stranger.canary.exists()

    def test_but_not_through_files(self, stranger, tmp_path, capsys):
        for key in ("trust", "_trust", "trusted"):
            (tmp_path / "file.yaml").write_text(f"{key}: {{is_own: true}}\nenv: 'evil:X-v0'")
            assert key in refused(capsys, stranger, "train", tmp_path / "file.yaml")

    def test_a_configuration_of_the_program_is_its_own(self, stranger):
        stranger.module("mine", MINE)
        settings = {**SETTINGS, "policy": {"name": "MlpPolicy", "features_extractor_class": "mine:Extractor"}}
        assert type(build_agent(Config(**settings)).policy.features_extractor).__name__ == "Extractor"
        with pytest.raises(ConfigError, match="is not a subclass of"):
            build_agent(Config(**{**SETTINGS, "optimizer": "mine:Bomb"}))
        stranger.assert_nothing_ran()


def test_the_working_directory_is_searched_last_and_for_named_modules_only(stranger, capsys, monkeypatch, tmp_path):
    there = tmp_path / "there"
    there.mkdir()
    for name in ("yaml", "torch", "onnxscript", "evil_here"):
        (there / f"{name}.py").write_text(f"import pathlib\npathlib.Path({str(stranger.canary)!r}).touch()\n")
    monkeypatch.chdir(there)
    path = [entry for entry in sys.path if os.path.abspath(entry) != str(there)]
    monkeypatch.setattr(sys, "path", list(path))
    assert call(capsys, "evaluate", stranger.run)[0] == 0
    stranger.configure({"env": {"id": "evil_here:CartPole-v1"}})
    refused(capsys, stranger, "evaluate", "{run}")
    # Trusted, but installed elsewhere: the one here is not looked at.
    assert call(capsys, "evaluate", stranger.run, "--trust", "yaml", "--env", "yaml:CartPole-v1")[0] == 0
    assert sys.path == path
    stranger.assert_nothing_ran()
    call(capsys, "evaluate", stranger.run, "--trust", "evil_here")
    assert sys.path == [*path, str(there)]
    assert stranger.canary.exists()
