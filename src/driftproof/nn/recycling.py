"""Recycling of dormant units, which have lost their part in what a network computes.

Sokar, Agarwal, Castro & Evci, "The Dormant Neuron Phenomenon in Deep Reinforcement Learning", ICML 2023
(arXiv 2302.12902). The score here is the standard deviation of a unit's activation over samples, relative to the mean
of its layer: it is 0 for dead ReLUs, as theirs is, and also for saturated units of a hyperbolic tangent, an LSTM or a
GRU, whose activations are constant but not 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from driftproof.nn.cores import Core, GRUCore, LSTMCore

if TYPE_CHECKING:
    from driftproof.nn.policies import DistributionalPolicy


class Layer(NamedTuple):
    """Units that are recycled together.

    Attributes:
        watch: Registers a hook that receives the activations ``[..., units]``; returns its handle.
        incoming: Parameters whose rows belong to the units, once or for several gates one after the other.
        outgoing: Weights whose columns belong to the units, and biases that are added to the outputs of these.
    """

    watch: Callable[[Callable[[Tensor], None]], Any]
    incoming: list[Tensor]
    outgoing: list[tuple[Tensor, Tensor | None]]


@torch.no_grad()
def recycle(
    policy: DistributionalPolicy, evaluate: Callable[[], object], threshold: float
) -> tuple[Tensor, dict[Tensor, Tensor]]:
    """Give dormant units fresh input weights, and zero output weights; their constant outputs become biases.

    Args:
        policy: The networks; of their layers, the dense ones before the heads, and the last of an LSTM or GRU.
        evaluate: Evaluates the policy on the samples that count.
        threshold: Largest score of a dormant unit.

    Returns:
        The share of units that were dormant, and masks of the elements that were replaced, by parameter.
    """
    layers = list(_layers(policy))
    noted: list[tuple[Tensor, Tensor]] = [(torch.empty(0), torch.empty(0))] * len(layers)

    def watcher(index: int) -> Callable[[Tensor], None]:
        def note(activations: Tensor) -> None:
            samples = activations.flatten(0, -2).float()
            noted[index] = samples.std(0, correction=0), samples.mean(0)

        return note

    with ExitStack() as hooks:
        for index, layer in enumerate(layers):
            hooks.callback(layer.watch(watcher(index)).remove)
        evaluate()
    dormant = [spread <= threshold * spread.mean() for spread, _ in noted]
    share = torch.cat(dormant).float().mean() if layers else torch.zeros((), device=policy.device)
    if not share:
        return share, {}
    fresh: dict[Tensor, Tensor] = dict(zip(policy.parameters(), policy.fresh().parameters(), strict=True))
    replaced: dict[Tensor, Tensor] = {}

    def replace(parameter: Tensor, mask: Tensor, values: Tensor) -> None:
        mask = mask.expand_as(parameter)
        parameter.copy_(torch.where(mask, values, parameter))
        replaced[parameter] = replaced.get(parameter, torch.zeros_like(mask)) | mask

    for layer, units, (_, means) in zip(layers, dormant, noted, strict=True):
        for weight, bias in layer.outgoing:
            if bias is not None:
                bias.add_(weight @ torch.where(units, means, 0).to(weight))
    for layer, units in zip(layers, dormant, strict=True):
        for parameter in layer.incoming:
            rows = units.repeat(len(parameter) // len(units)).view(-1, *[1] * (parameter.dim() - 1))
            replace(parameter, rows, fresh[parameter].to(parameter))
    # Last, as a unit's fresh input weights may come from another one that is fresh.
    for layer, units in zip(layers, dormant, strict=True):
        for weight, _ in layer.outgoing:
            replace(weight, units, torch.zeros_like(weight))
    return share, replaced


def _layers(policy: DistributionalPolicy) -> Iterator[Layer]:
    """All layers whose units can be recycled."""
    actor = [*_dense(policy.actor_network), (policy.action_head, policy.action_head)]
    critics = [[*_dense(each.network), (each.head, each.head.linear)] for each in policy._critics()]
    for path in (actor, *critics):
        for (_, layer), (module, following) in pairwise(path):
            yield Layer(_before(module), list(layer.parameters()), [(following.weight, following.bias)])
    first = [path[0][1] for path in critics]
    yield from _of_core(policy, policy.actor_core, [actor[0][1], *(first if policy.critic_core is None else [])])
    if policy.critic_core is not None:
        yield from _of_core(policy, policy.critic_core, first)


def _dense(network: nn.Sequential) -> list[tuple[nn.Module, nn.Linear]]:
    return [(layer, layer) for layer in network if isinstance(layer, nn.Linear)]


def _of_core(policy: DistributionalPolicy, core: Core, following: list[nn.Linear]) -> Iterator[Layer]:
    """The last layer of an LSTM or GRU."""
    if not isinstance(core, LSTMCore | GRUCore):
        return
    last = {name: p for name, p in core.recurrence.named_parameters() if name.endswith(f"_l{core.layers - 1}")}
    weight, bias = (last.get(f"{name}_hh_l{core.layers - 1}") for name in ("weight", "bias"))
    assert weight is not None
    # Layer normalisation comes in between: what a unit that is constant adds is not constant then.
    adds: list[tuple[Tensor, Tensor | None]] = [
        (each.weight, None if policy.layer_norm else each.bias) for each in following
    ]
    yield Layer(_after(core), list(last.values()), [(weight, bias), *adds])


def _before(module: nn.Module) -> Callable[[Callable[[Tensor], None]], Any]:
    return lambda note: module.register_forward_pre_hook(lambda _, inputs: note(inputs[0]))


def _after(module: nn.Module) -> Callable[[Callable[[Tensor], None]], Any]:
    return lambda note: module.register_forward_hook(lambda _, __, output: note(output))
