"""Updates of several learners by kernels of the optimizer step, against those by torch's operations."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from driftproof.learner.population import MemberGenerators, PopulationLearner, PopulationRollout, PopulationState
from driftproof.optim import _fused
from tests.learner.test_population import agent
from tests.learner.test_population_cuda import DEVICE, make

pytestmark = pytest.mark.gpu

CHOICES = {
    "default": {},
    "one-critic-upgd-minmax": {
        "policy_kwargs": {"twin_critics": False},
        "optimizer_class": "upgd",
        "optimizer_kwargs": {"sigma": 0.01, "gate": "minmax"},
    },
    "steps-scaled": {"vgs_kwargs": {"apply_to": "update", "warmup_steps": 1, "alpha": 1.0}},
    "nothing-scaled": {
        "optimizer_class": "upgdw",
        "optimizer_kwargs": {"sigma": 0.0},
        "vgs_kwargs": {"enabled": False},
    },
    "no-scaling": {"variance_gradient_scaling": False, "vgs_kwargs": {}},
}
WITHOUT = {
    "adaptive-noise": {"optimizer_kwargs": {"sigma": 0.1, "adaptive_noise": True}},
    "means": {"vgs_kwargs": {"statistic": "spatial_mean"}},
}


@contextmanager
def form(by_kernels):
    """Run steps by kernels, or by torch's operations; yields a list that is empty if there were none by kernels."""
    steps, step = [], _fused.MemberKernels.step

    def noted(self, *args, **kwargs):
        steps.append(1)
        step(self, *args, **kwargs)

    with mock.patch.object(_fused.MemberKernels, "step", noted), mock.patch.object(_fused, "ENABLED", by_kernels):
        yield steps


def population(agents, device):
    state = PopulationState([each.learner for each in agents])
    first = agents[0]
    rollout = PopulationRollout(state.policy, first.n_steps, first.n_envs, first.batches.sequence_length)
    states = [torch.manual_seed(member).get_state() for member in range(len(agents))]
    return state, rollout, PopulationLearner(state, MemberGenerators(states, torch.device(device)))


def orders(agents, updates, seed=0):
    """Orders of sequences for every update, and the most epochs."""
    generator = torch.Generator().manual_seed(seed)
    shape = (updates, 3, len(agents), agents[0].batches.sequences)
    return torch.rand(shape, generator=generator).argsort(-1)


def updated(changes, spoil, updates=2):
    """State of a population after updates on a CPU, and metrics of the last one."""
    agents = [agent(member, "MlpPolicy", **changes) for member in range(3)]
    state, rollout, learner = population(agents, "cpu")
    for order in orders(agents, updates):
        for member, single in enumerate(agents):
            torch.manual_seed(member)
            _, callback = single._setup_learn(1000, None, False)
            single.collect_rollouts(single.env, callback)
            rollout.fill(member, single._rollout)
        if spoil:
            rollout.rewards[1].fill_(torch.nan)
        metrics = learner.update(rollout, [single.begin_update() for single in agents], orders=order)
    return state, metrics


def check(changes, has_kernels=True, spoil=False):
    results = []
    for by_kernels in (True, False):
        with form(by_kernels) as steps:
            results.append(updated(changes, spoil))
        assert bool(steps) is (by_kernels and has_kernels)
    (ours, metrics), (theirs, others) = results
    assert_alike(ours, theirs, 2e-5)
    for one, other in zip(metrics, others, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert value == pytest.approx(other[name], rel=1e-3, abs=1e-4, nan_ok=True), name
    if spoil:
        assert metrics[1]["train/optimizer_steps"] == 0


def assert_alike(ours, theirs, tolerance):
    for component, tensors in ours.tensors.items():
        for name, tensor in tensors.items():
            assert torch.isfinite(tensor).all(), name
            other = theirs.tensors[component][name]
            torch.testing.assert_close(tensor, other, rtol=1e-3, atol=tolerance, msg=f"{component} {name}")


def check_all():
    """Called by this file as a script, where Triton interprets the kernels."""
    for changes in CHOICES.values():
        check(changes)
    check({}, spoil=True)
    for changes in WITHOUT.values():
        check(changes, has_kernels=False)


def test_interpreted_kernels_equal_torch():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-m", "tests.learner.test_population_kernels"], env=environment, check=True)


@pytest.mark.parametrize("gate", ["anchored", "minmax"])
def test_captured_kernels_equal_captured_operations(gate):
    """Without noise, which the forms would have to draw alike."""
    singles = [make(member, optimizer_kwargs={"sigma": 0.0, "gate": gate}) for member in range(3)]
    learners = []
    for _ in range(2):
        shells = [make(member, optimizer_kwargs={"sigma": 0.0, "gate": gate}) for member in range(3)]
        for single, shell in zip(singles, shells, strict=True):
            shell.policy.load_state_dict(single.policy.state_dict())
        _, rollout, learner = population(shells, DEVICE)
        learners.append(learner)
    for update, order in enumerate(orders(singles, 3)):
        for member, single in enumerate(singles):
            _, callback = single._setup_learn(1000, None, update == 0)
            single.collect_rollouts(single.env, callback)
            rollout.fill(member, single._rollout)
        rollout.rewards[update].fill_(torch.nan)  # One member skips all steps of an update.
        settings = [single.begin_update() for single in singles]
        metrics = []
        for learner, by_kernels in zip(learners, (True, False), strict=True):
            with form(by_kernels) as steps:
                metrics.append(learner.update(rollout, settings, orders=order[:2].to(DEVICE)))
            if update == 0:  # Later, graphs are replayed.
                assert bool(steps) is by_kernels
        assert_alike(learners[0].state, learners[1].state, 1e-4)
        for member, (ours, theirs) in enumerate(zip(*metrics, strict=True)):
            assert ours["train/optimizer_steps"] == theirs["train/optimizer_steps"]
            assert (ours["train/optimizer_steps"] == 0) is (member == update)


if __name__ == "__main__":
    launcher = _fused.launcher()
    assert launcher is not None
    assert launcher.INTERPRETED
    check_all()
