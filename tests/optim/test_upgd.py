"""The contract of the UPGD optimizers: formulas, defaults, robustness, errors, metrics."""

from __future__ import annotations

import inspect
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from driftproof.optim import UPGD, UPGDW, AdaptiveUPGD

from .helpers import MOMENTS, NOISES, OPTIMIZERS, assert_equal, parameters, set_gradients, values


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


class ScalarOracle:
    """The formulas of the contract for a list of single weights, in plain Python and without noise."""

    def __init__(self, weights, *, lr, weight_decay, beta_utility, betas=None, eps=1e-8, gate="anchored", tau=1.0):
        self.weights = list(weights)
        self.utility = [0.0] * len(self.weights)
        self.m = [0.0] * len(self.weights)
        self.v = [0.0] * len(self.weights)
        self.t = 0
        self.lr, self.weight_decay, self.beta_utility = lr, weight_decay, beta_utility
        self.betas, self.eps, self.gate, self.tau = betas, eps, gate, tau

    def step(self, grads):
        self.t += 1
        utilities, directions = [], []
        for i, (p, g) in enumerate(zip(self.weights, grads, strict=True)):
            self.utility[i] = self.beta_utility * self.utility[i] + (1 - self.beta_utility) * (-g * p)
            utilities.append(self.utility[i] / (1 - self.beta_utility**self.t))
            if self.betas is None:
                directions.append(g)
                continue
            b1, b2 = self.betas
            self.m[i] = b1 * self.m[i] + (1 - b1) * g
            self.v[i] = b2 * self.v[i] + (1 - b2) * g * g
            directions.append(self.m[i] / (1 - b1**self.t) / (math.sqrt(self.v[i] / (1 - b2**self.t)) + self.eps))
        low, high = min(utilities), max(utilities)
        eta = high if high > 0 else max(abs(u) for u in utilities)
        for i, (u, d) in enumerate(zip(utilities, directions, strict=True)):
            if self.gate == "anchored":
                move = 2 * self.lr * d * (1 - sigmoid(self.tau * u / eta))
            else:
                n = min(max((u - low) / (high - low + 1e-8), 0), 1)
                move = self.lr * d * (1 - sigmoid(2 * self.tau * (n - 0.5)))
            self.weights[i] = self.weights[i] * (1 - self.lr * self.weight_decay) - move


class TestFormulas:
    @pytest.mark.parametrize("foreach", [None, False])
    @pytest.mark.parametrize("gate", ["anchored", "minmax"])
    @pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
    def test_step_is_the_published_formula(self, optimizer_class, gate, foreach):
        weights, steps, tau = [0.5, -1.0, 0.0, 2.0], 7, 3.0
        param = nn.Parameter(torch.tensor(weights, dtype=torch.float64))
        kwargs = {"lr": 0.1, "weight_decay": 0.01, "sigma": 0.0, "gate": gate, "temperature": tau, "foreach": foreach}
        betas, beta_utility = None, 0.9
        if optimizer_class is not UPGD:
            betas = (0.8, 0.95)
            kwargs |= {"betas": betas} if optimizer_class is UPGDW else {"beta1": betas[0], "beta2": betas[1]}
        if optimizer_class is UPGDW:
            beta_utility = betas[1]
        else:
            kwargs["beta_utility"] = beta_utility
        optimizer = optimizer_class([param], **kwargs)
        oracle = ScalarOracle(
            weights, lr=0.1, weight_decay=0.01, beta_utility=beta_utility, betas=betas, gate=gate, tau=tau
        )
        for step in range(steps):
            grads = [math.sin(step + i) for i in range(len(weights))]
            param.grad = torch.tensor(grads, dtype=torch.float64)
            optimizer.step()
            oracle.step(grads)
        assert param.tolist() == pytest.approx(oracle.weights, abs=1e-12)

    @pytest.mark.parametrize(
        ("optimizer_class", "reference_class"), [(UPGD, torch.optim.SGD), (UPGDW, torch.optim.AdamW)]
    )
    def test_weight_of_zero_utility_moves_as_without_a_gate(self, optimizer_class, reference_class):
        """Weights at zero have zero utility; the others are there to make the gate work."""
        zeros, others = nn.Parameter(torch.zeros(5)), nn.Parameter(torch.randn(5))
        plain = nn.Parameter(torch.zeros(5))
        optimizer = optimizer_class([zeros, others], lr=0.01, sigma=0.0, weight_decay=0.0)
        reference = reference_class([plain], lr=0.01, weight_decay=0.0)
        zeros.grad, plain.grad, others.grad = torch.arange(5.0), torch.arange(5.0), torch.randn(5)
        optimizer.step()
        reference.step()
        assert_equal(values([zeros]), values([plain]), atol=1e-8, rtol=1e-5)

    @pytest.mark.parametrize("gate", ["anchored", "minmax"])
    def test_useful_weights_move_less(self, gate):
        """With equal gradients, utility grows with -p, and the distance travelled must shrink."""
        start = torch.linspace(2, -2, 9)
        param = nn.Parameter(start.clone())
        optimizer = UPGD([param], lr=0.1, weight_decay=0.0, sigma=0.0, gate=gate)
        param.grad = torch.ones(9)
        optimizer.step()
        distance = (start - param.detach()).abs()
        assert (distance.diff() < 0).all()

    def test_protection_is_not_inverted_when_all_utilities_are_negative(self):
        start = torch.tensor([1.0, 10.0])
        param = nn.Parameter(start.clone())
        optimizer = UPGD([param], lr=0.1, weight_decay=0.0, sigma=0.0)
        param.grad = torch.ones(2)
        optimizer.step()
        distance = start - param.detach()
        expected = [0.2 * sigmoid(0.1), 0.2 * sigmoid(1.0)]
        assert distance.tolist() == pytest.approx(expected, rel=1e-5)

    def test_gate_compares_across_groups_and_tensors(self):
        """A tensor alone is its own maximum; beside a far more useful one in another group it is close to neutral."""

        def distance(other_weight: float) -> float:
            small, other = nn.Parameter(torch.tensor([-1.0])), nn.Parameter(torch.tensor([other_weight]))
            optimizer = UPGD([{"params": [small]}, {"params": [other]}], lr=0.1, weight_decay=0.0, sigma=0.0)
            small.grad, other.grad = torch.ones(1), torch.ones(1)
            optimizer.step()
            return -1.0 - small.item()

        assert distance(other_weight=-1.0) == pytest.approx(0.2 * sigmoid(-1.0), rel=1e-5)
        assert distance(other_weight=-1e6) == pytest.approx(0.1, rel=1e-4)

    def test_parameters_without_gradient_do_not_set_the_scale(self):
        quiet, active = nn.Parameter(torch.tensor([-1e6])), nn.Parameter(torch.tensor([-1.0]))
        optimizer = UPGD([quiet, active], lr=0.1, weight_decay=0.0, sigma=0.0)
        quiet.grad, active.grad = torch.ones(1), torch.ones(1)
        optimizer.step()
        before = active.item()
        quiet.grad = None
        optimizer.step()
        assert before - active.item() == pytest.approx(0.2 * sigmoid(-1.0), rel=1e-4)

    @pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
    def test_noise_perturbs_useless_weights_more(self, optimizer_class):
        """Zero gradients leave the noise alone to act, behind the gates of an earlier step."""
        half = 50_000
        param = nn.Parameter(torch.cat([torch.full((half,), -1.0), torch.full((half,), 1.0)]))
        optimizer = optimizer_class([param], lr=1.0, weight_decay=0.0, sigma=1.0, temperature=4.0)
        param.grad = torch.full_like(param, 1e-6)
        optimizer.step()
        before = param.detach().clone()
        param.grad = torch.zeros_like(param)
        optimizer.step()
        moved = param.detach() - before
        useful, useless = moved[:half].std(), moved[half:].std()
        assert useless > 10 * useful

    def test_noise_has_the_promised_deviation(self):
        param = nn.Parameter(torch.zeros(200_000))
        optimizer = UPGD([param], lr=0.5, sigma=0.2, weight_decay=0.0)
        param.grad = torch.zeros_like(param)
        optimizer.step()
        assert param.std().item() == pytest.approx(0.5 * 0.2, rel=0.01)
        assert abs(param.mean().item()) < 0.001


class TestSignatures:
    def test_are_real_optimizers_without_rl(self):
        code = (
            "import sys, torch, driftproof.optim as o;"
            "assert all(issubclass(c, torch.optim.Optimizer) for c in (o.UPGD, o.AdaptiveUPGD, o.UPGDW));"
            "bad = {'gymnasium', 'stable_baselines3'} & set(sys.modules);"
            "assert not bad, bad"
        )
        subprocess.run([sys.executable, "-c", code], check=True)

    def test_defaults_are_the_promised_ones(self):
        def defaults(optimizer_class):
            signature = inspect.signature(optimizer_class).parameters
            return {name: p.default for name, p in signature.items() if name != "params"}

        shared = {"gate": "anchored", "temperature": 1.0, "adaptive_noise": False, "noise_reference": "direction"}
        noise = {"noise_beta": 0.999, "min_noise_std": 1e-6, "instant_noise_scale": True}
        upgd = {"lr": 1e-5, "weight_decay": 1e-3, "beta_utility": 0.999, "sigma": 1e-3}
        adaptive = {**upgd, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, **noise}
        upgdw = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "sigma": 1e-3, "amsgrad": False}
        for optimizer_class, expected in ((UPGD, upgd), (AdaptiveUPGD, adaptive), (UPGDW, upgdw)):
            assert expected.items() <= defaults(optimizer_class).items()
            assert shared.items() <= defaults(optimizer_class).items()

    @pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
    def test_state_keys(self, optimizer_class):
        def keys(**kwargs):
            params = parameters((3,))
            optimizer = optimizer_class(params, **kwargs)
            set_gradients(params, 0)
            optimizer.step()
            return set(optimizer.state[params[0]])

        expected = {"step", "avg_utility", *MOMENTS[optimizer_class]}
        assert keys() == expected
        assert keys(adaptive_noise=True) == expected
        assert keys(adaptive_noise=True, noise_reference="gradient") == expected
        averaged = {"adaptive_noise": True, "noise_reference": "gradient", "instant_noise_scale": False}
        assert keys(**averaged) == expected | {"grad_norm_ema"}


class TestAdaptiveNoise:
    """Noise and direction pass the same gate, so both can be read off two runs that differ in the noise alone."""

    @staticmethod
    def ratio(optimizer_class, scale: float, steps: int = 5, **kwargs) -> float:
        def run(sigma: float):
            params = parameters((100, 200), (50,), dtype=torch.float64)
            optimizer = optimizer_class(params, lr=1e-3, weight_decay=0.0, sigma=sigma, temperature=1e-6, **kwargs)
            for step in range(steps):
                set_gradients(params, step, scale)
                before = values(params)
                torch.manual_seed(step)
                optimizer.step()
            return [after - start for after, start in zip(values(params), before, strict=True)]

        clean, noisy = run(0.0), run(0.01)
        noise = math.sqrt(sum((n - c).square().sum().item() for n, c in zip(noisy, clean, strict=True)))
        return noise / math.sqrt(sum(c.square().sum().item() for c in clean))

    @pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
    def test_ratio_to_direction_survives_any_scale_of_gradients(self, optimizer_class):
        kwargs = {"adaptive_noise": True, "min_noise_std": 0.0}
        ratio = self.ratio(optimizer_class, 1.0, **kwargs)
        assert ratio == pytest.approx(0.01, rel=0.02)
        for scale in (1 / 6, 1e-3, 10.0):
            assert self.ratio(optimizer_class, scale, **kwargs) == pytest.approx(ratio, rel=0.01)

    def test_reference_gradient_changes_the_ratio_of_adam_like_directions(self):
        kwargs = {"adaptive_noise": True, "noise_reference": "gradient", "min_noise_std": 0.0}
        ratio = self.ratio(AdaptiveUPGD, 1.0, **kwargs)
        assert self.ratio(AdaptiveUPGD, 10.0, **kwargs) == pytest.approx(10 * ratio, rel=0.02)
        assert self.ratio(UPGD, 10.0, **kwargs) == pytest.approx(self.ratio(UPGD, 1.0, **kwargs), rel=0.01)

    @pytest.mark.parametrize("foreach", [None, False])
    @pytest.mark.parametrize("instant", [True, False])
    def test_noise_follows_the_norm_of_the_gradient(self, instant, foreach):
        """A constant norm has itself as its average, from the first step on."""
        param = nn.Parameter(torch.zeros(100_000))
        optimizer = UPGD(
            [param], lr=1.0, weight_decay=0.0, sigma=0.1, adaptive_noise=True, noise_reference="gradient",
            instant_noise_scale=instant, foreach=foreach,
        )  # fmt: skip
        grad = torch.zeros_like(param)
        grad[0] = 3.0
        for _ in range(3):
            before = param.detach().clone()
            param.grad = grad.clone()
            optimizer.step()
            moved = (param.detach() - before)[1:]
            assert moved.std().item() == pytest.approx(0.3, rel=0.02)

    def test_averaged_norm_lags_behind_a_jump(self):
        param = nn.Parameter(torch.zeros(100_000))
        optimizer = UPGD(
            [param], lr=1.0, weight_decay=0.0, sigma=0.1, adaptive_noise=True, noise_reference="gradient",
            instant_noise_scale=False, noise_beta=0.9,
        )  # fmt: skip
        average, deviations = 0.0, []
        for step, size in enumerate((1.0, 1.0, 10.0, 10.0), start=1):
            param.grad = torch.zeros_like(param)
            param.grad[0] = size
            before = param.detach().clone()
            optimizer.step()
            average = 0.9 * average + 0.1 * size
            deviations.append((param.detach() - before)[1:].std().item())
            assert deviations[-1] == pytest.approx(0.1 * average / (1 - 0.9**step), rel=0.02)
        assert deviations[2] < 0.5 < deviations[3]

    def test_switched_on_late_the_average_is_not_over_corrected(self):
        params = parameters((1000,))
        optimizer = UPGD(params, noise_reference="gradient", instant_noise_scale=False)
        for step in range(50):
            set_gradients(params, step)
            optimizer.step()
        optimizer.param_groups[0]["adaptive_noise"] = True
        set_gradients(params, 50)
        norm = params[0].grad.norm().item()
        optimizer.step()
        corrected = optimizer.state[params[0]]["grad_norm_ema"].item() / (1 - 0.999**51)
        assert corrected == pytest.approx(norm, rel=1e-4)

    def test_switched_off_and_on_again_the_average_begins_anew(self):
        params = parameters((1000,))
        optimizer = UPGD(params, adaptive_noise=True, noise_reference="gradient", instant_noise_scale=False)
        for step in range(60):
            optimizer.param_groups[0]["adaptive_noise"] = step < 5 or step == 59
            set_gradients(params, step)
            optimizer.step()
            assert ("grad_norm_ema" in optimizer.state[params[0]]) == optimizer.param_groups[0]["adaptive_noise"]
        corrected = optimizer.state[params[0]]["grad_norm_ema"].item() / (1 - 0.999**60)
        assert corrected == pytest.approx(params[0].grad.norm().item(), rel=1e-4)

    @pytest.mark.parametrize("foreach", [None, False])
    @pytest.mark.parametrize("instant", [False, True])
    @pytest.mark.parametrize("capturable", [False, True])
    def test_without_memory_the_average_is_the_norm(self, foreach, instant, capturable):
        results = []
        for beta in (0.0, 0.5):
            torch.manual_seed(0)
            params = parameters((1000,))
            optimizer = UPGD(
                params, lr=0.1, sigma=0.1, adaptive_noise=True, noise_reference="gradient", foreach=foreach,
                instant_noise_scale=instant or beta > 0, noise_beta=beta, capturable=capturable,
            )  # fmt: skip
            for step in range(3):
                set_gradients(params, step)
                optimizer.step()
            results.append(values(params))
        assert_equal(*results, atol=1e-6, rtol=1e-5)

    @pytest.mark.parametrize("foreach", [None, False])
    @pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
    def test_floor_binds_when_nothing_moves(self, optimizer_class, foreach):
        param = nn.Parameter(torch.zeros(100_000))
        optimizer = optimizer_class(
            [param], lr=1.0, weight_decay=0.0, adaptive_noise=True, min_noise_std=0.01, foreach=foreach
        )
        param.grad = torch.zeros_like(param)
        optimizer.step()
        assert param.std().item() == pytest.approx(0.01, rel=0.02)


GRADIENTS = {
    "zero": lambda p, step: torch.zeros_like(p),
    "huge": lambda p, step: 1e6 * torch.randn_like(p),
    "tiny": lambda p, step: 1e-30 * torch.randn_like(p),
    "equal utilities": lambda p, step: torch.ones_like(p) / p.detach().float().clamp_min(1e-2).to(p.dtype),
    "all negative utilities": lambda p, step: p.detach().sign(),
    "all positive utilities": lambda p, step: -p.detach().sign(),
    "sometimes none": lambda p, step: torch.randn_like(p) if (step + p.numel()) % 3 else None,
    "shrinking": lambda p, step: torch.randn_like(p) * 10.0 ** (-4 * step),
}


class TestRobustness:
    @pytest.mark.parametrize("pattern", GRADIENTS)
    @pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
    @given(
        gate=st.sampled_from(["anchored", "minmax"]),
        noise=st.sampled_from(NOISES),
        dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
        capturable=st.booleans(),
        foreach=st.sampled_from([None, False]),
        temperature=st.sampled_from([1e-3, 1.0, 100.0]),
    )
    def test_parameters_and_state_stay_finite(
        self, optimizer_class, pattern, gate, noise, dtype, capturable, foreach, temperature
    ):
        if dtype == torch.float16 and pattern == "huge":
            return  # such gradients are themselves infinite
        params = parameters((4, 3), (1,), (7,), dtype=dtype)
        groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.1}]
        optimizer = optimizer_class(
            groups, lr=1e-3, gate=gate, capturable=capturable, foreach=foreach, temperature=temperature, **noise
        )
        for step in range(12):
            for param in params:
                param.grad = GRADIENTS[pattern](param, step)
            optimizer.step()
            tensors = [*params, *(t for state in optimizer.state.values() for t in state.values())]
            assert all(t.isfinite().all() for t in tensors)
            assert all(t.dtype == torch.float32 for state in optimizer.state.values() for t in state.values())

    @pytest.mark.parametrize("noise", NOISES)
    @pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
    def test_nothing_but_decay_acts_without_gradient_and_sigma(self, optimizer_class, noise):
        params = parameters((10,), (3, 3))
        start = values(params)
        optimizer = optimizer_class(params, lr=0.1, weight_decay=0.5, **{**noise, "sigma": 0.0})
        for param in params:
            param.grad = torch.zeros_like(param)
        optimizer.step()
        assert_equal(values(params), [p * (1 - 0.1 * 0.5) for p in start], atol=1e-7, rtol=1e-6)

    def test_tiny_decay_is_not_lost_to_rounding(self):
        """The factor 1 - lr * weight_decay = 1 - 1e-8 of the defaults is exactly 1 in float32."""
        param = nn.Parameter(torch.full((1,), 1e-3))
        optimizer = UPGD([param], lr=1e-5, weight_decay=1e-3, sigma=0.0, temperature=1e-6)
        plain = 1e-3
        for _ in range(1000):
            param.grad = torch.full((1,), 1e-2)
            optimizer.step()
            plain -= 1e-5 * (1e-2 + 1e-3 * plain)
        assert param.item() == pytest.approx(plain, rel=1e-5)

    @pytest.mark.parametrize("noise", NOISES)
    @pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
    def test_same_seed_same_trajectory(self, optimizer_class, noise):
        def run(seed: int):
            torch.manual_seed(seed)
            params = parameters((50,), (5, 5))
            optimizer = optimizer_class(params, lr=0.01, **noise)
            for step in range(20):
                set_gradients(params, step)
                optimizer.step()
            return values(params)

        assert_equal(run(1), run(1))
        if noise["sigma"] > 0:
            assert not torch.equal(run(1)[0], run(2)[0])

    def test_empty_tensors_and_no_gradients_at_all(self):
        params = [nn.Parameter(torch.zeros(0)), *parameters((3,))]
        optimizer = AdaptiveUPGD(params)
        optimizer.step()
        params[0].grad = torch.zeros(0)
        set_gradients(params[1:], 0)
        optimizer.step()
        assert params[1].isfinite().all()


BAD_ARGUMENTS = [
    (OPTIMIZERS, "lr", [-1.0, math.nan, math.inf, "fast", None, True, torch.ones(2)]),
    (OPTIMIZERS, "weight_decay", [-1e-3, math.nan]),
    (OPTIMIZERS, "sigma", [-1.0, math.inf]),
    (OPTIMIZERS, "adaptive_noise", ["no", 1]),
    (OPTIMIZERS, "capturable", ["no"]),
    (OPTIMIZERS, "maximize", [None]),
    (OPTIMIZERS, "foreach", ["yes"]),
    (OPTIMIZERS, "gate", ["max", None]),
    (OPTIMIZERS, "temperature", [0.0, -1.0, math.nan]),
    (OPTIMIZERS, "noise_reference", ["noise"]),
    (OPTIMIZERS, "noise_beta", [-0.1, 1.0]),
    (OPTIMIZERS, "min_noise_std", [-1.0]),
    ([UPGD, AdaptiveUPGD], "beta_utility", [-0.1, 1.0, math.nan]),
    ([AdaptiveUPGD], "beta1", [-0.1, 1.0]),
    ([AdaptiveUPGD], "beta2", [-0.1, 1.5]),
    ([AdaptiveUPGD, UPGDW], "eps", [0.0, -1e-8]),
    ([UPGDW], "betas", [(0.9,), 0.9, (0.9, 0.99, 0.999)]),
]


class TestErrors:
    @pytest.mark.parametrize(
        ("optimizer_class", "name", "value"),
        [(c, name, v) for classes, name, bad in BAD_ARGUMENTS for c in classes for v in bad],
    )
    def test_bad_argument_is_named_with_its_value(self, optimizer_class, name, value):
        shown = "shape" if isinstance(value, torch.Tensor) else repr(value)
        with pytest.raises(ValueError, match=f"Invalid {name}") as error:
            optimizer_class(parameters((2,)), **{name: value})
        assert shown in str(error.value)
        with pytest.raises(ValueError, match=f"Invalid {name}"):
            optimizer_class([{"params": parameters((2,)), name: value}])

    @pytest.mark.parametrize("betas", [(1.0, 0.9), (0.9, -0.1)])
    def test_bad_beta_of_a_pair_is_named(self, betas):
        with pytest.raises(ValueError, match=r"Invalid betas\[[01]\]"):
            UPGDW(parameters((2,)), betas=betas)

    def test_refused_group_is_not_added(self):
        optimizer = UPGD(parameters((2,)))
        with pytest.raises(ValueError, match="Invalid lr: -1"):
            optimizer.add_param_group({"params": parameters((3,)), "lr": -1})
        assert len(optimizer.param_groups) == 1

    def test_amsgrad_is_not_implemented(self):
        with pytest.raises(NotImplementedError, match="amsgrad"):
            UPGDW(parameters((2,)), amsgrad=True)
        with pytest.raises(NotImplementedError, match="amsgrad"):
            UPGDW([{"params": parameters((2,)), "amsgrad": True}])
        params = parameters((2,))
        adamw = torch.optim.AdamW(params, amsgrad=True)
        with pytest.raises(NotImplementedError, match="amsgrad"):
            UPGDW(params).load_state_dict(adamw.state_dict())

    @pytest.mark.parametrize("lr", [-1.0, math.nan])
    def test_a_tensor_lr_is_checked_by_its_value(self, lr):
        with pytest.raises(ValueError, match=f"Invalid lr: {lr}"):
            UPGD(parameters((2,)), lr=torch.tensor(lr))

    def test_numbers_of_other_libraries_are_numbers(self):
        numpy = pytest.importorskip("numpy")
        UPGD(parameters((2,)), lr=numpy.float32(1e-3), sigma=numpy.float64(0.1), weight_decay=numpy.int64(0))

    @pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
    def test_sparse_gradients_and_complex_parameters_are_refused(self, optimizer_class):
        embedding = nn.Embedding(5, 3, sparse=True)
        embedding(torch.tensor([1])).sum().backward()
        with pytest.raises(RuntimeError, match=f"{optimizer_class.__name__} does not support sparse"):
            optimizer_class(embedding.parameters()).step()
        param = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        param.grad = torch.ones_like(param)
        with pytest.raises(RuntimeError, match="complex"):
            optimizer_class([param]).step()


class TestMetrics:
    NAMES = ("noise_to_direction", "gate_mean", "gate_std", "utility_p10", "utility_p50", "utility_p90")

    @pytest.mark.parametrize("capturable", [False, True])
    @pytest.mark.parametrize("noise", NOISES)
    @pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
    def test_are_tensors_and_change_nothing(self, optimizer_class, noise, capturable):
        params = parameters((20, 10), (10,))
        optimizer = optimizer_class(params, lr=0.01, capturable=capturable, **noise)
        set_gradients(params, 0)
        optimizer.step()
        before = values(params), optimizer.state_dict()
        metrics = optimizer.metrics()
        assert set(metrics) == {f"upgd/{name}" for name in self.NAMES}
        assert all(isinstance(v, torch.Tensor) and v.dim() == 0 and v.isfinite() for v in metrics.values())
        assert_equal(before[0], values(params))
        for key, state in optimizer.state_dict()["state"].items():
            assert_equal(list(before[1]["state"][key].values()), list(state.values()))

    def test_noise_ratio_is_the_one_measured(self):
        ratio = TestAdaptiveNoise.ratio(UPGD, scale=3.0, steps=1)
        params = parameters((100, 200), (50,))
        optimizer = UPGD(params, sigma=0.01)
        set_gradients(params, 0, 3.0)
        optimizer.step()
        assert optimizer.metrics()["upgd/noise_to_direction"].item() == pytest.approx(ratio, rel=0.02)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    def test_noise_ratio_knows_the_kind_of_noise(self, dtype):
        params = parameters((200, 300), (50,), dtype=dtype)
        for options, expected in (
            ({"adaptive_noise": True}, 0.1),
            ({"adaptive_noise": True, "noise_reference": "gradient"}, 0.1 * 60_000**0.5),
            ({}, 0.001),
        ):
            optimizer = UPGD(params, sigma=0.1, **options)
            set_gradients(params, 0, scale=100.0)
            optimizer.step()
            assert optimizer.metrics()["upgd/noise_to_direction"].item() == pytest.approx(expected, rel=0.02)

    def test_noise_ratio_without_noise_and_direction_is_zero(self):
        params = parameters((3,))
        optimizer = UPGD(params, sigma=0.0)
        set_gradients(params, 0, scale=0.0)
        optimizer.step()
        assert optimizer.metrics()["upgd/noise_to_direction"] == 0

    def test_gate_and_utility_of_known_weights(self):
        """Utilities -1, 0 and 1 have gates sigmoid(-1), 1/2 and sigmoid(1)."""
        param = nn.Parameter(torch.tensor([1.0, 0.0, -1.0]))
        optimizer = UPGD([param], sigma=0.0)
        param.grad = torch.ones(3)
        optimizer.step()
        metrics = {name.removeprefix("upgd/"): value.item() for name, value in optimizer.metrics().items()}
        assert metrics["gate_mean"] == pytest.approx(0.5, abs=1e-6)
        assert metrics["gate_std"] == pytest.approx((sigmoid(1.0) - 0.5) * math.sqrt(2 / 3), rel=1e-5)
        assert metrics["utility_p50"] == pytest.approx(0.0, abs=1e-6)
        assert metrics["utility_p10"] == pytest.approx(-1.0, rel=1e-4)

    def test_without_gradients_they_say_when_to_be_called(self):
        params = parameters((3,))
        optimizer = UPGD(params)
        set_gradients(params, 0)
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="before zero_grad"):
            optimizer.metrics()
