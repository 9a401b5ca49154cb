"""Sensors and actions that were swapped or inverted are found from transitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from driftproof.learner.rewiring import LARGEST, Starts, TransitionModel
from driftproof.nn.types import Rewiring, Wiring
from driftproof.state import CheckpointError, compare
from driftproof.state.schema import check

LENGTH, ENVS, STEPS = 25, 4, 400


def unchanged(n, m):
    return Rewiring(np.arange(n), np.ones(n), np.arange(m), np.ones(m))


class World:
    """A random stable linear system; its actions are numbered, or components of a vector."""

    def __init__(self, seed, n, m, is_discrete, scale=1.0):
        rng = self.rng = np.random.default_rng(seed)
        self.n, self.m, self.is_discrete, self.scale = n, m, is_discrete, scale
        a = rng.normal(size=(n, n))
        self.a = a * 0.8 / np.abs(np.linalg.eigvals(a)).max()
        self.b = rng.normal(size=(n, m)) * (1 + np.arange(m))
        self.start = rng.normal(size=n)

    def model(self):
        return TransitionModel(self.n, Wiring(self.m, self.is_discrete, True))

    @property
    def starts(self):
        return Starts(self.start * self.scale, np.full(self.n, 0.01) * self.scale**2)

    def rollout(self, wiring=None, steps=STEPS):
        """Observations, episode starts and actions of a policy that acts at random."""
        wiring = unchanged(self.n, self.m) if wiring is None else wiring
        shape = (steps, ENVS) if self.is_discrete else (steps, ENVS, self.m)
        actions = self.rng.integers(self.m, size=shape) if self.is_discrete else self.rng.normal(size=shape)
        rows, starts = np.zeros((steps, ENVS, self.n)), np.zeros((steps, ENVS), bool)
        for env in range(ENVS):
            for t in range(steps):
                if (t + 5 * env) % LENGTH == 0 or t == 0:
                    x, starts[t, env] = self.start + self.rng.normal(0, 0.1, self.n), True
                rows[t, env] = x[wiring.sensors] * wiring.sensor_signs
                force = np.zeros(self.m)
                if self.is_discrete:
                    force[wiring.actions[actions[t, env]]] = 1
                else:
                    force[wiring.actions] = actions[t, env] * wiring.action_signs
                x = self.a @ x + self.b @ force + self.rng.normal(0, 0.1, self.n)
        return rows * self.scale, starts, torch.from_numpy(actions)

    def learned(self):
        model = self.model()
        model.observe(*self.rollout())
        model.learn()
        return model


def equal(found, expected):
    return all(np.array_equal(own, other) for own, other in zip(found, expected, strict=True))


WORLDS = {"n": st.integers(2, 6), "m": st.integers(2, 4), "is_discrete": st.booleans()}


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**20), scale=st.sampled_from([1e-3, 1.0, 1e4]), **WORLDS)
def test_swapped_and_inverted_sensors_are_found_exactly(seed, n, m, is_discrete, scale):
    world = World(seed, n, m, is_discrete, scale)
    model = world.learned()
    order, signs = world.rng.permutation(n), world.rng.choice([-1.0, 1.0], n)
    signs[0] = -signs[0] if np.array_equal(order, np.arange(n)) and (signs > 0).all() else signs[0]
    wiring = unchanged(n, m)._replace(sensors=order, sensor_signs=signs)
    rollout = world.rollout(wiring)
    model.observe(*rollout)
    found = model.match(world.starts)
    assert equal(found[0], wiring)
    # The model of the reordered world explains it.
    model.rewire(found[0])
    model.observe(*rollout)
    starts = Starts(world.starts.mean[order] * signs, world.starts.variance)
    assert model.match(starts) == []


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**20), **WORLDS)
def test_swapped_and_inverted_actions_are_found_exactly(seed, n, m, is_discrete):
    world = World(seed, n, m, is_discrete)
    model = world.learned()
    order = np.roll(np.arange(m), 1)
    signs = np.ones(m) if is_discrete else world.rng.choice([-1.0, 1.0], m)
    wiring = unchanged(n, m)._replace(actions=order, action_signs=signs)
    model.observe(*world.rollout(wiring))
    assert equal(model.match(world.starts)[0], wiring)


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**20), **WORLDS)
def test_an_unchanged_world_has_none(seed, n, m, is_discrete):
    world = World(seed, n, m, is_discrete)
    model = world.learned()
    model.observe(*world.rollout())
    assert model.match(world.starts) == []


def test_a_world_that_is_merely_another_one_has_none_that_explains_it():
    """Whatever is proposed is up to a trial; there are at most two."""
    world = World(0, 4, 2, True)
    model, other = world.learned(), World(1, 4, 2, True)
    model.observe(*other.rollout())
    assert len(model.match(world.starts)) <= 2


def degenerate(kind, rows):
    rows = rows.copy()
    if kind == "constants":
        rows[..., :3] = 7e8
    elif kind == "zeros":
        rows[:] = 0
    elif kind == "equal":
        rows[..., 1:] = rows[..., :1] + 1e7
    elif kind == "float32's largest":
        rows *= 1e37
    elif kind == "float64's largest":
        rows *= 1e307
    elif kind == "tiny":
        rows *= 1e-200
    elif kind == "spike":
        rows[5, 0] = 1e38
    return rows


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "kind", ["constants", "zeros", "equal", "float32's largest", "float64's largest", "tiny", "spike"]
)
@pytest.mark.parametrize("after", [True, False], ids=["after the change", "always"])
def test_degenerate_observations_are_no_error(kind, after):
    world = World(3, 5, 2, True)
    model = world.model()
    for is_after in (False, True):
        rows, starts, actions = world.rollout()
        model.observe(degenerate(kind, rows) if is_after or not after else rows, starts, actions)
        if not is_after:
            model.learn()
    assert np.isfinite(model.moments).all()
    found = model.match(world.starts)
    assert len(found) <= 2
    check("model", model.state_dict(), model.rule())


def test_few_transitions_are_no_evidence():
    world = World(5, 3, 2, True)
    inverted = unchanged(3, 2)._replace(sensor_signs=-np.ones(3))
    model = world.learned()
    model.observe(*world.rollout(inverted, steps=100))
    assert model.match(world.starts) == []
    model.observe(*world.rollout(inverted, steps=100))
    assert equal(model.match(world.starts)[0], inverted)
    young = world.model()
    young.observe(*world.rollout(steps=100))
    young.learn()
    young.observe(*world.rollout(inverted))
    assert young.match(world.starts) == []


def test_an_episode_without_an_end_and_one_of_a_single_step():
    world = World(6, 3, 2, False)
    model = world.model()
    rows, starts, actions = world.rollout()
    model.observe(rows, np.zeros_like(starts), actions)
    assert sum(sums["count"] for sums in model.recent) == (STEPS - 1) * ENVS
    assert max(sums["count"] for sums in model.recent) <= 512
    model.learn()
    model.observe(rows, np.ones_like(starts), actions)
    assert model.recent == [], "there is no transition"
    model.learn()
    assert model.count == (STEPS - 1) * ENVS
    assert model.match(world.starts) == []


def test_it_waits_for_transitions_and_keeps_the_last_ones():
    world = World(6, 3, 2, False)
    model = world.learned()
    rows, starts, actions = world.rollout()
    for i in range(0, 300, 10):
        assert model.is_waiting == (sum(sums["count"] for sums in model.recent) < 500)
        model.observe(rows[i : i + 10], starts[i : i + 10], actions[i : i + 10])
    kept = sum(sums["count"] for sums in model.recent)
    assert 1000 <= kept < 1000 + 2 * 10 * ENVS
    assert not model.is_waiting
    assert not world.model().is_waiting, "nothing is known to compare with"


def test_transitions_do_not_cross_episodes_and_environments():
    """Identifiable data: an observation is 100 times the environment plus the step."""
    model = TransitionModel(1, Wiring(2, True, True))
    rows = (100 * np.arange(3) + np.arange(6)[:, None])[..., None].astype(float)
    starts = np.zeros((6, 3), bool)
    starts[4, 1] = True
    actions = torch.ones(6, 3, dtype=torch.long)
    actions[3, 1] = 0  # The last one of its episode, which no observation follows.
    model.observe(rows, starts, actions)
    (sums,) = model.recent
    assert sums["count"] == 14
    assert sums["moments"][0].tolist() == [14, 0, 14, sum(rows[:-1, :, 0].ravel()) - 103, 14]
    assert sums["starts"].tolist() == [[104], [104**2]]


def test_a_state_is_restored_exactly_and_wrong_ones_are_refused():
    world = World(7, 3, 2, True)
    model = world.learned()
    model.observe(*world.rollout(steps=60))
    state = model.state_dict()
    check("model", state, model.rule())
    other = world.model()
    other.load_state_dict(state)
    assert not compare(state, other.state_dict())
    other.learn()
    assert not compare(state, model.state_dict()), "a copy"
    sums = state["recent"][0]
    for wrong in (
        {"moments": torch.zeros(3, 3).double()},
        {"moments": state["moments"] * float("inf")},
        {"moments": state["moments"].float()},
        {"count": float("nan")},
        {"count": -1},
        {"recent": None},
        {"recent": [{**sums, "starts": sums["starts"][:1]}]},
        {"recent": [{**sums, "episodes": -1}]},
    ):
        with pytest.raises(CheckpointError):
            check("model", {**state, **wrong}, model.rule())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("of", ["zeros", "ones", "signs", "normal"])
def test_states_with_impossible_moments_are_no_error(of):
    world = World(9, 4, 2, False)
    model, rng = world.learned(), np.random.default_rng(0)
    model.observe(*world.rollout())
    shape, largest = model.moments.shape, 0.99e150
    made = {"zeros": np.zeros(shape), "ones": np.ones(shape), "signs": rng.choice([-1.0, 1.0], shape)}
    model.moments = largest * made.get(of, rng.normal(size=shape).clip(-1, 1))
    model.recent[0] |= {"moments": model.moments.T.copy(), "starts": np.full((2, 4), -largest)}
    check("model", model.state_dict(), model.rule())
    assert len(model.match(world.starts)) <= 2


def test_the_most_sensors_take_seconds():
    world = World(8, LARGEST, 3, False)
    model = world.learned()
    order, signs = world.rng.permutation(LARGEST), world.rng.choice([-1.0, 1.0], LARGEST)
    model.observe(*world.rollout(unchanged(LARGEST, 3)._replace(sensors=order, sensor_signs=signs)))
    found = model.match(world.starts)[0]
    assert equal(found[:2], (order, signs))
