"""Value heads: what they say of a distribution, what they learn, how they are clipped and rescaled."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from driftproof.nn.heads import CategoricalHead, QuantileHead, Scale

HEADS = [QuantileHead, CategoricalHead]
MOMENT_MODES = ["mean_only", "mean_and_variance"]


def spread_evenly(distribution, count=10_000):
    """Returns that stand for equal shares of a distribution."""
    return distribution.icdf((torch.arange(count) + 0.5) / count)


NORMAL = spread_evenly(torch.distributions.Normal(0.0, 1.0))
GUMBEL_SCALE = math.sqrt(6) / math.pi
UNIT_VARIANCE = {
    "normal": NORMAL,
    "skewed": spread_evenly(torch.distributions.Gumbel(-0.577216 * GUMBEL_SCALE, GUMBEL_SCALE)),
    "two peaks": torch.cat((-1.2 + 0.5 * NORMAL[::10].repeat(3), 0.7 + 0.5 * NORMAL[::10].repeat(7))),
}
SHARP_EDGE = NORMAL.exp() / 2 - 1


def fitted(head, returns):
    """What a head predicts at the minimum of its loss; its features are constant, so it learns one distribution."""
    features = torch.ones(1, 1)
    optimizer = torch.optim.LBFGS(head.parameters(), max_iter=200, tolerance_grad=1e-7, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = head.loss(head(features).expand(len(returns), -1), returns).mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    return head(features)[0].detach()


def coverage(returns, quantiles):
    return (returns.unsqueeze(1) <= quantiles).float().mean(0)


def peak(head, centre, width):
    """A prediction of roughly normal returns."""
    if isinstance(head, QuantileHead):
        return centre.unsqueeze(-1) + width.unsqueeze(-1) * torch.distributions.Normal(0.0, 1.0).icdf(head.levels)
    return -((head.support - centre.unsqueeze(-1)) / width.unsqueeze(-1)).square() / 2


@pytest.mark.parametrize("name", UNIT_VARIANCE)
class TestCalibration:
    def test_quantiles_cover_what_they_say(self, name):
        head = QuantileHead(1)
        quantiles = head.quantiles(fitted(head, UNIT_VARIANCE[name]))
        assert (coverage(UNIT_VARIANCE[name], quantiles) - head.levels).abs().max() < 0.02

    def test_cvar_is_that_of_the_returns(self, name):
        head = QuantileHead(1)
        returns = UNIT_VARIANCE[name].sort().values
        prediction = fitted(head, returns)
        for alpha in (0.1, 0.25, 1.0):
            expected = returns[: int(alpha * len(returns))].mean()
            assert (head.cvar(prediction, alpha) - expected).abs() < 0.05 * max(expected.abs(), returns.std())


def test_quantiles_are_learned_from_minibatches():
    head = QuantileHead(1)
    features = torch.ones(256, 1)
    optimizer = torch.optim.Adam(head.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, total_iters=3000)
    for _ in range(3000):
        optimizer.zero_grad()
        head.loss(head(features), torch.randn(256)).mean().backward()
        optimizer.step()
        schedule.step()
    assert (coverage(NORMAL, head.quantiles(head(features[0]))) - head.levels).abs().max() < 0.02


def test_sharp_edges_shift_quantiles_by_less_than_kappa():
    head = QuantileHead(1)
    quantiles = head.quantiles(fitted(head, SHARP_EDGE))
    truth = SHARP_EDGE.quantile(head.levels)
    assert (quantiles - truth).abs().max() < head.huber_kappa
    # As the docstring warns; the minimum of the expected loss, integrated with SciPy, is off by 0.0504.
    assert (coverage(SHARP_EDGE, quantiles) - head.levels).abs().max().item() == pytest.approx(0.0504, abs=1e-3)


@pytest.mark.parametrize("head_class", HEADS)
class TestEveryHead:
    def test_a_batch_of_targets_is_never_broadcast(self, head_class):
        head = head_class(3)
        prediction = head(torch.randn(5, 3))
        for shape in ((5, 1), (1, 5), (1,), ()):
            with pytest.raises(ValueError, match="targets have shape"):
                head.loss(prediction, torch.zeros(shape))
        assert head.loss(prediction, torch.zeros(5)).shape == (5,)

    def test_leading_axes_are_samples(self, head_class):
        head = head_class(3)
        features, target = torch.randn(4, 5, 3), torch.randn(4, 5)
        prediction = head(features)
        assert prediction.shape == (4, 5, head.outputs)
        for result in (
            head.mean(prediction),
            head.std(prediction),
            head.cvar(prediction, 0.3),
            head.loss(prediction, target),
        ):
            assert result.shape == (4, 5)
        row = head(features[2])
        torch.testing.assert_close(head.loss(row, target[2]), head.loss(prediction, target)[2])
        torch.testing.assert_close(head.cvar(row, 0.3), head.cvar(prediction, 0.3)[2])

    def test_moments_are_those_of_the_distribution(self, head_class):
        head = head_class(1)
        prediction = peak(head, torch.tensor([1.0, -2.0]), torch.tensor([2.0, 0.8]))
        torch.testing.assert_close(head.mean(prediction), torch.tensor([1.0, -2.0]), atol=1e-3, rtol=0)
        # The outermost of 32 quantiles stand for the tails.
        torch.testing.assert_close(head.std(prediction), torch.tensor([2.0, 0.8]), atol=0, rtol=0.03)

    def test_cvar_of_all_is_the_mean_and_worse_shares_are_worse(self, head_class):
        head = head_class(3)
        prediction = 3 * torch.randn(7, head.outputs)
        torch.testing.assert_close(head.cvar(prediction, 1.0), head.mean(prediction), atol=1e-4, rtol=1e-4)
        values = torch.stack([head.cvar(prediction, a) for a in (0.05, 0.2, 0.5, 0.9, 1.0)])
        assert (values.diff(dim=0) >= -1e-5).all()

    @pytest.mark.parametrize("alpha", [0.0, -0.1, 1.1, math.nan])
    def test_shares_that_are_none(self, head_class, alpha):
        head = head_class(3)
        with pytest.raises(ValueError, match="Invalid alpha"):
            head.cvar(torch.zeros(head.outputs), alpha)

    def test_quantiles_are_in_order_and_average_to_the_mean(self, head_class):
        head = head_class(3)
        prediction = 2 * torch.randn(7, head.outputs)
        quantiles = head.quantiles(prediction)
        assert (quantiles.diff(dim=-1) >= 0).all()
        assert (quantiles.mean(-1) - head.mean(prediction)).abs().max() < 0.3

    @given(mode=st.sampled_from(MOMENT_MODES), delta=st.floats(0.01, 1.0), seed=st.integers(0, 99))
    def test_clipped_moments_are_within_delta(self, head_class, mode, delta, seed):
        torch.manual_seed(seed)
        head = head_class(3)
        prediction = peak(head, 4 * torch.rand(6), 0.6 + 0.6 * torch.rand(6))
        old = peak(head, 4 * torch.rand(6), 0.6 + 0.6 * torch.rand(6))
        clipped = head.clip_to(prediction, old, mode, delta)
        assert (head.mean(clipped) - head.mean(old)).abs().max() <= delta + 1e-4
        if mode == "mean_and_variance":
            # Sharing a position between two atoms widens the distribution.
            widened = 0.0 if head_class is QuantileHead else 0.4**2 / 4
            assert (head.std(clipped) >= head.std(old) - delta - 1e-4).all()
            assert (head.std(clipped).square() <= (head.std(old) + delta + 1e-4).square() + widened).all()
        else:
            assert (head.std(clipped) >= head.std(prediction) - 1e-4).all()

    @pytest.mark.parametrize("mode", MOMENT_MODES)
    def test_what_is_near_is_left_alone(self, head_class, mode):
        head = head_class(3)
        prediction = torch.randn(6, head.outputs)
        clipped = head.clip_to(prediction, prediction + 1e-4, mode, 0.5)
        torch.testing.assert_close(head.mean(clipped), head.mean(prediction), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(head.quantiles(clipped), head.quantiles(prediction), atol=1e-4, rtol=1e-4)

    @pytest.mark.parametrize("mode", MOMENT_MODES)
    def test_beyond_delta_the_mean_has_no_gradient(self, head_class, mode):
        head = head_class(3)
        prediction = peak(head, torch.tensor([-1.0]), torch.tensor([1.0])).requires_grad_()
        old = peak(head, torch.tensor([3.0]), torch.tensor([1.0]))
        head.mean(head.clip_to(prediction, old, mode, 0.1)).sum().backward()
        assert prediction.grad.abs().max() < 1e-4
        head.mean(head.clip_to(prediction, old, mode, 5.0)).sum().backward()
        assert prediction.grad.abs().max() > 1e-2

    def test_gradients_of_certainty_are_finite(self, head_class):
        head = head_class(3)
        # All quantiles are one, or all probability is on one atom.
        prediction = torch.zeros(1, head.outputs)
        if head_class is CategoricalHead:
            prediction[0, 7] = 200.0
        prediction.requires_grad_()
        for old in (prediction.detach(), torch.randn(1, head.outputs)):
            loss = head.loss(head.clip_to(prediction, old, "mean_and_variance", 0.1), torch.ones(1))
            assert torch.autograd.grad((loss + head.std(prediction)).sum(), prediction)[0].isfinite().all()

    def test_unknown_clip_modes(self, head_class):
        head = head_class(3)
        with pytest.raises(ValueError, match="Invalid mode: 'mean'; must be one of 'mean_only'"):
            head.clip_to(torch.zeros(head.outputs), torch.zeros(head.outputs), "mean", 0.1)

    def test_predictions_keep_their_precision_under_autocast(self, head_class):
        head = head_class(3)
        features, target = torch.randn(5, 3), torch.randn(5)
        prediction = torch.randn(5, head.outputs)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert head(features).dtype == torch.float32
            low = (
                head.mean(prediction),
                head.std(prediction),
                head.cvar(prediction, 0.3),
                head.loss(prediction, target),
            )
        full = (head.mean(prediction), head.std(prediction), head.cvar(prediction, 0.3), head.loss(prediction, target))
        torch.testing.assert_close(low, full, atol=1e-6, rtol=1e-5)

    def test_nothing_waits_for_the_device(self, head_class):
        # Tensors of the meta device have no values: reading one raises.
        head = head_class(3).to("meta")
        prediction = head(torch.empty(5, 3, device="meta"))
        head.loss(prediction, torch.empty(5, device="meta")).sum().backward()
        for summary in (head.mean, head.std, head.quantiles, lambda p: head.cvar(p, 0.3)):
            assert summary(prediction).device.type == "meta"
        for mode in MOMENT_MODES + (["per_quantile"] if head_class is QuantileHead else []):
            head.clip_to(prediction, torch.empty_like(prediction), mode, 0.1)
        unit, wide = torch.ones((), device="meta"), torch.full((), 2.0, device="meta")
        head.rescale(Scale(unit, unit), Scale(wide, wide))

    def test_what_is_not_a_number_is_passed_on(self, head_class):
        # The minibatch is skipped afterwards; an index out of bounds would end the process on CUDA.
        head = head_class(3)
        prediction, bad = torch.zeros(2, head.outputs), torch.tensor([math.nan, 0.0])
        assert head.loss(prediction, bad).isnan().tolist() == [True, False]
        for mode in MOMENT_MODES:
            clipped = head.clip_to(prediction + bad.unsqueeze(-1), prediction, mode, 0.1)
            assert head.loss(clipped, torch.zeros(2)).isnan().tolist() == [True, False]


class TestQuantileHead:
    @given(
        shape=st.lists(st.integers(1, 4), max_size=2),
        count=st.integers(1, 9),
        kappa=st.floats(0.05, 2.0),
        seed=st.integers(0, 99),
    )
    def test_loss_and_gradient_are_the_formula(self, shape, count, kappa, seed):
        torch.manual_seed(seed)
        head = QuantileHead(1, num_quantiles=count, huber_kappa=kappa).double()
        prediction = torch.randn(*shape, count, dtype=torch.float64, requires_grad=True)
        target = torch.randn(shape, dtype=torch.float64)
        u = target.unsqueeze(-1) - prediction
        huber = torch.where(u.abs() <= kappa, u.square() / 2, kappa * (u.abs() - kappa / 2))
        levels = (torch.arange(count) + 0.5) / count
        expected = ((levels - (u < 0).double()).abs() * huber / kappa).mean(-1)
        loss = head.loss(prediction, target)
        torch.testing.assert_close(loss, expected, atol=1e-7, rtol=1e-6)
        torch.testing.assert_close(
            torch.autograd.grad(loss.sum(), prediction), torch.autograd.grad(expected.sum(), prediction)
        )

    def test_cvar_counts_the_last_quantile_in_part(self):
        head = QuantileHead(1, num_quantiles=4)
        prediction = torch.tensor([[4.0, 1.0, 3.0, 2.0]])
        assert head.cvar(prediction, 0.25).item() == pytest.approx(1.0)
        assert head.cvar(prediction, 0.375).item() == pytest.approx((1.0 + 0.5 * 2.0) / 1.5)
        assert head.cvar(prediction, 0.01).item() == pytest.approx(1.0)

    def test_per_quantile_clipping(self):
        head = QuantileHead(1, num_quantiles=3)
        clipped = head.clip_to(torch.tensor([0.0, 5.0, -5.0]), torch.tensor([0.1, 0.0, 0.0]), "per_quantile", 0.5)
        assert clipped.tolist() == pytest.approx([0.0, 0.5, -0.5])

    def test_clipping_the_mean_leaves_the_shape(self):
        head = QuantileHead(1, num_quantiles=3)
        prediction, old = torch.tensor([1.0, 2.0, 6.0]), torch.tensor([0.0, 0.0, 0.0])
        assert head.clip_to(prediction, old, "mean_only", 0.5).tolist() == pytest.approx([-1.5, -0.5, 3.5])
        clipped = head.clip_to(prediction, old, "mean_and_variance", 0.5)
        assert (head.mean(clipped).item(), head.std(clipped).item()) == pytest.approx((0.5, 0.5))

    @pytest.mark.parametrize("as_tensor", [False, True])
    @given(
        old=st.tuples(st.floats(-1e4, 1e4), st.floats(0.01, 1e3)),
        new=st.tuples(st.floats(-1e4, 1e4), st.floats(0.01, 1e3)),
    )
    def test_rescaling_keeps_decoded_values(self, as_tensor, old, new):
        torch.manual_seed(0)
        head = QuantileHead(4)
        features = torch.randn(16, 4)
        if as_tensor:
            old, new = torch.tensor(old), torch.tensor(new)
        before = old[0] + old[1] * head(features).detach().double()
        head.rescale(Scale(*old), Scale(*new))
        after = new[0] + new[1] * head(features).detach().double()
        scale = max(old[1] + abs(old[0]), new[1] + abs(new[0]))
        assert (before - after).abs().max() <= 1e-5 * scale

    @pytest.mark.parametrize(
        ("arguments", "name"),
        [
            ({"num_quantiles": 0}, "num_quantiles"),
            ({"num_quantiles": 2.5}, "num_quantiles"),
            ({"huber_kappa": 0.0}, "huber_kappa"),
            ({"huber_kappa": math.inf}, "huber_kappa"),
            ({"features": 0}, "features"),
        ],
    )
    def test_bad_arguments(self, arguments, name):
        with pytest.raises(ValueError, match=f"Invalid {name}"):
            QuantileHead(**{"features": 1} | arguments)


class TestCategoricalHead:
    def test_loss_is_cross_entropy_with_the_two_neighbours(self):
        head = CategoricalHead(1, num_atoms=5, v_min=-2.0, v_max=2.0)
        prediction = torch.tensor([[0.1, -0.3, 0.7, 0.2, 0.0]])
        logs = prediction.log_softmax(-1)[0]
        assert head.loss(prediction, torch.tensor([0.25])).item() == pytest.approx(
            -(0.75 * logs[2] + 0.25 * logs[3]).item()
        )
        assert head.loss(prediction, torch.tensor([2.0])).item() == pytest.approx(-logs[4].item())
        assert head.loss(prediction, torch.tensor([99.0])).item() == pytest.approx(-logs[4].item())
        assert head.saturated(torch.tensor([0.0, 99.0, -3.0, 2.0])).item() == pytest.approx(0.5)

    def test_learns_mean_and_spread(self):
        head = CategoricalHead(1)
        prediction = fitted(head, 1.0 + 2.0 * NORMAL)
        assert head.mean(prediction).item() == pytest.approx(1.0, abs=0.01)
        # Sharing a return between two atoms adds a sixth of their distance squared on average.
        assert head.std(prediction).item() == pytest.approx(math.sqrt(4 + 0.4**2 / 6), abs=0.01)

    def test_cvar_counts_the_last_atom_in_part(self):
        head = CategoricalHead(1, num_atoms=3, v_min=0.0, v_max=2.0)
        prediction = torch.tensor([0.2, 0.5, 0.3]).log()
        assert head.cvar(prediction, 0.1).item() == pytest.approx(0.0)
        assert head.cvar(prediction, 0.5).item() == pytest.approx(0.3 / 0.5)

    def test_clipping_moves_probabilities(self):
        head = CategoricalHead(1, num_atoms=5, v_min=-2.0, v_max=2.0)
        prediction, old = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0]).log(), torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0]).log()
        clipped = head.clip_to(prediction, old, "mean_only", 1.5)
        assert clipped.softmax(-1).tolist() == pytest.approx([0.0, 0.25, 0.25, 0.25, 0.25], abs=1e-6)
        clipped = head.clip_to(prediction, old, "mean_and_variance", 0.5)
        # Two atoms at 1 and 2, the same distance to either side of 1.5.
        assert clipped.softmax(-1).tolist() == pytest.approx([0.0, 0.0, 0.0, 0.5, 0.5], abs=1e-6)

    def test_clipping_saturates_at_the_support(self):
        head = CategoricalHead(1)
        prediction = torch.zeros(head.outputs)
        old = peak(head, torch.tensor(9.0), torch.tensor(0.3))
        clipped = head.clip_to(prediction, old, "mean_only", 0.1)
        probabilities = clipped.exp()
        assert probabilities.sum().item() == pytest.approx(1.0, abs=1e-5)
        assert probabilities[-1].item() == pytest.approx(0.46, abs=0.02)
        assert head.mean(prediction) < head.mean(clipped) < 9.0

    def test_per_quantile_clipping_is_refused(self):
        head = CategoricalHead(1)
        with pytest.raises(ValueError, match="quantile head"):
            head.clip_to(head(torch.zeros(1, 1)), head(torch.zeros(1, 1)), "per_quantile", 0.1)

    @pytest.mark.parametrize(
        ("arguments", "name"),
        [
            ({"num_atoms": 1}, "num_atoms"),
            ({"v_min": 10.0}, "v_min"),
            ({"v_max": math.inf}, "v_max"),
            ({"features": 0}, "features"),
        ],
    )
    def test_bad_arguments(self, arguments, name):
        with pytest.raises(ValueError, match=f"Invalid {name}"):
            CategoricalHead(**{"features": 1} | arguments)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("head_class", HEADS)
def test_cuda_graphs(head_class):
    head = head_class(3).cuda()
    features, target = torch.zeros(5, 3, device="cuda"), torch.randn(5).cuda()
    old = torch.randn(5, head.outputs).cuda()
    modes = MOMENT_MODES + (["per_quantile"] if head_class is QuantileHead else [])

    def everything():
        prediction = head(features)
        loss = sum(head.loss(head.clip_to(prediction, old, mode, 0.1), target) for mode in modes)
        loss = loss + head.loss(prediction, target)
        gradients = torch.autograd.grad(loss.sum(), tuple(head.parameters()))
        prediction = prediction.detach()
        return loss.detach(), head.std(prediction), head.quantiles(prediction), head.cvar(prediction, 0.3), gradients

    with torch.cuda.stream(torch.cuda.Stream()):
        everything()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = everything()
    features.copy_(torch.randn(5, 3))
    graph.replay()
    torch.testing.assert_close(captured, everything())
