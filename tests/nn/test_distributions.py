"""Action distributions: equal to those of torch, sampled as they say, stable, and fit for their environments."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributions as oracle

from driftproof.nn.distributions import (
    Bernoulli,
    Categorical,
    Gaussian,
    MultiCategorical,
    SquashedGaussian,
    distribution_for,
)

# None of these bounds is a float32.
ODD_BOX = spaces.Box(np.array([-1.1, 0.1]), np.array([0.3, 7.7]), dtype=np.float64)
SPACES = {
    "Discrete": spaces.Discrete(5),
    "Discrete from 3": spaces.Discrete(2, start=3),
    "MultiDiscrete": spaces.MultiDiscrete([3, 5, 1, 4], start=[0, 0, 7, -2]),
    "MultiDiscrete even": spaces.MultiDiscrete([3, 3]),
    "MultiDiscrete 2d": spaces.MultiDiscrete([[2, 3], [2, 2]]),
    "MultiBinary": spaces.MultiBinary(3),
    "MultiBinary 2d": spaces.MultiBinary((2, 2)),
    "Box": spaces.Box(-1.0, 1.0, (2,)),
    "Box 2d": spaces.Box(-0.5, 2.0, (2, 2)),
    "Box 0d": spaces.Box(-1.0, 1.0, ()),
    "Box without bounds": spaces.Box(-np.inf, np.inf, (2,)),
    "Box of float64": ODD_BOX,
    "squashed": spaces.Box(-0.5, 2.0, (2,)),
    "squashed 2d": spaces.Box(-1.0, 1.0, (2, 2)),
    "squashed float64": ODD_BOX,
}
SQUASHED = [name for name in SPACES if name.startswith("squashed")]

every_space = pytest.mark.parametrize("name", SPACES)
leading_axes = st.lists(st.integers(1, 3), max_size=3)
seeds = st.integers(0, 999)
spreads = st.sampled_from([0.1, 1.0, 3.0])


def made(name):
    return distribution_for(SPACES[name], squash_output=name in SQUASHED)


def drawn(distribution, *leading, spread=1.0, dtype=torch.float64):
    """Random parameters."""
    return (spread * torch.randn(*leading, distribution.size, dtype=dtype)).requires_grad_()


def sampled(distribution, parameters):
    return distribution.sample(parameters, distribution.noise(*parameters.shape[:-1], dtype=parameters.dtype))


def parts(distribution, parameters):
    """What torch has for it, as independent parts; Gaussians are not squashed."""
    if isinstance(distribution, Categorical):
        return [oracle.Categorical(logits=parameters)]
    if isinstance(distribution, MultiCategorical):
        options = (~distribution.padding).sum(-1).tolist()
        return [oracle.Categorical(logits=p) for p in parameters.split(options, -1)]
    if isinstance(distribution, Bernoulli):
        return [oracle.Independent(oracle.Bernoulli(logits=parameters), 1)]
    mean, log_std = parameters.chunk(2, -1)
    return [oracle.Independent(oracle.Normal(mean, log_std.exp()), 1)]


def log_prob_of_parts(distribution, parameters, actions):
    independent = parts(distribution, parameters)
    if isinstance(distribution, MultiCategorical):
        return sum(part.log_prob(actions[..., i]) for i, part in enumerate(independent))
    if isinstance(distribution, SquashedGaussian):
        low, high = distribution.low.double(), distribution.high.double()
        # It remembers what it has squashed, and need not undo it.
        tanh = oracle.TanhTransform(cache_size=1)
        affine = oracle.AffineTransform((low + high) / 2, (high - low) / 2, event_dim=1, cache_size=1)
        return oracle.TransformedDistribution(independent[0], [tanh, affine]).log_prob(affine(tanh(actions)))
    return independent[0].log_prob(actions)


def kl_of_parts(distribution, old, new):
    pairs = zip(parts(distribution, old), parts(distribution, new), strict=True)
    return sum(oracle.kl_divergence(before, after) for before, after in pairs)


def assert_same(ours, theirs, *parameters):
    """Values and gradients."""
    torch.testing.assert_close(ours, theirs, atol=1e-7, rtol=1e-7)
    gradients = (torch.autograd.grad(r.sum(), parameters, materialize_grads=True) for r in (ours, theirs))
    torch.testing.assert_close(*gradients, atol=1e-7, rtol=1e-7)


@every_space
class TestAgainstTorch:
    @settings(max_examples=30)
    @given(leading=leading_axes, seed=seeds, spread=spreads)
    def test_log_prob(self, name, leading, seed, spread):
        torch.manual_seed(seed)
        distribution = made(name)
        parameters = drawn(distribution, *leading, spread=spread)
        actions = sampled(distribution, drawn(distribution, *leading).detach())
        log_prob = distribution.log_prob(parameters, actions)
        assert log_prob.shape == tuple(leading)
        assert_same(log_prob, log_prob_of_parts(distribution, parameters, actions), parameters)

    @settings(max_examples=30)
    @given(leading=leading_axes, seed=seeds, spread=spreads)
    def test_entropy(self, name, leading, seed, spread):
        torch.manual_seed(seed)
        distribution = made(name)
        parameters = drawn(distribution, *leading, spread=spread)
        entropy = distribution.entropy(parameters)
        assert entropy.shape == tuple(leading)
        if name in SQUASHED:
            return  # torch has none
        assert_same(entropy, sum(part.entropy() for part in parts(distribution, parameters)), parameters)

    @settings(max_examples=30)
    @given(leading=leading_axes, seed=seeds, spread=spreads)
    def test_kl(self, name, leading, seed, spread):
        torch.manual_seed(seed)
        distribution = made(name)
        old, new = drawn(distribution, *leading, spread=spread), drawn(distribution, *leading, spread=spread)
        kl = distribution.kl(old, new)
        assert kl.shape == tuple(leading)
        assert_same(kl, kl_of_parts(distribution, old, new), old, new)

    def test_kl_of_equals_is_zero(self, name):
        distribution = made(name)
        parameters = drawn(distribution, 6, dtype=torch.float32)
        assert distribution.kl(parameters, parameters).abs().max() == 0


@every_space
class TestSamples:
    def test_agree_with_entropy_and_kl(self, name):
        distribution = made(name)
        old, new = drawn(distribution, dtype=torch.float32).detach(), drawn(distribution, dtype=torch.float32).detach()
        many = old.expand(200_000, -1)
        actions = sampled(distribution, many)
        surprise = -distribution.log_prob(many, actions)
        assert_mean_is(surprise, distribution.entropy(old))
        assert_mean_is(-distribution.log_prob(new.expand_as(many), actions) - surprise, distribution.kl(old, new))

    def test_follow_from_the_noise_alone(self, name):
        distribution = made(name)
        parameters, noise = drawn(distribution, 4, 3, dtype=torch.float32), distribution.noise(4, 3)
        actions = distribution.sample(parameters, noise)
        assert actions.shape == (4, 3, *distribution.action_shape)
        assert actions.dtype == distribution.action_dtype
        for step, env in itertools.product(range(4), range(3)):
            one = distribution.sample(parameters[step, env], noise[step, env])
            torch.testing.assert_close(one, actions[step, env], rtol=0, atol=0)

    def test_noise_is_that_of_the_default_generator(self, name):
        distribution = made(name)
        first, second = distribution.noise(7, 3), distribution.noise(7, 3)
        assert not torch.equal(first, second)
        torch.manual_seed(0)
        torch.testing.assert_close(distribution.noise(7, 3), first, rtol=0, atol=0)
        assert distribution.noise(2, dtype=torch.float64).dtype == torch.float64

    def test_environments_accept_them(self, name):
        distribution, space = made(name), SPACES[name]
        parameters = drawn(distribution, 200, spread=10.0, dtype=torch.float32)
        for actions in (sampled(distribution, parameters), distribution.mode(parameters)):
            given = distribution.to_env(actions).detach().numpy()
            assert given.shape == (200, *space.shape)
            assert all(space.contains(np.asarray(action)) for action in given)
        assert distribution.to_env(actions[0]).shape == space.shape

    def test_mode_is_the_most_probable(self, name):
        distribution = made(name)
        if name in SQUASHED:
            distribution = Gaussian(SPACES[name])  # before squashing
        parameters = drawn(distribution, 50, dtype=torch.float32).detach()
        many = parameters.expand(200, -1, -1)
        best = distribution.log_prob(parameters, distribution.mode(parameters))
        assert (distribution.log_prob(many, sampled(distribution, many)) <= best).all()


def assert_mean_is(values, expected):
    """Within five standard errors."""
    error = values.std() / math.sqrt(len(values))
    assert (values.mean() - expected).abs() <= 5 * error + 1e-5


class TestFrequencies:
    def test_options_are_as_frequent_as_probable(self):
        distribution = Categorical(spaces.Discrete(4))
        parameters = torch.tensor([0.0, 1.0, -3.0, 2.0])
        actions = sampled(distribution, parameters.expand(200_000, -1))
        torch.testing.assert_close(actions.bincount() / 200_000, parameters.softmax(0), atol=0.005, rtol=0)

    def test_choices_of_different_size(self):
        distribution = MultiCategorical(spaces.MultiDiscrete([2, 4, 1]))
        parameters = torch.tensor([1.0, 0.0, 0.0, 1.0, -3.0, 2.0, -9.0])
        actions = sampled(distribution, parameters.expand(200_000, -1))
        for i, row in enumerate(parameters.split([2, 4, 1])):
            frequencies = actions[:, i].bincount() / 200_000
            torch.testing.assert_close(frequencies, row.softmax(0), atol=0.005, rtol=0)
        # One choice says nothing of the other.
        assert torch.corrcoef(actions[:, :2].T.float())[0, 1].abs() < 0.01

    def test_switches(self):
        distribution = Bernoulli(spaces.MultiBinary(3))
        parameters = torch.tensor([0.0, 2.0, -4.0])
        actions = sampled(distribution, parameters.expand(200_000, -1))
        assert set(actions.unique().tolist()) == {0.0, 1.0}
        torch.testing.assert_close(actions.mean(0), parameters.sigmoid(), atol=0.005, rtol=0)

    def test_numbers(self):
        distribution = Gaussian(spaces.Box(-1.0, 1.0, (2,)))
        parameters = torch.tensor([1.0, -2.0, 0.5, -1.0])
        actions = sampled(distribution, parameters.expand(200_000, -1))
        torch.testing.assert_close(actions.mean(0), torch.tensor([1.0, -2.0]), atol=0.02, rtol=0)
        torch.testing.assert_close(actions.std(0), torch.tensor([0.5, -1.0]).exp(), atol=0.02, rtol=0)
        assert torch.corrcoef(actions.T)[0, 1].abs() < 0.01


@pytest.mark.parametrize("name", ["Discrete", "MultiDiscrete", "MultiDiscrete even", "MultiBinary"])
def test_extreme_parameters_stay_finite(name):
    distribution = made(name)
    rows = list(itertools.product([-1e4, 0.0, 1e4], repeat=3))
    parameters = torch.tensor(rows).repeat(1, distribution.size)[:, : distribution.size].requires_grad_()
    other = parameters.detach().flip(0).requires_grad_()
    actions = sampled(distribution, other.detach())
    results = [
        distribution.log_prob(parameters, actions),
        distribution.entropy(parameters),
        distribution.kl(parameters, other),
    ]
    for result in results:
        assert result.isfinite().all()
        gradients = torch.autograd.grad(result.sum(), (parameters, other), materialize_grads=True)
        assert all(gradient.isfinite().all() for gradient in gradients)
    assert distribution.noise(1000).isfinite().all()
    # Nothing is sampled that cannot be.
    assert (distribution.log_prob(parameters, sampled(distribution, parameters)) > -50).all()


@pytest.mark.parametrize("name", ["Discrete", "MultiDiscrete"])
def test_noise_is_finite_even_where_a_wait_is_zero(name, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "exponential_", torch.Tensor.zero_)
    assert made(name).noise(3).isfinite().all()


class TestSquashed:
    def test_density_integrates_to_one(self):
        distribution = SquashedGaussian(spaces.Box(-1.0, 3.0, (1,))).double()
        raw = torch.linspace(-12, 12, 20_001, dtype=torch.float64).unsqueeze(-1)
        given = distribution.to_env(raw).squeeze(-1)
        for mean, log_std in ((0.0, 0.0), (0.7, -1.0), (-2.0, 0.4)):
            parameters = torch.tensor([mean, log_std], dtype=torch.float64)
            density = distribution.log_prob(parameters.expand(len(raw), -1), raw).exp()
            assert torch.trapezoid(density, given).item() == pytest.approx(1.0, abs=1e-4)

    def test_far_actions_have_finite_densities(self):
        distribution = SquashedGaussian(spaces.Box(-1.0, 1.0, (1,)))
        actions = torch.tensor([[-1e3], [-50.0], [50.0], [1e3]])
        assert distribution.log_prob(torch.zeros(4, 2), actions).isfinite().all()
        assert distribution.to_env(actions).squeeze(-1).tolist() == [-1.0, -1.0, 1.0, 1.0]

    def test_to_env_is_an_affine_tanh(self):
        distribution = SquashedGaussian(spaces.Box(np.float32([-1.0, 2.0]), np.float32([0.0, 6.0])))
        actions = torch.randn(50, 2)
        expected = torch.tensor([-0.5, 4.0]) + torch.tensor([0.5, 2.0]) * actions.tanh()
        torch.testing.assert_close(distribution.to_env(actions), expected)

    def test_rounding_never_leaves_the_bounds(self):
        low, high = torch.randn(2, 1000).sort(0).values
        distribution = SquashedGaussian(spaces.Box(low.numpy(), high.numpy()))
        for actions in (torch.randn(100, 1000) * 5, torch.full((1, 1000), 50.0)):
            given = distribution.to_env(actions)
            assert ((low <= given) & (given <= high)).all()

    @pytest.mark.parametrize(("std", "tolerance"), [(0.01, 2e-6), (0.5, 2e-6), (1.0, 5e-6), (2.0, 2e-4), (3.0, 6e-3)])
    def test_entropy_and_its_gradient(self, std, tolerance):
        distribution = SquashedGaussian(spaces.Box(-0.5, 2.0, (1,)))
        means = torch.linspace(-5, 5, 41, dtype=torch.float64)
        parameters = torch.stack((means, torch.full_like(means, math.log(std))), -1).requires_grad_()
        # The same integral on a grid that leaves nothing to be desired.
        nodes = torch.linspace(-10, 10, 4001, dtype=torch.float64)
        mean, log_std = parameters.unsqueeze(-1).unbind(1)
        actions = mean + log_std.exp() * nodes
        slope = math.log(2.5 / 2) + 2 * (math.log(2) - torch.logaddexp(actions, -actions))
        expected = 0.5 + 0.5 * math.log(2 * math.pi) + parameters[:, 1]
        expected = expected + (slope * (-nodes.square() / 2).softmax(0)).sum(-1)
        ours = distribution.entropy(parameters)
        torch.testing.assert_close(ours, expected, atol=tolerance, rtol=0)
        gradients = [torch.autograd.grad(entropy.sum(), parameters)[0] for entropy in (ours, expected)]
        torch.testing.assert_close(*gradients, atol=tolerance, rtol=0)

    @pytest.mark.parametrize(
        "space",
        [
            spaces.Box(-np.inf, np.inf, (2,)),
            spaces.Box(np.float32([0.0, 0.0]), np.float32([1.0, np.inf])),
            spaces.Box(-3e38, 3e38, (1,)),
            spaces.Box(1.0, 1.0, (1,)),
        ],
    )
    def test_bounds_must_be_finite(self, space):
        with pytest.raises(ValueError, match=r"needs an action space with finite bounds.*not Box\("):
            distribution_for(space, squash_output=True)


class TestToEnv:
    def test_boxes_are_clipped_and_shaped(self):
        distribution = Gaussian(
            spaces.Box(np.float32([[-1.0, 0.0], [-3.0, -1.0]]), np.float32([[1.0, 2.0], [0.0, 1.0]]))
        )
        actions = torch.tensor([[-2.0, 1.0, 5.0, 0.5], [0.5, -1.0, -4.0, 3.0]])
        assert distribution.to_env(actions).tolist() == [[[-1.0, 1.0], [0.0, 0.5]], [[0.5, 0.0], [-3.0, 1.0]]]

    def test_counting_starts_where_the_space_does(self):
        assert made("Discrete from 3").to_env(torch.tensor([0, 1])).tolist() == [3, 4]
        assert made("MultiDiscrete").to_env(torch.tensor([2, 4, 0, 3])).tolist() == [2, 4, 7, 1]

    def test_environments_get_the_types_of_their_spaces(self):
        for name in ("Discrete", "MultiDiscrete", "MultiBinary", "Box"):
            distribution = made(name)
            given = distribution.to_env(sampled(distribution, torch.zeros(1, distribution.size))).numpy()
            assert given.dtype == SPACES[name].dtype


@every_space
def test_actions_are_never_broadcast(name):
    distribution = made(name)
    parameters = torch.zeros(5, distribution.size)
    actions = distribution.mode(parameters)
    for wrong in (actions[:1], actions[:3], actions.unsqueeze(0), actions.unsqueeze(1), actions.unsqueeze(-1)):
        with pytest.raises(ValueError, match="actions have shape"):
            distribution.log_prob(parameters, wrong)


@every_space
def test_nothing_waits_for_the_device(name):
    # Tensors of the meta device have no values: reading one raises. And no constant has stayed behind.
    distribution = made(name).to("meta")
    parameters = torch.empty(4, distribution.size, device="meta", requires_grad=True)
    with torch.no_grad():
        actions = distribution.sample(parameters, distribution.noise(4, device="meta"))
        distribution.to_env(actions)
        distribution.mode(parameters)
    loss = distribution.log_prob(parameters, actions) + distribution.entropy(parameters)
    (loss + distribution.kl(torch.empty_like(parameters), parameters)).sum().backward()
    assert parameters.grad.device.type == "meta"


@every_space
def test_there_is_nothing_to_save(name):
    assert not made(name).state_dict()
    assert not list(made(name).parameters())


@pytest.mark.parametrize(
    ("space", "kind"),
    [
        (spaces.Discrete(2), Categorical),
        (spaces.MultiDiscrete([2, 3]), MultiCategorical),
        (spaces.MultiBinary(2), Bernoulli),
        (spaces.Box(-1.0, 1.0, (2,)), Gaussian),
    ],
)
def test_kinds_of_spaces(space, kind):
    assert type(distribution_for(space)) is kind
    if kind is Gaussian:
        assert type(distribution_for(space, squash_output=True)) is SquashedGaussian
    else:
        with pytest.raises(ValueError, match=r"squash_output=True needs a Box as action space, not (Multi)?[DB]"):
            distribution_for(space, squash_output=True)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Tuple((spaces.Discrete(2), spaces.Discrete(3))),
        spaces.Dict({"a": spaces.Discrete(2)}),
        spaces.Text(3),
        spaces.Sequence(spaces.Discrete(2)),
    ],
)
def test_spaces_without_a_distribution(space):
    with pytest.raises(TypeError, match=r"Unsupported action space: \w+\(.*must be Discrete, MultiDiscrete"):
        distribution_for(space)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every_space
def test_cuda_graphs(name):
    distribution = made(name).cuda()
    parameters = torch.zeros(4, distribution.size, device="cuda", requires_grad=True)
    old, noise = torch.randn(4, distribution.size).cuda(), distribution.noise(4, device="cuda")

    def everything():
        actions = distribution.sample(old, noise)
        loss = distribution.log_prob(parameters, actions) + distribution.entropy(parameters)
        loss = loss + distribution.kl(old, parameters)
        return distribution.to_env(actions), loss.detach(), torch.autograd.grad(loss.sum(), parameters)[0]

    with torch.cuda.stream(torch.cuda.Stream()):
        everything()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = everything()
    with torch.no_grad():
        parameters.copy_(torch.randn(4, distribution.size))
    graph.replay()
    torch.testing.assert_close(captured, everything())


class TestUniformDivergence:
    @pytest.mark.parametrize("name", [name for name in SPACES if "Discrete" in name or "Binary" in name])
    def test_is_the_divergence_of_the_uniform_distribution(self, name):
        distribution = made(name)
        parameters = drawn(distribution, 4, 3, spread=3.0)
        whole = torch.zeros(4, 3, dtype=torch.float64)
        for now, uniform in zip(
            parts(distribution, parameters), parts(distribution, torch.zeros_like(parameters)), strict=True
        ):
            whole += oracle.kl_divergence(uniform, now)
        torch.testing.assert_close(distribution.uniform_divergence(parameters), whole, rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize(
        "name", ["Discrete", "MultiDiscrete", "MultiBinary", "Box", "Box without bounds", "squashed"]
    )
    def test_its_gradient_does_not_vanish_at_certainty(self, name):
        distribution = made(name)
        certain = torch.full((distribution.size,), -30.0)
        if name == "Discrete":
            certain[0] = 30.0
        elif name == "MultiDiscrete":
            certain[torch.tensor([0, 3, 8, 9])] = 30.0
        certain.requires_grad_()
        (gradient,) = torch.autograd.grad(distribution.uniform_divergence(certain), certain)
        assert gradient.isfinite().all()
        assert gradient.abs().max() <= 1
        # A choice of one option has no gradient, and means without bounds none either.
        moving = {"MultiDiscrete": 12, "Box without bounds": 2}.get(name, distribution.size)
        assert (gradient.abs() > 0.1).sum() == moving

    @pytest.mark.parametrize("name", ["Box", "Box 2d", "Box of float64", "squashed"])
    def test_of_a_box_is_zero_where_it_explores(self, name):
        distribution = made(name)
        low, high = (-1, 1) if name in SQUASHED else (distribution.low, distribution.high)
        middle = (torch.as_tensor(low) + high).expand(distribution.dim) / 2
        inside = torch.cat((middle, torch.zeros(distribution.dim)))
        assert distribution.uniform_divergence(inside) == 0
        assert distribution.uniform_divergence(inside - 20) > 20
