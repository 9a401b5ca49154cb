"""Configurations in files: where a mistake is, other names for settings, the same again from what was written."""

from __future__ import annotations

import re

import pytest
from hypothesis import HealthCheck, given, settings

from driftproof.config import Config, ConfigError, commented_yaml, dumps, load, loads
from driftproof.config.files import as_yaml, settings_in
from driftproof.config.keys import flat_keys
from tests.config.strategies import configs


def problems(text, *overrides):
    with pytest.raises(ConfigError) as error:
        loads(text, overrides, "my.yaml")
    return error.value.problems


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(configs())
def test_what_was_written_is_read_again(config):
    assert loads(dumps(config)) == config
    assert loads(commented_yaml(config)) == config


def test_random_configurations_are_not_all_the_same():
    """The property above would hold for configurations that are all at their defaults."""
    seen = set()

    @settings(max_examples=200, suppress_health_check=list(HealthCheck), database=None)
    @given(configs())
    def look(config):
        changed = config.model_dump(exclude_defaults=True)
        seen.update((section, name) for section, part in changed.items() for name in part)

    look()
    assert len(seen) > 60


def test_nothing_is_all_defaults(tmp_path):
    assert loads("") == loads("# nothing\n") == loads("ppo:\nvgs:\n") == load() == Config()
    (tmp_path / "my.yaml").write_text("env: Pendulum-v1\n")
    assert load(tmp_path / "my.yaml").env.id == "Pendulum-v1"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("ppo:\n  learning_rat: 1e-3", "my.yaml:2: ppo.learning_rat: unknown; did you mean ppo.learning_rate?"),
        ("learning_rat: 1e-3", "my.yaml:1: learning_rat: unknown; did you mean ppo.learning_rate?"),
        ("pppo: {gamma: 0.9}", "my.yaml:1: pppo: unknown; did you mean ppo?"),
        ("sigma: 0.1", "my.yaml:1: sigma: unknown; it is optimizer.kwargs.sigma"),
        ("optimizer: {noise_beta: 0.9}", "my.yaml:1: optimizer.noise_beta: unknown; it is optimizer.kwargs.noise_beta"),
        ("ppo: {twin_critics: false}", "my.yaml:1: ppo.twin_critics: unknown; it is critic.twin_critics"),
        ("ppo: {vgs_beta: 0.9}", "my.yaml:1: ppo.vgs_beta: unknown; it is vgs.beta"),
        ("vgs_kwargs: {betta: 0.9}", "my.yaml:1: vgs.betta: unknown; did you mean vgs.beta?"),
        (
            "pbt:\n  hyperparams:\n    - {name: gamma, min_valu: 0.9, max_value: 1}",
            "my.yaml:3: pbt.hyperparams.0.min_valu: unknown; did you mean pbt.hyperparams.0.min_value?",
        ),
        ("ppo: {kl_penalty: {kpp: 1}}", "my.yaml:1: ppo.kl_penalty.kpp: unknown; did you mean ppo.kl_penalty.kp?"),
        ("xyz: 1", "my.yaml:1: xyz: unknown; there are run, env, policy, critic, ppo, optimizer, vgs,"),
    ],
)
def test_unknown_keys_are_refused_with_what_was_meant(text, problem):
    (found,) = problems(text)
    assert found.startswith(problem)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("ppo:\n  gamma: 2", "my.yaml:2: ppo.gamma: should be less than or equal to 1, not 2"),
        ("ppo: {n_steps: true}", "my.yaml:1: ppo.n_steps: should be a valid integer, not True"),
        ("ppo: {n_steps: 12.5}", "my.yaml:1: ppo.n_steps: should be a valid integer, not 12.5"),
        ("ppo: {learning_rate: fast}", "my.yaml:1: ppo.learning_rate: should be a valid number, not 'fast'"),
        ("ppo: {clip_range: {kind: lin, start: 1}}", "my.yaml:1: ppo.clip_range.kind: should be 'linear' or 'cosine'"),
        ("ppo: {learning_rate: {kind: linear}}", "my.yaml:1: ppo.learning_rate.start: is missing"),
        ("ppo: 5", "my.yaml:1: ppo: must hold settings by name, not 5"),
        ("optimizer: adamm", "my.yaml:1: optimizer.name: Unknown optimizer 'adamm'; did you mean 'adam'?"),
        ("run: {device: cupa}", "my.yaml:1: run.device: must be auto, cpu, cuda"),
        ("- 1", "my.yaml: must hold settings by name"),
        ("ppo: [1", "my.yaml:1: is not YAML: expected ',' or ']'"),
        ("ppo:\n  gamma: 1\n  gamma: 1", "my.yaml:3: ppo.gamma is already set in line 2"),
        ("env: {drift: [{kind: tilt}]}", "my.yaml:1: env.drift: Unknown change 'tilt'"),
        ("env: {drift: [{kind: reward_scale}]}", "my.yaml:1: env.drift: "),
        ("env: {kwargs: {size: .inf}}", "my.yaml:1: env.kwargs.size: "),
        ("env: !!python/object/apply:os.system [ls]", "my.yaml:1: is not YAML: could not determine a constructor"),
    ],
)
def test_wrong_values_are_refused_with_their_place(text, problem):
    (found,) = problems(text)
    assert found.startswith(problem)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "n_steps: 100\nsequence_length: 160",
            "my.yaml:2: ppo.sequence_length: sequence_length=160 is longer than the rollout of n_steps=100",
        ),
        (
            "critic: {num_atoms: 21}",
            "my.yaml:1: critic.num_atoms: 21 would have no effect: it needs",
        ),
        ("critic: {value_head: categorical, huber_kappa: 1.0}", "critic.huber_kappa: 1.0 would have no effect"),
        ("policy: MlpPolicy\nlstm_hidden_size: 64", "my.yaml:2: policy.lstm_hidden_size: 64 would have no effect"),
        ("policy: MlpPolicy\nsequence_length: 16", "my.yaml:2: ppo.sequence_length: 16 would have no effect"),
        ("env: {clip_observations: 5}", "env.clip_observations: 5.0 would have no effect"),
        ("pbt: {backend: inline, workers: 2}", "pbt.workers: 2 would have no effect"),
        ("ppo: {sde_sample_freq: 4}", "ppo.sde_sample_freq: 4 would have no effect: it needs ppo.use_sde: true"),
        ("policy: {use_expln: true}", "policy.use_expln: True would have no effect: it needs ppo.use_sde: true"),
        ("pbt: {backend: ray, workers: 2}", "my.yaml:1: pbt.workers: 2 would have no effect"),
        (
            "pbt: {backend: ray, resources_per_member: {runtime_env: {pip: [evil]}}}",
            "my.yaml:1: pbt.resources_per_member.runtime_env: unknown; it may have num_cpus, num_gpus",
        ),
        ("pbt: {address: auto}", "pbt.address: 'auto' would have no effect"),
        ("vgs: false\nvgs_beta: 0.9", "my.yaml:2: vgs.beta: 0.9 would have no effect: it needs vgs.enabled: true"),
        (
            "adversarial_ratio: 0.2",
            "my.yaml:1: adversarial.adversarial_ratio: 0.2 would have no effect: it needs",
        ),
        (
            "adversarial: {perturbation: {epsilon: 0.2}}",
            "adversarial.perturbation.epsilon: 0.2 would have no effect: it needs adversarial.enabled: true",
        ),
        (
            "adversarial: {enabled: true, epsilon_final: 0.2}",
            "adversarial.epsilon_final: 0.2 would have no effect: it needs epsilon_schedule 'linear' or 'cosine'",
        ),
        (
            "adversarial: {enabled: true, perturbation: {attack_method: fgsm, attack_steps: 5}}",
            "adversarial.perturbation.attack_steps: 5 would have no effect: it needs attack_method 'pgd' or 'sgld'",
        ),
        (
            "adversarial: {enabled: true, perturbation: {random_init: false}}",
            "adversarial.perturbation.random_init: False would have no effect",
        ),
        ("policy: {net_arch: [], activation_fn: relu}", "policy.activation_fn: 'relu' would have no effect"),
        ("env:\n  drift_seed: 3", "my.yaml:2: env.drift_seed: 3 would have no effect: it needs env.drift"),
        (
            "optimizer_kwargs:\n  noise_beta: 0.9",
            "my.yaml:2: optimizer.kwargs.noise_beta: 0.9 would have no effect: it needs adaptive_noise=True, noise",
        ),
        ("optimizer_kwargs: {adaptive_noise: true, noise_beta: 0.9}", "optimizer.kwargs.noise_beta: 0.9 would have no"),
        (
            "optimizer_kwargs: {adaptive_noise: true, noise_reference: gradient, noise_beta: 0.9}",
            "optimizer.kwargs.noise_beta: 0.9 would have no",
        ),
        ("adversarial: {enabled: true, adversarial_ratio: 0}", "adversarial.adversarial_ratio: 0 switches attacks off"),
        (
            "optimizer_kwargs: {sigma: 0, adaptive_noise: true}",
            "optimizer.kwargs.adaptive_noise: True would have no effect: it needs sigma above 0",
        ),
        ("optimizer_kwargs: {min_noise_std: 0.1}", "optimizer.kwargs.min_noise_std: 0.1 would have no effect"),
        ("optimizer_kwargs: {noise_reference: gradient}", "noise_reference: 'gradient' would have no effect"),
        (
            "optimizer: UPGD\noptimizer_kwargs: {adaptive_noise: true, instant_noise_scale: false}",
            "instant_noise_scale: False would have no effect: it needs noise_reference='gradient'",
        ),
        (
            "optimizer: sgd\noptimizer_kwargs: {dampening: 0.1}",
            "kwargs.dampening: 0.1 would have no effect: it needs mo",
        ),
        (
            "pbt:\n  explore_method: perturb\n  hyperparams:\n"
            "    - {name: gamma, min_value: 0.9, max_value: 1, resample_probability: 0.5}",
            "my.yaml:4: pbt.hyperparams.0.resample_probability: 0.5 would have no effect: it needs explore",
        ),
        (
            "explore_method: resample\n"
            "pbt: {hyperparams: [{name: x, min_value: 0, max_value: 1, perturbation_factor: 2}]}",
            "pbt.hyperparams.0.perturbation_factor: 2.0 would have no effect",
        ),
        (
            "pbt: {hyperparams: [{name: x, values: [1, 2], perturbation_factor: 2}]}",
            "pbt.hyperparams.0.perturbation_factor: 2.0 would have no effect: it needs a range",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(text, problem):
    (found,) = problems(text)
    assert problem in found


@pytest.mark.parametrize(
    "text",
    [
        "optimizer_kwargs: {adaptive_noise: true, min_noise_std: 0.1}",
        "optimizer_kwargs: {adaptive_noise: true, noise_reference: gradient, "
        "instant_noise_scale: false, noise_beta: 0.9}",
        "optimizer_kwargs: {noise_beta: 0.999}",
        "optimizer: sgd\noptimizer_kwargs: {dampening: 0.1, momentum: 0.9}",
        "optimizer: {name: 'my_module:Mine', kwargs: {noise_beta: 0.9}}",
        "adversarial: {enabled: true, epsilon_schedule: linear, epsilon_final: 0.2}",
        "adversarial: {enabled: true, perturbation: {attack_method: sgld, attack_steps: 5}}",
        "pbt: {explore_method: resample, hyperparams: [{name: x, min_value: 0, max_value: 1}]}",
        "env: {drift_seed: 3, drift: [{kind: reward_scale, schedule: {kind: sudden, values: [1, 2], every: 9}}]}",
    ],
)
def test_settings_that_have_an_effect_are_taken(text):
    assert loads(dumps(loads(text))) == loads(text)


def test_switching_off_on_the_command_line_leaves_nothing_to_contradict():
    text = "vgs: {beta: 0.9}\nadversarial: {enabled: true, adversarial_ratio: 0.2, perturbation: {epsilon: 0.1}}"
    assert loads(text, ["vgs=false", "adversarial.enabled=false"]) == loads("vgs: false")
    assert loads(text, ["vgs_enabled=false", "vgs=true"]).vgs.enabled
    with pytest.raises(ConfigError, match=r"--set vgs\.alpha=1: vgs\.alpha: 1\.0 would have no effect"):
        loads(text, ["vgs=false", "vgs.alpha=1"])


def test_names_of_the_documents_work():
    config = loads(
        """
        env: Pendulum-v1
        policy: MlpGruPolicy
        learning_rate: 1e-4
        variance_gradient_scaling: true
        vgs_beta: 0.95
        vgs_alpha: 0.2
        vgs_warmup_steps: 50
        optimizer_class: AdaptiveUPGD
        optimizer_kwargs: {sigma: 0.01}
        population_size: 4
        perturbation_interval: 7
        adversarial: true
        adversarial_ratio: 0.25
        epsilon: 0.1
        policy_kwargs: {lstm_hidden_size: 64, num_quantiles: 16}
        vgs_kwargs: {variance_cap: 20}
        seed: 3
        """
    )
    assert config == Config(
        env={"id": "Pendulum-v1"},
        policy={"name": "MlpGruPolicy", "lstm_hidden_size": 64},
        critic={"num_quantiles": 16},
        ppo={"learning_rate": 1e-4},
        optimizer={"name": "adaptive_upgd", "kwargs": {"sigma": 0.01}},
        vgs={"beta": 0.95, "alpha": 0.2, "warmup_steps": 50, "variance_cap": 20.0},
        adversarial={"enabled": True, "adversarial_ratio": 0.25, "perturbation": {"epsilon": 0.1}},
        pbt={"population_size": 4, "perturbation_interval": 7},
        run={"seed": 3},
    )


def test_whole_files_from_before_the_drift_kit_have_none_of_its_parts():
    plain = settings_in(dumps(Config()))
    del plain["drift"]
    text = as_yaml(plain)
    drift = loads(text).drift
    assert (drift.drift_kit, drift.layer_norm, drift.exploration_floor) == (False, False, 0.0)
    assert loads(text, ["drift.layer_norm=true"]).drift.layer_norm is True
    assert loads(text, ["drift_kit=true"]).drift == loads("drift_kit: true").drift
    del plain["ppo"]["skip_limit"]
    assert loads(as_yaml(plain)).drift == Config().drift


@pytest.mark.parametrize("name", sorted(flat_keys()))
def test_every_flat_name_leads_to_its_place(name):
    path = flat_keys()[name]
    value = Config()
    for part in path:
        value = getattr(value, part)
    plain = loads(dumps(Config())).model_dump()
    for part in path:
        plain = plain[part]
    assert Config(**{name: plain}) == Config()


def test_a_setting_with_two_values_is_refused():
    (found,) = problems("vgs_beta: 0.9\nvgs:\n  beta: 0.8")
    assert found == "my.yaml:3: vgs_beta is 0.9 and vgs.beta is 0.8, but both are the same setting: remove one"
    (found,) = problems("learning_rate: 1e-3\noptimizer_kwargs: {lr: 1e-4}")
    assert "learning_rate is 0.001 and optimizer_kwargs.lr is 0.0001" in found
    assert loads("vgs_beta: 0.9\nvgs: {beta: 0.9}").vgs.beta == 0.9


def test_an_lr_of_the_optimizer_is_the_learning_rate():
    config = loads("optimizer_kwargs: {lr: 1e-2, sigma: 0}")
    assert config.ppo.learning_rate == 0.01
    assert config.optimizer.kwargs == {"sigma": 0}
    assert loads("learning_rate: 0.5", ["optimizer.kwargs.lr=0.1"]).ppo.learning_rate == 0.1
    assert loads("learning_rate: 0.5", ["optimizer_kwargs={lr: 0.2}"]).ppo.learning_rate == 0.2


def test_the_command_line_goes_before_the_file_and_that_before_defaults():
    text = "ppo: {gamma: 0.9, gae_lambda: 0.8}\nenv: {kwargs: {a: 1, b: 2}}"
    config = loads(text, ["gae_lambda=0.7", "env.kwargs.b=3", "pbt.hyperparams.0.min_value=1e-6", "vgs=false"])
    assert (config.ppo.gamma, config.ppo.gae_lambda, config.ppo.clip_range) == (0.9, 0.7, 0.2)
    assert config.env.kwargs == {"a": 1, "b": 3}
    assert config.pbt.hyperparams[0].min_value == 1e-6
    assert config.pbt.hyperparams[0].max_value == Config().pbt.hyperparams[0].max_value
    assert not config.vgs.enabled
    assert loads(text, ["env.kwargs={c: 4}"]).env.kwargs == {"c": 4}
    assert loads(text, ["ppo.gamma=0.8", "ppo.gamma=0.7"]).ppo.gamma == 0.7
    assert (
        loads("", ["ppo.learning_rate.kind=cosine", "ppo.learning_rate.start=0.1"]).ppo.learning_rate.kind == "cosine"
    )
    assert loads("", ["ppo={gamma: 0.5}", "ppo.n_epochs=2"]).ppo.gamma == 0.5


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("ppo.gama=1", "--set ppo.gama=1: ppo.gama: unknown; did you mean ppo.gamma?"),
        ("gamma=3", "--set gamma=3: ppo.gamma: should be less than or equal to 1, not 3"),
        ("gamma", "--set gamma: must be name=value"),
        ("=3", "--set =3: must be name=value"),
        ("gamma=[1", "--set gamma=[1: is not YAML"),
        (
            "env.drift.0.kind=x",
            "--set env.drift.0.kind=x: env.drift is an empty list: set the whole list",
        ),
        ("ppo.n_steps.x=3", "--set ppo.n_steps.x=3: ppo.n_steps: should be a valid integer, not {'x': 3}"),
        ("pbt.hyperparams.9.name=x", "--set pbt.hyperparams.9.name=x: pbt.hyperparams is a list of 2: use an index"),
    ],
)
def test_overrides_that_are_wrong_are_named(override, problem):
    (found,) = problems("ppo: {gamma: 0.5}", override)
    assert found.startswith(problem)


def test_numbers_are_numbers():
    config = loads("learning_rate: 1e-4\ntotal_timesteps: 1e6\nn_steps: 4_096\noptimizer: {kwargs: {sigma: 5E-3}}")
    assert config.ppo.learning_rate == 1e-4
    assert config.run.total_timesteps == 1_000_000
    assert config.ppo.n_steps == 4096
    assert config.optimizer.kwargs == {"sigma": 0.005}
    # Dates stay texts, as arguments of environments want them.
    assert loads("env: {kwargs: {begin: 2010-01-01, text: '1e5'}}").env.kwargs == {"begin": "2010-01-01", "text": "1e5"}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("env: caf\u00e9".encode("latin-1"), "is not text in UTF-8"),
        ("env: CartPole-v1".encode("utf-16"), "is not text in UTF-8"),
        (bytes(range(256)), "is not text in UTF-8"),
        (b"env: \0", "is not YAML: unacceptable character"),
    ],
)
def test_files_that_are_no_text_are_refused(content, problem, tmp_path):
    (tmp_path / "my.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=f"^{re.escape(str(tmp_path / 'my.yaml'))}: {problem}"):
        load(tmp_path / "my.yaml")


def test_several_problems_are_all_told():
    assert len(problems("ppo:\n  gama: 1\n  n_steps: x\nfoo: 1")) == 3


class TestAnotherBackend:
    """``--set pbt.backend=...`` over a file with settings of another backend."""

    TEXT = "pbt:\n  workers: 2\n"

    @pytest.mark.parametrize("override", ["pbt.backend=ray", "pbt.backend=inline", "pbt={backend: vectorized}"])
    def test_ignores_them_with_a_warning(self, override):
        with pytest.warns(
            UserWarning, match="my.yaml:2: pbt.workers: 2 is ignored: it has no effect with pbt.backend="
        ):
            config = loads(self.TEXT, [override], name="my.yaml")
        assert config.pbt.workers is None
        assert config.pbt.backend in override

    def test_of_ray(self):
        text = "pbt: {backend: ray, address: auto, resources_per_member: {num_cpus: 2}}"
        with pytest.warns(UserWarning, match="with pbt.backend=process") as warned:
            config = loads(text, ["pbt.backend=process", "pbt.workers=3"])
        assert config == loads("", ["pbt.workers=3"])
        assert len(warned) == 2

    def test_says_nothing_of_defaults(self):
        assert loads(dumps(loads("")), ["pbt.backend=ray"]).pbt.backend == "ray"

    def test_refuses_contradictions(self):
        for text, overrides in [
            ("", ["pbt.backend=ray", "pbt.workers=2"]),
            ("pbt: {backend: ray}", ["pbt.workers=2"]),
            (
                "pbt: {backend: ray, resources_per_member: {}}",
                ["pbt.backend=inline", "pbt.resources_per_member.num_cpus=1"],
            ),
        ]:
            with pytest.raises(ConfigError, match="would have no effect: it needs pbt"):
                loads(text, overrides)
