"""The optimizers where people use them: schedulers, scalers, state dicts, copies, pickles, closures."""

from __future__ import annotations

import copy
import io
import itertools
import pickle

import pytest
import torch
from torch import nn

from driftproof.optim import UPGD, UPGDW, AdaptiveUPGD

from .helpers import NOISES, OPTIMIZERS, assert_equal, parameters, set_gradients, values

SHAPES = [(6, 4), (4,), (1,)]


def trained(optimizer_class, steps=5, dtype=torch.float32, **kwargs):
    params = parameters(*SHAPES, dtype=dtype)
    optimizer = optimizer_class(params, lr=0.01, **kwargs)
    for step in range(steps):
        set_gradients(params, step)
        optimizer.step()
    return params, optimizer


def next_step(params, optimizer, seed=9):
    torch.manual_seed(seed)
    set_gradients(params, 99)
    optimizer.step()
    return values(params)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
class TestStateTravels:
    """After each way to copy an optimizer, the *next* step is the one the original takes."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("capturable", [False, True])
    def test_state_dict(self, optimizer_class, noise, dtype, capturable):
        params, optimizer = trained(optimizer_class, dtype=dtype, capturable=capturable, **noise)
        buffer = io.BytesIO()
        torch.save(optimizer.state_dict(), buffer)
        buffer.seek(0)
        copies = [nn.Parameter(p.detach().clone()) for p in params]
        other = optimizer_class(copies, lr=0.5)
        other.load_state_dict(torch.load(buffer, weights_only=True))
        assert_equal(next_step(params, optimizer), next_step(copies, other))
        for mine, theirs in zip(optimizer.state.values(), other.state.values(), strict=True):
            assert mine.keys() == theirs.keys()
            assert_equal(list(mine.values()), list(theirs.values()))

    def test_deepcopy(self, optimizer_class, noise):
        params, optimizer = trained(optimizer_class, **noise)
        copies, other = copy.deepcopy((params, optimizer))
        assert_equal(next_step(params, optimizer), next_step(copies, other))

    def test_pickle(self, optimizer_class, noise):
        params, optimizer = trained(optimizer_class, **noise)
        copies, other = pickle.loads(pickle.dumps((params, optimizer)))
        assert_equal(next_step(params, optimizer), next_step(copies, other))


class TestStateDicts:
    def test_a_loaded_state_is_a_copy(self):
        """torch aliases tensors that need no conversion: two optimizers would write to one state."""
        params, optimizer = trained(AdaptiveUPGD)
        state = optimizer.state_dict()
        copies = [nn.Parameter(p.detach().clone()) for p in params]
        other = AdaptiveUPGD(copies)
        other.load_state_dict(state)
        before = copy.deepcopy(optimizer.state_dict()["state"])
        next_step(copies, other)
        for key, entries in optimizer.state_dict()["state"].items():
            assert_equal(list(before[key].values()), list(entries.values()))

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            *itertools.product(
                ["avg_utility", "exp_avg", "exp_avg_sq"],
                [torch.ones(1), torch.ones(4, 6), torch.ones(24), torch.ones(30), "x", None],
            ),
            *itertools.product(["step"], [torch.ones(2), "x", None]),
        ],
    )
    def test_a_state_of_the_wrong_shape_changes_nothing(self, name, value):
        """torch's fused kernels trust the shapes: such a state would write beyond its memory."""
        _, optimizer = trained(UPGDW)
        bad = copy.deepcopy(optimizer.state_dict())
        bad["state"][0][name] = value
        before = copy.deepcopy(optimizer.state_dict()["state"])
        with pytest.raises(ValueError, match=f"'{name}' of parameter 0"):
            optimizer.load_state_dict(bad)
        for key, entries in optimizer.state_dict()["state"].items():
            assert_equal(list(before[key].values()), list(entries.values()))

    def test_hooks_of_others_have_their_say(self):
        params, optimizer = trained(AdaptiveUPGD)
        state = optimizer.state_dict()
        other = AdaptiveUPGD([nn.Parameter(p.detach().clone()) for p in params])

        def ones(_, loaded):
            entries = {k: {**v, "first_moment": torch.ones_like(v["first_moment"])} for k, v in loaded["state"].items()}
            return {**loaded, "state": entries}

        other.register_load_state_dict_pre_hook(ones)
        other.register_load_state_dict_post_hook(lambda o: [s["sec_moment"].fill_(9) for s in o.state.values()])
        other.load_state_dict(state)
        for entries in other.state.values():
            assert (entries["first_moment"] == 1).all()
            assert (entries["sec_moment"] == 9).all()

    def test_state_of_adamw_continues_in_upgdw(self):
        params = parameters(*SHAPES)
        adamw = torch.optim.AdamW(params, lr=0.01)
        for step in range(5):
            set_gradients(params, step)
            adamw.step()
        optimizer = UPGDW(params, gate="minmax")
        optimizer.load_state_dict(adamw.state_dict())
        assert optimizer.param_groups[0]["lr"] == 0.01
        assert optimizer.param_groups[0]["gate"] == "minmax"
        set_gradients(params, 5)
        gradient, weight = params[0].grad.clone(), params[0].detach().clone()
        optimizer.step()
        # As if every gradient so far had been like this one.
        utility = optimizer.state[params[0]]["avg_utility"]
        torch.testing.assert_close(utility, -gradient * weight * (1 - 0.999**6), atol=1e-6, rtol=1e-3)

    def test_old_pickles_get_the_options_they_lack(self):
        params, optimizer = trained(AdaptiveUPGD, sigma=0.0)
        for options in (*optimizer.param_groups, optimizer.defaults):
            for name in ("gate", "temperature", "capturable"):
                del options[name]
        copies, other = pickle.loads(pickle.dumps((params, optimizer)))
        assert other.param_groups[0]["gate"] == "anchored"
        next_step(copies, other)

    def test_options_of_a_group_survive_an_old_state(self):
        params = parameters((3,), (2,))
        optimizer = UPGD([{"params": params[:1], "gate": "minmax"}, {"params": params[1:]}], lr=0.1)
        state = optimizer.state_dict()
        for group in state["param_groups"]:
            del group["gate"]
        optimizer.load_state_dict(state)
        assert [group["gate"] for group in optimizer.param_groups] == ["minmax", "anchored"]

    def test_saved_utilities_carry_no_memory_of_their_neighbours(self):
        params, optimizer = trained(UPGD)
        for state in optimizer.state_dict()["state"].values():
            utility = state["avg_utility"]
            assert utility.untyped_storage().nbytes() == utility.numel() * utility.element_size()
        assert len(pickle.dumps(optimizer)) < len(pickle.dumps(params)) + 20_000

    @pytest.mark.parametrize("step_type", [int, float, torch.tensor])
    @pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
    def test_old_states_get_the_options_they_lack(self, optimizer_class, step_type):
        params, optimizer = trained(optimizer_class, gate="minmax", temperature=2.0)
        state = optimizer.state_dict()
        newer = ("gate", "temperature", "adaptive_noise", "noise_reference", "noise_beta", "min_noise_std",
                 "instant_noise_scale", "maximize", "foreach", "capturable")  # fmt: skip
        for group in state["param_groups"]:
            for name in newer:
                del group[name]
        for entries in state["state"].values():
            entries["step"] = step_type(entries["step"].item())
        copies = [nn.Parameter(p.detach().clone()) for p in params]
        other = optimizer_class(copies, gate="minmax", temperature=2.0)
        other.load_state_dict(state)
        assert_equal(next_step(params, optimizer), next_step(copies, other))

    def test_loaded_state_stays_packed(self):
        _, optimizer = trained(AdaptiveUPGD)
        optimizer.load_state_dict(optimizer.state_dict())
        storages = {s["avg_utility"].untyped_storage().data_ptr() for s in optimizer.state.values()}
        assert len(storages) == 1

    def test_wrong_number_of_parameters_is_refused(self):
        _, optimizer = trained(UPGD)
        with pytest.raises(ValueError, match="parameter group"):
            UPGD(parameters((2,))).load_state_dict(optimizer.state_dict())


class TestPyTorch:
    @pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
    def test_learns(self, optimizer_class):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
        inputs = torch.randn(256, 4)
        targets = inputs.prod(1, keepdim=True).tanh()
        optimizer = optimizer_class(model.parameters(), lr=0.1 if optimizer_class is UPGD else 0.01, weight_decay=0.0)
        losses = []
        for _ in range(300):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.6 * losses[0]

    @pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
    @pytest.mark.parametrize("tensor_lr", [False, True])
    def test_scheduler_sets_the_step_size(self, optimizer_class, tensor_lr):
        params = parameters((5,))
        lr = torch.tensor(0.1) if tensor_lr else 0.1
        optimizer = optimizer_class(params, lr=lr, sigma=0.0, weight_decay=0.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.0)
        set_gradients(params, 0)
        optimizer.step()
        scheduler.step()
        before = values(params)
        set_gradients(params, 1)
        optimizer.step()
        assert_equal(before, values(params))

    @pytest.mark.parametrize("foreach", [None, False])
    @pytest.mark.parametrize("capturable", [False, True])
    @pytest.mark.parametrize("lr", [torch.tensor(0.05), torch.tensor([0.05])])
    @pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
    def test_tensor_lr_equals_a_number(self, optimizer_class, lr, capturable, foreach):
        results = []
        for rate in (0.05, lr):
            params = parameters(*SHAPES)
            optimizer = optimizer_class(
                params, lr=rate, weight_decay=0.1, sigma=0.0, capturable=capturable, foreach=foreach
            )
            for step in range(5):
                set_gradients(params, step)
                optimizer.step()
            results.append(values(params))
        assert_equal(*results, atol=1e-6, rtol=1e-6)

    @pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
    def test_groups_have_their_own_lr(self, optimizer_class):
        params = parameters((4,), (4,))
        optimizer = optimizer_class([{"params": params[:1], "lr": 0.0}], lr=0.1, sigma=0.0)
        optimizer.add_param_group({"params": params[1:]})
        before = values(params)
        set_gradients(params, 0)
        optimizer.step()
        assert torch.equal(before[0], params[0])
        assert not torch.equal(before[1], params[1])

    @pytest.mark.parametrize("foreach", [None, False])
    @pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
    def test_maximize_is_descent_on_the_negative(self, optimizer_class, foreach):
        results = []
        for sign, maximize in ((1.0, False), (-1.0, True)):
            torch.manual_seed(0)
            params = parameters(*SHAPES)
            optimizer = optimizer_class(params, lr=0.1, maximize=maximize, foreach=foreach)
            for step in range(5):
                set_gradients(params, step, scale=sign)
                optimizer.step()
            results.append(values(params))
        assert_equal(*results)

    def test_closure_is_called_with_gradients_enabled(self):
        params = parameters((3,))
        optimizer = UPGD(params, lr=0.1)

        def closure():
            optimizer.zero_grad()
            loss = params[0].square().sum()
            loss.backward()
            return loss

        first = optimizer.step(closure)
        assert optimizer.step(closure) < first

    @pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
    def test_grad_scaler_skips_infinite_gradients(self, optimizer_class):
        params = parameters((3,))
        optimizer = optimizer_class(params, lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        before = values(params)
        scaler.scale(params[0].sum() * float("inf")).backward()
        scaler.step(optimizer)
        scaler.update()
        assert_equal(before, values(params))
        assert scaler.get_scale() == 4.0
        optimizer.zero_grad()
        scaler.scale(params[0].sum()).backward()
        scaler.step(optimizer)
        assert params[0].isfinite().all()
        assert not torch.equal(before[0], params[0])

    @pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
    def test_step_hooks_and_zero_grad(self, optimizer_class):
        params, optimizer = trained(optimizer_class)
        calls = []
        optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
        optimizer.register_step_post_hook(lambda *_: calls.append("post"))
        next_step(params, optimizer)
        assert calls == ["pre", "post"]
        optimizer.zero_grad()
        assert all(p.grad is None for p in params)

    @pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
    def test_capture_in_a_graph_needs_capturable(self, optimizer_class, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        params, optimizer = parameters((3,)), None
        for capturable in (True, False):
            optimizer = optimizer_class(params, capturable=capturable)
            set_gradients(params, 0)
            if capturable:
                optimizer.step()
        with pytest.raises(RuntimeError, match="capturable=True"):
            optimizer.step()

    def test_gradients_are_not_changed(self):
        for optimizer_class in (UPGD, UPGDW):
            params = parameters(*SHAPES)
            optimizer = optimizer_class(params, lr=0.1, maximize=True)
            set_gradients(params, 0)
            before = [p.grad.clone() for p in params]
            optimizer.step()
            assert_equal(before, [p.grad for p in params])


@pytest.mark.parametrize("capturable", [False, True])
def test_default_dtype_and_device_do_not_matter(capturable):
    results = []
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            with torch.device("cpu"):
                torch.manual_seed(0)
                params, _ = trained(AdaptiveUPGD, capturable=capturable, sigma=0.1)
        finally:
            torch.set_default_dtype(torch.float32)
        results.append(values(params))
        assert all(p.dtype == torch.float32 for p in params)
    assert_equal(*results)


def test_a_default_device_elsewhere_does_not_matter():
    params = parameters(*SHAPES)
    optimizer = AdaptiveUPGD(params, lr=0.01)
    set_gradients(params, 0)
    with torch.device("meta"):
        optimizer.step()
    assert all(p.isfinite().all() for p in params)


def test_capturable_may_be_switched():
    params, optimizer = trained(AdaptiveUPGD, sigma=0.0)
    others, other = trained(AdaptiveUPGD, sigma=0.0)
    for step, capturable in enumerate((True, False, True)):
        optimizer.param_groups[0]["capturable"] = capturable
        set_gradients(params, 10 + step)
        set_gradients(others, 10 + step)
        optimizer.step()
        other.step()
    assert_equal(values(params), values(others), atol=1e-6, rtol=1e-5)
