"""Streams that change, and networks that learn from them one sample at a time, for benchmarks/plasticity.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from plasticity_methods import RULES, Config
from sklearn.datasets import load_digits
from torch import Tensor


class Network:
    """ReLU networks ``[M]`` with gradients by hand: autograd would cost more than the arithmetic.

    Configurations come in blocks, and in each block the seeds: all start from the same weights.
    """

    def __init__(self, sizes: Sequence[int], configs: int, seeds: Sequence[int]) -> None:
        shapes = [shape for fan_in, fan_out in itertools.pairwise(sizes) for shape in ((fan_in, fan_out), (1, fan_out))]
        rows = []
        for seed in seeds:
            generator = torch.Generator().manual_seed(10_000 + seed)
            bounds = [fan_in**-0.5 for fan_in in sizes[:-1] for _ in range(2)]
            row = [torch.empty(s).uniform_(-b, b, generator=generator) for s, b in zip(shapes, bounds, strict=True)]
            rows.append(torch.cat([t.flatten() for t in row]))
        self.weights = torch.stack(rows).repeat(configs, 1)
        self.grads = torch.zeros_like(self.weights)
        self.layers = self._views(self.weights, shapes)
        self.layer_grads = self._views(self.grads, shapes)

    @staticmethod
    def _views(flat: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
        parts = flat.split([a * b for a, b in shapes], dim=1)
        return [part.view(len(flat), *shape) for part, shape in zip(parts, shapes, strict=True)]

    def forward(self, inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Outputs ``[M, 1, out]`` for inputs ``[M, 1, in]``, and the inputs of every layer."""
        fed = [inputs]
        for i in range(0, len(self.layers) - 2, 2):
            fed.append(torch.baddbmm(self.layers[i + 1], fed[-1], self.layers[i]).relu_())
        return torch.baddbmm(self.layers[-1], fed[-1], self.layers[-2]), fed

    def backward(self, fed: list[Tensor], delta: Tensor) -> None:
        """Fill the gradients, from the derivative by the outputs ``[M, 1, out]``."""
        for i in range(len(fed) - 1, -1, -1):
            torch.mul(fed[i].transpose(1, 2), delta, out=self.layer_grads[2 * i])
            self.layer_grads[2 * i + 1].copy_(delta)
            if i > 0:
                delta = torch.bmm(delta, self.layers[2 * i].transpose(1, 2)).mul_(fed[i] > 0)


class Learners:
    """All configurations of one problem, each with all seeds, in one network."""

    def __init__(self, sizes: Sequence[int], configs: Sequence[Config], seeds: Sequence[int]) -> None:
        self.configs = sorted(configs, key=lambda c: str(c.kind))
        self.seeds = list(seeds)
        self.network = Network(sizes, len(self.configs), seeds)
        self.rules = []
        for _, block in itertools.groupby(enumerate(self.configs), key=lambda pair: pair[1].kind):
            indices, members = zip(*block, strict=True)
            span = slice(indices[0] * len(seeds), (indices[-1] + 1) * len(seeds))
            repeated = [config for config in members for _ in seeds]
            layers = [layer[span] for layer in self.network.layers]
            rule = RULES[members[0].method](repeated, self.network.weights[span], layers)
            self.rules.append((span, rule, self.network.grads[span]))

    def spread(self, *streams: Tensor, chunk: int = 500) -> Iterator[tuple[Tensor, ...]]:
        """Give all configurations the same data: streams ``[steps, seeds, features]`` as steps ``[M, 1, features]``."""
        for start in range(0, len(streams[0]), chunk):
            parts = [s[start : start + chunk].repeat(1, len(self.configs), 1).unsqueeze(2) for s in streams]
            yield from zip(*(part.unbind() for part in parts), strict=True)

    def learn(self, fed: list[Tensor], delta: Tensor) -> None:
        """One step of every rule."""
        self.network.backward(fed, delta)
        for span, rule, grads in self.rules:
            rule.step(grads, [activations[span] for activations in fed[1:]])

    def by_config(self, values: Tensor) -> dict[Config, np.ndarray]:
        """Results ``[M, tasks]`` as ``[seeds, tasks]`` for each configuration."""
        rows = values.view(len(self.configs), len(self.seeds), -1).numpy()
        return dict(zip(self.configs, rows, strict=True))


@dataclass(frozen=True)
class Stream:
    """How long a problem lasts."""

    tasks: int
    steps: int
    """Samples in each task."""


Progress = Callable[[], None]
"""Called after every task."""


def digit_stream(
    kind: str, stream: Stream, configs: Sequence[Config], seeds: Sequence[int], progress: Progress
) -> dict[Config, np.ndarray]:
    """Digits with labels, or pixels, permuted anew in every task. Result: online accuracy of each task."""
    data = load_digits()
    images = torch.tensor(data.data / 8 - 1, dtype=torch.float32)
    targets = torch.tensor(data.target)
    learners = Learners([64, 100, 50, 10], configs, seeds)
    members = len(learners.configs) * len(seeds)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    torch.manual_seed(seeds[0])
    accuracy = torch.zeros(members, stream.tasks)
    for task in range(stream.tasks):
        xs, ys = [], []
        for generator in generators:
            rows = torch.randint(len(targets), (stream.steps,), generator=generator)
            pixels = torch.randperm(64, generator=generator) if kind == "input" else torch.arange(64)
            labels = torch.randperm(10, generator=generator) if kind == "label" else torch.arange(10)
            xs.append(images[rows][:, pixels])
            ys.append(labels[targets[rows]])
        onehot = torch.nn.functional.one_hot(torch.stack(ys, 1), 10).float()  # [steps, seeds, 10]
        hits = torch.zeros(members)
        for images_now, answer in learners.spread(torch.stack(xs, 1), onehot):
            logits, fed = learners.network.forward(images_now)
            hits += logits.flatten(1).argmax(1) == answer.flatten(1).argmax(1)
            learners.learn(fed, logits.softmax(2).sub_(answer))
        accuracy[:, task] = hits / stream.steps
        progress()
    return learners.by_config(accuracy)


class BitFlipping:
    """Twenty bits, fifteen of which change slowly, and a fixed network of threshold units as target.

    Dohare et al., "Loss of plasticity in deep continual learning", Nature 2024.
    """

    units, slow, fast = 100, 15, 5

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        inputs = self.slow + self.fast
        self.weights = self._signs(self.units, inputs)
        self.biases = self._signs(self.units)
        self.outputs = self._signs(self.units)
        self.thresholds = 0.7 * (inputs + 1) - (inputs - self.weights.sum(1) + self.biases) / 2
        self.bits = torch.randint(2, (self.slow,), generator=self.generator).float()

    def _signs(self, *shape: int) -> Tensor:
        return torch.randint(2, shape, generator=self.generator).float() * 2 - 1

    def task(self, steps: int) -> tuple[Tensor, Tensor]:
        """Flip one slow bit, then draw ``steps`` inputs ``[steps, 20]`` and targets ``[steps]``."""
        flipped = int(torch.randint(self.slow, (), generator=self.generator))
        self.bits[flipped] = 1 - self.bits[flipped]
        random_bits = torch.randint(2, (steps, self.fast), generator=self.generator).float()
        inputs = torch.cat([self.bits.expand(steps, -1), random_bits], 1)
        active = inputs @ self.weights.T + self.biases > self.thresholds
        return inputs, active.float() @ self.outputs


def bit_flipping(
    stream: Stream, configs: Sequence[Config], seeds: Sequence[int], progress: Progress
) -> dict[Config, np.ndarray]:
    """Result: mean squared error of each task."""
    targets = [BitFlipping(seed) for seed in seeds]
    learners = Learners([20, 5, 1], configs, seeds)
    members = len(learners.configs) * len(seeds)
    torch.manual_seed(seeds[0])
    errors = torch.zeros(members, stream.tasks)
    for task in range(stream.tasks):
        drawn = [target.task(stream.steps) for target in targets]
        inputs, answers = torch.stack([x for x, _ in drawn], 1), torch.stack([y for _, y in drawn], 1)
        total = torch.zeros(members, 1, 1)
        for bits, answer in learners.spread(inputs, answers.unsqueeze(2)):
            outputs, fed = learners.network.forward(bits)
            difference = outputs - answer
            total.addcmul_(difference, difference)
            learners.learn(fed, 2 * difference)
        errors[:, task] = total.flatten() / stream.steps
        progress()
    return learners.by_config(errors)
