"""A vectorised population: members train as they do alone, and are agents like any other."""

from __future__ import annotations

import pytest
import torch
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import SubprocVecEnv

from driftproof.adversarial import SAPPOConfig
from driftproof.envs import tensor
from driftproof.pbt import PBTRunner, Trainee
from driftproof.pbt.vectorized import VectorizedPopulation
from driftproof.pbt.vectorized.backend import VectorizedBackend
from driftproof.ppo import DistributionalPPO, TensorVecEnv
from driftproof.state import compare, read
from tests.pbt.populations import Broken, config, make_agent, states
from tests.ppo.changing import LENGTH, Metrics, agent_in
from tests.ppo.scripted import small_networks

SETTINGS = {"n_steps": 16, "batch_size": 16, "n_epochs": 2, "device": "cpu"}


def agent(member, env=lambda: make_vec_env("CartPole-v1", 2), **changes):
    networks = {"policy_kwargs": small_networks("MlpLstmPolicy"), "vgs_kwargs": {"warmup_steps": 2}}
    rates = {"learning_rate": 10.0 ** -(2 + member), "gamma": 1 - 0.1**member / 10}
    return DistributionalPPO("MlpLstmPolicy", env(), **{**SETTINGS, **networks, **rates, "seed": member, **changes})


def short_episodes():
    """Episodes that a time limit truncates."""
    return make_vec_env("Pendulum-v1", 2, env_kwargs={"max_episode_steps": 7})


def cart_poles(envs):
    return tensor.make("CartPole-v1", envs, max_episode_steps=9)


def train(population, updates, total=6, members=range(3)):
    failures = population.train(dict.fromkeys(members, updates), total, dict.fromkeys(members))
    assert not failures


def differences(population, member, alone, tolerance=1e-4):
    """What differs between a member and an agent, but for rounding, the clock, and a metric of the gradients."""
    population.write([member])
    found, expected = population.states(member), alone.state_tree()
    for tree in (found, expected):
        tree["rollout"] = {**tree["rollout"], "episodes": {**tree["rollout"]["episodes"], "t": 0}}
        tree["optimizer"] = {**tree["optimizer"], "param_groups": 0}
        tree["vgs"] = {**tree["vgs"], "largest": 0}
    return [each for each in compare(found, expected) if each.kind != "value" or (each.max_abs or 1) > tolerance]


@pytest.mark.parametrize(
    "make",
    [
        make_agent,
        pytest.param(lambda member: agent(member, short_episodes), marks=pytest.mark.slow),
        lambda member: agent(member, drift_kit=True, recycle_dormant=0.1, ent_coef_final=0.0, ent_coef=0.01),
    ],
    ids=["VecNormalize", "truncated", "drift_kit"],
)
def test_members_train_as_they_do_alone(make, monkeypatch):
    monkeypatch.setattr("driftproof.learner.observation_normalizer.FIXED", 30)  # Decided within this training.
    population = VectorizedPopulation(make, 3)
    train(population, 2)
    train(population, 2)
    for member in range(3):
        alone = make(member)
        Trainee(alone, 6).train(4)
        assert not differences(population, member, alone)
    population.close()


@pytest.mark.parametrize("policy", ["MlpPolicy", pytest.param("MlpLstmPolicy", marks=pytest.mark.slow)])
def test_a_member_whose_world_changes_responds_and_others_do_not(policy):
    worlds = [{0: "right", 40: "wrong", 65: "right"}, {0: "right"}]
    population = VectorizedPopulation(lambda i: agent_in(worlds[i], policy=policy, drift_response=True), 2)
    seen = [Metrics(), Metrics()]
    population.train(dict.fromkeys(range(2), 72), 72, dict(enumerate(seen)))
    changed, calm = seen
    levels = changed.column("drift/level")
    assert levels[:40] == [0] * 40
    assert 3 in levels, "weights were replaced by fresh ones"
    assert 1 in changed.column("drift/trial"), "former weights were tried when their world came back"
    assert changed.column("drift/episode_return")[-1] > 0.8 * LENGTH
    assert set(calm.column("drift/level")) == {0}
    population.write([1])
    alone = agent_in(worlds[1], policy=policy, drift_response=True)
    Trainee(alone, 72).train(72)
    returns = [each.learner.drift_alarm.mean_return for each in (population.agents[1], alone)]
    assert returns[0] == pytest.approx(returns[1], abs=1)
    population.close()


@pytest.mark.slow
def test_environments_in_processes():
    def make(member):
        return agent(member, lambda: make_vec_env("CartPole-v1", 2, vec_env_cls=SubprocVecEnv))

    population = VectorizedPopulation(make, 2)
    train(population, 1, members=range(2))
    alone = agent(1, lambda: make_vec_env("CartPole-v1", 2))
    Trainee(alone, 6).train(1)
    torch.testing.assert_close(dict(population.member(1).policy.state_dict()), dict(alone.policy.state_dict()))
    population.close()


@pytest.mark.parametrize("drift_kit", [False, True])
def test_environments_on_the_device(drift_kit):
    def make(member):
        return agent(member, lambda: TensorVecEnv(cart_poles(2)), drift_kit=drift_kit)

    population = VectorizedPopulation(make, 3)
    train(population, 2)
    train(population, 2)
    for member in range(3):
        alone = make(member)
        Trainee(alone, 6).train(4)
        assert not differences(population, member, alone)


def test_observations_on_the_device_are_not_normalised():
    def make(member, **settings):
        return agent(member, lambda: TensorVecEnv(cart_poles(2)), **settings)

    assert make(0, drift_kit=True).learner.normalizer is None
    with pytest.raises(ValueError, match="observation_normalizer=True needs observations on the host"):
        VectorizedPopulation(lambda member: make(member, observation_normalizer=True), 2)


@pytest.mark.parametrize("on_device", [False, True])
def test_those_that_do_not_train_stay_as_they_are(on_device):
    def make(member):
        return agent(member, (lambda: TensorVecEnv(cart_poles(2))) if on_device else short_episodes)

    one, other = (VectorizedPopulation(make, 3) for _ in range(2))
    train(one, 3)
    train(other, 1)
    train(other, 1, members=[2])
    train(other, 2, members=[0])
    train(other, 1, members=[2, 1])
    train(other, 1, members=[1])
    for member in range(3):
        one.write([member])
        other.write([member])
        trees = [{**each.states(member), "rollout": 0} for each in (one, other)]
        assert not compare(*trees)


class TestExploit:
    def trained(self):
        population = VectorizedPopulation(make_agent, 3)
        train(population, 1)
        return population

    def test_what_was_learned_is_copied_and_the_rest_stays(self):
        population = self.trained()
        population.write(range(3))
        before = [population.agents[i].state_tree() for i in range(3)]
        population.exploit([0, 2], [2, 1])
        for target, source in ((0, 2), (2, 1), (1, 1)):
            population.write([target])
            tree = population.agents[target].state_tree()
            assert not compare(
                {n: tree[n] for n in tree if n not in ("rollout", "random", "counters")},
                {n: before[source][n] for n in tree if n not in ("rollout", "random", "counters")},
            )
            assert tree["counters"] == before[target]["counters"]
        assert not any(part.any() for parts in population.agents[0].state for part in parts)

    def test_it_equals_an_exploit_of_single_agents(self):
        population = self.trained()
        population.exploit([0], [2])
        train(population, 1)
        donor = make_agent(2)
        Trainee(donor, 6).train(1)
        alone = make_agent(0)
        trainee = Trainee(alone, 6)
        trainee.train(1)
        trainee.inherit(donor.get_parameters(), "v2_full_parameters", {})
        trainee.train(1)
        torch.testing.assert_close(dict(population.member(0).policy.state_dict()), dict(alone.policy.state_dict()))

    def test_a_member_goes_out_and_comes_back(self, tmp_path):
        population = self.trained()
        whole = self.trained()
        train(whole, 1)
        population.member(1).save(tmp_path / "member.zip")
        loaded = DistributionalPPO.load(tmp_path / "member.zip", env=make_agent(1).env)
        population.exploit([1], [0])
        population.put(1, loaded)
        train(population, 1)
        weights = [dict(each.member(1).policy.state_dict()) for each in (population, whole)]
        torch.testing.assert_close(*weights)


def test_a_member_that_diverges_is_frozen_until_it_is_replaced():
    def make(member):
        return agent(member, skip_limit=2)

    population, whole = VectorizedPopulation(make, 3), VectorizedPopulation(make, 3)
    for each in (population, whole):
        train(each, 1)
        each.write(range(3))
    with torch.no_grad():
        population.state.weights["critics.0.head.linear.bias"][1].fill_(torch.nan)
    good = population.agents[1].policy.state_dict()
    train(population, 1)
    train(whole, 1)
    assert population.frozen == {1}
    assert all(torch.equal(population.state.weights[name][1], tensor) for name, tensor in good.items())
    for member in (0, 2):
        for name, weight in whole.state.weights.items():
            assert torch.equal(population.state.weights[name][member], weight[member])
    population.exploit([1], [0])
    assert not population.frozen
    train(population, 1)
    assert not population.frozen


def test_agents_that_cannot_train_as_one_are_refused():
    with pytest.raises(ValueError, match="same n_steps"):
        VectorizedPopulation(lambda member: agent(member, n_steps=16 * (member + 1)), 2)
    with pytest.raises(ValueError, match="same shapes"):
        VectorizedPopulation(lambda member: agent(member, policy_kwargs={"lstm_hidden_size": 4 + member}), 2)
    with pytest.raises(ValueError, match="same settings of adversarial training"):
        VectorizedPopulation(lambda member: agent(member, adversarial=SAPPOConfig(adversarial_ratio=member / 2)), 2)


def run(folder, backend, make=make_agent, **options):
    runner = PBTRunner(config(), make, 6, folder, seed=5, backend=backend, synchronous=True, **options)
    runner.run()
    return runner


class TestBackend:
    def test_it_decides_and_trains_as_members_one_by_one(self, tmp_path):
        one, other = (run(tmp_path / name, name) for name in ("inline", "vectorized"))
        assert [event.kind for event in one.scheduler.events].count("exploit") > 0
        for event, expected in zip(other.scheduler.events, one.scheduler.events, strict=True):
            assert (event.kind, event.member, event.donor, event.step) == (
                *(expected.kind, expected.member, expected.donor, expected.step),
            )
            assert event.hyperparams == pytest.approx(expected.hyperparams)
        for path in (runner.path_of(runner.best_member) for runner in (one, other)):
            assert DistributionalPPO.load(path).num_timesteps == 6 * 32
        for member in range(3):
            trees = [read(runner.path_of(member)).tree["policy"] for runner in (one, other)]
            torch.testing.assert_close(*trees, rtol=1e-3, atol=1e-4)

    @pytest.mark.parametrize("after", [5, *(pytest.param(after, marks=pytest.mark.slow) for after in (1, 4, 8))])
    def test_resume_equals_uninterrupted(self, tmp_path, monkeypatch, after):
        """Whenever it is interrupted, also in the middle of a round, and just before the state is written."""
        whole = run(tmp_path / "whole", "vectorized")
        cut = PBTRunner(config(), make_agent, 6, tmp_path / "cut", seed=5, backend="vectorized")
        save, count = cut._save, iter(range(100))

        def failing():
            if next(count) == after:
                raise InterruptedRunError
            save()

        monkeypatch.setattr(cut, "_save", failing)
        with pytest.raises(InterruptedRunError):
            cut.run()
        torch.manual_seed(99)
        resumed = PBTRunner.resume(tmp_path / "cut", make_agent, backend="vectorized")
        resumed.run()
        assert [vars(event) for event in resumed.scheduler.events] == [vars(event) for event in whole.scheduler.events]
        assert not compare(states(resumed), states(whole))

    def test_a_member_that_fails_restarts_and_the_others_go_on(self, tmp_path):
        whole = run(tmp_path / "whole", "vectorized", Broken(tmp_path))
        (tmp_path / "1.once").touch()
        runner = run(tmp_path / "run", "vectorized", Broken(tmp_path))
        assert [event.member for event in runner.scheduler.events if event.kind == "restart"] == [1]
        assert not compare(states(runner), states(whole))

    @pytest.mark.slow
    def test_a_member_that_keeps_failing_is_replaced(self, tmp_path):
        runner = PBTRunner(
            config(), Broken(tmp_path), 6, tmp_path / "run", seed=5, backend="vectorized", max_restarts=1
        )
        runner.run(updates=2)
        (tmp_path / "1").touch()
        with pytest.raises(RuntimeError, match="also as a copy of another"):
            runner.run()
        (tmp_path / "1").unlink()
        resumed = PBTRunner.resume(tmp_path / "run", Broken(tmp_path), backend="vectorized")
        resumed.run()
        assert resumed.updates == [6, 6, 6]

    def test_a_member_that_diverges_is_replaced_at_the_next_exploit(self, tmp_path):
        def make(member):
            return agent(member, skip_limit=1)

        def spoil(runner):
            if runner.updates == [2, 2, 2]:
                with torch.no_grad():
                    backend.population.state.weights["action_head.bias"][1].fill_(torch.nan)

        backend = VectorizedBackend()
        runner = PBTRunner(config(), make, 8, tmp_path, seed=5, backend=backend, on_change=spoil)
        runner.run()
        history = runner.scheduler.members[1].history
        assert [performance for step, performance in history if step == 4] == [None]
        assert (
            next(event for event in runner.scheduler.events if event.member == 1 and event.step == 4).kind == "exploit"
        )
        assert history[-1][1] is not None
        assert runner.updates == [8, 8, 8]

    @pytest.mark.slow
    def test_environments_on_the_device_resume(self, tmp_path):
        def make(member):
            return agent(member, lambda: TensorVecEnv(cart_poles(2)))

        whole = run(tmp_path / "whole", "vectorized", make)
        cut = PBTRunner(config(), make, 6, tmp_path / "cut", seed=5, backend="vectorized")
        cut.run(updates=2)
        resumed = PBTRunner.resume(tmp_path / "cut", make, backend="vectorized")
        resumed.run()
        assert not compare(states(resumed), states(whole))


class InterruptedRunError(Exception):
    pass
