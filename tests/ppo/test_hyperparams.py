"""Hyper-parameters have one owner: what was set is in force, whatever happens in between."""

import contextlib
import copy

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3.common.vec_env import DummyVecEnv

from driftproof.adversarial import SAPPOConfig
from driftproof.optim import UPGD, UPGDW, AdaptiveUPGD
from driftproof.ppo import DistributionalPPO

from .scripted import small_networks


class Coin(gymnasium.Env):
    """Pays for one of two actions."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.age = 0
        return self.observe(), {}

    def step(self, action):
        self.age += 1
        return self.observe(), float(action), self.age == 3, False, {}

    def observe(self):
        return self.np_random.uniform(-1, 1, 2).astype(np.float32)


UPDATE = 8
"""Steps of an update."""


def small(policy="MlpPolicy", **kwargs):
    kwargs = {"n_steps": 4, "batch_size": 4, "n_epochs": 2, "seed": 0, "device": "cpu", **kwargs}
    networks = small_networks(policy, kwargs.pop("policy_kwargs", {}), units=4, width=4, quantiles=2)
    return DistributionalPPO(policy, DummyVecEnv([Coin] * 2), policy_kwargs=networks, **kwargs)


def learning_rates(model):
    return [group["lr"] for group in model.policy.optimizer.param_groups]


def actor(model):
    """Weights that no change of the return scale moves."""
    return torch.nn.utils.parameters_to_vector(model.policy.actor_network.parameters()).detach().clone()


# The mapping


def test_everything_that_may_change_is_listed_with_what_was_given():
    model = small(
        learning_rate=1e-3,
        gamma=0.9,
        optimizer_kwargs={"sigma": 0.01},
        vgs_kwargs={"alpha": 0.2},
        target_kl=0.02,
        cvar_alpha=0.5,
        clip_range_vf=0.3,
    )
    listed = dict(model.hyperparams)
    given = {
        "learning_rate": 1e-3,
        "gamma": 0.9,
        "gae_lambda": 0.95,
        "clip_range": 0.2,
        "clip_range_vf": 0.3,
        "ent_coef": 0.0,
        "vf_coef": 0.5,
        "max_grad_norm": 0.5,
        "target_kl": 0.02,
        "n_epochs": 2,
        "cvar_alpha": 0.5,
        "optimizer.sigma": 0.01,
        "optimizer.weight_decay": 1e-3,
        "optimizer.beta_utility": 0.999,
        "optimizer.beta1": 0.9,
        "optimizer.beta2": 0.999,
        "optimizer.eps": 1e-8,
        "optimizer.temperature": 1.0,
        "vgs.alpha": 0.2,
        "vgs.beta": 0.99,
        "vgs.min_scaling_factor": 0.1,
        "vgs.variance_cap": 50.0,
        "vgs.warmup_steps": 100,
    }
    assert given.items() <= listed.items()
    assert "optimizer.lr" not in listed
    assert list(model.hyperparams) == list(listed)
    assert len(model.hyperparams) == len(listed)
    assert "learning_rate" in model.hyperparams
    assert "n_steps" not in model.hyperparams
    assert model.hyperparams.get("n_steps", 7) == 7
    assert repr(model.hyperparams) == f"Hyperparameters({listed})"


def test_what_is_not_there_is_not_listed():
    names = small(variance_gradient_scaling=False, optimizer_class="sgd").hyperparams
    assert not any(name.startswith("vgs.") for name in names)
    assert [name for name in names if name.startswith("optimizer.")] == [
        "optimizer.momentum",
        "optimizer.dampening",
        "optimizer.weight_decay",
    ]
    assert not {"target_kl", "cvar_alpha", "clip_range_vf"} & set(names)
    # UPGD has an entry for momentum in its groups, for torch's schedulers, but no momentum.
    names = small(variance_gradient_scaling=False, optimizer_class="upgd").hyperparams
    assert not {"optimizer.momentum", "optimizer.beta1"} & set(names)


def test_what_has_no_effect_cannot_be_set():
    model = small()
    needed = "adaptive_noise=True, noise_reference='gradient' and instant_noise_scale=False"
    assert model.hyperparams.unused == {
        "optimizer.noise_beta": needed,
        "optimizer.min_noise_std": "adaptive_noise=True",
    }
    with pytest.raises(
        ValueError, match=r"optimizer\.noise_beta=0\.5 would have no effect: it needs adaptive_noise=True"
    ):
        model.hyperparams["optimizer.noise_beta"] = 0.5
    model.hyperparams["optimizer.noise_beta"] = 0.999
    # States of agents in which it was set are taken.
    model.hyperparams.load_state_dict({**model.hyperparams, "optimizer.noise_beta": 0.5})
    assert model.hyperparams["optimizer.noise_beta"] == 0.5
    assert not small(optimizer_class="adam").hyperparams.unused
    unused = small(adversarial=SAPPOConfig(adversarial_ratio=0.0)).hyperparams.unused
    assert unused["adversary.epsilon"] == unused["adversary.robust_kl_coef"] == "an adversarial_ratio above 0"
    off = small(vgs_kwargs={"enabled": False}).hyperparams.unused
    assert off["vgs.beta"] == "vgs_kwargs with enabled=True"


def test_values_are_plain_numbers():
    model = small(gamma=np.float32(0.5), n_epochs=np.int64(3), vf_coef=1)
    model.hyperparams["learning_rate"] = np.float64(1e-4)
    model.hyperparams["n_epochs"] = 2.0
    assert {type(value) for value in model.hyperparams.values()} == {float, int}
    assert type(model.hyperparams["n_epochs"]) is int
    assert type(model.hyperparams.current("n_epochs")) is int
    assert type(learning_rates(model)[0]) is float


def test_names_cannot_be_added_or_removed():
    hyperparams = small().hyperparams
    before = dict(hyperparams)
    with pytest.raises(TypeError, match="'gamma'"):
        del hyperparams["gamma"]
    with pytest.raises(TypeError, match="cannot be removed"):
        hyperparams.clear()
    with pytest.raises(KeyError, match="there is no hyper-parameter 'temperature_of_the_room'"):
        hyperparams["temperature_of_the_room"] = 20
    assert dict(hyperparams) == before


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("learning_rat", "learning_rate"), ("optimiser.sigma", "optimizer.sigma"), ("vgs.alfa", "vgs.alpha")],
)
def test_unknown_names_get_the_nearest_known(wrong, right):
    hyperparams = small().hyperparams
    with pytest.raises(KeyError, match=f"no hyper-parameter '{wrong}'; did you mean '{right}'"):
        hyperparams[wrong]
    with pytest.raises(KeyError, match=f"did you mean '{right}'"):
        hyperparams[wrong] = 0.1
    with pytest.raises(KeyError, match=f"did you mean '{right}'"):
        hyperparams.current(wrong)
    with pytest.raises(KeyError, match="there are learning_rate, n_epochs, gamma"):
        hyperparams["zzz"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("n_steps", "shape of rollouts and minibatches"),
        ("batch_size", "shape of rollouts and minibatches"),
        ("num_atoms", "built into the networks"),
        ("v_min", "built into the networks"),
        ("lstm_hidden_size", "built into the networks"),
        ("net_arch", "built into the networks"),
        ("optimizer_class", "an optimizer cannot load the state of another"),
        ("target_kl", "the agent was constructed without it"),
        ("cvar_alpha", "the agent was constructed without it"),
        ("ent_coef_min", "fixed when the agent is constructed"),
        ("normalize_advantage", "fixed when the agent is constructed"),
    ],
)
def test_what_cannot_change_says_why(name, reason):
    hyperparams = small().hyperparams
    with pytest.raises(KeyError, match=f"'{name}' cannot change while the agent trains: .*{reason}"):
        hyperparams[name] = 1
    assert reason in hyperparams.fixed[name]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", -1e-3),
        ("learning_rate", float("nan")),
        ("learning_rate", "fast"),
        ("learning_rate", lambda progress: progress),
        ("gamma", 1.1),
        ("clip_range", -0.1),
        ("n_epochs", 0),
        ("n_epochs", 1.5),
        ("n_epochs", True),
        ("target_kl", 0),
        ("ent_coef", 0.005),
        ("optimizer.sigma", -1),
        ("optimizer.beta1", 1),
        ("optimizer.eps", 0),
        ("vgs.alpha", -1),
        ("vgs.min_scaling_factor", 0),
        ("vgs.warmup_steps", 2.5),
    ],
    ids=lambda value: "function" if callable(value) else str(value),
)
def test_values_out_of_range_are_refused_and_nothing_changes(name, value):
    # A coefficient below the schedule's minimum would be set, and never be in force.
    model = small(target_kl=0.1, ent_coef=0.1, ent_coef_min=0.01)
    before, groups = dict(model.hyperparams), copy.deepcopy(model.policy.optimizer.state_dict()["param_groups"])
    with pytest.raises(ValueError, match=f"Invalid {name}: "):
        model.hyperparams[name] = value
    with pytest.raises(ValueError, match=f"Invalid {name}: "):
        model.hyperparams.load_state_dict({"gae_lambda": 0.5, name: value})
    assert dict(model.hyperparams) == before
    assert model.policy.optimizer.state_dict()["param_groups"] == groups


# In force


@pytest.mark.parametrize("optimizer", ["adaptive_upgd", "adam", "sgd"])
def test_a_learning_rate_is_in_force_from_when_it_is_set(optimizer):
    model = small(optimizer_class=optimizer, learning_rate=1e-3)
    assert learning_rates(model) == [1e-3]
    model.hyperparams["learning_rate"] = 2e-3
    assert learning_rates(model) == [2e-3]
    model.learn(2 * UPDATE)
    assert learning_rates(model) == [2e-3]
    model.hyperparams["learning_rate"] = 3e-3
    model.learn(2 * UPDATE, reset_num_timesteps=False)
    assert learning_rates(model) == [3e-3]
    assert model.logger.name_to_value["train/learning_rate"] == 3e-3
    model.hyperparams["learning_rate"] = 4e-3
    assert learning_rates(model) == [4e-3]
    # It is not only written down.
    model.hyperparams["learning_rate"] = 0.0
    before = actor(model)
    model.learn(UPDATE)
    assert torch.equal(actor(model), before)
    model.hyperparams["learning_rate"] = 1e-3
    model.learn(UPDATE)
    assert not torch.equal(actor(model), before)


def test_a_learning_rate_can_be_set_while_training():
    model = small(learning_rate=1e-3)
    seen = []

    def set_at_first_step(locals_, _):
        if model.num_timesteps == UPDATE + 2:
            model.hyperparams["learning_rate"] = 5e-3
        seen.append(learning_rates(model)[0])
        return True

    model.learn(3 * UPDATE, set_at_first_step)
    assert seen == [1e-3] * 4 + [5e-3] * 8
    assert learning_rates(model) == [5e-3]


def linear(progress):
    return 1e-3 * progress


class Linear:
    """As an object, which Stable-Baselines3 makes of them."""

    def __call__(self, progress):
        return linear(progress)


@pytest.mark.parametrize("schedule", [linear, Linear()])
def test_a_schedule_multiplies_what_is_set(schedule):
    model = small(learning_rate=schedule)
    seen = []
    assert model.hyperparams["learning_rate"] == pytest.approx(1e-3)
    model.learn(4 * UPDATE, lambda *_: seen.append(learning_rates(model)[0]) or True)
    assert seen[::4] == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3])
    assert learning_rates(model) == [0]
    model.hyperparams["learning_rate"] = 4e-3
    seen.clear()
    model.learn(4 * UPDATE, lambda *_: seen.append(learning_rates(model)[0]) or True)
    assert seen[4::4] == pytest.approx([3e-3, 2e-3, 1e-3])
    assert model.hyperparams["learning_rate"] == 4e-3
    assert model.hyperparams.current("learning_rate") == 0


def test_the_clip_range_follows_its_schedule():
    model = small(clip_range=lambda progress: 0.1 + 0.1 * progress, clip_range_vf=lambda progress: 0.5)
    model.learn(2 * UPDATE)
    log = model.logger.name_to_value
    assert (log["train/clip_range"], log["train/clip_range_vf"]) == pytest.approx((0.1, 0.5))
    model.hyperparams["clip_range"] = 0.4
    model.learn(2 * UPDATE)
    assert model.logger.name_to_value["train/clip_range"] == pytest.approx(0.2)


def test_a_schedule_that_rises_first_is_what_it_says():
    def warm_up(progress):
        return 1e-3 * min(1.0, 2 * (1 - progress) + 0.5)

    model = small(learning_rate=warm_up)
    model.learn(4 * UPDATE)
    assert learning_rates(model) == pytest.approx([1e-3])
    assert small(learning_rate=warm_up).policy.optimizer.param_groups[0]["lr"] == pytest.approx(0.5e-3)


def test_attributes_and_names_are_one():
    model = small(target_kl=0.1, cvar_alpha=0.5, clip_range_vf=0.2)
    names = (
        "learning_rate gamma gae_lambda clip_range clip_range_vf ent_coef vf_coef max_grad_norm target_kl cvar_alpha"
    )
    for name in names.split():
        setattr(model, name, 0.125)
        assert model.hyperparams[name] == 0.125
        model.hyperparams[name] = 0.25
        assert getattr(model, name) == 0.25
        assert name not in vars(model)
    model.n_epochs = 3
    assert model.hyperparams["n_epochs"] == 3
    assert learning_rates(model) == [0.25]
    model.learn(UPDATE)
    assert model._n_updates == 3
    assert learning_rates(model) == [0.25]
    with pytest.raises(ValueError, match="Invalid gamma: 2"):
        model.gamma = 2


def test_a_schedule_may_be_set_while_training():
    model = small(learning_rate=1e-2).learn(UPDATE)
    model.learning_rate = lambda progress: 1e-3 * progress
    model.learn(4 * UPDATE)
    assert model.hyperparams["learning_rate"] == 1e-3
    assert learning_rates(model) == pytest.approx([0.0], abs=1e-12)
    model.learning_rate = lambda progress: 2e-3
    assert learning_rates(model) == [2e-3]
    with pytest.raises(ValueError, match="learning_rate"):
        model.learning_rate = lambda progress: -1.0
    assert learning_rates(model) == [2e-3]


def test_pairs_of_the_optimizer_can_change():
    model = small(optimizer_class="adamw", optimizer_kwargs={"betas": (0.8, 0.9)})
    assert (model.hyperparams["optimizer.beta1"], model.hyperparams["optimizer.beta2"]) == (0.8, 0.9)
    model.hyperparams["optimizer.beta2"] = 0.99
    model.learn(UPDATE)
    assert model.policy.optimizer.param_groups[0]["betas"] == (0.8, 0.99)


def test_attributes_set_before_the_networks_exist_count():
    model = small(_init_setup_model=False)
    model.learning_rate = 5e-4
    model.gamma = 0.5
    model._setup_model()
    assert (model.learning_rate, model.hyperparams["gamma"]) == (5e-4, 0.5)
    assert learning_rates(model) == [5e-4]


def test_options_of_the_optimizer_and_the_scaler_reach_them():
    model = small()
    for name, value in {"optimizer.sigma": 0.1, "optimizer.weight_decay": 0.2, "optimizer.beta1": 0.5}.items():
        model.hyperparams[name] = value
    model.hyperparams["vgs.alpha"] = 0.7
    model.hyperparams["vgs.warmup_steps"] = 3
    model.learn(2 * UPDATE)
    group = model.policy.optimizer.param_groups[0]
    assert (group["sigma"], group["weight_decay"], group["betas"]) == (0.1, 0.2, (0.5, 0.999))
    assert (model.vgs.alpha, model.vgs.warmup_steps) == (0.7, 3)
    # Eight steps: the scaler is past its warm-up.
    assert model.logger.name_to_value["vgs/scaling_factor"] < 1


def test_the_target_of_the_divergence_reaches_stop_and_penalty():
    model = small(target_kl=10.0, kl_penalty=True, learning_rate=0.1)
    model.learn(UPDATE)
    assert model.logger.name_to_value["kl/stopped"] == 0
    model.hyperparams["target_kl"] = 1e-9
    model.learn(UPDATE)
    assert model.logger.name_to_value["kl/stopped"] == 1
    assert model.logger.name_to_value["kl/penalty_coef"] > 0


def test_the_number_of_epochs_is_in_force():
    model = small()
    model.learn(UPDATE)
    assert model.logger.name_to_value["train/optimizer_steps"] == 2 * 2
    model.hyperparams["n_epochs"] = 5
    model.learn(UPDATE)
    assert model.logger.name_to_value["train/optimizer_steps"] == 5 * 2
    assert model._n_updates == 7


# Files and parameters of others


@pytest.mark.parametrize("schedule", [None, linear])
def test_what_was_set_is_in_force_after_loading(schedule, tmp_path):
    model = small(learning_rate=schedule)
    model.hyperparams["learning_rate"] = 8e-3
    model.hyperparams["optimizer.sigma"] = 0.05
    model.learn(2 * UPDATE, lambda *_: model.num_timesteps <= UPDATE)
    with contextlib.nullcontext() if schedule is None else pytest.warns(UserWarning, match="only: learning_rate"):
        model.save(tmp_path / "agent.zip")
    own = {} if schedule is None else {"learning_rate": schedule}
    loaded = DistributionalPPO.load(tmp_path / "agent.zip", model.get_env(), device="cpu", custom_objects=own)
    factor = 1 if schedule is None else 0.5
    for agent in (model, loaded):
        assert dict(agent.hyperparams) == dict(model.hyperparams)
        assert learning_rates(agent) == pytest.approx([8e-3 * factor])
        assert agent.policy.optimizer.param_groups[0]["sigma"] == 0.05
    loaded.learn(4 * UPDATE, lambda *_: loaded.num_timesteps <= UPDATE)
    assert learning_rates(loaded) == pytest.approx([8e-3 * (1 if schedule is None else 0.75)])


def test_parameters_of_another_agent_bring_its_hyperparameters():
    donor, heir = small(learning_rate=7e-3, seed=1).learn(UPDATE), small(learning_rate=1e-3)
    donor.hyperparams["optimizer.sigma"] = 0.03
    heir.set_parameters(donor.get_parameters())
    assert heir.hyperparams["learning_rate"] == 7e-3
    # As in a population: then the mutated values, which stay.
    heir.hyperparams["learning_rate"] = 8e-3
    heir.learn(2 * UPDATE)
    assert learning_rates(heir) == [8e-3]
    assert heir.policy.optimizer.param_groups[0]["sigma"] == 0.03


def test_the_state_of_another_optimizer_does_not_bring_its_learning_rate():
    donor, heir = small(learning_rate=7e-3, optimizer_kwargs={"sigma": 0.5}).learn(UPDATE), small(learning_rate=1e-3)
    parameters = donor.get_parameters()
    del parameters["hyperparams"]
    with pytest.warns(UserWarning, match="hyperparams"):
        heir.set_parameters(parameters, exact_match=False)
    for _ in range(2):
        assert learning_rates(heir) == [1e-3]
        assert heir.policy.optimizer.param_groups[0]["sigma"] == 1e-3
        heir.learn(UPDATE)


@settings(max_examples=12)
@given(
    scheduled=st.booleans(),
    actions=st.lists(
        st.one_of(
            st.tuples(st.sampled_from(["name", "attribute"]), st.floats(0, 0.1)),
            st.tuples(st.sampled_from(["learn", "go on"]), st.integers(1, 3)),
            st.tuples(st.just("swap"), st.floats(0, 0.1)),
        ),
        min_size=2,
        max_size=6,
    ),
)
def test_whatever_happens_the_learning_rate_is_base_times_schedule(scheduled, actions):
    model = small(learning_rate=linear if scheduled else 1e-3, n_epochs=1, batch_size=8)
    base = 1e-3
    for action, value in actions:
        match action:
            case "name":
                model.hyperparams["learning_rate"] = base = value
            case "attribute":
                model.learning_rate = base = value
            case "learn" | "go on":
                model.learn(value * UPDATE, reset_num_timesteps=action == "learn")
            case "swap":
                parameters = model.get_parameters()
                parameters["policy.optimizer"]["param_groups"][0]["lr"] = value
                model.set_parameters(parameters)
        factor = model._current_progress_remaining if scheduled else 1
        assert learning_rates(model) == pytest.approx([base * factor])
        assert model.hyperparams["learning_rate"] == base
        assert model.hyperparams.current("learning_rate") == pytest.approx(base * factor)


# Optimizers


def test_upgd_with_scaled_gradients_warns_once():
    """Not again when it takes its first step."""
    with pytest.warns(UserWarning, match="variance gradient scaling shrinks") as caught:
        model = small(optimizer_class="upgd")
    assert len(caught) == 1
    model.learn(UPDATE)


@pytest.mark.filterwarnings("ignore:variance gradient scaling shrinks:UserWarning")
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("adaptive_upgd", AdaptiveUPGD),
        ("AdaptIve_UPGD", AdaptiveUPGD),
        ("upgd", UPGD),
        ("UPGDW", UPGDW),
        ("adamw", torch.optim.AdamW),
        ("AdamW", torch.optim.AdamW),
        ("ADAM", torch.optim.Adam),
        ("SGD", torch.optim.SGD),
        (torch.optim.RMSprop, torch.optim.RMSprop),
        (UPGDW, UPGDW),
    ],
    ids=str,
)
def test_optimizers_by_name_in_any_case_or_by_class(name, kind):
    model = small(optimizer_class=name, learning_rate=2e-3)
    assert type(model.policy.optimizer) is kind
    before = actor(model)
    model.learn(2 * UPDATE)
    assert not torch.equal(actor(model), before)
    assert actor(model).isfinite().all()
    assert learning_rates(model) == [2e-3]


def test_the_default_optimizer_and_learning_rate():
    model = small()
    assert type(model.policy.optimizer) is AdaptiveUPGD
    assert model.learning_rate == 3e-4


def test_arguments_reach_the_optimizer_and_stay_the_users():
    kwargs = {"lr": 5e-3, "sigma": 0.02, "weight_decay": 0.0, "gate": "minmax"}
    given = dict(kwargs)
    model = small(optimizer_kwargs=kwargs)
    group = model.policy.optimizer.param_groups[0]
    assert (group["sigma"], group["weight_decay"], group["gate"]) == (0.02, 0.0, "minmax")
    assert model.learning_rate == 5e-3
    model.hyperparams["optimizer.sigma"] = 0.5
    model.learn(UPDATE)
    assert learning_rates(model) == [5e-3]
    assert kwargs == given


def test_two_learning_rates_must_agree():
    assert small(learning_rate=1e-4, optimizer_kwargs={"lr": 1e-4}).learning_rate == 1e-4
    with pytest.raises(ValueError, match="two learning rates"):
        small(learning_rate=3e-4, optimizer_kwargs={"lr": 1e-4})
