"""Random numbers of a population's members."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from driftproof.optim.functional import NoiseSource, RawNoise, draw_noise

T = TypeVar("T")


class MemberGenerators:
    """Draws each member's random numbers.

    On a CPU, every member has a generator of its own, and draws from it what a single agent would draw from torch's
    global one: a member's training does not depend on the others. On other devices, all members draw at once from the
    device's generator.

    Args:
        states: State of each member's generator, as ``torch.get_rng_state()`` returns it.
        device: Device of the members.
    """

    def __init__(self, states: Sequence[Tensor], device: torch.device) -> None:
        self.states, self.device = list(states), device
        self.is_single = device.type == "cpu"
        """Whether members draw as single agents do."""
        self.device_state: Tensor | None = None
        """State of the device's generator, if it has one of its own."""

    @contextlib.contextmanager
    def of(self, member: int) -> Iterator[None]:
        """Make a member's generator torch's global one inside the block."""
        before = torch.get_rng_state()
        torch.set_rng_state(self.states[member])
        try:
            yield
        finally:
            self.states[member] = torch.get_rng_state()
            torch.set_rng_state(before)

    @contextlib.contextmanager
    def of_device(self) -> Iterator[None]:
        """Use the population's state of the device's generator inside the block."""
        if self.device.type == "cuda" and self.device_state is not None:
            torch.cuda.set_rng_state(self.device_state, self.device)
        yield
        if self.device.type == "cuda":
            self.device_state = torch.cuda.get_rng_state(self.device)

    def each(self, members: Sequence[int], draw: Callable[[int], T]) -> list[T]:
        """What some members draw, one after the other."""
        results = []
        for member in members:
            with self.of(member):
                results.append(draw(member))
        return results

    def orders(self, epochs: Sequence[int], sequences: int) -> Tensor:
        """Permutations of sequences ``[largest number of epochs, M, sequences]``; a member has its own epochs only."""
        most = max(epochs)
        if not self.is_single:
            return torch.rand(most, len(epochs), sequences, device=self.device).argsort(-1)
        orders = torch.arange(sequences).repeat(most, len(epochs), 1)
        for member, count in enumerate(epochs):
            with self.of(member):
                for epoch in range(count):
                    orders[epoch, member] = torch.randperm(sequences)
        return orders

    def noise(self, sizes: Sequence[int], members: Sequence[int] | None) -> NoiseSource:
        """A source of noise for the steps of an optimizer with a member axis.

        Args:
            sizes: Elements of each parameter, of one member.
            members: Members that draw; the noise of the others is 0. ``None``: all, at once.
        """
        if members is None:
            return draw_noise

        def source(count: int, device: torch.device) -> RawNoise:
            each = sum(sizes)
            rows, scale = torch.zeros(count // each, each, dtype=torch.int8), 1.0
            for member in members:
                with self.of(member):
                    rows[member], scale = draw_noise(each, device)
            # Members draw for all of their parameters, and the step has all members of each parameter.
            return RawNoise(torch.cat([part.reshape(-1) for part in torch.split(rows, list(sizes), 1)]), scale)

        return source
