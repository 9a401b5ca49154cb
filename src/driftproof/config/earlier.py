"""Settings of the earlier system's configuration files: their names here, or why they have no equivalent."""

from __future__ import annotations

from typing import Any, NamedTuple

SECTIONS = ("model", "training")
"""Sections that only the earlier system has."""

RENAMED = {
    "ent_coef_initial": "ppo.ent_coef",
    "entropy_coef": "ppo.ent_coef",
    "use_twin_critics": "critic.twin_critics",
    "eval_episodes": "run.evaluation_episodes",
    "lr": "ppo.learning_rate",
}
"""Settings that mean the same under another name."""

SEARCHED = {
    "lr": "learning_rate",
    "entropy_coef": "ent_coef",
    "ent_coef_initial": "ent_coef",
    "adversarial_epsilon": "adversary.epsilon",
    "epsilon": "adversary.epsilon",
    "robust_kl_coef": "adversary.robust_kl_coef",
}
"""Earlier names in ``pbt.hyperparams``, and their names here."""

_NO_VALUE = object()


class Gone(NamedTuple):
    """A setting without an equivalent."""

    reason: str
    """Why there is none, and what to use instead."""
    harmless: Any = _NO_VALUE
    """Value that had no effect, or that is the behaviour here."""


_VALUE_CLIP = "the clip range of values is constant: ppo.clip_range_vf and critic.value_clip_mode"
_ENTROPY = "the entropy coefficient decays over the whole training: ppo.ent_coef_final, ppo.ent_coef_start, "
_CRITIC = "the weight of the critics' loss is constant: ppo.vf_coef"
_CVAR = "critic.cvar_alpha takes advantages from the worst returns, instead of adding a loss: set it by hand"
_MARKET = "belongs to the earlier trading environment; arguments of yours go into env.kwargs"
_SCHEDULE = "the least learning rate is the end of a schedule: ppo.learning_rate: {kind: linear, start: ..., end: ...}"

GONE = {
    "pbt.enabled": Gone("a population is trained by `driftproof tune`, a single agent by `driftproof train`", True),
    "adversarial.adaptive_epsilon": Gone("adversarial.epsilon_schedule says it: linear or cosine, else constant"),
    "model.algo": Gone("there is one algorithm", "ppo"),
    "model.optimizer_lr_min": Gone(_SCHEDULE),
    "model.scheduler_min_lr": Gone(_SCHEDULE),
    "vgs.accumulation_steps": Gone("statistics are running averages with the memory vgs.beta"),
    "vgs.clip_threshold": Gone("the factor is bounded by vgs.min_scaling_factor and vgs.variance_cap"),
    "vgs.eps": Gone("it is relative to the energy of the gradient here, not absolute", 1e-8),
    "vgs.track_per_param": Gone("statistics are always kept per tensor", True),
    "ppo.vf_clip_warmup_updates": Gone(_VALUE_CLIP, 0),
    "ppo.vf_clip_threshold_ev": Gone(_VALUE_CLIP, None),
    "ppo.value_clip_limit": Gone("targets are never clipped", None),
    "ppo.ent_coef_decay_steps": Gone(_ENTROPY + "ppo.ent_plateau_patience"),
    "ppo.ent_coef_plateau_window": Gone(_ENTROPY + "ppo.ent_plateau_patience"),
    "ppo.ent_coef_plateau_tolerance": Gone(_ENTROPY + "ppo.ent_plateau_patience"),
    "ppo.ent_coef_plateau_min_updates": Gone(_ENTROPY + "ppo.ent_plateau_patience"),
    "ppo.vf_coef_warmup": Gone(_CRITIC, 0),
    "ppo.vf_coef_warmup_updates": Gone(_CRITIC, 0),
    "ppo.vf_bad_explained_scale": Gone(_CRITIC, 1.0),
    "ppo.vf_bad_explained_floor": Gone(_CRITIC, 0.0),
    "ppo.bad_explained_patience": Gone("a bad explained variance raises the entropy at once: ppo.ent_boost_factor"),
    "ppo.microbatch_size": Gone("minibatches go through the networks whole: ppo.batch_size"),
    "ppo.kl_early_stop": Gone("ppo.kl_stop says it: absolute, consecutive, fraction, or null; it needs ppo.target_kl"),
    "ppo.kl_exceed_stop_fraction": Gone("it is ppo.kl_stop: fraction with ppo.kl_stop_fraction and ppo.target_kl"),
    "ppo.kl_epoch_decay": Gone("ppo.target_kl is the same in every epoch", 1.0),
    "ppo.cvar_alpha": Gone(_CVAR),
    "ppo.cvar_weight": Gone(_CVAR, 0),
    "ppo.cvar_activation_threshold": Gone(_CVAR),
    "ppo.cvar_activation_hysteresis": Gone(_CVAR),
    "ppo.cvar_ramp_updates": Gone(_CVAR),
    "ppo.cvar_cap": Gone(_CVAR),
    "ppo.v_range_ema_alpha": Gone("returns are normalised by a running scale instead: critic.return_scale_decay"),
    "ppo.use_torch_compile": Gone("on CUDA, ppo.cuda_graph makes optimizer steps faster", False),
    "run.eval_freq": Gone("agents are evaluated after training (run.evaluation_episodes), or by `driftproof evaluate`"),
    "run.save_freq": Gone("run.checkpoint_every says it, in updates"),
    "run.log_interval": Gone("every update is logged"),
    "run.tensorboard": Gone("it is always written", True),
    "run.wandb": Gone("TensorBoard files and metrics.jsonl are written; wandb can import the former", False),
    "env.decision_timing": Gone(_MARKET),
    "env.no_trade": Gone(_MARKET),
    "env.session": Gone(_MARKET),
    "env.liquidity": Gone(_MARKET),
    "env.spreads": Gone(_MARKET),
    "env.warmup": Gone(_MARKET),
    "base_config_path": Gone("a configuration cannot include another: copy the settings of that file into it"),
}
"""Settings without an equivalent, by the place that one of the same purpose would have."""


def gone(path: tuple[str | int, ...]) -> Gone | None:
    """The entry of a setting without an equivalent; the agent's settings may be given without their section."""
    place = ".".join(map(str, path))
    return GONE.get(place) or (GONE.get(f"ppo.{place}") if len(path) == 1 else None)


def was_harmless(gone: Gone, value: Any) -> bool:
    """Whether dropping the setting changes nothing."""
    return gone.harmless is not _NO_VALUE and value == gone.harmless and type(value) is type(gone.harmless)


def hint(path: tuple[str | int, ...]) -> str | None:
    """A hint for a key of the earlier system; ``None``: it had no such key."""
    name, place = str(path[-1]), ".".join(map(str, path))
    if len(path) == 1 and name in SECTIONS:
        return "a section of the earlier system's files: `driftproof config FILE --migrate` prints them in today's form"
    if name in RENAMED:
        return f"it is {RENAMED[name]}"
    if place in GONE:
        return GONE[place].reason
    named = [gone for key, gone in GONE.items() if key.rpartition(".")[2] == name and name not in ("enabled", "eps")]
    return named[0].reason if named else None
