"""One update of all members from their rollouts, with the functions of a single agent's update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from driftproof._arguments import ArgumentError
from driftproof._members import Number, assign
from driftproof.learner.advantages import explained_variance, normalize_advantages
from driftproof.learner.alarm import calibration
from driftproof.learner.estimates import Estimates, estimate
from driftproof.learner.learner import Metrics, UpdateSettings
from driftproof.learner.losses import Coefficients
from driftproof.learner.metrics import (
    StepMetrics,
    critic_metrics,
    mean_quantiles,
    memory_metrics,
    quantile_metrics,
    step_metrics,
    to_host,
)
from driftproof.learner.population.graph import GraphedPopulationStep
from driftproof.learner.population.random import MemberGenerators
from driftproof.learner.population.rollout import PopulationRollout
from driftproof.learner.population.state import PopulationState
from driftproof.learner.population.step import PopulationStep
from driftproof.nn.heads import Scale
from driftproof.optim.functional import upgd_metrics
from driftproof.settings.batches import Batches, cut

_SHARED = ("batch_size", "normalize_advantage", "skip_limit")
"""Settings of an update that all members have in common."""
_PERCENTS = (10, 50, 90)
"""Percentiles of the gradients' scaling that metrics show."""


class PopulationLearner:
    """Trains all members at once: an update equals that of each learner alone, up to rounding.

    Args:
        state: State of the members.
        generators: Random generators of the members.
    """

    def __init__(self, state: PopulationState, generators: MemberGenerators) -> None:
        self.state, self.generators = state, generators
        self.step = PopulationStep(state, generators, state.learners[0].step.autocast)
        self.take_step = GraphedPopulationStep(self.step) if state.device.type == "cuda" else self.step
        self._levels = torch.tensor(_PERCENTS).to(state.device) / 100
        self.diverged = [False] * state.members
        """Members whose last update ended with weights that are not finite, or was skipped for too long."""

    def update(
        self,
        rollout: PopulationRollout,
        settings: Sequence[UpdateSettings],
        active: Sequence[bool] | None = None,
        orders: Tensor | None = None,
    ) -> list[Metrics]:
        """Train on the members' rollouts. Waits for the device once, at the end.

        Args:
            rollout: The rollouts.
            settings: Settings and current hyper-parameters of every member.
            active: Which members train; the others do not change. ``None``: all.
            orders: Permutations of each member's chunks ``[epochs, M, chunks]``; ``None``: drawn.

        Returns:
            Metrics of each member, by the names that a single agent logs.
        """
        state, policy, scale = self.state, self.state.policy, self.state.return_scale
        policy.like.train(True)
        active = [True] * state.members if active is None else list(active)
        settings = [
            each if learner.drift_response is None else learner.drift_response.adjusted(each)
            for each, learner in zip(settings, state.learners, strict=True)
        ]
        trains = self._flags(active)
        numbers = self._stacked(settings)
        heads, valid = policy.like.heads, rollout.valid
        estimates = self._estimate(rollout, numbers)
        metrics = self._quantiles(rollout)
        is_new = [train and not seen for train, seen in zip(active, state.has_statistics, strict=True)]
        self._initialise_scales(rollout, estimates.returns, is_new)
        std, targets = scale.snapshot.std, scale.normalize(estimates.returns)
        epochs = [int(each.n_epochs) for each in settings]
        if orders is None:
            # Members that do not train draw nothing.
            drawn = [count if train else 0 for count, train in zip(epochs, active, strict=True)]
            orders = self.generators.orders(drawn, self._batches(rollout, settings[0]).sequences)
        steps = self._optimize(rollout, estimates.advantages, targets, settings, numbers, active, orders)
        counts = [self._batches(rollout, settings[0]).per_epoch * count for count in epochs]
        means = self._step_means(steps, counts)
        if state.learners[0].drift_alarm is not None:
            metrics["drift/calibration"] = torch.vmap(lambda *given: calibration(heads, *given))(
                rollout.predictions, targets, valid
            )
        if state.initial_weights is not None:
            metrics |= self._decay(means["train/optimizer_steps"])
        if state.learners[0].recycle_dormant:
            metrics["train/dormant_units"] = self._recycle(rollout, active)
        self._follow_returns(estimates.returns, valid, trains & ~self._flags(is_new))
        if state.kl_penalty is not None:
            state.kl_penalty.update(torch.where(trains, means["kl/exact"], torch.nan))
            means["kl/penalty_coef"] = state.kl_penalty.coefficient.clone()
        else:
            del means["kl/exact"]  # Computed only for the penalty.
        means["train/explained_variance"] = explained_variance(estimates.values, estimates.returns, valid)
        means |= torch.vmap(lambda *given: critic_metrics(heads, *given))(
            estimates.by_critic, targets, valid, means, std
        )
        metrics = means | metrics | scale.metrics()
        if policy.like.is_recurrent:
            metrics |= torch.vmap(memory_metrics)(rollout.last_state)
        metrics |= self._optimizer_metrics(steps, counts)
        finite = torch.stack([torch.isfinite(param).flatten(1).all(1) for param in state.group.params]).all(0)
        floors = [float(each.exploration_floor) for each in settings]
        results = self._fetch(metrics, steps, finite, counts, active, settings[0].skip_limit, floors)
        for member, own in enumerate(results):
            if active[member] and not self.diverged[member]:
                own |= self._watch(member, own, rollout)
        return results

    def _estimate(self, rollout: PopulationRollout, numbers: Mapping[str, Number | None]) -> Estimates:
        names = ("gamma", "gae_lambda", "optimism", "cvar_alpha")
        chosen: dict[str, Any] = {name: numbers[name] for name in names}
        return estimate(self.state.policy.like.heads, self.state.return_scale, rollout.experience, **chosen)

    @torch.no_grad()
    def _quantiles(self, rollout: PopulationRollout) -> dict[str, Tensor]:
        mean, std = (torch.as_tensor(each) for each in self.state.return_scale.snapshot)

        def single(quantiles: Tensor, valid: Tensor, mean: Tensor, std: Tensor) -> dict[str, Tensor]:
            return quantile_metrics(quantiles, valid, lambda value: mean + std * value)

        quantiles = mean_quantiles(self.state.policy.like.heads, rollout.predictions)
        return torch.vmap(single)(quantiles, rollout.valid, mean, std)

    @torch.no_grad()
    def _initialise_scales(self, rollout: PopulationRollout, returns: Tensor, is_new: list[bool]) -> None:
        """Take the scale of returns of members that had none from their first rollouts."""
        if not any(is_new):
            return
        state, scale = self.state, self.state.return_scale
        scale.observe(returns, rollout.valid & self._flags(is_new).view(-1, 1, 1))
        old, new = scale.refresh()
        knew = [first and known for first, known in zip(is_new, state.knows_returns, strict=True)]
        if any(knew):
            # The others' heads have not learned yet: they predict in the new scale from the start.
            old = Scale(*(torch.where(self._flags(knew), a, b) for a, b in zip(old, new, strict=True)))
            state.policy.rescale(old, new)
            for head, predictions in zip(state.policy.like.heads, rollout.predictions, strict=True):
                predictions.copy_(head.rescaled(predictions, old, new))
        for member, first in enumerate(is_new):
            state.knows_returns[member] |= first
            state.has_statistics[member] |= first

    @torch.no_grad()
    def _follow_returns(self, returns: Tensor, valid: Tensor, members: Tensor) -> None:
        """Update the scales of returns of some members, and their value heads with them."""
        self.state.return_scale.observe(returns, valid & members.view(-1, 1, 1))
        self.state.policy.rescale(*self.state.return_scale.refresh())

    def _optimize(
        self,
        rollout: PopulationRollout,
        advantages: Tensor,
        targets: Tensor,
        settings: Sequence[UpdateSettings],
        numbers: Mapping[str, Any],
        active: Sequence[bool],
        orders: Tensor,
    ) -> StepMetrics:
        """Run all epochs of minibatches; metrics of every step ``[M, steps, names]``."""
        state, step, trains = self.state, self.step, self._flags(active)
        if settings[0].normalize_advantage:
            advantages = normalize_advantages(advantages, rollout.valid)
        batches = self._batches(rollout, settings[0])
        limits = self._flags([int(each.n_epochs) for each in settings])
        for singles, own in ((state.kl_stop, "kl_stop"), (state.kl_penalty, "kl_penalty")):
            if singles is not None:
                assign(singles.target, self.state.numbers([getattr(each, own).target for each in state.learners]))
        state.kl_stop.reset(limits * batches.per_epoch)
        step.clip_mode = None if numbers["clip_range_vf"] is None else state.learners[0].value_clip_mode
        step.exploration_floor = any(each.exploration_floor > 0 for each in settings)
        step.begin_update()
        if state.adversary is not None:
            state.adversary.begin_update(active)
        minibatches = rollout.minibatches(
            state.policy.like.distribution.log_prob(rollout.parameters, rollout.actions),
            advantages,
            targets,
            batches.per_batch,
            orders,
            with_predictions=step.clip_mode is not None,
        )
        coefficients = Coefficients(
            clip_range=numbers["clip_range"],
            clip_range_vf=0.0 if step.clip_mode is None else numbers["clip_range_vf"],
            ent_coef=numbers["ent_coef"],
            vf_coef=numbers["vf_coef"],
            kl_coef=0.0 if state.kl_penalty is None else state.kl_penalty.coefficient,
            max_grad_norm=numbers["max_grad_norm"],
            exploration_floor=numbers["exploration_floor"],
        )
        steps: list[StepMetrics] = []
        for i, minibatch in enumerate(minibatches):
            steps.append(self.take_step(minibatch, coefficients, trains & (i // batches.per_epoch < limits)))
            if self.generators.is_single and not steps[-1]["go_on"].any():
                break  # Stopped early: further steps would do nothing.
        together = StepMetrics.stack(steps)
        return StepMetrics(together.names, together.values.transpose(0, 1))

    def _step_means(self, steps: StepMetrics, counts: list[int]) -> dict[str, Tensor]:
        """Means over the optimizer steps that each member has taken."""

        def single(values: Tensor) -> dict[str, Tensor]:
            return step_metrics(StepMetrics(steps.names, values))

        if min(counts) == max(counts):
            return torch.vmap(single)(steps.values)
        every = [single(values[:count]) for values, count in zip(steps.values, counts, strict=True)]
        return {name: torch.stack([each[name] for each in every]) for name in every[0]}

    @torch.no_grad()
    def _decay(self, taken: Tensor) -> dict[str, Tensor]:
        """Decay towards the initial weights; see :class:`driftproof.learner.initial_weights.InitialWeights`."""
        state, lr = self.state, self.state.group.settings.lr
        assert state.initial_weights is not None
        strengths = [0.0 if x.initial_weights is None else x.initial_weights.strength for x in state.learners]
        share = 1 - (1 - lr * state.numbers(strengths)).clamp_min(0) ** taken
        squares, count = torch.zeros_like(taken), 0
        for name in state.trained:
            distance = state.initial_weights[name] - state.weights[name]
            squares += distance.flatten(1).square().sum(1)
            count += distance[0].numel()
            state.weights[name].add_(distance * share.view(-1, *(1,) * (distance.dim() - 1)))
        return {"train/distance_from_initial": (squares / count).sqrt() * (1 - share)}

    def _recycle(self, rollout: PopulationRollout, active: Sequence[bool]) -> Tensor:
        """Recycle dormant units of members that train, one after the other; returns each member's share of them."""
        shares = torch.zeros(self.state.members, device=self.state.device)
        for member, learner in enumerate(self.state.learners):
            if active[member]:
                self.state.write(member)
                with self.generators.of(member):
                    shares[member] = learner.recycle(rollout.single(member))
                self.state.read(member)
        return shares

    def _watch(self, member: int, numbers: Metrics, rollout: PopulationRollout) -> Metrics:
        """Look for drift of a member's environment, and respond to it; returns metrics of it."""
        learner = self.state.learners[member]
        if learner.drift_alarm is None:
            return {}
        if learner.drift_response is None:
            return learner.watch(numbers, rollout.single(member))
        self.state.write(member)  # The response archives and replaces weights.
        with self.generators.of(member):
            metrics = learner.watch(numbers, rollout.single(member))
        self.state.read(member)
        return metrics

    @torch.no_grad()
    def _optimizer_metrics(self, steps: StepMetrics, counts: list[int]) -> dict[str, Tensor]:
        state = self.state
        metrics = upgd_metrics([state.group], members=True)
        length = steps.values.shape[1]
        # Compares noise with the gradient; if the last step was skipped, its gradient was not applied.
        ends = [length if state.group.settings.betas is None else min(count, length) for count in counts]
        taken = torch.stack([steps["taken"][member, end - 1] for member, end in enumerate(ends)])
        metrics["upgd/noise_to_direction"] = torch.where(taken > 0, metrics["upgd/noise_to_direction"], torch.nan)
        if (statistics := state.statistics) is not None:
            settings = self.step.state.scaling_settings()
            metrics |= {f"vgs/{n}_ema": value.nan_to_num(0) for n, value in statistics.total_averages().items()}
            metrics["vgs/normalized_variance"] = statistics.normalized_variance(settings.eps)
            metrics["vgs/scaling_factor"] = statistics.factor.clone()
            metrics["vgs/step_count"] = statistics.step_count.clone()
            metrics["vgs/warmup_active"] = (statistics.step_count < settings.warmup_steps).float()
            factors = torch.where(steps["taken"] > 0, steps["scaling_factor"], torch.nan)
            variances = statistics.variances(settings.eps)
            # Together: every call sorts.
            factor_quantiles = factors.nanquantile(self._levels, 1).nan_to_num(1)
            variance_quantiles = variances.nanquantile(self._levels, 1).nan_to_num(0)
            for i, percent in enumerate(_PERCENTS):
                metrics[f"vgs/scaling_factor_p{percent}"] = factor_quantiles[i]
                metrics[f"vgs/tensor_variance_p{percent}"] = variance_quantiles[i]
        if "log_std" in state.weights:
            metrics["train/std"] = state.weights["log_std"].detach().exp().flatten(1).mean(1)
        return metrics

    def _fetch(
        self,
        metrics: Mapping[str, Tensor],
        steps: StepMetrics,
        finite: Tensor,
        counts: list[int],
        active: list[bool],
        limit: int,
        floors: list[float],
    ) -> list[Metrics]:
        """All numbers from the device, at once; notes members that have diverged."""
        columns = torch.stack([number.float() for number in metrics.values()], 1)
        flags = torch.cat((steps["finite"], steps["go_on"]), 1).float()
        rows = to_host(torch.cat((columns, flags, finite.float().unsqueeze(1)), 1)).tolist()
        length = steps.values.shape[1]
        results = []
        for member, row in enumerate(rows):
            flat = row[len(metrics) :]
            pairs = list(zip(flat[:length], flat[length : 2 * length], strict=True))[: counts[member]]
            numbers: Metrics = dict(zip(metrics, row[: len(metrics)], strict=True))
            if self.step.exploration_floor:
                numbers["train/exploration_floor"] = floors[member]
            learner = self.state.learners[member]
            if active[member]:
                self.diverged[member] = self._has_skipped(member, pairs, limit) or not flat[-1]
                learner.entropy.explained_variance = numbers["train/explained_variance"]
            if learner.normalizer is not None:
                numbers |= learner.normalizer.metrics()
            results.append(numbers)
        return results

    def _has_skipped(self, member: int, flags: list[tuple[float, float]], limit: int) -> bool:
        """Count a member's consecutive skipped minibatches, across updates; whether they have reached the limit."""
        skipped, longest = self.state.skipped_in_a_row, 0
        for finite, go_on in flags:
            skipped[member] = 0 if finite else skipped[member] + 1
            longest = max(longest, skipped[member])
            if not go_on:
                break
        return longest >= limit

    def _stacked(self, settings: Sequence[UpdateSettings]) -> dict[str, Any]:
        """Settings of an update: numbers as tensors ``[M]``, ``None`` where no member has one."""
        result: dict[str, Any] = {}
        for name in UpdateSettings._fields:
            column = [getattr(each, name) for each in settings]
            if any(value is None for value in column) or name in _SHARED:
                if len(set(column)) > 1:
                    raise ArgumentError(f"members of one population need the same {name}, not {set(column)}", name)
                result[name] = column[0]
            else:
                result[name] = self.state.numbers(column)
        return result

    def _batches(self, rollout: PopulationRollout, settings: UpdateSettings) -> Batches:
        is_recurrent = self.state.policy.like.is_recurrent
        return cut(rollout.steps, rollout.envs, settings.batch_size, rollout.chunk, is_recurrent)

    def _flags(self, values: Sequence[int]) -> Tensor:
        """Host flags or counts of the members on the device ``[M]``."""
        return torch.tensor(values).to(self.state.device, non_blocking=True)
