"""Findings: what looks wrong in a run, with evidence, threshold and remedy. Each check is a function of its metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

from driftproof.report.charts import number
from driftproof.report.results import Label, Score
from driftproof.report.series import Array
from driftproof.runs import ALARMS, LENGTH, RETURN

Severity: TypeAlias = Literal["alarm", "warning", "note"]
GUIDE = "docs/watching_a_run.md"

_FEWEST = 8
"""Updates that a run needs before its course is judged."""
AT_CAP = 0.2
EXPLAINED = 0.05
GATE_SPREAD = 0.005
ENTROPY_LEFT = 0.05
SMALLEST_STD = 0.05
KL_OVER_TARGET = 3.0
KL_WITHOUT_TARGET = 0.1
WARNED = 0.2
GAP = 0.5
_LOSSES = ("train/loss", "train/value_loss", "train/policy_gradient_loss", "train/grad_norm", "train/approx_kl")


@dataclass(frozen=True)
class Evidence:
    """What checks look at: the logged metrics of one agent, and its evaluation.

    Attributes:
        metrics: Values of each metric, one for each update; not finite where they were not logged.
        config: Configuration of the run, as far as it is known.
        evaluation: Results of the agent, then of baselines.
        label: What they were obtained on.
    """

    metrics: Mapping[str, Array]
    config: Mapping[str, Any] = field(default_factory=dict)
    evaluation: Sequence[Score] = ()
    label: Label | None = None

    def finite(self, name: str) -> Array:
        """The finite values of a metric."""
        values = np.asarray(self.metrics.get(name, ()), dtype=np.float64)
        return values[np.isfinite(values)]

    def late(self, name: str) -> Array:
        """Finite values in the last quarter of training; none before there are enough updates."""
        values = self.finite(name)
        return values[-max(len(values) // 4, 1) :] if len(values) >= _FEWEST else np.empty(0)

    def setting(self, section: str, name: str, default: float | None) -> float | None:
        """A number of the configuration."""
        values = self.config.get(section)
        value = values.get(name, default) if isinstance(values, Mapping) else default
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else default


@dataclass(frozen=True)
class Finding:
    """Something that looks wrong, or that one should know.

    Attributes:
        severity: ``alarm``: results or training cannot be trusted; ``warning``: look at it; ``note``: know it.
        title: What it is.
        evidence: The numbers.
        threshold: What they are compared with.
        remedy: What to do.
        anchor: Heading about it in the guide.
        section: Section of the page that shows it.
    """

    severity: Severity
    title: str
    evidence: str
    threshold: str
    remedy: str
    anchor: str
    section: str


class NotChecked:
    """Result of a check for which too little was logged."""


NOT_CHECKED = NotChecked()


@dataclass(frozen=True)
class Verdict:
    """What checks found in a run.

    Attributes:
        name: Name of the run.
        findings: The most severe first.
        passed: Names of the checks that found nothing.
        unchecked: Names of the checks for which too little was logged.
    """

    name: str
    findings: Sequence[Finding]
    passed: Sequence[str]
    unchecked: Sequence[str]


def in_sample(run: Evidence) -> Finding | NotChecked | None:
    """Whether the evaluation used what training saw."""
    if run.label is None or run.label.in_sample is None:
        return NOT_CHECKED
    if not run.label.in_sample:
        return None
    return Finding(
        "alarm",
        "The evaluation is in sample",
        run.label.text,
        "no overlap with what training saw",
        "Leave out env.kwargs.split, so that the last 30% of the bars are held out, or set "
        "env.evaluation_kwargs; leave out --seed elsewhere.",
        "evaluation",
        "Evaluation",
    )


def _baseline(run: Evidence, *names: str) -> Score | None:
    """The first evaluated baseline of these names, if there is one and the agent's return is finite."""
    found = next((score for score in run.evaluation[1:] if score.name in names), None)
    return found if found is not None and math.isfinite(run.evaluation[0].mean) else None


def _is_clear(agent: Score, baseline: Score) -> bool:
    """Whether the agent's interval is below the baseline's; neither is a single number."""
    return agent.high < baseline.low and all(score.low < score.high for score in (agent, baseline))


def worse_than_baseline(run: Evidence) -> Finding | NotChecked | None:
    """Whether the agent does no better than random play, or in a market than staying flat."""
    if (found := _baseline(run, "random", "flat")) is None:
        return NOT_CHECKED
    agent = run.evaluation[0]
    if agent.mean > found.mean:
        return None
    is_clear = _is_clear(agent, found)
    return Finding(
        "alarm" if is_clear else "warning",
        f"Worse than {'random play' if found.name == 'random' else 'staying flat'}",
        f"agent {number(agent.mean)}, {found.name} {number(found.mean)}"
        + ("; their intervals do not overlap" if is_clear else ""),
        f"return above that of {found.name}",
        "Train longer, check the scale of observations (env.normalize_observations) and the reward; in a "
        "market, check costs and whether the training return rose at all.",
        "evaluation",
        "Evaluation",
    )


def worse_than_holding(run: Evidence) -> Finding | NotChecked | None:
    """Whether an agent in a market earns no more than buying and holding."""
    if (found := _baseline(run, "buy and hold")) is None:
        return NOT_CHECKED
    agent = run.evaluation[0]
    if agent.mean > found.mean:
        return None
    is_clear = _is_clear(agent, found)
    return Finding(
        "warning",
        "No better than buying and holding",
        f"agent {number(agent.mean)}, buy and hold {number(found.mean)} per episode, after costs"
        + ("; their intervals do not overlap" if is_clear else ""),
        "return above that of buy and hold",
        "Holding costs nothing and needs no agent. A lower return can be worth it for less risk: compare Sharpe ratios "
        "and drawdowns, out of sample (driftproof backtest).",
        "evaluation",
        "Evaluation",
    )


def training_gap(run: Evidence) -> Finding | NotChecked | None:
    """Whether the agent does much worse on what training has not seen."""
    if run.label is None or run.label.in_sample is not False or not run.evaluation:
        return NOT_CHECKED
    agent, trained = run.evaluation[0], run.late(RETURN)
    if not len(trained) or not math.isfinite(agent.mean):
        return NOT_CHECKED
    before, high = float(trained.mean()), agent.high
    what, scale = "return", 1.0
    lengths = run.late(LENGTH)
    if agent.length and len(lengths) and agent.length > 0 and float(lengths.mean()) > 0 and run.label.is_history:
        # Episodes in a market's history have other lengths in evaluation.
        what, scale = "return per step", 1 / agent.length
        before /= float(lengths.mean())
    now, high = agent.mean * scale, high * scale
    if before <= 0:
        return NOT_CHECKED  # There is no share of a loss.
    if now > (1 - GAP) * before or high >= before:
        return None
    return Finding(
        "warning",
        "Far below the training return",
        f"{what} {number(now)} in evaluation, {number(before)} at the end of training",
        f"at least {1 - GAP:.0%} of the training return",
        "The agent has learned what does not generalise: more data or environments, fewer epochs "
        "(ppo.n_epochs), a smaller network, or training stopped earlier (--best).",
        "evaluation",
        "Evaluation",
    )


def vgs_at_cap(run: Evidence) -> Finding | NotChecked | None:
    """Whether gradient scaling is stuck at its limit."""
    noise = run.finite("vgs/normalized_variance")
    cap = run.setting("vgs", "variance_cap", 50.0)
    if len(noise) < _FEWEST or cap is None:
        return NOT_CHECKED
    share = float((noise >= cap).mean())
    if share < AT_CAP:
        return None
    return Finding(
        "warning",
        "VGS is at its cap",
        f"normalised variance at or above {number(cap)} in {share:.0%} of the updates",
        f"less than {AT_CAP:.0%} of the updates",
        "Gradients are mostly noise: larger batches (ppo.batch_size, env.n_envs), or a higher "
        "vgs.variance_cap so that the factor can still tell noise from more noise.",
        "variance-gradient-scaling",
        "Optimizer",
    )


def explained_variance(run: Evidence) -> Finding | NotChecked | None:
    """Whether the critics predict anything."""
    values = run.late("train/explained_variance")
    if not len(values):
        return NOT_CHECKED
    if (mean := float(values.mean())) >= EXPLAINED:
        return None
    is_market = run.label is not None and run.label.is_history
    return Finding(
        "note" if is_market else "warning",
        "The critics explain next to nothing",
        f"explained variance {number(mean, 2)}, mean over the last quarter of training",
        f"at least {EXPLAINED:g}",
        "Advantages are then little more than returns: check that observations hold what returns depend on, raise "
        "ppo.vf_coef or the learning rate. An agent that has solved its task gets returns that hardly vary, so that "
        "there is nothing to explain; in markets returns are hardly predictable, and values near 0 are usual.",
        "critics",
        "Critics",
    )


def gate_spread(run: Evidence) -> Finding | NotChecked | None:
    """Whether UPGD's gate distinguishes weights."""
    values = run.late("upgd/gate_std")
    if not len(values):
        return NOT_CHECKED
    if (mean := float(values.mean())) >= GATE_SPREAD:
        return None
    return Finding(
        "note",
        "The UPGD gate is nearly off",
        f"standard deviation of the gate {number(mean, 2)} over the last quarter of training",
        f"at least {GATE_SPREAD:g}",
        "It protects no weight more than others, so that UPGD acts like Adam with noise: raise "
        "optimizer.kwargs.temperature if protection is wanted.",
        "upgd",
        "Optimizer",
    )


def entropy_collapse(run: Evidence) -> Finding | NotChecked | None:
    """Whether a policy over discrete actions has stopped exploring."""
    if len(run.finite("train/std")):
        return NOT_CHECKED  # The entropy of continuous actions is relative to their scale, and may be negative.
    entropy = -run.finite("train/entropy_loss")
    late = -run.late("train/entropy_loss")
    if not len(late) or entropy[0] <= 0:
        return NOT_CHECKED
    if (left := float(late.mean()) / float(entropy[0])) >= ENTROPY_LEFT:
        return None
    return Finding(
        "warning",
        "The policy has stopped exploring",
        f"entropy {number(float(late.mean()), 2)} in the last quarter of training, {left:.1%} of that at the beginning",
        f"at least {ENTROPY_LEFT:.0%} of it",
        "Fine if the task is solved; otherwise raise ppo.ent_coef or drift.exploration_floor, or lower the "
        "learning rate.",
        "policy",
        "Policy",
    )


def std_collapse(run: Evidence) -> Finding | NotChecked | None:
    """Whether a policy over continuous actions has stopped exploring."""
    values = run.late("train/std")
    if not len(values) or (std := float(values.mean())) <= 0:
        return NOT_CHECKED
    if std >= SMALLEST_STD:
        return None
    return Finding(
        "warning",
        "The policy has stopped exploring",
        f"standard deviation of actions {number(std, 2)} (log {math.log(std):.1f}) in the last quarter of training",
        f"at least {SMALLEST_STD:g}",
        "Fine if the task is solved; otherwise raise ppo.ent_coef, or lower the learning rate.",
        "policy",
        "Policy",
    )


def kl_above_target(run: Evidence) -> Finding | NotChecked | None:
    """Whether updates change the policy far more than intended."""
    values = run.late("train/approx_kl")
    if not len(values):
        return NOT_CHECKED
    target = run.setting("ppo", "target_kl", None)
    limit = KL_WITHOUT_TARGET if target is None else KL_OVER_TARGET * target
    middle = float(np.median(values))
    if middle <= limit:
        return None
    meant = "no target_kl is set" if target is None else f"{KL_OVER_TARGET:g} times ppo.target_kl"
    return Finding(
        "warning",
        "Updates change the policy too much",
        f"KL divergence {number(middle, 2)}, median over the last quarter of training",
        f"at most {number(limit)} ({meant})",
        "Lower the learning rate or ppo.n_epochs, or set ppo.target_kl (0.02) or ppo.kl_penalty.",
        "policy",
        "Policy",
    )


def skipped(run: Evidence) -> Finding | NotChecked | None:
    """Whether minibatches were skipped because of numbers that are not finite."""
    values = run.finite("train/skipped_minibatches")
    if not len(values):
        return NOT_CHECKED
    total = float(values.sum())
    if total <= 0:
        return None
    steps = float(run.finite("train/optimizer_steps").sum())
    share = total / (total + steps) if steps > 0 else math.nan
    return Finding(
        "alarm" if share > 0.01 else "warning",
        "Minibatches were skipped",
        f"{number(total)} of them" + (f", {share:.2%}" if math.isfinite(share) else ""),
        "none",
        "Losses or gradients were not finite: normalise observations, bound rewards, lower the learning rate, or use "
        "float32 instead of mixed precision.",
        "optimizer-steps",
        "Optimizer",
    )


def not_finite(run: Evidence) -> Finding | NotChecked | None:
    """Whether losses were logged that are not numbers."""
    counts = {name: int((~np.isfinite(np.asarray(run.metrics[name]))).sum()) for name in _LOSSES if name in run.metrics}
    if not counts:
        return NOT_CHECKED
    bad = {name: count for name, count in counts.items() if count}
    if not bad:
        return None
    return Finding(
        "alarm",
        "Losses are not finite",
        ", ".join(f"{name} in {count} updates" for name, count in bad.items()),
        "none",
        "Training has diverged: go back to an earlier checkpoint (--best), lower the learning rate, check the "
        "environment's observations and rewards for NaN.",
        "optimizer-steps",
        "Optimizer",
    )


def critic_warnings(run: Evidence) -> Finding | NotChecked | None:
    """Whether one critic's gradient vanished or dwarfed the other's."""
    values = run.finite("critic/warning")
    if len(values) < _FEWEST:
        return NOT_CHECKED
    if (share := float((values > 0).mean())) < WARNED:
        return None
    return Finding(
        "warning",
        "One critic dominates the other",
        f"a critic's gradient vanished or dwarfed the other's in {share:.0%} of the updates",
        f"less than {WARNED:.0%}",
        "The smaller of two values is then that of one critic: check critic/grad_ratio, lower the learning rate.",
        "critics",
        "Critics",
    )


def drift_alarms(run: Evidence) -> Finding | NotChecked | None:
    """What the agent noticed of drift."""
    alarms = run.finite(ALARMS)
    if not len(alarms):
        return NOT_CHECKED
    if alarms[-1] <= 0:
        return None
    level = run.finite("drift/level")
    how = f"; its response is at level {number(float(level[-1]))}" if len(level) and level[-1] > 0 else ""
    return Finding(
        "note",
        "The agent believes that the world has changed",
        f"{number(float(alarms[-1]))} alarms{how}",
        "none where nothing drifts",
        "Compare with the phases in the section Drift. Alarms in a world that does not drift are false: raise "
        "drift.threshold.",
        "drift",
        "Drift",
    )


CHECKS: dict[str, Callable[[Evidence], Finding | NotChecked | None]] = {
    "evaluation not in sample": in_sample,
    "better than random play or staying flat": worse_than_baseline,
    "better than buying and holding": worse_than_holding,
    "evaluation near the training return": training_gap,
    "losses finite": not_finite,
    "no skipped minibatches": skipped,
    "KL divergence near its target": kl_above_target,
    "entropy": entropy_collapse,
    "standard deviation of actions": std_collapse,
    "explained variance": explained_variance,
    "balance of the critics": critic_warnings,
    "VGS below its cap": vgs_at_cap,
    "UPGD gate": gate_spread,
    "drift alarms": drift_alarms,
}
"""All checks, by what is in order if they find nothing."""
_ORDER = ("alarm", "warning", "note")


def judged(name: str, run: Evidence) -> Verdict:
    """What all checks find in a run."""
    found = {what: check(run) for what, check in CHECKS.items()}
    wrong = [each for each in found.values() if isinstance(each, Finding)]
    wrong.sort(key=lambda each: _ORDER.index(each.severity))
    passed = [what for what, each in found.items() if each is None]
    return Verdict(name, wrong, passed, [what for what, each in found.items() if isinstance(each, NotChecked)])
