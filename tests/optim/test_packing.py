"""What is kept from step to step to make the next one cheaper must never be taken for something else."""

from __future__ import annotations

import copy
import pickle
import weakref

import pytest
import torch

from driftproof.optim import UPGD, AdaptiveUPGD, VarianceGradientScaler, _gradient_statistics, functional

from .helpers import OPTIMIZERS, assert_equal, parameters, set_gradients, values

SHAPES = [(8, 40), (300, 30), (3,), (), (130,), (95, 95)]


def moments(scaler: VarianceGradientScaler) -> list[torch.Tensor]:
    return list(scaler.state_dict()["moments"].values())


class TestPreparedGroups:
    """Each test steps once before it changes something, so that there is something to use again."""

    @staticmethod
    def stepped(optimizer_class=AdaptiveUPGD, **kwargs):
        torch.manual_seed(0)
        params = parameters((4, 3), (5,), (2, 2))
        optimizer = optimizer_class(params, lr=0.01, **kwargs)
        set_gradients(params, 0)
        optimizer.step()
        return params, optimizer

    @staticmethod
    def step(params, optimizer, index=1):
        torch.manual_seed(index)
        set_gradients(params, index)
        optimizer.step()
        return values(params)

    @pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
    @pytest.mark.parametrize("replace", ["entry", "data", "state"])
    def test_state_may_be_replaced(self, optimizer_class, replace):
        results = []
        for replaced in (False, True):
            params, optimizer = self.stepped(optimizer_class)
            state = optimizer.state[params[1]]
            new = torch.linspace(-1, 1, 5)
            if not replaced:
                state["avg_utility"].copy_(new)
            elif replace == "entry":
                state["avg_utility"] = new
            elif replace == "data":
                state["avg_utility"].data = new
            else:
                optimizer.state[params[1]] = {**state, "avg_utility": new}
            results.append([*self.step(params, optimizer), optimizer.state[params[1]]["avg_utility"]])
        assert_equal(*results, atol=1e-7, rtol=1e-6)

    def test_an_option_may_be_switched(self):
        noise = {"sigma": 0.1, "adaptive_noise": True, "noise_reference": "gradient"}
        params, optimizer = self.stepped(**noise)
        optimizer.param_groups[0]["instant_noise_scale"] = False
        self.step(params, optimizer)
        assert "grad_norm_ema" in optimizer.state[params[0]]
        optimizer.param_groups[0]["instant_noise_scale"] = True
        self.step(params, optimizer, 2)
        assert "grad_norm_ema" not in optimizer.state[params[0]]

    def test_sparse_gradients_raise_in_every_step(self):
        params, optimizer = self.stepped()
        params[0].grad = params[0].grad.to_sparse()
        with pytest.raises(RuntimeError, match="sparse"):
            optimizer.step()

    def test_gradients_are_not_kept_alive(self):
        params, optimizer = self.stepped()
        self.step(params, optimizer)
        grads = [weakref.ref(p.grad) for p in params]
        optimizer.zero_grad(set_to_none=True)
        assert not any(grad() is not None for grad in grads)

    def test_another_layout_of_the_same_parameter(self):
        """Kernels that walk over raw memory would mix up elements."""
        results = []
        for twist in (lambda t: t, lambda t: t.t().contiguous().t()):
            params, optimizer = self.stepped(UPGD, sigma=0.0)
            params[0].data = twist(params[0].data)
            results.append(self.step(params, optimizer))
        assert_equal(*results, atol=1e-7, rtol=1e-6)

    def test_a_copy_is_independent(self):
        params, optimizer = self.stepped()
        twins, twin = copy.deepcopy((params, optimizer))
        before = values(twins)
        expected = self.step(params, optimizer)
        assert_equal(values(twins), before)
        assert_equal(self.step(twins, twin), expected)


class TestPackedMoments:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
    @pytest.mark.parametrize("missing", [set(), {0}, {1, 4}])
    def test_equal_those_of_single_tensors(self, monkeypatch, missing, dtype):
        results = []
        for small in (_gradient_statistics._SMALL, 0):
            monkeypatch.setattr(_gradient_statistics, "_SMALL", small)
            params = parameters(*SHAPES, dtype=dtype)
            scaler = VarianceGradientScaler(params, warmup_steps=0, beta=0.9)
            factors = []
            for step in range(12):
                set_gradients(params, step, missing=missing if step % 3 == 1 else set())
                if step == 5:
                    params[4].grad[:2] = torch.tensor([torch.inf, torch.nan])
                    params[1].grad[0, 0] = torch.nan
                factors.append(scaler.scale_gradients())
                scaler.step()
            grads = [p.grad.float() for p in params if p.grad is not None]
            metrics = [value.float() for value in scaler.metrics().values()]
            results.append([*factors, *grads, *metrics, *moments(scaler)])
        assert_equal(*results, atol=1e-6, rtol=1e-5)

    @pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
    def test_a_copy_is_independent_and_goes_on_alike(self, duplicate):
        params = parameters(*SHAPES)
        scaler = VarianceGradientScaler(params, warmup_steps=0)
        set_gradients(params, 0)
        scaler.scale_gradients()
        twins, twin = duplicate((params, scaler))
        before = moments(twin)
        set_gradients(params, 1)
        factor = scaler.scale_gradients()
        assert_equal(moments(twin), before)
        set_gradients(twins, 1)
        assert twin.scale_gradients() == factor
        assert_equal(moments(twin), moments(scaler))

    def test_a_pickle_holds_every_moment_once(self):
        params = parameters(*[(64,)] * 50)
        scaler = VarianceGradientScaler(params)
        bare = pickle.dumps(params)
        assert len(pickle.dumps(scaler)) < 2.5 * len(bare) + 20_000

    def test_a_state_without_parameters_can_be_copied(self):
        params = parameters(*SHAPES)
        scaler = VarianceGradientScaler(params)
        set_gradients(params, 0)
        scaler.scale_gradients()
        loaded = VarianceGradientScaler()
        loaded.load_state_dict(scaler.state_dict())
        twin = copy.deepcopy(loaded)
        twin.update_parameters(params)
        assert_equal(moments(twin), moments(scaler))


def test_the_factor_as_a_number_is_that_of_the_formula():
    params = parameters(*SHAPES)
    scaler = VarianceGradientScaler(params, warmup_steps=3, alpha=0.5)
    for step in range(6):
        set_gradients(params, step, missing={2})
        factor = scaler.scale_gradients()
        torch.testing.assert_close(factor, functional.scaling_factor(scaler._statistics, scaler.settings()))
        assert (scaler.get_scaling_factor() == 1) == (step < 3)
        scaler.step()
