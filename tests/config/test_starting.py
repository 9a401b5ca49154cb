"""Starting values: what is chosen for an environment, and that what the user sets goes before."""

from __future__ import annotations

import shutil
import subprocess
import sys
import warnings
from importlib.resources import files
from pathlib import Path

import gymnasium
import pytest
from gymnasium.spaces import Box, Discrete, MultiDiscrete

from driftproof.config import ConfigError, build_env, load, loads
from driftproof.config.starting import (
    STARTING_VALUES,
    family_of,
    kind_of_actions,
    kind_of_observations,
    load_with_starting_values,
    nearest,
)
from driftproof.envs import regime_bars, write_csv
from tests.processes import ENVIRONMENT, ROOT

NEEDED = {"lunarlander": "Box2D", "minatar": "minatar", "minigrid": "minigrid"}


def choice(env_id, *overrides):
    return nearest(loads("", [f"env.id='{env_id}'", *overrides], trusted=["tests"]))


def test_every_file_is_listed_and_copied():
    folder = files("driftproof.config") / "starting_values"
    assert {path.name for path in folder.iterdir()} == {f"{name}.yaml" for name in STARTING_VALUES}
    for name, values in STARTING_VALUES.items():
        copy = Path(ROOT) / "configs" / f"{name}.yaml"
        assert copy.read_text() == values.text, f"run `make docs`: it copies {name}.yaml to configs/"


@pytest.mark.parametrize("name", STARTING_VALUES)
def test_kinds_are_those_of_the_environment(name, monkeypatch, tmp_path):
    values, package = STARTING_VALUES[name], NEEDED.get(name) or NEEDED.get(name.partition("_")[0])
    prices = []
    if name == "market":
        write_csv(tmp_path / "prices.csv", regime_bars(1_000, seed=0))
        prices = [f"env.kwargs.data={tmp_path / 'prices.csv'}"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if package is not None:
            pytest.importorskip(package)
        monkeypatch.syspath_prepend(Path(ROOT) / "examples")
        env = build_env(loads(values.text, ["env.n_envs=1", *prices], trusted=["minatar_and_minigrid"]))
    kinds = kind_of_observations(env.observation_space), kind_of_actions(env.action_space)
    env.close()
    assert kinds == (values.observations, values.actions)
    assert family_of(values.env_id) in (values.family, None)


@pytest.mark.parametrize(
    ("env_id", "name", "reason"),
    [
        ("CartPole-v1", "cartpole", "starting values for CartPole-v1; --set changes them, --defaults leaves them out"),
        ("LunarLander-v2", "lunarlander", "starting values for LunarLander-v3, another version of LunarLander-v2;"),
        ("Hopper", "hopper", "starting values for Hopper-v5;"),
        ("nowhere:MinAtar/Breakout-v0", "minatar_breakout", "another version of MinAtar/Breakout-v0"),
        ("Humanoid-v5", "hopper", "for Hopper-v5, the nearest to Humanoid-v5 (same family, vector observations"),
        ("Taxi-v4", "frozenlake", "the nearest to Taxi-v4 (same family, discrete observations, discrete actions)"),
        (
            "tests.cli.worlds:Broken-v0",
            "acrobot",
            "nearest to Broken-v0 (vector observations, discrete actions), without",
        ),
        ("Blackjack-v1", None, "no starting values are known for Blackjack-v1 (tuple observations, discrete actions)"),
    ],
)
def test_the_nearest_is_chosen(env_id, name, reason):
    chosen = choice(env_id)
    assert (chosen.values and chosen.values.name) == name
    assert reason in chosen.reason


def test_arguments_of_the_environment_count():
    pytest.importorskip("Box2D")
    assert choice("CartPole-v1", "env.kwargs.sutton_barto_reward=true").values.name == "cartpole"
    with pytest.raises(ConfigError, match="cannot be made"):
        choice("Humanoid-v5", "env.kwargs.no_such_argument=1")


def test_values_for_other_environments_bring_no_arguments():
    first = {}
    for values in STARTING_VALUES.values():
        first.setdefault((values.family, values.observations, values.actions), values)
        first.setdefault((values.observations, values.actions), values)
    assert not any(loads(values.text).env.kwargs for values in first.values() if values.name != "market")


def test_what_the_user_sets_goes_before():
    config, _ = load_with_starting_values(["env.id=CartPole-v1"])
    assert config == load(Path(ROOT) / "configs" / "cartpole.yaml")
    changed, _ = load_with_starting_values(
        ["env.id=CartPole-v1", "ppo.gamma=0.5", "env.n_envs=3", "policy=MlpGruPolicy"]
    )
    assert (changed.ppo.gamma, changed.env.n_envs, changed.policy.name) == (0.5, 3, "MlpGruPolicy")
    assert changed.ppo.gae_lambda == config.ppo.gae_lambda != loads("").ppo.gae_lambda


def test_the_environment_is_the_users():
    config, reason = load_with_starting_values(["env.id=InvertedPendulum-v4"])
    assert config.env.id == "InvertedPendulum-v4"
    assert config.env.normalize_observations
    assert "another version" in reason


def test_a_contradiction_with_starting_values_says_so():
    with pytest.raises(ConfigError) as error:
        load_with_starting_values(["env.id=CartPole-v1", "ppo.sequence_length=16"])
    problem, hint = error.value.problems
    assert "it needs a recurrent policy" in problem
    assert hint == "the other settings are the starting values for CartPole-v1; --defaults leaves them out"
    with pytest.raises(ConfigError) as error:
        load_with_starting_values(["env.id=CartPole-v1", "ppo.gama=1"])
    assert len(error.value.problems) == 1


def test_only_what_the_user_names_is_imported():
    """An environment of one's own is tried with the user's trust, which starting values do not extend."""
    with pytest.raises(ConfigError, match="would import and run the module 'antigravity'"):
        nearest(loads("env: antigravity:Nothing-v0", trusted=[]))


@pytest.mark.parametrize(
    ("space", "kind"),
    [
        (Box(0, 1, (3,)), "vector"),
        (Box(0, 1, (10, 10, 4), bool), "grid"),
        (Box(0, 255, (84, 84, 3), "uint8"), "image"),
        (Box(0, 255, (3, 84, 84), "uint8"), "image"),
        (Discrete(3), "discrete"),
        (gymnasium.spaces.Dict({}), "dict"),
        (MultiDiscrete([2, 2]), "multidiscrete"),
    ],
)
def test_kinds_of_observations(space, kind):
    assert kind_of_observations(space) == kind


def test_values_are_read_from_the_package_wherever_it_is(tmp_path):
    """Here from a zip file, in which there are no files to open."""
    archive = shutil.make_archive(str(tmp_path / "package"), "zip", Path(ROOT) / "src", "driftproof")
    program = f"import sys; sys.path.insert(0, {archive!r}); import driftproof.config.starting as s; " + (
        "print(s.__file__, len({values.env_id for values in s.STARTING_VALUES.values()}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=ENVIRONMENT, check=True)
    assert done.stdout == f"{archive}/driftproof/config/starting.py {len(STARTING_VALUES)}\n"
