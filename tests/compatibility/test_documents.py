"""Code and configurations as the documents of the earlier system print them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from driftproof.adversarial import PerturbationConfig, StatePerturbation
from driftproof.config import build_agent, loads
from driftproof.optim import AdaptiveUPGD, VarianceGradientScaler
from driftproof.pbt import HyperparamConfig, PBTConfig, PBTScheduler
from driftproof.ppo import DistributionalPPO

VGS_AND_UPGD = """
# distributional_ppo config
variance_gradient_scaling: true
vgs_beta: 0.99
vgs_alpha: 0.1
vgs_warmup_steps: 100

optimizer_class: "adaptive_upgd"
optimizer_kwargs:
  lr: 3e-4
  sigma: 0.001
  adaptive_noise: true      # ✅ RECOMMENDED with VGS
  noise_beta: 0.999
  min_noise_std: 1e-6
"""
PBT = """
# pbt config
population_size: 10
perturbation_interval: 10  # Ensure > vgs_warmup_steps / update_batch_size
"""
SMALL = {"n_steps": 32, "batch_size": 32, "n_epochs": 2, "device": "cpu"}


def agent(seed=0, **arguments):
    networks = {"net_arch": [8], "lstm_hidden_size": 8}
    settings = {"policy_kwargs": networks, "vgs_warmup_steps": 2, **SMALL, **arguments}
    return DistributionalPPO("MlpLstmPolicy", "CartPole-v1", seed=seed, **settings)


def scheduler_of(size=4, seed=0, **settings):
    hyperparams = [
        HyperparamConfig(name="learning_rate", min_value=1e-5, max_value=1e-3, is_log_scale=True),
        HyperparamConfig(name="clip_range", min_value=0.05, max_value=0.3),
    ]
    config = PBTConfig(population_size=size, perturbation_interval=5, hyperparams=hyperparams, **settings)
    return PBTScheduler(config, seed=seed)


class TestConfigurations:
    def test_vgs_and_upgd(self):
        config = loads(VGS_AND_UPGD)
        made = build_agent(config)
        same = DistributionalPPO(
            "MlpLstmPolicy",
            "CartPole-v1",
            variance_gradient_scaling=True,
            vgs_beta=0.99,
            vgs_alpha=0.1,
            vgs_warmup_steps=100,
            optimizer_class="adaptive_upgd",
            optimizer_kwargs={
                "lr": 3e-4,
                "sigma": 0.001,
                "adaptive_noise": True,
                "noise_beta": 0.999,
                "min_noise_std": 1e-6,
            },
            seed=0,
        )
        assert dict(made.hyperparams) == dict(same.hyperparams)
        assert made.policy.optimizer.defaults == same.policy.optimizer.defaults
        assert (made.vgs.beta, made.vgs.alpha, made.vgs.warmup_steps) == (0.99, 0.1, 100)

    def test_population(self):
        config = loads(PBT).pbt
        assert (config.population_size, config.perturbation_interval) == (10, 10)


class TestOptimizerAndScaler:
    def test_arguments_of_adaptive_upgd(self):
        model = torch.nn.Linear(2, 2)
        optimizer = AdaptiveUPGD(
            model.parameters(),
            lr=1e-5,
            sigma=0.001,
            adaptive_noise=False,
            noise_beta=0.999,
            min_noise_std=1e-6,
        )
        assert optimizer.defaults["noise_beta"] == 0.999

    def test_order_of_a_step(self):
        model = torch.nn.Linear(3, 1)
        optimizer = AdaptiveUPGD(model.parameters(), lr=1e-3)
        vgs = VarianceGradientScaler(model.parameters(), enabled=True, beta=0.99, alpha=0.1, warmup_steps=2)
        for _ in range(5):
            loss = model(torch.randn(8, 3)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            vgs.scale_gradients()
            optimizer.step()
            vgs.step()
        assert vgs.step_count == 5
        assert 0 < vgs.get_scaling_factor() <= 1
        again = VarianceGradientScaler(model.parameters(), warmup_steps=2)
        again.load_state_dict(vgs.state_dict())
        assert again.step_count == 5
        assert again.get_normalized_variance() == vgs.get_normalized_variance()
        vgs.reset_statistics()
        assert vgs.step_count == 0

    def test_variance_semantics(self):
        model = torch.nn.Linear(4, 1, bias=False)
        scaler = VarianceGradientScaler(model.parameters())
        for _ in range(10):
            for param in model.parameters():
                param.grad = torch.tensor([[0.5, -0.5, 0.5, -0.5]])  # Anticorrelated
            scaler.update_statistics()
        assert scaler.get_normalized_variance() < 0.01


class TestAgent:
    def test_scaler_state_survives_save_and_load(self, tmp_path):
        model = agent().learn(96)
        before = model.get_parameters()["vgs_state"]
        assert int(before["step_count"]) > 0
        model.save(tmp_path / "model")
        loaded = DistributionalPPO.load(tmp_path / "model", env=model.get_env())
        after = loaded.get_parameters()["vgs_state"]
        assert int(after["step_count"]) == int(before["step_count"])
        loaded.learn(32, reset_num_timesteps=False)
        assert int(loaded.get_parameters()["vgs_state"]["step_count"]) > int(before["step_count"])

    def test_parameters_hold_everything(self):
        model = agent().learn(32)
        params = model.get_parameters(include_optimizer=True)
        assert {"policy", "policy.optimizer", "vgs_state"} <= set(params)
        other = agent(seed=1)
        other.set_parameters(params)
        other.reset_lstm_states_to_initial()
        for name, tensor in other.policy.state_dict().items():
            assert torch.equal(tensor, model.policy.state_dict()[name]), name


class TestScheduler:
    def test_full_parameters_are_exploited(self):
        """The loop that the documents recommend."""
        scheduler = scheduler_of(size=2, truncation_ratio=0.5, ready_percentage=1.0)
        models = [agent(seed=0).learn(96), agent(seed=1).learn(32)]
        steps = []
        for member, model, performance in zip(scheduler.population, models, (0.9, 0.2), strict=True):
            scheduler.update_performance(
                member,
                performance=performance,
                step=100,
                model_parameters=model.get_parameters(),
            )
            steps.append(model.vgs.step_count)
        assert steps[0] != steps[1]
        member, model = scheduler.population[1], models[1]
        new_params, new_hp, fmt = scheduler.exploit_and_explore(member)
        assert fmt == "v2_full_parameters"
        assert set(new_hp) == {"learning_rate", "clip_range"}
        if new_params is not None:
            model.set_parameters(new_params)
        assert model.vgs.step_count == steps[0]
        model.learn(32, reset_num_timesteps=False)

    def test_the_loop_of_the_earlier_system(self, tmp_path):
        scheduler = scheduler_of(checkpoint_dir=tmp_path)
        population = scheduler.initialize_population()
        assert population is scheduler.population is scheduler.members
        assert [member.member_id for member in population] == [0, 1, 2, 3]
        decided = []
        for step in range(1, 11):
            for member in population:
                performance = 0.5 + step * 0.05 + member.member_id * 0.01
                scheduler.update_performance(
                    member, performance, step, model_parameters={"policy": {"param": torch.randn(5, 5)}}
                )
            for member in population:
                if scheduler.should_exploit_and_explore(member):
                    new_state, new_hyperparams, checkpoint_format = scheduler.exploit_and_explore(member)
                    decided.append((step, member.member_id, checkpoint_format))
                    assert new_hyperparams == member.hyperparams
                    assert (new_state is None) == (checkpoint_format is None)
        assert decided == [
            (step, member, "v2_full_parameters" if member == 0 else None) for step in (5, 10) for member in range(4)
        ]
        assert all(member.history for member in population)
        assert all(member.checkpoint_path == str(tmp_path / f"member_000{member.id}.zip") for member in population)

    def test_should_exploit_and_explore(self):
        scheduler = scheduler_of()
        member = scheduler.initialize_population()[0]
        assert not scheduler.should_exploit_and_explore(member)
        member.step = scheduler.config.perturbation_interval
        assert scheduler.should_exploit_and_explore(member)
        member.step = 3
        assert not scheduler.should_exploit_and_explore(member)

    def test_stats(self):
        scheduler = scheduler_of(truncation_ratio=0.25, ready_percentage=1.0)
        empty = scheduler.get_stats()
        assert empty["pbt/population_size"] == 4
        assert empty["pbt/ready_members"] == empty["pbt/mean_performance"] == empty["pbt/exploitation_count"] == 0
        for member, performance in zip(scheduler.population, (1.0, 2.0, 3.0, 6.0), strict=True):
            scheduler.update_performance(member, performance, 5, model_parameters={"policy": {}})
        assert scheduler.exploit_and_explore(scheduler.population[0])[2] == "v2_full_parameters"
        assert scheduler.get_stats() == {
            "pbt/population_size": 4,
            "pbt/ready_members": 4,
            "pbt/mean_performance": 3.0,
            "pbt/std_performance": float(np.std([1, 2, 3, 6])),
            "pbt/min_performance": 1.0,
            "pbt/max_performance": 6.0,
            "pbt/exploitation_count": 1,
            "pbt/exploration_count": 1,
        }
        json.dumps(scheduler.get_stats())

    def test_initial_hyperparams(self):
        scheduler, drawn = scheduler_of(), scheduler_of().initial_hyperparams()
        assert [member.hyperparams for member in scheduler.initialize_population()] == drawn
        given = [{"learning_rate": 1e-4 * (i + 1), "clip_range": 0.1} for i in range(4)]
        population = scheduler.initialize_population(given)
        assert [member.hyperparams for member in population] == scheduler.initial_hyperparams() == given
        resumed = scheduler_of(seed=1)
        resumed.load_state_dict(json.loads(json.dumps(scheduler.state_dict())))
        assert resumed.initial_hyperparams() == given

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda items: items[:2], "initial_hyperparams length: 2; must be population_size, which is 4"),
            (
                lambda items: [*items[:3], {"learning_rate": 1e-4}],
                r"initial_hyperparams\[3\] must have exactly .*missing: 'clip_range'",
            ),
            (
                lambda items: [{**items[0], "gamma": 0.9}, *items[1:]],
                r"initial_hyperparams\[0\] must have exactly .*missing: 'gamma'",
            ),
            (
                lambda items: [{**items[0], "clip_range": 0.9}, *items[1:]],
                r"\[0\]: clip_range=0.9 is outside the search",
            ),
            (
                lambda items: [{**items[0], "clip_range": "x"}, *items[1:]],
                r"\[0\]: clip_range='x' is outside the search",
            ),
        ],
    )
    def test_wrong_initial_hyperparams_change_nothing(self, change, message):
        scheduler = scheduler_of()
        before = scheduler.state_dict()
        with pytest.raises(ValueError, match=message):
            scheduler.initialize_population(change([dict(member.hyperparams) for member in scheduler.members]))
        assert scheduler.state_dict() == before

    def test_a_population_that_trains_is_not_initialised_again(self):
        scheduler = scheduler_of()
        scheduler.update_performance(0, 1.0, 1)
        with pytest.raises(RuntimeError, match="before the first member has reported"):
            scheduler.initialize_population(scheduler.initial_hyperparams())
        assert scheduler.initialize_population() is scheduler.members

    def test_paths_survive_a_resume(self, tmp_path):
        scheduler = scheduler_of(checkpoint_dir=tmp_path)
        scheduler.update_performance(1, 1.0, 1, model_parameters={"policy": {}})
        resumed = scheduler_of(checkpoint_dir=tmp_path)
        resumed.load_state_dict(scheduler.state_dict())
        assert [member.checkpoint_path is not None for member in resumed.members] == [False, True, False, False]
        assert scheduler_of().members[0].checkpoint_path is None

    def test_kinds_of_hyperparameters(self):
        ranged, chosen = HyperparamConfig("lr", 1e-5, 1e-3), HyperparamConfig("n_epochs", values=[2, 4])
        assert (ranged.is_continuous, ranged.is_categorical) == (True, False)
        assert (chosen.is_continuous, chosen.is_categorical) == (False, True)


def test_state_perturbation():
    config = PerturbationConfig(epsilon=0.075, attack_steps=3, attack_lr=0.03, norm_type="linf", attack_method="pgd")
    perturbation = StatePerturbation(config)
    assert perturbation.get_stats() == {"attack_count": 0, "avg_perturbation_norm": 0.0}
    state = torch.randn(6, 4)
    delta = perturbation.generate_perturbation(state, lambda seen: seen.square().sum())
    adversarial_state = state + delta
    assert adversarial_state.shape == state.shape
    assert not delta.requires_grad
    assert 0 < float(delta.abs().max()) <= 0.075 + 1e-6
    stats = perturbation.get_stats()
    assert stats["attack_count"] == 1
    assert stats["avg_perturbation_norm"] == pytest.approx(float(delta.abs().amax(1).mean()), abs=1e-6)
    perturbation.reset_stats()
    assert perturbation.get_stats()["attack_count"] == 0
