"""Twin distributional critics through ``learn()``: calibration, independence, caution, clipping, monitoring."""

from __future__ import annotations

import warnings
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
import torch

from driftproof.learner.losses import value_loss
from driftproof.ppo.vector_env import GymnasiumVecEnv

from .scripted import Lottery, StepSpy, agent, learn, plain_gae, scripted

LENGTHS = ([3], [5, 1], [20])


def critic_agent(**arguments):
    """One with several episodes in a rollout, and identifiable rewards."""
    return agent(arguments.pop("env", None) or scripted(*LENGTHS), **arguments)


def set_prediction(critic, quantiles):
    """Let a critic say the same of everything."""
    with torch.no_grad():
        critic.head.linear.weight.zero_()
        critic.head.linear.bias.copy_(torch.tensor(quantiles))


def oppose(model):
    """Let the second critic say the opposite of the first, so that now the one, now the other is smaller."""
    first, second = model.policy.critics
    second.load_state_dict(first.state_dict())
    with torch.no_grad():
        second.head.linear.weight.neg_()


class TestCalibration:
    """Rewards of one-step episodes are their returns; here they are Gumbel's, ``10 + 3 * g``, which are skewed."""

    levels = (np.arange(32) + 0.5) / 32

    @staticmethod
    def draw(generator, count):
        # Evenly spread over the distribution, so that few are enough.
        shares = (generator.permutation(count) + generator.random(count)) / count
        return 10 - 3 * np.log(-np.log(shares))

    @classmethod
    def trained(cls, lr=0.05, **policy_kwargs):
        model = agent(
            Lottery(128, cls.draw),
            n_steps=16,
            batch_size=256,
            n_epochs=4,
            learning_rate=lambda remaining: lr * remaining,
            policy_kwargs={"net_arch": [], **policy_kwargs},
            vf_coef=1.0,
            max_grad_norm=10.0,
        )
        learn(model, 8)
        return model

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls):
        return cls.trained(num_quantiles=32)

    def coverage(self, model):
        quantiles, state = model.predict_quantiles(np.ones((5, 1), np.float32))
        assert quantiles.shape == (2, 5, 32)
        assert state is None
        return self.shares_below(quantiles)

    def shares_below(self, returns):
        return np.exp(-np.exp(-(returns - 10) / 3))

    def test_quantiles_cover_what_they_say(self, model):
        assert np.abs(self.coverage(model) - self.levels).max() < 0.02

    def test_each_output_learns_the_level_that_it_is_for(self, model):
        """Quantiles are sorted for those who ask: levels that are mixed up would not be seen there."""
        predictions, _ = model.policy.predict_distribution(np.ones((1, 1), np.float32))
        returns = model.return_scale.decode(torch.cat(predictions)).numpy()
        assert np.abs(self.shares_below(returns) - self.levels).max() < 0.03

    def test_the_mean_of_the_worst_is_theirs(self, model):
        predictions, _ = model.policy.predict_distribution(np.ones((1, 1), np.float32))
        returns = np.sort(self.draw(np.random.default_rng(1), 100_000))
        for alpha in (0.1, 0.25, 0.5, 1.0):
            worst = returns[: int(alpha * len(returns))].mean()
            for head, prediction in zip(model.policy.heads, predictions, strict=True):
                assert model.return_scale.decode(head.cvar(prediction, alpha)).item() == pytest.approx(worst, rel=0.05)

    def test_a_large_kappa_would_be_noticed(self):
        model = self.trained(num_quantiles=32, huber_kappa=1.0)
        assert np.abs(self.coverage(model) - self.levels).max() > 0.05

    def test_a_categorical_head_learns_mean_and_spread(self):
        model = self.trained(lr=0.3, value_head="categorical", num_atoms=51, v_min=-4.0, v_max=8.0)
        predictions, _ = model.policy.predict_distribution(np.ones((1, 1), np.float32))
        returns = self.draw(np.random.default_rng(1), 100_000)
        for head, prediction in zip(model.policy.heads, predictions, strict=True):
            assert model.return_scale.decode(head.mean(prediction)).item() == pytest.approx(returns.mean(), rel=0.03)
            spread = head.std(prediction) * model.return_scale.value.std
            assert spread.item() == pytest.approx(returns.std(), rel=0.1)


class TestTwins:
    def test_a_loss_on_one_leaves_the_other_alone(self, monkeypatch):
        checked = []

        def check(step, batch, _):
            policy = step.policy
            for own, other in ((0, 1), (1, 0)):
                policy.zero_grad(set_to_none=True)
                _, predictions = policy.evaluate(batch.observations, batch.state, batch.segments)
                value_loss(policy.heads[own], predictions[own], batch.targets).mean().backward()
                assert all(p.grad is None for p in policy.critics[other].parameters())
                assert all(p.grad.norm() > 0 for p in policy.critics[own].parameters())
                checked.append(own)

        StepSpy(monkeypatch, before=check)
        learn(critic_agent(policy="MlpLstmPolicy"))
        assert checked == [0, 1]

    def test_they_start_apart_and_share_no_parameter(self):
        first, second = critic_agent().policy.critics
        assert not {id(p) for p in first.parameters()} & {id(p) for p in second.parameters()}

        def weights(critic):
            return [p for p in critic.parameters() if p.dim() == 2]

        assert all(not torch.equal(p, q) for p, q in zip(weights(first), weights(second), strict=True))

    def test_the_loss_is_the_mean_of_theirs(self, monkeypatch):
        spy = StepSpy(monkeypatch)
        (log,) = learn(critic_agent(vf_coef=0.7, ent_coef=0.01, n_epochs=3))
        for facts in spy.facts:
            value = (facts["critic_loss_1"] + facts["critic_loss_2"]) / 2
            expected = facts["policy_loss"] + 0.7 * value - 0.01 * facts["entropy"]
            assert facts["loss"] == pytest.approx(expected, rel=1e-5)
        assert log["train/value_loss"] == pytest.approx((log["critic/loss_1"] + log["critic/loss_2"]) / 2)
        assert log["critic/loss_1"] != pytest.approx(log["critic/loss_2"], rel=1e-3)

    def test_their_gradients_are_those_of_the_mean(self, monkeypatch):
        """Half of what a critic alone would get, times ``vf_coef``."""
        expected, compared = {}, []

        def compute(step, batch, _):
            policy = step.policy
            for i, critic in enumerate(policy.critics):
                _, predictions = policy.evaluate(batch.observations, batch.state, batch.segments)
                loss = value_loss(policy.heads[i], predictions[i], batch.targets).mean()
                alone = torch.autograd.grad(loss, list(critic.parameters()))
                expected[i] = [0.7 / 2 * gradient for gradient in alone]

        def compare(step, *_):
            for i, critic in enumerate(step.policy.critics):
                for p, gradient in zip(critic.parameters(), expected[i], strict=True):
                    torch.testing.assert_close(p.grad, gradient, atol=1e-7, rtol=1e-4)
            compared.append(step)

        StepSpy(monkeypatch, before=compute, after=compare)
        learn(critic_agent(vf_coef=0.7, max_grad_norm=1e6, n_epochs=2))
        assert len(compared) == 2

    def test_one_critic_is_one(self):
        (log,) = learn(critic_agent(policy_kwargs={"twin_critics": False}))
        assert log["train/value_loss"] == log["critic/loss_1"]
        assert "critic/loss_2" not in log
        assert "critic/divergence" not in log
        assert "critic/grad_ratio" not in log
        assert log["critic/warning"] == 0


def advantages_of(monkeypatch, model, updates=1):
    """Those of the minibatches ``[T, N]``, and what the critics said ``[critics, T, N, quantiles]``, decoded."""
    spy, said = StepSpy(monkeypatch), []

    def keep(model):
        rollout, decode = model._rollout, model.return_scale.decode
        said.append(
            {
                "values": [decode(p) for p in rollout.predictions],
                "last": [decode(p) for p in rollout.last_predictions],
                "ends": [decode(p) for p in rollout.bootstraps],
                "rewards": rollout.rewards.copy(),
                "dones": rollout.dones.copy(),
            }
        )

    learn(model, updates, before=keep)
    # One minibatch without memory: [1, T * N] in some order, which the observations tell.
    batch = spy.batches[-1]
    numbers = (batch.observations[0, :, 0] * 1000).round().long()
    step, env = numbers // 10 - (updates - 1) * model.n_steps, numbers % 10
    advantages, targets = torch.zeros(model.n_steps, model.n_envs), torch.zeros(model.n_steps, model.n_envs)
    advantages[step, env], targets[step, env] = batch.advantages[0], batch.targets[0]
    return advantages, targets, said[-1]


def oracle(said, value_of, truncated, gamma=0.9, gae_lambda=0.8):
    """GAE with ``value_of`` each list of predictions, environment by environment."""
    values, last, ends = (value_of(said[name]).double() for name in ("values", "last", "ends"))
    columns = [
        plain_gae(
            said["rewards"][:, n].tolist(),
            values[:, n].tolist(),
            last[n].item(),
            said["dones"][:, n].tolist(),
            (ends[:, n] if truncated else 0 * ends[:, n]).tolist(),
            gamma,
            gae_lambda,
        )
        for n in range(values.shape[1])
    ]
    return torch.tensor(columns, dtype=torch.float64).T


class TestCaution:
    settings: ClassVar = {"gamma": 0.9, "gae_lambda": 0.8, "normalize_advantage": False}

    @pytest.mark.parametrize("truncated", [False, True])
    @pytest.mark.parametrize("updates", [1, 2])
    def test_the_smaller_mean_is_the_value(self, monkeypatch, truncated, updates):
        model = critic_agent(env=scripted(*LENGTHS, truncated=truncated), learning_rate=0.01, **self.settings)
        oppose(model)
        advantages, targets, said = advantages_of(monkeypatch, model, updates)

        def smaller(predictions):
            return torch.minimum(predictions[0].mean(-1), predictions[1].mean(-1))

        first, second = (p.mean(-1) for p in said["values"])
        assert (first < second).any()
        assert (first > second).any()
        expected = oracle(said, smaller, truncated)
        tolerance = 1e-5 * expected.abs().max()
        torch.testing.assert_close(advantages.double(), expected, atol=tolerance, rtol=1e-5)
        if updates == 1:  # Later ones have refreshed the scale since.
            scale = model.return_scale.snapshot
            returns = expected + smaller(said["values"])
            torch.testing.assert_close(targets.double(), (returns - scale.mean) / scale.std, atol=1e-4, rtol=1e-4)

    @pytest.mark.parametrize("cautious", [0, 1])
    def test_whichever_critic_that_is(self, monkeypatch, cautious):
        model = critic_agent(**self.settings)
        set_prediction(model.policy.critics[cautious], [-90.0, -100, -110, -100])
        advantages, _, said = advantages_of(monkeypatch, model)
        expected = oracle(said, lambda predictions: predictions[cautious].mean(-1), False)
        torch.testing.assert_close(advantages.double(), expected, atol=1e-3, rtol=1e-5)
        assert (said["values"][cautious].mean(-1) == -100).all()

    def test_with_cvar_it_is_the_smaller_one_by_that_measure(self, monkeypatch):
        model = critic_agent(cvar_alpha=0.25, **self.settings)
        # The first has the larger mean and the worse tail.
        set_prediction(model.policy.critics[0], [100.0, -50, 100, 100])
        set_prediction(model.policy.critics[1], [11.0, 9, 10, 10])
        advantages, _, said = advantages_of(monkeypatch, model)
        expected = oracle(said, lambda predictions: predictions[0].sort(-1).values[..., 0], False)
        torch.testing.assert_close(advantages.double(), expected, atol=1e-3, rtol=1e-5)

    def test_with_cvar_the_critics_still_learn_what_is_to_be_expected(self, monkeypatch):
        """Targets that were cautious themselves would make critics more cautious with every step back."""
        model = critic_agent(cvar_alpha=0.25, **self.settings)
        set_prediction(model.policy.critics[0], [100.0, -50, 100, 100])
        set_prediction(model.policy.critics[1], [11.0, 9, 10, 10])
        _, targets, said = advantages_of(monkeypatch, model)
        scale = model.return_scale.snapshot
        returns = oracle(said, lambda predictions: predictions[1].mean(-1), False) + 10
        torch.testing.assert_close(targets.double(), (returns - scale.mean) / scale.std, atol=1e-4, rtol=1e-4)

    def test_cvar_counts_quantiles_in_part(self, monkeypatch):
        model = critic_agent(cvar_alpha=0.4, policy_kwargs={"twin_critics": False}, **self.settings)
        advantages, _, said = advantages_of(monkeypatch, model)

        def worst(predictions):
            ordered = predictions[0].sort(-1).values
            return (0.25 * ordered[..., 0] + 0.15 * ordered[..., 1]) / 0.4

        torch.testing.assert_close(advantages.double(), oracle(said, worst, False), atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("clipping", [{}, {"clip_range_vf": 0.1, "value_clip_mode": "per_quantile"}])
def test_targets_are_not_clipped(monkeypatch, clipping):
    """One reward of a million: it is learned from as it is."""
    env = scripted([1], [1], reward=lambda step, index, _: 1e6 if step == 5 and index == 1 else step % 2)
    model = critic_agent(env=env, **clipping)
    spy = StepSpy(monkeypatch)
    learn(model)
    rewards = np.array([[t % 2, t % 2] for t in range(8)], float)
    rewards[5, 1] = 1e6
    (batch,) = spy.batches
    expected = (1e6 - rewards.mean()) / rewards.std()
    assert batch.targets.max().item() == pytest.approx(expected, rel=1e-5)
    assert model.return_scale.value.std.item() == pytest.approx(rewards.std(), rel=1e-5)


def huber(error, kappa=0.1):
    size = np.abs(error)
    return np.where(size <= kappa, 0.5 * error**2, kappa * (size - 0.5 * kappa))


def quantile_loss(prediction, target):
    """Of samples ``[B, N]`` and ``[B]``, per sample: the formula of C1."""
    count = prediction.shape[1]
    losses = np.zeros(len(target))
    for i in range(count):
        error = target - prediction[:, i]
        losses += np.abs((i + 0.5) / count - (error < 0)) * huber(error) / 0.1
    return losses / count


def clipped(prediction, old, mode, delta):
    """A prediction ``[B, N]`` brought within ``delta`` of the old one."""
    if mode == "per_quantile":
        return np.clip(prediction, old - delta, old + delta)
    mean, old_mean = prediction.mean(1, keepdims=True), old.mean(1, keepdims=True)
    new_mean = np.clip(mean, old_mean - delta, old_mean + delta)
    if mode == "mean_only":
        return prediction - mean + new_mean
    std, old_std = prediction.std(1, keepdims=True), old.std(1, keepdims=True)
    return new_mean + (prediction - mean) * np.clip(std, old_std - delta, old_std + delta) / (std + 1e-8)


class TestClipping:
    @pytest.mark.parametrize("mode", [None, "mean_only", "mean_and_variance", "per_quantile"])
    @pytest.mark.parametrize("updates", [1, 2])
    def test_is_per_critic_against_its_own_past_and_the_worse_of_both_per_sample(self, monkeypatch, mode, updates):
        """With ``None``: ``clip_range_vf`` is not given, and nothing is clipped."""
        delta, said, expected, active = 0.05, {}, [], []

        @torch.no_grad()
        def predict(step, batch, _):
            _, predictions = step.policy.evaluate(batch.observations, batch.state, batch.segments)
            numbers = tuple((batch.observations[0, :, 0] * 1000).round().long().tolist())
            targets, losses = batch.targets[0].double().numpy(), []
            for i, prediction in enumerate(predictions):
                now = prediction[0].double().numpy()
                # Each sample's first prediction in this update is that of the rollout.
                old = np.array([said.setdefault((number, i), now[row]) for row, number in enumerate(numbers)])
                plain = quantile_loss(now, targets)
                other = plain if mode is None else quantile_loss(clipped(now, old, mode, delta), targets)
                losses.append(np.maximum(plain, other).mean())
                active.append((other > plain).mean())
            expected.append(losses)

        spy = StepSpy(monkeypatch, before=predict)
        arguments = {} if mode is None else {"clip_range_vf": delta, "value_clip_mode": mode}
        # Whole-rollout minibatches: the first is still what the rollout said. Returns are in the hundreds.
        model = critic_agent(n_epochs=6, learning_rate=0.03, max_grad_norm=10.0, **arguments)
        learn(model, updates)
        losses = [[facts["critic_loss_1"], facts["critic_loss_2"]] for facts in spy.facts]
        np.testing.assert_allclose(losses, expected, rtol=1e-4)
        if mode is not None:
            # Some samples are held back by the clip, and some are not.
            assert max(active) > 0.1
            assert min(active[2:]) < 1
        assert len(losses) == 6 * updates

    def test_without_a_mode_it_is_the_mean(self, monkeypatch):
        results = []
        for arguments in ({}, {"value_clip_mode": "mean_only"}):
            model = critic_agent(n_epochs=4, learning_rate=0.03, clip_range_vf=0.05, **arguments)
            results.append(learn(model)[0]["train/value_loss"])
        assert results[0] == results[1]
        unclipped = learn(critic_agent(n_epochs=4, learning_rate=0.03))[0]["train/value_loss"]
        assert unclipped != results[0]


class TestMonitoring:
    def test_equals_the_formulas(self, monkeypatch):
        norms, said = [], {}

        def keep_norms(step, *_):
            # Nothing is scaled or clipped: these are the raw gradients.
            norms.append(
                [sum(p.grad.double().square().sum() for p in c.parameters()) ** 0.5 for c in step.policy.critics]
            )

        def keep_said(model):
            decode = model.return_scale.decode
            said["values"] = [decode(p.mean(-1)).double().numpy().ravel() for p in model._rollout.predictions]
            said["std"] = model.return_scale.snapshot.std.item()

        spy = StepSpy(monkeypatch, after=keep_norms)
        model = critic_agent(n_epochs=3, batch_size=8, max_grad_norm=1e6, learning_rate=0.01)
        log = learn(model, 2, before=keep_said)[-1]
        steps = len(spy.facts) // 2
        first, second = np.mean(norms[steps:], axis=0)
        assert log["critic/grad_norm_1"] == pytest.approx(first, rel=1e-4)
        assert log["critic/grad_norm_2"] == pytest.approx(second, rel=1e-4)
        assert log["critic/grad_ratio"] == pytest.approx(first / second, rel=1e-4)
        for i in (1, 2):
            losses = [facts[f"critic_loss_{i}"] for facts in spy.facts[steps:]]
            assert log[f"critic/loss_{i}"] == pytest.approx(np.mean(losses), rel=1e-5)
        v1, v2 = said["values"]
        assert log["critic/divergence"] == pytest.approx(np.abs(v1 - v2).mean() / said["std"], rel=1e-4)
        assert log["critic/correlation"] == pytest.approx(np.corrcoef(v1, v2)[0, 1], abs=1e-3)
        assert log["critic/warning"] == 0

    @pytest.mark.parametrize(
        ("factor", "warned"), [(0.0, True), (1e-3, True), (0.1, False), (1.0, False), (10.0, False), (1e3, True)]
    )
    @pytest.mark.parametrize("critic", [0, 1])
    def test_warns_when_a_gradient_vanishes_or_dwarfs_the_other(self, critic, factor, warned):
        model = critic_agent()
        for parameter in model.policy.critics[critic].parameters():
            parameter.register_hook(lambda gradient: gradient * factor)
        (log,) = learn(model)
        assert log["critic/warning"] == float(warned)

    def test_warns_when_a_single_critic_vanishes(self):
        model = critic_agent(policy_kwargs={"twin_critics": False})
        for parameter in model.policy.critics.parameters():
            parameter.register_hook(torch.zeros_like)
        (log,) = learn(model)
        assert log["critic/warning"] == 1

    def test_a_critic_that_says_the_same_of_everything_correlates_with_nothing(self):
        model = critic_agent()
        set_prediction(model.policy.critics[0], [1.0, 2.0, 3.0, 4.0])
        (log,) = learn(model)
        assert log["critic/correlation"] == 0

    @pytest.mark.parametrize("quantiles", [1, 4, 32])
    def test_quantiles_are_means_in_units_of_rewards(self, quantiles):
        expected = []

        def keep_said(model):
            decoded = [model.return_scale.decode(p) for p in model._rollout.predictions]
            profile = torch.stack(decoded).sort(-1).values.double().mean((0, 1, 2)).numpy()
            levels = (np.arange(quantiles) + 0.5) / quantiles
            expected.append([np.interp(level, levels, profile) for level in (0.1, 0.5, 0.9)])

        model = critic_agent(learning_rate=0.01, policy_kwargs={"num_quantiles": quantiles})
        logs = learn(model, 3, before=keep_said)
        told = [[log[f"critic/quantile_p{percent}"] for percent in (10, 50, 90)] for log in logs]
        np.testing.assert_allclose(told, expected, rtol=1e-4, atol=1e-5)
        assert told[2] != told[0]

    def test_quantiles_leave_out_steps_that_are_none(self):
        env = GymnasiumVecEnv(gymnasium.make_vec("CartPole-v1", num_envs=4))
        kept = {}

        def spoil(model):
            junk = torch.from_numpy(~model._rollout.valid)
            assert junk.sum() > 2
            for predictions in model._rollout.predictions:
                predictions[~junk] = torch.tensor([3.0, 1.0, 2.0, 4.0])
                predictions[junk] = torch.nan
            kept["decode"] = [model.return_scale.decode(torch.tensor(x)).item() for x in (1.0, 2.5, 4.0)]

        (log,) = learn(critic_agent(env=env, n_steps=96), before=spoil)
        assert log["critic/quantile_p50"] == pytest.approx(kept["decode"][1])
        assert log["critic/quantile_p10"] == pytest.approx(kept["decode"][0])
        assert log["critic/quantile_p90"] == pytest.approx(kept["decode"][2])


class TestFromOneCriticToTwo:
    def trained(self, optimizer):
        single = critic_agent(
            policy="MlpLstmPolicy",
            optimizer_class=optimizer,
            variance_gradient_scaling=True,
            drift_kit=True,
            policy_kwargs={"twin_critics": False},
            max_grad_norm=1e6,
            learning_rate=0.01,
            n_epochs=3,
        )
        learn(single, 2)
        return single

    def widened(self, single):
        twin = critic_agent(
            policy="MlpLstmPolicy",
            optimizer_class=single.optimizer_class,
            variance_gradient_scaling=True,
            drift_kit=True,
            max_grad_norm=1e6,
            learning_rate=0.01,
        )
        second = {name: p.clone() for name, p in twin.policy.critics[1].state_dict().items()}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            twin.set_parameters(single.get_parameters())
        return twin, second, [str(warning.message) for warning in caught]

    @pytest.mark.parametrize("optimizer", ["adam", "adaptive_upgd"])
    def test_the_first_is_the_old_one_and_the_second_is_new(self, optimizer):
        single = self.trained(optimizer)
        twin, second, messages = self.widened(single)
        assert len(messages) == 1
        assert "one critic" in messages[0]
        loaded = twin.policy.state_dict()
        assert all(torch.equal(value, loaded[name]) for name, value in single.policy.state_dict().items())
        assert all(torch.equal(value, loaded[f"critics.1.{name}"]) for name, value in second.items())
        acted = twin.learner.drift_response.state_dict()["acting"]["policy"]
        assert all(torch.equal(value, acted[f"critics.1.{name}"]) for name, value in second.items())
        assert twin.return_scale.state_dict() == single.return_scale.state_dict()

    @pytest.mark.parametrize(("optimizer", "moment"), [("adam", "exp_avg"), ("adaptive_upgd", "first_moment")])
    def test_the_next_step_goes_on_from_the_old_averages(self, monkeypatch, optimizer, moment):
        single = self.trained(optimizer)
        twin, _, _ = self.widened(single)
        twin.n_epochs = 1  # One step; the old agent's came along.
        gradients = {}

        def keep(step, *_):
            gradients.update({name: p.grad.clone() for name, p in step.policy.named_parameters()})

        StepSpy(monkeypatch, after=keep)  # In its warm-up, the scaler leaves gradients alone.
        old = {name: single.policy.optimizer.state[p] for name, p in single.policy.named_parameters()}
        old_vgs = single.vgs.state_dict()
        learn(twin)
        new_vgs = twin.vgs.state_dict()
        names = [name for name, _ in twin.policy.named_parameters()]
        assert set(names) - set(old) == {name for name in names if name.startswith("critics.1.")}
        for name, parameter in twin.policy.named_parameters():
            state, gradient = twin.policy.optimizer.state[parameter], gradients[name]
            before = old[name][moment] if name in old else torch.zeros_like(parameter)
            torch.testing.assert_close(state[moment], 0.9 * before + 0.1 * gradient)
            assert state["step"] == (old[name]["step"] if name in old else 0) + 1
            before = old_vgs["moments"].get(name, torch.zeros(parameter.numel()))
            torch.testing.assert_close(new_vgs["moments"][name], 0.99 * before + 0.01 * gradient.flatten())
        assert new_vgs["step_count"] == old_vgs["step_count"] + 1 == 7

    def test_training_goes_on(self):
        twin, second, _ = self.widened(self.trained("adaptive_upgd"))
        logs = learn(twin, 3)
        assert all(np.isfinite(value) for log in logs for value in log.values())
        assert all(not torch.equal(p, second[name]) for name, p in twin.policy.critics[1].state_dict().items())


class TestCategorical:
    settings: ClassVar = {"policy_kwargs": {"value_head": "categorical", "num_atoms": 11, "v_min": -1.0, "v_max": 1.5}}

    def test_learns_and_tells_how_many_targets_its_support_does_not_hold(self, monkeypatch):
        spy = StepSpy(monkeypatch)
        model = critic_agent(n_epochs=4, learning_rate=0.01, **self.settings)
        logs = learn(model, 2)
        targets = spy.batches[-1].targets
        outside = ((targets < -1) | (targets > 1.5)).float().mean().item()
        assert 0.05 < outside < 0.95
        assert logs[-1]["critic/saturated"] == pytest.approx(outside)
        losses = [facts["critic_loss_1"] for facts in spy.facts[:4]]
        assert losses == sorted(losses, reverse=True)

    def test_loss_is_the_cross_entropy_of_projected_targets(self, monkeypatch):
        expected = []

        @torch.no_grad()
        def predict(step, batch, _):
            _, predictions = step.policy.evaluate(batch.observations, batch.state, batch.segments)
            for prediction in predictions:
                losses = []
                for logits, target in zip(prediction[0].double(), batch.targets[0].tolist(), strict=True):
                    place = (min(max(target, -1.0), 1.5) + 1) / 0.25
                    low = min(int(place), 9)
                    logs = logits.log_softmax(0)
                    losses.append(-(low + 1 - place) * logs[low] - (place - low) * logs[low + 1])
                expected.append(float(sum(losses) / len(losses)))

        spy = StepSpy(monkeypatch, before=predict)
        learn(critic_agent(n_epochs=2, **self.settings))
        losses = [facts[f"critic_loss_{i}"] for facts in spy.facts for i in (1, 2)]
        assert losses == pytest.approx(expected, rel=1e-4)

    def test_steps_that_are_none_do_not_count(self, monkeypatch):
        """Their targets are whatever the critics say, here far outside of the support."""
        spy = StepSpy(monkeypatch)
        env = GymnasiumVecEnv(gymnasium.make_vec("CartPole-v1", num_envs=4))

        def spoil(model):
            junk = torch.from_numpy(~model._rollout.valid)
            assert junk.sum() > 2
            for predictions in model._rollout.predictions:
                predictions[junk] = torch.linspace(-50, 50, 11)

        kwargs = {**self.settings["policy_kwargs"], "v_max": 1.0}
        (log,) = learn(critic_agent(env=env, n_steps=96, policy_kwargs=kwargs), before=spoil)
        (batch,) = spy.batches
        targets = batch.targets[batch.valid > 0]
        outside = ((targets < -1) | (targets > 1)).float().mean().item()
        assert 0.05 < outside < 0.95
        assert log["critic/saturated"] == pytest.approx(outside)

    def test_a_quantile_head_has_nothing_to_saturate(self):
        (log,) = learn(critic_agent())
        assert "critic/saturated" not in log


@pytest.mark.parametrize("policy", ["MlpPolicy", "MlpLstmPolicy"])
@pytest.mark.parametrize("samples", [1, 8, 1024])
def test_predictions_of_a_rollout_do_not_depend_on_how_many_steps_critics_see_at_once(monkeypatch, policy, samples):
    monkeypatch.setattr("driftproof.learner.collector._SAMPLES_PER_PREDICTION", samples)
    model = agent(scripted(*LENGTHS), policy, n_steps=7, batch_size=21)

    def compare(model):
        rollout, state = model._rollout, model.policy.initial_state(3)
        step_policy = model.policy.stepper()
        for step, starts in enumerate(rollout.starts):
            with torch.no_grad():
                forgotten = state.masked(torch.from_numpy(~starts).float().unsqueeze(1))
                _, memory, state, _ = step_policy(rollout.observations[step], forgotten)
                expected = model.policy.predict_returns(memory)
            torch.testing.assert_close([p[step] for p in rollout.predictions], list(expected), rtol=1e-5, atol=1e-6)

    learn(model, before=compare)


def test_hooks_of_the_features_extractor_are_called():
    model = agent(scripted(*LENGTHS), "MlpPolicy")
    seen = []
    model.policy.features_extractor.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    learn(model, 1)
    assert seen
