"""One optimizer step on a minibatch: losses, gradients, their scaling, the step, and its metrics."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from driftproof._members import Number
from driftproof.learner.adversary import Adversary
from driftproof.learner.direct import direct_losses
from driftproof.learner.kl import KLStop
from driftproof.learner.losses import Coefficients, ppo_losses
from driftproof.learner.metrics import StepMetrics
from driftproof.learner.networks import HasDenseNetworks, HasKernels, Policy
from driftproof.learner.rollout import Minibatch
from driftproof.nn.dense import DenseNetworks
from driftproof.nn.heads import ClipMode, QuantileHead
from driftproof.nn.types import Evaluation
from driftproof.optim import VarianceGradientScaler
from driftproof.optim.masking import step_where


class OptimizerStep:
    """``losses → backward → vgs → scale, clip → optimizer.step → vgs.step``, without waiting for the device.

    A step is not taken if the loss or a gradient is not finite, or once the KL divergence has called for a stop. On a
    CPU that is decided at once. On other devices such a step is masked, so that the host need not wait: nothing moves,
    no average changes and no step is counted. Only the very first waits, as it creates the optimizer's state.

    Args:
        policy: The networks.
        optimizer: Optimizer of the policy's parameters.
        vgs: Variance gradient scaler.
        stop: Stops the update early if the KL divergence is too large.
        clip_mode: How predictions of returns are clipped; ``None``: not at all.
        kl_penalty: Whether the loss contains the KL divergence from the distribution that actions were drawn from.
        autocast: Returns the autocast context of the networks.
        adversary: Attacks observations and adds a term to the loss.
        masked: Mask steps on every device, including the CPU.
    """

    def __init__(
        self,
        policy: Policy,
        optimizer: Optimizer,
        vgs: VarianceGradientScaler | None,
        stop: KLStop,
        clip_mode: ClipMode | None,
        kl_penalty: bool,
        autocast: Callable[[], AbstractContextManager[object]],
        adversary: Adversary | None = None,
        masked: bool = False,
    ) -> None:
        self.policy, self.optimizer, self.vgs, self.stop = policy, optimizer, vgs, stop
        self.clip_mode, self.kl_penalty, self.autocast = clip_mode, kl_penalty, autocast
        self.adversary = adversary
        self.exploration_floor = False
        """Whether the loss contains the distance from a distribution that still explores."""
        self.masked = masked or policy.device.type != "cpu"
        # Running statistics, which batch normalisation changes in the forward pass.
        normalisers = (m for m in policy.modules() if isinstance(m, nn.modules.batchnorm._NormBase))
        self._statistics = [buffer for module in normalisers for buffer in module.buffers(recurse=False)]
        self._has_stepped = False
        self._dense: DenseNetworks | None = None
        """Dense layers of actor and critics, if they are to be differentiated without autograd."""
        self._present: list[int] = []
        self._rows: list[Tensor] = []
        self._views: list[Tensor] = []
        self._places: dict[int, Tensor] = {}
        """The views by the ids of their parameters."""
        self._scales_all = False
        self._groups = torch.empty(0)
        """Which rows, or gradients, belong to which critic, and to the whole: 0 or 1 ``[rows, critics + 1]``."""

    @property
    def is_ready(self) -> bool:
        """Whether the optimizer's state has been created."""
        return self._has_stepped or bool(self.optimizer.state)

    def takes_masks(self) -> bool:
        """Whether masks of episode starts are faster than segments."""
        with self.autocast():
            return isinstance(self.policy, HasKernels) and self.policy.has_kernels

    def begin_update(self) -> None:
        """Look at the networks, which may have changed since the last update."""
        policy, self._dense = self.policy, None
        is_single_precision = isinstance(self.autocast(), contextlib.nullcontext)
        if is_single_precision and isinstance(policy, HasDenseNetworks):
            self._dense = policy.dense_networks()
        if self._dense is not None and not self._present:
            # The first gradients, too, go to their place: matrix products may round by where they are written to.
            self._arrange([p for group in self.optimizer.param_groups for p in group["params"]])

    def __call__(self, batch: Minibatch, c: Coefficients) -> StepMetrics:
        """Take the step, unless the loss or a gradient is not finite or the update was stopped; returns its metrics."""
        statistics = [(tensor, tensor.clone()) for tensor in self._statistics]
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                param.grad = None
        loss, losses = self.differentiate(batch, c)
        metrics: dict[str, Number] = {**losses}
        go_on = self.stop.observe(losses["approx_kl"])
        metrics |= self._finish(loss, go_on, c)
        for tensor, before in statistics:
            taken = torch.as_tensor(metrics["finite"] * metrics["go_on"]) > 0
            tensor.copy_(torch.where(taken, tensor, before))
        return StepMetrics.of(metrics)

    def differentiate(self, batch: Minibatch, c: Coefficients) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, and metrics by name; sets the gradients."""
        policy, head, evaluation = self.policy, self.policy.heads[0], self._evaluate(batch)
        has_other_terms = self.clip_mode is not None or self.kl_penalty
        remaining: Tensor | None = None
        if self._dense is not None and type(head) is QuantileHead and not has_other_terms and batch.valid is None:
            loss, metrics = direct_losses(policy.distribution, head, evaluation, batch, c, self.exploration_floor)
        else:
            remaining, metrics = ppo_losses(
                *(policy.distribution, head, evaluation, batch, c),
                clip_mode=self.clip_mode,
                kl_penalty=self.kl_penalty,
                exploration_floor=self.exploration_floor,
            )
            loss = remaining
        if self.adversary is not None:
            with self.autocast():
                robust_term, robust_metrics = self.adversary.loss(batch, evaluation, c.vf_coef)
            loss = loss + robust_term
            remaining = robust_term if remaining is None else loss
            metrics |= {f"adversarial/{name}": number for name, number in robust_metrics.items()}
        if remaining is not None and remaining.requires_grad:
            remaining.backward()  # type: ignore[no-untyped-call]
        if self._dense is not None:
            self._dense.backward(self._places)
        return loss.detach(), metrics | {"loss": loss}

    def _evaluate(self, batch: Minibatch) -> Evaluation:
        """The networks' outputs in float32."""
        given = batch.observations, batch.state, batch.segments, batch.keep
        if self._dense is not None:
            assert isinstance(self.policy, HasDenseNetworks)
            return self.policy.evaluate_dense(self._dense, *given)
        with self.autocast():
            parameters, predictions = self.policy.evaluate(*given)
        return Evaluation(parameters.float(), tuple(p.float() for p in predictions))

    @torch.no_grad()
    def _finish(self, loss: Tensor, go_on: Tensor, c: Coefficients) -> dict[str, Number]:
        """Take the step unless it is skipped; returns gradient norms and the flags ``finite`` and ``go_on``."""
        grads = self._gradients()
        norms = self._gradient_norms(grads)
        total = norms[-1]
        if self.masked:
            numbers: Sequence[Number] = norms.unbind()
            finite: Number = (torch.isfinite(loss) & torch.isfinite(total)).to(loss.dtype)
            flag: Number = go_on.to(loss.dtype)
        else:  # Numbers cost less than tensors of one number.
            numbers = norms.tolist()
            finite, flag = float(math.isfinite(loss.item()) and math.isfinite(numbers[-1])), go_on.item()
        proceed = finite * flag > 0
        if isinstance(proceed, Tensor) and self.is_ready:
            scaled = self._take(grads, total, c, proceed)
        else:
            taken = bool(proceed)
            self._has_stepped |= taken
            scaled = self._take(grads, total, c) if taken else total
        return {
            "scaled_norm": scaled,
            "grad_norm": numbers[-1],
            **{f"critic_norm_{i}": norm for i, norm in enumerate(numbers[:-1], 1)},
            "finite": finite,
            "go_on": flag,
        }

    def _take(self, grads: list[Any], grad_norm: Tensor, c: Coefficients, proceed: Tensor | None = None) -> Tensor:
        """Scale, clip and step, masked where ``proceed`` is given; returns the gradient norm after scaling."""
        scale: Number = 1.0
        if self.vgs is not None:
            # If the scaler follows all parameters, one pass over their gradients scales and clips them.
            factor = self.vgs.measure_gradients(proceed) if self._scales_all else self.vgs.scale_gradients(proceed)
            if self.vgs.apply_to == "gradient":
                grad_norm, scale = grad_norm * factor, factor if self._scales_all else 1.0
        torch._foreach_mul_(grads, (c.max_grad_norm / (grad_norm + 1e-6)).clamp_max(1) * scale)
        if proceed is None:
            self.optimizer.step()
        else:
            step_where(self.optimizer, proceed)
        if self.vgs is not None:
            self.vgs.step(proceed)
        return grad_norm

    def _gradients(self) -> list[Any]:
        """The gradients; on a CPU flattened into rows, so that one operation covers all parameters of a critic."""
        # From the optimizer: walking through the policy's modules would take longer than the norms.
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        present: list[Tensor] = [p for p in params if p.grad is not None]
        if list(map(id, present)) != self._present:
            self._arrange(present)
        grads: list[Any] = [p.grad for p in present]
        if not self._rows:
            return grads
        if moved := [i for i, view in enumerate(self._views) if grads[i] is not view]:
            torch._foreach_copy_([self._views[i] for i in moved], [grads[i] for i in moved])
            for i in moved:
                present[i].grad = self._views[i]
        return self._rows

    def _arrange(self, present: Sequence[Tensor]) -> None:
        """Allocate rows for gradients, if these can be flattened, and map rows or gradients to critics."""
        self._present = list(map(id, present))
        critic_ids = [{id(p) for p in critic.parameters()} for critic in self.policy.critics]
        owners = [tuple(id(p) in ids for ids in critic_ids) for p in present]
        self._rows, self._views = [], []
        if all(p.is_cpu and p.dtype is torch.float32 for p in present):
            stretches = [list(group) for _, group in itertools.groupby(range(len(present)), owners.__getitem__)]
            flat = torch.empty(sum(p.numel() for p in present))
            self._views = list(torch._C._nn.unflatten_dense_tensors(flat, list(present)))
            self._rows = list(torch.split(flat, [sum(present[i].numel() for i in stretch) for stretch in stretches]))
            owners = [owners[stretch[0]] for stretch in stretches]
        self._places = dict(zip(self._present, self._views, strict=False))
        matrix = torch.tensor([[*map(float, flags), 1.0] for flags in owners])
        self._groups = matrix.to(self.policy.device, non_blocking=True)
        self._scales_all = self.vgs is not None and self.vgs.follows(present)

    def _gradient_norms(self, grads: list[Any]) -> Tensor:
        """Norms of each critic's gradient, and of the whole."""
        if self._rows:  # On a CPU, faster than norms.
            squares = torch.stack([row.dot(row) for row in grads])
        else:
            squares = torch.stack(torch._foreach_norm(grads)).float().square()
        return (squares @ self._groups).sqrt()
