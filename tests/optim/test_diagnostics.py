"""The instruments read known networks rightly."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from driftproof.optim import UPGD, UPGDW, AdaptiveUPGD, diagnostics

from .helpers import parameters, set_gradients


def relu_net():
    return nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, 6), nn.ReLU(), nn.Linear(6, 2))


def test_dormant_units_are_counted_by_layer():
    model = relu_net()
    with torch.no_grad():
        model[0].bias[:3] = -1e6
    with diagnostics.record_activations(model) as activations:
        model(torch.randn(50, 4))
        model(torch.randn(30, 4))
    assert {name: tuple(v.shape) for name, v in activations.items()} == {"1": (80, 10), "3": (80, 6)}
    assert diagnostics.dormant_share(activations["1"]) == pytest.approx(0.3)
    model(torch.randn(5, 4))
    assert activations["1"].shape[0] == 80


def test_dormancy_is_relative_to_the_layer():
    activations = torch.tensor([[1.0, 1.0, 1.0, 0.05]]).repeat(10, 1)
    assert diagnostics.dormant_share(activations) == 0.0
    assert diagnostics.dormant_share(activations, threshold=0.1) == 0.25
    assert diagnostics.dormant_share(1e6 * activations, threshold=0.1) == 0.25
    assert diagnostics.dormant_share(torch.zeros(10, 4)) == 1.0


def test_recurrent_and_image_units():
    model = nn.ModuleDict({"lstm": nn.LSTM(3, 7), "relu": nn.ReLU()})
    with diagnostics.record_activations(model) as activations:
        model["lstm"](torch.randn(5, 2, 3))
        model["relu"](torch.randn(2, 6, 8, 8))
    assert activations["lstm"].shape == (10, 7)
    assert activations["relu"].shape == (2 * 64, 6)


def test_an_activation_used_at_two_widths_is_recorded_as_two():
    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(4, 5), relu, nn.Linear(5, 3), relu)
    with diagnostics.record_activations(model) as activations:
        for _ in range(2):
            model(torch.randn(7, 4))
    assert {name: tuple(values.shape) for name, values in activations.items()} == {"1": (14, 5), "1 (3 units)": (14, 3)}


def test_what_is_recorded_does_not_change_afterwards():
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.ReLU(inplace=True))
    with diagnostics.record_activations(model) as activations:
        model(torch.randn(50, 4))
    assert activations["1"].min() < 0
    assert activations["2"].min() == 0


def test_packed_sequences_are_recorded_without_padding():
    model = nn.ModuleDict({"gru": nn.GRU(3, 7)})
    packed = nn.utils.rnn.pack_sequence([torch.randn(4, 3), torch.randn(2, 3)])
    with diagnostics.record_activations(model) as activations:
        model["gru"](packed)
    assert activations["gru"].shape == (6, 7)


@pytest.mark.parametrize("activation", ["relu", "gelu", nn.SiLU()])
@pytest.mark.parametrize("training", [False, True])
def test_transformer(activation, training):
    """Also where torch would take its fast path, which calls no module of the layer."""
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, activation=activation, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=isinstance(activation, str)).train(training)
    inputs, padding = torch.randn(3, 5, 8), torch.zeros(3, 5, dtype=torch.bool)
    with torch.set_grad_enabled(training), diagnostics.record_activations(model) as activations:
        model(inputs, src_key_padding_mask=padding)
    name = "activation" if isinstance(activation, nn.Module) else activation
    assert {key: tuple(values.shape) for key, values in activations.items()} == {
        key: shape
        for i in range(2)
        for key, shape in {f"layers.{i}.self_attn": (15, 8), f"layers.{i}.{name}": (15, 12)}.items()
    }
    if activation == "relu":
        assert all(activations[f"layers.{i}.relu"].min() == 0 for i in range(2))
    assert torch.backends.mha.get_fastpath_enabled()


def test_attention_alone():
    model = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    inputs = torch.randn(3, 5, 8)
    with torch.no_grad(), diagnostics.record_activations(model) as activations:
        output, _ = model(inputs, inputs, inputs)
    torch.testing.assert_close(activations[""], output.reshape(15, 8))


def test_functions_are_recorded_by_the_module_that_calls_them():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.gate = nn.Linear(4, 6), nn.Linear(6, 6), nn.Sigmoid()

        def forward(self, inputs):
            hidden = torch.relu(self.first(inputs))
            hidden = nn.functional.relu(self.second(hidden), inplace=True)
            return self.gate(hidden.tanh())

    model = nn.Sequential(Block(), nn.Linear(6, 4), Block())
    with diagnostics.record_activations(model) as activations:
        for _ in range(2):
            output = model(torch.randn(7, 4))
    names = ["relu", "relu_2", "tanh", "gate"]
    assert list(activations) == [f"{block}.{name}" for block in (0, 2) for name in names]
    assert all(values.shape == (14, 6) for values in activations.values())
    assert torch.equal(activations["2.gate"][7:], output)


def test_units_of_convolutions_are_channels():
    for dims, convolution in enumerate((nn.Conv1d, nn.Conv2d, nn.Conv3d), start=1):
        model = nn.Sequential(convolution(2, 5, 1), nn.ReLU(), convolution(5, 3, 1), nn.Tanh())
        with diagnostics.record_activations(model) as activations:
            model(torch.randn(6, 2, *[4] * dims))
            model(torch.randn(2, *[4] * dims))  # Without a batch axis.
        shapes = {name: tuple(values.shape) for name, values in activations.items()}
        assert shapes == {"1": (7 * 4**dims, 5), "3": (7 * 4**dims, 3)}


def test_chosen_kinds():
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.LayerNorm(5))
    with diagnostics.record_activations(model, kinds=(nn.Linear, nn.LayerNorm)) as activations:
        model(torch.randn(7, 4))
    assert {name: tuple(values.shape) for name, values in activations.items()} == {"0": (7, 5), "2": (7, 5)}


def test_nothing_recorded_is_a_warning_that_says_why():
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    warns, record = partial(pytest.warns, UserWarning), diagnostics.record_activations
    with warns(match="this Sequential has no activations that are known"), record(model) as activations:
        model(torch.randn(7, 4))
    assert activations == {}
    with warns(match="no forward pass of this Sequential ran"), record(model):
        pass
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), diagnostics.record_activations(model):
        model(torch.randn(7, 3))


def test_effective_rank_counts_directions():
    basis = torch.linalg.qr(torch.randn(20, 20)).Q
    for rank in (1, 3, 20):
        features = torch.randn(500, rank).div(1) @ torch.eye(rank, 20) @ basis
        flat = torch.linalg.qr(features @ basis.T[:, :rank]).Q @ basis[:rank]
        assert diagnostics.effective_rank(flat) == pytest.approx(rank, rel=1e-3)
    assert diagnostics.effective_rank(torch.zeros(10, 5)) == 0.0
    uneven = torch.diag(torch.tensor([100.0, 1.0, 1.0]))
    assert 1 < diagnostics.effective_rank(uneven) < 1.2


@pytest.mark.parametrize("function", [diagnostics.dormant_share, diagnostics.effective_rank])
def test_wrong_shapes_are_named(function):
    with pytest.raises(ValueError, match=r"shape \(3, 2, 1\)"):
        function(torch.zeros(3, 2, 1))
    with pytest.raises(ValueError, match="not empty"):
        function(torch.zeros(0, 2))


def test_weight_norms():
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[3.0, 5.0]]))
        model.bias.fill_(2.0)
    norms = diagnostics.weight_norms(model)
    assert norms == pytest.approx({"weight": 17**0.5, "bias": 2.0, "all": (38 / 3) ** 0.5})


def test_gradient_noise_and_signal_of_a_known_loss():
    """The gradient of w * (mu + noise) is mu + noise itself."""
    weight = nn.Parameter(torch.zeros(1000))
    unused = nn.Parameter(torch.zeros(3))
    mean, deviation, batches = 0.5, 2.0, 400
    losses = ((weight * (mean + deviation * torch.randn(1000))).sum() for _ in range(batches))
    result = diagnostics.gradient_noise_to_signal(losses, [weight, unused])
    assert result.noise == pytest.approx(1000 * deviation**2, rel=0.02)
    assert result.signal == pytest.approx(1000 * mean**2, rel=0.1)
    assert result.ratio == pytest.approx(deviation**2 / mean**2, rel=0.1)
    assert weight.grad is None


def test_gradient_that_is_all_noise_has_an_infinite_ratio():
    weight = nn.Parameter(torch.zeros(2))
    signs = torch.tensor([1.0, -1.0])
    result = diagnostics.gradient_noise_to_signal([(s * weight).sum() for s in signs], [weight])
    assert result.ratio == float("inf")
    with pytest.raises(ValueError, match="at least two"):
        diagnostics.gradient_noise_to_signal([weight.sum()], [weight])


@pytest.mark.parametrize("optimizer_class", [UPGD, AdaptiveUPGD, UPGDW])
def test_utilities_and_their_histogram(optimizer_class):
    params = parameters((4, 3), (5,))
    optimizer = optimizer_class(params)
    with pytest.raises(ValueError, match="first step"):
        diagnostics.utilities(optimizer)
    before = torch.cat([p.detach().flatten() for p in params])
    set_gradients(params, 0)
    expected = -before * torch.cat([p.grad.flatten() for p in params])
    optimizer.step()
    torch.testing.assert_close(diagnostics.utilities(optimizer), expected, rtol=1e-4, atol=1e-6)
    counts, edges = diagnostics.utility_histogram(optimizer, bins=8)
    assert counts.sum() == 17
    assert edges.shape == (9,)
    assert edges[0] == pytest.approx(expected.min().item(), rel=1e-4)
    with pytest.raises(TypeError, match="not by SGD"):
        diagnostics.utilities(torch.optim.SGD(params, lr=0.1))
