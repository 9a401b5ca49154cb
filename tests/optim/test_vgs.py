"""The contract of variance gradient scaling."""

from __future__ import annotations

import copy
import inspect
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from driftproof.optim import UPGD, AdaptiveUPGD, VarianceGradientScaler

from .helpers import assert_equal, parameters, values

STATISTICS = ["elementwise", "spatial_mean"]
MODES = ["gradient", "update"]
SHAPES = [(6, 5), (5,), (1,)]


def noisy_gradients(params, step, noise=1.0, scale=1.0, missing=frozenset()):
    """A constant gradient of ones plus noise that depends on the step alone."""
    generator = torch.Generator().manual_seed(7000 + step)
    for i, param in enumerate(params):
        grad = 1 + noise * torch.randn(param.shape, generator=generator)
        param.grad = None if i in missing else (scale * grad).to(param.dtype)


def run(scaler, params, steps, optimizer=None, first=0, **kwargs):
    for step in range(first, first + steps):
        noisy_gradients(params, step, **kwargs)
        scaler.scale_gradients()
        if optimizer is not None:
            optimizer.step()
        scaler.step()


def build(params, mode="gradient", optimizer=None, **kwargs):
    scaler = VarianceGradientScaler(params, apply_to=mode, **kwargs)
    if mode == "update":
        # The scaler does not keep its optimizer alive.
        scaler.optimizer = optimizer or torch.optim.SGD(params, lr=0.1)
        scaler.attach(scaler.optimizer)
    return scaler


class Oracle:
    """The statistics of the contract, from the whole history of gradients with explicit weights."""

    def __init__(self, beta):
        self.beta = beta
        self.history = []

    def fold(self, params):
        self.history.append([p.grad.double().clone() for p in params])

    def variances(self, statistic, eps=1e-8):
        t = len(self.history)
        weights = torch.tensor([(1 - self.beta) * self.beta ** (t - 1 - k) for k in range(t)]).double()
        weights /= 1 - self.beta**t
        result = []
        for i in range(len(self.history[0])):
            grads = torch.stack([g[i].flatten() for g in self.history])
            if statistic == "spatial_mean":
                grads = grads.mean(1, keepdim=True)
            mean = (weights[:, None] * grads).sum(0)
            mean_square = (weights[:, None] * grads.square()).sum(0)
            variance = (mean_square - mean.square()).sum()
            result.append((variance / (mean.square().sum() + eps * mean_square.sum())).item())
        return result

    def normalized(self, statistic):
        """The geometric mean over tensors of how much longer gradients are than their mean."""
        lengths = [math.sqrt(1 + v) for v in self.variances(statistic)]
        return math.prod(lengths) ** (1 / len(lengths)) - 1


class TestSignature:
    def test_defaults_are_the_promised_ones(self):
        expected = {
            "parameters": None, "enabled": True, "beta": 0.99, "alpha": 0.1, "eps": 1e-8, "warmup_steps": 100,
            "min_scaling_factor": 0.1, "variance_cap": 50.0, "statistic": "elementwise", "logger": None,
        }  # fmt: skip
        signature = inspect.signature(VarianceGradientScaler).parameters
        assert expected.items() <= {name: p.default for name, p in signature.items()}.items()
        assert signature["apply_to"].default in MODES

    def test_docstring_tells_what_the_spatial_mean_cannot_see(self):
        assert "blind to noise that cancels" in " ".join(VarianceGradientScaler.__doc__.split())

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("beta", 1.0), ("beta", -0.1), ("beta", math.nan), ("alpha", -1.0), ("eps", 0.0), ("warmup_steps", -1),
            ("min_scaling_factor", 0.0), ("min_scaling_factor", 1.5), ("variance_cap", 0.0), ("statistic", "mean"),
            ("apply_to", "lr"), ("alpha", "strong"),
        ],
    )  # fmt: skip
    def test_bad_argument_is_named_with_its_value(self, name, value):
        with pytest.raises(ValueError, match=f"Invalid {name}") as error:
            VarianceGradientScaler(**{name: value})
        assert repr(value) in str(error.value)

    def test_parameters_must_be_tensors(self):
        with pytest.raises(TypeError, match="parameters must be tensors"):
            VarianceGradientScaler(["weights"])
        weight = torch.zeros(2)
        with pytest.raises(ValueError, match="unique"):
            VarianceGradientScaler([("a", weight), ("a", torch.zeros(2))])
        with pytest.raises(TypeError, match="put it into a list"):
            VarianceGradientScaler(weight)


class TestStatistics:
    @pytest.mark.parametrize("statistic", STATISTICS)
    def test_averages_are_correct_from_the_first_step(self, statistic):
        params = parameters(*SHAPES)
        scaler = build(params, statistic=statistic, beta=0.9)
        oracle = Oracle(beta=0.9)
        for step in range(25):
            noisy_gradients(params, step, noise=2.0)
            oracle.fold(params)
            scaler.scale_gradients()
            scaler.step()
            assert scaler.get_normalized_variance() == pytest.approx(oracle.normalized(statistic), rel=1e-3, abs=1e-5)
        variances = sorted(oracle.variances(statistic))
        assert scaler.metrics()["vgs/tensor_variance_p50"].item() == pytest.approx(variances[1], rel=1e-3)

    @pytest.mark.parametrize("statistic", STATISTICS)
    def test_constant_gradients_have_no_variance(self, statistic):
        params = parameters(*SHAPES)
        scaler = build(params, statistic=statistic, warmup_steps=0)
        for step in range(50):
            noisy_gradients(params, step, noise=0.0)
            scaler.scale_gradients()
            scaler.step()
            assert scaler.get_normalized_variance() < 1e-4
            assert scaler.get_scaling_factor() > 0.9999

    @pytest.mark.parametrize("statistic", STATISTICS)
    @pytest.mark.parametrize("scale", [1e-6, 1 / 6, 1e4])
    def test_scale_of_gradients_does_not_matter(self, statistic, scale):
        variances = []
        for s in (1.0, scale):
            params = parameters(*SHAPES)
            scaler = build(params, statistic=statistic)
            run(scaler, params, 50, scale=s)
            variances.append(scaler.get_normalized_variance())
        assert variances[0] == pytest.approx(variances[1], rel=1e-4)

    def test_flipping_elements_are_seen_elementwise_only(self):
        """Half the elements +1/2, half -1/2, all flipping at every step: the mean of the tensor never moves."""
        pattern = torch.tensor([0.5, -0.5]).repeat(8)
        variances = {}
        for statistic in STATISTICS:
            param = nn.Parameter(torch.zeros(16))
            scaler = build([param], statistic=statistic)
            for step in range(200):
                param.grad = pattern * (-1) ** step + 1e-3
                scaler.scale_gradients()
                scaler.step()
            variances[statistic] = scaler.get_normalized_variance()
        assert variances["elementwise"] > 10
        assert variances["spatial_mean"] < 1e-3

    def test_memory_of_each_statistic(self):
        params = parameters((100, 100))
        sizes = {}
        for statistic in STATISTICS:
            state = build(params, statistic=statistic).state_dict()
            tensors = [t for t in state.values() if isinstance(t, torch.Tensor)] + list(state["moments"].values())
            sizes[statistic] = sum(t.numel() for t in tensors)
        assert sizes["spatial_mean"] < 20
        assert 10_000 <= sizes["elementwise"] < 10_020

    @pytest.mark.parametrize("statistic", STATISTICS)
    def test_raw_gradients_are_folded_before_they_are_scaled_or_clipped(self, statistic):
        """Two runs see the same raw gradients; what happens to them afterwards must not be measured."""
        variances = []
        for mode, clip in (("update", False), ("gradient", False), ("gradient", True)):
            params = parameters(*SHAPES)
            scaler = build(params, mode, statistic=statistic, warmup_steps=0)
            for step in range(50):
                noisy_gradients(params, step)
                scaler.scale_gradients()
                if clip:
                    nn.utils.clip_grad_norm_(params, 1e-3)
                if mode == "update":
                    scaler.optimizer.step()
                scaler.step()
            variances.append(scaler.get_normalized_variance())
        assert variances[0] == variances[1] == variances[2]

    @pytest.mark.parametrize("statistic", STATISTICS)
    def test_update_statistics_folds_without_scaling(self, statistic):
        params, others = parameters(*SHAPES), parameters(*SHAPES)
        scaler, other = build(params, statistic=statistic, warmup_steps=0), build(others, statistic=statistic)
        for step in range(10):
            noisy_gradients(params, step)
            noisy_gradients(others, step)
            before = [p.grad.clone() for p in params]
            scaler.update_statistics()
            other.scale_gradients()
            assert_equal(before, [p.grad for p in params])
        assert scaler.get_normalized_variance() == other.get_normalized_variance() > 0
        assert scaler.get_scaling_factor() == 1.0

    @pytest.mark.parametrize("statistic", STATISTICS)
    def test_tensors_without_gradient_keep_their_averages(self, statistic):
        """A tensor that sees every second gradient has the statistics of one that sees only those."""
        params, others = parameters(*SHAPES), parameters(*SHAPES)
        scaler, other = build(params, statistic=statistic), build(others, statistic=statistic)
        for step in range(20):
            noisy_gradients(params, step, missing={0} if step % 2 else frozenset())
            scaler.scale_gradients()
            if step % 2 == 0:
                noisy_gradients(others, step)
                other.scale_gradients()
        mine, theirs = scaler.state_dict(), other.state_dict()
        assert mine["energy"][0] == pytest.approx(theirs["energy"][0].item())
        assert mine["weight"][0] == pytest.approx(theirs["weight"][0].item())
        assert mine["weight"][1] > theirs["weight"][1]

    @pytest.mark.parametrize("statistic", STATISTICS)
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e20, -1e38])
    def test_an_overflow_does_not_spoil_the_averages(self, statistic, bad):
        """As with a GradScaler, which skips such a step."""
        scalers = []
        for value in (bad, 0.0):
            params = parameters(*SHAPES)
            scaler = build(params, warmup_steps=0, beta=0.9, statistic=statistic)
            run(scaler, params, 8)
            noisy_gradients(params, 8)
            params[0].grad[2] = value
            scaler.update_statistics()
            scaler.step()
            run(scaler, params, 5, first=9)
            scalers.append(scaler)
        for name, value in scalers[0].metrics().items():
            assert value == scalers[1].metrics()[name], name
        assert 0 < scalers[0].get_scaling_factor() < 1

    def test_eps_is_the_least_signal_relative_to_the_energy(self):
        params = parameters((4,))
        scaler = build(params, beta=0.5, eps=0.01)
        for sign in (1.0, -2.0):
            params[0].grad = torch.full((4,), sign)
            scaler.update_statistics()
        # Means of (1, -2) with weights 1/3 and 2/3: -1, squares 3.
        assert scaler.metrics()["vgs/tensor_variance_p50"].item() == pytest.approx(2 / (1 + 0.01 * 3), rel=1e-5)

    @pytest.mark.parametrize("mode", MODES)
    def test_a_shared_parameter_counts_once(self, mode):
        results = []
        for repeated in (False, True):
            shared, own = params = parameters((4,), (3,))
            optimizer = torch.optim.SGD(params, lr=0.1)
            scaler = build([shared, own, shared] if repeated else params, mode, optimizer, warmup_steps=0)
            run(scaler, params, 10, optimizer, noise=3.0)
            assert scaler.get_scaling_factor() < 0.9
            results.append(values(params))
        assert_equal(*results)

    def test_changing_beta_keeps_the_bias_correction_right(self):
        """The weights are summed as they were used: constant gradients stay free of variance."""
        params = parameters(*SHAPES)
        scaler = build(params)
        for step in range(30):
            scaler.beta = 0.99 if step < 15 else 0.5
            noisy_gradients(params, step, noise=0.0)
            scaler.scale_gradients()
            assert scaler.get_normalized_variance() < 1e-4

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision(self, dtype):
        params = parameters(*SHAPES, dtype=dtype)
        scaler = build(params, warmup_steps=0)
        run(scaler, params, 30)
        assert all(m.dtype == torch.float32 for m in scaler.state_dict()["moments"].values())
        assert all(p.grad.dtype == dtype for p in params)
        assert 0 < scaler.get_scaling_factor() < 1


class TestFactor:
    @pytest.mark.parametrize("statistic", STATISTICS)
    def test_is_the_formula(self, statistic):
        for alpha, cap, floor in ((0.1, 50.0, 0.1), (1.0, 50.0, 0.1), (1.0, 0.5, 0.1), (1.0, 50.0, 0.7)):
            params = parameters(*SHAPES)
            scaler = build(
                params, statistic=statistic, alpha=alpha, variance_cap=cap, min_scaling_factor=floor, warmup_steps=0
            )
            run(scaler, params, 60, noise=3.0)
            variance = scaler.get_normalized_variance()
            assert variance > 0.5
            expected = min(max(1 / (1 + alpha * min(variance, cap)), floor), 1)
            assert scaler.get_scaling_factor() == pytest.approx(expected, rel=1e-5)

    @pytest.mark.parametrize("mode", MODES)
    def test_is_exactly_one_in_the_warmup(self, mode):
        params = parameters(*SHAPES)
        scaler = build(params, mode, warmup_steps=10)
        for step in range(20):
            noisy_gradients(params, step, noise=5.0)
            before = [p.grad.clone() for p in params]
            scaler.scale_gradients()
            if step < 10:
                assert scaler.get_scaling_factor() == 1.0
                assert_equal(before, [p.grad for p in params])
            else:
                assert scaler.get_scaling_factor() < 0.95
            if mode == "update":
                scaler.optimizer.step()
            scaler.step()

    def test_is_exactly_one_when_disabled_or_without_gradients(self):
        params = parameters(*SHAPES)
        scaler = build(params, warmup_steps=0)
        run(scaler, params, 20, noise=5.0)
        assert scaler.get_scaling_factor() < 1
        before = scaler.state_dict()
        for param in params:
            param.grad = None
        assert scaler.scale_gradients() == 1.0
        scaler.enabled = False
        noisy_gradients(params, 20)
        gradients = [p.grad.clone() for p in params]
        assert scaler.scale_gradients() == 1.0
        assert_equal(gradients, [p.grad for p in params])
        for key in ("energy", "signal", "weight", "norms", "largest"):
            assert torch.equal(before[key], scaler.state_dict()[key])
        assert VarianceGradientScaler().scale_gradients() == 1.0

    @pytest.mark.parametrize("statistic", STATISTICS)
    def test_falls_with_the_noise_and_never_to_zero(self, statistic):
        factors = []
        for noise in (0.0, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0):
            params = parameters((50, 20), (20,))
            scaler = build(params, statistic=statistic, warmup_steps=0)
            run(scaler, params, 400, noise=noise)
            factors.append(scaler.get_scaling_factor())
        assert factors == sorted(factors, reverse=True)
        assert factors[0] > 0.999
        assert 0.3 < factors[-1] < 0.5
        assert factors[-2] > 1.01 * factors[-1]

    @pytest.mark.parametrize("statistic", STATISTICS)
    @given(noise=st.floats(0, 1e3), scale=st.floats(1e-12, 1e12), beta=st.floats(0, 0.999), steps=st.integers(1, 12))
    def test_stays_in_its_range(self, statistic, noise, scale, beta, steps):
        params = parameters((3, 2), (1,))
        scaler = build(params, statistic=statistic, beta=beta, warmup_steps=0)
        run(scaler, params, steps, noise=noise, scale=scale)
        assert 0.1 <= scaler.get_scaling_factor() <= 1
        assert math.isfinite(scaler.get_normalized_variance())

    @pytest.mark.parametrize("statistic", STATISTICS)
    def test_zero_gradients_count_for_nothing(self, statistic):
        params = parameters((5,), (5,))
        scaler, alone = build(params, statistic=statistic), build(params[:1], statistic=statistic)
        for step in range(30):
            noisy_gradients(params, step)
            params[1].grad = torch.zeros(5)
            alone.update_statistics()
            scaler.update_statistics()
        assert scaler.get_normalized_variance() == pytest.approx(alone.get_normalized_variance())
        for param in params:
            param.grad = torch.zeros(5)
        fresh = build(params, statistic=statistic, warmup_steps=0)
        assert fresh.scale_gradients() == 1.0


class TestModes:
    def test_gradient_mode_scales_gradients(self):
        params = parameters(*SHAPES)
        scaler = build(params, alpha=1.0, warmup_steps=0)
        run(scaler, params, 30)
        noisy_gradients(params, 30)
        raw = [p.grad.clone() for p in params]
        factor = scaler.scale_gradients()
        assert factor < 0.95
        assert_equal([g * factor for g in raw], [p.grad for p in params], rtol=1e-6, atol=0)

    @pytest.mark.parametrize(
        "make", [lambda p: torch.optim.AdamW(p, lr=0.1), lambda p: AdaptiveUPGD(p, lr=0.1), lambda p: UPGD(p, lr=0.1)]
    )
    def test_update_mode_scales_the_step(self, make):
        def step_with(scaled):
            torch.manual_seed(0)
            params = parameters(*SHAPES)
            optimizer = make(params)
            scaler = build(params, "update", optimizer, alpha=1.0, warmup_steps=30 if scaled else 10**6)
            for step in range(31):
                noisy_gradients(params, step, noise=3.0)
                before = values(params)
                scaler.scale_gradients()
                optimizer.step()
                scaler.step()
            return scaler.get_scaling_factor(), [b - a for a, b in zip(before, values(params), strict=True)]

        factor, scaled = step_with(True)
        one, full = step_with(False)
        assert one == 1.0
        assert factor < 0.8
        assert_equal(scaled, [d * factor for d in full], rtol=1e-3, atol=1e-6)

    def test_adam_cancels_a_factor_on_gradients_but_not_on_the_step(self):
        """Why the update mode exists: once its averages know a factor, Adam's steps are as long as without it."""

        def travelled(mode):
            params = parameters((200,))
            optimizer = torch.optim.Adam(params, lr=0.01, betas=(0.9, 0.95))
            scaler = build(params, mode, optimizer, alpha=1.0, warmup_steps=0) if mode else None
            for step in range(500):
                if step == 300:
                    start = values(params)
                noisy_gradients(params, step, noise=6.0)
                if scaler is not None:
                    scaler.scale_gradients()
                optimizer.step()
                if scaler is not None:
                    scaler.step()
            return (params[0].detach() - start[0]).norm().item()

        plain = travelled(None)
        assert travelled("gradient") > 0.9 * plain
        assert travelled("update") < 0.5 * plain

    def test_update_mode_needs_an_optimizer_that_has_the_parameters(self):
        params = parameters((3,))
        scaler = VarianceGradientScaler(params, apply_to="update")
        noisy_gradients(params, 0)
        with pytest.raises(RuntimeError, match="attach"):
            scaler.scale_gradients()
        with pytest.raises(ValueError, match=r"no optimizer has the parameters \['0'\]"):
            scaler.attach(torch.optim.SGD(parameters((3,)), lr=0.1))
        with pytest.raises(RuntimeError, match="apply_to"):
            VarianceGradientScaler(params, apply_to="gradient").attach(torch.optim.SGD(params, lr=0.1))
        optimizer = torch.optim.SGD(params, lr=0.1)
        scaler.attach(optimizer)
        scaler.scale_gradients()
        del optimizer
        with pytest.raises(RuntimeError, match="attach"):
            scaler.scale_gradients()

    def test_attached_to_a_new_optimizer_the_old_one_is_left_alone(self):
        params = parameters((3,))
        old, new = torch.optim.SGD(params, lr=0.1), torch.optim.SGD(params, lr=0.1)
        scaler = build(params, "update", old, warmup_steps=0)
        run(scaler, params, 20, old, noise=3.0)
        scaler.attach(new)
        for optimizer, expected in ((old, 1.0), (new, None)):
            noisy_gradients(params, 21, noise=3.0)
            factor = scaler.scale_gradients().item()
            before = params[0].detach().clone()
            optimizer.step()
            moved = (params[0].detach() - before) / (-0.1 * params[0].grad)
            assert moved.mean().item() == pytest.approx(expected or factor, rel=1e-3)
        scaler.detach()
        with pytest.raises(RuntimeError, match="attach"):
            scaler.scale_gradients()

    def test_a_step_that_was_not_announced_is_not_scaled(self):
        params = parameters((3,))
        optimizer = torch.optim.SGD(params, lr=0.1)
        scaler = build(params, "update", optimizer, warmup_steps=0)
        run(scaler, params, 20, optimizer, noise=5.0)
        noisy_gradients(params, 20)
        before = values(params)
        optimizer.step()
        assert_equal(values(params), [before[0] - 0.1 * params[0].grad], atol=1e-7, rtol=1e-6)

    def test_several_optimizers_are_scaled(self):
        params = parameters((3,), (2,))
        optimizers = [torch.optim.SGD([p], lr=0.1) for p in params]
        scaler = VarianceGradientScaler(params, apply_to="update", warmup_steps=0)
        with pytest.raises(ValueError, match=r"\['1'\]"):
            scaler.attach(optimizers[0])
        scaler.attach(*optimizers)
        for step in range(20):
            noisy_gradients(params, step, noise=3.0)
            factor = scaler.scale_gradients().item()
            before = values(params)
            for optimizer in optimizers:
                optimizer.step()
            scaler.step()
        assert factor < 0.9
        expected = [old - 0.1 * factor * p.grad for old, p in zip(before, params, strict=True)]
        assert_equal(values(params), expected, atol=1e-6, rtol=1e-5)

    def test_a_closure_may_announce_the_step(self):
        params = parameters((3,))
        optimizer = torch.optim.SGD(params, lr=0.1)
        scaler = build(params, "update", optimizer, warmup_steps=0)
        for step in range(20):
            # As if somebody had moved the parameters in between.
            with torch.no_grad():
                params[0].add_(1)
            before = values(params)

            def closure(step=step):
                noisy_gradients(params, step, noise=3.0)
                scaler.scale_gradients()
                return torch.zeros(())

            optimizer.step(closure)
            scaler.step()
            expected = before[0] - 0.1 * scaler.get_scaling_factor() * params[0].grad
            assert_equal(values(params), [expected], atol=1e-6, rtol=1e-5)
        assert scaler.get_scaling_factor() < 0.9

    def test_a_skipped_step_is_not_scaled_later(self):
        """A GradScaler skips the step of an overflow."""
        params = parameters((3,))
        optimizer = torch.optim.SGD(params, lr=0.1)
        scaler = build(params, "update", optimizer, warmup_steps=0)
        run(scaler, params, 20, optimizer, noise=5.0)
        noisy_gradients(params, 20)
        scaler.scale_gradients()
        scaler.step()
        before = values(params)
        optimizer.step()
        assert_equal(values(params), [before[0] - 0.1 * params[0].grad], atol=1e-7, rtol=1e-6)

    def test_steps_of_another_optimizer_raise_suspicion(self):
        params = parameters((3,))
        old, new = torch.optim.SGD(params, lr=0.1), torch.optim.SGD(params, lr=0.1)
        scaler = build(params, "update", old)
        with pytest.warns(UserWarning, match=r"attach\(\) the optimizers in use") as caught:
            run(scaler, params, 30, new)
        assert len(caught) == 1

    def test_returned_factors_do_not_change_afterwards(self):
        params = parameters((3,))
        scaler = build(params, warmup_steps=0)
        factors = []
        for step in range(5):
            noisy_gradients(params, step)
            factors.append(scaler.scale_gradients())
        assert len({f.item() for f in factors}) == 5

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_follows_a_model_that_is_cast(self, mode, dtype):
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = build(model.parameters(), mode, optimizer, warmup_steps=0)
        run(scaler, list(model.parameters()), 10, optimizer)
        before = scaler.get_normalized_variance()
        model.to(dtype)
        assert scaler.get_normalized_variance() == before
        run(scaler, list(model.parameters()), 10, optimizer, first=10)
        assert scaler.get_normalized_variance() == pytest.approx(before, rel=0.5)
        assert 0 < scaler.get_scaling_factor() < 1

    @pytest.mark.parametrize("mode", MODES)
    def test_two_scalers_for_two_groups(self, mode):
        """The noisy group is slowed down, the quiet one is not."""
        params = parameters((50,), (50,))
        optimizer = torch.optim.SGD([{"params": params[:1]}, {"params": params[1:]}], lr=0.1)
        scalers = [
            build(group["params"], mode, optimizer, alpha=1.0, warmup_steps=0) for group in optimizer.param_groups
        ]
        for step in range(50):
            noisy_gradients(params[:1], step, noise=5.0)
            noisy_gradients(params[1:], step, noise=0.0)
            before = values(params)
            raw = [p.grad.clone() for p in params]
            factors = [scaler.scale_gradients().item() for scaler in scalers]
            optimizer.step()
        moved = [(p.detach() - b) / (-0.1 * g) for p, b, g in zip(params, before, raw, strict=True)]
        assert factors[0] < 0.5
        assert factors[1] > 0.999
        for m, factor in zip(moved, factors, strict=True):
            assert m.median().item() == pytest.approx(factor, rel=1e-2)

    @pytest.mark.parametrize("mode", MODES)
    def test_learning_rates_are_never_touched(self, mode):
        params = parameters(*SHAPES)
        optimizer = torch.optim.SGD(params, lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        scaler = build(params, mode, optimizer, warmup_steps=0)
        for step in range(10):
            run(scaler, params, 1, optimizer, first=step)
            schedule.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.9**10)
        assert schedule.get_last_lr() == [optimizer.param_groups[0]["lr"]]


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("named", [False, True])
class TestStateTravels:
    """Not the fields are compared but the next step: scale, variance and the gradients they leave."""

    @staticmethod
    def source(params, named):
        return [(f"layer{i}", p) for i, p in enumerate(params)] if named else params

    def trained(self, statistic, named, steps=15, **kwargs):
        params = parameters(*SHAPES)
        scaler = VarianceGradientScaler(
            self.source(params, named), statistic=statistic, beta=0.9, warmup_steps=10, apply_to="gradient", **kwargs
        )
        run(scaler, params, steps)
        return params, scaler

    @staticmethod
    def next_step(scaler, params, first=15):
        result = []
        for step in range(first, first + 3):
            noisy_gradients(params, step)
            scaler.scale_gradients()
            scaler.step()
            result += [torch.tensor([scaler.get_scaling_factor(), scaler.get_normalized_variance()])]
            result += [p.grad.clone() for p in params]
        return result

    @pytest.mark.parametrize("steps", [1, 5, 9, 15])
    def test_save_load_step_equals_uninterrupted(self, statistic, named, steps):
        params, scaler = self.trained(statistic, named, steps)
        state = pickle.loads(pickle.dumps(scaler.state_dict()))
        others = parameters(*SHAPES)
        other = VarianceGradientScaler(
            self.source(others, named), statistic=statistic, beta=0.9, warmup_steps=10, apply_to="gradient"
        )
        other.load_state_dict(state)
        assert other.step_count == steps
        assert other.get_scaling_factor() == scaler.get_scaling_factor()
        assert_equal(self.next_step(scaler, params, steps), self.next_step(other, others, steps))

    def test_load_before_the_parameters_exist(self, statistic, named):
        params, scaler = self.trained(statistic, named)
        other = VarianceGradientScaler(statistic=statistic, beta=0.9, warmup_steps=10, apply_to="gradient")
        other.load_state_dict(scaler.state_dict())
        others = parameters(*SHAPES)
        other.update_parameters(self.source(others, named))
        assert_equal(self.next_step(scaler, params), self.next_step(other, others))

    def test_a_saved_state_is_a_copy(self, statistic, named):
        params, scaler = self.trained(statistic, named)
        state = scaler.state_dict()
        before = copy.deepcopy(state)
        run(scaler, params, 5, first=15)
        for key in ("energy", "signal", "mean", "weight", "norms", "largest", "step_count", "factor"):
            assert torch.equal(state[key], before[key])
        for key in before["moments"]:
            assert torch.equal(state["moments"][key], before["moments"][key])

    @pytest.mark.parametrize("copier", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
    def test_copies(self, statistic, named, copier):
        params, scaler = self.trained(statistic, named)
        others, other = copier((params, scaler))
        assert_equal(self.next_step(scaler, params), self.next_step(other, others))

    def test_update_parameters_keeps_those_still_there(self, statistic, named):
        params, scaler = self.trained(statistic, named)
        before = scaler.state_dict()
        new = parameters((4, 4))[0]
        kept = [("layer2", params[2]), ("new", new), ("layer0", params[0])]
        scaler.update_parameters(kept if named else [p for _, p in kept])
        after = scaler.state_dict()
        for vector in ("weight", "energy", "signal", "mean"):
            assert after[vector].tolist() == [before[vector][2].item(), 0.0, before[vector][0].item()]
        if statistic == "elementwise":
            moments = list(after["moments"].values())
            old = list(before["moments"].values())
            assert torch.equal(moments[0], old[2])
            assert torch.equal(moments[2], old[0])
        assert after["step_count"] == before["step_count"]

    def test_a_model_built_again_is_recognised(self, statistic, named):
        """Another model, another optimizer, same architecture: names or positions tell who is who."""
        params, scaler = self.trained(statistic, named)
        copied = copy.deepcopy(scaler)
        others = parameters(*SHAPES, seed=1)
        copied.update_parameters(self.source(others, named))
        assert_equal(self.next_step(scaler, params), self.next_step(copied, others))

    def test_state_that_does_not_fit_changes_nothing(self, statistic, named):
        params, scaler = self.trained(statistic, named)
        before = self.next_step(*copy.deepcopy((scaler, params)))
        _, other = self.trained("spatial_mean" if statistic == "elementwise" else "elementwise", named)
        with pytest.raises(ValueError, match="statistic"):
            scaler.load_state_dict(other.state_dict())
        fewer = VarianceGradientScaler(self.source(parameters((6, 5)), named), statistic=statistic)
        with pytest.raises(ValueError, match="does not fit"):
            scaler.load_state_dict(fewer.state_dict())
        with pytest.raises(ValueError, match="lacks 'factor'"):
            scaler.load_state_dict({k: v for k, v in scaler.state_dict().items() if k != "factor"})
        with pytest.raises(ValueError, match="'energy' has shape"):
            scaler.load_state_dict({**scaler.state_dict(), "energy": torch.zeros(7)})
        assert_equal(before, self.next_step(scaler, params))

    def test_metrics_are_those_of_the_uninterrupted_run(self, statistic, named):
        params, scaler = self.trained(statistic, named)
        others = parameters(*SHAPES)
        other = VarianceGradientScaler(self.source(others, named), statistic=statistic, beta=0.9, warmup_steps=10)
        run(other, others, 3, noise=5.0)
        other.load_state_dict(scaler.state_dict())
        scaler.reset_history()
        for each in (scaler, other):
            self.next_step(each, params if each is scaler else others)
        mine, theirs = scaler.metrics(), other.metrics()
        assert {k: v.item() for k, v in mine.items()} == {k: v.item() for k, v in theirs.items()}

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("step_count", "x"), ("step_count", None), ("step_count", torch.zeros(2)), ("step_count", math.nan),
            ("factor", None), ("keys", None), ("shapes", [[6, 5]]), ("weight", torch.zeros(2)), ("norms", "x"),
            ("energy", None), ("mean", torch.zeros(2)), ("largest", torch.zeros(3)),
            ("step_count", -1), ("step_count", 2.5), ("step_count", True), ("factor", 2.0), ("named", "x"),
            ("norms", torch.full((3,), math.nan)), ("largest", torch.tensor([0.5, -1.0])), ("unknown", 1),
            ("norms", torch.full((3,), 2.0)), ("keys", ["0", "0", "0"]), ("shapes", [["x"]] * 3),
        ],
    )  # fmt: skip
    def test_malformed_state_changes_nothing(self, statistic, named, key, value):
        self.refuses(statistic, named, key, value)

    @pytest.mark.parametrize("moments", [None, {}, {"0": [1.0]}, dict.fromkeys(["0", "1", "2"], torch.zeros(2))])
    def test_malformed_moments_change_nothing(self, statistic, named, moments):
        """Those of single elements, of which ``spatial_mean`` has none."""
        if statistic == "elementwise" or moments != {}:
            self.refuses(statistic, named, "moments", moments)

    def refuses(self, statistic, named, key, value):
        _, scaler = self.trained(statistic, named)
        bad = {**scaler.state_dict(), key: value}
        before = scaler.state_dict()
        with pytest.raises(ValueError):
            scaler.load_state_dict(bad)
        after = scaler.state_dict()
        for name in ("step_count", "factor", "weight", "energy", "mean", "signal", "norms", "largest"):
            assert_equal([before[name]], [after[name]])
        assert_equal(list(before["moments"].values()), list(after["moments"].values()))

    def test_other_shapes_of_as_many_elements_do_not_fit(self, statistic, named):
        _, scaler = self.trained(statistic, named)
        other = VarianceGradientScaler(self.source(parameters((5, 6), (5,), (1,)), named), statistic=statistic)
        with pytest.raises(ValueError, match="does not fit"):
            other.load_state_dict(scaler.state_dict())

    def test_loaded_without_parameters_it_still_reports(self, statistic, named):
        _, scaler = self.trained(statistic, named)
        other = VarianceGradientScaler(statistic=statistic)
        other.load_state_dict(scaler.state_dict())
        assert other.metrics()["vgs/grad_mean_ema"] == scaler.metrics()["vgs/grad_mean_ema"]
        other.reset_statistics()
        VarianceGradientScaler(statistic=statistic).load_state_dict(other.state_dict())

    def test_reset_begins_again(self, statistic, named):
        params, scaler = self.trained(statistic, named)
        scaler.reset_statistics()
        assert scaler.step_count == 0
        assert scaler.get_scaling_factor() == 1.0
        assert scaler.get_normalized_variance() == 0.0
        fresh = VarianceGradientScaler(
            self.source(params, named), statistic=statistic, beta=0.9, warmup_steps=10, apply_to="gradient"
        )
        assert_equal(self.next_step(scaler, params), self.next_step(fresh, params))


class TestUpdateModeState:
    def test_copies_are_attached_to_nothing_and_say_so(self):
        params = parameters((3,))
        optimizer = torch.optim.SGD(params, lr=0.1)
        scaler = build(params, "update", optimizer)
        noisy_gradients(params, 0)
        copied = copy.deepcopy(scaler)
        with pytest.raises(RuntimeError, match="attach"):
            copied.scale_gradients()
        scaler.scale_gradients()

    def test_save_load_step_equals_uninterrupted(self):
        def make():
            params = parameters(*SHAPES)
            optimizer = torch.optim.Adam(params, lr=0.1)
            return params, optimizer, build(params, "update", optimizer, warmup_steps=5)

        params, optimizer, scaler = make()
        run(scaler, params, 10, optimizer)
        others, other_optimizer, other = make()
        with torch.no_grad():
            for mine, theirs in zip(others, params, strict=True):
                mine.copy_(theirs)
        other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        other.load_state_dict(scaler.state_dict())
        run(scaler, params, 3, optimizer, first=10)
        run(other, others, 3, other_optimizer, first=10)
        assert_equal(values(params), values(others))


class TestMetrics:
    NAMES = (
        "grad_norm_ema", "grad_mean_ema", "grad_var_ema", "grad_max_ema", "normalized_variance", "scaling_factor",
        "scaling_factor_p10", "scaling_factor_p50", "scaling_factor_p90", "step_count", "warmup_active",
        "tensor_variance_p10", "tensor_variance_p50", "tensor_variance_p90",
    )  # fmt: skip

    @pytest.mark.parametrize("statistic", STATISTICS)
    def test_names_and_types(self, statistic):
        params = parameters(*SHAPES)
        scaler = build(params, statistic=statistic)
        for _ in range(2):
            metrics = scaler.metrics()
            assert set(metrics) == {f"vgs/{name}" for name in self.NAMES}
            assert all(isinstance(v, torch.Tensor) and v.dim() == 0 and v.isfinite() for v in metrics.values())
            run(scaler, params, 3)

    @pytest.mark.parametrize("statistic", STATISTICS)
    def test_totals_of_a_constant_gradient(self, statistic):
        params = parameters((2,), (2,))
        scaler = build(params, statistic=statistic)
        for _ in range(7):
            params[0].grad, params[1].grad = torch.tensor([3.0, -4.0]), torch.tensor([1.0, 2.0])
            scaler.scale_gradients()
            scaler.step()
        metrics = {k.removeprefix("vgs/"): v.item() for k, v in scaler.metrics().items()}
        assert metrics["grad_norm_ema"] == pytest.approx(math.sqrt(30), rel=1e-5)
        assert metrics["grad_mean_ema"] == pytest.approx(0.5, rel=1e-5)
        assert metrics["grad_var_ema"] == pytest.approx(30 / 4 - 0.25, rel=1e-5)
        assert metrics["grad_max_ema"] == pytest.approx(4.0, rel=1e-5)
        assert metrics["step_count"] == 7
        assert metrics["warmup_active"] == 1
        now = {k: v.item() for k, v in scaler.compute_gradient_statistics().items()}
        expected = {"grad_norm": math.sqrt(30), "grad_mean": 0.5, "grad_var": 30 / 4 - 0.25, "grad_max": 4.0}
        assert now == pytest.approx(expected, rel=1e-5)

    @pytest.mark.parametrize("statistic", STATISTICS)
    def test_totals_are_averages_over_time(self, statistic):
        beta = 0.8
        params = parameters((2,))
        scaler = build(params, statistic=statistic, beta=beta)
        grads = [torch.tensor(g) for g in 2 * ([3.0, -4.0], [1.0, 2.0], [0.0, 6.0], [8.0, 1.0], [2.0, 2.0], [5.0, 5.0])]
        for grad in grads:
            params[0].grad = grad.clone()
            scaler.scale_gradients()
            scaler.step()
        weights = torch.tensor([beta ** (len(grads) - 1 - t) for t in range(len(grads))])
        metrics = {k.removeprefix("vgs/"): v.item() for k, v in scaler.metrics().items()}

        def average(values, weights=weights):
            return (torch.stack(values) * weights).sum().item() / weights.sum().item()

        mean = average([g.mean() for g in grads])
        assert metrics["grad_norm_ema"] == pytest.approx(average([g.norm() for g in grads]), rel=1e-5)
        assert metrics["grad_mean_ema"] == pytest.approx(mean, rel=1e-5)
        variance = average([g.square().mean() for g in grads]) - mean**2
        assert metrics["grad_var_ema"] == pytest.approx(variance, rel=1e-5)
        # On a CPU every 11th.
        sampled = average([grads[0].abs().amax(), grads[11].abs().amax()], torch.tensor([beta, 1.0]))
        assert metrics["grad_max_ema"] == pytest.approx(sampled, rel=1e-5)

    def test_quantiles_are_over_the_update(self):
        params = parameters(*SHAPES)
        scaler = build(params, warmup_steps=20)
        factors = []
        for step in range(40):
            if step == 20:
                scaler.reset_history()
                factors.clear()
            run(scaler, params, 1, first=step, noise=3.0)
            factors.append(scaler.get_scaling_factor())
        metrics = scaler.metrics()
        for percent in (10, 50, 90):
            expected = torch.tensor(factors).quantile(percent / 100).item()
            assert metrics[f"vgs/scaling_factor_p{percent}"].item() == pytest.approx(expected, rel=1e-5)
        assert metrics["vgs/scaling_factor_p90"] < 1
        assert metrics["vgs/warmup_active"] == 0

    def test_history_beyond_its_length_keeps_the_newest(self):
        params = parameters((2,))
        scaler = build(params, warmup_steps=100)
        run(scaler, params, 100 + 512, noise=3.0)
        assert scaler.metrics()["vgs/scaling_factor_p90"] < 1

    def test_logger_gets_numbers_at_every_step(self):
        class Logger:
            def __init__(self):
                self.records = []

            def record(self, key, value):
                self.records.append((key, value))

        logger = Logger()
        params = parameters(*SHAPES)
        scaler = build(params, logger=logger)
        run(scaler, params, 2)
        assert [k for k, _ in logger.records].count("vgs/scaling_factor") == 2
        assert all(type(v) is float for _, v in logger.records)
        assert pickle.loads(pickle.dumps(scaler)).logger is None

    def test_gradient_statistics_without_gradients_are_zero(self):
        statistics = VarianceGradientScaler(parameters((2,))).compute_gradient_statistics()
        assert {k: v.item() for k, v in statistics.items()} == dict.fromkeys(
            ("grad_norm", "grad_mean", "grad_var", "grad_max"), 0.0
        )


EARLIER = {"step_count": 320, "grad_mean_ema": 1.5e-05, "grad_var_ema": 1.7e-07, "grad_norm_ema": 0.030}


def test_states_of_earlier_versions_keep_what_means_the_same():
    model = torch.nn.Linear(3, 2)
    scaler = VarianceGradientScaler(model.named_parameters(), warmup_steps=2)
    for _ in range(5):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        scaler.scale_gradients()
        scaler.step()
    assert scaler.get_scaling_factor() < 1
    with pytest.warns(FutureWarning, match=r"of an earlier version.*begins anew, with its warm-up"):
        scaler.load_state_dict({**EARLIER, "grad_max_ema": 0.5, "beta": 0.99, "alpha": 0.1})
    assert scaler.step_count == 0
    assert scaler.get_scaling_factor() == 1
    assert scaler.get_normalized_variance() == 0
    # The next step continues the averages over the whole gradient, and begins those of each tensor.
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert float(scaler.scale_gradients()) == 1
    metrics = scaler.metrics()
    assert float(metrics["vgs/grad_norm_ema"]) == pytest.approx(0.99 * 0.030 + 0.01 * 8**0.5)
    assert float(metrics["vgs/grad_max_ema"]) == pytest.approx(0.99 * 0.5 + 0.01)
    assert float(metrics["vgs/grad_mean_ema"]) == pytest.approx(1)


def test_states_of_earlier_versions_before_their_first_step():
    scaler = VarianceGradientScaler([torch.zeros(3)])
    with pytest.warns(FutureWarning):
        scaler.load_state_dict({"step_count": 0, "grad_mean_ema": None, "grad_var_ema": None, "grad_norm_ema": None})
    assert scaler.metrics()["vgs/grad_norm_ema"] == 0


@pytest.mark.parametrize("wrong", ["0.1", True, float("inf"), -1.0, [0.1], torch.zeros(2), 10**400])
def test_states_of_earlier_versions_that_are_wrong(wrong):
    scaler = VarianceGradientScaler([torch.zeros(3)])
    with pytest.warns(FutureWarning), pytest.raises(ValueError, match="Invalid grad_norm_ema"):
        scaler.load_state_dict({**EARLIER, "grad_norm_ema": wrong})
