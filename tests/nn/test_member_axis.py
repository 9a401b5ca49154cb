"""Value heads, distributions and recurrent cells with a leading member axis: equal to one call for each member."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call, stack_module_state

from driftproof.nn.cores import GRUCore, LSTMCore, mask_state
from driftproof.nn.heads import CategoricalHead, QuantileHead, Scale
from driftproof.nn.segments import Segments
from tests.nn.test_distributions import every_space, made

HEADS = [QuantileHead, CategoricalHead]
MEMBERS = 3
NUMBERS = torch.tensor([0.1, 0.4, 0.9])


def each(function, *tensors):
    """One call for each member, stacked."""
    results = [function(*parts) for parts in zip(*tensors, strict=True)]
    return torch.stack(results)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("shape", [(5,), (4, 5)], ids=str)
class TestHeads:
    def test_predictions(self, kind, shape):
        heads = [kind(6) for _ in range(MEMBERS)]
        features = torch.randn(MEMBERS, *shape, 6)
        state, _ = stack_module_state(heads)
        together = functional_call(heads[0], state, (features,))
        torch.testing.assert_close(together, torch.stack([h(f) for h, f in zip(heads, features, strict=True)]))

    def test_summaries_and_losses(self, kind, shape):
        head = kind(6)
        prediction, other = torch.randn(2, MEMBERS, *shape, head.outputs)
        target = torch.randn(MEMBERS, *shape)
        for summary in (head.mean, head.std, head.quantiles):
            torch.testing.assert_close(summary(prediction), each(summary, prediction))
        torch.testing.assert_close(head.cvar(prediction, NUMBERS), each(head.cvar, prediction, NUMBERS))
        torch.testing.assert_close(head.loss(prediction, target), each(head.loss, prediction, target))
        torch.testing.assert_close(head.difference(prediction, other), each(head.difference, prediction, other))

    def test_clipping(self, kind, shape):
        head = kind(6)
        prediction, old = torch.randn(2, MEMBERS, *shape, head.outputs)
        # A categorical head has no quantiles to move.
        modes = ["mean_only", "mean_and_variance", *(["per_quantile"] if kind is QuantileHead else [])]
        for mode in modes:
            single = partial(head.clip_to, mode=mode)
            together = head.clip_to(prediction, old, mode, NUMBERS)
            alone = [single(p, o, delta=d) for p, o, d in zip(prediction, old, NUMBERS, strict=True)]
            torch.testing.assert_close(together, torch.stack(alone))

    def test_rescaling(self, kind, shape):
        old = Scale(torch.tensor([1.0, -2.0, 3.0]), torch.tensor([0.5, 1.0, 2.0]))
        new = Scale(torch.tensor([0.0, 5.0, 3.5]), torch.tensor([1.0, 0.3, 2.0]))
        heads = [kind(6) for _ in range(MEMBERS)]
        features = torch.randn(MEMBERS, *shape, 6)
        state, _ = stack_module_state(heads)
        before = functional_call(heads[0], state, (features,))
        together = kind(6)
        together.linear.weight = torch.nn.Parameter(state["linear.weight"].detach().clone())
        together.linear.bias = torch.nn.Parameter(state["linear.bias"].detach().clone())
        together.rescale(old, new)
        for i, head in enumerate(heads):
            head.rescale(Scale(old.mean[i], old.std[i]), Scale(new.mean[i], new.std[i]))
            assert torch.equal(together.linear.weight[i], head.linear.weight)
            assert torch.equal(together.linear.bias[i], head.linear.bias)
        torch.testing.assert_close(together(features), together.rescaled(before, old, new))


@pytest.mark.parametrize(("kind", "reference"), [(LSTMCore, nn.LSTM), (GRUCore, nn.GRU)])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
class TestCores:
    """Against torch's own modules, one for each group, and against stepping."""

    def case(self, kind, reference, layers, bias, steps=7, batch=4):
        torch.manual_seed(0)
        cores = [kind(3, 5, layers, bias=bias) for _ in range(MEMBERS)]
        modules = [reference(3, 5, layers, bias=bias) for _ in cores]
        for module, core in zip(modules, cores, strict=True):
            module.load_state_dict(core.recurrence.state_dict())
        state = tuple(torch.randn(MEMBERS, layers, batch, 5) for _ in range(cores[0].parts))
        weights = {name: tensor.detach() for name, tensor in stack_module_state(cores)[0].items()}
        return cores[0], weights, modules, torch.randn(MEMBERS, steps, batch, 3), state

    def test_sequences_and_gradients(self, kind, reference, layers, bias):
        core, weights, modules, inputs, state = self.case(kind, reference, layers, bias)
        weights = {name: tensor.requires_grad_() for name, tensor in weights.items()}
        outputs = functional_call(core, weights, (inputs, state))
        gradients = dict(zip(weights, torch.autograd.grad(outputs.square().sum(), weights.values()), strict=True))
        for i, module in enumerate(modules):
            start = tuple(part[i] for part in state)
            single, _ = module(inputs[i], start if len(start) > 1 else start[0])
            torch.testing.assert_close(outputs[i], single)
            single.square().sum().backward()
            for name, parameter in module.named_parameters():
                torch.testing.assert_close(gradients[f"recurrence.{name}"][i], parameter.grad, rtol=1e-4, atol=1e-5)

    def test_steps_masks_and_segments(self, kind, reference, layers, bias):
        core, weights, modules, inputs, state = self.case(kind, reference, layers, bias)
        starts = torch.rand(inputs.shape[1:3], generator=torch.Generator().manual_seed(1)) < 0.3
        keep = (~starts).float()
        grouped = Grouped(core)
        call = partial(functional_call, grouped, {f"core.{name}": tensor for name, tensor in weights.items()})
        outputs, now = [], state
        for x, k in zip(inputs.unbind(1), keep.unbind(), strict=True):
            output, now = call(("step", x, mask_state(now, k.view(1, -1, 1))))
            outputs.append(output)
        stepped = torch.stack(outputs, 1)
        torch.testing.assert_close(call(("masked", inputs, state, keep.expand(MEMBERS, -1, -1))), stepped)
        first = mask_state(state, keep[0].view(1, -1, 1))
        torch.testing.assert_close(call(("forward", inputs, first, Segments.cut(starts.numpy()))), stepped)
        for i, module in enumerate(modules):
            now = tuple(part[i] for part in state)
            for t, k in enumerate(keep):
                now = mask_state(now, k.unsqueeze(1))
                single, after = module(inputs[i, t : t + 1], now if len(now) > 1 else now[0])
                now = after if isinstance(after, tuple) else (after,)
                torch.testing.assert_close(stepped[i, t], single[0])


class Grouped(nn.Module):
    """Calls a method of a core by its name, as functional_call calls modules only."""

    def __init__(self, core):
        super().__init__()
        self.core = core

    def forward(self, name, *arguments):
        return getattr(self.core, name)(*arguments)


def test_share_of_targets_outside_the_support():
    head = CategoricalHead(1, 5, -1.0, 1.0)
    targets = torch.tensor([[[0.0, 2.0]], [[-2.0, 2.0]], [[0.0, 0.0]]])
    assert head.saturated(targets, members=True).tolist() == [0.5, 1.0, 0.0]


@every_space
def test_distributions(name):
    distribution = made(name)
    old, new = torch.randn(2, MEMBERS, 4, 5, distribution.size)
    noise = distribution.noise(MEMBERS, 4, 5)
    actions = distribution.sample(old, noise)
    assert torch.equal(actions, each(distribution.sample, old, noise))
    for function in (distribution.mode, distribution.entropy, distribution.uniform_divergence):
        torch.testing.assert_close(function(new), each(function, new))
    for function in (distribution.shown, distribution.to_env):
        torch.testing.assert_close(function(actions), each(function, actions))
    torch.testing.assert_close(distribution.log_prob(new, actions), each(distribution.log_prob, new, actions))
    both = distribution.log_prob_and_entropy(new, actions)
    torch.testing.assert_close(both, (distribution.log_prob(new, actions), distribution.entropy(new)))
    torch.testing.assert_close(distribution.kl(old, new), each(distribution.kl, old, new))
