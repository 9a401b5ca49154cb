"""Agents in drifting worlds: where the world is belongs to what is saved, and to nobody else.

That a resumed training equals one that was not interrupted is tested in tests/ppo/test_resume.py.
"""

from __future__ import annotations

import warnings

import pytest
from stable_baselines3.common.env_util import make_vec_env

from driftproof.envs import ObservationScale, RandomWalk, RegimeMarketEnv, RewardScale, drifting
from driftproof.pbt import Trainee
from driftproof.ppo import DistributionalPPO
from driftproof.state import read, write
from tests.envs.worlds import Echo

DRIFT = RewardScale(RandomWalk(0.5, 2.0, 0.1))
SMALL = {"n_steps": 16, "batch_size": 16, "n_epochs": 1, "device": "cpu", "policy_kwargs": {"net_arch": [4]}}


def make_env(drift=DRIFT, n=2, world="CartPole-v1"):
    return make_vec_env(lambda: drifting(world() if callable(world) else world, drift), n)


def make_agent(env=None, seed=0):
    return DistributionalPPO("MlpPolicy", env or make_env(), seed=seed, **SMALL)


def states(agent):
    return agent.get_env().get_attr("lasting_state")


def test_drift_goes_on_where_episodes_cannot(tmp_path):
    agent = make_agent()
    agent.learn(64)
    before = states(agent)
    assert [state["steps"] for state in before] == [32, 32]
    assert before[0]["courses"] != before[1]["courses"]
    agent.save(tmp_path / "agent.zip")
    assert not read(tmp_path / "agent.zip").exact
    loaded = DistributionalPPO.load(tmp_path / "agent.zip", make_env(), device="cpu")
    assert states(loaded) == before
    loaded.learn(32, reset_num_timesteps=False)
    assert [state["steps"] for state in states(loaded)] == [48, 48]


def test_environments_that_tell_where_they_are_go_on_with_their_drift(tmp_path):
    agent = make_agent(make_env(world=lambda: RegimeMarketEnv(episode_length=20)))
    agent.learn(64)
    agent.save(tmp_path / "agent.zip")
    assert read(tmp_path / "agent.zip").exact
    other = make_env(world=lambda: RegimeMarketEnv(episode_length=20))
    loaded = DistributionalPPO.load(tmp_path / "agent.zip", other, device="cpu")
    assert states(loaded) == states(agent)
    for one in (agent, loaded):
        one.learn(32, reset_num_timesteps=False)
    assert (agent._last_obs == loaded._last_obs).all()


@pytest.mark.parametrize(
    "other",
    [
        lambda: make_env(RewardScale(RandomWalk(0.5, 2.0, 0.2))),
        lambda: make_env(n=3),
        lambda: make_vec_env("CartPole-v1", 2),
    ],
    ids=["another drift", "more environments", "no drift"],
)
def test_another_drift_begins_anew_and_says_so(tmp_path, other):
    agent = make_agent()
    agent.learn(32)
    agent.save(tmp_path / "agent.zip")
    with pytest.warns(UserWarning, match="they begin anew"):
        loaded = DistributionalPPO.load(tmp_path / "agent.zip", other(), device="cpu")
    loaded.learn(48, reset_num_timesteps=False)


def test_agents_of_a_world_that_did_not_drift_may_go_on_in_one_that_does(tmp_path):
    make_agent(make_vec_env("CartPole-v1", 2)).save(tmp_path / "agent.zip")
    tree = read(tmp_path / "agent.zip")
    del tree.tree["rollout"]["lasting"]  # As in files of before.
    write(tmp_path / "older.zip", tree.tree, config=tree.config, exact=False)
    for name in ("agent", "older"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loaded = DistributionalPPO.load(tmp_path / f"{name}.zip", make_env(), device="cpu")
        loaded.learn(32)


def test_whoever_takes_over_from_another_keeps_the_own_world():
    agents = [make_agent(seed=seed) for seed in range(2)]
    strong, weak = (Trainee(agent, total_updates=4) for agent in agents)
    strong.train(2)
    weak.train(1)
    before = states(agents[1])
    weak.inherit(strong.agent.get_parameters(), "v2_full_parameters", {})
    assert states(agents[1]) == before
    weak.train(1)
    assert [state["steps"] for state in states(agents[1])] == [32, 32]


def test_agents_see_what_has_changed():
    agent = make_agent(make_env(ObservationScale(RandomWalk(0.5, 2.0, 0.1)), 1, Echo))
    seen = []
    agent.learn(32, lambda values, _: seen.append(values["new_obs"][0, 0]) or True)
    assert len(set(seen)) > 20
    assert all(0.5 <= number <= 2.0 for number in seen)
