"""Everything that members have learned, in tensors with a leading member axis.

The state tree of a member's learner is its slice ``[i]`` of these tensors, by the same names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from driftproof._arguments import ArgumentError
from driftproof.learner.adversary import MemberAdversaries
from driftproof.learner.kl import KLPenalty, KLStop
from driftproof.learner.learner import Learner
from driftproof.learner.return_scale import ReturnScale
from driftproof.nn.stacked import StackedPolicy
from driftproof.optim import UPGD, UPGDW, AdaptiveUPGD
from driftproof.optim.functional import GradientStatistics, Group, ScalingSettings, Settings

_STATISTICS = ("step_count", "factor", "weight", "energy", "mean", "signal", "norms", "largest")


class PopulationState:
    """Weights, optimizer state and controllers of all members.

    Hyper-parameters stay with the members' own learners, and are read at the beginning of every update.

    Args:
        learners: Learners of one architecture; their present states are copied.

    Raises:
        ArgumentError: They have parts without a form for several members, or differ in more than numbers.
    """

    def __init__(self, learners: Sequence[Learner]) -> None:
        for learner in learners:
            _check(learner)
        self.learners = list(learners)
        self.members = len(learners)
        first = learners[0]
        policy: Any = first.policy
        self.device: torch.device = policy.device
        names = {id(parameter): name for name, parameter in policy.named_parameters()}
        (options,) = first.optimizer.param_groups
        self.trained = [names[id(parameter)] for parameter in options["params"]]
        """Names of the trained weights, in the optimizer's order."""
        settings = self.optimizer_settings()
        # Side by side, so that one operation covers all weights; adaptive noise is by tensor.
        self.blocks = [[name] for name in self.trained] if settings.adaptive_noise else [self.trained]
        """Names of trained weights that lie side by side in a parameter of :attr:`group`."""
        self._shapes = {name: parameter.shape for name, parameter in policy.named_parameters()}
        self.group = self._make_group(settings)
        self.weights = {name: self._empty(tensor) for name, tensor in policy.state_dict().items()}
        self.weights |= self.by_name([param.detach() for param in self.group.params])
        """All weights by name ``[M, ...]``; the trained ones are views of the group's parameters."""
        self.policy = StackedPolicy(policy, self.weights)
        self.statistics = None
        if first.vgs is not None:
            followed = [name for name, _ in policy.named_parameters()]
            values = [self.weights[name] for name in followed]
            self.statistics = GradientStatistics(followed, values, first.vgs.statistic, self.members)
        self.return_scale = ReturnScale(
            self.numbers([learner.return_scale.decay for learner in learners]), self.device, self.members
        )
        self.kl_stop = KLStop(
            None,
            first.kl_stop.mode,
            self.numbers([learner.kl_stop.tolerance for learner in learners]),
            first.kl_stop.patience,
            self.numbers([learner.kl_stop.fraction for learner in learners]),
            self.device,
            self.members,
        )
        self.kl_penalty = self._make_penalty()
        self.adversary: MemberAdversaries | None = None
        """Adversaries of the members, as one."""
        if first.adversary is not None:
            self.adversary = first.adversary.of_members([learner.adversary for learner in learners])
        self.initial_weights: dict[str, Tensor] | None = None
        if first.initial_weights is not None:
            self.initial_weights = {n: self._empty(t) for n, t in first.initial_weights.state_dict().items()}
        self.knows_returns = [False] * self.members
        """Whether a member's value heads predict in its scale of returns."""
        self.has_statistics = [False] * self.members
        """Whether a member has observed returns."""
        self.skipped_in_a_row = [0] * self.members
        """Each member's consecutive minibatches, up to now, whose loss or gradient was not finite."""
        for member in range(self.members):
            self.read(member)

    def numbers(self, values: Sequence[Any]) -> Tensor:
        """Numbers of the members as a tensor ``[M]``, without waiting for the device."""
        if any(isinstance(value, Tensor) for value in values):
            return torch.stack([torch.as_tensor(v, dtype=torch.float32, device=self.device) for v in values])
        return torch.tensor(values, dtype=torch.float32).to(self.device, non_blocking=True)

    def by_name(self, blocks: Sequence[Tensor]) -> dict[str, Tensor]:
        """Views ``[M, ...]`` of each trained weight's part of blocks ``[M, elements]``."""
        views: dict[str, Tensor] = {}
        for names, block in zip(self.blocks, blocks, strict=True):
            sizes = [self._shapes[name].numel() for name in names]
            for name, part in zip(names, torch.split(block, sizes, 1), strict=True):
                views[name] = part.view(self.members, *self._shapes[name])
        return views

    @property
    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """All tensors by component and name, as in a single learner's states; some are views, or appear twice."""
        tensors = {"policy": self.weights, "optimizer": self._optimizer_tensors(), **self._small_tensors()}
        if self.statistics is not None:
            tensors["vgs"] = self.statistics.tensors()
        return tensors

    @property
    def components(self) -> set[str]:
        """Names of the components that are here."""
        return {*self._storages}

    def _small_tensors(self) -> dict[str, dict[str, Tensor]]:
        """Those of components whose memory has one part for each name."""
        tensors = {"return_scale": self.return_scale.tensors()}
        if self.kl_penalty is not None:
            tensors["kl_penalty"] = self.kl_penalty.tensors()
        if self.initial_weights is not None:
            tensors["initial_weights"] = self.initial_weights
        return tensors

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        """State of the optimizer by the index of a weight and its name in a single optimizer's state."""
        group, keys = self.group, self._optimizer_keys()
        lists = {"avg_utility": group.utilities}
        if len(keys) > 2:
            lists |= {keys[2]: group.first_moments, keys[3]: group.second_moments}
        places = {name: i for i, name in enumerate(self.trained)}
        tensors = {f"{places[n]}.{key}": view for key, each in lists.items() for n, view in self.by_name(each).items()}
        for key, counts in (("step", group.steps), ("grad_norm_ema", group.norm_emas)):
            pairs = zip(self.blocks, counts, strict=False)
            tensors |= {f"{places[name]}.{key}": count for names, count in pairs for name in names}
        return tensors

    @property
    def _storages(self) -> dict[str, list[Tensor]]:
        """All memory by component, each part once."""
        group = self.group
        lists = (group.utilities, group.steps, group.first_moments, group.second_moments, group.norm_emas)
        trained = set(self.trained)
        others = [weight for name, weight in self.weights.items() if name not in trained]
        result = {name: list(stacks.values()) for name, stacks in self._small_tensors().items()}
        result["policy"] = [*group.params, *others]
        result["optimizer"] = [tensor for each in lists for tensor in each]
        if self.statistics is not None:
            result["vgs"] = self.statistics.storages()
        return result

    @torch.no_grad()
    def read(self, member: int) -> None:
        """Copy the state of a member's learner into its place; an optimizer that has not stepped yet has zeros."""
        learner = self.learners[member]
        parts = learner.components()
        for component, stacks in self.tensors.items():
            given = _leaves(component, parts[component].state_dict())
            for name, stack in stacks.items():
                if name in given:
                    stack[member].copy_(torch.as_tensor(given[name]).reshape(stack.shape[1:]))
                else:
                    stack[member].zero_()
        if self.adversary is not None:
            self.adversary.adopt(member, learner.adversary)
        self.knows_returns[member] = learner.return_scale.initialised
        self.has_statistics[member] = learner.return_scale.has_statistics
        self.skipped_in_a_row[member] = learner.skipped_in_a_row

    @torch.no_grad()
    def write(self, member: int) -> None:
        """Copy a member's state into its own learner."""
        learner = self.learners[member]
        parts, tensors = learner.components(), self.tensors
        for component, stacks in tensors.items():
            part = parts[component]
            slices = {name: stack[member].clone() for name, stack in stacks.items()}
            part.load_state_dict(_with_leaves(component, dict(part.state_dict()), slices))
        scale = learner.return_scale
        scale.initialised, scale.has_statistics = self.knows_returns[member], self.has_statistics[member]
        learner.skipped_in_a_row = self.skipped_in_a_row[member]
        learner.tensors_were_replaced()

    @torch.no_grad()
    def copy(self, targets: Sequence[int], sources: Sequence[int], reset_optimizer: bool = False) -> None:
        """Exploit: ``targets[k]`` gets all that ``sources[k]`` had before the call, without waiting for the device.

        Args:
            targets: Members to overwrite, all different.
            sources: Their donors.
            reset_optimizer: Reset the optimizer's state instead of copying it.
        """
        into, out_of = (torch.tensor(each).to(self.device, non_blocking=True) for each in (targets, sources))
        for component, storages in self._storages.items():
            for stack in storages:
                if component == "optimizer" and reset_optimizer:
                    stack.index_fill_(0, into, 0)
                else:
                    stack.index_copy_(0, into, stack.index_select(0, out_of))
        for each in (self.knows_returns, self.has_statistics, self.skipped_in_a_row):
            before: list[Any] = list(each)
            for target, source in zip(targets, sources, strict=True):
                each[target] = before[source]

    def optimizer_settings(self) -> Settings:
        """The members' present settings of the optimizer, numbers as tensors ``[M]``."""
        singles = []
        for learner in self.learners:
            assert isinstance(learner.optimizer, UPGD | AdaptiveUPGD | UPGDW)
            singles.append(learner.optimizer.settings_of(learner.optimizer.param_groups[0]))
        values: dict[str, Any] = {}
        for each in fields(Settings):
            column = [getattr(single, each.name) for single in singles]
            if each.name == "betas" and column[0] is not None:
                values["betas"] = tuple(self.numbers(betas) for betas in zip(*column, strict=True))
            elif isinstance(column[0], bool | str) or column[0] is None:
                if len(set(column)) > 1:
                    raise ArgumentError(f"members of one population need the same {each.name}, not {set(column)}")
                values[each.name] = column[0]
            else:
                values[each.name] = self.numbers(column)
        # Counts are beside the parameters anyway.
        return replace(Settings(**values), capturable=True)

    def scaling_settings(self) -> ScalingSettings:
        """The members' present settings of variance gradient scaling, as tensors ``[M]``."""
        singles = [learner.vgs.settings() for learner in self.learners if learner.vgs is not None]
        names = [each.name for each in fields(ScalingSettings)]
        return ScalingSettings(**{name: self.numbers([getattr(s, name) for s in singles]) for name in names})

    def _empty(self, like: Tensor) -> Tensor:
        return torch.zeros(self.members, *like.shape, dtype=like.dtype, device=self.device)

    def _optimizer_keys(self) -> tuple[str, ...]:
        optimizer = self.learners[0].optimizer
        assert isinstance(optimizer, UPGD | AdaptiveUPGD | UPGDW)
        return ("step", "avg_utility", *(optimizer.moment_keys or ()))

    def _make_group(self, settings: Settings) -> Group:
        keys = self._optimizer_keys()
        sizes = [sum(self._shapes[name].numel() for name in names) for names in self.blocks]

        def zeros() -> list[Tensor]:
            return [torch.zeros(self.members, size, device=self.device) for size in sizes]

        def counts() -> list[Tensor]:
            return [torch.zeros(self.members, device=self.device) for _ in sizes]

        return Group(
            settings,
            [block.requires_grad_() for block in zeros()],
            utilities=zeros(),
            steps=counts(),
            first_moments=zeros() if len(keys) > 2 else [],
            second_moments=zeros() if len(keys) > 2 else [],
            norm_emas=counts() if settings.averages_norms else [],
        )

    def _make_penalty(self) -> KLPenalty | None:
        singles = [learner.kl_penalty for learner in self.learners]
        given = [single for single in singles if single is not None]
        if not given:
            return None
        names = ("target", "kp", "ki", "kd", "max_coef", "init_coef")
        numbers: dict[str, Any] = {name: self.numbers([getattr(single, name) for single in given]) for name in names}
        return KLPenalty(**numbers, device=self.device, members=self.members)


def _leaves(component: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors of a single learner's component, by the names in :attr:`PopulationState.tensors`."""
    if component == "optimizer":
        return {f"{i}.{key}": value for i, entry in state["state"].items() for key, value in entry.items()}
    if component == "vgs":
        moments = {f"moments.{key}": moment for key, moment in state["moments"].items()}
        return {name: state[name] for name in _STATISTICS} | moments
    return dict(state)


def _with_leaves(component: str, state: dict[str, Any], leaves: Mapping[str, Tensor]) -> dict[str, Any]:
    """The state of a single learner's component with these tensors; the inverse of :func:`_leaves`."""
    if component == "optimizer":
        entries: dict[int, dict[str, Tensor]] = {}
        for name, tensor in leaves.items():
            index, key = name.split(".")
            entries.setdefault(int(index), {})[key] = tensor
        return {**state, "state": entries}
    if component == "vgs":
        start = "moments."
        moments = {name.removeprefix(start): leaf for name, leaf in leaves.items() if name.startswith(start)}
        return {**state, **{name: leaves[name] for name in _STATISTICS}, "moments": moments}
    return {**state, **leaves}


def _check(learner: Learner) -> None:
    """Refuse optimizers that do not support several members."""
    if not isinstance(learner.optimizer, UPGD | AdaptiveUPGD | UPGDW):
        raise ArgumentError(
            f"the optimizer {type(learner.optimizer).__name__} does not support several members at once: use "
            "adaptive_upgd, upgd or upgdw (sigma: 0 is without noise)"
        )
    if learner.optimizer.param_groups[0]["maximize"]:
        raise ArgumentError("maximize=True is not supported for several members at once")
