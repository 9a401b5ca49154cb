"""Arguments of the agent that configurations have by other names."""

from __future__ import annotations

import inspect

import pytest
import torch

from driftproof.adversarial import PerturbationConfig, SAPPOConfig
from driftproof.config import Config, build_agent, loads
from driftproof.config.keys import flat_keys
from driftproof.optim import UPGD, UPGDW, AdaptiveUPGD, VarianceGradientScaler
from driftproof.ppo import DistributionalPPO

SMALL = {"n_steps": 32, "batch_size": 32, "n_epochs": 2, "device": "cpu", "policy_kwargs": {"net_arch": [8]}}
CHANGED = {
    "vgs_beta": 0.9,
    "vgs_alpha": 0.3,
    "vgs_eps": 1e-6,
    "vgs_warmup_steps": 1,
    "vgs_min_scaling_factor": 0.2,
    "vgs_variance_cap": 20.0,
    "vgs_statistic": "spatial_mean",
    "vgs_apply_to": "update",
}


def agent(**arguments):
    return DistributionalPPO("MlpPolicy", "CartPole-v1", seed=0, **{**SMALL, **arguments})


def weights(model):
    return torch.cat([part.flatten() for part in model.policy.state_dict().values()])


def test_flat_names_are_those_of_configurations():
    in_files = {name for name, path in flat_keys().items() if path[0] == "vgs" and name.startswith("vgs_")}
    arguments = set(inspect.signature(DistributionalPPO).parameters) - {"vgs_kwargs"}
    assert {name for name in arguments if name.startswith("vgs_")} == in_files
    assert in_files == {f"vgs_{name}" for name in type(Config().vgs).model_fields}
    scaler = set(inspect.signature(VarianceGradientScaler).parameters) - {"parameters", "logger"}
    assert in_files == {f"vgs_{name}" for name in scaler}
    assert set(CHANGED) == in_files - {"vgs_enabled"}


def test_flat_names_fill_vgs_kwargs():
    flat, nested = agent(**CHANGED), agent(vgs_kwargs={name.removeprefix("vgs_"): x for name, x in CHANGED.items()})
    assert flat.vgs_kwargs == nested.vgs_kwargs
    assert flat.settings() == nested.settings()
    for name, value in CHANGED.items():
        assert getattr(flat.vgs, name.removeprefix("vgs_")) == value
    trained = weights(agent(**CHANGED).learn(64))
    assert torch.equal(trained, weights(agent(vgs_kwargs=nested.vgs_kwargs).learn(64)))
    assert not torch.equal(trained, weights(agent().learn(64)))
    mixed = agent(vgs_beta=0.9, vgs_kwargs={"alpha": 0.3, "beta": 0.9})
    assert mixed.vgs_kwargs == {"alpha": 0.3, "beta": 0.9}


@pytest.mark.parametrize("name", sorted(CHANGED))
def test_they_mean_the_same_as_in_a_file(name):
    text = f"env: CartPole-v1\npolicy: MlpPolicy\nrun: {{device: cpu}}\n{name}: {CHANGED[name]}"
    in_file, in_python = build_agent(loads(text)), agent(**{name: CHANGED[name]})
    attribute = name.removeprefix("vgs_")
    assert getattr(in_file.vgs, attribute) == getattr(in_python.vgs, attribute) == CHANGED[name]


def test_they_are_in_files_and_resumed(tmp_path):
    model = agent(**CHANGED, optimizer_class="AdaptiveUPGD").learn(64)
    model.save(tmp_path / "agent")
    loaded = DistributionalPPO.load(tmp_path / "agent")
    assert loaded.settings() == model.settings()
    assert not {name for name in loaded.settings() if name.startswith("vgs_")} - {"vgs_kwargs"}
    assert loaded.vgs.beta == 0.9


def test_switches():
    assert agent().variance_gradient_scaling is True
    for off in ({"vgs_enabled": False}, {"variance_gradient_scaling": False}):
        model = agent(**off)
        assert model.vgs is None
        assert model.settings()["variance_gradient_scaling"] is False
    assert agent(vgs_enabled=True, variance_gradient_scaling=True).vgs is not None


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"vgs_beta": 0.9, "vgs_kwargs": {"beta": 0.8}}, ValueError, r"vgs_beta=0.9 and vgs_kwargs\['beta'\]=0.8"),
        ({"vgs_enabled": False, "variance_gradient_scaling": True}, ValueError, "are the same setting"),
        ({"vgs_enabled": False, "vgs_kwargs": {"enabled": True}}, ValueError, "two values of one setting"),
        ({"vgs_enabled": False, "vgs_beta": 0.9}, ValueError, "variance_gradient_scaling is off"),
        ({"vgs_kwargs": {"enabled": False, "beta": 0.9}}, ValueError, "enabled=False, so nothing else"),
        ({"vgs_enabled": 1}, ValueError, "Invalid vgs_enabled: 1"),
        ({"vgs_beta": 1.5}, ValueError, "Invalid beta: 1.5"),
        ({"vgs_betta": 0.5}, TypeError, "unexpected keyword argument 'vgs_betta'; did you mean 'vgs_beta'?"),
        ({"lerning_rate": 0.1}, TypeError, "'lerning_rate'; did you mean 'learning_rate'?"),
        ({"ent_coef_initial": 0.1}, TypeError, "'ent_coef_initial'; it is ent_coef"),
        ({"twin_critics": True}, TypeError, r"'twin_critics'; it belongs in policy_kwargs: policy_kwargs=\{'twin"),
        ({"sigma": 0.1}, TypeError, "'sigma'; it belongs in optimizer_kwargs"),
        ({"zzz": 0.1}, TypeError, "unexpected keyword argument 'zzz'"),
        (
            {"optimizer_class": "AdaptivUPGD"},
            ValueError,
            "Unknown optimizer 'AdaptivUPGD'; did you mean 'adaptive_upgd'",
        ),
    ],
)
def test_what_is_refused(arguments, kind, message):
    with pytest.raises(kind, match=message):
        agent(**arguments)


@pytest.mark.filterwarnings("ignore:variance gradient scaling shrinks:UserWarning")
@pytest.mark.parametrize(
    ("spelling", "kind", "name"),
    [
        ("AdaptiveUPGD", AdaptiveUPGD, "adaptive_upgd"),
        ("adaptiveupgd", AdaptiveUPGD, "adaptive_upgd"),
        ("ADAPTIVE_UPGD", AdaptiveUPGD, "adaptive_upgd"),
        ("UPGD", UPGD, "upgd"),
        ("UPGDW", UPGDW, "upgdw"),
        ("AdamW", torch.optim.AdamW, "adamw"),
    ],
)
def test_optimizers_in_any_spelling(spelling, kind, name):
    model = agent(optimizer_class=spelling)
    assert type(model.policy.optimizer) is kind
    assert model.settings()["optimizer_class"] == name
    assert loads(f"optimizer_class: {spelling}").optimizer.name == name


def test_files_with_settings_without_effect_are_read(tmp_path):
    """Earlier versions took them."""
    adversarial = SAPPOConfig(perturbation=PerturbationConfig(epsilon=0.2))
    object.__setattr__(adversarial, "epsilon_final", 0.3)
    object.__setattr__(adversarial.perturbation, "random_init", False)
    model = agent(adversarial=adversarial)
    model.optimizer_kwargs["noise_beta"] = 0.9
    model.vgs_kwargs |= {"enabled": False, "beta": 0.5}
    model.save(tmp_path / "agent")
    loaded = DistributionalPPO.load(tmp_path / "agent")
    assert loaded.adversarial == SAPPOConfig(perturbation=PerturbationConfig(epsilon=0.2))
    assert loaded.optimizer_kwargs == {}
    assert loaded.vgs_kwargs == {"enabled": False}
