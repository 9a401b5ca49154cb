"""Attacks: inside the ball and the range always, up the gradient, and nothing else touched."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from driftproof.adversarial import PerturbationConfig, StatePerturbation

METHODS = ["pgd", "fgsm", "sgld"]
NORMS = ["linf", "l2"]
FLAT = spaces.Box(-np.inf, np.inf, (3,), np.float32)
IMAGE = spaces.Box(0, 255, (1, 36, 36), np.uint8)


def lengths(offsets, norm, leading=1):
    flat = offsets.double().flatten(leading)
    return flat.abs().amax(-1) if norm == "linf" else flat.norm(dim=-1)


def rough(observation):
    """An objective with hills and valleys, one number for each sample."""
    return (3 * observation).sin().flatten(1).sum(1) + observation.flatten(1).norm(dim=1)


def attack(space=None, seed=0, **settings):
    return StatePerturbation(PerturbationConfig(**settings), space, seed=seed)


shapes = st.sampled_from([(1, 1), (1, 7), (100, 4), (5, 2, 3), (2, 3, 4, 5)])
configs = st.fixed_dictionaries(
    {
        "epsilon": st.sampled_from([0.0, 1e-4, 0.075, 1.0, 5.0]),
        "attack_steps": st.integers(1, 6),
        "attack_lr": st.sampled_from([1e-3, 0.03, 2.0]),
        "random_init": st.booleans(),
        "norm_type": st.sampled_from(NORMS),
        "attack_method": st.sampled_from(METHODS),
    }
)


class TestContract:
    @settings(max_examples=150)
    @given(configs, shapes, st.sampled_from([0.1, 1.0, 1e3]), st.integers(0, 2**20))
    def test_inside_the_ball(self, config, shape, scale, seed):
        clean = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
        perturbed = attack(**config, seed=seed).perturb(clean, rough)
        # Exactly, as 64 bits see it, but for rounding in the sum of squares.
        assert lengths(perturbed.double() - clean.double(), config["norm_type"]).max() <= config["epsilon"] + 1e-6
        assert perturbed.shape == clean.shape
        assert perturbed.isfinite().all()
        if config["epsilon"] == 0:
            assert torch.equal(perturbed, clean)

    @settings(max_examples=100)
    @given(configs, shapes, st.sampled_from([(-1.0, 1.0), (None, 0.3), (-0.2, None)]), st.integers(0, 2**20))
    def test_inside_the_range(self, config, shape, bounds, seed):
        low, high = bounds
        clean = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1
        clean = clean.clamp(low, high)
        perturbed = attack(**config, clip_min=low, clip_max=high, seed=seed).perturb(clean, rough)
        assert low is None or perturbed.min() >= low
        assert high is None or perturbed.max() <= high
        assert lengths(perturbed.double() - clean.double(), config["norm_type"]).max() <= config["epsilon"] + 1e-6

    def test_the_range_holds_in_spite_of_rounding(self):
        clean = torch.linspace(0.1, 10, 1_000).unsqueeze(1)
        low = attack(epsilon=20.0, attack_lr=20.0, clip_min=0.1).perturb(clean, lambda x: -x.sum())
        high = attack(epsilon=20.0, attack_lr=20.0, clip_max=0.1).perturb(-clean, lambda x: x.sum())
        bound = torch.full_like(clean, 0.1)
        assert (low >= bound).all()
        assert (high <= bound).all()
        torch.testing.assert_close(low, bound, atol=1e-5, rtol=0)
        torch.testing.assert_close(high, bound, atol=1e-5, rtol=0)

    def test_what_is_out_of_range_goes_no_further(self):
        clean = torch.tensor([[-3.0, 0.0, 3.0]])
        away = attack(epsilon=0.5, clip_min=-1, clip_max=1, attack_lr=1.0).perturb(clean, lambda x: x.abs().sum())
        back = attack(epsilon=0.5, clip_min=-1, clip_max=1, attack_lr=1.0).perturb(clean, lambda x: -x.abs().sum())
        assert (away[0, 0], away[0, 2]) == (-3, 3)
        torch.testing.assert_close(back[0, [0, 2]], torch.tensor([-2.5, 2.5]))

    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("norm", NORMS)
    @pytest.mark.parametrize("batch", [1, 100])
    def test_is_without_a_graph_and_leaves_parameters_alone(self, method, norm, batch):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        with torch.no_grad():
            network[0].weight.grad = torch.randn(8, 4)
            network[2].bias.grad = torch.full((1,), math.nan)
        before = [None if p.grad is None else p.grad.clone() for p in network.parameters()]
        clean = torch.randn(batch, 4, requires_grad=True)
        perturbed = attack(norm_type=norm, attack_method=method).perturb(clean, lambda x: network(x).squeeze(1))
        assert not perturbed.requires_grad
        assert perturbed.grad_fn is None
        assert clean.grad is None
        for p, old in zip(network.parameters(), before, strict=True):
            assert p.requires_grad
            assert (p.grad is None) == (old is None)
            assert old is None or p.grad.numpy().tobytes() == old.numpy().tobytes()

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    @pytest.mark.parametrize("norm", NORMS)
    @pytest.mark.parametrize("method", METHODS)
    def test_the_ball_is_as_round_in_any_precision(self, method, norm, dtype):
        clean = torch.randn(50, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
        moved = attack(epsilon=0.1, norm_type=norm, attack_method=method).perturb(clean, lambda x: x.square().sum())
        assert moved.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert 0.09 < lengths(moved.double() - clean.double(), norm).max() <= 0.1 + 1e-6

    def test_works_where_gradients_are_off(self):
        with torch.no_grad():
            perturbed = attack().perturb(torch.zeros(2, 3), lambda x: x.sum())
            assert (perturbed > 0).all()
            assert not torch.is_grad_enabled()

    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("norm", NORMS)
    def test_draws_from_a_generator_of_its_own(self, method, norm):
        torch.manual_seed(7)
        before = torch.get_rng_state()
        clean = torch.zeros(4, 3)
        settings = {"attack_method": method, "norm_type": norm, "attack_lr": 1e-3}
        first, second, other = (attack(seed=seed, **settings) for seed in (1, 1, 2))
        one, same, differs = (each.perturb(clean, rough) for each in (first, second, other))
        assert torch.equal(torch.get_rng_state(), before)
        assert torch.equal(one, same)
        assert method == "fgsm" or not torch.equal(one, differs)
        assert method == "fgsm" or not torch.equal(first.perturb(clean, rough), one)


class TestSearch:
    @pytest.mark.parametrize("norm", NORMS)
    @pytest.mark.parametrize("random_init", [True, False])
    def test_pgd_never_falls_below_where_fgsm_starts(self, norm, random_init):
        """Of a convex function, every step of projected ascent is one up, whatever its length."""
        torch.manual_seed(0)
        matrix = torch.randn(6, 6)

        def convex(x):
            return ((x @ matrix).square().sum(1) + x.sum(1).exp()).double()

        clean = torch.randn(50, 6)
        for lr in (0.01, 0.1, 1.0):
            arguments = {"epsilon": 0.3, "norm_type": norm, "random_init": random_init, "attack_lr": lr}
            starts = attack(**arguments).random(clean) if random_init else clean
            values = [convex(starts)]
            for steps in range(1, 6):
                values.append(convex(attack(**arguments, attack_steps=steps).perturb(clean, convex)))
                assert (values[-1] >= values[-2] * (1 - 1e-5)).all()
            assert (values[-1] > values[0]).all()

    @pytest.mark.parametrize("method", METHODS)
    def test_finds_the_corner_of_a_slope(self, method):
        slope = torch.tensor([1.0, -2.0, 0.5])
        clean = torch.randn(20, 3)
        settings = {"epsilon": 0.1, "attack_lr": 0.05, "attack_steps": 6, "attack_method": method}
        found = attack(**settings).perturb(clean, lambda x: x @ slope)
        torch.testing.assert_close(found, clean + 0.1 * slope.sign())
        settings |= {"norm_type": "l2", "attack_steps": 30, "random_init": method != "fgsm"}
        found = attack(**settings).perturb(clean, lambda x: x @ slope)
        # Noise that fades still moves SGLD's last steps.
        close = 0.02 if method == "sgld" else 1e-3
        torch.testing.assert_close(found, clean + 0.1 * slope / slope.norm(), atol=close, rtol=0)

    def test_more_steps_find_worse_places(self):
        torch.manual_seed(1)
        network = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
        for p in network.parameters():
            p.data.mul_(3)
        clean = torch.randn(200, 5)
        gains = []
        for method, steps in (("fgsm", 1), ("pgd", 20)):
            settings = {"epsilon": 0.5, "attack_lr": 0.1, "attack_steps": steps, "attack_method": method}
            with torch.no_grad():
                gains.append((network(attack(**settings).perturb(clean, network)) - network(clean)).mean())
        assert gains[1] > 1.1 * gains[0] > 0

    @pytest.mark.parametrize("method", METHODS)
    def test_a_distance_from_the_clean_point_starts_elsewhere(self, method):
        clean = torch.randn(10, 3)
        searcher = attack(random_init=False, attack_method=method)
        stuck = searcher.perturb(clean, lambda x: (x - clean).square().sum(1))
        moved = searcher.perturb(clean, lambda x: (x - clean).square().sum(1), is_flat_at_clean=True)
        if method != "sgld":
            assert torch.equal(stuck, clean)
        assert lengths(moved - clean, "linf").min() > 0.05

    @pytest.mark.parametrize("norm", NORMS)
    def test_random_points_fill_the_ball(self, norm):
        points = attack(epsilon=2.0, norm_type=norm).random(torch.zeros(20_000, 2))
        assert abs(points.mean(0)).max() < 0.05
        # In two dimensions, a quarter of a ball is within half of its radius.
        assert (lengths(points, norm) < 1).float().mean() == pytest.approx(0.25, abs=0.02)

    def test_steps_are_in_proportion_to_the_radius_in_force(self):
        slope = torch.ones(3)
        searcher = attack(epsilon=0.1, attack_lr=0.02, attack_steps=2, random_init=False)
        for size in (0.1, 0.5, torch.tensor(0.5), 0.0):
            found = searcher.perturb(torch.zeros(1, 3), lambda x: x @ slope, epsilon=size)
            torch.testing.assert_close(found, torch.full((1, 3), 0.4 * float(size)))

    @pytest.mark.parametrize("norm", NORMS)
    @pytest.mark.parametrize("method", METHODS)
    def test_the_scale_of_the_objective_does_not_matter(self, method, norm):
        """Not even beside noise: a power of two changes no bit."""
        settings, clean = {"attack_method": method, "norm_type": norm}, torch.zeros(5, 3)
        found = [attack(**settings).perturb(clean, lambda x, f=f: f * rough(x + 1)) for f in (1, 2**-20, 2**20)]
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])

    def test_gradients_that_are_not_numbers_move_nothing(self):
        clean = torch.zeros(1, 2)
        found = attack(random_init=False).perturb(clean, lambda x: x[:, 0].sqrt().sum() * 0 + x[:, 1].sum())
        assert found.isfinite().all()
        assert found[0, 1] > 0

    def test_an_objective_that_sees_nothing_is_refused(self):
        with pytest.raises(ValueError, match="does not depend on the observation"):
            attack().perturb(torch.zeros(1, 2), lambda x: torch.ones(1))


class TestSpaces:
    def test_sequences_are_attacked_observation_by_observation(self):
        """Leading axes beyond the batch: the ball is around each step."""
        searcher = attack(FLAT, epsilon=0.3, norm_type="l2", attack_lr=0.2)
        clean = torch.randn(6, 4, 3)
        found = searcher.perturb(clean, lambda x: x.square().sum())
        assert lengths(found - clean, "l2", 2).flatten().tolist() == pytest.approx([0.3] * 24, abs=1e-5)

    @pytest.mark.parametrize("norm", NORMS)
    def test_images_move_in_units_of_what_the_policy_sees(self, norm):
        searcher = attack(IMAGE, epsilon=0.1, attack_lr=0.1, norm_type=norm)
        clean = torch.randint(0, 256, (2, 1, 36, 36), dtype=torch.uint8)
        found = searcher.perturb(clean, lambda x: x.float().sum())
        assert found.dtype == torch.float32
        assert (found.min(), found.max()) >= (0, 0)
        assert found.max() <= 255
        assert lengths(found / 255 - clean / 255, norm).max() <= 0.1 + 1e-6
        assert (found != clean).any()
        undivided = StatePerturbation(PerturbationConfig(epsilon=0.1), IMAGE, images_are_divided=False)
        assert lengths(undivided.perturb(clean, lambda x: x.float().sum()) - clean, "linf").max() <= 0.1 + 1e-6

    def test_boxes_of_a_dictionary_and_nothing_else(self):
        space = spaces.Dict(
            {"a": FLAT, "image": IMAGE, "choice": spaces.Discrete(3), "bits": spaces.MultiBinary(2), "unused": FLAT}
        )
        clean = {
            "a": torch.randn(5, 3),
            "image": torch.randint(0, 256, (5, 1, 36, 36), dtype=torch.uint8),
            "choice": torch.ones(5, dtype=torch.int64),
            "bits": torch.ones(5, 2, dtype=torch.int8),
            "unused": torch.zeros(5, 3),
        }
        searcher = attack(space, epsilon=0.1, random_init=False)
        found = searcher.perturb(clean, lambda x: x["a"].sum() + x["image"].mean())
        assert found["choice"] is clean["choice"]
        assert found["bits"] is clean["bits"]
        assert torch.equal(found["unused"], clean["unused"])
        torch.testing.assert_close(found["a"], clean["a"] + 0.09)
        assert (found["image"] >= clean["image"]).all()
        torch.testing.assert_close(searcher.norms(clean, found), torch.full((5,), 0.09))
        with pytest.raises(ValueError, match=r"lacks \['a'\]"):
            searcher.perturb({"image": clean["image"], "unused": clean["unused"]}, lambda x: x["image"].mean())

    def test_a_space_without_a_box_is_refused(self):
        with pytest.raises(ValueError, match=r"Discrete\(3\) can be perturbed: it has no Box"):
            attack(spaces.Discrete(3))

    @pytest.mark.parametrize("norm", NORMS)
    def test_directions_of_others_stay_in_the_ball(self, norm):
        space = spaces.Dict({"a": FLAT, "b": spaces.Box(-1, 1, (2, 2), np.float32)})
        clean = {"a": torch.zeros(4, 3), "b": torch.zeros(4, 2, 2)}
        searcher = attack(space, epsilon=0.5, norm_type=norm)
        moved = searcher.move(clean, torch.full((4, 7), 3.0))
        for part in moved.values():
            assert lengths(part, norm).tolist() == pytest.approx([0.5] * 4, abs=1e-5)
        for count in (6, 8):
            with pytest.raises(ValueError, match=f"there are {count} directions for the 7 numbers"):
                searcher.move(clean, torch.ones(4, count))
        one = searcher.move(clean, torch.eye(7)[:4] * 0.2)
        assert one["a"].tolist() == [*(torch.eye(3) * 0.1).tolist(), [0, 0, 0]]
        assert one["b"][3].flatten().tolist() == pytest.approx([0.1, 0, 0, 0])

    def test_directions_of_others_stay_in_range(self):
        searcher = attack(epsilon=0.5, clip_min=-0.1, clip_max=0.2)
        moved = searcher.move(torch.zeros(1, 2), torch.tensor([[1.0, -1.0]]))
        torch.testing.assert_close(moved, torch.tensor([[0.2, -0.1]]))
        assert searcher.statistics()["max_norm"].item() == pytest.approx(0.2)


class TestBookkeeping:
    def test_counts_attacks_and_passes(self):
        searcher = attack(epsilon=0.2, attack_steps=4, attack_lr=0.2)
        searcher.perturb(torch.zeros(5, 3), lambda x: x.sum())
        searcher.random(torch.zeros(7, 3))
        numbers = {name: value.item() for name, value in searcher.statistics().items()}
        assert (numbers["attacks"], numbers["observations"], numbers["gradients"]) == (2, 12, 4)
        assert numbers["max_norm"] == pytest.approx(0.2)
        assert 0.1 < numbers["mean_norm"] <= 0.2
        searcher.reset_statistics()
        assert not any(value.item() for value in searcher.statistics().values())

    def test_goes_on_where_it_was_saved(self):
        clean, first, second = torch.zeros(5, 3), attack(seed=1), attack(seed=2)
        first.perturb(clean, rough)
        second.load_state_dict(first.state_dict())
        assert torch.equal(first.perturb(clean, rough), second.perturb(clean, rough))
        assert first.statistics() == second.statistics()

    @pytest.mark.parametrize(
        "change",
        [
            {"counters": {}},
            {"generator": torch.zeros(3, dtype=torch.uint8)},
            {"generator": None},
            {"more": 1},
        ],
        ids=str,
    )
    def test_a_state_that_does_not_fit_changes_nothing(self, change):
        searcher = attack()
        searcher.perturb(torch.zeros(1, 2), rough)
        before = searcher.state_dict()
        with pytest.raises(ValueError, match=r"state|counters|generator"):
            searcher.load_state_dict({**attack(seed=5).state_dict(), **change})
        assert torch.equal(searcher.state_dict()["generator"], before["generator"])
        assert searcher.state_dict()["counters"] == before["counters"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epsilon": -0.1}, "Invalid epsilon: -0.1"),
        ({"epsilon": math.nan}, "Invalid epsilon: nan"),
        ({"attack_steps": 0}, "Invalid attack_steps: 0"),
        ({"attack_steps": 2.5}, "Invalid attack_steps: 2.5"),
        ({"attack_lr": 0.0}, "Invalid attack_lr: 0.0"),
        ({"random_init": 1}, "Invalid random_init: 1"),
        ({"norm_type": "l1"}, "Invalid norm_type: 'l1'; must be one of 'linf', 'l2'"),
        ({"attack_method": "cw"}, "Unknown attack method 'cw'; use one of pgd, fgsm, sgld"),
        ({"clip_min": math.inf}, "Invalid clip_min"),
        ({"clip_min": 1.0, "clip_max": 1.0}, "clip_min=1.0 must be below clip_max=1.0"),
    ],
    ids=str,
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        PerturbationConfig(**settings)


@pytest.mark.parametrize("radius", [-0.1, math.nan, math.inf])
def test_a_radius_that_is_none_is_refused(radius):
    searcher, clean = attack(), torch.zeros(1, 2)
    calls = [
        lambda: searcher.perturb(clean, lambda x: x.sum(), epsilon=radius),
        lambda: searcher.random(clean, epsilon=radius),
        lambda: searcher.move(clean, clean, epsilon=radius),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="Invalid epsilon"):
            call()


def test_settings_of_another_kind_are_refused():
    with pytest.raises(TypeError, match="config must be a PerturbationConfig"):
        StatePerturbation({"epsilon": 0.1})


def test_the_defaults_are_those_that_users_rely_on():
    config = PerturbationConfig()
    assert vars(config) == {
        "epsilon": 0.075,
        "attack_steps": 3,
        "attack_lr": 0.03,
        "random_init": True,
        "norm_type": "linf",
        "clip_min": None,
        "clip_max": None,
        "attack_method": "pgd",
    }
