"""Writes agents as ONNX files, and verifies them."""

from __future__ import annotations

import io
import json
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from torch import Tensor

import driftproof
from driftproof._requirements import require
from driftproof.export.graph import StepGraph
from driftproof.nn.types import PolicyState, map_observation
from driftproof.ppo import DistributionalPPO
from driftproof.state import write_atomically

Arrays = dict[str, npt.NDArray[Any]]

_TOLERANCE = 1e-5
"""Largest difference between a file and its agent; absolute for small numbers, relative for large ones."""
_STEPS = 8
"""Steps for which a file and its agent are compared, each from the agent's recurrent state."""


class ExportError(RuntimeError):
    """An agent cannot be exported, or its file gives other outputs than the agent."""


def export_onnx(
    agent: DistributionalPPO | str | os.PathLike[str],
    output: str | os.PathLike[str],
    custom_objects: Mapping[str, Any] | None = None,
) -> Path:
    """Write an agent's step to an ONNX file, for runtimes without torch.

    Inputs: ``observation`` as environments give it, or ``observation_<key>`` for each part; normalisation is in the
    file. Recurrent states: ``actor_hidden``, ``actor_cell``, ``critic_hidden``, ``critic_cell``, as far as it has
    them, ``[layers, batch, units]``, zeros at the start of an episode.

    Outputs: ``action``, the deterministic action; ``mean`` and ``std`` for a Box, or ``probabilities``; ``quantiles``
    of returns ``[batch, critics, quantiles]``; and the next recurrent states, ``next_actor_hidden`` and so on. The
    batch may have any size.

    The file is compared with the agent before it is written: outputs over some steps must agree to 1e-5.

    Args:
        agent: The agent, or its file.
        output: The file to write.
        custom_objects: For an agent in a file or on an accelerator; see :meth:`DistributionalPPO.load`.

    Returns:
        Path of the file.

    Raises:
        ExportError: ONNX has no operator for a part of the networks, or the file does not agree with the agent.
            Nothing is written.
    """
    require("export to ONNX", "onnx", "onnx", "onnxruntime", "onnxscript")
    agent = _on_cpu(agent, custom_objects)
    graph = StepGraph(agent)
    rng = np.random.default_rng(0)
    content = _convert(graph, {**_observations(agent, graph, rng, 2), **_nothing(graph, 2)}, _metadata(agent, graph))
    _verify(agent, graph, content)
    write_atomically(output, [content])
    return Path(output)


def _on_cpu(
    agent: DistributionalPPO | str | os.PathLike[str], custom_objects: Mapping[str, Any] | None
) -> DistributionalPPO:
    """The agent, or a copy on the CPU: accelerators round differently from the runtime it is compared with."""
    if not isinstance(agent, DistributionalPPO):
        return DistributionalPPO.load(Path(agent), device="cpu", custom_objects=custom_objects)
    if agent.device.type == "cpu":
        return agent
    file = io.BytesIO()
    agent.save(file)
    file.seek(0)
    return type(agent).load(file, device="cpu", custom_objects=custom_objects)


def _convert(graph: StepGraph, examples: Arrays, metadata: Mapping[str, str]) -> bytes:
    """The content of an ONNX file, from a step and example inputs."""
    batch = torch.export.Dim("batch")
    axes = {name: {1 if name in graph.states else 0: batch} for name in graph.inputs}
    try:
        with _without_noise(), torch.no_grad():
            program = torch.onnx.export(
                graph,
                tuple(torch.as_tensor(examples[name]) for name in graph.inputs),
                dynamo=True,
                # One argument that takes them all.
                dynamic_shapes=(tuple(axes[name] for name in graph.inputs),),
                input_names=graph.inputs,
                output_names=graph.outputs,
                verbose=False,
            )
    except (torch.onnx.errors.OnnxExporterError, RuntimeError) as error:
        reason = str(error.__cause__ or error).strip().partition("\n")[0]
        extractor = type(graph.policy.features_extractor).__name__
        raise ExportError(f"the networks, with {extractor} in front, cannot be written as ONNX: {reason}") from error
    assert program is not None
    model = program.model_proto
    for key, value in metadata.items():
        model.metadata_props.add(key=key, value=value)
    content: bytes = model.SerializeToString()
    return content


@contextmanager
def _without_noise() -> Iterator[None]:
    """Suppress warnings and logs of torch's exporter about its internals."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _metadata(agent: DistributionalPPO, graph: StepGraph) -> dict[str, str]:
    quantiles = graph.policy.heads[0].outputs
    return {
        "driftproof.version": driftproof.__version__,
        "driftproof.action_space": str(agent.action_space),
        "driftproof.state": json.dumps(graph.states),
        "driftproof.quantile_levels": json.dumps([(i + 0.5) / quantiles for i in range(quantiles)]),
    }


def _verify(agent: DistributionalPPO, graph: StepGraph, content: bytes) -> None:
    """Raise unless a file's outputs equal the agent's, in batches of other sizes than it was exported with."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    try:
        session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # Its exceptions have no class in common.
        raise ExportError(f"onnxruntime cannot run the exported networks: {error}") from error
    for batch in (1, 3):
        rng = np.random.default_rng(batch)
        states = _nothing(graph, batch)
        for step in range(_STEPS):
            inputs = {**_observations(agent, graph, rng, batch), **states}
            found = dict(zip(graph.outputs, session.run(list(graph.outputs), inputs), strict=True))
            expected, parameters = _expected(agent, graph, inputs)
            for name, value in expected.items():
                gap = _difference(agent, name, found[name], value)
                if name == "action" and not isinstance(agent.action_space, spaces.Box):
                    gap = _missed(agent, parameters, found[name])
                if not gap <= _TOLERANCE:
                    raise ExportError(
                        f"onnxruntime differs from the agent by {gap:.1e} in {name!r}, at step {step} of a batch of "
                        f"{batch}; {_TOLERANCE:g} is allowed. Nothing was written"
                    )
            states = {name: expected[f"next_{name}"] for name in states}


@torch.no_grad()
def _expected(agent: DistributionalPPO, graph: StepGraph, inputs: Arrays) -> tuple[Arrays, Tensor]:
    """The agent's own outputs for inputs, and the parameters of its action distribution."""
    parts = {key: inputs[name] for key, name in zip(graph.keys, graph.inputs, strict=False)}
    seen = agent.normalizer.normalize(parts[""] if graph.keys == [""] else parts)
    actor, critic = (
        tuple(inputs[name] for name in graph.states if name.startswith(who)) for who in ("actor", "critic")
    )
    action, next_actor = agent.predict(seen, actor or None, deterministic=True)
    shared = agent.policy.critic_core is None
    quantiles, next_critic = agent.predict_quantiles(seen, (actor if shared else critic) or None)
    tensors = agent.policy.normalized(agent.policy.obs_to_tensor(seen)[0])
    state = PolicyState(*(tuple(torch.as_tensor(x) for x in part) for part in (actor, critic)))
    parameters = agent.policy.evaluate(map_observation(tensors, lambda x: x.unsqueeze(0)), state).parameters[0]
    described = (part.numpy() for part in graph.describe(parameters))
    after = (*(next_actor or ()), *(() if shared else next_critic or ()))
    values = (action, *described, quantiles.swapaxes(0, 1), *after)
    return dict(zip(graph.outputs, values, strict=True)), parameters


def _difference(agent: DistributionalPPO, name: str, found: npt.NDArray[Any], expected: npt.NDArray[Any]) -> float:
    if found.shape != expected.shape:
        raise ExportError(f"onnxruntime returns {name!r} of shape {found.shape}, the agent {expected.shape}")
    scale: Any = np.maximum(1, np.abs(expected))
    if name == "quantiles":
        # Rounding is of normalised returns, which are decoded.
        mean, std = agent.return_scale.snapshot
        scale = abs(float(mean)) + float(std)
    return float(np.max(np.abs(found - expected) / scale, initial=0))


def _missed(agent: DistributionalPPO, parameters: Tensor, action: npt.NDArray[Any]) -> float:
    """How much less probable an action is than the best one; either of two equally probable ones is accepted."""
    distribution = agent.policy.distribution
    chosen = torch.as_tensor(action - getattr(agent.action_space, "start", 0))
    chosen = chosen.reshape(len(parameters), *distribution.action_shape).to(distribution.action_dtype)
    best = distribution.log_prob(parameters, distribution.mode(parameters))
    return float((best - distribution.log_prob(parameters, chosen)).max())


def _nothing(graph: StepGraph, batch: int) -> Arrays:
    """Initial recurrent states."""
    return {name: np.zeros((layers, batch, units), np.float32) for name, (layers, units) in graph.states.items()}


def _observations(agent: DistributionalPPO, graph: StepGraph, rng: np.random.Generator, batch: int) -> Arrays:
    """Random observations by the names of inputs."""
    space: Any = agent.observation_space
    statistics = agent.normalizer.state_dict()
    moments = statistics["obs_rms"] if statistics else {}
    result = {}
    for key, name in zip(graph.keys, graph.inputs, strict=False):
        part = space[key] if key else space
        if key in moments:
            mean, std = moments[key]["mean"].numpy(), np.sqrt(moments[key]["var"].numpy())
            result[name] = (mean + std * rng.standard_normal((batch, *part.shape))).astype(part.dtype)
        else:
            result[name] = np.stack([_sample(part, rng) for _ in range(batch)])
    return result


def _sample(space: spaces.Space[Any], rng: np.random.Generator) -> npt.NDArray[Any]:
    match space:
        case spaces.Discrete():
            return np.asarray(rng.integers(space.n))
        case spaces.MultiDiscrete():
            return rng.integers(space.nvec)
        case spaces.MultiBinary():
            return rng.integers(2, size=space.shape, dtype=np.int8)
    assert isinstance(space, spaces.Box)
    if space.dtype.kind in "iub":
        return rng.integers(space.low.astype(np.int64), space.high.astype(np.int64), endpoint=True).astype(space.dtype)
    # Many bounds are finite only in name.
    return np.clip(rng.standard_normal(space.shape), space.low, space.high).astype(space.dtype)
