"""From set-up over rollouts to other agents: what an agent has stays in force, and what it is given is used."""

from __future__ import annotations

import pytest
import torch
from stable_baselines3.common.callbacks import BaseCallback

from driftproof.ppo import DistributionalPPO

from . import scripted


def agent(policy, **arguments):
    return scripted.agent(scripted.scripted([3, 5], [8, 2]), policy, **arguments)


def test_weights_that_a_callback_loads_before_a_rollout_act_in_it():
    other = agent("MlpLstmPolicy", seed=7)

    class Load(BaseCallback):
        def _on_rollout_start(self):
            self.model.policy.load_state_dict(other.policy.state_dict())

        def _on_step(self):
            return True

    model = agent("MlpLstmPolicy", seed=1)
    said = []

    def check():
        rollout = model._rollout
        zeros = torch.zeros(rollout.steps, rollout.envs)
        orders = [torch.arange(rollout.steps * rollout.envs // rollout.chunk)]
        (batch,) = rollout.minibatches(zeros, zeros, zeros, len(orders[0]), orders, True, False)
        with torch.no_grad():
            said.append((model.policy.evaluate(batch.observations, batch.state, batch.segments), batch))

    model.train = check
    model.learn(model.n_steps * model.n_envs, callback=Load())
    ((evaluation, batch),) = said
    torch.testing.assert_close(evaluation.parameters, batch.parameters, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(evaluation.predictions, batch.predictions, atol=1e-5, rtol=1e-5)


def test_memory_can_be_forgotten_in_the_middle_of_a_rollout():
    model, norms = agent("MlpLstmPolicy"), []

    def callback(local, _):
        if local["n_steps"] == 4:
            model.reset_lstm_states_to_initial()
            norms.append(sum(part.norm() for part in model.state.actor))
        return True

    model.learn(model.n_steps * model.n_envs, callback=callback)
    assert norms == [0]
    assert model._rollout.starts[4].all()


def test_setting_up_again_changes_nothing():
    model = agent("MlpLstmPolicy")
    model.hyperparams["learning_rate"] = 1e-5
    policy = model.policy
    model._setup_model()
    assert model.policy is policy
    assert model.hyperparams["learning_rate"] == 1e-5


def test_learning_needs_networks():
    model = DistributionalPPO("MlpPolicy", "CartPole-v1", _init_setup_model=False)
    with pytest.raises(ValueError, match="_setup_model"):
        model.learn(8)


def test_rollouts_follow_the_settings_of_their_shape():
    model = agent("MlpLstmPolicy")
    model.learn(model.n_steps * model.n_envs)
    model.n_steps *= 2
    model.learn(model.n_steps * model.n_envs)
    assert model._rollout.steps == model.n_steps


def test_loading_refuses_settings_that_it_cannot_change(tmp_path):
    agent("MlpPolicy").save(tmp_path / "agent.zip")
    for name, value in {"gama": 0.5, "kl_stop": None, "optimizer_kwargs": {"sigma": 0.5}}.items():
        with pytest.raises(TypeError, match=f"cannot change {name}"):
            DistributionalPPO.load(tmp_path / "agent.zip", device="cpu", **{name: value})


def test_settings_of_an_optimizer_stay_those_of_the_agent():
    """Only its state travels, and numbers that may change, among the hyper-parameters."""
    donor = agent("MlpPolicy", optimizer_class="adam", optimizer_kwargs={"betas": (0.5, 0.6), "foreach": True})
    model = agent("MlpPolicy", optimizer_class="adam")
    donor.learn(donor.n_steps * donor.n_envs)
    before = {key: value for key, value in model.policy.optimizer.param_groups[0].items() if key != "params"}
    model.set_parameters(donor.get_parameters())
    after = {key: value for key, value in model.policy.optimizer.param_groups[0].items() if key != "params"}
    assert after == {**before, "betas": (0.5, 0.6)}
    assert model.policy.optimizer.state_dict()["state"].keys() == donor.policy.optimizer.state_dict()["state"].keys()


def test_parameters_without_the_optimizer():
    model = agent("MlpPolicy")
    assert set(model.get_parameters()) - set(model.get_parameters(include_optimizer=False)) == {"policy.optimizer"}
