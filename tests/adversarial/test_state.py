"""The adversary is part of the agent: saved, loaded, copied, inherited, and its numbers have one owner."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
import torch

from driftproof.adversarial import PerturbationConfig, SAPPOConfig
from driftproof.pbt import HyperparamConfig, PBTConfig
from driftproof.pbt.config import check_against
from driftproof.pbt.member import Trainee
from driftproof.ppo import DistributionalPPO
from driftproof.state import CheckpointError, compare, read, write

from ..ppo.scripted import agent, learn, scripted, weights

LENGTHS = ([3], [5, 1])
CONFIG = SAPPOConfig(
    adversarial_ratio=0.25,
    robust_kl_coef=0.7,
    warmup_updates=1,
    attack_value=False,
    epsilon_schedule="cosine",
    epsilon_final=0.01,
    perturbation=PerturbationConfig(epsilon=0.3, attack_steps=2, norm_type="l2", clip_max=4.0, attack_method="sgld"),
)


def make(config=CONFIG, seed=0, **arguments):
    return agent(scripted(*LENGTHS), adversarial=config, batch_size=8, seed=seed, **arguments)


def test_a_file_holds_settings_and_state(tmp_path):
    model = make()
    learn(model, 3)
    model.save(tmp_path / "agent.zip")
    loaded = DistributionalPPO.load(tmp_path / "agent.zip", scripted(*LENGTHS), device="cpu")
    assert loaded.adversarial == CONFIG
    assert loaded.adversary.updates == 3
    assert not compare(loaded.adversary.state_dict(), model.adversary.state_dict())
    assert loaded.hyperparams["adversary.epsilon"] == 0.3
    assert loaded.hyperparams.current("adversary.epsilon") == model.hyperparams.current("adversary.epsilon")
    assert float(loaded.adversary.epsilon) == float(model.adversary.epsilon)
    # And the next attack is the same.
    clean = torch.zeros(1, 4, 3)
    one, other = (each.adversary.attack.perturb(clean, lambda x: x.cos().sum()) for each in (model, loaded))
    assert torch.equal(one, other)


def test_a_file_is_loaded_where_nobody_imported_this_room(tmp_path):
    make().save(tmp_path / "agent.zip")
    program = (
        "import sys; from driftproof.ppo import DistributionalPPO; assert 'driftproof.adversarial' not in sys.modules; "
        f"agent = DistributionalPPO.load({str(tmp_path / 'agent.zip')!r}, device='cpu'); print(agent.adversarial)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(CONFIG)


@pytest.mark.parametrize(
    "change",
    [
        {"robust_kl_coef": -1.0},
        {"unknown": 1},
        {"$config": "Popen"},
        {"perturbation": {"$config": "PerturbationConfig", "epsilon": "far"}},
    ],
    ids=str,
)
def test_a_file_with_wrong_settings_is_refused(change, tmp_path):
    model = make()
    config = model.config()
    config["settings"]["adversarial"] |= change
    write(tmp_path / "agent.zip", model.state_tree(), config=config)
    with pytest.raises(CheckpointError, match="adversarial"):
        DistributionalPPO.load(tmp_path / "agent.zip")


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_copies_go_on_alike(copied):
    model = make()
    learn(model, 2)
    twin = copied(model)
    assert twin.adversarial == CONFIG
    assert twin.adversary is not model.adversary
    twin.set_env(scripted(*LENGTHS))
    assert not compare(twin.adversary.state_dict(), model.adversary.state_dict())
    learn(model, 1, reset_num_timesteps=False)
    assert twin.adversary.updates == 2


def test_parameters_bring_the_adversary_of_the_donor():
    donor, heir = make(seed=1), make(seed=2)
    learn(donor, 3)
    donor.hyperparams["adversary.robust_kl_coef"] = 0.9
    parameters = donor.get_parameters()
    assert set(parameters["adversary_state"]) == {"updates", "attack"}
    heir.set_parameters(parameters)
    assert heir.adversary.updates == 3
    assert heir.hyperparams["adversary.robust_kl_coef"] == 0.9
    assert float(heir.adversary.coefficient) == pytest.approx(0.9)
    before = copy.deepcopy(parameters["adversary_state"])
    learn(donor, 1, reset_num_timesteps=False)
    assert not compare(parameters["adversary_state"], before)


def test_a_plain_agent_and_an_attacked_one_are_told_apart():
    plain, attacked = make(None), make()
    with pytest.raises(ValueError, match=r"have unknown \['adversary_state'\]"):
        plain.set_parameters(attacked.get_parameters())
    with pytest.raises(ValueError, match=r"the states lack \['adversary_state'\]"):
        attacked.set_parameters(plain.get_parameters())
    with pytest.warns(UserWarning, match="adversar"):
        attacked.set_parameters(plain.get_parameters(), exact_match=False)
    assert torch.equal(weights(plain), weights(attacked))
    assert "adversary" not in plain.state_tree()


def test_a_state_that_does_not_fit_changes_nothing():
    model = make()
    learn(model, 2)
    tree = model.state_tree()
    spoilt = {**tree, "adversary": {**tree["adversary"], "updates": -1}}
    with pytest.raises(ValueError, match="Invalid adversary/updates: -1"):
        model.load_state_tree(spoilt)
    assert not compare(model.state_tree(), tree)


class TestHyperparameters:
    def test_base_times_schedule_is_in_force(self):
        config = SAPPOConfig(warmup_updates=0, epsilon_schedule="linear", epsilon_final=0.0375)
        model = make(config)
        seen = []

        def halve(model):
            seen.append(model.hyperparams.current("adversary.epsilon"))
            model.hyperparams["adversary.epsilon"] = 0.0375

        logs = learn(model, 4, after=halve)
        factors = [0.875, 0.75, 0.625, 0.5]
        expected = [0.075 * factors[0], *(0.0375 * f for f in factors[1:])]
        assert seen == pytest.approx(expected)
        assert [log["adversarial/epsilon"] for log in logs] == pytest.approx(expected, rel=1e-5)
        assert [log["adversarial/perturbation_norm"] <= e * 1.001 for log, e in zip(logs, expected, strict=True)]

    def test_the_coefficient_is_in_force(self):
        models = [make(SAPPOConfig(warmup_updates=0, robust_kl_coef=c)) for c in (0.0, 5.0)]
        models[1].hyperparams["adversary.robust_kl_coef"] = 0.0
        for model in models:
            torch.manual_seed(3)
            learn(model, 2)
        assert torch.equal(weights(models[0]), weights(models[1]))

    def test_one_config_for_many_agents_stays_what_it_is(self):
        config = SAPPOConfig(warmup_updates=0, epsilon_schedule="linear")
        first, second = make(config), make(config)
        first.hyperparams["adversary.epsilon"] = 0.5
        learn(first, 2)
        assert second.hyperparams["adversary.epsilon"] == 0.075
        assert float(second.adversary.epsilon) == pytest.approx(0.075)
        assert config == SAPPOConfig(warmup_updates=0, epsilon_schedule="linear")

    @pytest.mark.parametrize(("name", "value"), [("adversary.epsilon", -0.1), ("adversary.robust_kl_coef", "much")])
    def test_bad_values_are_refused(self, name, value):
        with pytest.raises(ValueError, match=f"Invalid {name}"):
            make().hyperparams[name] = value

    def test_a_plain_agent_has_none(self):
        with pytest.raises(KeyError, match=r"'adversary.epsilon' cannot change.*adversarial training is off"):
            make(None).hyperparams["adversary.epsilon"] = 0.1
        assert "fixed when the agent is constructed" in make().hyperparams.fixed["adversarial"]

    def test_a_population_searches_them(self):
        """A member takes over another's adversary, with a mutated radius that stays in force."""
        search = PBTConfig(
            population_size=2,
            hyperparams=[
                HyperparamConfig("adversary.epsilon", 0.01, 0.2),
                HyperparamConfig("adversary.robust_kl_coef", 0, 1),
            ],
        )
        donor, heir = (Trainee(make(SAPPOConfig(warmup_updates=2), seed=s), total_updates=8) for s in (1, 2))
        check_against(search, donor.agent.hyperparams)
        wrong = PBTConfig(hyperparams=[HyperparamConfig("adversary.epsilon", -1.0, 0.2)])
        with pytest.raises(ValueError, match=r"min_value=-1.*cannot be used"):
            check_against(wrong, donor.agent.hyperparams)
        donor.train(4)
        heir.train(1)
        heir.inherit(donor.agent.get_parameters(), "v2_full_parameters", {"adversary.epsilon": 0.15})
        assert heir.agent.adversary.updates == 4
        heir.train(2)
        assert heir.agent.logger.name_to_value["adversarial/epsilon"] == pytest.approx(0.15)
        assert heir.agent.logger.name_to_value["adversarial/share"] == 0.5


def test_the_tree_names_it(tmp_path):
    model = make()
    learn(model)
    model.save(tmp_path / "agent.zip")
    checkpoint = read(tmp_path / "agent.zip")
    assert checkpoint.tree["adversary"]["updates"] == 1
    assert checkpoint.config["settings"]["adversarial"]["$config"] == "SAPPOConfig"
