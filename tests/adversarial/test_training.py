"""Training against an adversary, through ``learn()``: who is attacked, when, how far, and what it does to weights."""

from __future__ import annotations

import math

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from torch import nn

from driftproof.adversarial import PerturbationConfig, SAPPOConfig
from driftproof.adversarial.training import SmoothnessAdversary
from driftproof.learner.step import OptimizerStep
from driftproof.nn.policies import DistributionalPolicy
from driftproof.ppo import DistributionalPPO, TrainingError

from ..ppo import scripted as scripts
from ..ppo.scripted import agent, scripted, small_networks, weights

LENGTHS = ([3], [5, 1], [20])
POLICIES = ["MlpPolicy", "MlpLstmPolicy", "MlpGruPolicy"]


def attacked(policy="MlpPolicy", env=None, perturbation=None, arguments=None, **settings):
    """24 samples in a rollout; three minibatches of 8 steps."""
    adversarial = SAPPOConfig(
        **{"warmup_updates": 0, "perturbation": PerturbationConfig(**(perturbation or {})), **settings}
    )
    arguments = {"batch_size": 8, **(arguments or {})}
    if policy != "MlpPolicy":
        arguments = {"sequence_length": 4, **arguments}
    return agent(env or scripted(*LENGTHS), policy, adversarial=adversarial, **arguments)


def plain(policy="MlpPolicy", **arguments):
    model = attacked(policy, arguments=arguments)
    settings = {**model.settings(), "adversarial": None}
    twin = DistributionalPPO(env=scripted(*LENGTHS), device="cpu", **settings)
    twin.policy.load_state_dict(model.policy.state_dict())
    return twin


def learn(model, *arguments, **options):
    """From the same random numbers, whoever has drawn some before."""
    torch.manual_seed(5)
    return scripts.learn(model, *arguments, **options)


class Watch:
    """Sees every attack: clean and attacked observations, with what they were evaluated."""

    def __init__(self, monkeypatch, model):
        self.calls = []
        perturb = model.adversary.attack.perturb

        def watched(observation, objective, **options):
            result = perturb(observation, objective, **options)
            self.calls.append((observation, result, objective, options))
            return result

        monkeypatch.setattr(model.adversary.attack, "perturb", watched)


class TestSchedule:
    @pytest.mark.parametrize("policy", POLICIES)
    @pytest.mark.parametrize(("ratio", "share"), [(0.5, 0.5), (1.0, 1.0), (0.01, None), (0.0, 0.0)])
    def test_the_share_that_is_attacked(self, monkeypatch, policy, ratio, share):
        model = attacked(policy, adversarial_ratio=ratio)
        watch = Watch(monkeypatch, model)
        logs = learn(model, 2)
        sequences = 8 if policy == "MlpPolicy" else 2
        share = 1 / sequences if share is None else share
        assert [log["adversarial/share"] for log in logs] == pytest.approx([share] * 2)
        for observations, result, _, _ in watch.calls:
            assert observations.shape[1] == round(share * sequences)
            assert (result - observations).abs().amax(-1).min() > 0
        # Actor and critics, in each of three minibatches and two updates.
        assert len(watch.calls) == (12 if share else 0)

    def test_masks_of_episode_starts_instead_of_segments(self, monkeypatch):
        """As recurrent kernels on a GPU take them."""
        logs = []
        for masks in (False, True):
            model = attacked("MlpLstmPolicy", adversarial_ratio=0.5)
            monkeypatch.setattr(model.learner.step, "takes_masks", lambda masks=masks: masks)
            logs.append(learn(model, 2)[-1])
        for name in ("train/loss", "adversarial/robust_kl", "adversarial/value_smoothing"):
            assert logs[0][name] == pytest.approx(logs[1][name], rel=1e-3), name

    @pytest.mark.parametrize(("ratio", "sequences", "count"), [(0.7, 8, 6), (0.5, 3, 2), (0.2, 2, 1), (1.0, 5, 5)])
    def test_the_share_is_rounded_to_the_nearest_sequence(self, ratio, sequences, count):
        adversary = attacked(adversarial_ratio=ratio).adversary
        adversary.begin_update()
        assert adversary.share(sequences) == count

    @pytest.mark.parametrize("policy", POLICIES)
    def test_a_minibatch_of_one_sequence(self, policy):
        """However small the ratio: all of it is attacked."""
        size = 1 if policy == "MlpPolicy" else 4
        model = attacked(policy, adversarial_ratio=1e-3, arguments={"batch_size": size, "n_epochs": 1})
        (log,) = learn(model)
        assert log["adversarial/share"] == 1
        assert log["adversarial/robust_kl"] > 0
        assert model.adversary.attack.statistics()["observations"] == 2 * 24

    def test_warm_up_is_plain(self, monkeypatch):
        model, other = attacked(warmup_updates=2), plain()
        watch, seen = Watch(monkeypatch, model), []
        logs = learn(model, 4, after=lambda model: seen.append((len(watch.calls), weights(model))))
        others = []
        learn(other, 4, after=lambda model: others.append(weights(model)))
        assert [log["adversarial/share"] for log in logs] == [0, 0, 0.5, 0.5]
        assert [log["adversarial/robust_kl"] > 0 for log in logs] == [False, False, True, True]
        assert [calls for calls, _ in seen] == [0, 0, 6, 12]
        assert [torch.equal(a, b) for (_, a), b in zip(seen, others, strict=True)] == [True, True, False, False]

    @pytest.mark.parametrize(
        ("schedule", "final", "expected"),
        [
            ("constant", 0.05, [0.2, 0.2, 0.2, 0.2]),
            ("linear", 0.1, [0.175, 0.15, 0.125, 0.1]),
            ("cosine", 0.1, [0.1 + 0.05 * (1 - math.cos(math.pi * p)) for p in (0.75, 0.5, 0.25, 0.0)]),
            ("linear", 0.6, [0.3, 0.4, 0.5, 0.6]),
        ],
    )
    def test_epsilon_at_each_update(self, monkeypatch, schedule, final, expected):
        model = attacked(
            perturbation={"epsilon": 0.2, "attack_lr": 0.2}, epsilon_schedule=schedule, epsilon_final=final
        )
        watch = Watch(monkeypatch, model)
        logs = learn(model, 4)
        assert [log["adversarial/epsilon"] for log in logs] == pytest.approx(expected, rel=1e-5)
        assert [log["adversarial/perturbation_norm"] for log in logs] == pytest.approx(expected, rel=1e-3)
        farthest = [(after - before).abs().max().item() for before, after, _, _ in watch.calls[::6]]
        assert farthest == pytest.approx(expected, rel=1e-5)
        assert model.hyperparams["adversary.epsilon"] == max(0.2, final if schedule != "constant" else 0)

    def test_a_schedule_starts_from_nothing(self):
        model = attacked(perturbation={"epsilon": 0.0}, epsilon_schedule="linear", epsilon_final=0.4)
        logs = learn(model, 2)
        assert [log["adversarial/epsilon"] for log in logs] == pytest.approx([0.2, 0.4])
        assert logs[-1]["adversarial/perturbation_norm"] > 0


class TestRobustTerm:
    @pytest.mark.parametrize("policy", POLICIES)
    def test_without_a_coefficient_training_is_the_same_to_the_bit(self, policy):
        """Neither gradients nor the random stream of the clean path feel the attack."""
        model, other = attacked(policy, robust_kl_coef=0.0), plain(policy)
        logs, _ = learn(model, 3), learn(other, 3)
        assert logs[-1]["adversarial/robust_kl"] > 0
        assert torch.equal(weights(model), weights(other))

    @pytest.mark.parametrize("method", ["pgd", "sgld"])
    def test_so_is_it_with_all_that_an_agent_has(self, method):
        """An optimizer with noise, scaled gradients and a penalty, each of which would feel what the attack left."""
        arguments = {
            "optimizer_class": "adaptive_upgd",
            "variance_gradient_scaling": True,
            "target_kl": 0.05,
            "kl_penalty": True,
            "n_epochs": 2,
        }
        perturbation = {"attack_method": method}
        model = attacked("MlpLstmPolicy", robust_kl_coef=0.0, perturbation=perturbation, arguments=arguments)
        other = plain("MlpLstmPolicy", **arguments)
        learn(model, 3)
        streams = [torch.get_rng_state()]
        learn(other, 3)
        streams.append(torch.get_rng_state())
        assert model.adversary.attack.statistics()["attacks"] > 0
        assert torch.equal(weights(model), weights(other))
        assert torch.equal(*streams)

    @pytest.mark.parametrize("policy", POLICIES)
    @pytest.mark.parametrize(
        ("settings", "where"),
        [
            ({"attack_value": False}, "actor"),
            ({"attack_policy": False}, "critics"),
            ({}, "both"),
        ],
        ids=["policy", "value", "both"],
    )
    def test_its_gradient_grows_with_the_coefficient(self, monkeypatch, policy, settings, where):
        """From the same weights and the same numbers: the gradient is plain plus coefficient times robust."""
        gradients = {}
        for coefficient in (0.0, 1.0, 2.0):
            model = attacked(policy, robust_kl_coef=coefficient, arguments={"batch_size": 24}, **settings)
            found = []
            monkeypatch.setattr(
                OptimizerStep, "_finish", watched_finish(found, model.policy, OptimizerStep.__dict__["_finish"])
            )
            learn(model)
            monkeypatch.undo()
            gradients[coefficient] = found[0]
        for name, gradient in gradients[0.0].items():
            part = "critics" if "critic" in name else "actor"
            once, twice = gradients[1.0][name] - gradient, gradients[2.0][name] - gradient
            if where in (part, "both") and name != "log_std":
                assert once.norm() > 0, name
                torch.testing.assert_close(twice, 2 * once, atol=1e-5, rtol=1e-3)
            else:
                assert once.abs().max() == 0, name

    def test_it_compares_the_same_observations_clean_and_attacked(self, monkeypatch):
        """The logged divergence is the exact KL between what the policy says of both, by hand."""
        model = attacked(arguments={"batch_size": 24, "learning_rate": 0.0}, attack_value=False)
        watch = Watch(monkeypatch, model)
        (log,) = learn(model)
        clean, seen, _, options = watch.calls[0]
        assert options["is_flat_at_clean"]
        with torch.no_grad():
            p, q = (model.policy.evaluate(o, model.policy.initial_state(12)).parameters for o in (clean, seen))
        kl = torch.distributions.kl_divergence(
            torch.distributions.Categorical(logits=p), torch.distributions.Categorical(logits=q)
        )
        assert log["adversarial/robust_kl"] == pytest.approx(kl.mean().item(), rel=1e-4)

    def test_its_gradient_is_that_of_the_differences_by_hand(self, monkeypatch):
        """Through clean and attacked observations both; the critics' part weighs as much as their loss does."""
        model = attacked(arguments={"batch_size": 24, "vf_coef": 0.3}, robust_kl_coef=2.0)
        model.policy.register_forward_hook(lambda *_: None)  # Gradients by autograd, all the way to the parameters.
        watch, loss = Watch(monkeypatch, model), SmoothnessAdversary.loss

        def watched(self, *arguments):
            term, told = loss(self, *arguments)
            (clean, to_actor, _, _), (_, to_critics, _, _) = watch.calls
            policy, state = model.policy, model.policy.initial_state(12)
            kl = policy.distribution.kl(policy.evaluate_actor(clean, state), policy.evaluate_actor(to_actor, state))
            pairs = zip(*(policy.evaluate_critics(seen, state) for seen in (clean, to_critics)), strict=True)
            squares = torch.stack([(one - other).square().mean() for one, other in pairs])
            expected = 2.0 * (kl.mean() + 0.3 * squares.mean())
            torch.testing.assert_close(term, expected)
            parameters = list(policy.parameters())
            gradients = [torch.autograd.grad(each, parameters, retain_graph=True) for each in (term, expected)]
            torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-4)
            return term, told

        monkeypatch.setattr(SmoothnessAdversary, "loss", watched)
        learn(model)
        assert len(watch.calls) == 2

    @pytest.mark.parametrize("policy", ["MlpLstmPolicy", "MlpGruPolicy"])
    def test_sequences_are_attacked_with_the_state_that_the_agent_had(self, monkeypatch, policy):
        """Stepping one by one through the attacked chunk, from the rollout's memory, gives what the attack saw."""
        model = attacked(policy, arguments={"batch_size": 24, "learning_rate": 0.0}, attack_value=False)
        batches, told = [], []
        loss = SmoothnessAdversary.loss

        def watched(self, batch, clean, vf_coef):
            result = loss(self, batch, clean, vf_coef)
            batches.append(batch)
            told.append(result[1])
            return result

        monkeypatch.setattr(SmoothnessAdversary, "loss", watched)
        watch = Watch(monkeypatch, model)
        starts = []
        learn(model, 2, before=lambda model: starts.append(model._rollout.starts.copy()))
        batch, (clean, seen, objective, _) = batches[-1], watch.calls[-1]
        count = clean.shape[1]
        assert count == 3
        # Observations tell step and environment, and so where episodes start.
        numbers = (clean[..., 0] * 1000).round().long()
        began = torch.from_numpy(starts[-1])[numbers // 10 % 8, numbers % 10]
        assert began[1:].any()
        assert any(part.abs().sum() > 0 for part in batch.state.actor)
        parameters = []
        with torch.no_grad():
            for observations in (clean, seen):
                state, steps = batch.state.rows(slice(count)), []
                step = model.policy.stepper()
                for t in range(4):
                    state = state.masked((~began[t]).float().unsqueeze(1))
                    said, _, state, _ = step(observations[t], state)
                    steps.append(said)
                parameters.append(torch.stack(steps))
            kl = model.policy.distribution.kl(*parameters)
            torch.testing.assert_close(objective(seen), kl, atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(told[-1]["robust_kl"], kl.mean(), atol=1e-6, rtol=1e-4)

    @pytest.mark.parametrize(
        "action_space",
        [
            spaces.Discrete(3),
            spaces.MultiDiscrete([2, 3]),
            spaces.MultiBinary(3),
            spaces.Box(-1, 1, (2,), np.float32),
            "squashed",
        ],
        ids=str,
    )
    def test_every_distribution_of_actions(self, action_space):
        squashed = action_space == "squashed"
        space = spaces.Box(-1, 1, (2,), np.float32) if squashed else action_space
        env = scripted(*LENGTHS, action_space=space, reward=lambda *_: 1)
        model = attacked(env=env, robust_kl_coef=1.0, arguments={"policy_kwargs": {"squash_output": squashed}})
        before = weights(model)
        logs = learn(model, 2)
        assert all(log["adversarial/robust_kl"] > 0 for log in logs)
        assert weights(model).isfinite().all()
        assert not torch.equal(weights(model), before)

    @pytest.mark.parametrize("head", ["quantile", "categorical"])
    @pytest.mark.parametrize("twin", [True, False])
    def test_every_kind_of_critic(self, head, twin):
        kwargs = {"value_head": head, "twin_critics": twin}
        (log,) = learn(attacked("MlpLstmPolicy", arguments={"policy_kwargs": kwargs}))
        assert log["adversarial/value_smoothing"] > 0

    def test_a_gaussian_is_not_made_wider(self, monkeypatch):
        """Acting more at random lowers the divergence, and defends nothing."""
        env = scripted(*LENGTHS, action_space=spaces.Box(-1, 1, (2,), np.float32), reward=lambda *_: 1)
        model = attacked(env=env, robust_kl_coef=100.0, arguments={"n_epochs": 5})
        spread = []
        loss = SmoothnessAdversary.loss

        def watched(self, *arguments):
            term, told = loss(self, *arguments)
            spread.append(torch.autograd.grad(term, self.policy.log_std, retain_graph=True, allow_unused=True)[0])
            return term, told

        monkeypatch.setattr(SmoothnessAdversary, "loss", watched)
        learn(model)
        assert all(gradient is None or not gradient.any() for gradient in spread)

    def test_smoothing_makes_policy_and_critics_smoother(self):
        changes = {}
        for coefficient in (0.0, 30.0):
            model = attacked(
                robust_kl_coef=coefficient,
                perturbation={"epsilon": 0.3, "attack_lr": 0.12},
                arguments={"n_epochs": 10, "learning_rate": 3e-3, "batch_size": 24},
            )
            logs = learn(model, 15)
            changes[coefficient] = logs[-1]["adversarial/robust_kl"], logs[-1]["adversarial/value_smoothing"]
        assert changes[30.0][0] < 0.3 * changes[0.0][0]
        assert changes[30.0][1] < 0.5 * changes[0.0][1]


def watched_finish(found, policy, finish):
    def watched(step, *arguments):
        if not found:
            found.append({name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None})
        return finish(step, *arguments)

    return watched


class Fickle(BaseFeaturesExtractor):
    """Batch normalisation, whose averages move, and dropout, which draws."""

    def __init__(self, space, width=8):
        super().__init__(space, width)
        self.layers = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Tanh())

    def forward(self, observations):
        return self.layers(observations)


class OwnDropout(BaseFeaturesExtractor):
    """Draws in its own way, and has a layer whose norm is found a little better in every pass."""

    def __init__(self, space, width=8):
        super().__init__(space, width)
        self.layer = nn.utils.parametrizations.spectral_norm(nn.Linear(3, width))

    def forward(self, observations):
        return nn.functional.dropout(self.layer(observations), 0.3, self.training)


class TestClean:
    @pytest.mark.parametrize("extractor", [Fickle, OwnDropout])
    def test_layers_that_differ_in_training_feel_nothing(self, extractor):
        """Averages, draws and weights are those of a plain agent, and the term compares like with like."""
        arguments = {"policy_kwargs": {"features_extractor_class": extractor}}
        model, other = attacked(robust_kl_coef=0.0, arguments=arguments), plain(**arguments)
        (log,), _ = learn(model), learn(other)
        for (name, one), two in zip(model.policy.state_dict().items(), other.policy.state_dict().values(), strict=True):
            assert torch.equal(one, two), name
        assert all(module.training for module in model.policy.features_extractor.modules())
        # Within the smallest ball nothing changes, dropout or not.
        tiny = attacked(perturbation={"epsilon": 1e-4, "attack_lr": 1e-4}, arguments=arguments)
        (small,) = learn(tiny)
        for name in ("adversarial/robust_kl", "adversarial/value_smoothing"):
            assert small[name] < 1e-3 * log[name]

    def test_parameter_gradients_are_those_of_the_loss_alone(self, monkeypatch):
        """An attack does not leave anything behind in ``.grad``, also where there was something."""
        model = attacked("MlpLstmPolicy")
        before_and_after = []
        perturb = model.adversary.attack.perturb

        def watched(*arguments, **options):
            parameters = list(model.policy.parameters())
            for p in parameters:
                p.grad = torch.full_like(p, math.pi)
            result = perturb(*arguments, **options)
            before_and_after.append(all((p.grad == math.pi).all() and p.requires_grad for p in parameters))
            return result

        monkeypatch.setattr(model.adversary.attack, "perturb", watched)
        learn(model)
        assert before_and_after == [True] * 6

    @pytest.mark.parametrize("policy", ["MlpPolicy", "MlpLstmPolicy"])
    def test_steps_that_are_none_do_not_count(self, monkeypatch, policy):
        """A vector environment's resets are part of sequences, and of no divergence."""
        settings = SAPPOConfig(warmup_updates=0, adversarial_ratio=1.0, attack_value=False)
        env = gymnasium.make_vec("CartPole-v1", num_envs=2)
        model = agent(env, policy, n_steps=32, batch_size=64, seed=1, adversarial=settings)
        watch, loss, masks, told = Watch(monkeypatch, model), SmoothnessAdversary.loss, [], []

        def watched(self, batch, clean, vf_coef):
            term, numbers = loss(self, batch, clean, vf_coef)
            _, seen, objective, _ = watch.calls[-1]
            # As far as the attack sees, those steps are all the same.
            assert not objective(seen)[batch.valid == 0].any()
            kl = self.policy.distribution.kl(
                clean.parameters, self.policy.evaluate_actor(seen, batch.state, batch.attacked_segments)
            )
            told.append((numbers["robust_kl"].item(), kl[batch.valid == 1].mean().item(), kl.mean().item()))
            masks.append(batch.valid)
            return term, numbers

        monkeypatch.setattr(SmoothnessAdversary, "loss", watched)
        learn(model)
        assert (masks[0] == 0).any()
        logged, expected, with_all = told[0]
        assert logged == pytest.approx(expected, rel=1e-4)
        assert logged != pytest.approx(with_all, rel=1e-3)

    def test_a_minibatch_that_is_not_finite_is_still_skipped(self):
        model = attacked(env=scripted(*LENGTHS, reward=lambda *_: 1e38), arguments={"skip_limit": 2})
        with pytest.raises(TrainingError, match="not finite"):
            learn(model, 3)
        assert weights(model).isfinite().all()


class Mixed(gymnasium.Env):
    """An image, numbers and a choice."""

    observation_space = spaces.Dict(
        {
            "image": spaces.Box(0, 255, (36, 36, 1), np.uint8),
            "numbers": spaces.Box(-1, 1, (2,), np.float32),
            "choice": spaces.Discrete(3),
        }
    )
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.age = 0
        return self.observe(), {}

    def step(self, action):
        self.age += 1
        return self.observe(), float(action), self.age == 7, False, {}

    def observe(self):
        return {
            "image": self.np_random.integers(0, 256, (36, 36, 1), dtype=np.uint8),
            "numbers": self.np_random.uniform(-1, 1, 2).astype(np.float32),
            "choice": int(self.np_random.integers(3)),
        }


class JustImage(gymnasium.ObservationWrapper):
    def __init__(self):
        super().__init__(Mixed())
        self.observation_space = Mixed.observation_space["image"]

    def observation(self, observation):
        return observation["image"]


@pytest.mark.parametrize(
    ("policy", "make"),
    [
        ("CnnPolicy", JustImage),
        ("CnnLstmPolicy", JustImage),
        ("MultiInputPolicy", Mixed),
        ("MultiInputGruPolicy", Mixed),
    ],
)
def test_images_and_dictionaries(policy, make):
    networks = small_networks(policy)
    model = DistributionalPPO(
        policy,
        DummyVecEnv([make] * 2),
        n_steps=8,
        batch_size=16,
        n_epochs=1,
        seed=0,
        device="cpu",
        policy_kwargs=networks,
        adversarial=SAPPOConfig(warmup_updates=0),
    )
    log = learn(model)[-1]
    assert log["adversarial/robust_kl"] > 0
    assert log["adversarial/perturbation_norm"] == pytest.approx(0.075, rel=0.01)


def test_epsilon_is_in_units_of_normalised_observations(monkeypatch):
    """What the environment gave was moved by that many of its own standard deviations."""
    env = VecNormalize(scripted(*LENGTHS), norm_reward=False)
    model = attacked(env=env, perturbation={"epsilon": 0.3, "attack_lr": 0.3})
    watch = Watch(monkeypatch, model)
    learn(model, 3)
    clean, seen, _, _ = watch.calls[-1]
    assert (seen - clean).abs().max() == pytest.approx(0.3, abs=1e-6)
    moved = np.abs(env.unnormalize_obs(seen[0].numpy()) - env.unnormalize_obs(clean[0].numpy())).max(0)
    assert moved == pytest.approx(0.3 * np.sqrt(env.obs_rms.var), rel=0.01)
    assert moved[0] < 0.03


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (True, TypeError, r"adversarial must be None or settings .*SAPPOConfig\(robust_kl_coef=0.1\), not True"),
        (SAPPOConfig, TypeError, "adversarial must be None or settings"),
        ({"robust_kl_coef": 1}, TypeError, "adversarial must be None or settings"),
        (PerturbationConfig(), TypeError, "adversarial must be None or settings"),
    ],
)
def test_settings_of_the_agent_are_checked(wrong, error, message):
    with pytest.raises(error, match=message):
        agent(scripted(*LENGTHS), adversarial=wrong)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"adversarial_ratio": 1.5}, "Invalid adversarial_ratio: 1.5"),
        ({"robust_kl_coef": -1}, "Invalid robust_kl_coef: -1"),
        ({"warmup_updates": -1}, "Invalid warmup_updates: -1"),
        ({"attack_policy": None}, "Invalid attack_policy: None"),
        (
            {"epsilon_schedule": "step"},
            "Invalid epsilon_schedule: 'step'; must be one of 'constant', 'linear', 'cosine'",
        ),
        ({"epsilon_final": 0.2}, "epsilon_final=0.2 would have no effect: it needs epsilon_schedule"),
        (
            {"perturbation": PerturbationConfig(attack_method="fgsm", attack_lr=0.1)},
            "perturbation: attack_lr=0.1 would have no effect",
        ),
        (
            {"perturbation": PerturbationConfig(random_init=False)},
            "perturbation: random_init=False would have no effect",
        ),
        ({"epsilon_final": -0.1}, "Invalid epsilon_final"),
        ({"attack_policy": False, "attack_value": False}, "leave nothing to attack"),
        (
            {"epsilon_schedule": "linear", "epsilon_final": 0.0, "perturbation": PerturbationConfig(epsilon=0)},
            "epsilon and epsilon_final are both 0",
        ),
    ],
    ids=str,
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        SAPPOConfig(**settings)
    with pytest.raises(TypeError, match="must be a PerturbationConfig"):
        SAPPOConfig(perturbation={"epsilon": 0.1})


def test_attacks_are_not_captured():
    with pytest.raises(ValueError, match="cuda_graph=True cannot capture adversarial attacks"):
        attacked(arguments={"cuda_graph": True})


def test_observations_without_a_box_are_refused():
    class Choices(Mixed):
        observation_space = spaces.Discrete(3)

        def observe(self):
            return 1

    with pytest.raises(ValueError, match="it has no Box"):
        DistributionalPPO("MlpPolicy", Choices(), n_steps=8, batch_size=8, adversarial=SAPPOConfig())


def test_the_defaults_are_those_that_users_rely_on():
    assert vars(SAPPOConfig()) == {
        "adversarial_ratio": 0.5,
        "robust_kl_coef": 0.1,
        "warmup_updates": 10,
        "attack_policy": True,
        "attack_value": True,
        "epsilon_schedule": "constant",
        "epsilon_final": 0.05,
        "perturbation": PerturbationConfig(),
    }


def test_the_policy_says_the_same_alone_and_together():
    """``evaluate_actor`` and ``evaluate_critics`` are halves of ``evaluate``."""
    space, actions = spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(2)
    for kwargs in ({}, {"shared_recurrence": True}, {"enable_critic_lstm": False}, {"share_features_extractor": False}):
        policy = DistributionalPolicy(space, actions, lstm_hidden_size=5, **kwargs)
        observation, state = torch.randn(4, 2, 3), policy.initial_state(2)
        both = policy.evaluate(observation, state)
        assert torch.equal(policy.evaluate_actor(observation, state), both.parameters)
        alone = policy.evaluate_critics(observation, state)
        assert all(torch.equal(a, b) for a, b in zip(alone, both.predictions, strict=True))
