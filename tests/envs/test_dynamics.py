"""How a world works can change: attributes of environments, and what is derived from them."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest

from driftproof.envs import Dynamics, Gradual, Sudden, derives, drifting
from tests.envs.worlds import Echo

DOUBLED = Sudden(every=3, values=[1.0, 2.0])


def after(env, steps):
    """The environment itself, after so many steps of one episode."""
    env.reset(seed=0)
    for _ in range(steps):
        env.step(env.action_space.sample())
    return env.unwrapped


def test_cart_pole_derives_masses_again():
    world = after(drifting("CartPole-v1", [Dynamics(DOUBLED, "length"), Dynamics(DOUBLED, "masspole")]), 3)
    assert (world.length, world.masspole) == (1.0, 0.2)
    assert world.polemass_length == pytest.approx(0.2)
    assert world.total_mass == pytest.approx(1.2)


def test_a_pole_that_was_changed_falls_as_one_that_was_made_so():
    """The wrapper against CartPole's own code, with the numbers put in by hand."""
    env = drifting("CartPole-v1", [Dynamics(Sudden(every=1, values=[3.0]), ["length", "masspole"])])
    plain = gymnasium.make("CartPole-v1")
    world = plain.unwrapped
    world.length, world.masspole = 1.5, 0.30000000000000004
    world.total_mass, world.polemass_length = world.masspole + world.masscart, world.masspole * world.length
    env.reset(seed=0)
    plain.reset(seed=0)
    for action in (0, 1, 1, 0, 0):
        assert env.step(action)[0].tolist() == plain.step(action)[0].tolist()


@pytest.mark.parametrize(
    ("name", "attributes"),
    {
        "CartPole-v1": ["gravity", "length", "masspole", "masscart", "force_mag"],
        "Pendulum-v1": ["g", "m", "l", "max_torque"],
        "MountainCar-v0": ["gravity", "force"],
        "Hopper-v5": ["model.geom_friction", "model.body_mass", "model.opt.gravity", "model.dof_damping"],
        "Ant-v5": ["model.actuator_gear"],
        "driftproof.envs:driftproof/RegimeMarket-v0": ["parameters.volatility", "parameters.trend_drift", "cost"],
    }.items(),
)
def test_what_the_documentation_names_is_there_and_matters(name, attributes):
    """With a third of each attribute, the same actions lead elsewhere."""

    def last(drift):
        env = drifting(name, drift, seed=0)
        env.reset(seed=0)
        env.action_space.seed(0)
        for _ in range(600):
            observation, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            if terminated or truncated:
                env.reset(seed=0)
        return [*observation.tolist(), reward]

    plain = last([])
    for attribute in attributes:
        assert last([Dynamics(Sudden(every=1000, values=[0.3]), attribute)]) != plain, attribute


def test_values_instead_of_factors():
    world = after(drifting("CartPole-v1", Dynamics(Gradual(9.8, 1.6, over=2), "gravity", relative=False)), 1)
    assert world.gravity == pytest.approx(5.7)


def test_what_is_set_comes_back():
    env = drifting("Pendulum-v1", Dynamics(DOUBLED, ["g", "m"]))
    assert after(env, 3).g == 20
    assert after(env, 3).g == 10
    assert env.unwrapped.m == 1


def test_a_state_brings_the_world_back_too():
    env, other = (
        drifting("CartPole-v1", Dynamics(Sudden(every=1, low=0.5, high=2), "length"), seed=2) for _ in range(2)
    )
    after(env, 5)
    other.load_state_dict(env.state_dict())
    assert other.unwrapped.length == env.unwrapped.length != 0.5
    assert other.unwrapped.polemass_length == env.unwrapped.polemass_length


@derives("Derived")
def _derive(env):
    env.area = env.shape.side**2


class Derived(Echo):
    class Shape:
        side = 3.0

        @property
        def fixed(self):
            return 1.0

    def __init__(self):
        super().__init__()
        self.shape, self.area = self.Shape(), 9.0


def test_attributes_of_attributes_and_own_derivations():
    class Inherits(Derived):
        pass

    world = after(drifting(Inherits(), Dynamics(Sudden(every=1, values=[2.0]), "shape.side")), 0)
    assert world.shape.side == 6
    assert world.area == 36


def test_what_cannot_be_set_is_refused_at_once():
    with pytest.raises(AttributeError, match="fixed"):
        drifting(Derived(), Dynamics(DOUBLED, "shape.fixed"))
    with pytest.raises(AttributeError, match=r"Derived.shape has no attribute 'sides' \(did you mean 'side'\?\)"):
        drifting(Derived(), Dynamics(DOUBLED, "shape.sides"))


class TestMujoco:
    """Hopper's model."""

    @pytest.fixture(autouse=True)
    def _needed(self):
        pytest.importorskip("mujoco")

    def test_friction_and_gravity(self):
        plain = gymnasium.make("Hopper-v5").unwrapped.model
        names = ["model.geom_friction", "model.opt.gravity"]
        world = after(drifting("Hopper-v5", Dynamics(DOUBLED, names)), 3)
        assert (world.model.geom_friction == 2 * plain.geom_friction).all()
        assert world.model.opt.gravity.tolist() == [0, 0, -9.81 * 2]

    def test_masses_with_all_that_depends_on_them(self):
        plain = gymnasium.make("Hopper-v5").unwrapped.model
        env = drifting("Hopper-v5", Dynamics(DOUBLED, "model.body_mass"))
        model = after(env, 3).model
        assert (model.body_mass == 2 * plain.body_mass).all()
        assert (model.body_inertia == 2 * plain.body_inertia).all()
        assert model.body_subtreemass == pytest.approx(2 * plain.body_subtreemass)
        assert (model.dof_invweight0 < plain.dof_invweight0).all()
        assert (after(env, 3).model.body_mass == plain.body_mass).all()

    def test_what_the_environment_is_doing_is_not_disturbed(self):
        env, plain = (
            drifting("Hopper-v5", Dynamics(Gradual(1.0, 1.0, over=5), "model.body_mass")),
            gymnasium.make("Hopper-v5"),
        )
        env.reset(seed=0)
        plain.reset(seed=0)
        for _ in range(5):
            action = np.full(3, 0.3, np.float32)
            assert env.step(action)[0].tolist() == plain.step(action)[0].tolist()

    def test_arrays_can_only_be_multiplied(self):
        with pytest.raises(ValueError, match="relative=True"):
            drifting("Hopper-v5", Dynamics(DOUBLED, "model.body_mass", relative=False))
