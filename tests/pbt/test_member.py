"""A member takes over another's whole state, and what was mutated stays in force."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from driftproof.pbt.member import Trainee, mean_reward
from driftproof.ppo import DistributionalPPO, Linear
from driftproof.state import compare, without
from tests.ppo.resuming import walk
from tests.ppo.scripted import small_networks

MUTATED = {
    "learning_rate": 7e-4,
    "clip_range": 0.13,
    "ent_coef": 0.004,
    "gae_lambda": 0.91,
    "optimizer.sigma": 0.017,
    "vgs.alpha": 0.23,
}


def trainee(seed=0, total_updates=20, **settings):
    env = VecNormalize(DummyVecEnv([walk] * 2), norm_reward=False)
    settings = {"n_steps": 16, "batch_size": 16, "n_epochs": 2, "device": "cpu", **settings}
    networks = small_networks("MlpLstmPolicy")
    agent = DistributionalPPO("MlpLstmPolicy", env, policy_kwargs=networks, seed=seed, **settings)
    return Trainee(agent, total_updates)


def learned(agent):
    """What is inherited; torch adds an option to optimizers when it loads them."""
    tree = without(agent.state_tree(), ["random", "counters", "rollout"])
    for group in tree["optimizer"]["param_groups"]:
        group.pop("differentiable", None)
    return tree


@pytest.mark.parametrize("schedule", [False, True])
def test_mutated_lr_survives_exploit_and_training(schedule):
    settings = {"learning_rate": Linear(1e-3), "clip_range": Linear(0.2, 0.1)} if schedule else {}
    donor, weak = trainee(0, **settings), trainee(1, **settings)
    donor.train(3)
    weak.train(2)
    weak.inherit(donor.agent.get_parameters(), "v2_full_parameters", MUTATED)
    for updates in (0, 1, 2):
        if updates:
            weak.train(updates)
        agent = weak.agent
        assert {name: agent.hyperparams[name] for name in MUTATED} == MUTATED
        progress = agent._current_progress_remaining if schedule else 1
        group = agent.policy.optimizer.param_groups[0]
        assert group["lr"] == pytest.approx(7e-4 * progress)
        assert group["sigma"] == 0.017
        assert agent.vgs.alpha == 0.23
        assert agent.hyperparams.current("clip_range") == pytest.approx(0.13 * (1 + progress) / 2)
        assert agent.hyperparams.current("ent_coef") == 0.004
        assert agent.gae_lambda == 0.91


@pytest.mark.parametrize("strategy", ["copy", "reset"])
def test_exploit_moves_the_whole_tree(strategy):
    arguments = {"kl_penalty": True, "target_kl": 0.01, "kl_stop": None}
    donor, weak = trainee(0, **arguments), trainee(1, **arguments)
    donor.train(4)
    weak.train(2)
    counters = weak.agent.counters.state_dict()
    raw = weak.agent.get_env().get_original_obs()
    weak.inherit(donor.agent.get_parameters(), "v2_full_parameters", {"learning_rate": 5e-4}, strategy)

    ours, theirs = learned(weak.agent), learned(donor.agent)
    assert ours["hyperparams"].pop("learning_rate") == 5e-4
    theirs["hyperparams"].pop("learning_rate")
    for tree in (ours, theirs):
        for group in tree["optimizer"]["param_groups"]:
            group.pop("lr")
    if strategy == "reset":
        assert ours["optimizer"].pop("state") == {}
        theirs["optimizer"].pop("state")
        assert not any("moment" in path for path in map(str, compare({}, ours["optimizer"])))
    differences = compare(ours, theirs)
    assert not differences, "\n".join(map(str, differences[:5]))
    assert weak.agent.counters.state_dict() == counters
    assert all(not part.any() for part in (*weak.agent.state.actor, *weak.agent.state.critic))
    assert np.array_equal(weak.agent._last_obs, donor.agent.get_env().normalize_obs(raw))


def test_the_next_update_is_the_donors_with_the_same_data():
    donor, weak = trainee(0), trainee(1)
    donor.train(4)
    weak.train(2)
    weak.inherit(donor.agent.get_parameters(), "v2_full_parameters", {"learning_rate": 5e-4})
    donor.set_hyperparams({"learning_rate": 5e-4})
    # The same experience for both: the weak one's.
    for each in (weak, donor):
        each.agent._current_progress_remaining = 0.5
    weak.train(0)
    rollout = donor.agent._rollout
    weak.agent._rollout = rollout
    for each in (donor, weak):
        torch.manual_seed(5)
        each.agent.ep_info_buffer.clear()
        each.agent.train()
    ours, theirs = (learned(each.agent) for each in (weak, donor))
    # Other weights began the weak one's episodes: its alarm does not judge the donor's weights by them.
    looks = [tree["drift_alarm"].pop("look") for tree in (ours, theirs)]
    assert (looks[0]["episodes"], looks[0]["steps"]) == (0, looks[1]["steps"])
    differences = compare(ours, theirs)
    assert not differences, "\n".join(map(str, differences[:5]))


def test_slices_are_one_training():
    whole = trainee(0, 6)
    whole.train(6)
    sliced = trainee(0, 6)  # which seeds the process's generators anew
    for updates in (1, 2, 3):
        assert not sliced.is_done
        sliced.train(updates)
    assert sliced.is_done
    assert sliced.updates == 6
    assert not compare(learned(sliced.agent), learned(whole.agent))
    assert sliced.train(3) == mean_reward(sliced.agent)
    assert sliced.updates == 6


def test_a_new_agent_goes_on_in_the_middle_of_a_training():
    late = trainee(0, 20, learning_rate=Linear(1e-3))
    late.count_from(15)
    assert late.updates == 15
    assert late.agent._current_progress_remaining == 0.25
    assert late.agent.hyperparams.current("learning_rate") == pytest.approx(2.5e-4)
    late.train(1)
    assert late.updates == 16
    assert late.agent.policy.optimizer.param_groups[0]["lr"] == pytest.approx(2e-4)


def test_a_legacy_policy_is_taken_over_without_moments_and_statistics():
    donor, weak = trainee(0), trainee(1)
    donor.train(2)
    weak.train(2)
    assert weak.agent.vgs.step_count > 0
    with pytest.warns(FutureWarning, match="a policy only: .*statistics of variance gradient scaling begin anew"):
        weak.inherit(donor.agent.policy.state_dict(), "v1_policy_only", {"gamma": 0.9})
    assert weak.agent.vgs.step_count == 0
    assert weak.agent.vgs.get_normalized_variance() == 0
    weak.inherit(donor.agent.policy.state_dict(), "v1_policy_only", {"gamma": 0.9})  # It has been said.
    assert not compare(dict(weak.agent.policy.state_dict()), dict(donor.agent.policy.state_dict()))
    assert weak.agent.policy.optimizer.state_dict()["state"] == {}
    assert weak.agent.gamma == 0.9


def test_wrong_hyperparameters_change_nothing():
    weak = trainee()
    with pytest.raises(ValueError, match="gamma"):
        weak.set_hyperparams({"learning_rate": 1e-5, "gamma": 2.0})
    assert weak.agent.learning_rate == 3e-4


def test_hyperparameters_that_are_refused_leave_the_agent_as_it_was():
    donor, weak = trainee(0), trainee(1)
    donor.train(1)
    weak.train(1)
    before = weak.agent.state_tree()
    with pytest.raises(ValueError, match="learning_rate"):
        weak.inherit(donor.agent.get_parameters(), "v2_full_parameters", {"learning_rate": float("nan")})
    assert not compare(weak.agent.state_tree(), before)
