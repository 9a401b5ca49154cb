"""The optimizer step captured in a CUDA graph."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from driftproof.learner.losses import Coefficients
from driftproof.learner.metrics import StepMetrics
from driftproof.learner.rollout import Minibatch
from driftproof.learner.step import OptimizerStep

_WARMUPS = 3


class GraphedStep:
    """Replays an optimizer step, which costs the host one launch instead of hundreds.

    Minibatches must have the same shapes every time, and a mask of episode starts instead of segments. Coefficients and
    the learning rate are read from tensors; when another setting changes, the step is captured again.

    Args:
        step: Optimizer step of an agent on CUDA.
        settings: Returns the other settings that the captured kernels depend on.
    """

    def __init__(self, step: OptimizerStep, settings: Callable[[], object]) -> None:
        self.step, self.settings = step, settings
        self._graph: torch.cuda.CUDAGraph | None = None
        self._captured: object = None
        self._batch: Minibatch | None = None
        self._coefficients: Coefficients | None = None
        self._metrics: StepMetrics | None = None

    def __call__(self, batch: Minibatch, c: Coefficients) -> StepMetrics:
        """Take the step, as :meth:`OptimizerStep.__call__` does."""
        if not self.step.is_ready:
            return self.step(batch, c)
        settings = (self.settings(), [t.shape for t in tensors(batch)])
        if settings != self._captured:
            self._capture(batch, c)
            self._captured = settings
        for target, source in zip(tensors(self._batch), tensors(batch), strict=True):
            target.copy_(source)
        self._fill(c)
        assert self._graph is not None
        assert self._metrics is not None
        self._graph.replay()
        return self._metrics.clone()

    def forget(self) -> None:
        """Capture again before the next step, as the captured tensors were replaced."""
        self._captured = None

    def _fill(self, c: Coefficients) -> None:
        assert self._coefficients is not None
        for target, source in zip(self._coefficients, c, strict=True):
            assert isinstance(target, Tensor)
            if isinstance(source, Tensor):
                target.copy_(source)
            else:
                target.fill_(source)

    def _capture(self, batch: Minibatch, c: Coefficients) -> None:
        device = self.step.policy.device
        self._batch = cloned(batch)
        self._coefficients = Coefficients(*(torch.zeros((), device=device) for _ in c))
        self._fill(c)
        stop = self.step.stop
        flags = stop.state_tensors()
        before = [flag.clone() for flag in flags]
        # Stopped steps are masked, so that warming up changes no parameter.
        stop.halt()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARMUPS):
                self.step(self._batch, self._coefficients)
        torch.cuda.current_stream().wait_stream(stream)
        self.step.optimizer.zero_grad(set_to_none=True)
        self._graph = torch.cuda.CUDAGraph()
        with capturing(self._graph):
            self._metrics = self.step(self._batch, self._coefficients)
        for flag, old in zip(flags, before, strict=True):
            flag.copy_(old)


@contextlib.contextmanager
def capturing(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """Capture in a graph what is done in the context.

    No garbage is collected meanwhile: to free a graph, such as that of an agent nobody uses any more, ends a capture.
    """
    gc.collect()
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        # What other threads do, such as writing a checkpoint, is no part of it.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            yield
    finally:
        if is_enabled:
            gc.enable()


def tensors(value: Any) -> list[Tensor]:
    """All tensors of a minibatch, or of a part of one."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    return [] if value is None else [tensor for part in value for tensor in tensors(part)]


def cloned(value: Any) -> Any:
    """A copy of a minibatch, or of a part of one."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: cloned(part) for key, part in value.items()}
    if hasattr(value, "_fields"):
        return type(value)(*(cloned(part) for part in value))
    return value if value is None else tuple(cloned(part) for part in value)
