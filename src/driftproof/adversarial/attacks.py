"""Worst-case perturbations: search a small ball around observations for a maximum of an objective."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.preprocessing import is_image_space
from torch import Tensor

from driftproof._arguments import check_number
from driftproof._registry import ATTACKS
from driftproof.adversarial.balls import (
    Draws,
    GeneratorDraws,
    MemberDraws,
    Size,
    moved,
    norms,
    project,
    random_offsets,
    spread,
    steepest,
)
from driftproof.adversarial.methods import FGSM, PGD, SGLD, Attack
from driftproof.nn.types import Observation
from driftproof.ppo.manifest import storable
from driftproof.settings.adversarial import PerturbationConfig
from driftproof.state.generators import torch_generator
from driftproof.state.schema import Rule, check, numbers, scalar, table, text

Objective: TypeAlias = Callable[[Observation], Tensor]
"""Objective that the attack maximises: one number per observation, or their sum."""

_COUNTERS = ("attacks", "observations", "gradients", "norm_sum", "norm_max")
_WHOLE = ""
"""Key of an observation that is not a dictionary."""
_SEED = 0xAD7E25
"""Separates an attack's random numbers from others of the same seed."""


storable(PerturbationConfig)


class _Part(NamedTuple):
    """How a part of observations is perturbed.

    Attributes:
        rank: Number of axes of one observation; ``None``: all but the first.
        scale: Size of a distance of 1 in units of the tensor.
        low: Lower bound.
        high: Upper bound.
    """

    rank: int | None
    scale: float
    low: float
    high: float


class StatePerturbation:
    """Perturbs observations within a ball, to maximise an objective.

    Gradients are taken with respect to observations only; those of parameters stay unchanged. It has its own random
    generator, and does not synchronise with the device.

    Args:
        config: Radius, norm and search.
        observation_space: Space of observations, which may have leading axes, such as whole sequences. Every Box is
            perturbed, other spaces are not. ``None``: a tensor of floats whose first axis is the batch.
        images_are_divided: Whether the policy divides images by 255 (``normalize_images``).
        device: Device of observations.
        seed: Seed of the random generator; ``None``: a random one.

    Raises:
        ValueError: Nothing in the observation space can be perturbed.
    """

    def __init__(
        self,
        config: PerturbationConfig | None = None,
        observation_space: spaces.Space[Any] | None = None,
        *,
        images_are_divided: bool = True,
        device: torch.device | str = "cpu",
        seed: int | None = None,
    ) -> None:
        self.config = PerturbationConfig() if config is None else config
        if not isinstance(self.config, PerturbationConfig):
            raise TypeError(f"config must be a PerturbationConfig, not {config!r}")
        self._parts = self._find_parts(observation_space, images_are_divided)
        self.device = torch.device(device)
        self.generator = torch.Generator(self.device)
        sequence = np.random.SeedSequence(None if seed is None else [seed, _SEED])
        self.generator.manual_seed(int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1)))
        self._draws: Draws = GeneratorDraws(self.generator)
        self._method: Attack = ATTACKS.load(self.config.attack_method)(self.config, self.generator)
        self.totals = {name: torch.zeros((), dtype=torch.float64, device=self.device) for name in _COUNTERS}
        """Counters."""

    def perturb(
        self,
        observation: Observation,
        objective: Objective,
        *,
        epsilon: Size | None = None,
        is_flat_at_clean: bool = False,
    ) -> Observation:
        """Observations in the ball that maximise the objective, as detached floats.

        Args:
            observation: Clean observations ``[..., *shape]``, or a dictionary of these.
            objective: Differentiable function. For recurrent policies use one of whole sequences, so that effects on
                later steps count too.
            epsilon: Radius, instead of the one in ``config``: a number, a 0-dim tensor, or one that broadcasts against
                the leading axes.
            is_flat_at_clean: Whether the objective's gradient is zero at the clean observation, as for a distance.
        """
        size, clean = self._radius(epsilon), self._select(observation)
        starts_anywhere = self.config.random_init or is_flat_at_clean
        offsets = {key: self._first(key, part, size if starts_anywhere else None) for key, part in clean.items()}
        steps, length = self._method.plan(size, starts_anywhere)
        for step in range(steps):
            gradients = self._gradients(observation, clean, offsets, objective)
            for key, gradient in gradients.items():
                offsets[key] = self._step(key, clean[key], offsets[key], gradient, size, length, step)
        self._count(offsets, gradients=steps)
        return self._put(observation, {key: self._moved(key, part, offsets[key]) for key, part in clean.items()})

    def generate_perturbation(self, state: Tensor, loss_fn: Objective) -> Tensor:
        """The offsets that :meth:`perturb` adds to observations ``[B, ...]``."""
        perturbed = self.perturb(state, loss_fn)
        assert isinstance(perturbed, Tensor)
        return perturbed - state

    def random(self, observation: Observation, *, epsilon: Size | None = None) -> Observation:
        """Observations drawn uniformly from the ball."""
        size, clean = self._radius(epsilon), self._select(observation)
        offsets = {key: self._first(key, part, size) for key, part in clean.items()}
        self._count(offsets, gradients=0)
        return self._put(observation, {key: self._moved(key, part, offsets[key]) for key, part in clean.items()})

    def move(self, observation: Observation, directions: Tensor, *, epsilon: Size | None = None) -> Observation:
        """Observations perturbed in given directions.

        Args:
            observation: ``[..., *shape]``, or a dictionary of these.
            directions: Offsets ``[..., size]`` from -1 to 1, as a share of ``epsilon``.
            epsilon: Radius, instead of the one in ``config``.

        Raises:
            ValueError: The number of directions is wrong.
        """
        radius, clean, offsets = self._radius(epsilon), self._select(observation), {}
        ranks = {key: self._rank(key, part) for key, part in clean.items()}
        counts = [math.prod(part.shape[part.dim() - ranks[key] :]) for key, part in clean.items()]
        if directions.shape[-1] != sum(counts):
            raise ValueError(f"there are {directions.shape[-1]} directions for the {sum(counts)} numbers to move")
        for (key, part), own in zip(clean.items(), torch.split(directions, counts, -1), strict=True):
            radius_here = radius * self._parts[key].scale
            ahead = own.reshape(part.shape).to(part.dtype) * radius_here
            offsets[key] = self._clip(key, part, project(ahead, radius_here, self.config.norm_type, ranks[key]))
        self._count(offsets, gradients=0)
        return self._put(observation, {key: self._moved(key, part, offsets[key]) for key, part in clean.items()})

    def norms(self, clean: Observation, perturbed: Observation) -> Tensor:
        """Norms of perturbations ``[...]``, in units of ``epsilon``; the largest part's for dictionaries."""
        before, after = self._select(clean), self._select(perturbed)
        return self._norms({key: after[key] - part for key, part in before.items()})

    def statistics(self) -> dict[str, Tensor]:
        """Counters so far, as 0-dim tensors.

        ``attacks``: calls; ``observations``: in all of them; ``gradients``: forward and backward passes;
        ``mean_norm`` and ``max_norm``: norms of the perturbations.
        """
        totals = {name: tensor.clone() for name, tensor in self.totals.items()}
        mean = totals.pop("norm_sum") / totals["observations"].clamp_min(1)
        return {**totals, "mean_norm": mean, "max_norm": totals.pop("norm_max")}

    def get_stats(self) -> dict[str, float]:
        """``attack_count`` and ``avg_perturbation_norm`` as numbers, of :meth:`statistics`."""
        found = self.statistics()
        return {"attack_count": int(found["attacks"]), "avg_perturbation_norm": float(found["mean_norm"])}

    def reset_stats(self) -> None:
        """The same as :meth:`reset_statistics`."""
        self.reset_statistics()

    def reset_statistics(self) -> None:
        """Reset the counters."""
        for tensor in self.totals.values():
            tensor.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Counters and the generator's state. Settings are not part of it."""
        counters = {name: float(tensor) for name, tensor in self.totals.items()}
        return {"counters": counters, "device": self.device.type, "generator": self.generator.get_state()}

    def check_state_dict(self, state_dict: Any) -> None:
        """Raise a ``CheckpointError`` unless this is a valid state."""
        rules: dict[str, Rule] = {
            "counters": table(dict.fromkeys(self.totals, scalar(at_least=0))),
            "device": text,
            "generator": numbers((None,), [torch.uint8]),
        }
        check("attack", state_dict, table(rules))
        if state_dict["device"] == self.device.type:
            torch_generator(self.device)(state_dict["generator"], ("attack", "generator"))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a saved state; the generator's state is skipped if it is of another kind of device.

        Raises:
            CheckpointError: The state does not fit; nothing has changed.
        """
        self.check_state_dict(state_dict)
        if state_dict["device"] == self.device.type:
            self.generator.set_state(state_dict["generator"].cpu())
        for name, value in state_dict["counters"].items():
            self.totals[name].fill_(float(value))

    def _find_parts(self, space: spaces.Space[Any] | None, images_are_divided: bool) -> dict[str, _Part]:
        config = self.config
        low = -math.inf if config.clip_min is None else config.clip_min
        high = math.inf if config.clip_max is None else config.clip_max
        if space is None:
            return {_WHOLE: _Part(None, 1.0, low, high)}
        named = space.spaces if isinstance(space, spaces.Dict) else {_WHOLE: space}
        parts = {}
        for key, part in named.items():
            if isinstance(part, spaces.Box):
                if images_are_divided and is_image_space(part):
                    bounds = max(low, 0.0) * 255, min(high, 1.0) * 255
                    parts[key] = _Part(len(part.shape), 255.0, *bounds)
                else:
                    parts[key] = _Part(len(part.shape), 1.0, low, high)
        if not parts:
            raise ValueError(f"nothing in the observation space {space} can be perturbed: it has no Box")
        return parts

    def _radius(self, epsilon: Size | None) -> Size:
        if epsilon is None:
            return self.config.epsilon
        if not isinstance(epsilon, Tensor):
            check_number("epsilon", epsilon, at_least=0)
        return epsilon

    def _select(self, observation: Observation) -> dict[str, Tensor]:
        """The parts that are perturbed, as detached floats."""
        named = observation if isinstance(observation, dict) else {_WHOLE: observation}
        if missing := [key for key in self._parts if key not in named]:
            raise ValueError(f"the observation lacks {missing}: it has {sorted(named)}")
        parts = {key: named[key].detach() for key in self._parts}
        # At least 32 bits: fewer are too coarse for small balls.
        return {key: part.to(torch.promote_types(part.dtype, torch.float32)) for key, part in parts.items()}

    def _put(self, observation: Observation, parts: Mapping[str, Tensor]) -> Observation:
        return {**observation, **parts} if isinstance(observation, dict) else parts[_WHOLE]

    def _rank(self, key: str, part: Tensor) -> int:
        rank = self._parts[key].rank
        return part.dim() - 1 if rank is None else rank

    def _first(self, key: str, clean: Tensor, size: Size | None) -> Tensor:
        """Start of the search: a random point in the ball of that size, or its centre."""
        if size is None:
            return torch.zeros_like(clean)
        norm, rank = self.config.norm_type, self._rank(key, clean)
        offsets = random_offsets(clean, size, norm, rank, self._draws) * self._parts[key].scale
        return self._clip(key, clean, offsets)

    def _gradients(
        self, observation: Observation, clean: Mapping[str, Tensor], offsets: Mapping[str, Tensor], objective: Objective
    ) -> dict[str, Tensor]:
        with torch.enable_grad():
            points = {key: (part + offsets[key]).requires_grad_() for key, part in clean.items()}
            total = objective(self._put(observation, points)).sum()
            if not total.requires_grad:
                raise ValueError("the objective does not depend on the observation, or not differentiably")
            found = torch.autograd.grad(total, list(points.values()), allow_unused=True, materialize_grads=True)
        return {key: gradient.nan_to_num(0.0) for key, gradient in zip(points, found, strict=True)}

    def _step(
        self, key: str, clean: Tensor, offsets: Tensor, gradient: Tensor, size: Size, length: Size, step: int
    ) -> Tensor:
        norm, rank, scale = self.config.norm_type, self._rank(key, clean), self._parts[key].scale
        direction = steepest(self._method.direction(gradient, rank, step), norm, rank)
        ahead = offsets + direction * spread(length * scale, rank)
        return self._clip(key, clean, project(ahead, size * scale, norm, rank))

    def _clip(self, key: str, clean: Tensor, offsets: Tensor) -> Tensor:
        """Offsets clipped so that observations stay in their range, or no further outside than the clean ones."""
        part = self._parts[key]
        if part.low > -math.inf:
            offsets = torch.maximum(offsets, (part.low - clean).clamp_max(0))
        if part.high < math.inf:
            offsets = torch.minimum(offsets, (part.high - clean).clamp_min(0))
        return offsets

    def _moved(self, key: str, clean: Tensor, offsets: Tensor) -> Tensor:
        """The perturbed observations, in the ball and in their range despite rounding."""
        result, part = moved(clean, offsets), self._parts[key]
        if part.low > -math.inf:
            result = torch.maximum(result, clean.clamp_max(part.low))
        if part.high < math.inf:
            result = torch.minimum(result, clean.clamp_min(part.high))
        return result

    def _norms(self, offsets: Mapping[str, Tensor]) -> Tensor:
        kind = self.config.norm_type
        lengths = [norms(part, kind, self._rank(key, part)) / self._parts[key].scale for key, part in offsets.items()]
        return lengths[0] if len(lengths) == 1 else torch.stack(lengths).amax(0)

    def _count(self, offsets: Mapping[str, Tensor], gradients: int) -> None:
        lengths = self._norms(offsets)
        self.totals["attacks"].add_(1)
        self.totals["observations"].add_(lengths.numel())
        self.totals["gradients"].add_(gradients)
        self.totals["norm_sum"].add_(lengths.sum())
        self.totals["norm_max"].copy_(torch.maximum(self.totals["norm_max"], lengths.max()))


class MemberPerturbation(StatePerturbation):
    """Perturbs observations ``[M, ...]`` of a population's members, as each member's own perturbation would.

    Counters become tensors ``[M]``, and those of the members' perturbations views of them.

    Args:
        attacks: Perturbation of every member, with the same settings.

    Raises:
        ValueError: The attack method does not support several members.
    """

    def __init__(self, attacks: Sequence[StatePerturbation]) -> None:
        first, members = attacks[0], len(attacks)
        self.config, self._parts, self.device = first.config, first._parts, first.device
        method = type(first._method)
        if method not in (PGD, FGSM, SGLD):
            raise ValueError(
                f"the attack {method.__name__} does not support several members at once: use pgd, fgsm or sgld"
            )
        self._sources = [GeneratorDraws(attack.generator) for attack in attacks]
        is_cpu = self.device.type == "cpu"
        self._draws = MemberDraws(self._sources, lambda: self.mask.tolist()) if is_cpu else GeneratorDraws(None)
        self._method = method(self.config, None)
        self._method.draws = self._draws
        self.totals = {name: total.new_zeros(members) for name, total in first.totals.items()}
        self.mask = torch.ones(members, device=self.device)
        """1 for members that are attacked. The others are not counted and, on a CPU, draw no random numbers."""
        for member, attack in enumerate(attacks):
            self.adopt(member, attack)

    def adopt(self, member: int, attack: StatePerturbation) -> None:
        """Take the counters and the generator of a member's own perturbation."""
        self._sources[member].generator = attack.generator
        for name, totals in self.totals.items():
            totals[member].copy_(attack.totals[name])
            attack.totals[name] = totals[member]

    def _count(self, offsets: Mapping[str, Tensor], gradients: int) -> None:
        lengths = self._norms(offsets).flatten(1) * self.mask.unsqueeze(1)
        for name, number in (("attacks", 1), ("observations", lengths.shape[1]), ("gradients", gradients)):
            self.totals[name].add_(self.mask, alpha=number)
        self.totals["norm_sum"].add_(lengths.sum(1))
        self.totals["norm_max"].copy_(torch.maximum(self.totals["norm_max"], lengths.amax(1)))
