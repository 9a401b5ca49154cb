"""The learner: networks, their optimizer and controllers, and one update of them from a rollout.

It knows no environment, logger or Stable-Baselines3; ``examples/own_loop.py`` trains with it alone.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple, TypeAlias

import numpy.typing as npt
import torch
from torch import Tensor
from torch.optim import Optimizer

from driftproof._members import Number
from driftproof.learner.advantages import explained_variance, normalize_advantages
from driftproof.learner.adversary import Adversary
from driftproof.learner.alarm import CalibrationAlarm, calibration
from driftproof.learner.entropy import EntropySchedule
from driftproof.learner.estimates import Estimates, Experience, estimate, joined, values_by_critic
from driftproof.learner.graph import GraphedStep
from driftproof.learner.initial_weights import InitialWeights
from driftproof.learner.kl import KLPenalty, KLStop
from driftproof.learner.losses import Coefficients
from driftproof.learner.metrics import (
    StepMetrics,
    critic_metrics,
    fetch,
    mean_quantiles,
    memory_metrics,
    quantile_metrics,
    step_metrics,
)
from driftproof.learner.networks import Policy
from driftproof.learner.observation_normalizer import ObservationNormalizer
from driftproof.learner.response import DriftResponse
from driftproof.learner.return_scale import ReturnScale
from driftproof.learner.rollout import Rollout
from driftproof.learner.step import OptimizerStep
from driftproof.nn.heads import ClipMode
from driftproof.nn.segments import Segments
from driftproof.nn.types import PolicyState, map_observation
from driftproof.optim import UPGD, UPGDW, AdaptiveUPGD, VarianceGradientScaler
from driftproof.settings.agent import AgentSettings
from driftproof.settings.batches import Batches, cut
from driftproof.settings.definition import defaults_of
from driftproof.state import Stateful

Metrics: TypeAlias = dict[str, float]
"""Metrics of an update, by the names that are logged: ``train/loss``, ``critic/grad_norm_1``, ..."""


class TrainingError(RuntimeError):
    """Training cannot continue."""


_DEFAULTS: dict[str, Any] = defaults_of(AgentSettings)


class UpdateSettings(NamedTuple):
    """Settings and current hyper-parameters of one update, named as in :class:`driftproof.ppo.DistributionalPPO`."""

    batch_size: int
    n_epochs: int = _DEFAULTS["n_epochs"]
    gamma: Number = _DEFAULTS["gamma"]
    gae_lambda: Number = _DEFAULTS["gae_lambda"]
    clip_range: Number = _DEFAULTS["clip_range"]
    clip_range_vf: Number | None = _DEFAULTS["clip_range_vf"]
    ent_coef: Number = _DEFAULTS["ent_coef"]
    vf_coef: Number = _DEFAULTS["vf_coef"]
    max_grad_norm: Number = _DEFAULTS["max_grad_norm"]
    exploration_floor: Number = 0.0
    optimism: Number | None = None
    cvar_alpha: Number | None = _DEFAULTS["cvar_alpha"]
    normalize_advantage: bool = _DEFAULTS["normalize_advantage"]
    skip_limit: int = _DEFAULTS["skip_limit"]


class Learner:
    """Everything that learns: :meth:`update` turns a rollout into new parameters.

    Args:
        policy: Networks of actor and critics.
        optimizer: Optimizer of the policy's parameters.
        vgs: Variance gradient scaler: scales gradients, or steps, down when gradients are noisy.
        return_scale: Running scale of returns, in units of which the critics predict.
        entropy: Schedule of the entropy coefficient; gets the explained variance after every update.
        kl_stop: Ends an update early once the policy has moved too far.
        kl_penalty: Controller of the KL penalty's coefficient; ``None``: no penalty.
        adversary: Attacks observations and adds a term to the loss.
        initial_weights: Decays parameters towards their initial values.
        drift_alarm: Detects that returns have fallen below what the critics predict.
        normalizer: Normaliser of observations, for the collector of rollouts.
        recycle_dormant: Score up to which units are dormant and are recycled after every update; 0: none are.
        drift_response: Responds to the alarm, up to a restart from fresh weights.
        value_clip_mode: Which part of a predicted distribution ``clip_range_vf`` bounds.
        cuda_graph: Capture the optimizer step in a CUDA graph.
        mixed_precision: Run the networks in bfloat16.
    """

    def __init__(
        self,
        policy: Policy,
        optimizer: Optimizer,
        *,
        vgs: VarianceGradientScaler | None = None,
        return_scale: ReturnScale | None = None,
        entropy: EntropySchedule | None = None,
        kl_stop: KLStop | None = None,
        kl_penalty: KLPenalty | None = None,
        adversary: Adversary | None = None,
        initial_weights: InitialWeights | None = None,
        drift_alarm: CalibrationAlarm | None = None,
        normalizer: ObservationNormalizer | None = None,
        recycle_dormant: float = 0.0,
        drift_response: DriftResponse | None = None,
        value_clip_mode: ClipMode = "mean_only",
        cuda_graph: bool = False,
        mixed_precision: bool = False,
    ) -> None:
        device = policy.device
        self.policy, self.optimizer, self.vgs = policy, optimizer, vgs
        if vgs is not None and vgs.apply_to == "update":
            vgs.attach(optimizer)
        if isinstance(optimizer, UPGD):
            optimizer.check_noise()
        self.return_scale = ReturnScale(device=device) if return_scale is None else return_scale
        self.entropy = EntropySchedule() if entropy is None else entropy
        self.kl_stop = KLStop(None, device=device) if kl_stop is None else kl_stop
        self.kl_penalty, self.adversary = kl_penalty, adversary
        self.normalizer, self.initial_weights = normalizer, initial_weights
        self.drift_alarm, self.drift_response = drift_alarm, drift_response
        self.weights_were_replaced = False
        """Whether the last update ended with other weights, for which recurrent states have no meaning."""
        self.value_clip_mode: ClipMode = value_clip_mode
        self.recycle_dormant = recycle_dormant
        self.skipped_in_a_row = 0
        """Consecutive minibatches, up to now, whose loss or gradient was not finite."""

        def autocast() -> contextlib.AbstractContextManager[object]:
            return torch.autocast(device.type, torch.bfloat16) if mixed_precision else contextlib.nullcontext()

        self.step = OptimizerStep(
            policy, optimizer, vgs, self.kl_stop, None, kl_penalty is not None, autocast, adversary
        )
        self.take_step: OptimizerStep | GraphedStep = self.step
        if drift_response is not None:
            if drift_alarm is None:
                raise ValueError("drift_response needs a drift_alarm")
            drift_response.attach(self)
        if cuda_graph:
            self.take_step = GraphedStep(self.step, self._captured_settings)

    def components(self) -> dict[str, Stateful]:
        """Components that have a state, by their names in an agent's state tree."""
        possible: dict[str, Stateful | None] = {
            "policy": self.policy,
            "optimizer": self.optimizer,
            "vgs": self.vgs,
            "kl_penalty": self.kl_penalty,
            "return_scale": self.return_scale,
            "entropy": self.entropy,
            "adversary": self.adversary,
            "initial_weights": self.initial_weights,
            "drift_alarm": self.drift_alarm,
            "observations": self.normalizer,
            "drift_response": self.drift_response,
        }
        return {name: component for name, component in possible.items() if component is not None}

    def tensors_were_replaced(self) -> None:
        """Capture the optimizer step again, after states were loaded."""
        if isinstance(self.take_step, GraphedStep):
            self.take_step.forget()

    def update(self, rollout: Rollout, settings: UpdateSettings) -> Metrics:
        """Train on a rollout, then update the scale of returns. Waits for the device once, at the end.

        Raises:
            TrainingError: Too many minibatches in a row were skipped.
        """
        policy, scale = self.policy, self.return_scale
        policy.train(True)
        if self.drift_response is not None:
            settings = self.drift_response.adjusted(settings)
        valid = self._on_device(rollout.valid)
        estimates = self.estimate(rollout, settings)
        quantiles = quantile_metrics(mean_quantiles(policy.heads, rollout.predictions), valid, scale.decode)
        is_first = not scale.has_statistics
        if is_first:
            self._initialise_scale(rollout, estimates.returns, valid)
        std, targets = scale.snapshot.std, scale.normalize(estimates.returns)
        drift = {}
        if self.drift_alarm is not None:
            drift["drift/calibration"] = calibration(policy.heads, rollout.predictions, targets, valid)
        steps = self._optimize(rollout, estimates.advantages, targets, valid, settings)
        if self.initial_weights is not None:
            taken = (steps["finite"] * steps["go_on"]).sum()
            drift |= self.initial_weights.decay(self.optimizer.param_groups[0]["lr"], taken)
        if self.recycle_dormant:
            drift["train/dormant_units"] = self.recycle(rollout)
        if not is_first:
            scale.observe(estimates.returns, valid)
            old, new = scale.refresh()
            for head in policy.heads:
                head.rescale(old, new)

        metrics = step_metrics(steps)
        if self.kl_penalty is not None:
            self.kl_penalty.update(metrics["kl/exact"])
            metrics["kl/penalty_coef"] = self.kl_penalty.coefficient
        else:
            del metrics["kl/exact"]  # Computed only for the penalty.
        metrics["train/explained_variance"] = explained_variance(estimates.values, estimates.returns, valid)
        metrics |= critic_metrics(policy.heads, estimates.by_critic, targets, valid, metrics, std)
        metrics |= quantiles | scale.metrics() | memory_metrics(rollout.last_state) | self._optimizer_metrics(steps)
        metrics |= drift
        numbers, flags = fetch(metrics, steps)
        if self.step.exploration_floor:
            numbers["train/exploration_floor"] = float(settings.exploration_floor)
        if self.normalizer is not None:
            numbers |= self.normalizer.metrics()
        self.entropy.explained_variance = numbers["train/explained_variance"]
        self._check_skipped(flags, settings.skip_limit)
        return numbers | self.watch(numbers, rollout)

    def watch(self, numbers: Metrics, rollout: Rollout) -> Metrics:
        """Look for drift, and respond to it; returns metrics of it."""
        if self.drift_alarm is None:
            return {}
        alarm, response = self.drift_alarm, self.drift_response
        is_raised = alarm.update(numbers["drift/calibration"], rollout)
        metrics = alarm.metrics()
        if response is not None:
            is_raised, self.weights_were_replaced = response.update(self, alarm, is_raised, rollout)
            metrics |= response.metrics()
        elif is_raised:
            alarm.restart()
        alarm.alarms += is_raised
        return metrics | {"drift/alarm": float(is_raised), "drift/alarms": float(alarm.alarms)}

    def estimate(self, rollout: Rollout, settings: UpdateSettings) -> Estimates:
        """Values, advantages and returns from the critics' predictions during the rollout."""
        return estimate(
            self.policy.heads,
            self.return_scale,
            Experience(
                *(self._on_device(rollout.rewards), self._on_device(rollout.dones)),
                *(self._on_device(rollout.truncated), self._on_device(rollout.valid)),
                *(rollout.predictions, rollout.bootstraps, rollout.last_predictions),
            ),
            gamma=settings.gamma,
            gae_lambda=settings.gae_lambda,
            optimism=settings.optimism,
            cvar_alpha=settings.cvar_alpha,
        )

    def values(self, predictions: tuple[Tensor, ...]) -> Tensor:
        """Values in units of rewards: the minimum over the critics' means."""
        return joined(values_by_critic(self.policy.heads, self.return_scale, predictions))

    def _initialise_scale(self, rollout: Rollout, returns: Tensor, valid: Tensor) -> None:
        """Take the scale of returns from the first rollout.

        New value heads then predict in it from the start. Heads that were trained before, as those of a converted
        agent, are rescaled to predict the same returns, and so are their predictions in the rollout.
        """
        scale = self.return_scale
        knew_returns = scale.initialised
        scale.observe(returns, valid)
        old, new = scale.refresh()
        if knew_returns:
            for head, predictions in zip(self.policy.heads, rollout.predictions, strict=True):
                head.rescale(old, new)
                predictions.copy_(head.rescaled(predictions, old, new))

    def _optimize(
        self, rollout: Rollout, advantages: Tensor, targets: Tensor, valid: Tensor, settings: UpdateSettings
    ) -> StepMetrics:
        """Run all epochs of minibatches; returns the metrics of every optimizer step."""
        if settings.normalize_advantage:
            advantages = normalize_advantages(advantages, valid)
        batches = self._batches(rollout, settings)
        orders = [torch.randperm(batches.sequences) for _ in range(settings.n_epochs)]
        self.kl_stop.reset(len(orders) * batches.per_epoch)
        if self.vgs is not None:
            self.vgs.reset_history()
        if self.adversary is not None:
            self.adversary.begin_update()
        self.step.begin_update()
        self.step.clip_mode = None if settings.clip_range_vf is None else self.value_clip_mode
        floor = settings.exploration_floor
        self.step.exploration_floor = isinstance(floor, Tensor) or floor > 0
        minibatches = rollout.minibatches(
            self.policy.distribution.log_prob(rollout.parameters, rollout.actions),
            advantages,
            targets,
            batches.per_batch,
            orders,
            with_predictions=self.step.clip_mode is not None,
            static_shapes=isinstance(self.take_step, GraphedStep),
            masks=self.step.takes_masks(),
            attacked=None if self.adversary is None else self.adversary.share,
        )
        coefficients = Coefficients(
            clip_range=settings.clip_range,
            clip_range_vf=0.0 if settings.clip_range_vf is None else settings.clip_range_vf,
            ent_coef=settings.ent_coef,
            vf_coef=settings.vf_coef,
            kl_coef=0.0 if self.kl_penalty is None else self.kl_penalty.coefficient,
            max_grad_norm=settings.max_grad_norm,
            exploration_floor=floor,
        )
        steps = []
        for minibatch in minibatches:
            steps.append(self.take_step(minibatch, coefficients))
            if not self.step.masked and steps[-1]["go_on"] == 0:
                break  # Stopped early: further steps would do nothing.
        return StepMetrics.stack(steps)

    @torch.no_grad()
    def recycle(self, rollout: Rollout) -> Tensor:
        """Recycle dormant units, judged by the rollout, or by its first chunk; returns their share."""
        policy, steps = self.policy, rollout.chunk if self.policy.is_recurrent else rollout.steps
        state = PolicyState(*(tuple(part[0] for part in parts) for parts in rollout.states))
        segments = Segments.cut(rollout.resets[:steps], policy.device) if policy.is_recurrent else None
        observations = map_observation(rollout.observations, lambda part: part[:steps])
        policy.train(False)
        share, replaced = policy.recycle(observations, state, segments, self.recycle_dormant)
        policy.train(True)
        for parameter, mask in replaced.items():
            for value in self.optimizer.state.get(parameter, {}).values():
                if isinstance(value, Tensor) and value.shape == mask.shape:
                    value.masked_fill_(mask, 0)
        return share

    def _batches(self, rollout: Rollout, settings: UpdateSettings) -> Batches:
        return cut(rollout.steps, rollout.envs, settings.batch_size, rollout.chunk, self.policy.is_recurrent)

    def _optimizer_metrics(self, steps: StepMetrics) -> dict[str, Tensor]:
        metrics = {} if self.vgs is None else self.vgs.metrics()
        if isinstance(self.optimizer, UPGD | AdaptiveUPGD | UPGDW) and self.optimizer.state:
            metrics |= self.optimizer.metrics()
            # Compares noise with the gradient; if the last step was skipped, its gradient was not applied.
            taken = (steps["finite"][-1] > 0) & (steps["go_on"][-1] > 0)
            metrics["upgd/noise_to_direction"] = torch.where(taken, metrics["upgd/noise_to_direction"], torch.nan)
        if isinstance(log_std := getattr(self.policy, "log_std", None), Tensor):
            metrics["train/std"] = log_std.detach().exp().mean()
        return metrics

    def _check_skipped(self, flags: list[tuple[bool, bool]], limit: int) -> None:
        """Count consecutive skipped minibatches, across updates; raise at the limit."""
        longest = 0
        for finite, go_on in flags:
            self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1
            longest = max(longest, self.skipped_in_a_row)
            if not go_on:
                break
        if longest >= limit:
            self.skipped_in_a_row = 0
            raise TrainingError(
                f"{longest} minibatches in a row had a loss or gradient that is not finite; they were skipped, so the "
                "weights are still those of the last good step. Lower learning_rate, or look for extreme rewards"
            )

    def _captured_settings(self) -> list[Any]:
        """What a captured step does not read from tensors."""
        groups = [
            {key: value for key, value in group.items() if key != "params" and not isinstance(value, Tensor)}
            for group in self.optimizer.param_groups
        ]
        scaling = {} if self.vgs is None else {k: v for k, v in vars(self.vgs).items() if isinstance(v, int | float)}
        terms = self.step.clip_mode, self.step.exploration_floor
        return [terms, groups, {key: v for key, v in scaling.items() if not key.startswith("_")}]

    def _on_device(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self.policy.device, non_blocking=True)
