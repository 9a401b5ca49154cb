"""The optimizer step of all members captured in a CUDA graph."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from driftproof.learner.graph import capturing, cloned, tensors
from driftproof.learner.losses import Coefficients
from driftproof.learner.metrics import StepMetrics
from driftproof.learner.population.step import PopulationStep
from driftproof.learner.rollout import Minibatch

_WARMUPS = 3


class _Captured(NamedTuple):
    """A graph, the tensors that it reads and writes, and the settings whose tensors it reads."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    metrics: StepMetrics
    settings: tuple[object, ...]


class GraphedPopulationStep:
    """Replays a :class:`PopulationStep`, which costs the host one launch instead of thousands.

    The members' state and settings are read from tensors that change in place. There is a graph for each combination of
    shapes and of settings that are no tensors.

    Args:
        step: Step of members on CUDA.
    """

    def __init__(self, step: PopulationStep) -> None:
        self.step = step
        self._graphs: dict[object, _Captured] = {}

    def __call__(self, batch: Minibatch, c: Coefficients, proceed: Tensor) -> StepMetrics:
        """Take the step, as :meth:`PopulationStep.__call__` does."""
        inputs = [*tensors(batch), *_numbers(c), proceed]
        step, vgs, adversary = self.step, self.step.state.learners[0].vgs, self.step.state.adversary
        settings = (step.state.group.settings, step.scaling)
        key = (
            tuple((part.shape, part.dtype) for part in inputs),
            tuple(None if isinstance(each, Tensor) else each for each in c),
            (step.clip_mode, step.exploration_floor, vgs and (vgs.enabled, vgs.apply_to)),
            adversary and adversary.share(batch.log_probs.shape[2]),
            tuple(map(id, settings)),
            torch.get_float32_matmul_precision(),
        )
        if key not in self._graphs:
            self._graphs[key] = self._capture(batch, c, proceed, settings)
        captured = self._graphs[key]
        torch._foreach_copy_(captured.inputs, inputs)
        captured.graph.replay()
        return captured.metrics.clone()

    def _capture(self, batch: Minibatch, c: Coefficients, proceed: Tensor, settings: tuple[object, ...]) -> _Captured:
        step, flags = self.step, self.step.state.kl_stop.state_tensors()
        before = [flag.clone() for flag in flags]
        batch, c = cloned(batch), Coefficients(*(each.clone() if isinstance(each, Tensor) else each for each in c))
        # Where members do not proceed, nothing changes.
        proceed = torch.zeros_like(proceed)
        with torch.cuda.device(step.state.device):
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(_WARMUPS):
                    step(batch, c, proceed)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with capturing(graph):
                metrics = step(batch, c, proceed)
        for flag, old in zip(flags, before, strict=True):
            flag.copy_(old)
        return _Captured(graph, [*tensors(batch), *_numbers(c), proceed], metrics, settings)


def _numbers(c: Coefficients) -> list[Any]:
    """Coefficients that are tensors."""
    return [each for each in c if isinstance(each, Tensor)]
