"""The agent on a CUDA device: the same numbers as elsewhere, no waiting, graphs and bfloat16."""

from __future__ import annotations

import gymnasium
import pytest
import torch
from stable_baselines3.common.env_util import make_vec_env

from driftproof.learner import learner
from driftproof.learner.graph import capturing
from driftproof.learner.renewal import renew, restart_optimizer
from driftproof.ppo import DistributionalPPO
from tests.gpu import waiting, without_waiting

pytestmark = pytest.mark.gpu

SMALL = {"n_steps": 32, "batch_size": 64, "n_epochs": 2, "seed": 0}


def agent(policy="MlpLstmPolicy", env="CartPole-v1", **settings):
    settings = {**SMALL, "drift_kit": False, **settings}
    return DistributionalPPO(policy, make_vec_env(env, 4, seed=0), device="cuda", **settings)


def weights(model):
    return {name: p.detach().cpu() for name, p in model.policy.named_parameters()}


def assert_same_update(a, b, before):
    """The two have moved in the same way, up to rounding, which Adam amplifies where gradients are nearly zero."""
    moved = torch.cat([(p - before[name]).flatten() for name, p in weights(a).items()])
    apart = torch.cat([(p - weights(b)[name]).flatten() for name, p in weights(a).items()])
    assert moved.norm() > 0
    assert apart.norm() < 0.02 * moved.norm()


def pair_of_agents(**settings):
    """The same twice, one without its graph. Both run cores step by step."""
    eager, graphed = (agent(**settings, cuda_graph=True) for _ in range(2))
    eager.learner.take_step = eager.learner.step
    return eager, graphed


@pytest.mark.parametrize("policy", ["MlpLstmPolicy", "MlpGruPolicy", "MlpPolicy"])
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_learns_on_cuda(policy, env):
    model = agent(policy, env).learn(512)
    assert all(torch.isfinite(p).all() for p in weights(model).values())
    action, _ = model.predict(model.get_env().reset(), deterministic=True)
    assert len(action) == 4


@pytest.mark.parametrize("policy", ["MlpLstmPolicy", "MlpGruPolicy"])
def test_training_pass_equals_the_rollout(policy):
    model = agent(policy, sequence_length=8)
    worst = []
    train = model.train

    def check():
        rollout = model._rollout
        zeros = torch.zeros(rollout.steps, rollout.envs, device="cuda")
        log_probs = model.policy.distribution.log_prob(rollout.parameters, rollout.actions)
        for static in (False, True):
            order = [torch.randperm(16)]
            for batch in rollout.minibatches(log_probs, zeros, zeros, 4, order, True, static):
                with torch.no_grad():
                    parameters, predictions = model.policy.evaluate(
                        batch.observations, batch.state, batch.segments, batch.keep
                    )
                worst.append((parameters - batch.parameters).abs().max().item())
                worst.append((predictions[0] - batch.predictions[0]).abs().max().item())
        train()

    model.train = check
    model.learn(384)
    # Three TF32 products in the kernel of the training pass, float32 ones in the steps of the rollout.
    assert max(worst) < 5e-5


@pytest.mark.parametrize("optimizer", ["adaptive_upgd", "adam", "adamw", "sgd", "upgd", "upgdw"])
def test_graph_equals_eager(optimizer):
    kwargs = {"sigma": 0.0} if "upgd" in optimizer else {}
    settings = {"optimizer_class": optimizer, "optimizer_kwargs": kwargs, "vgs_kwargs": {"warmup_steps": 3}}
    eager, graphed = pair_of_agents(**settings)
    before = weights(eager)
    # One update: later rollouts would differ, as rounding does.
    for model in (eager, graphed):
        torch.manual_seed(0)
        model.learn(128)
    assert_same_update(eager, graphed, before)


@pytest.mark.parametrize("policy", ["MlpLstmPolicy", "MlpPolicy"])
def test_graph_equals_eager_with_gsde(policy):
    settings = {"optimizer_class": "adam", "use_sde": True, "sde_sample_freq": 4, "policy_kwargs": {"log_std_init": -2}}
    eager, graphed = pair_of_agents(policy=policy, env="Pendulum-v1", **settings)
    before = weights(eager)
    for model in (eager, graphed):
        torch.manual_seed(0)
        model.learn(128)
    assert_same_update(eager, graphed, before)


def test_graph_reads_hyperparameters_as_they_change():
    eager, graphed = pair_of_agents(optimizer_class="adam")
    before = weights(eager)
    for model in (eager, graphed):
        torch.manual_seed(0)
        model.learn(128)
        model.hyperparams["learning_rate"] = 1e-3
        model.hyperparams["ent_coef"] = 0.05
        model.hyperparams["vgs.alpha"] = 1.0
        # The same rollout again, with other hyper-parameters.
        model.train()
    assert_same_update(eager, graphed, before)


def test_a_graph_follows_parameters_that_were_set_or_loaded(tmp_path):
    donor = agent(seed=1, cuda_graph=True, optimizer_class="adam").learn(256)
    eager, graphed = pair_of_agents(optimizer_class="adam")
    for model in (eager, graphed):
        torch.manual_seed(0)
        model.learn(128)
        model.set_parameters(donor.get_parameters())
    before = weights(eager)
    for model in (eager, graphed):
        torch.manual_seed(0)
        model.train()
    assert_same_update(eager, graphed, before)

    graphed.save(tmp_path / "agent.dp")
    loaded = DistributionalPPO.load(tmp_path / "agent.dp", env=make_vec_env("CartPole-v1", 4, seed=0), device="cuda")
    assert all(torch.equal(p, weights(graphed)[name]) for name, p in weights(loaded).items())
    loaded.learn(128, reset_num_timesteps=False)
    assert all(torch.isfinite(p).all() for p in weights(loaded).values())


def test_garbage_is_not_collected_during_a_capture():
    """To free a graph would end it."""
    graph, other = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    number = torch.zeros(1, device="cuda")
    with capturing(other):
        number.add_(10)
    with capturing(graph):
        garbage = [other]
        garbage.append(garbage)
        del garbage, other
        assert len([[] for _ in range(100_000)]) == 100_000  # So many that the collector would have looked.
        number.add_(1)
    graph.replay()
    assert number.item() == 1


@pytest.mark.parametrize("use_sde", [False, True])
@pytest.mark.parametrize("cuda_graph", [False, True])
def test_an_update_waits_for_the_device_once(cuda_graph, use_sde, monkeypatch):
    settings = {"target_kl": 0.01, "kl_penalty": True, "clip_range_vf": 0.2, "use_sde": use_sde}
    model = agent(env="Pendulum-v1", cuda_graph=cuda_graph, **settings)
    model.learn(256)
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


def test_a_bad_minibatch_is_masked_on_the_device():
    model = agent(skip_limit=100)
    model.learn(128)
    train = model.train

    def poisoned():
        model._rollout.rewards[0, 0] = float("inf")
        train()

    before = weights(model)
    model.train = poisoned
    model.learn(128, reset_num_timesteps=False)
    for name, value in weights(model).items():
        if "head" not in name or "action" in name:
            assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("cuda_graph", [False, True])
def test_bfloat16_learns(cuda_graph):
    model = agent(mixed_precision=True, cuda_graph=cuda_graph, n_steps=128, batch_size=256, n_epochs=10)
    model.learn(20_000)
    returns = [episode["r"] for episode in model.ep_info_buffer]
    assert sum(returns) / len(returns) > 60
    assert all(p.dtype == torch.float32 for p in model.policy.parameters())


def test_cpu_and_cuda_agree():
    models = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        env = make_vec_env("CartPole-v1", 4, seed=0)
        models.append(DistributionalPPO("MlpLstmPolicy", env, **SMALL, device=device, optimizer_class="sgd"))
    cpu, cuda = models
    cuda.policy.load_state_dict(cpu.policy.state_dict())
    observation = cpu.get_env().reset()
    for _ in range(3):
        a, b = cpu.predict_quantiles(observation)[0], cuda.predict_quantiles(observation)[0]
        assert abs(a - b).max() < 1e-5


def test_images_on_cuda():
    gymnasium.register("Tiny-v0", lambda: _Image())
    model = agent("CnnLstmPolicy", "Tiny-v0")
    model.learn(128)
    assert all(torch.isfinite(p).all() for p in weights(model).values())


class _Image(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 255, (36, 36, 1), dtype="uint8")
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.np_random.integers(0, 255, (36, 36, 1), dtype="uint8"), {}

    def step(self, action):
        self.steps += 1
        return self.np_random.integers(0, 255, (36, 36, 1), dtype="uint8"), 1.0, self.steps > 9, False, {}


@pytest.mark.parametrize("policy", ["MlpLstmPolicy", "MlpPolicy"])
def test_graph_equals_eager_with_the_drift_kit(policy):
    kit = {"drift_kit": True, "init_decay": 0.01, "optimizer_kwargs": {"sigma": 0.0}, "vgs_kwargs": {"warmup_steps": 3}}
    eager, graphed = pair_of_agents(policy=policy, **kit)
    before = weights(eager)
    for model in (eager, graphed):
        torch.manual_seed(0)
        model.learn(128)  # One update: rounding then leads to other actions.
    assert_same_update(eager, graphed, before)


def test_fresh_and_earlier_weights_are_trained_by_the_graph(tmp_path):
    """A response replaces weights, moments and scales under a captured graph, which is captured again."""
    model = agent("MlpPolicy", drift_kit=True, cuda_graph=True).learn(512)
    earlier = model.learner.drift_response._worlds.copy()
    renew(model.learner)
    fresh = weights(model)
    model.learn(256, reset_num_timesteps=False)
    moved = weights(model)
    assert any(not torch.equal(p, fresh[name]) for name, p in moved.items())
    model.learner.drift_response._worlds.put(earlier)
    restart_optimizer(model.learner)
    before = weights(model)
    model.learn(256, reset_num_timesteps=False)
    assert all(torch.isfinite(p).all() for p in weights(model).values())
    assert any(not torch.equal(p, before[name]) for name, p in weights(model).items())
    model.save(tmp_path / "model.zip")
    loaded = DistributionalPPO.load(tmp_path / "model.zip", device="cuda")
    seen = torch.rand(5, 4, device="cuda")
    assert torch.equal(model.policy.predict_values(seen), loaded.policy.predict_values(seen))
