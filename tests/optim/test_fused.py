"""The kernels of a step of several members against torch's operations."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from driftproof.optim import _fused, functional
from tests.gpu import without_waiting
from tests.helpers import output_of

on_gpu = pytest.mark.gpu
TOLERANCE = 2e-5
"""Relative errors, in the Euclidean norm of each member's part of a tensor."""
SIZES = [(7, 1, 300, 9000, 3, 128), (4096,), (1,), (32, 16, 2048)]
KEYS = "abcdefg"
VECTORS = ("weight", "energy", "signal", "norms", "largest", "step_count", "factor")


@pytest.fixture(autouse=True)
def switched_on(monkeypatch):
    monkeypatch.setattr(_fused, "ENABLED", True)


def per_member(members, low, high, device):
    return (low + (high - low) * torch.rand(members)).to(device)


def settings(members, device, adam=True, **options):
    numbers = {
        "lr": (1e-4, 1e-1),
        "weight_decay": (0.0, 0.1),
        "sigma": (0.0, 0.5),
        "beta_utility": (0.5, 0.999),
        "temperature": (0.5, 2.0),
        "eps": (1e-8, 1e-4),
    }
    values = {name: per_member(members, *bounds, device) for name, bounds in numbers.items()}
    values["beta_utility"][0] = 0.0
    values["sigma"][-1] = 0.0
    betas = tuple(per_member(members, *bounds, device) for bounds in ((0.0, 0.9), (0.4, 0.999)))
    return functional.Settings(**values, betas=betas if adam else None, capturable=True, **options)


def scaling(members, device):
    bounds = {
        "beta": (0.3, 0.999),
        "alpha": (0.1, 1.0),
        "eps": (1e-8, 1e-4),
        "warmup_steps": (0, 3),
        "min_scaling_factor": (0.01, 0.3),
        "variance_cap": (1.0, 50.0),
    }
    return functional.ScalingSettings(**{name: per_member(members, *each, device) for name, each in bounds.items()})


def group(params, chosen):
    def zeros():
        return [torch.zeros_like(params)]

    moments = [zeros(), zeros()] if chosen.betas else [[], []]
    counts = [torch.zeros(len(params), device=params.device)]
    return functional.Group(chosen, [params], [], zeros(), counts, *moments)


class Case:
    """Members that take steps by the kernels, or by torch's operations."""

    def __init__(self, sizes, members, device, adam=True, scales="gradient", seed=0, **options):
        torch.manual_seed(seed)
        self.sizes, self.members, self.scales = sizes, members, scales
        params = torch.randn(members, sum(sizes)).to(device)
        self.group = group(params, settings(members, device, adam, **options))
        self.scaling = scaling(members, device)
        self.limit = per_member(members, 0.1, 10.0, device)
        self.statistics = None
        self.keys = list(KEYS[: len(sizes)])
        if scales:
            parts = torch.split(params, sizes, 1)
            self.statistics = functional.GradientStatistics(self.keys, parts, "elementwise", members)
        self.kernels = functional.MemberKernels(sizes, members, params.device)

    def take(self, grads, proceed, noise, by_kernels):
        """What the step of a population does with gradients of its members; returns norms by parameter."""
        assert functional.reason_against_kernels(self.group, self.keys, self.statistics) is None
        if by_kernels:
            measured = self.kernels.measure(grads, self.statistics, self.scaling.beta)
            squares = measured.squares
        else:
            parts = torch.split(grads, self.sizes, 1)
            squares = torch.stack([torch.linalg.vector_norm(part, dim=1) for part in parts], 1).square()
        norm = squares.sum(1).sqrt()
        taken = proceed & torch.isfinite(norm)
        factor, weight, follows = torch.ones_like(norm), None, taken & (norm < functional.HUGE)
        if not by_kernels:
            grads = torch.where(taken.unsqueeze(1), grads, 0)
        if self.statistics is not None and by_kernels:
            factor, weight = functional.vgs_measured_step(self.statistics, measured, self.scaling, follows)
        elif self.statistics is not None:
            parts = torch.split(grads, self.sizes, 1)
            factor = functional.vgs_step(self.statistics, parts, self.scaling, follows, joint=grads.clone())
        scale = factor if self.scales == "gradient" else torch.ones_like(factor)
        scale = scale * (self.limit / (norm * scale + 1e-6)).clamp_max(1)
        update = factor if self.scales == "update" else None
        if by_kernels:
            self.kernels.step(
                *(self.group, grads),
                proceed=taken,
                scale=scale,
                noise=noise,
                statistics=self.statistics,
                weight=weight,
                factor=update,
            )
            return squares
        scale = torch.where(taken, scale, 0)
        self.group.grads = [grads * scale.unsqueeze(1)]
        before = self.group.params[0].clone()
        functional.upgd_step([self.group], members=True, noise=noise, proceed=taken, zeroed=True)
        if update is not None:
            param = self.group.params[0]
            param.copy_(before + update.unsqueeze(1) * (param - before))
        return squares

    def tensors(self):
        """Everything that a step changes, ``[M, ...]``."""
        names = ("params", "utilities", "steps", "first_moments", "second_moments")
        found = {name: getattr(self.group, name)[0] for name in names if getattr(self.group, name)}
        if self.statistics is not None:
            found |= {f"statistics.{name}": getattr(self.statistics, name) for name in VECTORS}
            found["statistics.moments"] = torch.cat(self.statistics.moments, 1)
        return {name: tensor.clone() for name, tensor in found.items()}


def error(ours, expected):
    """The worst relative error of a member."""
    ours, expected = (each.double().reshape(len(each), -1) for each in (ours, expected))
    worst = ((ours - expected).norm(dim=1) / expected.norm(dim=1).clamp_min(1e-30)).tolist()
    return max(worst, default=0.0)


def gradients(sizes, members, generator):
    """Of different scales by parameter and member, with a mean, and zeros."""
    parts = []
    for size in sizes:
        scale, mean = torch.randn(2, members, 1, generator=generator).exp()
        part = scale * (mean + torch.randn(members, size, generator=generator))
        parts.append(part * (torch.rand(members, size, generator=generator) > 0.1))
    return torch.cat(parts, 1)


def spoiled(grads, step):
    """Member 1 cannot take step 1, the others can take theirs: gradients are NaN, infinite, huge, tiny or zero."""
    grads = grads.clone()
    if step == 1:
        grads[1, -1] = torch.nan
        grads[3] *= 1e-25
    if step == 2:
        grads[0, 0] = torch.inf
        grads[2, -1] = 1e17
        grads[4] = 0
    if step == 3:
        grads[3, grads.shape[1] // 2] = -1e13
        grads[1] *= 1e-12
    return grads


def noises(case, kind, device):
    """Sources of the same noise for both forms: drawn as bytes or floats."""
    count = case.group.numel
    flat = torch.randint(-127, 128, (count,), dtype=torch.int8) if kind == "bytes" else torch.randn(count)
    raw = functional.RawNoise(flat.to(device), 1 / 73 if kind == "bytes" else 1.0)
    return lambda asked, _: raw if asked == count else pytest.fail("another number of draws")


def check(device, seed, sizes, steps=4, members=5, noise_kind="floats", **options):
    """Both forms, from the same state and gradients; also that skipped members keep every bit."""
    ours, expected = (Case(sizes, members, device, seed=seed, **options) for _ in range(2))
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        grads = spoiled(gradients(sizes, members, generator), step).to(device)
        proceed = (torch.rand(members, generator=generator) > 0.2).to(device)
        noise = noises(ours, noise_kind, device)
        before = ours.tensors()
        squares = ours.take(grads.clone(), proceed, noise, by_kernels=True)
        others = expected.take(grads.clone(), proceed, noise, by_kernels=False)
        finite = torch.isfinite(others).all(1)
        assert torch.equal(finite, torch.isfinite(squares).all(1))
        assert error(squares[finite], others[finite]) < TOLERANCE
        taken, theirs = proceed & finite, expected.tensors()
        for name, tensor in ours.tensors().items():
            assert torch.equal(tensor[~taken], before[name][~taken]), (name, step)
            assert torch.isfinite(tensor).all(), (name, step)
            assert error(tensor, theirs[name]) < TOLERANCE, (name, step, error(tensor, theirs[name]), options)
        if not options.get("adam", True):
            assert error(ours.group.grads[0][taken], expected.group.grads[0][taken]) < TOLERANCE
        assert not torch.equal(ours.tensors()["params"][taken], before["params"][taken]) or not taken.any()
        # Roundings do not add up over steps.
        for tensor, source in zip(storages(ours), storages(expected), strict=True):
            tensor.copy_(source)


def storages(case):
    lists = (case.group.params, case.group.utilities, case.group.steps)
    moments = (case.group.first_moments, case.group.second_moments)
    followed = [] if case.statistics is None else case.statistics.storages()
    return [tensor for each in (*lists, *moments) for tensor in each] + followed


def check_all(device):
    """Called by the tests, and by this file as a script, where Triton interprets the kernels."""
    choices = itertools.product(
        (True, False), ("anchored", "minmax"), ("gradient", "update", None), ("floats", "bytes")
    )
    for seed, (adam, gate, scales, kind) in enumerate(choices):
        for sizes in SIZES if seed < 3 else SIZES[:1]:
            check(device, seed, sizes, adam=adam, gate=gate, scales=scales, noise_kind=kind)
    check_last_member(3, 5000, device)
    check(device, 99, SIZES[3], members=5, steps=8)
    check(device, 100, SIZES[0], members=70 if device == "cuda" else 6)


@on_gpu
def test_kernels_equal_torch():
    check_all("cuda")


@on_gpu
def test_interpreted_kernels_equal_torch():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-m", "tests.optim.test_fused"], env=environment, check=True)


@on_gpu
@pytest.mark.parametrize("options", [{}, {"adam": False, "gate": "minmax", "scales": None}, {"scales": "update"}])
def test_a_captured_step_waits_for_nothing_and_equals_others(options):
    sizes, members = SIZES[0], 5
    captured, plain = (Case(sizes, members, "cuda", **options) for _ in range(2))
    grads, proceed = torch.zeros(members, sum(sizes), device="cuda"), torch.zeros(members, device="cuda").bool()
    noise = noises(captured, "floats", "cuda")
    captured.take(grads, proceed, noise, by_kernels=True)  # Compiles, and changes nothing.
    with without_waiting():
        captured.take(grads, proceed, noise, by_kernels=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.take(grads, proceed, noise, by_kernels=True)
    generator = torch.Generator().manual_seed(0)
    for step in range(4):
        given = spoiled(gradients(sizes, members, generator), step).cuda()
        flags = (torch.rand(members, generator=generator) > 0.3).cuda()
        grads.copy_(given)
        proceed.copy_(flags)
        graph.replay()
        plain.take(given, flags, noise, by_kernels=True)
        for name, tensor in captured.tensors().items():
            assert torch.equal(tensor, plain.tensors()[name]), (name, step)


def check_last_member(members, size, device):
    """The last one's step, with settings that are plain numbers, against that of a population of one."""
    chosen = functional.Settings(0.01, 0.1, sigma=0.0, beta_utility=0.9, capturable=True)
    params = torch.randn(members, size, device=device)
    grads = torch.randn(members, size, device=device)
    alone = group(params[-1:].clone(), chosen)
    alone.grads = [grads[-1:].clone()]
    proceed = torch.ones(members, dtype=torch.bool, device=device)
    functional.upgd_step([alone], members=True, proceed=proceed[:1], zeroed=True)
    together, second = group(params, chosen), size // 3
    kernels = functional.MemberKernels([size - second, second], members, params.device)
    squares = kernels.measure(grads).squares[-1:]
    parts = torch.split(grads[-1:], kernels.sizes, 1)
    assert error(squares, torch.stack([part.double().square().sum(1) for part in parts], 1)) < TOLERANCE
    kernels.step(together, grads, proceed=proceed, scale=torch.ones_like(grads[:, 0]), noise=functional.draw_noise)
    for ours, expected in zip((params, together.utilities[0]), (alone.params[0], alone.utilities[0]), strict=True):
        assert error(ours[-1:], expected) < TOLERANCE


@on_gpu
def test_places_beyond_32_bits():
    members, size = 64, 35_000_003
    if torch.cuda.mem_get_info()[0] < 4 * members * size * 4:
        pytest.skip("needs 36 GB")
    check_last_member(members, size, "cuda")


def test_triton_is_imported_when_it_is_needed():
    code = "import sys, driftproof.optim.functional; print('driftproof.optim._fused.launches' in sys.modules)"
    assert output_of(code) == "False"


class TestReasons:
    """Why torch's operations run."""

    @pytest.fixture
    def case(self, monkeypatch):
        monkeypatch.setattr(_fused, "launcher", lambda: SimpleNamespace(INTERPRETED=True))
        return Case((3, 4), 2, "cpu")

    @staticmethod
    def reason(case):
        return functional.reason_against_kernels(case.group, case.keys, case.statistics)

    def test_there_is_none(self, case):
        assert self.reason(case) is None

    def test_they_are_switched_off(self, case, monkeypatch):
        monkeypatch.setattr(_fused, "ENABLED", False)
        assert "DRIFTPROOF_FUSED_STEP=0" in self.reason(case)

    def test_triton_is_not_installed(self, case, monkeypatch):
        monkeypatch.setattr(_fused, "launcher", lambda: None)
        assert self.reason(case) == "Triton is not installed"

    def test_nothing_is_interpreted(self, case, monkeypatch):
        monkeypatch.setattr(_fused, "launcher", lambda: SimpleNamespace(INTERPRETED=False))
        assert self.reason(case) == "the parameters are on cpu"

    @pytest.mark.parametrize(
        ("options", "reason"), [({"adaptive_noise": True}, "adaptive noise"), ({"foreach": False}, "reference form")]
    )
    def test_settings(self, case, options, reason):
        case.group.settings = settings(2, "cpu", **options)
        assert reason in self.reason(case)

    def test_layout(self, case):
        whole = case.group
        case.group = functional.Group(**{**vars(whole), "params": [*whole.params, *whole.params]})
        assert "side by side" in self.reason(case)
        case.group = functional.Group(**{**vars(whole), "steps": [torch.zeros(())]})
        assert "side by side" in self.reason(case)
        case.group = functional.Group(**{**vars(whole), "utilities": [whole.utilities[0].double()]})
        assert "contiguous float32" in self.reason(case)

    def test_statistics(self, case):
        parts = torch.split(case.group.params[0], case.sizes, 1)
        case.statistics = functional.GradientStatistics(case.keys, parts, "spatial_mean", 2)
        assert "spatial_mean" in self.reason(case)
        case.statistics = functional.GradientStatistics(case.keys[:1], parts[:1], "elementwise", 2)
        assert "other tensors" in self.reason(case)
        case.statistics = functional.GradientStatistics(["b", "a"], parts, "elementwise", 2)
        assert "other tensors" in self.reason(case)


if __name__ == "__main__":
    launcher = _fused.launcher()
    assert launcher is not None
    assert launcher.INTERPRETED
    check_all("cpu")
