"""One optimizer step of all members: losses, gradients, their scaling, the step, and its metrics."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
from torch import Tensor

from driftproof._members import per_member
from driftproof.learner.graph import tensors
from driftproof.learner.losses import Coefficients, ppo_losses
from driftproof.learner.metrics import StepMetrics
from driftproof.learner.population.random import MemberGenerators
from driftproof.learner.population.state import PopulationState
from driftproof.learner.rollout import Minibatch
from driftproof.nn.heads import ClipMode
from driftproof.nn.types import Evaluation
from driftproof.optim.functional import (
    HUGE,
    MemberKernels,
    NoiseSource,
    ScalingSettings,
    Scratch,
    reason_against_kernels,
    upgd_step,
    vgs_measured_step,
    vgs_step,
)

S = TypeVar("S")


class PopulationStep:
    """Takes the step of every member, without waiting for the device.

    A member's step is skipped, and its state stays exactly the same, where its loss or gradient is not finite, where
    its update was stopped early, and where the caller says so.

    Args:
        state: State of the members.
        generators: Random generators of the members.
        autocast: Returns the autocast context of the networks.
    """

    def __init__(
        self,
        state: PopulationState,
        generators: MemberGenerators,
        autocast: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self.state, self.generators, self.autocast = state, generators, autocast
        self.clip_mode: ClipMode | None = None
        self.exploration_floor = False
        self.noisy: list[bool] = []
        """Whether a member's optimizer draws noise, read on a CPU."""
        self.scaling: ScalingSettings | None = None
        self._scratch = Scratch()
        self._zero = torch.zeros((), device=state.device)
        critics = [f"critics.{i}." for i in range(len(state.policy.like.critics))]
        self._stretches: list[tuple[int, slice]] = []
        """Blocks of weights, and where in them are those of one critic, or of none."""
        owners = []
        for block, names in enumerate(state.blocks):
            start = 0
            for flags, group in itertools.groupby(names, lambda name: tuple(name.startswith(c) for c in critics)):
                stop = start + sum(state.weights[name][0].numel() for name in group)
                self._stretches.append((block, slice(start, stop)))
                owners.append([*map(float, flags), 1.0])
                start = stop
        self._owners = torch.tensor(owners).to(state.device)
        """Which stretches belong to which critic, and to the whole: 0 or 1 ``[stretches, critics + 1]``."""
        names = state.blocks[0]
        rows = [[*(float(name.startswith(c)) for c in critics), 1.0] for name in names]
        self._owners_of_parameters = torch.tensor(rows).to(state.device)
        """The same of the first block's parameters, one by one."""
        self.kernels = MemberKernels([state.weights[n][0].numel() for n in names], state.members, state.device)
        """Kernels of the step, where there are any."""

    def begin_update(self) -> None:
        """Read the members' present settings."""
        state = self.state
        state.group.settings = _renewed(state.group.settings, state.optimizer_settings())
        if self.generators.is_single:
            self.noisy = [sigma > 0 for sigma in _numbers(state.group.settings.sigma)]
        if state.statistics is not None:
            self.scaling = _renewed(self.scaling, state.scaling_settings())

    def __call__(self, batch: Minibatch, c: Coefficients, proceed: Tensor) -> StepMetrics:
        """Take the step where ``proceed`` ``[M]`` is true; returns metrics ``[M, names]``."""
        state = self.state
        with self.autocast():
            policy = state.policy.with_weights(state.by_name(state.group.params))
            parameters, predictions = policy.evaluate(batch.observations, batch.state, batch.keep)
        evaluation = Evaluation(parameters.float(), tuple(p.float() for p in predictions))
        like = state.policy.like
        losses, metrics = ppo_losses(
            *(like.distribution, like.heads[0], evaluation, batch, c),
            clip_mode=self.clip_mode,
            kl_penalty=state.kl_penalty is not None,
            exploration_floor=self.exploration_floor,
            members=True,
        )
        if state.adversary is not None:
            # A single agent's update would have ended for members that do not go on.
            evaluated = proceed & state.kl_stop.goes_on
            with self.autocast():
                robust_term, robust_metrics = state.adversary.loss(policy, batch, evaluation, c.vf_coef, evaluated)
            losses = losses + robust_term
            metrics |= {f"adversarial/{name}": numbers for name, numbers in robust_metrics.items()}
        # Members are independent: the gradient of the sum is that of each.
        found = torch.autograd.grad(losses.sum(), state.group.params)
        go_on = state.kl_stop.observe(metrics["approx_kl"])
        return StepMetrics.of(metrics | {"loss": losses} | self._take(list(found), losses.detach(), go_on, c, proceed))

    @torch.no_grad()
    def _take(
        self, grads: list[Tensor], losses: Tensor, go_on: Tensor, c: Coefficients, proceed: Tensor
    ) -> dict[str, Tensor]:
        state, statistics, group = self.state, self.state.statistics, self.state.group
        vgs = state.learners[0].vgs
        follows = statistics is not None and vgs is not None and vgs.enabled
        scales_steps = vgs is not None and vgs.enabled and vgs.apply_to == "update"
        followed = statistics if follows else None
        kernels = self.kernels if reason_against_kernels(group, state.blocks[0], followed) is None else None
        measured = None
        if kernels is None:
            parts = [torch.linalg.vector_norm(grads[block][:, where], dim=1) for block, where in self._stretches]
            squares, owners = torch.stack(parts, 1).square(), self._owners
        else:
            measured = kernels.measure(grads[0], followed, 0.0 if self.scaling is None else self.scaling.beta)
            squares, owners = measured.squares, self._owners_of_parameters
        # No product of matrices, which may be in TF32.
        norms = (squares.unsqueeze(-1) * owners).sum(1).sqrt()
        norm = norms[:, -1]
        finite = torch.isfinite(losses) & torch.isfinite(norm)
        taken = proceed & finite & (go_on > 0)

        scaled, scale, factor, weight = norm, torch.ones_like(norm), torch.ones_like(norm), None
        memory = statistics.gradients if statistics is not None and state.blocks == [statistics.keys] else None
        if kernels is None:
            # Masked once, for the averages and the optimizer.
            grads = [torch.where(taken.unsqueeze(1), grad, self._zero, out=memory) for grad in grads]
        if follows:
            assert statistics is not None
            assert self.scaling is not None
            if measured is None:
                by_name = state.by_name(grads)
                followed_grads = [by_name.get(key) for key in statistics.keys]
                factor = vgs_step(statistics, followed_grads, self.scaling, taken & (norm < HUGE), joint=memory)
            else:
                factor, weight = vgs_measured_step(statistics, measured, self.scaling, taken & (norm < HUGE))
            if not scales_steps:
                scaled, scale = norm * factor, factor
        scale = (c.max_grad_norm / (scaled + 1e-6)).clamp_max(1) * scale
        scale = torch.where(taken, scale, 0)
        noise = self._noise(taken)
        if kernels is None:
            self._step(grads, scale.unsqueeze(1), noise, taken, factor if scales_steps else None)
        else:
            kernels.step(
                *(group, grads[0]),
                proceed=taken,
                scale=scale,
                noise=noise,
                statistics=followed,
                weight=weight,
                factor=factor if scales_steps else None,
            )
        return {
            "scaled_norm": scaled,
            "grad_norm": norm,
            **{f"critic_norm_{i}": each for i, each in enumerate(norms[:, :-1].unbind(1), 1)},
            "scaling_factor": factor,
            "taken": taken.to(norm.dtype),
            "finite": finite.to(norm.dtype),
            "go_on": go_on,
        }

    def _noise(self, taken: Tensor) -> NoiseSource:
        """Source of the noise of members that take a step."""
        drawing = None
        if self.generators.is_single:
            drawing = [i for i, flag in enumerate(taken.tolist()) if flag and self.noisy[i]]
        return self.generators.noise([param[0].numel() for param in self.state.group.params], drawing)

    def _step(
        self, grads: list[Tensor], scale: Tensor, noise: NoiseSource, taken: Tensor, factor: Tensor | None
    ) -> None:
        """Take a step by torch's operations with gradients that are zero where it is not taken, and of it a factor."""
        group = self.state.group
        group.grads = [grad.mul_(scale) for grad in grads]
        before = [] if factor is None else [param.clone() for param in group.params]
        upgd_step([group], members=True, noise=noise, scratch=self._scratch, proceed=taken, zeroed=True)
        if factor is not None:
            for param, old in zip(group.params, before, strict=True):
                param.copy_(old + per_member(factor, param) * (param - old))


def _renewed(old: S | None, new: S) -> S:
    """The new settings, in the tensors of the old ones if only numbers differ: a captured step reads those."""
    if old is None or _constants(old) != _constants(new):
        return new
    for name, value in vars(new).items():
        if isinstance(value, Tensor | tuple):
            for target, source in zip(tensors(getattr(old, name)), tensors(value), strict=True):
                target.copy_(source)
    return old


def _constants(settings: object) -> dict[str, object]:
    return {name: value for name, value in vars(settings).items() if not isinstance(value, Tensor | tuple)}


def _numbers(value: float | Tensor) -> list[float]:
    return value.tolist() if isinstance(value, Tensor) else [value]
