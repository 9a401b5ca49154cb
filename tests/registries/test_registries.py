"""A new optimizer, value head, policy core, attack, drift or explore method: a class and one line, or a user's own."""

import copy
import sys

import numpy as np
import pytest
import torch
import yaml

from driftproof import _registry
from driftproof._registry import ATTACKS, CHANGES, CORES, EXPLORE_METHODS, OPTIMIZERS, SCHEDULES, VALUE_HEADS
from driftproof._trust import UntrustedError, WrongKindError
from driftproof.adversarial import PerturbationConfig, SAPPOConfig
from driftproof.config import ConfigError, build_agent, build_population, loads
from driftproof.envs import drifting
from driftproof.pbt import HyperparamConfig, PBTConfig, PBTRunner, PBTScheduler
from driftproof.ppo import DistributionalPPO
from driftproof.state import CheckpointError
from tests.helpers import output_of, weights
from tests.registries import toys

TOYS = "tests.registries.toys"
SETTINGS = {
    "env": {"id": "CartPole-v1", "n_envs": 2},
    "policy": {"name": "MlpLstmPolicy", "lstm_hidden_size": 8, "net_arch": [8]},
    "ppo": {"n_steps": 16, "batch_size": 16, "n_epochs": 1},
    "vgs": {"warmup_steps": 1},
    "run": {"total_timesteps": 64, "threads": 1, "device": "cpu"},
    "pbt": {
        "population_size": 2,
        "perturbation_interval": 1,
        "truncation_ratio": 0.5,
        "backend": "inline",
        "min_ready_members": 1,
        "ready_percentage": 0.5,
        "hyperparams": [{"name": "learning_rate", "min_value": 1.0e-5, "max_value": 1.0e-2}],
    },
}
SUDDEN = {"kind": "sudden", "every": 10, "values": [0.0, 1.0]}
KINDS = {
    "optimizer": (OPTIMIZERS, toys.SignDescent, lambda name: {"optimizer": {"name": name, "kwargs": {"damping": 0.5}}}),
    "value_head": (
        VALUE_HEADS,
        toys.MedianHead,
        lambda name: {"critic": {"value_head": name, "value_head_kwargs": {"width": 3}}},
    ),
    "core": (CORES, toys.LeakyCore, lambda name: {"policy": {"core": name, "lstm_kwargs": {"leak": 0.3}}}),
    "attack": (
        ATTACKS,
        toys.Straight,
        lambda name: {
            "adversarial": {"enabled": True, "warmup_updates": 0, "perturbation": {"attack_method": name}},
        },
    ),
    "change": (
        CHANGES,
        toys.RewardOffset,
        lambda name: {"env": {"drift": [{"kind": name, "sign": -1.0, "schedule": SUDDEN}]}},
    ),
    "schedule": (
        SCHEDULES,
        toys.Staircase,
        lambda name: {"env": {"drift": [{"kind": "reward_scale", "schedule": {"kind": name, "every": 5}}]}},
    ),
    "explore_method": (EXPLORE_METHODS, toys.Halve, lambda name: {"pbt": {"explore_method": name}}),
}


def configured(changes, trusted=()):
    settings = copy.deepcopy(SETTINGS)
    for section, values in changes.items():
        settings.setdefault(section, {}).update(values)
    return loads(yaml.safe_dump(settings), trusted=trusted)


@pytest.fixture
def offered(tmp_path, monkeypatch):
    """An installed package whose entry points offer all toys as ``toy``."""
    package = tmp_path / "site" / "toys-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: toys\nVersion: 1.0\n")
    lines = [f"[{registry.group}]\ntoy = {TOYS}:{toy.__name__}\n" for registry, toy, _ in KINDS.values()]
    (package / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(package.parent)
    return package.parent


@pytest.fixture
def way(request, monkeypatch):
    """How a toy is named, and the modules that have to be trusted for it."""
    if request.param == "line":
        for registry, toy, _ in KINDS.values():
            monkeypatch.setitem(registry.built_in, "toy", f"{TOYS}:{toy.__name__}")
    elif request.param == "entry point":
        request.getfixturevalue("offered")
    else:
        return (lambda toy: f"{TOYS}:{toy.__name__}"), [TOYS]
    return (lambda toy: "toy"), []


WAYS = pytest.mark.parametrize("way", ["line", "entry point", "module:Class"], indirect=True)


def parts_of(agent):
    """The classes of everything that can be chosen."""
    drift = agent.env.get_attr("changes")[0] if agent.env.has_attr("changes") else ()
    adversary = agent.adversary
    return {
        type(agent.policy.optimizer),
        *map(type, agent.policy.heads),
        type(agent.policy.actor_core),
        type(agent.policy.critic_core),
        *map(type, drift),
        *(type(each.schedule) for each in drift),
        *(() if adversary is None else (type(adversary.attack._method),)),
    }


@WAYS
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "explore_method"])
def test_configured_learned_saved_and_loaded(kind, way, tmp_path):
    _, toy, settings = KINDS[kind]
    named, trusted = way
    config = configured(settings(named(toy)), trusted)
    agent = build_agent(config)
    assert toy in parts_of(agent)
    before = weights(agent)
    agent.learn(64)
    assert not torch.equal(before, weights(agent))
    agent.save(tmp_path / "agent")

    again = DistributionalPPO.load(tmp_path / "agent", build_agent(config).env, trusted=trusted)
    assert toy in parts_of(again)
    assert torch.equal(weights(agent), weights(again))
    again.learn(64, reset_num_timesteps=False)
    assert torch.isfinite(weights(again)).all()


@WAYS
def test_populations_explore_by_it_and_resume(way, tmp_path):
    named, trusted = way
    config = configured({"pbt": {**SETTINGS["pbt"], "explore_method": named(toys.Halve)}}, trusted)
    runner = build_population(config, tmp_path)
    runner.run(1)
    first = [member.hyperparams["learning_rate"] for member in runner.scheduler.members]
    resumed = build_population(config, tmp_path, resume=True)
    resumed.run()
    taken = [event for event in resumed.scheduler.events if event.kind == "exploit"]
    assert taken, "somebody took over"
    for event in taken:
        former, new = event.mutated["learning_rate"]
        assert new == max(former / 2, 1e-5)
    assert first


def test_populations_of_everything_at_once(tmp_path):
    changes = {}
    for _, toy, settings in KINDS.values():
        for section, values in settings(f"{TOYS}:{toy.__name__}").items():
            changes.setdefault(section, {}).update(values)
    changes["pbt"] = {**SETTINGS["pbt"], "explore_method": f"{TOYS}:Halve"}
    best = build_population(configured(changes, [TOYS]), tmp_path).run()
    assert parts_of(best) >= {toys.SignDescent, toys.MedianHead, toys.LeakyCore, toys.Straight, toys.Staircase}


def test_classes_in_python(tmp_path):
    env = drifting("CartPole-v1", toys.RewardOffset(toys.Staircase(every=5)), seed=1)
    perturbation = PerturbationConfig(attack_method=toys.Straight)
    agent = DistributionalPPO(
        "MlpLstmPolicy",
        env,
        n_steps=16,
        batch_size=16,
        n_epochs=1,
        optimizer_class=toys.SignDescent,
        policy_kwargs={"core": toys.LeakyCore, "value_head": toys.MedianHead, "lstm_hidden_size": 8},
        adversarial=SAPPOConfig(warmup_updates=0, perturbation=perturbation),
        device="cpu",
    )
    agent.learn(32)
    agent.save(tmp_path / "agent")
    with pytest.raises(CheckpointError, match="the file holds by name only"):
        DistributionalPPO.load(tmp_path / "agent", env)
    given = {
        "optimizer_class": toys.SignDescent,
        "core": toys.LeakyCore,
        "value_head": toys.MedianHead,
        "attack_method": toys.Straight,
    }
    for options in ({"custom_objects": given}, {"trusted": [TOYS]}):
        again = DistributionalPPO.load(tmp_path / "agent", env, **options)
        assert torch.equal(weights(agent), weights(again))
    agent.policy.save(tmp_path / "policy")
    policy = type(agent.policy).load(tmp_path / "policy", trusted=[TOYS])
    assert [type(head) for head in policy.heads] == [toys.MedianHead] * 2


def test_an_environment_with_a_drift_of_ones_own_is_made_again_from_its_specification():
    env = drifting("CartPole-v1", toys.RewardOffset(toys.Staircase(every=2)), seed=1)
    assert env.specification == [
        {"kind": f"{TOYS}:RewardOffset", "schedule": {"kind": f"{TOYS}:Staircase", "every": 2}},
    ]
    again = drifting("CartPole-v1", env.specification, seed=1)
    for each in (env, again):
        each.reset(seed=0)
    rewards = [[each.step(1)[1] for _ in range(5)] for each in (env, again)]
    assert rewards[0] == rewards[1] == [1.0, 1.0, 2.0, 2.0, 3.0]


def test_a_population_in_python():
    config = PBTConfig(
        population_size=2,
        perturbation_interval=1,
        truncation_ratio=0.5,
        min_ready_members=1,
        hyperparams=[HyperparamConfig("x", 0.1, 1.0)],
        explore_method=toys.Halve,
    )
    scheduler = PBTScheduler(config, seed=0)
    for member, performance in enumerate((1.0, 2.0)):
        scheduler.update_performance(member, performance, 1, {"policy": {}})
    donor = scheduler.members[1].hyperparams["x"]
    assert scheduler.exploit_and_explore(0)[1] == {"x": max(donor / 2, 0.1)}


class _Wild(toys.Halve):
    def explore(self, hyperparams, history, rng):
        return dict.fromkeys(hyperparams, 1000000000.0)


def test_what_an_explore_method_returns_is_checked():
    options = {"population_size": 2, "perturbation_interval": 1, "truncation_ratio": 0.5, "min_ready_members": 1}
    config = PBTConfig(**options, hyperparams=[HyperparamConfig("x", 0.1, 1.0)], explore_method=_Wild)
    scheduler = PBTScheduler(config, seed=0)
    for member, performance in enumerate((1.0, 2.0)):
        scheduler.update_performance(member, performance, 1, {"policy": {}})
    with pytest.raises(ValueError, match=r"_Wild' returned x=1000000000.0, which is outside the search space"):
        scheduler.exploit_and_explore(0)


def test_a_run_folder_cannot_choose_an_explore_method_that_is_not_trusted(tmp_path):
    config = configured({"pbt": {**SETTINGS["pbt"], "explore_method": f"{TOYS}:Halve"}}, [TOYS])
    runner = build_population(config, tmp_path)
    runner.run(1)
    state = tmp_path / "population_state.json"
    state.write_text(state.read_text().replace(f"{TOYS}:Halve", "evil:Halve"))
    with pytest.raises(UntrustedError, match="would import and run the module 'evil'"):
        PBTRunner.resume(tmp_path, lambda member: build_agent(config, member))
    assert "evil" not in sys.modules


@pytest.mark.parametrize("kind", KINDS)
def test_files_cannot_name_code_that_is_not_trusted(kind, tmp_path, monkeypatch):
    _, _, settings = KINDS[kind]
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = configured(settings("evil:Thing"))
    with pytest.raises(ConfigError, match="would import and run the module 'evil'"):
        build_agent(config)
    assert "evil" not in sys.modules


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_names_and_wrong_kinds(kind):
    registry, toy, settings = KINDS[kind]
    first = next(iter(registry.built_in))
    with pytest.raises(ValueError, match=rf"Unknown {registry.what} '{first}x'.*did you mean '{first}'"):
        configured(settings(f"{first}x"))
    with pytest.raises(WrongKindError, match="is not a subclass of"):
        registry.load(dict)
    assert registry.load(toy) is toy
    assert registry.name(toy) == f"{TOYS}:{toy.__name__}"
    assert registry.name(first.upper()) == first
    assert all(registry.name(registry.load(name)) == name for name in registry.built_in)


def test_entry_points_are_found_in_installed_packages_only(offered, monkeypatch):
    assert "toy" in OPTIMIZERS.names
    monkeypatch.chdir(offered)
    assert "toy" not in OPTIMIZERS.names
    with pytest.raises(ValueError, match="Unknown optimizer 'toy'"):
        OPTIMIZERS.load("toy")


def test_names_are_known_without_torch():
    registries = [name for name, value in vars(_registry).items() if isinstance(value, _registry.Registry)]
    code = (
        f"import sys; from driftproof._registry import {', '.join(registries)}; "
        f"[each.names for each in ({', '.join(registries)})]; "
        "print([module for module in ('torch', 'numpy') if module in sys.modules])"
    )
    assert output_of(code) == "[]"


def test_numbers_are_those_of_before():
    """The toy head sees what the built-in one does, but for what it expects."""
    features = torch.from_numpy(np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32))
    head = VALUE_HEADS.load(toys.MedianHead)(6, 5)
    assert torch.equal(head.mean(head(features)), head(features).sort(-1).values[:, 2])
