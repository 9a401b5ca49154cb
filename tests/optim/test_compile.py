"""``torch.compile(optimizer.step, fullgraph=True)`` equals the uncompiled optimizer, noise included.

Most tests trace the step without generating code, which takes long.
"""

from __future__ import annotations

import copy

import pytest
import torch

from driftproof.optim import UPGD, UPGDW, AdaptiveUPGD, VarianceGradientScaler

from .helpers import NOISES, OPTIMIZERS, assert_equal, parameters, set_gradients, values

SHAPES = [(6, 4), (4,), (1,), ()]
CLOSE = {"atol": 1e-6, "rtol": 1e-5}
# The compiler itself warns when it is imported.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(optimizer, backend="eager"):
    return torch.compile(optimizer.step, fullgraph=True, backend=backend)


def assert_same_course(build, backend="eager", steps=6, prepare=set_gradients):
    """Compiled and uncompiled steps of two equal optimizers lead to the same parameters and state."""
    results = []
    for compile_it in (False, True):
        params = parameters(*SHAPES)
        optimizer = build(params)
        step = compiled(optimizer, backend) if compile_it else optimizer.step
        torch.manual_seed(1)
        for i in range(steps):
            prepare(params, i)
            step()
        states = [entry for param in params for entry in optimizer.state[param].values()]
        results.append(values(params) + [entry.clone() for entry in states])
    assert_equal(*results, **CLOSE)


@pytest.mark.parametrize(
    "options",
    [{}, {"gate": "minmax", "temperature": 2.0, "maximize": True, "sigma": 0.0}, {**NOISES[2]}, {**NOISES[4]}],
    ids=["default", "minmax", "adaptive noise", "averaged norm"],
)
@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
def test_compiled_equals_eager(optimizer_class, options):
    assert_same_course(lambda params: optimizer_class(params, **{"lr": 0.01, "sigma": 0.1, **options}))


@pytest.mark.slow
@pytest.mark.parametrize("sigma", [0.0, 0.1])
@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
def test_generated_code_equals_eager(optimizer_class, sigma):
    assert_same_course(lambda params: optimizer_class(params, lr=0.01, sigma=sigma), backend="inductor")


def test_groups_dtypes_and_missing_gradients():
    def build(params):
        params[0].data = params[0].data.bfloat16()
        groups = [{"params": params[:2], "lr": 0.1}, {"params": params[2:], "weight_decay": 0.1}]
        return AdaptiveUPGD(groups, lr=0.01, sigma=0.1)

    def some_gradients(params, step):
        set_gradients(params, step, missing={1} if step % 2 else set())

    assert_same_course(build, prepare=some_gradients)


def test_nothing_but_tensors_of_zero_elements():
    optimizer = UPGD(parameters((0, 3)))
    optimizer.param_groups[0]["params"][0].grad = torch.zeros(0, 3)
    compiled(optimizer)()


def test_eager_steps_and_loaded_states_in_between():
    params, others = parameters(*SHAPES), parameters(*SHAPES)
    optimizer, other = UPGDW(params, lr=0.01), UPGDW(others, lr=0.01)
    step = compiled(optimizer)
    torch.manual_seed(0)
    for i, take in enumerate([step, optimizer.step, step, step]):
        set_gradients(params, i)
        take()
        if i == 2:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    torch.manual_seed(0)
    for i in range(4):
        set_gradients(others, i)
        other.step()
    assert_equal(values(params), values(others), **CLOSE)
    assert optimizer.state[params[0]]["step"].item() == 4


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step:UserWarning")
def test_a_scheduler_that_sets_a_tensor_needs_no_recompilation():
    """The scheduler wraps the step in code that torch does not compile, so it comes second, and warns in vain."""
    params = parameters(*SHAPES)
    optimizer = AdaptiveUPGD(params, lr=torch.tensor(0.1), sigma=0.0, weight_decay=0.0)
    step = compiled(optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.0)
    moved = []
    for i in range(4):
        before = values(params)
        set_gradients(params, i)
        with torch.compiler.set_stance("fail_on_recompile" if i > 0 else "default"):
            step()
        scheduler.step()
        moved.append(not torch.equal(before[0], params[0]))
    assert moved == [True, True, False, False]


def test_a_step_that_is_not_taken_changes_nothing():
    params = parameters(*SHAPES)
    optimizer = AdaptiveUPGD(params, lr=0.1, sigma=0.1)
    set_gradients(params, 0)
    optimizer.step()
    step, before = compiled(optimizer), copy.deepcopy((values(params), optimizer.state_dict()["state"]))
    set_gradients(params, 1, scale=float("nan"))
    for found, same in ((1.0, True), (0.0, False)):
        optimizer.found_inf = torch.tensor(found)
        step()
        assert torch.equal(before[0][0], params[0]) == same
        if same:
            for old, new in zip(before[1].values(), optimizer.state_dict()["state"].values(), strict=True):
                assert_equal(list(old.values()), list(new.values()))
        set_gradients(params, 1)
    assert optimizer.state[params[0]]["step"].item() == 2
    assert all(param.isfinite().all() for param in params)


def test_scaled_gradients_of_the_scaler():
    """Variance gradient scaling works on gradients between the backward pass and the compiled step."""

    def scaled(params, step):
        set_gradients(params, step)
        if step == 0:
            scalers[id(params[0])] = VarianceGradientScaler(params, apply_to="gradient", warmup_steps=1)
        scalers[id(params[0])].scale_gradients()
        scalers[id(params[0])].step()

    scalers = {}
    assert_same_course(lambda params: UPGD(params, lr=0.1, adaptive_noise=True), prepare=scaled)
