"""Adversarial training on a CUDA device, without waiting for it."""

from __future__ import annotations

import pytest
import torch
from stable_baselines3.common.env_util import make_vec_env

from driftproof.adversarial import PerturbationConfig, SAPPOConfig, StatePerturbation, evaluate_under_attack
from driftproof.learner import learner
from driftproof.ppo import DistributionalPPO
from tests.gpu import waiting, without_waiting
from tests.helpers import weights

pytestmark = pytest.mark.gpu


def agent(policy="MlpLstmPolicy", **settings):
    return DistributionalPPO(
        policy,
        make_vec_env("Pendulum-v1", 4, seed=0),
        n_steps=32,
        batch_size=64,
        n_epochs=2,
        seed=0,
        device="cuda",
        drift_kit=False,
        adversarial=SAPPOConfig(warmup_updates=1, robust_kl_coef=1.0),
        **settings,
    )


@pytest.mark.parametrize("policy", ["MlpLstmPolicy", "MlpGruPolicy", "MlpPolicy"])
@pytest.mark.parametrize("mixed_precision", [False, True])
def test_is_attacked(policy, mixed_precision):
    model = agent(policy, mixed_precision=mixed_precision).learn(512)
    numbers = model.logger.name_to_value
    assert numbers["adversarial/share"] == 0.5
    assert numbers["adversarial/robust_kl"] > 0
    assert numbers["adversarial/perturbation_norm"] == pytest.approx(0.075, rel=0.05 if mixed_precision else 0.01)
    assert weights(model).isfinite().all()
    # Three updates of four minibatches, actor and critics, 64 / 2 observations.
    counted = {name: value.item() for name, value in model.adversary.attack.statistics().items()}
    assert (counted["attacks"], counted["observations"], counted["gradients"]) == (24, 24 * 32, 24 * 3)


@pytest.mark.parametrize("policy", ["MlpLstmPolicy", "MlpPolicy"])
def test_an_update_waits_for_the_device_once(policy, monkeypatch):
    model = agent(policy)
    model.learn(512)
    train, fetch = model.train, learner.fetch

    def fetching_may_wait(*args):
        with waiting():
            return fetch(*args)

    def training_may_not():
        with without_waiting():
            train()

    monkeypatch.setattr(learner, "fetch", fetching_may_wait)
    model.train = training_may_not
    model.learn(384, reset_num_timesteps=False)


def test_a_file_goes_on(tmp_path):
    model = agent().learn(512)
    model.save(tmp_path / "agent.zip")
    loaded = DistributionalPPO.load(tmp_path / "agent.zip", make_vec_env("Pendulum-v1", 4, seed=0), device="cuda")
    assert torch.equal(loaded.adversary.attack.generator.get_state(), model.adversary.attack.generator.get_state())
    loaded.learn(256, reset_num_timesteps=False)
    assert loaded.adversary.updates == 6
    # Elsewhere the generator is another; everything else is there.
    assert DistributionalPPO.load(tmp_path / "agent.zip", device="cpu").adversary.updates == 4


@pytest.mark.parametrize("method", ["pgd", "fgsm", "sgld"])
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_attacks(method, norm):
    attack = StatePerturbation(PerturbationConfig(attack_method=method, norm_type=norm), device="cuda", seed=0)
    clean = torch.randn(100, 4, device="cuda")
    moved = attack.perturb(clean, lambda x: x.cos().sum()) - clean
    assert (moved.abs().amax(1) if norm == "linf" else moved.norm(dim=1)).max() <= 0.075 + 1e-6


@pytest.mark.parametrize("policy", ["MlpLstmPolicy", "MlpGruPolicy", "MlpPolicy"])
def test_evaluation(policy):
    model = agent(policy).learn(128)
    attacks = ["clean", "random", "mad", "critic", "learned"]
    table = evaluate_under_attack(model, make_vec_env("Pendulum-v1", 2), attacks, [0.1], 2, adversary_steps=64)
    assert len(table.results) == 5
