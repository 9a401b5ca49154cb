"""Diagnostics of plasticity: whether a network can still learn. For any PyTorch model and optimizer.

Use::

    from driftproof.optim import diagnostics

    with diagnostics.record_activations(model) as activations:
        model(inputs)
    for name, values in activations.items():
        print(name, diagnostics.dormant_share(values), diagnostics.effective_rank(values))
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from driftproof.optim._activations import Recorder
from driftproof.optim._core import bias_correction
from driftproof.optim._optimizer import UPGDBase

ACTIVATIONS: tuple[type[nn.Module], ...] = (
    nn.ReLU,
    nn.LeakyReLU,
    nn.ELU,
    nn.SELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Tanh,
    nn.Sigmoid,
    nn.PReLU,
    nn.ReLU6,
    nn.CELU,
    nn.Softplus,
    nn.Hardtanh,
    nn.Hardswish,
    nn.Hardsigmoid,
    nn.LSTM,
    nn.GRU,
    nn.RNN,
    nn.MultiheadAttention,
)
"""Modules whose outputs :func:`record_activations` records by default."""


@contextmanager
def record_activations(
    model: nn.Module, kinds: tuple[type[nn.Module], ...] | None = None
) -> Iterator[dict[str, Tensor]]:
    """Collect a model's activations as ``[samples, units]``, by module name.

    Outputs of several forward passes are appended; a module that is used at several widths has an entry for each. A
    function such as ``torch.relu`` or ``F.gelu`` is recorded under the module whose forward pass calls it, as
    ``name.relu``, and the second call of one pass as ``name.relu_2``. The units are the last axis, or the channels
    after a convolution or a normalisation of channels. Of other tensors with four axes or more, they are the second.

    torch's fast path of transformers skips their modules; it is off while this records.

    Args:
        model: Any module. If it was compiled, pass the module that it was compiled from.
        kinds: Record the outputs of these modules, and no functions. ``None``: of :data:`ACTIVATIONS`, and functions.

    Warns:
        UserWarning: Nothing was recorded.
    """
    recorder = Recorder(model, ACTIVATIONS if kinds is None else kinds, functions=kinds is None)
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    recorder.attach()
    try:
        with recorder.mode or nullcontext():
            yield recorder.recorded
    finally:
        recorder.detach()
        torch.backends.mha.set_fastpath_enabled(fast_path)
    if recorder.recorded:
        return
    name = type(model).__name__
    if not recorder.was_called:
        text = f"nothing was recorded: no forward pass of this {name} ran in the block (call model(inputs), not a copy)"
    else:
        text = f"nothing was recorded: this {name} has no activations that are known; choose modules with kinds=(...)"
    warnings.warn(text, UserWarning, stacklevel=3)


def dormant_share(activations: Tensor, threshold: float = 0.0) -> float:
    """Share of units whose mean magnitude is at most ``threshold`` times that of the layer's average unit.

    Sokar et al., "The Dormant Neuron Phenomenon in Deep Reinforcement Learning", ICML 2023 (arXiv 2302.12902).

    Args:
        activations: Activations ``[samples, units]``.
        threshold: 0 counts units that are never active; 0.025 and 0.1 are common.
    """
    _check_matrix("activations", activations)
    magnitudes = activations.float().abs().mean(0)
    return (magnitudes <= threshold * magnitudes.mean()).float().mean().item()


def effective_rank(features: Tensor) -> float:
    """Effective rank of features: the exponential of the entropy of their normalised singular values.

    Between 0 (all features zero) and the smaller dimension. Roy & Vetterli, "The effective rank", EUSIPCO 2007.

    Args:
        features: Features ``[samples, units]``.
    """
    _check_matrix("features", features)
    values = torch.linalg.svdvals(features.float())
    total = values.sum()
    if total == 0:
        return 0.0
    shares = values / total
    return float(torch.special.entr(shares).sum().exp())


def weight_norms(model: nn.Module) -> dict[str, float]:
    """Root mean square of every parameter by name, and of all of them under ``"all"``."""
    params = {name: p.detach().float() for name, p in model.named_parameters() if p.numel() > 0}
    norms = {name: p.square().mean().sqrt().item() for name, p in params.items()}
    count = sum(p.numel() for p in params.values())
    norms["all"] = (sum(p.square().sum().item() for p in params.values()) / max(count, 1)) ** 0.5
    return norms


class NoiseToSignal(NamedTuple):
    """Energy of the gradient of one batch."""

    noise: float
    """Summed variance over batches."""
    signal: float
    """Squared norm of the mean gradient, corrected for the noise in that mean; may be negative if it is all noise."""

    @property
    def ratio(self) -> float:
        """Noise over signal; infinite where no signal is left."""
        return self.noise / self.signal if self.signal > 0 else float("inf")


def gradient_noise_to_signal(losses: Iterable[Tensor], parameters: Iterable[Tensor]) -> NoiseToSignal:
    """Noise and signal in the gradients of several batches at the present parameters.

    Args:
        losses: The loss of each batch, at least two. A generator keeps memory low: each graph is freed in turn.
        parameters: Parameters to differentiate by. Their ``.grad`` does not change.
    """
    params = list(parameters)
    mean = [torch.zeros_like(p) for p in params]
    scatter = 0.0
    count = 0
    for loss in losses:
        count += 1
        grads = torch.autograd.grad(loss, params, allow_unused=True)
        for average, grad in zip(mean, grads, strict=True):
            delta = (torch.zeros_like(average) if grad is None else grad.detach()) - average
            average.add_(delta, alpha=1 / count)
            # Welford: delta against the old mean times delta against the new one.
            scatter += delta.square().sum().item() * (count - 1) / count
    if count < 2:
        raise ValueError(f"Invalid losses: {count} of them; noise needs at least two batches")
    noise = scatter / (count - 1)
    signal = sum(average.square().sum().item() for average in mean) - noise / count
    return NoiseToSignal(noise, signal)


def utilities(optimizer: torch.optim.Optimizer) -> Tensor:
    """The bias-corrected utilities of all weights of a UPGD optimizer, flat."""
    if not isinstance(optimizer, UPGDBase):
        raise TypeError(f"utilities are kept by UPGD, AdaptiveUPGD and UPGDW, not by {type(optimizer).__name__}")
    values = [
        state["avg_utility"].flatten()
        / bias_correction(optimizer.settings_of(group).beta_utility, state["step"].item())
        for group in optimizer.param_groups
        for param in group["params"]
        if (state := optimizer.state.get(param))
    ]
    if not values:
        raise ValueError("the optimizer has no utilities before its first step")
    return torch.cat([v.to(values[0].device) for v in values])


def utility_histogram(optimizer: torch.optim.Optimizer, bins: int = 50) -> tuple[Tensor, Tensor]:
    """How many weights have which utility: counts ``[bins]`` and edges ``[bins + 1]``."""
    values = utilities(optimizer).double().cpu()
    counts, edges = torch.histogram(values, bins)
    return counts, edges


def _check_matrix(name: str, values: Tensor) -> None:
    if values.dim() != 2 or values.numel() == 0:
        raise ValueError(f"Invalid {name}: shape {tuple(values.shape)}; must be [samples, units], not empty")
