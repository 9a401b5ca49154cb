"""On a CUDA device: no synchronisation, CUDA graphs equal to eager steps, the same results as on a CPU."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from driftproof.optim import UPGD, AdaptiveUPGD, VarianceGradientScaler
from driftproof.optim.masking import step_where

from ..gpu import without_waiting
from .helpers import NOISES, OPTIMIZERS, assert_equal, parameters, set_gradients, values

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPES = [(64, 32), (32,), (1,), (), (300,)]


def cuda_parameters(seed=0, dtype=torch.float32):
    return [nn.Parameter(p.detach().cuda()) for p in parameters(*SHAPES, seed=seed, dtype=dtype)]


def cuda_gradients(params, step):
    hosts = [nn.Parameter(torch.empty(p.shape, dtype=p.dtype)) for p in params]
    set_gradients(hosts, step)
    for param, host in zip(params, hosts, strict=True):
        if param.grad is None:
            param.grad = host.grad.cuda()
        else:
            param.grad.copy_(host.grad)


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("gate", ["anchored", "minmax"])
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
def test_step_and_metrics_do_not_synchronise(optimizer_class, noise, gate, capturable):
    params = cuda_parameters()
    optimizer = optimizer_class(params, lr=0.01, gate=gate, capturable=capturable, **noise)
    cuda_gradients(params, 0)
    optimizer.step()
    optimizer.metrics()
    with without_waiting():
        for _ in range(3):
            optimizer.step()
            optimizer.metrics()


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("gate", ["anchored", "minmax"])
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
def test_fast_form_equals_reference(optimizer_class, noise, gate, capturable):
    results = []
    for foreach in (None, False):
        torch.manual_seed(0)
        params = cuda_parameters()
        optimizer = optimizer_class(params, lr=0.001, gate=gate, capturable=capturable, foreach=foreach, **noise)
        for step in range(100):
            cuda_gradients(params, step)
            optimizer.step()
        results.append(values(params))
    assert_equal(*results, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
def test_half_precision_within_one_unit_in_the_last_place(optimizer_class, dtype):
    results = []
    for foreach in (None, False):
        torch.manual_seed(0)
        params = cuda_parameters(dtype=dtype)
        optimizer = optimizer_class(params, lr=0.001, foreach=foreach)
        for step in range(50):
            cuda_gradients(params, step)
            optimizer.step()
        results.append(values(params))
    for fast, slow in zip(*results, strict=True):
        assert (fast.view(torch.int16).int() - slow.view(torch.int16).int()).abs().max() <= 1


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
def test_same_results_as_on_a_cpu(optimizer_class, capturable):
    hosts, params = parameters(*SHAPES), cuda_parameters()
    on_host, on_device = (optimizer_class(p, lr=0.01, sigma=0.0, capturable=capturable) for p in (hosts, params))
    for step in range(50):
        set_gradients(hosts, step)
        cuda_gradients(params, step)
        on_host.step()
        on_device.step()
    assert_equal(values(hosts), [p.cpu() for p in values(params)], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
def test_state_travels_between_devices(optimizer_class, capturable):
    hosts = parameters(*SHAPES)
    optimizer = optimizer_class(hosts, lr=0.01, sigma=0.0, capturable=capturable)
    for step in range(5):
        set_gradients(hosts, step)
        optimizer.step()
    params = [nn.Parameter(p.detach().cuda()) for p in hosts]
    other = optimizer_class(params, lr=0.01, sigma=0.0)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    set_gradients(hosts, 5)
    cuda_gradients(params, 5)
    optimizer.step()
    other.step()
    assert_equal(values(hosts), [p.cpu() for p in values(params)], atol=1e-5, rtol=1e-4)


def test_default_dtype_does_not_matter():
    results = []
    for dtype in (torch.float32, torch.float64):
        params = cuda_parameters()
        optimizer = AdaptiveUPGD(params, lr=0.01, sigma=0.0)
        torch.set_default_dtype(dtype)
        try:
            for step in range(3):
                cuda_gradients(params, step)
                optimizer.step()
        finally:
            torch.set_default_dtype(torch.float32)
        results.append(values(params))
    assert_equal(*results)


def test_parameters_on_two_devices():
    """The host waits for the extremes of the device, and only where it needs them."""
    hosts, mixed = parameters(*SHAPES), parameters(*SHAPES)
    mixed[0] = nn.Parameter(mixed[0].detach().cuda())
    optimizers = [AdaptiveUPGD(p, lr=0.01, sigma=0.0) for p in (hosts, mixed)]
    for step in range(5):
        set_gradients(hosts, step)
        for mine, theirs in zip(mixed, hosts, strict=True):
            mine.grad = theirs.grad.to(mine.device)
        torch.cuda._sleep(50_000_000)
        for optimizer in optimizers:
            optimizer.step()
    assert_equal(values(hosts), [p.cpu() for p in values(mixed)], atol=1e-6, rtol=1e-5)


def test_capturable_may_be_switched():
    params, others = cuda_parameters(), cuda_parameters()
    optimizer, other = (AdaptiveUPGD(p, lr=0.01, sigma=0.0) for p in (params, others))
    for step, capturable in enumerate((False, True, False, False)):
        optimizer.param_groups[0]["capturable"] = capturable
        for p in (params, others):
            cuda_gradients(p, step)
        with without_waiting() if step == 3 else nullcontext():
            optimizer.step()
            other.step()
    assert_equal(values(params), values(others), atol=1e-6, rtol=1e-5)


def capture(work):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


@pytest.mark.parametrize("gate", ["anchored", "minmax"])
@pytest.mark.parametrize("mode", [None, "gradient", "update"])
@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
def test_graph_equals_eager(optimizer_class, mode, gate):
    """Step counts, averages, extremes, warm-up and factors all advance with every replay."""

    def make():
        params = cuda_parameters()
        optimizer = optimizer_class(params, lr=0.01, sigma=0.0, gate=gate, capturable=True)
        scaler = None
        if mode is not None:
            scaler = VarianceGradientScaler(params, apply_to=mode, warmup_steps=6, beta=0.9)
            if mode == "update":
                scaler.attach(optimizer)

        def work():
            if scaler is not None:
                scaler.scale_gradients()
            optimizer.step()
            if scaler is not None:
                scaler.step()

        return params, scaler, work

    eager_params, eager_scaler, eager = make()
    cuda_gradients(eager_params, 0)
    for step in range(15):
        # While the graph is made, its work is done three times with the first gradients.
        cuda_gradients(eager_params, max(0, step - 2))
        eager()
    params, scaler, work = make()
    cuda_gradients(params, 0)
    first = [p.grad.clone() for p in params]

    def with_fresh_gradients():
        for param, grad in zip(params, first, strict=True):
            param.grad.copy_(grad)
        work()

    graph = capture(with_fresh_gradients)
    for step in range(3, 15):
        hosts = [nn.Parameter(torch.empty(p.shape)) for p in params]
        set_gradients(hosts, step - 2)
        for buffer, host in zip(first, hosts, strict=True):
            buffer.copy_(host.grad)
        graph.replay()
    assert_equal(values(eager_params), values(params), atol=1e-6, rtol=1e-5)
    if scaler is not None:
        assert scaler.step_count == eager_scaler.step_count == 15
        assert scaler.get_scaling_factor() == pytest.approx(eager_scaler.get_scaling_factor(), rel=1e-4)
        assert scaler.get_scaling_factor() < 1


@pytest.mark.parametrize("noise", NOISES[1:])
@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
def test_noise_is_fresh_in_every_replay(optimizer_class, noise):
    params = [nn.Parameter(torch.zeros(10_000, device="cuda"))]
    optimizer = optimizer_class(params, lr=1.0, weight_decay=0.0, capturable=True, **{**noise, "min_noise_std": 0.01})
    params[0].grad = torch.zeros_like(params[0])
    graph = capture(optimizer.step)
    moves = []
    for _ in range(2):
        before = params[0].detach().clone()
        graph.replay()
        moves.append(params[0].detach() - before)
    assert all(move.std() > 0 for move in moves)
    assert torch.corrcoef(torch.stack(moves))[0, 1].abs() < 0.05


def test_noise_has_zero_mean_and_unit_variance():
    param = nn.Parameter(torch.zeros(1_000_000, device="cuda"))
    optimizer = UPGD([param], lr=1.0, sigma=1.0, weight_decay=0.0)
    param.grad = torch.zeros_like(param)
    optimizer.step()
    assert abs(param.mean().item()) < 0.005
    assert param.std().item() == pytest.approx(1.0, rel=0.005)


@pytest.mark.parametrize("mode", ["gradient", "update"])
@pytest.mark.parametrize("optimizer_class", [*OPTIMIZERS, torch.optim.Adam, torch.optim.SGD])
@pytest.mark.filterwarnings("ignore:variance gradient scaling shrinks the gradient")
def test_masked_steps_change_nothing_and_do_not_synchronise(optimizer_class, mode):
    params = cuda_parameters()
    options = {"capturable": True} if optimizer_class in OPTIMIZERS else {"fused": True}
    optimizer = optimizer_class(params, lr=torch.tensor(0.01, device="cuda"), **options)
    scaler = VarianceGradientScaler(params, apply_to=mode, warmup_steps=1)
    if mode == "update":
        scaler.attach(optimizer)
    flags = torch.tensor([True, False, True], device="cuda").unbind()

    def tensors():
        states = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
        return [t.detach().clone() for t in (*params, *states, *scaler.state_dict()["moments"].values())]

    def step(proceed):
        scaler.scale_gradients(proceed)
        step_where(optimizer, proceed)
        scaler.step(proceed)

    cuda_gradients(params, 0)
    optimizer.step()
    results = [tensors()]
    gradients = [[torch.full_like(p, torch.nan) if i == 1 else torch.ones_like(p) for p in params] for i in range(3)]
    with without_waiting():
        for flag, grads in zip(flags, gradients, strict=True):
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
            step(flag)
            results.append(tensors())
    _, before, masked, after = results
    assert_equal(before, masked)
    assert all(not torch.equal(a, b) for a, b in zip(masked[: len(params)], after[: len(params)], strict=True))
    assert scaler.step_count == 2


@pytest.mark.parametrize("statistic", ["elementwise", "spatial_mean"])
@pytest.mark.parametrize("mode", ["gradient", "update"])
def test_scaler_does_not_synchronise(mode, statistic):
    params = cuda_parameters()
    optimizer = torch.optim.SGD(params, lr=0.01)
    scaler = VarianceGradientScaler(params, apply_to=mode, statistic=statistic, warmup_steps=1)
    if mode == "update":
        scaler.attach(optimizer)
    cuda_gradients(params, 0)
    for step in range(5):
        if step > 1:
            params[step].grad = None
        with without_waiting() if step else nullcontext():
            scaler.scale_gradients()
            optimizer.step()
            scaler.step()
            scaler.metrics()
            scaler.compute_gradient_statistics()


@pytest.mark.parametrize("statistic", ["elementwise", "spatial_mean"])
def test_scaler_equals_that_on_a_cpu_and_follows_a_moved_model(statistic):
    hosts = parameters(*SHAPES)
    moved = copy.deepcopy(hosts)
    scalers = [
        VarianceGradientScaler(p, statistic=statistic, warmup_steps=0, apply_to="gradient") for p in (hosts, moved)
    ]
    for step in range(20):
        if step == 10:
            for param in moved:
                param.grad = None
                param.data = param.data.cuda()
        set_gradients(hosts, step)
        if step < 10:
            set_gradients(moved, step)
        else:
            cuda_gradients(moved, step)
        factors = [scaler.scale_gradients().item() for scaler in scalers]
        for scaler in scalers:
            scaler.step()
        assert factors[1] == pytest.approx(factors[0], rel=1e-4)
    assert factors[0] < 0.9


@pytest.mark.parametrize("statistic", ["elementwise", "spatial_mean"])
def test_an_overflow_does_not_spoil_the_scaler(statistic):
    params = cuda_parameters()
    scaler = VarianceGradientScaler(params, statistic=statistic, warmup_steps=0)
    for step in range(6):
        cuda_gradients(params, step)
        if step == 3:
            params[0].grad[2] = torch.inf
            params[1].grad[1] = torch.nan
        scaler.scale_gradients()
        scaler.step()
    metrics = scaler.metrics()
    assert all(value.isfinite() for value in metrics.values()), metrics
    assert 0 < scaler.get_scaling_factor() < 1


def test_grad_scaler_and_autocast():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).cuda()
    optimizer = AdaptiveUPGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cuda")
    inputs = torch.randn(256, 8, device="cuda")
    targets = inputs.sum(1, keepdim=True).sin()
    losses = []
    for _ in range(200):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.mse_loss(model(inputs).float(), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("sigma", [0.0, 0.1])
@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
def test_compiled_equals_eager(optimizer_class, sigma, begun):
    """Also where the step counts of earlier steps are on the host."""
    results = []
    for compile_it in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        params = cuda_parameters()
        optimizer = optimizer_class(params, lr=0.01, sigma=sigma)
        step = torch.compile(optimizer.step, fullgraph=True) if compile_it else optimizer.step
        for i in range(5):
            cuda_gradients(params, i)
            (optimizer.step if i == 0 and begun else step)()
        results.append(values(params))
    assert_equal(*results, atol=2e-6, rtol=1e-5)
