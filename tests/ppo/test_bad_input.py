"""What is wrong is refused, with an error that says what, where, and what would be right."""

import re

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack, VecNormalize

from driftproof.learner.rollout import failure_of_environment
from driftproof.nn.policies import MlpLstmPolicy
from driftproof.optim import AdaptiveUPGD
from driftproof.ppo import DistributionalPPO, RolloutError
from tests.helpers import weights

from .scripted import small_networks

FLAT = spaces.Box(-1, 1, (3,), np.float32)
TWO = spaces.Discrete(2)


class Broken(gymnasium.Env):
    """Sound, until a step at which something goes wrong once; step 0 is the first reset.

    Args:
        wrong: ``"reward"``, ``"observation"``, ``"part"`` of a dictionary, ``"end"``: the last observation before a
            time limit, ``"raise"``, or nothing.
        value: What is given instead.
        at: The step.
    """

    def __init__(self, wrong=None, value=np.nan, at=4):
        self.observation_space = spaces.Dict({"good": FLAT, "bad": FLAT}) if wrong == "part" else FLAT
        self.action_space = TWO
        self.wrong, self.value, self.at, self.steps = wrong, value, at, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.age = 0
        return self.observe(self.happens("observation")), {}

    def step(self, action):
        self.steps += 1
        self.age += 1
        if self.happens("raise"):
            raise OSError("the plug was pulled")
        reward = self.value if self.happens("reward") else 1.0
        ends_badly = self.happens("end")
        bad = ends_badly or self.happens("observation") or self.happens("part")
        return self.observe(bad), reward, False, self.age == 6 or ends_badly, {}

    def happens(self, wrong):
        """Once."""
        if wrong != self.wrong or self.steps != self.at:
            return False
        self.at = -1
        return True

    def observe(self, bad):
        observation = self.np_random.uniform(-1, 1, 3).astype(np.float32)
        spoilt = observation.copy()
        if bad:
            spoilt[1] = self.value
        return {"good": observation, "bad": spoilt} if self.wrong == "part" else spoilt


def broken(wrong, value=np.nan, at=4, index=1, number=3, kind=DummyVecEnv, **kwargs):
    """Environments of which one is broken. Two are for cases in which nothing can be learned afterwards."""
    return kind([lambda i=i: Broken(wrong, value, at if i == index else -1) for i in range(number)], **kwargs)


def small(env, policy="MlpLstmPolicy", **kwargs):
    kwargs = {"n_steps": 8, "batch_size": 8, "n_epochs": 1, "seed": 0, "device": "cpu", **kwargs}
    networks = small_networks(policy, kwargs.pop("policy_kwargs", {}), units=8, width=8)
    return DistributionalPPO(policy, env, policy_kwargs=networks, **kwargs)


def learn_in_vain(model, *patterns):
    """Learning fails with an error that says all of it, and changes no weights; then it succeeds."""
    before, env = weights(model), model.get_env()
    with pytest.raises((RolloutError, OSError, EOFError)) as error:
        model.learn(240)
    told = failure_of_environment(error.value)
    for pattern in patterns:
        assert re.search(pattern, told), told
    assert torch.equal(weights(model), before)
    if env.num_envs == 3:
        model.learn(24, reset_num_timesteps=False)
        assert not torch.equal(weights(model), before)
        assert weights(model).isfinite().all()
    return error.value


# What environments do


@pytest.mark.parametrize("policy", ["MlpPolicy", "MlpLstmPolicy"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("wrong", ["reward", "observation"])
def test_numbers_that_are_not_finite_are_refused_with_environment_and_step(policy, wrong, value):
    learn_in_vain(small(broken(wrong, value), policy), "environment 1", f"the {wrong} {value}", "step 3")


def test_the_step_counts_from_the_start_of_its_rollout():
    model = small(broken("reward", at=2 + 8, index=2))
    steps = []
    with pytest.raises(RolloutError, match=r"environment 2 .* step 1 of the rollout"):
        model.learn(240, lambda *_: steps.append(model.num_timesteps) or True)
    assert model._n_updates == 1
    assert len(steps) == 8 + 1


def test_a_bad_first_observation_is_refused():
    learn_in_vain(small(broken("observation", np.inf, at=0)), "environment 1", "observation inf", "step 0")


def test_the_part_of_a_dictionary_is_named():
    env = broken("part", np.inf)
    learn_in_vain(small(env, "MultiInputLstmPolicy"), "environment 1", r"observation 'bad' inf", "step 3", "element 1")


@pytest.mark.parametrize("kind", [DummyVecEnv, "same step"])
def test_a_bad_last_observation_before_a_time_limit_is_refused(kind):
    if kind == "same step":
        env = broken("end", kind=SyncVectorEnv, index=2, autoreset_mode=AutoresetMode.SAME_STEP)
    else:
        env = broken("end", index=2)
    learn_in_vain(small(env), "environment 2", "observation nan", "step 3")


def test_the_culprit_is_named_through_wrappers():
    # The averages of VecNormalize are spoilt for all environments by then, so that it is not used again.
    model = small(VecFrameStack(VecNormalize(broken("observation", number=2), norm_reward=False), 2))
    learn_in_vain(model, "environment 1", "observation nan", "step 3")


def test_large_numbers_that_are_finite_are_no_error():
    model = small(broken("observation", np.float32(3e38)))
    model.learn(24)
    assert weights(model).isfinite().all()


@pytest.mark.parametrize("policy", ["MlpPolicy", "MlpLstmPolicy"])
def test_an_environment_that_raises_is_named(policy):
    model = small(broken("raise"), policy)
    error = learn_in_vain(model, "environment 1 raised OSError at step 3", "the plug was pulled")
    assert isinstance(error, OSError)


def test_after_a_failed_rollout_learning_begins_with_new_episodes():
    model = small(broken("raise", number=1, index=0))
    with pytest.raises(OSError, match="the plug was pulled"):
        model.learn(24)
    resets = []
    env = model.get_env().envs[0]
    reset = env.reset
    env.reset = lambda **kwargs: resets.append(env.get_wrapper_attr("steps")) or reset(**kwargs)
    model.learn(8, reset_num_timesteps=False)
    # At once, and at the time limit after six steps.
    assert resets == [4, 4 + 6]


def test_an_environment_of_a_vector_environment_that_raises_is_named():
    learn_in_vain(small(broken("raise", kind=SyncVectorEnv)), "environment 1 raised OSError at step 3")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore::UserWarning")
def test_an_environment_in_a_process_of_gymnasium_that_raises_is_named():
    model = small(broken("raise", kind=AsyncVectorEnv, number=2, context="fork"))
    try:
        learn_in_vain(model, "environment 1 raised OSError at step 3", "the plug was pulled")
    finally:
        model.get_env().env.close(terminate=True)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_an_environment_in_a_process_that_raises_is_named(capfd):
    # The first: in forked processes, which share their pipes, SubprocVecEnv waits forever for any other.
    model = small(broken("raise", kind=SubprocVecEnv, number=2, index=0, start_method="fork"))
    learn_in_vain(model, "environment 0 raised EOFError at step 3")
    assert "the plug was pulled" in capfd.readouterr().err
    for process in model.get_env().processes:
        process.terminate()
        process.join()


# Spaces


@pytest.mark.parametrize("policy", ["MlpLstmPolicy", "MultiInputPolicy"])
@pytest.mark.parametrize(
    "space",
    [
        spaces.Tuple([FLAT, TWO]),
        spaces.Dict({"outer": spaces.Dict({"inner": FLAT})}),
        spaces.Dict({"pair": spaces.Tuple([FLAT])}),
        spaces.Text(5),
        spaces.Sequence(FLAT),
        spaces.Discrete(3, start=1),
        spaces.MultiDiscrete([3, 3], start=[0, 1]),
    ],
    ids=lambda space: type(space).__name__,
)
def test_observation_spaces_that_no_policy_reads_are_refused(policy, space):
    env = Broken()
    env.observation_space = space
    with pytest.raises((TypeError, ValueError), match=re.escape(f"observation space {space} is not supported")):
        small(env, policy)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Tuple([TWO]),
        spaces.Dict({"inner": TWO}),
        spaces.Text(5),
        spaces.Box(0, 5, (2,), np.int64),
        spaces.Box(-np.inf, np.inf, (2,), np.float32),
        spaces.Box(-1, 1, (2,), np.float16),
    ],
    ids=str,
)
def test_action_spaces_that_no_policy_acts_in_are_refused(space):
    env = Broken()
    env.action_space = space
    with pytest.raises((TypeError, ValueError), match=re.escape(str(space))):
        small(env)


@pytest.mark.parametrize("core", ["", "Lstm", "Gru"])
def test_policies_that_do_not_read_an_observation_space_say_which_does(core):
    for kind in ("Mlp", "Cnn"):
        with pytest.raises(ValueError, match=f"MultiInput{core}Policy.*{kind}Policy|use MultiInput{core}Policy$"):
            small(broken("part"), f"{kind}{core}Policy")
    with pytest.raises(ValueError, match=f"use Mlp{core}Policy or Cnn{core}Policy$"):
        small(broken(None), f"MultiInput{core}Policy")


def test_another_environment_must_have_the_same_spaces():
    model = small(broken(None))
    before = model.get_env()
    wider, other_actions = Broken(), Broken()
    wider.observation_space = spaces.Box(-1, 1, (4,), np.float32)
    other_actions.action_space = spaces.Discrete(3)
    with pytest.raises(ValueError, match=r"Observation spaces do not match: .*\(3,\).*\(4,\)"):
        model.set_env(wider)
    with pytest.raises(ValueError, match=r"Action spaces do not match: Discrete\(2\) != Discrete\(3\)"):
        model.set_env(other_actions)
    assert model.get_env() is before
    assert model.n_envs == 3
    model.learn(24)


def test_squashing_needs_a_box():
    with pytest.raises(ValueError, match=r"squash_output=True needs a Box as action space, not Discrete\(2\)"):
        small(Broken(), policy_kwargs={"squash_output": True})


# Arguments of the constructor

NUMBERS = {
    "learning_rate": [-1e-4, np.nan, np.inf, "fast", True],
    "gamma": [-0.1, 1.1, "a", None],
    "gae_lambda": [-0.1, 1.1, "a", None],
    "clip_range": [-0.1, "a", None],
    "clip_range_vf": [0, -1, "a"],
    "ent_coef": [-1, "auto", None],
    "vf_coef": [-1, "a", None],
    "max_grad_norm": [0, -1, np.inf, None],
    "target_kl": [0, -1, "a"],
    "cvar_alpha": [0, 1.5, "a"],
    "kl_stop_fraction": [-1, 1, "a"],
    "ent_coef_final": [-1, "a"],
    "ent_coef_min": [-1, "a", None],
    "ent_boost_factor": [0.5, "a"],
    "ent_boost_below": [2, "a"],
    "ent_boost_cap": [-1, "a"],
    "return_scale_decay": [-1, 1, "a"],
}
COUNTS = {
    "n_steps": [0, -1, 1.5, "a", True],
    "batch_size": [0, -8, 8.0, "a"],
    "n_epochs": [0, 2.5, "a", None],
    "sequence_length": [0, -1, 1.5, "a"],
    "kl_stop_patience": [0, 1.5, "a"],
    "ent_plateau_patience": [0, 1.5, "a"],
    "skip_limit": [0, 1.5, "a"],
    "stats_window_size": [0, -1, 1.5, "a"],
    "verbose": [-1, "a"],
    "seed": [-1, 1.5, "a"],
}
FLAGS = {
    "variance_gradient_scaling": [1, "yes"],
    **{name: [1, "yes", None] for name in ("normalize_advantage", "cuda_graph", "mixed_precision")},
}
OPTIONS = {
    "value_clip_mode": ["mean", 5],
    "kl_stop": ["late", True],
    "ent_coef_start": ["later", None],
}
WRONG = [(name, value) for group in (NUMBERS, COUNTS, FLAGS, OPTIONS) for name in group for value in group[name]]
NEEDED = {
    "value_clip_mode": {"clip_range_vf": 0.2},
    "kl_stop": {"target_kl": 0.01},
    "kl_stop_patience": {"target_kl": 0.01, "kl_stop": "consecutive"},
    "kl_stop_fraction": {"target_kl": 0.01, "kl_stop": "fraction"},
    "ent_plateau_patience": {"ent_coef_start": "plateau", "ent_coef_final": 0.0},
    "ent_boost_below": {"ent_boost_factor": 2},
    "ent_boost_cap": {"ent_boost_factor": 2},
}


@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda part: str(part))
def test_values_out_of_range_and_of_the_wrong_type_are_refused(name, value):
    with pytest.raises(ValueError, match=f"Invalid {name}: {re.escape(repr(value))}; must be "):
        small(Broken(), **{name: value}, **NEEDED.get(name, {}))


NETWORKS = {
    "core": ["rnn"],
    "net_arch": [5, [0], ["a"], {"actor": [8]}, [1.5], {"pi": 8}],
    "lstm_hidden_size": [0, 1.5, "a"],
    "n_lstm_layers": [0, 1.5],
    "ortho_init": ["yes", None],
    "shared_recurrence": ["yes", None],
    "shared_lstm": ["yes", None],
    "enable_critic_lstm": ["yes", None],
    "share_features_extractor": ["yes", None],
    "normalize_images": ["yes", None],
    "squash_output": ["yes", None],
    "twin_critics": ["yes", None],
    "log_std_init": ["a", np.nan],
    "value_head": ["gaussian"],
    "num_quantiles": [0, 1.5],
    "huber_kappa": [0, "a"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in NETWORKS for value in NETWORKS[name]], ids=str)
def test_policy_kwargs_out_of_range_and_of_the_wrong_type_are_refused(name, value):
    with pytest.raises(ValueError, match=f"Invalid {name}: {re.escape(repr(value))}; "):
        small(Broken(), policy_kwargs={name: value})


@pytest.mark.parametrize("name", ["optimizer_kwargs", "vgs_kwargs", "policy_kwargs"])
@pytest.mark.parametrize("value", [5, "lr", [("lr", 1e-3)]], ids=str)
def test_arguments_of_arguments_must_be_mappings(name, value):
    with pytest.raises(TypeError, match=f"{name} must be a mapping from names to values, not {re.escape(repr(value))}"):
        DistributionalPPO("MlpPolicy", Broken(), **{name: value})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy_kwargs": {"lstm_hiden_size": 8}}, "'lstm_hiden_size'.*did you mean 'lstm_hidden_size'"),
        ({"policy_kwargs": {"zzz": 8}}, "'zzz'.*there are core, net_arch, .*twin_critics"),
        ({"policy_kwargs": {"observation_space": FLAT}}, "policy_kwargs has 'observation_space'"),
        ({"vgs_kwargs": {"alfa": 0.1}}, "vgs_kwargs has 'alfa'.*did you mean 'alpha'"),
        ({"vgs_kwargs": {"parameters": []}}, "vgs_kwargs has 'parameters'"),
        ({"kl_penalty": {"kpp": 1.0}, "target_kl": 0.01}, "kl_penalty has 'kpp'.*did you mean 'kp'"),
        ({"kl_penalty": {"target": 1.0}, "target_kl": 0.01}, "kl_penalty has 'target'"),
        ({"kl_penalty": "yes", "target_kl": 0.01}, "kl_penalty must be True, False or a mapping.* not 'yes'"),
        ({"kl_penalty": None, "target_kl": 0.01}, "kl_penalty must be True, False or a mapping.* not None"),
        ({"optimizer_kwargs": {"sgima": 0.1}}, "optimizer_kwargs {'sgima': 0.1} do not fit AdaptiveUPGD.*sgima"),
        ({"tensorboard_log": 5}, "tensorboard_log must be a path, not 5"),
        ({"policy_kwargs": {"lstm_kwargs": 5}}, "lstm_kwargs must be a mapping from names to values, not 5"),
        ({"policy_kwargs": {"activation_fn": "tanh"}}, "activation_fn must be a class of torch.nn, not 'tanh'"),
        (
            {"policy_kwargs": {"features_extractor_class": dict}},
            "features_extractor_class must be a subclass of BaseFeaturesExtractor, not <class 'dict'>",
        ),
    ],
    ids=lambda part: str(part)[:40],
)
def test_names_that_nobody_knows_and_types_that_nobody_takes_are_refused(arguments, message):
    with pytest.raises(TypeError, match=message):
        small(Broken(), **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"vgs_kwargs": {"alpha": -1}}, "alpha: -1"),
        ({"optimizer_kwargs": {"sigma": -1}}, "sigma: -1"),
        ({"optimizer_kwargs": {"lr": -1}}, "learning_rate: -1"),
        ({"kl_penalty": {"kp": -1}, "target_kl": 0.01}, "kp: -1"),
        ({"policy_kwargs": {"value_head": "categorical", "num_atoms": 1}}, "num_atoms: 1"),
        ({"policy_kwargs": {"value_head": "categorical", "v_min": 11}}, "v_min: 11"),
        ({"learning_rate": lambda progress: -progress}, "learning_rate: the schedule must not be negative"),
    ],
    ids=lambda part: str(part)[:40],
)
def test_values_inside_of_mappings_are_checked_when_the_agent_is_made(arguments, message):
    with pytest.raises(ValueError, match=f"Invalid {message}"):
        small(Broken(), **arguments)


@pytest.mark.parametrize("optimizer", ["adagrud", 5, None, dict, torch.nn.Linear], ids=str)
def test_unknown_optimizers_are_refused(optimizer):
    with pytest.raises(ValueError, match=f"Unknown optimizer {re.escape(repr(optimizer))}.*adaptive_upgd.*adamw"):
        small(Broken(), optimizer_class=optimizer)


def test_unknown_policies_are_refused_with_those_that_there_are():
    with pytest.raises(ValueError, match="Unknown policy 'LstmPolicy'") as error:
        small(Broken(), "LstmPolicy")
    for kind in ("Mlp", "Cnn", "MultiInput"):
        for core in ("", "Lstm", "Gru"):
            assert f"{kind}{core}Policy" in str(error.value)
    for other in (dict, 5, None):
        with pytest.raises(TypeError, match="policy must be a name or a subclass of DistributionalPolicy"):
            small(Broken(), other)


@pytest.mark.parametrize("env", [5, object()], ids=["number", "object"])
def test_what_is_no_environment_is_refused(env):
    with pytest.raises(ValueError, match=re.escape(str(type(env)))):
        small(env)


# Arguments that contradict one another


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"value_clip_mode": "mean_only"}, "value_clip_mode='mean_only' needs clip_range_vf"),
        ({"kl_penalty": True}, "kl_penalty needs target_kl"),
        ({"kl_penalty": {"kp": 1.0}}, "kl_penalty needs target_kl"),
        ({"kl_stop": "fraction"}, "kl_stop='fraction' needs target_kl"),
        ({"kl_stop": "consecutive"}, "kl_stop='consecutive' needs target_kl"),
        (
            {"variance_gradient_scaling": False, "vgs_kwargs": {"alpha": 0.1}},
            "vgs_kwargs are given, but variance_gradient_scaling is off",
        ),
        (
            {"optimizer_kwargs": {"noise_beta": 0.9}},
            "optimizer_kwargs: noise_beta=0.9 would have no effect: it needs adaptive_noise=True, noise_refer",
        ),
        (
            {"optimizer_class": AdaptiveUPGD, "optimizer_kwargs": {"adaptive_noise": True, "noise_beta": 0.9}},
            "optimizer_kwargs: noise_beta=0.9 would have no effect",
        ),
        ({"optimizer_kwargs": {"min_noise_std": 0.1}}, "min_noise_std=0.1 would have no effect"),
        ({"optimizer_class": "SGD", "optimizer_kwargs": {"dampening": 0.1}}, "dampening=0.1 would have no effect"),
        (
            {"learning_rate": 1e-3, "optimizer_kwargs": {"lr": 1e-4}},
            r"two learning rates: learning_rate=0.001 and optimizer_kwargs\['lr'\]=0.0001",
        ),
        ({"ent_coef": 0.001, "ent_coef_min": 0.01}, "ent_coef 0.001 is below ent_coef_min 0.01"),
        ({"ent_coef": 0.1, "ent_coef_min": 0.01, "ent_coef_final": 0.001}, "Invalid ent_coef_final: 0.001.*>= 0.01"),
        ({"ent_coef_start": "plateau"}, 'ent_coef_start="plateau" needs ent_coef_final'),
        ({"ent_boost_cap": 0.1}, "ent_boost_cap=0.1 needs an ent_boost_factor"),
        ({"ent_boost_below": 0.1}, "ent_boost_below=0.1 needs an ent_boost_factor"),
        ({"ent_plateau_patience": 5}, 'ent_plateau_patience=5 needs ent_coef_start="plateau"'),
        ({"target_kl": 0.01, "kl_stop": None}, "target_kl=0.01 has no effect with kl_stop=None and without kl_penalty"),
        ({"target_kl": 0.01, "kl_stop_patience": 3}, 'kl_stop_patience=3 needs kl_stop="consecutive", not .absolute.'),
        ({"target_kl": 0.01, "kl_stop_fraction": 0.2}, 'kl_stop_fraction=0.2 needs kl_stop="fraction"'),
        ({"policy_kwargs": {"num_atoms": 11}}, "'num_atoms', which is for value_head='categorical', not 'quantile'"),
        (
            {"policy_kwargs": {"value_head": "categorical", "huber_kappa": 1.0}},
            "'huber_kappa', which is for value_head='quantile', not 'categorical'",
        ),
        (
            {"policy_kwargs": {"core": "none", "lstm_hidden_size": 8}},
            "'lstm_hidden_size', which is for recurrent policies",
        ),
        ({"cuda_graph": True}, "cuda_graph=True needs device='cuda', not 'cpu'"),
        ({"mixed_precision": True}, "mixed_precision=True needs device='cuda', not 'cpu'"),
        (
            {"policy_kwargs": {"shared_recurrence": True, "enable_critic_lstm": False}},
            "shared_recurrence=True.*enable_critic_lstm=False",
        ),
        (
            {"policy_kwargs": {"shared_recurrence": True, "shared_lstm": True}},
            "shared_recurrence=True and shared_lstm=True exclude each other",
        ),
        ({"policy_kwargs": {"shared_lstm": True}}, "shared_lstm=True and enable_critic_lstm=True"),
        (
            {"optimizer_class": "adam", "policy_kwargs": {"optimizer_class": torch.optim.SGD}},
            "two optimizers: optimizer_class='adam'",
        ),
        (
            {"optimizer_kwargs": {"eps": 1e-3}, "policy_kwargs": {"optimizer_kwargs": {"eps": 1e-4}}},
            "optimizer_kwargs differ from policy_kwargs",
        ),
        (
            {
                "clip_range_vf": 0.2,
                "value_clip_mode": "per_quantile",
                "policy_kwargs": {"value_head": "categorical"},
            },
            "value_clip_mode='per_quantile' needs value_head='quantile'",
        ),
    ],
    ids=lambda part: str(part)[:50],
)
def test_contradictions_are_refused_when_the_agent_is_made(arguments, message):
    with pytest.raises(ValueError, match=message):
        small(Broken(), **arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"learning_rate": 1e-4, "optimizer_kwargs": {"lr": 1e-4}},
        {"ent_coef": 0.01, "ent_coef_min": 0.01},
        {"clip_range_vf": 0.2, "value_clip_mode": "mean_only", "policy_kwargs": {"value_head": "categorical"}},
        {"clip_range_vf": 0.2, "value_clip_mode": "per_quantile"},
        {"kl_stop": "fraction", "kl_stop_fraction": 0, "target_kl": 0.01, "kl_penalty": {"kp": 1.0}},
        {"gamma": 1, "gae_lambda": 0, "vf_coef": 0, "learning_rate": 0, "cvar_alpha": 1},
        {"optimizer_class": "adam", "policy_kwargs": {"optimizer_class": torch.optim.Adam}},
        {name: np.int64(8) for name in ("n_steps", "batch_size", "sequence_length", "n_epochs", "seed")},
        {"gamma": np.float32(0.5), "learning_rate": np.float64(1e-3)},
    ],
    ids=lambda part: str(part)[:50],
)
def test_what_is_at_the_bounds_and_agrees_is_accepted(arguments):
    model = small(broken(None), **arguments).learn(48)
    assert weights(model).isfinite().all()


# Shapes of rollouts and minibatches


def test_sequences_longer_than_the_rollout_are_refused():
    with pytest.raises(ValueError, match="sequence_length=13 is longer than the rollout of n_steps=12"):
        small(broken(None), n_steps=12, batch_size=36, sequence_length=13)


def test_sequences_are_for_policies_with_memory():
    with pytest.raises(ValueError, match="sequence_length=4 needs a recurrent policy; MlpPolicy is not"):
        small(broken(None), "MlpPolicy", sequence_length=4)
    small(broken(None), "MlpPolicy", sequence_length=1).learn(24)


# Calls


@pytest.mark.parametrize("total", [-5, np.nan, "1000", None])
def test_learning_takes_a_number_of_steps(total):
    with pytest.raises(ValueError, match=f"Invalid total_timesteps: {re.escape(repr(total))}"):
        small(Broken()).learn(total)


@pytest.mark.parametrize("interval", [0, -1, 1.5])
def test_log_intervals_are_counts(interval):
    with pytest.raises(ValueError, match=f"Invalid log_interval: {interval}"):
        small(Broken()).learn(8, log_interval=interval)


def test_learning_needs_an_environment(tmp_path):
    with pytest.raises(ValueError, match=r"pass env, or _init_setup_model=False and call set_env\(env\)"):
        small(None)
    small(Broken()).save(tmp_path / "agent.zip")
    for model in (
        small(None, _init_setup_model=False),
        DistributionalPPO.load(tmp_path / "agent.zip", device="cpu"),
    ):
        with pytest.raises(ValueError, match=r"no environment to learn from: call set_env\(env\)"):
            model.learn(8)


def test_policies_of_a_class_are_checked_as_those_by_name():
    assert type(small(Broken(), MlpLstmPolicy).policy) is MlpLstmPolicy
    with pytest.raises(TypeError, match="did you mean 'num_quantiles'"):
        small(Broken(), MlpLstmPolicy, policy_kwargs={"num_quantile": 4})


def test_what_gymnasium_returns_from_reset_is_not_an_observation():
    model = DistributionalPPO("MlpPolicy", "CartPole-v1", device="cpu")
    with pytest.raises(ValueError, match="pass the first of the two"):
        model.predict((np.zeros(4, np.float32), {}))


def test_an_extractor_that_nobody_would_use_is_refused():
    kwargs = {"shared_recurrence": True, "share_features_extractor": False}
    with pytest.raises(ValueError, match="share_features_extractor=False has no effect"):
        DistributionalPPO("MlpLstmPolicy", "CartPole-v1", policy_kwargs=kwargs, device="cpu")
