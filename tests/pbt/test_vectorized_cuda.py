"""A vectorised population on a GPU."""

from __future__ import annotations

import time

import pytest
import torch

from driftproof.envs import tensor
from driftproof.learner.population import MemberGenerators, PopulationLearner, PopulationRollout, PopulationState
from driftproof.pbt.vectorized import VectorizedPopulation
from driftproof.ppo import DistributionalPPO, TensorVecEnv
from tests.gpu import without_waiting

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

ENVS = 8


def worlds(envs, device="cuda"):
    return tensor.make("CartPole-v1", envs, device)


def make(member, device="cuda", **changes):
    settings = {"n_steps": 32, "batch_size": 64, "n_epochs": 2, "seed": member, "learning_rate": 1e-3 / (member + 1)}
    settings["drift_kit"] = False  # Which looks at transitions on the host.
    return DistributionalPPO("MlpLstmPolicy", TensorVecEnv(worlds(ENVS, device)), device=device, **settings, **changes)


def test_rollout_and_update_do_not_wait_for_the_device():
    population = VectorizedPopulation(make, 3)
    population.learn(2)
    with without_waiting():
        failures = population.train(dict.fromkeys(range(3), 2), 4, dict.fromkeys(range(3)))
        population.state.copy([0], [1])
    assert not failures, failures
    assert not population.frozen


def test_an_update_equals_that_of_single_agents():
    """Without noise of the optimizer, and with minibatches in the same order."""
    singles = [make(member, optimizer_kwargs={"sigma": 0.0}) for member in range(3)]
    shells = [make(member, optimizer_kwargs={"sigma": 0.0}) for member in range(3)]
    state = PopulationState([shell.learner for shell in shells])
    first = singles[0]
    rollout = PopulationRollout(state.policy, first.n_steps, first.n_envs, first.batches.sequence_length)
    learner = PopulationLearner(state, MemberGenerators([torch.get_rng_state()] * 3, torch.device("cuda")))
    orders = torch.stack([torch.stack([torch.randperm(first.batches.sequences) for _ in range(3)]) for _ in range(2)])
    for member, single in enumerate(singles):
        state.learners[member].policy.load_state_dict(single.policy.state_dict())
        state.read(member)
        _, callback = single._setup_learn(1000, None)
        single.collect_rollouts(single.env, callback)
        rollout.fill(member, single._rollout)
    settings = [single.begin_update() for single in singles]
    for member, single in enumerate(singles):
        given = iter(orders[:, member].clone())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "randperm", lambda count, given=given: next(given))
            single.learner.update(single._rollout, settings[member])
    learner.update(rollout, settings, orders=orders)
    for member, single in enumerate(singles):
        for name, weight in single.policy.state_dict().items():
            torch.testing.assert_close(state.weights[name][member].detach(), weight, rtol=0, atol=1e-4)


def test_half_of_64_members_is_replaced_within_5_ms():
    population = VectorizedPopulation(make, 64)
    population.learn(1)
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        population.exploit(range(32), range(32, 64))
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    assert min(times) < 5e-3, times


def test_a_member_that_diverges_is_replaced_and_the_others_do_not_notice():
    population, whole = (VectorizedPopulation(lambda member: make(member, skip_limit=2), 3) for _ in range(2))
    for each in (population, whole):
        each.learn(2)  # Steps are captured in a CUDA graph.
    name = "critics.0.head.linear.bias"
    good = population.state.weights[name][1].clone()
    population.state.weights[name][1].fill_(torch.nan)
    for each in (population, whole):
        failures = each.train(dict.fromkeys(range(3), 1), 5, dict.fromkeys(range(3)))
        assert not failures, failures
    assert population.frozen == {1}
    torch.testing.assert_close(population.state.weights[name][1], good, atol=0, rtol=0)
    for member in (0, 2):
        for key, weight in whole.state.weights.items():
            torch.testing.assert_close(population.state.weights[key][member], weight[member], atol=1e-6, rtol=1e-4)
    population.exploit([1], [0])
    failures = population.train(dict.fromkeys(range(3), 1), 5, dict.fromkeys(range(3)))
    assert not failures, failures
    assert not population.frozen
    assert all(weight.isfinite().all() for weight in population.state.weights.values())
