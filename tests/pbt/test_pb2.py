"""PB2 finds what improves, forgets what was long ago, and does not send all members to one place."""

import random
import sys

import numpy as np
import pytest

from driftproof.pbt import HyperparamConfig, PBTConfig, PBTScheduler
from driftproof.pbt.explore import from_unit, to_unit
from driftproof.pbt.pb2 import Observation, _candidates, propose

X = HyperparamConfig("x", 0.0, 1.0)


def pb2(*hyperparams):
    return PBTConfig(hyperparams=hyperparams or (X,), explore_method="pb2")


def observed(function, times=range(10), per_time=4, seed=0):
    rng = np.random.default_rng(seed)
    points = [(float(t), float(x)) for t in times for x in rng.random(per_time)]
    return [Observation(t, {"x": x}, function(t, x)) for t, x in points]


def proposals(observations, pending=(), time=10.0, count=8):
    rng = np.random.default_rng(0)
    return [propose(pb2(), {"x": 0.1}, observations, pending, time, rng)["x"] for _ in range(count)]


def test_it_proposes_what_improved_performance():
    near = proposals(observed(lambda t, x: -((x - 0.7) ** 2)))
    np.testing.assert_allclose(near, 0.7, atol=0.1)


def test_it_forgets():
    # What was right for the first fifteen intervals is wrong in the last five.
    observations = observed(lambda t, x: -abs(x - (0.2 if t < 15 else 0.8)), times=range(20))
    np.testing.assert_allclose(proposals(observations, time=20.0), 0.8, atol=0.15)


def test_others_that_are_on_their_way_repel():
    # Nothing is known about the upper half, but one is going there.
    observations = [Observation(float(t), {"x": x}, 0.0) for t in range(3) for x in (0.0, 0.1, 0.2, 0.3, 0.4)]
    alone = np.mean(proposals(observations, time=3.0))
    assert alone > 0.8
    # Several are: less is left to learn there.
    others = [{"x": x} for x in (0.75, 0.85, 0.95, 1.0) for _ in range(3)]
    assert np.mean(proposals(observations, others, time=3.0)) < alone - 0.1


def test_divergence_counts_as_the_worst_seen():
    observations = observed(lambda t, x: None if x > 0.5 else -((x - 0.45) ** 2))
    assert max(proposals(observations)) < 0.6


def test_while_little_is_known_it_perturbs():
    rng = np.random.default_rng(0)
    for count in range(4):
        observations = observed(lambda t, x: x)[:count]
        assert propose(pb2(), {"x": 0.5}, observations, [], 3.0, rng)["x"] in (0.6, 0.5 / 1.2)
    unknown = [Observation(0.0, {"x": 0.5}, None)] * 9
    assert propose(pb2(), {"x": 0.5}, unknown, [], 3.0, rng)["x"] in (0.6, 0.5 / 1.2)


def test_whole_numbers_log_scales_and_values_keep_their_kinds():
    config = pb2(
        HyperparamConfig("n", 1, 20),
        HyperparamConfig("lr", 1e-5, 1e-1, is_log_scale=True),
        HyperparamConfig("kind", values=["a", "b", "c"]),
    )
    rng = np.random.default_rng(0)
    observations = []
    for t in range(12):
        n, lr = int(rng.integers(1, 21)), float(10 ** rng.uniform(-5, -1))
        observations.append(
            Observation(float(t), {"n": n, "lr": lr, "kind": "a"}, -abs(np.log10(lr) + 3) - abs(n - 5) / 20)
        )
    for _ in range(5):
        proposed = propose(config, {"n": 7, "lr": 1e-2, "kind": "b"}, observations, [], 12.0, rng)
        assert type(proposed["n"]) is int
        assert 1 <= proposed["n"] <= 20
        assert 1e-4 < proposed["lr"] < 1e-2
        assert proposed["kind"] in ("a", "c")


def test_of_whole_numbers_the_model_is_asked_where_they_stand():
    count = HyperparamConfig("n", 1, 20)
    places = _candidates([count], np.array([0.5]), np.random.default_rng(0))[:, 0]
    assert set(places) == {to_unit(count, n) for n in range(1, 21)}
    assert from_unit(count, places[0]) in range(1, 21)


def test_the_same_seed_proposes_the_same_and_global_generators_are_untouched():
    observations = observed(lambda t, x: x)
    before = random.getstate(), np.random.get_state()[1].tolist()
    assert proposals(observations, count=3) == proposals(observations, count=3)
    assert before == (random.getstate(), np.random.get_state()[1].tolist())


def test_changes_that_are_all_equal_do_no_harm():
    assert all(0 <= x <= 1 for x in proposals(observed(lambda t, x: 0.0), count=3))


def test_without_scikit_learn_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ImportError, match=r'needs scikit-learn\. .*pip install "\.\[pbt\]"'):
        PBTScheduler(pb2(), seed=0)
    PBTScheduler(PBTConfig(hyperparams=[X]), seed=0)


def test_the_gradient_of_the_kernel_is_its_derivative():
    from driftproof.pbt._kernel import TimeVarying

    rng = np.random.default_rng(0)
    points = np.column_stack([np.arange(5.0), rng.random((5, 2))])
    kernel = TimeVarying(0.2, 0.7)
    value, gradient = kernel(points, eval_gradient=True)
    for i in range(2):
        moved = kernel.clone_with_theta(kernel.theta + 1e-6 * np.eye(2)[i])(points)
        # Parameters are in alphabetical order: forgetting, length_scale.
        np.testing.assert_allclose((moved - value) / 1e-6, gradient[..., i], atol=1e-5)
    np.testing.assert_allclose(value[0, 4], 0.8**2 * np.exp(-((points[0, 1:] - points[4, 1:]) ** 2).sum() / 0.98))


def test_members_on_their_way_are_those_whose_new_values_are_not_yet_observed(monkeypatch):
    seen = []

    def spy(config, hyperparams, observations, pending, time, rng):
        seen.append((len(observations), list(pending), time))
        return propose(config, hyperparams, observations, pending, time, rng)

    monkeypatch.setattr("driftproof.pbt.pb2.propose", spy)
    options = {"population_size": 4, "perturbation_interval": 2, "truncation_ratio": 0.5, "explore_method": "pb2"}
    scheduler = PBTScheduler(PBTConfig(hyperparams=[X], **options), seed=0)
    for step in (1, 2):
        for member in range(4):
            scheduler.update_performance(member, float(-member), step, {})
    _, first, _ = scheduler.exploit_and_explore(2)
    scheduler.exploit_and_explore(3)
    assert seen == [(1, [], 1.0), (2, [first], 1.0)]
    for member in range(4):
        scheduler.update_performance(member, float(-member), 4, {})
    scheduler.exploit_and_explore(2)  # the effect of its values is known by now, that of member 3's is not
    assert seen[2][:2] == (3, [scheduler.members[3].hyperparams])
    for member, performance in enumerate((1.0, 0.0, -1.0, 2.0)):
        scheduler.update_performance(member, performance, 6, {})
    for member in (3, 2):  # now it is
        scheduler.exploit_and_explore(member)
    assert seen[3][:2] == (5, [])


def test_a_population_finds_the_best_value():
    # The change of performance is best at x = 0.6; parameters do not matter here.
    config = PBTConfig(
        population_size=4, perturbation_interval=1, hyperparams=[X], explore_method="pb2", truncation_ratio=0.5
    )
    scheduler = PBTScheduler(config, seed=0)
    levels = [0.0] * 4
    for step in range(1, 15):
        for member in scheduler.members:
            levels[member.id] += 1 - 4 * (member.hyperparams["x"] - 0.6) ** 2
            scheduler.update_performance(member, levels[member.id], step, {"level": levels[member.id]})
        for member in scheduler.members:
            parameters, _, _ = scheduler.exploit_and_explore(member)
            if parameters is not None:
                levels[member.id] = parameters["level"]
    exploited = [event.hyperparams["x"] for event in scheduler.events if event.kind == "exploit"]
    assert len(exploited) > 15
    np.testing.assert_allclose(exploited[-6:], 0.6, atol=0.15)
