"""The learner alone: without Stable-Baselines3, in a loop of one's own."""

import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces

from driftproof.learner import Collector, Learner, Rollout, TrainingError, UpdateSettings
from driftproof.learner.entropy import EntropySchedule
from driftproof.nn.policies import MlpLstmPolicy, MlpPolicy
from driftproof.state import copy_tree

from .. import processes

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"
SETTINGS = UpdateSettings(batch_size=8, n_epochs=2, gamma=0.9)


def made(kind=MlpPolicy, **parts):
    torch.manual_seed(0)
    policy = kind(spaces.Box(-1, 1, (2,)), spaces.Discrete(2), net_arch=[8])
    return Learner(policy, torch.optim.Adam(policy.parameters(), lr=1e-3), **parts)


def filled(learner, chunk=1, seed=0):
    """A rollout of random observations, with ends of episodes of every kind."""
    random = np.random.default_rng(seed)
    rollout, starts = Rollout(learner.policy, 8, 3, chunk), np.ones(3, bool)
    collector = Collector(learner.policy, rollout)
    for _ in range(rollout.steps):
        collector.act(random.uniform(-1, 1, (3, 2)), starts)
        starts = random.random(3) < 0.3
        cut_off = starts & (random.random(3) < 0.5)
        collector.record(random.normal(size=3), starts, cut_off, random.uniform(-1, 1, (cut_off.sum(), 2)))
    collector.finish(random.uniform(-1, 1, (3, 2)), starts)
    return rollout


def test_imports_no_stable_baselines3_and_no_gymnasium():
    """Whoever uses it alone waits for neither."""
    modules = ("learner", "collector", "graph", "hyperparams")
    code = "import sys, " + ", ".join(f"driftproof.learner.{name}" for name in modules)
    code += "; print(sorted({'stable_baselines3', 'gymnasium', 'tensorboard'} & set(sys.modules)))"
    exit_code, output, errors = processes.run([sys.executable, "-c", code])
    assert (exit_code, output.strip()) == (0, "[]"), errors


def test_the_example_learns(capsys):
    runpy.run_path(str(EXAMPLE))["main"](5)
    lengths = [int(text) for text in re.findall(r"episodes of (\d+) steps", capsys.readouterr().out)]
    assert lengths[-1] > 2.5 * lengths[0]


@pytest.mark.parametrize(("kind", "chunk"), [(MlpPolicy, 1), (MlpLstmPolicy, 4)])
def test_an_update_changes_parameters_and_names_what_it_measured(kind, chunk):
    learner = made(kind)
    before = [parameter.detach().clone() for parameter in learner.policy.parameters()]
    metrics = learner.update(filled(learner, chunk), SETTINGS)
    assert all(isinstance(value, float) for value in metrics.values())
    assert metrics["train/optimizer_steps"] == 2 * 3
    changed = [not torch.equal(old, new) for old, new in zip(before, learner.policy.parameters(), strict=True)]
    assert all(changed)


def test_gradients_are_counted_as_skipped_and_end_training_at_the_limit():
    learner = made()
    rollout = filled(learner)
    rollout.rewards[0, 0] = np.inf
    before = [parameter.detach().clone() for parameter in learner.policy.actor_network.parameters()]
    with pytest.raises(TrainingError, match=r"^6 minibatches in a row"):
        learner.update(rollout, SETTINGS._replace(skip_limit=6))
    after = learner.policy.actor_network.parameters()
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_the_entropy_controller_is_told_the_explained_variance():
    learner = made(entropy=EntropySchedule(ent_boost_factor=2.0, ent_boost_below=0.9))
    metrics = learner.update(filled(learner), SETTINGS)
    assert learner.entropy.explained_variance == metrics["train/explained_variance"]
    assert learner.entropy.update(0.01, 1.0, None) == 0.02


def test_components_continue_exactly():
    """The states of one learner's components make another one do the same."""
    one, other = made(), made()
    one.update(filled(one), SETTINGS)
    for name, component in other.components().items():
        component.load_state_dict(copy_tree(dict(one.components()[name].state_dict())))
    for learner in (one, other):
        torch.manual_seed(1)
        learner.update(filled(learner, seed=1), SETTINGS)
    pairs = zip(one.policy.parameters(), other.policy.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
