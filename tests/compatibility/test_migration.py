"""Configurations of the earlier system: hints for every key, and their conversion."""

from __future__ import annotations

from pathlib import Path

import pytest

from driftproof.config import Config, ConfigError, check, loads, migrate
from driftproof.config.keys import dotted, place_of, settings
from tests.cli.commands import call

EARLIER = Path(__file__).with_name("earlier.yaml")


def problems(text):
    with pytest.raises(ConfigError) as error:
        loads(text, name="my.yaml")
    return error.value.problems


def test_every_setting_is_carried_over_or_named():
    migrated = migrate(EARLIER.read_text())
    assert migrated.config == loads(migrated.text)
    assert migrated.config == Config(
        run={"total_timesteps": 200_000, "seed": 11, "evaluation_episodes": 15, "checkpoint_every": 4},
        critic={"value_head": "categorical", "num_atoms": 31, "v_min": -8.0, "v_max": 8.0},
        ppo={
            "learning_rate": 2e-4,
            "gamma": 0.98,
            "gae_lambda": 0.9,
            "clip_range": 0.15,
            "clip_range_vf": 0.5,
            "ent_coef": 0.002,
            "ent_coef_final": 0.001,
            "ent_coef_min": 0.0005,
            "vf_coef": 1.5,
            "max_grad_norm": 0.4,
            "n_steps": 512,
            "n_epochs": 5,
            "batch_size": 128,
        },
        optimizer={
            "name": "adaptive_upgd",
            "kwargs": {
                "weight_decay": 0.002,
                "sigma": 0.002,
                "beta_utility": 0.99,
                "beta1": 0.8,
                "beta2": 0.99,
                "adaptive_noise": True,
            },
        },
        vgs={"warmup_steps": 20},
        adversarial={
            "enabled": True,
            "adversarial_ratio": 0.4,
            "robust_kl_coef": 0.2,
            "warmup_updates": 5,
            "epsilon_schedule": "cosine",
            "epsilon_final": 0.04,
            "perturbation": {"epsilon": 0.06, "attack_steps": 4, "attack_lr": 0.02},
        },
        pbt={
            "population_size": 6,
            "perturbation_interval": 12,
            "truncation_ratio": 0.3,
            "ready_percentage": 0.7,
            "checkpoint_dir": "population",
            "hyperparams": [
                {
                    "name": "learning_rate",
                    "min_value": 1e-5,
                    "max_value": 1e-3,
                    "is_log_scale": True,
                    "perturbation_factor": 1.3,
                    "resample_probability": 0.2,
                },
                {"name": "ent_coef", "min_value": 0.0005, "max_value": 0.02},
                {"name": "clip_range", "min_value": 0.1, "max_value": 0.3},
                {"name": "adversary.epsilon", "min_value": 0.01, "max_value": 0.1},
                {"name": "adversary.robust_kl_coef", "min_value": 0.01, "max_value": 1.0},
            ],
        },
    )
    named = {note.partition(":")[0] for note in migrated.notes}
    params = [
        *("vf_clip_warmup_updates", "ent_coef_decay_steps", "ent_coef_plateau_window", "ent_coef_plateau_tolerance"),
        *("ent_coef_plateau_min_updates", "bad_explained_patience", "microbatch_size", "kl_early_stop"),
        *("kl_exceed_stop_fraction", "cvar_alpha", "cvar_weight", "cvar_activation_threshold"),
        *("cvar_activation_hysteresis", "cvar_ramp_updates", "cvar_cap", "v_range_ema_alpha"),
    ]
    assert named == {
        *(f"model.params.{name}" for name in params),
        *("model.vgs.accumulation_steps", "model.vgs.eps", "model.vgs.clip_threshold"),
        *("model.optimizer_lr_min", "model.scheduler_min_lr", "model.optimizer_kwargs.adaptive_noise"),
        *("training.eval_freq", "training.log_interval", "run.checkpoint_every"),
        *(f"env.{name}" for name in ("decision_timing", "no_trade", "session", "liquidity", "spreads", "warmup", "id")),
        *("pbt.hyperparams", "pbt.hyperparams.4", "pbt.explore_strong", "pbt.optimizer_exploit_strategy"),
    }


def test_a_converted_population_can_be_tuned():
    check(migrate(EARLIER.read_text()).config, is_population=True)


def test_the_command_prints_it_as_a_file(capsys):
    code, output, errors = call(capsys, "config", EARLIER, "--migrate")
    assert code == 0, errors
    assert loads(output) == migrate(EARLIER.read_text()).config
    assert "# model.params.microbatch_size: 32 is left out: minibatches go through the networks whole" in output
    assert "the comments at the top hold" in errors
    code, _, errors = call(capsys, "config", "--migrate")
    assert code == 1
    assert "--migrate converts a CONFIG file" in errors


CHANGES = [
    (
        "model: {params: {target_kl: 0.02, kl_exceed_stop_fraction: 0.3}}",
        {"ppo": {"target_kl": 0.02, "kl_stop": "fraction", "kl_stop_fraction": 0.3}},
        None,
    ),
    ("model: {params: {kl_early_stop: false}}", {"ppo": {"kl_stop": None}}, None),
    ("model: {params: {ent_coef_initial: 0.01}}", {"ppo": {"ent_coef": 0.01}}, None),
    (
        "model: {params: {learning_rate: 0.1}, optimizer_kwargs: {lr: 0.2}}",
        {"ppo": {"learning_rate": 0.2}},
        "learning_rate: 0.1 is left out: the optimizer's lr took precedence",
    ),
    (
        "model: {optimizer_kwargs: {lr: 0.2}, params: {learning_rate: 0.1}}",
        {"ppo": {"learning_rate": 0.2}},
        "model.params.learning_rate: 0.1 is left out: ppo.learning_rate is 0.2 already",
    ),
    ("adversarial: {robust_kl_coef: 0.3}", {"adversarial": {"enabled": True, "robust_kl_coef": 0.3}}, None),
    ("adversarial: {enabled: false, robust_kl_coef: 0.3}", {}, None),
    (
        "adversarial: {epsilon_schedule: linear, epsilon_final: 0.1}",
        {"adversarial": {"enabled": True}},
        "adversarial.epsilon_schedule is left out: without adaptive_epsilon it was constant",
    ),
    ("adversarial: {adaptive_epsilon: false, epsilon_final: 0.1}", {"adversarial": {"enabled": True}}, None),
    (
        "optimizer_kwargs: {adaptive_noise: true, noise_beta: 0.9}",
        {
            "optimizer": {
                "kwargs": {
                    "adaptive_noise": True,
                    "noise_beta": 0.9,
                    "noise_reference": "gradient",
                    "instant_noise_scale": False,
                }
            }
        },
        None,
    ),
    (
        "training: {save_freq: 20000, n_steps: 2048}",
        {"ppo": {"n_steps": 2048}, "run": {"checkpoint_every": 10}},
        "run.checkpoint_every: save_freq: 20000 steps are 10 updates of 2048 steps",
    ),
    ("training: {save_freq: often}", {}, "training.save_freq: often is left out: run.checkpoint_every says it"),
    ("pbt: {enabled: false}", {}, "pbt.enabled: false is left out: a population is trained by `driftproof tune`"),
    ("model: {algo: sac}", {}, "model.algo: sac is left out: there is one algorithm"),
    ("model: {wings: 2}", {}, "model.wings: 2 is left out: no equivalent is known"),
    ("model: 5", {}, "model: 5 is left out: it must hold settings by name"),
    ("env: CartPole-v1\nmodel:\ntraining:\n", {}, None),
    ('"a\\nrun: {seed: 3}": 1', {}, '"a\\nrun: {seed: 3}": 1 is left out: no equivalent is known'),
    ('model: {x: "a\\nrun: {seed: 3}"}', {}, "model.x: "),
    ("model: {x: " + "y" * 5000 + "}", {}, "model.x: " + "y" * 100 + "... is left out"),
]


@pytest.mark.parametrize(("text", "settings", "note"), CHANGES)
def test_what_settings_become(text, settings, note):
    migrated = migrate(text)
    assert migrated.config == Config(**settings)
    notes = [line for line in migrated.notes if not line.startswith("env.id: ")]
    assert [line[: len(note or "")] for line in notes] == ([] if note is None else [note])


def test_what_is_wrong_in_it_is_an_error():
    with pytest.raises(ConfigError, match=r"old\.yaml in today's form:\d+: ppo.gamma: should be less than") as error:
        migrate("model: {params: {gamma: 2}}", "old.yaml")
    assert error.value.problems[-1] == "correct that in the earlier file, then convert it again"
    with pytest.raises(ConfigError, match=r"old\.yaml:1: is not YAML"):
        migrate("model: [", "old.yaml")


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("pbt: {enabled: true}", "pbt.enabled: unknown; a population is trained by `driftproof tune`"),
        ("vgs: {vgs_enabled: true}", "vgs.vgs_enabled: unknown; it is vgs.enabled"),
        ("ent_coef_initial: 0.1", "ent_coef_initial: unknown; it is ppo.ent_coef"),
        ("ppo: {ent_coef_initial: 0.1}", "ppo.ent_coef_initial: unknown; it is ppo.ent_coef"),
        ("entropy_coef: 0.1", "entropy_coef: unknown; it is ppo.ent_coef"),
        ("critic: {use_twin_critics: true}", "critic.use_twin_critics: unknown; it is critic.twin_critics"),
        ("adversarial: {enabled: true, adaptive_epsilon: true}", "adversarial.epsilon_schedule says it"),
        ("kl_early_stop: true", "kl_early_stop: unknown; ppo.kl_stop says it"),
        (
            "model: {algo: ppo}",
            "model: unknown; a section of the earlier system's files: `driftproof config FILE --migr",
        ),
        ("training: {save_freq: 1}", "training: unknown; a section of the earlier system's files"),
        ("vgs: {accumulation_steps: 4}", "vgs.accumulation_steps: unknown; statistics are running averages"),
        ("env: {session: {}}", "env.session: unknown; belongs to the earlier trading environment"),
    ],
)
def test_earlier_names_are_answered(text, hint):
    (found,) = problems(text)
    assert hint in found
    assert found.startswith("my.yaml:1: ")


def test_every_line_of_an_earlier_file_is_answered():
    """What is refused says what to do; nothing is merely 'unknown'."""
    found = problems(EARLIER.read_text())
    assert len(found) == 10
    assert not any("there are" in line or "did you mean" in line or " has id" in line for line in found)


def test_what_hints_say_exists():
    """Settings that hints and notes name are settings."""
    from driftproof.config.earlier import GONE, RENAMED

    known = {dotted(path) for path in settings()} | {"ppo.kl_penalty"}
    assert set(RENAMED.values()) <= known
    sections = set(Config.model_fields)
    for gone in GONE.values():
        words = [word.strip(",;:().") for word in gone.reason.replace("{", " ").split()]
        dotted_words = [word for word in words if word.partition(".")[0] in sections and "." in word]
        assert set(dotted_words) <= known, dotted_words


def test_a_flat_switch_is_the_switch():
    assert loads("vgs_enabled: false") == loads("vgs: false") == loads("variance_gradient_scaling: false")
    assert place_of(("vgs_enabled",)) == ("vgs", "enabled")
    with pytest.raises(ConfigError, match="both are the same setting"):
        loads("vgs_enabled: false\nvgs: {enabled: true}")
