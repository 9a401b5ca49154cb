"""The fast form of the step against the reference form, and the member axis against separate optimizers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from driftproof.optim import UPGD, AdaptiveUPGD, functional
from driftproof.optim import _foreach as fast_form

from .helpers import NOISES, OPTIMIZERS, assert_equal, parameters, set_gradients, values

SHAPES = st.lists(st.lists(st.integers(1, 6), min_size=0, max_size=3).map(tuple), min_size=1, max_size=5)


def run(optimizer_class, shapes, foreach, steps, missing_rate=0.0, dtype=torch.float32, split=None, **kwargs):
    torch.manual_seed(3)
    params = parameters(*shapes, dtype=dtype)
    split = len(params) if split is None else split
    groups = [{"params": params[:split]}, {"params": params[split:], "lr": 0.003, "weight_decay": 0.1}]
    optimizer = optimizer_class([g for g in groups if g["params"]], lr=0.001, foreach=foreach, **kwargs)
    chance = torch.Generator().manual_seed(5)
    for step in range(steps):
        missing = {i for i in range(len(params)) if torch.rand((), generator=chance) < missing_rate}
        set_gradients(params, step, missing=missing)
        optimizer.step()
    return params, optimizer


class TestFastFormEqualsReference:
    @pytest.mark.parametrize("steps", [100, pytest.param(1000, marks=pytest.mark.slow)])
    @pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
    @settings(max_examples=8)
    @given(
        shapes=SHAPES,
        split=st.integers(0, 5),
        missing_rate=st.sampled_from([0.0, 0.3]),
        gate=st.sampled_from(["anchored", "minmax"]),
        noise=st.sampled_from(NOISES),
        temperature=st.sampled_from([0.5, 1.0, 5.0]),
        maximize=st.booleans(),
        capturable=st.booleans(),
    )
    def test_over_many_steps(self, optimizer_class, shapes, split, missing_rate, steps, **kwargs):
        """Gradients do not depend on the parameters, so rounding can add up but not explode."""
        kwargs |= kwargs.pop("noise")
        split = min(split, len(shapes))
        results = [
            values(run(optimizer_class, shapes, foreach, steps, missing_rate, split=split, **kwargs)[0])
            for foreach in (None, False)
        ]
        assert_equal(*results, atol=1e-6, rtol=3e-6)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("noise", NOISES)
    @pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
    def test_half_precision_within_one_unit_in_the_last_place(self, optimizer_class, noise, dtype):
        shapes = [(8, 5), (3,), ()]
        pairs = [run(optimizer_class, shapes, foreach, 100, 0.2, dtype=dtype, **noise) for foreach in (None, False)]
        for fast, slow in zip(pairs[0][0], pairs[1][0], strict=True):
            # Neighbours of one sign are neighbours as integers.
            ulps = (fast.detach().view(torch.int16).int() - slow.detach().view(torch.int16).int()).abs()
            assert ulps.max() <= 1
        states = [[s["avg_utility"] for s in optimizer.state.values()] for _, optimizer in pairs]
        assert all(t.dtype == torch.float32 for t in states[0])
        assert_equal(*states, atol=1e-2 if dtype == torch.bfloat16 else 2e-3, rtol=1e-2)

    @pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
    def test_large_tensors_are_worked_on_in_buckets(self, optimizer_class, monkeypatch):
        monkeypatch.setitem(fast_form._BUCKET_ELEMENTS, "cpu", 50)
        shapes = [(30,), (30,), (200,), (7, 7), (1,)]
        results = [values(run(optimizer_class, shapes, foreach, 20, sigma=0.1)[0]) for foreach in (None, False)]
        assert_equal(*results, atol=1e-6, rtol=1e-6)

    def test_the_fast_form_is_the_default(self, monkeypatch):
        calls = []
        monkeypatch.setattr(fast_form, "move", lambda *args: calls.append(args))
        for foreach, expected in ((None, 1), (True, 2), (False, 2)):
            params = parameters((3, 2), (2,))
            optimizer = UPGD(params, foreach=foreach)
            set_gradients(params, 0)
            optimizer.step()
            assert len(calls) == expected

    @pytest.mark.parametrize("capturable", [False, True])
    def test_double_precision(self, capturable):
        results = [
            values(run(AdaptiveUPGD, [(5, 5), (3,)], foreach, 50, dtype=torch.float64, capturable=capturable)[0])
            for foreach in (None, False)
        ]
        assert_equal(*results, atol=1e-12, rtol=1e-12 if not capturable else 1e-6)

    @pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
    def test_capturable_step_counts_change_nothing(self, optimizer_class):
        results = [
            values(run(optimizer_class, [(5, 5), (3,)], None, 100, 0.2, sigma=0.0, capturable=capturable)[0])
            for capturable in (False, True)
        ]
        assert_equal(*results, atol=1e-6, rtol=1e-5)

    @pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
    def test_layouts_that_are_not_contiguous(self, optimizer_class):
        """Kernels that walk over raw memory would mix up elements."""

        def step(transform) -> list[Tensor]:
            torch.manual_seed(0)
            weights = torch.randn(4, 3, 5, 5), torch.randn(6, 7), torch.randn(10)
            params = [nn.Parameter(transform(w)) for w in weights]
            optimizer = optimizer_class(params, lr=0.1, sigma=0.0)
            for _ in range(3):
                for i, param in enumerate(params):
                    generator = torch.Generator().manual_seed(i)
                    param.grad = transform(torch.randn(param.shape, generator=generator))
                optimizer.step()
            return values(params)

        def twisted(t: Tensor) -> Tensor:
            if t.dim() == 4:
                return t.to(memory_format=torch.channels_last)
            return t.t().contiguous().t() if t.dim() == 2 else torch.stack([t, t])[0]

        assert_equal(step(lambda t: t), step(twisted), atol=1e-6, rtol=1e-6)

    def test_gradient_of_another_layout_than_its_parameter(self):
        results = []
        for twist in (lambda t: t, lambda t: t.t().contiguous().t()):
            params = parameters((6, 7))
            optimizer = AdaptiveUPGD(params, lr=0.1, sigma=0.0)
            set_gradients(params, 0)
            params[0].grad = twist(params[0].grad)
            optimizer.step()
            results.append(values(params))
        assert_equal(*results, atol=1e-6, rtol=1e-6)


MEMBERS = 4


class TestMembers:
    """A step with a member axis equals as many separate optimizers that see the same noise."""

    @staticmethod
    def group(params, grads, settings_, **state):
        zeros = lambda: [torch.zeros_like(p) for p in params]  # noqa: E731
        return functional.Group(
            settings_,
            params=params,
            grads=grads,
            utilities=state.get("utilities") or zeros(),
            steps=state.get("steps") or [torch.zeros(()) for _ in params],
            first_moments=zeros() if settings_.betas else [],
            second_moments=zeros() if settings_.betas else [],
            norm_emas=[torch.zeros(MEMBERS) for _ in params] if settings_.averages_norms else [],
        )

    @pytest.mark.parametrize("foreach", [True, False])
    @pytest.mark.parametrize("capturable", [True, False])
    @pytest.mark.parametrize("gate", ["anchored", "minmax"])
    @pytest.mark.parametrize("noise", NOISES)
    @pytest.mark.parametrize("optimizer_class", [UPGD, AdaptiveUPGD])
    def test_equal_separate_optimizers(self, optimizer_class, noise, gate, capturable, foreach):
        shapes, steps = [(5, 3), (3,), (2, 2, 2)], 30
        lrs, decays, temperatures = [0.01, 0.1, 0.001, 0.03], [0.0, 0.1, 0.01, 1.0], [1.0, 0.5, 2.0, 1.0]
        sigmas = [noise["sigma"] * factor for factor in (1.0, 2.0, 0.5, 1.0)]
        betas = [0.9, 0.99, 0.0, 0.5]
        options = {k: v for k, v in noise.items() if k != "sigma"}
        generator = torch.Generator().manual_seed(0)
        start = [torch.randn(MEMBERS, *shape, generator=generator) for shape in shapes]
        grads = [[torch.randn(MEMBERS, *shape, generator=generator) for shape in shapes] for _ in range(steps)]
        draws = [[torch.randn(MEMBERS, *shape, generator=generator) for shape in shapes] for _ in range(steps)]

        params = [p.clone() for p in start]
        group = self.group(
            params,
            grads[0],
            functional.Settings(
                lr=torch.tensor(lrs),
                weight_decay=torch.tensor(decays),
                sigma=torch.tensor(sigmas) if noise["sigma"] else 0.0,
                temperature=torch.tensor(temperatures),
                beta_utility=torch.tensor(betas),
                betas=None if optimizer_class is UPGD else (0.9, 0.99),
                gate=gate,
                capturable=capturable,
                foreach=foreach,
                **options,
            ),
        )
        for step in range(steps):
            group.grads = grads[step]
            flat = torch.cat([d.flatten() for d in draws[step]])
            functional.upgd_step([group], members=True, noise=lambda count, device, f=flat: functional.RawNoise(f, 1.0))

        for member in range(MEMBERS):
            single = [p[member].clone() for p in start]
            alone = self.group(
                single,
                [],
                functional.Settings(
                    lr=lrs[member],
                    weight_decay=decays[member],
                    sigma=sigmas[member],
                    temperature=temperatures[member],
                    beta_utility=betas[member],
                    betas=None if optimizer_class is UPGD else (0.9, 0.99),
                    gate=gate,
                    **options,
                ),
            )
            alone.norm_emas = [torch.zeros(()) for _ in single] if alone.settings.averages_norms else []
            for step in range(steps):
                alone.grads = [g[member].clone() for g in grads[step]]
                flat = torch.cat([d[member].flatten() for d in draws[step]])
                functional.upgd_step([alone], noise=lambda count, device, f=flat: functional.RawNoise(f, 1.0))
            assert_equal([p[member] for p in params], single, atol=1e-6, rtol=1e-5)

    @pytest.mark.parametrize("optimizer_class", [UPGD, AdaptiveUPGD])
    def test_equals_the_class(self, optimizer_class):
        """Without noise, a member's weights are those that the optimizer class arrives at."""
        shapes, steps = [(5, 3), (3,)], 20
        members = [parameters(*shapes, seed=m) for m in range(MEMBERS)]
        params = [torch.stack([members[m][i].detach() for m in range(MEMBERS)]) for i in range(len(shapes))]
        betas = None if optimizer_class is UPGD else (0.9, 0.999)
        settings_ = functional.Settings(lr=0.01, weight_decay=0.1, sigma=0.0, beta_utility=0.999, betas=betas)
        group = self.group(params, [], settings_)
        optimizers = [optimizer_class(m, lr=0.01, weight_decay=0.1, sigma=0.0) for m in members]
        for step in range(steps):
            for m, optimizer in enumerate(optimizers):
                set_gradients(members[m], 100 * m + step)
                optimizer.step()
            group.grads = [torch.stack([members[m][i].grad for m in range(MEMBERS)]) for i in range(len(shapes))]
            functional.upgd_step([group], members=True)
        for m in range(MEMBERS):
            assert_equal([p[m] for p in params], values(members[m]), atol=1e-6, rtol=1e-5)

    def test_state_may_be_replaced_between_steps(self):
        """As when a weak member takes over the state of a strong one."""
        results = []
        for replaced in (False, True):
            params = [torch.ones(2, 3)]
            settings_ = functional.Settings(lr=0.1, weight_decay=0.0, sigma=0.0, beta_utility=0.9)
            group = self.group(params, [torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])], settings_)
            functional.upgd_step([group], members=True)
            if replaced:
                group.utilities = [torch.zeros(2, 3)]
            else:
                group.utilities[0].zero_()
            functional.upgd_step([group], members=True)
            results.append(params)
        assert_equal(*results)

    def test_noise_is_drawn_for_each_member(self):
        params = [torch.zeros(MEMBERS, 1000)]
        settings_ = functional.Settings(lr=1.0, weight_decay=0.0, sigma=1.0, beta_utility=0.9)
        functional.upgd_step([self.group(params, [torch.zeros_like(params[0])], settings_)], members=True)
        correlation = torch.corrcoef(params[0])
        assert (correlation - torch.eye(MEMBERS)).abs().max() < 0.15
