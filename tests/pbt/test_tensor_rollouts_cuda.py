"""Rollouts of a population on a GPU as a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from driftproof.envs import tensor
from driftproof.pbt.vectorized import VectorizedPopulation
from driftproof.ppo import DistributionalPPO, TensorVecEnv

pytestmark = pytest.mark.gpu

MARKET = {"episode_length": 20, "features": {"window": 8, "horizons": [1, 4]}}


def worlds(env_id, envs):
    return tensor.make(env_id, envs, "cuda", **(MARKET if "Market" in env_id else {}))


def populations(env_id):
    """Two alike, of which the second does not capture its rollouts."""
    result = []
    for captures in (True, False):

        def make(member):
            settings = {"n_steps": 16, "batch_size": 64, "seed": member, "device": "cuda"}
            return DistributionalPPO("MlpLstmPolicy", TensorVecEnv(worlds(env_id, 4)), **settings)

        population = VectorizedPopulation(make, 3)
        population.rollouts.captures = captures
        for member in range(3):
            population._begin(member, 10, None)
        result.append(population)
    return result


@pytest.mark.parametrize("env_id", ["CartPole-v1", "driftproof/RegimeMarket-v0"])
def test_captured_rollouts_are_those_of_eager_steps(env_id):
    captured, eager = populations(env_id)
    distribution = eager.state.policy.like.distribution
    for number in range(6):
        noise = distribution.noise(3, 16, 4, device=torch.device("cuda"))
        for population in (captured, eager):
            population.rollouts._collect(noise)
        for name in ("observations", "actions", "rewards", "dones", "truncated", "last_predictions", "bootstraps"):
            for one, other in zip(getattr(captured.rollout, name), getattr(eager.rollout, name), strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-5, msg=f"{name} of rollout {number}")
        # As updates do: the graph must read what is there when it is replayed.
        for population in (captured, eager):
            for weight in population.state.weights.values():
                weight.data.mul_(1.01)
    assert captured.rollouts._graph is not None
    assert eager.rollouts._graph is None
    assert (captured.rollouts.env.episodes > 0).any()
