"""What configurations make: environments, agents and populations with every setting in its place."""

from __future__ import annotations

import pickle
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from stable_baselines3.common.vec_env import SubprocVecEnv, VecNormalize

from driftproof.adversarial import PerturbationConfig, SAPPOConfig
from driftproof.config import AgentMaker, ConfigError, build_agent, build_env, build_population, check, load, loads
from driftproof.config.build import population_config, seed_of
from driftproof.ppo import Cosine, Linear, TensorVecEnv
from tests.config.worlds import Extractor, Optimizer

with warnings.catch_warnings():
    # Turned into errors, the warnings of its import crash the interpreter.
    warnings.simplefilter("ignore")
    import Box2D  # noqa: F401

READY = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
SMALL = """
env: CartPole-v1
n_envs: 2
n_steps: 16
batch_size: 32
n_epochs: 1
policy: MlpPolicy
vgs_warmup_steps: 1
"""


def error_of(text, is_population=False):
    with pytest.raises(ConfigError) as error:
        check(loads(text, trusted=["tests", "nowhere", "faulty"]), is_population)
    (problem,) = error.value.problems
    return problem


@pytest.mark.parametrize("path", READY, ids=lambda path: path.stem)
def test_ready_configurations_are_right(path, tmp_path, monkeypatch):
    own = []
    if (package := path.stem.partition("_")[0]) in ("minatar", "minigrid"):
        pytest.importorskip(package)
        monkeypatch.syspath_prepend(path.parents[1] / "examples")
    if path.stem == "market":  # Of prices that users have.
        days = np.arange("2015-01-01", "2018-01-01", dtype="datetime64[D]")
        close = 100 * np.exp(np.random.default_rng(0).normal(0, 0.01, len(days)).cumsum())
        rows = [f"{day},{c},{c},{c},{c},1000" for day, c in zip(days, close, strict=True)]
        (tmp_path / "prices.csv").write_text("\n".join(["date,open,high,low,close,volume", *rows]))
        own = [f"env.kwargs.data={tmp_path / 'prices.csv'}"]
    check(load(path, own, ["minatar_and_minigrid"]), is_population="population" in path.stem)
    assert path.name in path.read_text(), "says how to run it"


def test_ready_configurations_are_there():
    names = {path.stem for path in READY}
    wanted = {"cartpole", "pendulum", "lunarlander", "regime_market", "regime_market_population"}
    assert names >= wanted | {"drifting_cartpole", "hopper_adversarial"}


def test_every_setting_reaches_the_agent():
    config = loads(
        """
        env: {id: Pendulum-v1, n_envs: 2, normalize_observations: true, clip_observations: 5}
        policy:
          name: MlpGruPolicy
          net_arch: {pi: [8], vf: [16]}
          activation_fn: relu
          lstm_hidden_size: 8
          n_lstm_layers: 2
          log_std_init: -1
          full_std: false
          use_expln: true
          squash_output: true
          features_extractor_class: "tests.config.worlds:Extractor"
        critic: {value_head: categorical, num_atoms: 11, v_min: -5, v_max: 5, twin_critics: false, cvar_alpha: 0.5}
        ppo:
          learning_rate: {kind: linear, start: 1e-3, end: 1e-4}
          clip_range: {kind: cosine, start: 0.3}
          clip_range_vf: 0.4
          n_steps: 32
          batch_size: 32
          sequence_length: 8
          target_kl: 0.02
          kl_stop: consecutive
          kl_stop_patience: 2
          kl_penalty: {kp: 0.2}
          ent_coef: 0.01
          ent_coef_final: 0.001
          use_sde: true
          sde_sample_freq: 4
        optimizer: {name: UPGDW, kwargs: {betas: [0.8, 0.9], sigma: 0.01}}
        vgs: {beta: 0.9, apply_to: update}
        adversarial: {enabled: true, robust_kl_coef: 0.5, perturbation: {epsilon: 0.2}}
        run: {seed: 4, device: cpu, stats_window_size: 7}
        """,
        trusted=["tests.config.worlds"],
    )
    agent = build_agent(config, member=3)
    settings = agent.settings()
    assert settings["seed"] == seed_of(config, 3) == 30_004
    assert settings["learning_rate"] == Linear(1e-3, 1e-4)
    assert settings["clip_range"] == Cosine(0.3)
    assert settings["clip_range_vf"] == 0.4
    assert (agent.n_steps, agent.batch_size, agent.sequence_length) == (32, 32, 8)
    assert (agent.kl_stop.mode, agent.kl_stop.patience, agent.kl_penalty.kp) == ("consecutive", 2, 0.2)
    assert agent.entropy.final == 0.001
    assert agent.vgs.beta == 0.9
    assert agent.vgs.apply_to == "update"
    assert agent.policy.optimizer.defaults["betas"] == (0.8, 0.9)
    assert agent.hyperparams["cvar_alpha"] == 0.5
    assert len(agent.policy.critics) == 1
    assert agent.policy.heads[0].v_min == -5
    assert isinstance(agent.policy.features_extractor, Extractor)
    assert agent.policy.actor_core.units == 8
    assert isinstance(agent.policy.actor_network[-1], torch.nn.ReLU)
    assert agent.policy.squash_output
    assert (agent.use_sde, agent.sde_sample_freq) == (True, 4)
    assert (agent.policy.exploration.full_std, agent.policy.exploration.use_expln) == (False, True)
    assert agent.adversarial == SAPPOConfig(robust_kl_coef=0.5, perturbation=PerturbationConfig(epsilon=0.2))
    assert isinstance(agent.env, VecNormalize)
    assert agent.env.clip_obs == 5
    assert agent.env.num_envs == 2
    agent.learn(64)


def test_what_is_switched_off_is_off():
    text = SMALL.replace("vgs_warmup_steps: 1\n", "")
    text += "vgs: false\noptimizer: {name: 'tests.config.worlds:Optimizer'}\n"
    agent = build_agent(loads(text, trusted=["tests"]))
    assert agent.vgs is None
    assert agent.adversary is None
    assert type(agent.policy.optimizer) is Optimizer
    agent.learn(32)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "policy: {name: MlpPolicy, log_std_init: -1}",
            "policy.log_std_init: -1.0 would have no effect: it needs Box",
        ),
        ("policy: {name: MlpPolicy, squash_output: true}", "policy.squash_output: True would have no effect"),
    ],
)
def test_settings_of_continuous_actions_are_refused_where_there_are_none(text, problem):
    assert error_of(f"env: CartPole-v1\n{text}").startswith(problem)
    check(loads(f"env: Pendulum-v1\n{text}"))


@pytest.mark.parametrize(
    ("name", "settings", "problem"),
    [
        ("optimizer.noise_beta", "", "would have no effect: it needs adaptive_noise=True, noise_reference='gradient'"),
        ("optimizer.min_noise_std", "", "would have no effect: it needs adaptive_noise=True"),
        ("optimizer.noise_beta", "optimizer_kwargs: {adaptive_noise: true}", "would have no effect"),
        ("vgs.beta", "vgs: false", "cannot change while the agent trains: variance_gradient_scaling is off"),
        ("adversary.epsilon", "", "cannot change while the agent trains: adversarial training is off"),
        (
            "adversarial_ratio",
            "adversarial: true",
            "cannot change while the agent trains: it determines how minibatches",
        ),
        ("v_min", "", "it is built into the networks"),
        ("entropy_coef", "", "no hyper-parameter 'entropy_coef'; it is 'ent_coef'"),
        ("adversarial_epsilon", "adversarial: true", "it is 'adversary.epsilon'"),
        ("lr", "", "it is 'learning_rate'"),
    ],
)
def test_searches_without_effect_are_refused(name, settings, problem):
    search = f"pbt: {{hyperparams: [{{name: {name}, min_value: 0.1, max_value: 0.5}}]}}"
    small = SMALL.replace("vgs_warmup_steps: 1\n", "")
    found = error_of(f"{small}{settings}\n{search}", is_population=True)
    assert found.startswith("pbt: ")
    assert problem in found


def test_searches_with_an_effect_are_taken():
    search = "pbt: {hyperparams: [{name: optimizer.noise_beta, min_value: 0.1, max_value: 0.5}]}"
    noise = "{adaptive_noise: true, noise_reference: gradient, instant_noise_scale: false}"
    check(loads(f"{SMALL}optimizer_kwargs: {noise}\n{search}"), is_population=True)


def test_members_differ_by_their_seeds_alone():
    maker = pickle.loads(pickle.dumps(AgentMaker(loads(SMALL))))
    first, again, other = maker(0), maker(0), maker(1)
    weights = [agent.policy.action_head.weight for agent in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_own_environments_are_named_by_their_module():
    text = "env: {id: 'tests.config.worlds:Strange-v0', kwargs: {force: 3}, evaluation_kwargs: {force: 5}}"
    config = loads(text, trusted=["tests.config"])
    forces = [build_env(config, 0, is_evaluation=flag).get_attr("force_mag") for flag in (False, True)]
    assert forces == [[3], [5]]


def test_environments_in_processes_are_the_same():
    text = "env: {id: CartPole-v1, n_envs: 2}"
    envs = [build_env(loads(text, ["env.vectorization=" + how]), 5) for how in ("in_process", "processes")]
    assert isinstance(envs[1], SubprocVecEnv)
    assert np.array_equal(*(env.reset() for env in envs))
    envs[1].close()


def test_worlds_drift_alike():
    config = loads("env: {id: CartPole-v1, n_envs: 2}", ["env.drift=[{kind: dynamics, names: length, schedule: "
                   "{kind: sudden, low: 1, high: 9, every: 3}}]"])  # fmt: skip
    env = build_env(config, 0)
    env.reset()
    for _ in range(4):
        *_, infos = env.step(np.array([0, 0]))
    lengths = [info["drift"]["dynamics.length"] for info in infos]
    assert lengths[0] == lengths[1] != 1
    with pytest.raises(ConfigError, match=r"env.drift: .*lenth.*length"):
        build_env(loads("env: CartPole-v1", ["env.drift=[{kind: dynamics, names: lenth, schedule: {kind: sudden, "
                        "values: [1, 2], every: 3}}]"]))  # fmt: skip


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("env: CartPol-v1", "env.id: there is no environment 'CartPol-v1'; did you mean 'CartPole-v1'?"),
        ("env: cartpole", "did you mean 'CartPole-v"),
        ("env: driftproof/RegimMarket-v0", "did you mean 'driftproof/RegimeMarket-v0'?"),
        ("env: Thermostat-v0", "there is no environment 'Thermostat-v0'. Your own: module:Thermostat-v0"),
        ("env: 'tests.config.worlds:Strage-v0'", "did you mean 'tests.config.worlds:Strange-v0'? Importing"),
        ("env: './my_env.py'", "env.id: './my_env.py' names a file; name the module as import does: my_env:Name-v0"),
        ("env: 'my_env.py:Mine-v0'", "names a file; name the module as import does: my_env:Mine-v0"),
        ("env: 'nowhere:Env-v0'", "env.id: 'nowhere:Env-v0' cannot be imported: No module named 'nowhere'"),
        ("env: {id: CartPole-v1, kwargs: {lenth: 3}}", "env: 'CartPole-v1' cannot be made with {'lenth': 3}"),
        ("policy: CnnPolicy", "NatureCNN only with images"),
        ("policy: MultiInputPolicy", "use Mlp"),
        ("policy: {features_extractor_class: Foo}", "policy.features_extractor_class: 'Foo' is not one of"),
        ("optimizer: 'torch.optim:Adan'", "optimizer.name: 'torch.optim:Adan' cannot be imported"),
        ("optimizer: {kwargs: {sigmma: 1}}", "sigmma"),
        ("ppo: {kl_stop: fraction}", "kl_stop='fraction' needs target_kl"),
        ("ppo: {ent_coef: 0.1, ent_coef_min: 0.2}", "ent_coef 0.1 is below ent_coef_min 0.2"),
        pytest.param(
            "run: {device: cuda}",
            "run.device: CUDA is not available for 'cuda'",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
        ("adversarial: {enabled: true, attack_policy: false, attack_value: false}", "adversarial: attack_policy=False"),
    ],
)
def test_what_cannot_be_built_is_refused(text, problem):
    assert problem in error_of(text)


@pytest.mark.filterwarnings("ignore:.*reset.*observation space")
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("Unlicensed", r"cannot be made: RuntimeError in .*broken_worlds.py:\d+: no licence found"),
        ("Spaceless", "cannot be made: AttributeError in .*must specify an action space"),
        (
            "NoReset",
            r"fails at reset or its first step: ZeroDivisionError in .*broken_worlds.py:\d+: there is no floor",
        ),
        ("NoStep", r"fails at reset or its first step: KeyError in .*broken_worlds.py:\d+: 'sensor'"),
        ("OtherShape", r"fails at reset or its first step: ValueError in .*shape \(3,\) into shape \(4,\)"),
        ("Texts", "fails at reset or its first step: TypeError"),
    ],
)
def test_environments_with_mistakes_are_told_before_training(name, problem):
    assert re.search(problem, error_of(f"env: 'tests.config.broken_worlds:{name}-v0'"))


@pytest.mark.parametrize(
    ("code", "problem"),
    [("x = (", "never closed"), ("raise OSError('no camera')", "OSError in .*faulty.py:1: no camera")],
)
def test_modules_that_cannot_be_imported_are_told(code, problem, tmp_path, monkeypatch):
    (tmp_path / "faulty.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    assert re.search(f"env.id: 'faulty:X-v0' cannot be imported: .*{problem}", error_of("env: 'faulty:X-v0'"))


@pytest.mark.parametrize(
    ("search", "problem"),
    [
        ("{name: num_atoms, min_value: 3, max_value: 5}", "pbt: 'num_atoms' cannot be searched"),
        ("{name: learning_rte, min_value: 3, max_value: 5}", "did you mean 'learning_rate'?"),
        ("{name: gamma, min_value: 0.5, max_value: 2}", "pbt: 'gamma': max_value=2.0 cannot be used"),
        ("{name: ent_coef, min_value: 0.001, max_value: 0.1}", "min_value=0.001 cannot be used"),
        ("{name: gamma, min_value: 0.9}", "pbt: 'gamma' has min_value=0.9, max_value=None and no values"),
        ("{name: clip_range_vf, min_value: 0.1, max_value: 1}", "the agent was constructed without it"),
    ],
)
def test_searches_are_compared_with_the_agent(search, problem):
    text = SMALL + f"ppo: {{ent_coef: 0.01, ent_coef_min: 0.01}}\npbt: {{hyperparams: [{search}]}}"
    assert problem in error_of(text, is_population=True)


def test_an_interval_shorter_than_the_warm_up_is_told_in_numbers():
    config = loads(SMALL, ["vgs.warmup_steps=100", "pbt.perturbation_interval=5", "ppo.n_epochs=4"])
    with pytest.warns(UserWarning, match=r"=5 updates are 20 optimizer steps.* the 100 of variance.* >= 25"):
        check(config, is_population=True)


def test_a_population_on_one_device(tmp_path):
    text, where = SMALL, ["env.vectorization=device", "pbt.backend=vectorized", "pbt.population_size=2"]
    config = loads(text, [*where, "pbt.perturbation_interval=2", "run.total_timesteps=128", "run.device=cpu"])
    runner = build_population(config, tmp_path / "run")
    runner.run(updates=2)
    resumed = build_population(config, tmp_path / "run", resume=True)
    assert resumed.run().num_timesteps == 128
    assert isinstance(resumed.load_member(0).env.unwrapped, TensorVecEnv)


def test_environments_without_a_tensor_form_are_told():
    assert "no tensor form" in error_of("env: {id: MountainCar-v0, vectorization: device}")
    drift = "drift: [{kind: reward_scale, schedule: {kind: sudden, values: [1, 2], every: 40}}]"
    assert "env.drift" in error_of(f"env: {{vectorization: device, {drift}}}")


def test_a_population_is_as_configured(tmp_path):
    config = loads(
        SMALL,
        [
            *("pbt.population_size=2", "pbt.perturbation_interval=2", "pbt.backend=inline", "pbt.synchronous=true"),
            *("run.total_timesteps=128", "pbt.metric_name=mean_length", f"pbt.checkpoint_dir={tmp_path}/elsewhere"),
        ],
    )
    runner = build_population(config, tmp_path / "run")
    assert runner.config.hyperparams == population_config(config).hyperparams
    assert (runner.total_updates, runner.synchronous) == (4, True)
    runner.run(updates=2)
    resumed = build_population(config, tmp_path / "run", resume=True)
    assert resumed.updates == [2, 2]
    resumed.run()
    assert resumed.path_of(0).parent == tmp_path / "elsewhere"
    performance = resumed.scheduler.members[0].performance
    assert performance == pytest.approx(np.mean([episode["l"] for episode in resumed.load_member(0).ep_info_buffer]))
