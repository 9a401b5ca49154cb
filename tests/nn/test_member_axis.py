"""Value heads, distributions and recurrent cells with a leading member axis: equal to one call for each member."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.func import functional_call, stack_module_state

from driftproof.nn.heads import CategoricalHead, QuantileHead, Scale
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

    @pytest.mark.parametrize("mode", ["mean_only", "mean_and_variance", "per_quantile"])
    def test_clipping(self, kind, shape, mode):
        if mode == "per_quantile" and kind is CategoricalHead:
            pytest.skip("a categorical head has no quantiles to move")
        head = kind(6)
        prediction, old = torch.randn(2, MEMBERS, *shape, head.outputs)
        single = partial(head.clip_to, mode=mode)
        together = head.clip_to(prediction, old, mode, NUMBERS)
        torch.testing.assert_close(together, each(lambda p, o, d: single(p, o, delta=d), prediction, old, NUMBERS))

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
    for function in (distribution.mode, distribution.entropy):
        torch.testing.assert_close(function(new), each(function, new))
    for function in (distribution.shown, distribution.to_env):
        torch.testing.assert_close(function(actions), each(function, actions))
    torch.testing.assert_close(distribution.log_prob(new, actions), each(distribution.log_prob, new, actions))
    torch.testing.assert_close(distribution.kl(old, new), each(distribution.kl, old, new))
