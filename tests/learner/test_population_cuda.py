"""Updates of several learners at once on a GPU, as a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from driftproof.envs import tensor
from driftproof.learner.population import MemberGenerators, PopulationLearner, PopulationRollout, PopulationState
from driftproof.pbt.vectorized import VectorizedPopulation
from driftproof.ppo import DistributionalPPO

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


def make(member, **changes):
    settings = {"n_steps": 32, "batch_size": 64, "n_epochs": 2, "seed": member, "learning_rate": 1e-3 / (member + 1)}
    settings |= {"optimizer_kwargs": {"sigma": 0.0}, "vgs_kwargs": {"warmup_steps": 2}, "drift_kit": False}
    settings |= changes
    return DistributionalPPO("MlpLstmPolicy", tensor.make("CartPole-v1", 6, DEVICE), device=DEVICE, **settings)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"target_kl": 0.003, "kl_penalty": True, "clip_range_vf": 0.2},
        {"mixed_precision": True},
        {"products": "high"},
    ],
    ids=["default", "controllers", "bfloat16", "tf32"],
)
def test_captured_steps_are_those_of_eager_ones(changes, request):
    before = torch.get_float32_matmul_precision()
    request.addfinalizer(lambda: torch.set_float32_matmul_precision(before))
    changes = {**changes}
    torch.set_float32_matmul_precision(changes.pop("products", "highest"))
    is_exact = not changes.get("mixed_precision") and torch.get_float32_matmul_precision() == "highest"
    singles = [make(member, **changes) for member in range(3)]
    first = singles[0]
    learners, agents = [], [[], [], []]
    for is_captured in (True, False):
        shells = [make(member, **changes) for member in range(3)]
        for single, shell, same in zip(singles, shells, agents, strict=True):
            same.append(shell)
            shell.policy.load_state_dict(single.policy.state_dict())
        state = PopulationState([shell.learner for shell in shells])
        generators = MemberGenerators([torch.get_rng_state()] * 3, torch.device(DEVICE))
        learners.append(PopulationLearner(state, generators))
        if not is_captured:
            learners[-1].take_step = learners[-1].step
    rollout = PopulationRollout(learners[0].state.policy, first.n_steps, first.n_envs, first.batches.sequence_length)
    for update in range(4):
        for member, single in enumerate(singles):
            _, callback = single._setup_learn(1000, None, update == 0)
            single.collect_rollouts(single.env, callback)
            rollout.fill(member, single._rollout)
            # As populations do: settings change between updates.
            for shell in agents[member]:
                shell.hyperparams["learning_rate"] = 1e-3 / (member + 1 + update)
        settings = [single.begin_update() for single in singles]
        orders = torch.rand(2, 3, first.batches.sequences).argsort(-1)
        metrics = [learner.update(rollout, settings, orders=orders) for learner in learners]
        one, other = (learner.state.tensors for learner in learners)
        tolerance = 1e-5 if is_exact else 1e-3
        for name, weight in one["policy"].items():
            torch.testing.assert_close(weight, other["policy"][name], rtol=0, atol=tolerance, msg=f"{name} {update}")
        for ours, theirs in zip(*metrics, strict=True):
            assert ours["train/optimizer_steps"] == theirs["train/optimizer_steps"]
            assert ours["train/loss"] == pytest.approx(theirs["train/loss"], abs=10 * tolerance)
    assert len(learners[0].take_step._graphs) <= 2


@pytest.mark.parametrize(("mixed_precision", "products"), [(True, "bf16"), (False, "tf32")])
def test_kernels_of_the_recurrence_multiply_in_that_precision(mixed_precision, products, monkeypatch, request):
    before = torch.get_float32_matmul_precision()
    request.addfinalizer(lambda: torch.set_float32_matmul_precision(before))
    torch.set_float32_matmul_precision("high")
    fused = pytest.importorskip("driftproof.nn.recurrence.fused")
    seen, run = [], fused.run
    monkeypatch.setattr(fused, "run", lambda *arguments: (seen.append(arguments[-1]), run(*arguments))[1])
    VectorizedPopulation(lambda member: make(member, mixed_precision=mixed_precision), 2).learn(1)
    assert set(seen) == {products}


def test_a_step_of_acting_equals_that_of_single_agents():
    agents = [make(member) for member in range(3)]
    policy = PopulationState([each.learner for each in agents]).policy
    observation, state = torch.randn(3, 5, 4, device=DEVICE), policy.initial_state(5)
    singles = [each.policy.initial_state(5) for each in agents]
    with torch.no_grad():
        for _ in range(3):
            together = policy.step(observation, state)
            for member, each in enumerate(agents):
                alone = each.policy.stepper()(observation[member], singles[member])
                torch.testing.assert_close(together.parameters[member], alone.parameters, rtol=0, atol=1e-5)
                torch.testing.assert_close(together.state.actor[1][member], alone.state.actor[1], rtol=0, atol=1e-5)
                singles[member] = alone.state
            state = together.state
