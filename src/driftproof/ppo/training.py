"""One update of an agent: what a rollout says, the optimizer's steps, and what is logged of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy.typing as npt
import torch
from stable_baselines3.common.utils import safe_mean
from torch import Tensor

from driftproof.learner.advantages import explained_variance, gae, normalize_advantages
from driftproof.learner.metrics import StepMetrics, critic_metrics, memory_metrics, quantile_metrics, step_metrics
from driftproof.learner.rollout import Rollout
from driftproof.learner.step import Coefficients
from driftproof.optim import UPGD, UPGDW, AdaptiveUPGD

if TYPE_CHECKING:
    from driftproof.ppo.algorithm import DistributionalPPO


class TrainingError(RuntimeError):
    """Training cannot go on."""


class Estimates(NamedTuple):
    """What the critics make of a rollout, in units of rewards ``[T, N]``.

    Attributes:
        by_critic: What each of them expects.
        values: The smallest of these.
        advantages: Of the actions taken, seen with caution where ``cvar_alpha`` asks for it.
        returns: λ-returns, which the critics learn.
    """

    by_critic: list[Tensor]
    values: Tensor
    advantages: Tensor
    returns: Tensor


def update(agent: DistributionalPPO, rollout: Rollout) -> None:
    """Learn from the rollout, then move the scale of returns, and log."""
    agent.hyperparams.advance(agent._current_progress_remaining)
    advance_entropy(agent)
    agent.policy.set_training_mode(True)

    valid = _on_device(agent, rollout.valid)
    estimates = estimate(agent, rollout, valid)
    scale = agent.return_scale
    quantiles = quantile_metrics(agent.policy.heads, rollout.predictions, valid, scale)
    is_first = not scale.has_statistics
    if is_first:
        _initialise_scale(agent, rollout, estimates.returns, valid)
    std, targets = scale.snapshot.std, scale.normalize(estimates.returns)
    steps = optimize(agent, rollout, estimates.advantages, targets, valid)
    if not is_first:
        scale.observe(estimates.returns, valid)
        old, new = scale.refresh()
        for head in agent.policy.heads:
            head.rescale(old, new)

    metrics = step_metrics(steps)
    if agent.kl_penalty is not None:
        agent.kl_penalty.update(metrics["kl/exact"])
        metrics["kl/penalty_coef"] = agent.kl_penalty.coefficient
    else:
        del metrics["kl/exact"]  # Nobody computed it.
    metrics["train/explained_variance"] = explained_variance(estimates.values, estimates.returns, valid)
    metrics |= critic_metrics(agent.policy.heads, estimates.by_critic, targets, valid, metrics, std)
    metrics |= quantiles | scale.metrics() | memory_metrics(agent.state)
    if agent.vgs is not None:
        metrics |= agent.vgs.metrics()
    if isinstance(agent.policy.optimizer, UPGD | AdaptiveUPGD | UPGDW) and agent.policy.optimizer.state:
        metrics |= agent.policy.optimizer.metrics()
        # Compares with the gradient, which is that of a step that was not taken if the last one was not.
        taken = (steps["finite"][-1] > 0) & (steps["go_on"][-1] > 0)
        metrics["upgd/noise_to_direction"] = torch.where(taken, metrics["upgd/noise_to_direction"], torch.nan)
    if hasattr(agent.policy, "log_std"):
        metrics["train/std"] = agent.policy.log_std.detach().exp().mean()
    agent._n_updates += int(agent.hyperparams.current("n_epochs"))
    log(agent, metrics, steps)


def _initialise_scale(agent: DistributionalPPO, rollout: Rollout, returns: Tensor, valid: Tensor) -> None:
    """Take the scale of returns from the first rollout.

    New value heads then predict in it from the start. Heads that knew returns before, as those of a converted agent,
    are rescaled, so that they still say the same, and so is what they said during the rollout.
    """
    scale, heads = agent.return_scale, agent.policy.heads
    knew_returns = scale.initialised
    scale.observe(returns, valid)
    old, new = scale.refresh()
    if knew_returns:
        for head, predictions in zip(heads, rollout.predictions, strict=True):
            head.rescale(old, new)
            predictions.copy_(head.rescaled(predictions, old, new))


def advance_entropy(agent: DistributionalPPO) -> None:
    """Put this update's entropy coefficient in force."""
    episodes = agent.ep_info_buffer
    mean_return = safe_mean([episode["r"] for episode in episodes]) if episodes else None
    base, progress = agent.hyperparams["ent_coef"], agent._current_progress_remaining
    value = agent.entropy.update(base, progress, mean_return)
    agent.hyperparams.override("ent_coef", float(value))


@torch.no_grad()
def estimate(agent: DistributionalPPO, rollout: Rollout, valid: Tensor) -> Estimates:
    """Values, advantages and returns from what the critics predicted during the rollout."""
    rewards, dones, truncated = (
        _on_device(agent, array) for array in (rollout.rewards, rollout.dones, rollout.truncated)
    )

    def estimates(alpha: float | None) -> Estimates:
        by_critic = _values(agent, rollout.predictions, alpha)
        values = _smallest(by_critic)
        ends = _smallest(_values(agent, rollout.bootstraps, alpha))
        advantages, returns = gae(
            rewards,
            values,
            _smallest(_values(agent, rollout.last_predictions, alpha)),
            dones,
            torch.where(truncated, ends, 0),
            gamma=agent.hyperparams.current("gamma"),
            gae_lambda=agent.hyperparams.current("gae_lambda"),
            valid=valid,
        )
        return Estimates(by_critic, values, advantages, returns)

    expected = estimates(None)
    if "cvar_alpha" not in agent.hyperparams:
        return expected
    # Caution is for acting. Critics that learned cautious returns would be more cautious with every step back.
    cautious = estimates(agent.hyperparams.current("cvar_alpha"))
    return expected._replace(advantages=cautious.advantages)


def optimize(
    agent: DistributionalPPO, rollout: Rollout, advantages: Tensor, targets: Tensor, valid: Tensor
) -> StepMetrics:
    """All epochs; what :class:`OptimizerStep` measured in every minibatch."""
    if agent.normalize_advantage:
        advantages = normalize_advantages(advantages, valid)
    cut = agent.batches
    orders = [torch.randperm(cut.sequences) for _ in range(int(agent.hyperparams.current("n_epochs")))]
    agent.kl_stop.reset(len(orders) * cut.per_epoch)
    if agent.vgs is not None:
        agent.vgs.reset_history()
    if agent.adversary is not None:
        agent.adversary.begin_update()
    batches = rollout.minibatches(
        agent.policy.distribution.log_prob(rollout.parameters, rollout.actions),
        advantages,
        targets,
        cut.per_batch,
        orders,
        with_predictions=agent._step.clip_mode is not None,
        static_shapes=agent.cuda_graph,
        attacked=None if agent.adversary is None else agent.adversary.share,
    )
    coefficients = _coefficients(agent)
    steps = []
    for batch in batches:
        steps.append(agent._take_step(batch, coefficients))
        if not agent._step.undo and steps[-1]["go_on"] == 0:
            break  # The host knows already that nothing more will be done.
    return StepMetrics.stack(steps)


def log(agent: DistributionalPPO, metrics: dict[str, Tensor], steps: StepMetrics) -> None:
    """Fetch all numbers from the device, at once, and log them.

    Raises:
        TrainingError: Too many minibatches in a row were skipped.
    """
    flags = torch.cat((steps["finite"], steps["go_on"])).float()
    flat = torch.cat([torch.stack([m.float() for m in metrics.values()]), flags]).tolist()
    numbers, flags_of_steps = dict(zip(metrics, flat, strict=False)), flat[len(metrics) :]
    finite, go_on = flags_of_steps[: len(flags) // 2], flags_of_steps[len(flags) // 2 :]
    agent.entropy.explained_variance = numbers["train/explained_variance"]
    for name, value in numbers.items():
        agent.logger.record(name, value)
    for name in ("learning_rate", "clip_range", "clip_range_vf", "ent_coef"):
        if name in agent.hyperparams:
            agent.logger.record(f"train/{name}", agent.hyperparams.current(name))
    agent.logger.record("train/n_updates", agent._n_updates, exclude="tensorboard")
    _check_skipped(agent, finite, go_on)


def _check_skipped(agent: DistributionalPPO, finite: list[float], go_on: list[float]) -> None:
    """Count minibatches that were skipped in a row, over updates, up to a stop."""
    longest = 0
    for flag, goes_on in zip(finite, go_on, strict=True):
        agent.counters.skipped_in_a_row = 0 if flag else agent.counters.skipped_in_a_row + 1
        longest = max(longest, agent.counters.skipped_in_a_row)
        if not goes_on:
            break
    if longest >= agent.skip_limit:
        agent.counters.skipped_in_a_row = 0
        raise TrainingError(
            f"{longest} minibatches in a row had a loss or gradient that is not finite; none was applied. The "
            "weights are still those of the last good step: lower learning_rate, or look for extreme rewards"
        )


def _values(agent: DistributionalPPO, predictions: tuple[Tensor, ...], alpha: float | None) -> list[Tensor]:
    """What each critic expects: the mean, or the mean of the worst share ``alpha``."""
    pairs = zip(agent.policy.heads, predictions, strict=True)
    means = [head.mean(p) if alpha is None else head.cvar(p, alpha) for head, p in pairs]
    return [agent.return_scale.decode(value) for value in means]


def values_of(agent: DistributionalPPO, predictions: tuple[Tensor, ...]) -> Tensor:
    """What the critics expect in units of rewards: the smallest of their means."""
    return _smallest(_values(agent, predictions, None))


def _smallest(values: list[Tensor]) -> Tensor:
    return values[0] if len(values) == 1 else torch.minimum(*values)


def _coefficients(agent: DistributionalPPO) -> Coefficients:
    current = agent.hyperparams.current
    return Coefficients(
        clip_range=current("clip_range"),
        clip_range_vf=current("clip_range_vf") if "clip_range_vf" in agent.hyperparams else 0.0,
        ent_coef=current("ent_coef"),
        vf_coef=current("vf_coef"),
        kl_coef=0.0 if agent.kl_penalty is None else agent.kl_penalty.coefficient,
        max_grad_norm=current("max_grad_norm"),
    )


def _on_device(agent: DistributionalPPO, array: npt.NDArray[Any]) -> Tensor:
    return torch.from_numpy(array).to(agent.device, non_blocking=True)
