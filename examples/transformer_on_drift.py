"""UPGD in a training loop of your own: a small transformer on a language whose dictionary changes.

    python examples/transformer_on_drift.py             # a minute or two
    python examples/transformer_on_drift.py --quick     # shows that it runs, not what it learns

A sequence of random tokens goes in. At every position the answer is the translation of the token before. The dictionary
is a random permutation, and every task has another one: what the network knows about positions stays useful, what it
knows about words does not. Batches come from a stream, so that accuracy is on sequences never seen before.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from driftproof.optim import UPGD, UPGDW, AdaptiveUPGD, diagnostics

TOKENS, LENGTH, BATCH, WIDTH = 16, 10, 32, 32

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=3e-3, weight_decay=0.01),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=1e-4),
    "UPGDW": lambda params: UPGDW(params, lr=3e-3, weight_decay=0.01),
    "AdaptiveUPGD": lambda params: AdaptiveUPGD(params, lr=3e-3, weight_decay=0.01, beta_utility=0.9),
    "UPGD": lambda params: UPGD(params, lr=0.1, weight_decay=1e-4, beta_utility=0.9),
}


class Transformer(nn.Module):
    """One encoder layer with learned positions: ``[batch, length]`` tokens to ``[batch, length, tokens]`` scores."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.scores = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.layer(self.words(tokens) + self.positions.weight)
        scores: Tensor = self.scores(hidden)
        return scores


def stream(tasks: int, steps: int, seed: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Batches of all tasks: number of the task, tokens and answers ``[batch, length]``."""
    random = torch.Generator().manual_seed(seed)
    for task in range(tasks):
        dictionary = torch.randperm(TOKENS, generator=random)
        for _ in range(steps):
            tokens = torch.randint(TOKENS, (BATCH, LENGTH), generator=random)
            yield task, tokens, dictionary[tokens.roll(1, dims=1)]


def learn(name: str, tasks: int, steps: int, seed: int) -> tuple[Tensor, float]:
    """Train on the stream; returns the accuracy of each task, and the share of dormant units at the end."""
    torch.manual_seed(seed)
    model = Transformer()
    optimizer = OPTIMIZERS[name](model.parameters())
    correct = torch.zeros(tasks)
    for task, tokens, answers in stream(tasks, steps, seed):
        scores = model(tokens)
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        correct[task] += (scores.detach().argmax(-1) == answers).float().mean()
    with torch.no_grad(), diagnostics.record_activations(model) as activations:
        model(tokens)
    return correct / steps, diagnostics.dormant_share(activations["layer.relu"], threshold=0.025)


def main(tasks: int, steps: int, seeds: int) -> None:
    torch.set_num_threads(1)
    fifth = max(1, tasks // 5)
    print(
        f"{tasks} dictionaries of {steps} batches each, {seeds} seeds; accuracy while learning, mean (lowest, highest)"
    )
    print(f"{'':14}{'first fifth of tasks':>24}{'last fifth of tasks':>24}{'dormant units':>16}{'seconds':>10}")
    for name in OPTIMIZERS:
        start = time.perf_counter()
        accuracies, dormant = zip(*(learn(name, tasks, steps, seed) for seed in range(seeds)), strict=True)
        table = torch.stack(accuracies)  # [seeds, tasks]
        cells = []
        for part in (table[:, :fifth].mean(1), table[:, -fifth:].mean(1)):
            cells.append(f"{part.mean():.3f} ({part.min():.3f}, {part.max():.3f})")
        share = sum(dormant) / seeds
        print(f"{name:14}{cells[0]:>24}{cells[1]:>24}{share:>16.1%}{time.perf_counter() - start:>10.0f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only show that it runs")
    arguments = parser.parse_args()
    if arguments.quick:
        main(tasks=2, steps=5, seeds=1)
    else:
        main(tasks=20, steps=100, seeds=3)
