"""Metrics of optimizer steps and of an update, by name, as 0-dim tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from driftproof._members import Number
from driftproof.nn.heads import CategoricalHead, ValueHead
from driftproof.nn.types import PolicyState

_RATIO_BOUNDS = (0.01, 100.0)
_VANISHED = 1e-8


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one optimizer step, or of several, by name: ``steps["loss"]``.

    They share one tensor, so that a captured step copies them, and the host fetches them, at once.

    Attributes:
        names: Names of the metrics. ``finite`` is 0 where a loss or gradient was not finite, ``go_on`` is 0 once the
            update was stopped early. A step was taken if both are 1.
        values: ``[names]`` of one step, ``[steps, names]`` of several.
    """

    names: tuple[str, ...]
    values: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, numbers: Mapping[str, Number]) -> StepMetrics:
        """From 0-dim tensors by name; on a CPU, the last of them may be Python numbers."""
        tensors = [number for number in numbers.values() if isinstance(number, Tensor)]
        others = list(numbers.values())[len(tensors) :]
        values = torch.stack(tensors, -1)
        return cls(tuple(numbers), torch.cat((values, values.new_tensor(others))) if others else values)

    @classmethod
    def stack(cls, steps: Sequence[StepMetrics]) -> StepMetrics:
        """Several steps, one after the other."""
        return replace(steps[0], values=torch.stack([step.values for step in steps]))

    def __getitem__(self, name: str) -> Tensor:
        return self.values[..., self.names.index(name)]

    def clone(self) -> StepMetrics:
        """A copy that later steps do not change."""
        return replace(self, values=self.values.clone())


def step_metrics(steps: StepMetrics) -> dict[str, Tensor]:
    """Means over the optimizer steps of an update.

    Minibatches with numbers that are not finite count as skipped, those after a stop not at all.
    """
    column = {name: steps[name] for name in steps.names}
    finite, go_on = column["finite"], column["go_on"]
    # The minibatch that triggers the stop was still evaluated.
    reached = torch.cat((torch.ones_like(go_on[:1]), go_on[:-1]))
    counts = reached * finite
    mean = {name: _mean(values, counts) for name, values in column.items()}
    metrics = {
        "train/loss": mean["loss"],
        "train/policy_gradient_loss": mean["policy_loss"],
        "train/entropy_loss": -mean["entropy"],
        "train/approx_kl": mean["approx_kl"],
        "train/clip_fraction": mean["clip_fraction"],
        "train/grad_norm": mean["grad_norm"],
        "train/scaled_grad_norm": _mean(column["scaled_norm"], finite * go_on),
        "train/skipped_minibatches": (reached * (1 - finite)).sum(),
        "train/optimizer_steps": (finite * go_on).sum(),
        # NaN if there was none: the controller then keeps its coefficient.
        "kl/exact": torch.where(counts.sum() > 0, mean["kl"].clamp_min(0), torch.nan),
        "kl/stopped": 1 - go_on[-1],
    }
    if "uniform_divergence" in mean:
        metrics["train/uniform_divergence"] = mean["uniform_divergence"]
    critics = sum(name.startswith("critic_loss_") for name in column)
    for i in range(1, critics + 1):
        metrics[f"critic/loss_{i}"] = mean[f"critic_loss_{i}"]
        metrics[f"critic/grad_norm_{i}"] = mean[f"critic_norm_{i}"]
    metrics |= {name: values for name, values in mean.items() if name.startswith("adversarial/")}
    metrics["train/value_loss"] = torch.stack([mean[f"critic_loss_{i}"] for i in range(1, critics + 1)]).mean()
    return metrics


def fetch(metrics: Mapping[str, Tensor], steps: StepMetrics) -> tuple[dict[str, float], list[tuple[bool, bool]]]:
    """All numbers of an update from the device, at once: the metrics, and ``finite`` and ``go_on`` of every step."""
    flags = torch.cat((steps["finite"], steps["go_on"])).float()
    flat = torch.cat([torch.stack([number.float() for number in metrics.values()]), flags]).tolist()
    numbers, flat = flat[: len(metrics)], [flag > 0 for flag in flat[len(metrics) :]]
    count = len(flat) // 2
    return dict(zip(metrics, numbers, strict=True)), list(zip(flat[:count], flat[count:], strict=True))


def to_host(tensor: Tensor) -> Tensor:
    """The tensor on the host: waits for the device, once and on purpose, which ``set_sync_debug_mode`` accepts."""
    if not tensor.is_cuda:
        return tensor.cpu()
    copied = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copied.copy_(tensor, non_blocking=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    done.synchronize()
    return copied


def critic_metrics(
    heads: Sequence[ValueHead],
    values: Sequence[Tensor],
    targets: Tensor,
    valid: Tensor,
    metrics: Mapping[str, Tensor],
    scale: Tensor | float,
) -> dict[str, Tensor]:
    """Metrics that compare the critics, from their predictions in the rollout and the update's means.

    ``critic/warning`` is 1 when a critic's gradient has vanished, or is over 100 times the other's.

    Args:
        heads: Value heads of the critics.
        values: Values of each critic in units of rewards ``[T, N]``.
        targets: Normalised returns.
        valid: Which samples count.
        metrics: Metrics from :func:`step_metrics`.
        scale: Standard deviation of returns.
    """
    result: dict[str, Tensor] = {}
    if isinstance(heads[0], CategoricalHead):
        inside = torch.where(valid, targets, heads[0].v_min)
        result["critic/saturated"] = heads[0].saturated(inside) * valid.numel() / valid.sum().clamp_min(1)
    norms = torch.stack([metrics[f"critic/grad_norm_{i}"] for i in range(1, len(heads) + 1)])
    warning = (norms < _VANISHED).any()
    if len(heads) == 2:
        first, second = (torch.where(valid, value, 0) for value in values)
        count = valid.sum().clamp_min(1)
        result["critic/divergence"] = (first - second).abs().sum() / count / scale
        result["critic/correlation"] = _correlation(first, second, valid, count)
        ratio = norms[0] / norms[1].clamp_min(_VANISHED)
        result["critic/grad_ratio"] = ratio
        warning = warning | (ratio < _RATIO_BOUNDS[0]) | (ratio > _RATIO_BOUNDS[1])
    # Without a single optimizer step there are no gradients to compare.
    result["critic/warning"] = (warning & (metrics["train/optimizer_steps"] > 0)).float()
    return result


def mean_quantiles(heads: Sequence[ValueHead], predictions: Sequence[Tensor]) -> Tensor:
    """Quantiles of the critics' predictions, means over the critics ``[..., outputs]``."""
    return torch.stack([head.quantiles(p) for head, p in zip(heads, predictions, strict=True)]).mean(0)


def quantile_metrics(quantiles: Tensor, valid: Tensor, decode: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """How wide the critics' distributions are: three quantiles in units of rewards, means over samples.

    Args:
        quantiles: Quantiles of the rollout's returns ``[T, N, outputs]``, in the present scale.
        valid: Which samples count ``[T, N]``.
        decode: Returns in units of rewards from normalised ones.
    """
    profile = torch.where(valid.unsqueeze(-1), quantiles, 0).sum((0, 1)) / valid.sum().clamp_min(1)
    result = {}
    for percent in (10, 50, 90):
        # The first quantile has level 1 / (2 * count), the last one 1 - 1 / (2 * count).
        place = min(max(percent / 100 * len(profile) - 0.5, 0), len(profile) - 1)
        below, share = int(place), place % 1
        between = torch.lerp(profile[below], profile[min(below + 1, len(profile) - 1)], share)
        result[f"critic/quantile_p{percent}"] = decode(between)
    return result


def memory_metrics(state: PolicyState) -> dict[str, Tensor]:
    """Norm, mean and spread of the hidden states, layer by layer."""
    result: dict[str, Tensor] = {}
    for name, parts in zip(("actor", "critic"), state, strict=True):
        for layer, hidden in enumerate(parts[0] if parts else ()):
            prefix = f"lstm/{name}_hidden_layer{layer}"
            result[f"{prefix}_norm"] = hidden.norm(dim=-1).mean()
            result[f"{prefix}_mean"] = hidden.mean()
            result[f"{prefix}_std"] = hidden.std(correction=0)
    return result


def _mean(values: Tensor, counts: Tensor) -> Tensor:
    """Mean of the values that count; 0 if none does."""
    return torch.where(counts > 0, values, 0).sum() / counts.sum().clamp_min(1)


def _correlation(first: Tensor, second: Tensor, valid: Tensor, count: Tensor) -> Tensor:
    """Correlation of two critics' values; 0 where one of them is constant."""
    a = torch.where(valid, first - first.sum() / count, 0)
    b = torch.where(valid, second - second.sum() / count, 0)
    spread = a.norm() * b.norm()
    return torch.where(spread > 0, (a * b).sum() / spread.clamp_min(torch.finfo(a.dtype).tiny), 0)
