"""What is wrong with a search is said when it is written down, not when it runs."""

import dataclasses
import re

import pytest

from driftproof.learner.hyperparams import Hyperparameter
from driftproof.pbt import HyperparamConfig, PBTConfig, check_against
from driftproof.ppo import DistributionalPPO, Hyperparameters

LR = HyperparamConfig("learning_rate", 1e-5, 1e-2, is_log_scale=True)


def registry():
    """As an agent's, and small."""
    return Hyperparameters(
        {
            "learning_rate": Hyperparameter(3e-4, {"above": 0}),
            "ent_coef": Hyperparameter(0.02, {"at_least": 0.01}),
            "gae_lambda": Hyperparameter(0.95, {"at_least": 0, "at_most": 1}),
            "n_epochs": Hyperparameter(10, {"at_least": 1}, whole=True),
            "optimizer.sigma": Hyperparameter(1e-3, {"at_least": 0}),
            "vgs.warmup_steps": Hyperparameter(100, {"at_least": 0}, whole=True),
        },
        {"num_atoms": "it is built into the networks"},
    )


def search(*hyperparams, **options):
    return PBTConfig(hyperparams=hyperparams, **options)


def test_defaults_are_those_of_the_contract():
    assert dataclasses.asdict(PBTConfig()) == {
        "population_size": 10,
        "perturbation_interval": 5,
        "hyperparams": (),
        "exploit_method": "truncation",
        "explore_method": "both",
        "truncation_ratio": 0.2,
        "checkpoint_dir": None,
        "metric_name": "mean_reward",
        "metric_mode": "max",
        "ready_percentage": 0.8,
        "min_ready_members": 2,
        "ready_check_max_wait": 10,
        "optimizer_exploit_strategy": "copy",
        "explore_strong": False,
    }
    assert (LR.perturbation_factor, LR.resample_probability, LR.values, LR.is_whole) == (1.2, 0.25, None, False)
    assert not HyperparamConfig("gamma", 0.9, 0.99).is_log_scale


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": ""}, "Invalid name: ''"),
        ({}, "'x' has min_value=None, max_value=None and no values: give both ends"),
        ({"min_value": 1}, "'x' has min_value=1, max_value=None"),
        ({"min_value": 2.0, "max_value": 1.0}, "min_value=2.0 and max_value=1.0: min_value must be below max_value"),
        ({"min_value": 1.0, "max_value": 1.0}, "min_value must be below max_value"),
        ({"min_value": float("nan"), "max_value": 1}, "Invalid min_value of 'x': nan"),
        ({"min_value": 0, "max_value": float("inf")}, "Invalid max_value of 'x': inf"),
        ({"min_value": -1e308, "max_value": 1e308}, "min_value must be below max_value"),
        ({"min_value": 0.0, "max_value": 1.0, "is_log_scale": True}, "needs a min_value > 0"),
        ({"min_value": 1.2, "max_value": 2.8, "is_whole": True}, "fewer than two whole numbers from 1.2 to 2.8"),
        ({"min_value": 0, "max_value": 1, "values": [1, 2]}, "has values and min_value=0, max_value=1"),
        ({"values": [1]}, "two or more, all different"),
        ({"values": [1, 2, 1]}, "two or more, all different"),
        ({"values": "ab"}, "must be a list or tuple"),
        ({"values": [1, [2]]}, r"[2] is not a number"),
        ({"values": [1.0, float("nan")]}, "nan is not finite"),
        ({"values": [1, 2], "is_log_scale": True}, "is_log_scale=True, which needs a range"),
        ({"values": [1, 2], "is_whole": True}, "is_whole=True, which needs a range"),
        ({"min_value": 0, "max_value": 1, "perturbation_factor": 1}, "Invalid perturbation_factor of 'x': 1; "),
        ({"min_value": 0, "max_value": 1, "perturbation_factor": float("inf")}, "Invalid perturbation_factor of 'x'"),
        ({"min_value": 0, "max_value": 1, "resample_probability": 1.5}, "Invalid resample_probability of 'x': 1.5"),
        ({"min_value": 0, "max_value": 1, "resample_probability": -0.1}, "Invalid resample_probability of 'x': -0.1"),
        ({"min_value": 0, "max_value": 1, "is_log_scale": 1}, "Invalid is_log_scale of 'x': 1"),
        ({"min_value": 0, "max_value": 1, "is_whole": "yes"}, "Invalid is_whole of 'x': 'yes'"),
    ],
)
def test_a_wrong_hyperparameter_is_refused(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        HyperparamConfig(**{"name": "x", **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"population_size": 1}, "Invalid population_size: 1; must be a whole number >= 2"),
        ({"population_size": 2.0}, "Invalid population_size: 2.0"),
        ({"perturbation_interval": 0}, "Invalid perturbation_interval: 0"),
        (
            {"exploit_method": "best"},
            "Invalid exploit_method: 'best'; must be one of 'truncation', 'binary_tournament'",
        ),
        ({"explore_method": "none"}, "Unknown explore method 'none'"),
        ({"truncation_ratio": 0}, "Invalid truncation_ratio: 0;"),
        ({"truncation_ratio": 0.6}, "Invalid truncation_ratio: 0.6; must be a finite number > 0 and <= 0.5"),
        ({"checkpoint_dir": 3}, "Invalid checkpoint_dir: 3"),
        ({"metric_name": ""}, "Invalid metric_name: ''"),
        ({"metric_mode": "maximum"}, "Invalid metric_mode: 'maximum'"),
        ({"ready_percentage": 80}, "Invalid ready_percentage: 80; must be a finite number > 0 and <= 1"),
        ({"ready_percentage": 0}, "Invalid ready_percentage: 0"),
        ({"min_ready_members": 0}, "Invalid min_ready_members: 0"),
        ({"min_ready_members": 11}, "Invalid min_ready_members: 11; must be <= population_size, which is 10"),
        ({"ready_check_max_wait": 0}, "Invalid ready_check_max_wait: 0"),
        ({"optimizer_exploit_strategy": "keep"}, "Invalid optimizer_exploit_strategy: 'keep'"),
        ({"explore_strong": 1}, "Invalid explore_strong: 1"),
        ({"hyperparams": {"learning_rate": LR}}, "must be a list of HyperparamConfig"),
        ({"hyperparams": ["learning_rate"]}, "'learning_rate' is not a HyperparamConfig"),
        ({"hyperparams": [LR, LR]}, "'learning_rate' is given more than once"),
        (
            {"hyperparams": [HyperparamConfig("x", values=[1, 2])], "explore_method": "pb2"},
            "needs a hyper-parameter with a range",
        ),
        ({"explore_method": "pb2"}, "needs a hyper-parameter with a range"),
        (
            {"hyperparams": [HyperparamConfig("x", 0.1, 1.0, resample_probability=0.5)], "explore_method": "perturb"},
            "'x': resample_probability=0.5 would have no effect: it needs explore_method 'both'",
        ),
        (
            {"hyperparams": [HyperparamConfig("x", 0.1, 1.0, perturbation_factor=2.0)], "explore_method": "resample"},
            "'x': perturbation_factor=2.0 would have no effect",
        ),
        (
            {"hyperparams": [HyperparamConfig("x", values=[1, 2], perturbation_factor=2.0)]},
            "'x': perturbation_factor=2.0 would have no effect: it needs a range",
        ),
    ],
)
def test_a_wrong_search_is_refused(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        PBTConfig(**arguments)


def test_a_configuration_cannot_change_and_shares_nothing_with_what_it_was_made_of():
    hyperparams, values = [LR], [1, 2]
    config, choice = PBTConfig(hyperparams=hyperparams), HyperparamConfig("x", values=values)
    hyperparams.clear()
    values.append(3)
    assert config.hyperparams == (LR,)
    assert choice.values == (1, 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.population_size = 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        choice.name = "y"


def test_whole_numbers_are_those_between_whole_ends():
    assert HyperparamConfig("n_epochs", 2, 8).is_whole
    assert not HyperparamConfig("clip_range", 0, 1.0).is_whole
    rounded = HyperparamConfig("n_epochs", 1.5, 7.9, is_whole=True)
    assert (rounded.min_value, rounded.max_value) == (2, 7)


# Against an agent


@pytest.mark.parametrize(
    ("hyperparam", "message"),
    [
        (HyperparamConfig("num_atoms", 11, 51), "cannot change while the agent trains: it is built into the networks"),
        (
            HyperparamConfig("learning_rat", 0.1, 1.0),
            "no hyper-parameter 'learning_rat'; did you mean 'learning_rate'?",
        ),
        (HyperparamConfig("sigma", 0.1, 1.0), "did you mean 'optimizer.sigma'?"),
        (HyperparamConfig("zzz", 0.1, 1.0), "there are learning_rate, ent_coef, gae_lambda, n_epochs, optimizer.sigma"),
        (HyperparamConfig("ent_coef", 0.001, 0.1), "'ent_coef': min_value=0.001 cannot be used"),
        (HyperparamConfig("ent_coef", 0.001, 0.1), "must be a finite number >= 0.01"),
        (HyperparamConfig("gae_lambda", 0.5, 1.5), "'gae_lambda': max_value=1.5 cannot be used"),
        (HyperparamConfig("learning_rate", 0.0, 1.5), "'learning_rate': min_value=0.0"),
        (HyperparamConfig("ent_coef", values=[0.05, 0.002]), "'ent_coef': values has 0.002, which cannot be used"),
        (HyperparamConfig("n_epochs", values=[2, 2.5]), "values has 2.5, which cannot be used"),
        (HyperparamConfig("n_epochs", values=["many", "few"]), "values has 'many'"),
        (HyperparamConfig("n_epochs", 1.1, 1.9), "fewer than two whole numbers"),
        (HyperparamConfig("n_epochs", 0.5, 4.5, is_whole=True), None),
        (HyperparamConfig("n_epochs", 0, 4), "'n_epochs': min_value=0 cannot"),
    ],
)
def test_what_the_agent_would_not_do_is_refused(hyperparam, message):
    if message is None:
        check_against(search(hyperparam), registry())
        return
    with pytest.raises(ValueError, match=re.escape(message)):
        check_against(search(hyperparam), registry())


def test_a_range_below_another_bound_is_refused():
    with pytest.raises(ValueError, match=r"smaller values are clipped to 0\.05"):
        check_against(search(HyperparamConfig("ent_coef", 0.02, 0.1)), registry(), lower_bounds={"ent_coef": 0.05})
    check_against(search(HyperparamConfig("ent_coef", 0.05, 0.1)), registry(), lower_bounds={"ent_coef": 0.05})


def test_the_agent_says_what_is_a_whole_number():
    given = search(HyperparamConfig("n_epochs", 1.5, 8.5), HyperparamConfig("gae_lambda", 0, 1))
    epochs, gae_lambda = check_against(given, registry()).hyperparams
    assert (epochs.min_value, epochs.max_value, epochs.is_whole) == (2, 8, True)
    assert (gae_lambda.min_value, gae_lambda.max_value, gae_lambda.is_whole) == (0.0, 1.0, False)
    assert given.hyperparams[0].min_value == 1.5


def test_an_interval_shorter_than_the_warm_up_is_warned_of_with_numbers(recwarn):
    config = search(LR, perturbation_interval=4)
    with pytest.warns(UserWarning, match="perturbation_interval=4 updates are 80 optimizer steps") as caught:
        check_against(config, registry(), steps_per_interval=80)
    assert "fewer than the 100 of variance gradient scaling" in str(caught[0].message)
    assert "perturbation_interval >= 5 " in str(caught[0].message)
    with pytest.warns(UserWarning, match="fewer than the 500 of variance gradient scaling"):
        check_against(config, registry(), steps_per_interval=499, vgs_warmup_steps=500)
    recwarn.clear()
    check_against(config, registry(), steps_per_interval=100)
    check_against(config, registry(), steps_per_interval=10, vgs_warmup_steps=0)
    check_against(config, registry())
    assert not recwarn.list


def test_a_real_agent_says_what_can_be_searched():
    agent = DistributionalPPO("MlpPolicy", "CartPole-v1", device="cpu", ent_coef_min=0.001, ent_coef=0.01)
    names = ["learning_rate", "clip_range", "gae_lambda", "optimizer.sigma", "vgs.alpha"]
    config = search(HyperparamConfig("n_epochs", 2, 9), *(HyperparamConfig(name, 0.01, 0.9) for name in names))
    assert check_against(config, agent.hyperparams) == config
    for name in ("num_quantiles", "lstm_hidden_size", "n_steps", "batch_size", "policy"):
        with pytest.raises(ValueError, match=f"'{name}' cannot be searched"):
            check_against(search(HyperparamConfig(name, 1, 10)), agent.hyperparams)
    with pytest.raises(ValueError, match=r"'ent_coef': min_value=0.0005 .* >= 0.001"):
        check_against(search(HyperparamConfig("ent_coef", 0.0005, 0.1)), agent.hyperparams)
