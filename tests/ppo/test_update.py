"""One update through ``learn()``: advantages, the optimizer step, entropy, KL divergence, and what is not finite."""

from __future__ import annotations

import contextlib
import itertools
import math
import sys

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.torch_layers import FlattenExtractor

from driftproof.learner.step import OptimizerStep
from driftproof.optim import UPGD, UPGDW, AdaptiveUPGD, VarianceGradientScaler
from driftproof.ppo import RolloutError, TrainingError

from .scripted import StepSpy, agent, learn, plain_gae, scripted, weights

LENGTHS = ([3], [5, 1], [20])
BOX = spaces.Box(-1, 1, (2,), np.float32)


def learner(**arguments):
    """24 samples in a rollout; three minibatches of 8 in each epoch."""
    return agent(arguments.pop("env", None) or scripted(*LENGTHS), **{"batch_size": 8, **arguments})


def in_order(batches, name, steps):
    """One epoch's numbers of that name as ``[T, N]``."""
    result = torch.full((steps, len(LENGTHS)), math.nan)
    for batch in batches:
        numbers = (batch.observations[0, :, 0] * 1000).round().long()
        result[numbers // 10 % steps, numbers % 10] = getattr(batch, name)[0]
    return result


class TestAdvantages:
    @pytest.mark.parametrize("truncated", [False, True])
    @pytest.mark.parametrize("normalised", [False, True])
    def test_bootstrap_on_time_limits_alone(self, monkeypatch, truncated, normalised):
        """A reward of 1 in every step: what a time limit cut off is worth something, what terminated is not."""
        spy, said = StepSpy(monkeypatch), []
        env = scripted(*LENGTHS, truncated=truncated, reward=lambda *_: 1)
        model = learner(env=env, gamma=0.9, gae_lambda=0.7, normalize_advantage=normalised, learning_rate=0.0)

        def keep(model):
            rollout = model._rollout
            said.append([torch.minimum(*(p.mean(-1) for p in part)) for part in self.parts(rollout)])

        learn(model, before=keep)
        values, last, ends = said[0]
        assert (ends != 0).any() == truncated
        columns = []
        for n, lengths in enumerate(LENGTHS):
            over, age = [], 0
            cycle = itertools.cycle(lengths)
            length = next(cycle)
            for _ in range(8):
                age += 1
                over.append(age == length)
                if over[-1]:
                    age, length = 0, next(cycle)
            columns.append(
                plain_gae([1.0] * 8, values[:, n].tolist(), last[n].item(), over, ends[:, n].tolist(), 0.9, 0.7)
            )
        expected = torch.tensor(columns).T
        if normalised:
            expected = (expected - expected.mean()) / expected.std()
        torch.testing.assert_close(in_order(spy.batches, "advantages", 8), expected, atol=1e-5, rtol=1e-5)

    def parts(self, rollout):
        return rollout.predictions, rollout.last_predictions, rollout.bootstraps

    def test_the_value_after_a_time_limit_is_that_of_its_last_observation(self):
        """Which is gone when the next episode has begun: the critics see it with the memory that led there."""
        model = learner(env=scripted([3], truncated=True), policy="MlpLstmPolicy", batch_size=8)
        checked = []

        @torch.no_grad()
        def check(model):
            rollout, policy = model._rollout, model.policy
            for end in (2, 5):
                episode = rollout.observations[end - 2 : end + 1]
                # As the environment makes it: the clock goes on, three steps old.
                number = (end + 1) * 10
                last = torch.tensor([[[number / 1000, 0.3, math.sin(1.7 * number)]]])
                _, predictions = policy.evaluate(torch.cat((episode, last)), policy.initial_state(1))
                for room, prediction in zip(rollout.bootstraps, predictions, strict=True):
                    torch.testing.assert_close(room[end, 0], prediction[-1, 0], atol=1e-5, rtol=0)
                    assert not torch.allclose(room[end, 0], rollout.predictions[0][end + 1, 0], atol=1e-3)
                checked.append(end)
            for room in rollout.bootstraps:
                assert (room[[0, 1, 3, 4, 6, 7]] == 0).all()

        learn(model, before=check)
        assert checked == [2, 5]

    def test_are_normalised_once_over_the_rollout(self, monkeypatch):
        spy = StepSpy(monkeypatch)
        learn(learner(n_epochs=2))
        for epoch in (spy.batches[:3], spy.batches[3:]):
            together = torch.cat([batch.advantages.flatten() for batch in epoch])
            assert together.mean().item() == pytest.approx(0, abs=1e-6)
            assert together.std().item() == pytest.approx(1, abs=1e-5)
            assert any(abs(batch.advantages.mean()) > 0.05 for batch in epoch)


def recording(kind):
    """An optimizer that tells what it is given, and where it goes."""
    # Without the hooks, which belong around the recording.
    plain_step = kind.step.__wrapped__ if getattr(kind.step, "hooked", False) else kind.step

    class Recording(kind):
        def step(self, closure=None):
            params = [p for group in self.param_groups for p in group["params"]]
            before = [p.detach().clone() for p in params]
            self.events.append("optimizer")
            self.gradients.append(torch.cat([p.grad.flatten() for p in params]).clone())
            result = plain_step(self, closure)
            self.moves.append(torch.cat([(p.detach() - b).flatten() for p, b in zip(params, before, strict=True)]))
            return result

        events, gradients, moves = [], [], []

    return Recording


class TestOrder:
    """``backward → vgs.measure_gradients → scale and clip → optimizer.step → vgs.step``."""

    def watched(self, monkeypatch, kind=torch.optim.SGD, updates=1, **arguments):
        optimizer = recording(kind)
        events, raw, factors = optimizer.events, [], []
        model = learner(optimizer_class=optimizer, variance_gradient_scaling=True, **arguments)
        for p in model.policy.parameters():
            p.register_hook(lambda gradient: events.append("backward"))
        measure_gradients, step = VarianceGradientScaler.measure_gradients, VarianceGradientScaler.step

        def spy_scale(scaler, proceed=None):
            events.append("scale")
            raw.append(torch.cat([p.grad.flatten() for p in model.policy.parameters()]).clone())
            factors.append(measure_gradients(scaler, proceed).item())
            return torch.tensor(factors[-1])

        def spy_step(scaler, proceed=None):
            events.append("count")
            step(scaler, proceed)

        monkeypatch.setattr(VarianceGradientScaler, "measure_gradients", spy_scale)
        monkeypatch.setattr(VarianceGradientScaler, "step", spy_step)
        log = learn(model, updates)[-1]
        return model, optimizer, raw, factors, log

    def test_is_kept(self, monkeypatch):
        model, optimizer, _, _, _ = self.watched(monkeypatch, n_epochs=2)
        events = [event for event, _ in itertools.groupby(optimizer.events)]
        assert events == ["backward", "scale", "optimizer", "count"] * 6
        assert model.vgs.step_count == 6

    def test_gradients_are_scaled_and_then_clipped(self, monkeypatch):
        arguments = {"max_grad_norm": 0.02, "vgs_kwargs": {"warmup_steps": 2, "alpha": 5.0, "beta": 0.5}}
        _, optimizer, raw, factors, log = self.watched(monkeypatch, n_epochs=3, **arguments)
        assert factors[:2] == [1, 1]
        assert max(factors[3:]) < 0.9
        clipped = 0
        for seen, gradient, factor in zip(optimizer.gradients, raw, factors, strict=True):
            scaled = gradient * factor
            expected = scaled * min(1, 0.02 / scaled.norm())
            torch.testing.assert_close(seen, expected, atol=1e-7, rtol=1e-3)
            assert seen.norm() <= 0.02 * (1 + 1e-5)
            clipped += scaled.norm() > 0.02
        assert clipped > 2
        assert log["train/grad_norm"] == pytest.approx(np.mean([g.norm().item() for g in raw]), rel=1e-4)
        expected = np.mean([factor * g.norm().item() for factor, g in zip(factors, raw, strict=True)])
        assert log["train/scaled_grad_norm"] == pytest.approx(expected, rel=1e-4)

    @pytest.mark.parametrize("max_grad_norm", [1e-6, 1e6])
    def test_the_scaler_measures_raw_gradients(self, monkeypatch, max_grad_norm):
        arguments = {"vgs_kwargs": {"warmup_steps": 1, "alpha": 5.0, "beta": 0.9}, "learning_rate": 0.05}
        model, _, raw, factors, log = self.watched(monkeypatch, max_grad_norm=max_grad_norm, **arguments)
        assert min(factors) < 0.9
        moment, norm, weight = torch.zeros_like(raw[0]), 0.0, 0.0
        for gradient in raw:
            moment = 0.9 * moment + 0.1 * gradient
            norm, weight = 0.9 * norm + 0.1 * gradient.norm().item(), 0.9 * weight + 0.1
        state = model.vgs.state_dict()
        torch.testing.assert_close(torch.cat(list(state["moments"].values())), moment, atol=1e-7, rtol=1e-4)
        assert log["vgs/grad_norm_ema"] == pytest.approx(norm / weight, rel=1e-4)
        assert log["vgs/step_count"] == len(raw) == 3

    @pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, AdaptiveUPGD])
    def test_or_the_step_itself_is_scaled(self, monkeypatch, kind):
        arguments = {
            "n_epochs": 3,
            "learning_rate": 0.01,
            "vgs_kwargs": {"apply_to": "update", "warmup_steps": 2, "alpha": 5.0, "beta": 0.5},
        }
        before = []
        StepSpy(monkeypatch, before=lambda step, *_: before.append(flat(step.policy)))
        model, optimizer, raw, factors, log = self.watched(monkeypatch, kind, **arguments)
        assert max(factors[3:]) < 0.9
        after = [*before[1:], flat(model.policy)]
        for i, factor in enumerate(factors):
            expected = raw[i] * min(1, 0.5 / raw[i].norm())
            torch.testing.assert_close(optimizer.gradients[i], expected, atol=1e-7, rtol=1e-4)
            torch.testing.assert_close(after[i] - before[i], factor * optimizer.moves[i], atol=1e-6, rtol=1e-3)
        assert log["train/scaled_grad_norm"] == log["train/grad_norm"]

    def test_metrics_of_the_scaler(self, monkeypatch):
        """Quantiles are over the last update."""
        arguments = {"n_epochs": 4, "vgs_kwargs": {"warmup_steps": 2, "alpha": 5.0, "beta": 0.5}}
        _, _, _, factors, log = self.watched(monkeypatch, updates=2, **arguments)
        assert log["vgs/scaling_factor"] == pytest.approx(factors[-1], rel=1e-5)
        for percent in (10, 50, 90):
            assert log[f"vgs/scaling_factor_p{percent}"] == pytest.approx(
                np.percentile(factors[12:], percent), rel=1e-4
            )
            assert log[f"vgs/tensor_variance_p{percent}"] > 0
        assert log["vgs/step_count"] == 24
        assert log["vgs/warmup_active"] == 0
        for name in ("grad_norm_ema", "grad_mean_ema", "grad_var_ema", "grad_max_ema", "normalized_variance"):
            assert math.isfinite(log[f"vgs/{name}"])


def flat(policy):
    return torch.nn.utils.parameters_to_vector(policy.parameters()).detach().clone()


class TestOptimizers:
    @pytest.mark.filterwarnings("ignore:variance gradient scaling shrinks:UserWarning")
    @pytest.mark.parametrize(
        ("name", "kind"),
        [
            ("adaptive_upgd", AdaptiveUPGD),
            ("UPGD", UPGD),
            ("upgdw", UPGDW),
            ("AdamW", torch.optim.AdamW),
            ("adam", torch.optim.Adam),
            ("sgd", torch.optim.SGD),
            (torch.optim.RMSprop, torch.optim.RMSprop),
        ],
    )
    def test_any_of_them_trains(self, name, kind):
        model = learner(optimizer_class=name, learning_rate=0.003, variance_gradient_scaling=True)
        before = weights(model)
        logs = learn(model, 2)
        assert type(model.policy.optimizer) is kind
        after = weights(model)
        assert after.isfinite().all()
        assert (after != before).float().mean() > 0.9
        assert [log["train/optimizer_steps"] for log in logs] == [3, 3]

    def test_a_step_is_that_of_the_optimizer_alone(self, monkeypatch):
        """Plain gradient descent, by hand."""
        before = []
        StepSpy(monkeypatch, before=lambda step, *_: before.append(flat(step.policy)))
        gradients = []
        model = learner(optimizer_class="sgd", learning_rate=0.1, max_grad_norm=1e6, batch_size=24)
        learn(model, after=lambda m: gradients.append(torch.cat([p.grad.flatten() for p in m.policy.parameters()])))
        torch.testing.assert_close(weights(model), before[0] - 0.1 * gradients[0])


class TestEntropy:
    def coefficients(self, monkeypatch, updates=4, **arguments):
        """What the loss was computed with in each update, and what was logged."""
        used = []

        def note(step, batch, coefficients):
            used.append(coefficients.ent_coef)

        spy = StepSpy(monkeypatch, before=note)
        logs = learn(learner(batch_size=24, **arguments), updates)
        for facts, coefficient in zip(spy.facts, used, strict=True):
            value = (facts["critic_loss_1"] + facts["critic_loss_2"]) / 2
            expected = facts["policy_loss"] + 0.5 * value - coefficient * facts["entropy"]
            assert facts["loss"] == pytest.approx(expected, abs=1e-5)
        assert used == [log["train/ent_coef"] for log in logs]
        entropies = [facts["entropy"] for facts in spy.facts]
        assert [-log["train/entropy_loss"] for log in logs] == pytest.approx(entropies, rel=1e-5)
        return used

    def test_is_constant_unless_it_decays(self, monkeypatch):
        assert self.coefficients(monkeypatch, ent_coef=0.3) == [0.3] * 4

    def test_decays_linearly_over_training(self, monkeypatch):
        # After each of four rollouts, 3/4, 1/2, 1/4 and nothing remain.
        used = self.coefficients(monkeypatch, ent_coef=0.9, ent_coef_final=0.1)
        assert used == pytest.approx([0.7, 0.5, 0.3, 0.1])

    def test_stays_above_its_minimum(self, monkeypatch):
        used = self.coefficients(monkeypatch, ent_coef=0.9, ent_coef_final=0.4, ent_coef_min=0.4)
        assert used == pytest.approx([0.775, 0.65, 0.525, 0.4])
        model = learner(ent_coef=0.9, ent_coef_min=0.4)
        with pytest.raises(ValueError, match="ent_coef"):
            model.hyperparams["ent_coef"] = 0.1

    def test_is_boosted_while_the_critics_explain_little(self, monkeypatch):
        """The explained variance is that of the last update: it is known on the host only then."""
        used = self.coefficients(
            monkeypatch, ent_coef=0.1, ent_boost_factor=3.0, ent_boost_below=0.999, learning_rate=0.0
        )
        assert used == pytest.approx([0.1, 0.3, 0.3, 0.3])

    def test_up_to_a_cap(self, monkeypatch):
        used = self.coefficients(
            monkeypatch, ent_coef=0.1, ent_boost_factor=3.0, ent_boost_below=0.999, ent_boost_cap=0.2
        )
        assert used == pytest.approx([0.1, 0.2, 0.2, 0.2])

    def test_the_boost_ends_when_they_do(self):
        model = learner(ent_coef=0.1, ent_boost_factor=3.0, ent_boost_below=0.5)
        learn(model)
        model.entropy.explained_variance = 0.9
        assert learn(model)[0]["train/ent_coef"] == pytest.approx(0.1)


SOON = {"target_kl": 1e-9, "kl_stop": "fraction", "kl_stop_fraction": 0.5}
"""Stops each update about halfway: any step at all is too far."""


def stop_index(kls, mode, limit, patience=3, fraction=0.25):
    """After how many minibatches to stop, in plain words; ``None``: never."""
    above = [kl > limit for kl in kls]
    for i in range(len(kls)):
        if mode == "absolute" and above[i]:
            return i
        if mode == "consecutive" and i + 1 >= patience and all(above[i + 1 - patience : i + 1]):
            return i
        if mode == "fraction" and sum(above[: i + 1]) > fraction * len(kls):
            return i
    return None


class TestStop:
    @pytest.mark.parametrize("masked", [False, True], ids=["host", "device"])
    @pytest.mark.parametrize("mode", ["absolute", "consecutive", "fraction"])
    def test_what_remains_is_not_applied(self, monkeypatch, mode, masked):
        arguments = {"n_epochs": 6, "learning_rate": 0.01}
        # Without a stop, the same minibatches have these divergences, up to where it would stop.
        before = []
        with monkeypatch.context() as patch:
            spy = StepSpy(patch, before=lambda step, *_: before.append(flat(step.policy)))
            learn(learner(**arguments))
        kls = [facts["approx_kl"] for facts in spy.facts]
        assert len(kls) == 18
        # Halfway between two of them there is a limit that stops in the middle.
        between = [(low + high) / 2 for low, high in itertools.pairwise(sorted(kls))]
        limit, expected = next(
            (limit, stop) for limit in between if (stop := stop_index(kls, mode, limit)) is not None and 4 < stop < 15
        )

        spy = StepSpy(monkeypatch)
        model = learner(target_kl=limit / 1.5, kl_stop=mode, **arguments)
        model.learner.step.masked = masked
        (log,) = learn(model)
        assert torch.equal(weights(model), before[expected])
        assert log["kl/stopped"] == 1
        assert log["train/optimizer_steps"] == expected
        assert log["train/approx_kl"] == pytest.approx(np.mean(kls[: expected + 1]), rel=1e-4)
        assert len(spy.facts) == (18 if masked else expected + 1)
        assert [facts["go_on"] for facts in spy.facts] == [1] * expected + [0] * (len(spy.facts) - expected)

    @pytest.mark.parametrize(
        "arguments", [{"target_kl": 1e3}, {"target_kl": 1e-4, "kl_stop": None, "kl_penalty": True}, {}]
    )
    def test_there_is_none_without_a_reason(self, arguments):
        (log,) = learn(learner(n_epochs=4, learning_rate=0.01, **arguments))
        assert log["kl/stopped"] == 0
        assert log["train/optimizer_steps"] == 12

    def test_the_next_update_begins_anew(self):
        logs = learn(learner(n_epochs=4, learning_rate=0.01, **SOON), 3)
        assert all(log["kl/stopped"] == 1 for log in logs)
        assert all(log["train/optimizer_steps"] > 0 for log in logs)

    def test_the_estimate_is_never_negative(self, monkeypatch):
        spy = StepSpy(monkeypatch)
        learn(learner(n_epochs=8, learning_rate=1e-4), 2)
        kls = [facts["approx_kl"] for facts in spy.facts]
        assert min(kls) >= 0
        assert max(kls) > 0

    def test_the_estimate_is_the_formula(self, monkeypatch):
        expected = []

        @torch.no_grad()
        def estimate(step, batch, _):
            parameters, _ = step.policy.evaluate(batch.observations, batch.state, batch.segments)
            new = torch.distributions.Categorical(logits=parameters.double()).log_prob(batch.actions)
            difference = new - batch.log_probs.double()
            expected.append((difference.exp() - 1 - difference).mean().item())

        spy = StepSpy(monkeypatch, before=estimate)
        learn(learner(n_epochs=4, learning_rate=0.02))
        assert [facts["approx_kl"] for facts in spy.facts] == pytest.approx(expected, rel=1e-3, abs=1e-7)


def state_of(model):
    """Weights, and the state of optimizer and scaler, as flat names and tensors."""
    named = dict(model.policy.state_dict())
    for name, p in model.policy.named_parameters():
        for key, value in model.policy.optimizer.state[p].items():
            named[f"optimizer.{name}.{key}"] = torch.as_tensor(value)
    if model.vgs is not None:
        state = model.vgs.state_dict()
        named |= {f"vgs.moments.{name}": value for name, value in state.pop("moments").items()}
        named |= {f"vgs.{name}": value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return {name: value.clone() for name, value in named.items()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def spoil(monkeypatch, which):
    """Let the loss of some minibatches be not a number; they count from 0."""
    count = itertools.count()
    differentiate = OptimizerStep.differentiate

    def spoiled(step, batch, coefficients):
        if next(count) in which:
            batch = batch._replace(advantages=batch.advantages * math.nan)
        return differentiate(step, batch, coefficients)

    monkeypatch.setattr(OptimizerStep, "differentiate", spoiled)


def spoil_gradients(model, which, value):
    """Put a value that is not finite into one gradient of some minibatches."""
    count = itertools.count()

    def hook(gradient):
        return gradient * value if next(count) in which else gradient

    model.policy.action_head.bias.register_hook(hook)


OPTIMIZERS = [
    ("adam", {}),
    ("adam", {"fused": False}),
    ("sgd", {"momentum": 0.9}),
    ("adaptive_upgd", {"sigma": 0.0}),
    ("adaptive_upgd", {"sigma": 0.01, "adaptive_noise": True, "noise_reference": "gradient"}),
    ("upgd", {"sigma": 0.0}),
    ("upgdw", {"sigma": 0.0}),
]


class TestDeviceForm:
    """Masked steps leave exactly what the host leaves, which does not take them."""

    def both(self, monkeypatch, spoiled=(), updates=2, **arguments):
        results = []
        for masked in (False, True):
            with monkeypatch.context() as patch:
                spoil(patch, spoiled)
                model = learner(n_epochs=4, variance_gradient_scaling=True, **{"learning_rate": 0.01, **arguments})
                assert not model.learner.step.masked
                model.learner.step.masked = masked
                logs = learn(model, updates)
                results.append((state_of(model), logs))
        return results

    @pytest.mark.parametrize(("optimizer", "options"), OPTIMIZERS)
    @pytest.mark.parametrize("apply_to", ["gradient", "update"])
    def test_with_a_stop_in_the_middle(self, monkeypatch, optimizer, options, apply_to):
        (host, logs), (device, device_logs) = self.both(
            monkeypatch,
            updates=1,
            optimizer_class=optimizer,
            optimizer_kwargs=options,
            vgs_kwargs={"warmup_steps": 2, "alpha": 1.0, "apply_to": apply_to},
            **SOON,
        )
        assert [0 < log["train/optimizer_steps"] < 12 for log in logs] == [True]
        assert_same(host, device)
        for one, other in zip(logs, device_logs, strict=True):
            assert one == pytest.approx(other, abs=1e-6, nan_ok=True)

    @pytest.mark.parametrize(("optimizer", "options"), [pair for pair in OPTIMIZERS if pair[1].get("sigma", 0) == 0])
    @pytest.mark.parametrize("apply_to", ["gradient", "update"])
    def test_with_minibatches_that_are_not_finite(self, monkeypatch, optimizer, options, apply_to):
        """From the very first, when there is no state yet. Without noise, which masked steps draw too."""
        spoiled = {0, 3, 4, 13}
        (host, logs), (device, device_logs) = self.both(
            monkeypatch,
            spoiled,
            optimizer_class=optimizer,
            optimizer_kwargs=options,
            vgs_kwargs={"warmup_steps": 2, "alpha": 1.0, "apply_to": apply_to},
        )
        assert sum(log["train/skipped_minibatches"] for log in logs) == len(spoiled)
        assert_same(host, device)
        for one, other in zip(logs, device_logs, strict=True):
            assert one == pytest.approx(other, abs=1e-6)

    @pytest.mark.parametrize(
        ("optimizer", "options"), [(torch.optim.NAdam, {}), (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5})]
    )
    def test_with_optimizers_whose_state_begins_at_other_numbers(self, monkeypatch, optimizer, options):
        (host, _), (device, _) = self.both(monkeypatch, {0}, optimizer_class=optimizer, optimizer_kwargs=options)
        assert_same(host, device)

    @pytest.mark.filterwarnings("ignore:the state has one critic")
    def test_with_a_critic_that_has_just_been_added(self, monkeypatch):
        """Its part of the optimizer's state is created by the first step after the load."""
        single, states = learner(policy_kwargs={"twin_critics": False}), []
        learn(single)
        for masked in (False, True):
            with monkeypatch.context() as patch:
                spoil(patch, {0})
                model = learner()
                model.set_parameters(single.get_parameters())
                model.learner.step.masked = masked
                learn(model)
                states.append(state_of(model))
        assert_same(*states)

    def test_with_both_over_several_updates(self, monkeypatch):
        (host, logs), (device, _) = self.both(monkeypatch, {2}, updates=3, **SOON)
        assert [log["train/skipped_minibatches"] for log in logs] == [1, 0, 0]
        assert all(log["kl/stopped"] for log in logs)
        assert_same(host, device)

    def test_a_step_that_is_not_masked_would_be_noticed(self, monkeypatch):
        (host, _), _ = self.both(monkeypatch, {3})
        (other, _), _ = self.both(monkeypatch)
        assert any(not torch.equal(host[name], other[name]) for name in host)


class TestPenalty:
    def test_is_the_exact_divergence_of_the_distributions(self, monkeypatch):
        for action_space in (spaces.Discrete(3), BOX):
            expected = []

            @torch.no_grad()
            def diverge(step, batch, _, action_space=action_space, expected=expected):
                new, _ = step.policy.evaluate(batch.observations, batch.state, batch.segments)
                old, new = batch.parameters.double(), new.double()
                if action_space is BOX:
                    old, new = (torch.distributions.Normal(p[..., :2], p[..., 2:].exp()) for p in (old, new))
                    kl = torch.distributions.kl_divergence(old, new).sum(-1)
                else:
                    old, new = (torch.distributions.Categorical(logits=p) for p in (old, new))
                    kl = torch.distributions.kl_divergence(old, new)
                expected.append(kl.mean().item())

            with monkeypatch.context() as patch:
                spy = StepSpy(patch, before=diverge)
                model = learner(
                    env=scripted(*LENGTHS, action_space=action_space),
                    n_epochs=4,
                    learning_rate=0.02,
                    target_kl=0.01,
                    kl_stop=None,
                    kl_penalty={"init_coef": 0.5},
                )
                (log,) = learn(model)
            assert max(expected) > 1e-3
            assert [facts["kl"] for facts in spy.facts] == pytest.approx(expected, rel=1e-3, abs=1e-7)
            assert log["kl/exact"] == pytest.approx(np.mean(expected), rel=1e-3)
            for facts in spy.facts:
                value = (facts["critic_loss_1"] + facts["critic_loss_2"]) / 2
                assert facts["loss"] == pytest.approx(facts["policy_loss"] + 0.5 * value + 0.5 * facts["kl"], abs=1e-5)

    def test_holds_the_policy_back(self):
        arguments = {"n_epochs": 8, "learning_rate": 0.02}
        (free,) = learn(learner(**arguments))
        (held,) = learn(learner(kl_penalty={"init_coef": 5.0}, target_kl=0.01, kl_stop=None, **arguments))
        assert held["train/approx_kl"] < free["train/approx_kl"] / 2

    def test_its_coefficient_follows_the_divergence(self, monkeypatch):
        used = []
        StepSpy(monkeypatch, before=lambda step, batch, c: used.append(float(c.kl_coef)))
        gains = {"init_coef": 1.0, "kp": 0.1, "ki": 0.4}
        model = learner(n_epochs=2, batch_size=24, learning_rate=0.05, target_kl=0.01, kl_stop=None, kl_penalty=gains)
        logs = learn(model, 3)
        integral, expected = 1.0, [1.0]
        for log in logs:
            error = log["kl/exact"] / 0.01 - 1
            grown = integral + 0.4 * error
            if error > 0:
                integral = max(integral, min(grown, 10 - 0.1 * error))
            else:
                integral = min(integral, max(grown, -0.1 * error))
            expected.append(min(max(0.1 * error + integral, 0), 10))
        assert used[::2] == used[1::2] == pytest.approx(expected[:-1], rel=1e-4)
        assert [log["kl/penalty_coef"] for log in logs] == pytest.approx(expected[1:], rel=1e-4)
        assert len(set(expected)) > 2

    def test_an_update_without_a_step_leaves_the_coefficient_alone(self, monkeypatch):
        spoil(monkeypatch, range(100))
        model = learner(target_kl=0.01, kl_stop=None, kl_penalty={"init_coef": 5.0}, skip_limit=100)
        learn(model, 2)
        assert model.kl_penalty.coefficient == 5

    def test_without_it_nothing_is_called_exact(self):
        (log,) = learn(learner(target_kl=0.01))
        assert "kl/exact" not in log


class TestNotFinite:
    @pytest.mark.parametrize("masked", [False, True], ids=["host", "device"])
    @pytest.mark.parametrize("what", ["loss", math.nan, math.inf])
    def test_is_skipped_and_counted_and_changes_nothing(self, monkeypatch, what, masked):
        before, after = [], []
        model = learner(n_epochs=2, variance_gradient_scaling=True, optimizer_class="adaptive_upgd", learning_rate=0.01)
        model.learner.step.masked = masked
        if what == "loss":
            spoil(monkeypatch, {4})
        else:
            spoil_gradients(model, {4}, what)
        spy = StepSpy(
            monkeypatch,
            before=lambda *_: before.append(state_of(model)),
            after=lambda *_: after.append(state_of(model)),
        )
        (log,) = learn(model)
        assert [facts["finite"] for facts in spy.facts] == [1, 1, 1, 1, 0, 1]
        assert math.isfinite(spy.facts[4]["loss"]) == (what != "loss")
        assert_same(before[4], after[4])
        assert not torch.equal(before[3]["action_head.weight"], after[3]["action_head.weight"])
        assert not torch.equal(before[5]["action_head.weight"], after[5]["action_head.weight"])
        assert log["train/skipped_minibatches"] == 1
        assert log["train/optimizer_steps"] == 5
        assert all(math.isfinite(value) for value in log.values())
        losses = [facts["loss"] for i, facts in enumerate(spy.facts) if i != 4]
        assert log["train/loss"] == pytest.approx(np.mean(losses), rel=1e-5)

    @pytest.mark.parametrize("masked", [False, True])
    def test_leaves_running_statistics_of_layers_as_they_were(self, monkeypatch, masked):
        class Normalising(FlattenExtractor):
            def __init__(self, observation_space):
                super().__init__(observation_space)
                self.norm = torch.nn.BatchNorm1d(self.features_dim)

            def forward(self, observations):
                return self.norm(super().forward(observations))

        model = learner(policy_kwargs={"features_extractor_class": Normalising}, n_epochs=1)
        model.learner.step.masked = masked
        norm = model.policy.features_extractor.norm
        seen = []
        finish = model.learner.step._finish

        def spoiled(loss, go_on, c):
            return finish(loss * (math.nan if len(seen) == 1 else 1.0), go_on, c)

        step = model.learner.step

        def taking(batch, c):
            result = step(batch, c)
            seen.append(norm.num_batches_tracked.item())
            return result

        monkeypatch.setattr(step, "_finish", spoiled)
        model.learner.take_step = taking
        model.learn(model.n_steps * model.n_envs)
        assert seen == [1, 1, 2]
        assert norm.running_mean.isfinite().all()

    @pytest.mark.parametrize("masked", [False, True], ids=["host", "device"])
    def test_too_many_in_a_row_end_training(self, monkeypatch, masked):
        spoil(monkeypatch, {2, 3, 4, 5})
        model = learner(n_epochs=4, skip_limit=4)
        model.learner.step.masked = masked
        with pytest.raises(TrainingError, match=r"^4 minibatches in a row"):
            learn(model)
        assert weights(model).isfinite().all()

    def test_fewer_or_not_in_a_row_do_not(self, monkeypatch):
        spoil(monkeypatch, {2, 3, 5, 6, 8, 9})
        (log,) = learn(learner(n_epochs=4, skip_limit=3))
        assert log["train/skipped_minibatches"] == 6

    def test_a_row_may_span_updates(self, monkeypatch):
        """A rollout may have fewer minibatches than the limit."""
        spoil(monkeypatch, range(2, 100))
        with pytest.raises(TrainingError, match="in a row"):
            learn(learner(skip_limit=10), 8)

    def test_minibatches_after_a_stop_are_not_counted(self, monkeypatch):
        """They have not been looked at; the host does not even compute them."""
        spoil(monkeypatch, range(12, 100))
        model = learner(n_epochs=6, learning_rate=0.01, skip_limit=5, **SOON)
        model.learner.step.masked = True
        (log,) = learn(model)
        assert log["kl/stopped"] == 1
        assert log["train/skipped_minibatches"] == 0

    def test_enormous_rewards_do_not_reach_the_weights(self):
        """They are finite; what is computed from them is not."""
        env = scripted(*LENGTHS, reward=lambda t, *_: 1e20 if t >= 10 else 1.0)
        model = learner(env=env, skip_limit=2)
        with contextlib.suppress(TrainingError, RolloutError):
            learn(model, 3)
        assert weights(model).isfinite().all()


@pytest.mark.parametrize("twin", [False, True])
@pytest.mark.parametrize("vgs", [False, True])
@pytest.mark.parametrize("upgd", [False, True])
@pytest.mark.parametrize("memory", [False, True])
def test_every_subset_of_the_techniques_trains(twin, vgs, upgd, memory):
    model = learner(
        policy="MlpLstmPolicy" if memory else "MlpPolicy",
        policy_kwargs={"twin_critics": twin},
        variance_gradient_scaling=vgs,
        optimizer_class="adaptive_upgd" if upgd else "adam",
        learning_rate=0.003,
        n_epochs=2,
    )
    before = weights(model)
    logs = learn(model, 2)
    after = weights(model)
    assert after.isfinite().all()
    assert not torch.equal(after, before)
    assert all(math.isfinite(value) for log in logs for value in log.values())
    assert ("vgs/scaling_factor" in logs[0]) == vgs
    assert ("critic/loss_2" in logs[0]) == twin
    assert ("lstm/actor_hidden_layer0_norm" in logs[0]) == memory
    assert isinstance(model.policy.optimizer, AdaptiveUPGD) == upgd


def test_counts(monkeypatch):
    spy = StepSpy(monkeypatch)
    model = learner(n_epochs=3, learning_rate=lambda remaining: 0.02 * remaining, clip_range=0.1)
    logs = learn(model, 2)
    assert [log["train/n_updates"] for log in logs] == [3, 6]
    assert [log["train/optimizer_steps"] for log in logs] == [9, 9]
    assert len(spy.facts) == 18
    assert [log["train/learning_rate"] for log in logs] == pytest.approx([0.01, 0.0])
    assert all(log["train/clip_range"] == 0.1 for log in logs)
    fractions = [facts["clip_fraction"] for facts in spy.facts]
    assert logs[0]["train/clip_fraction"] == pytest.approx(np.mean(fractions[:9]))
    assert max(fractions) > 0


def test_the_surrogate_is_clipped(monkeypatch):
    expected = []

    @torch.no_grad()
    def surrogate(step, batch, _):
        parameters, _ = step.policy.evaluate(batch.observations, batch.state, batch.segments)
        log_probs = torch.distributions.Categorical(logits=parameters.double()).log_prob(batch.actions)
        losses = []
        for new, old, advantage in zip(
            log_probs[0].tolist(), batch.log_probs[0].tolist(), batch.advantages[0].tolist(), strict=True
        ):
            ratio = math.exp(new - old)
            losses.append(-min(ratio * advantage, min(max(ratio, 0.9), 1.1) * advantage))
        expected.append(np.mean(losses))

    spy = StepSpy(monkeypatch, before=surrogate)
    (log,) = learn(learner(n_epochs=4, learning_rate=0.03, clip_range=0.1))
    assert [facts["policy_loss"] for facts in spy.facts] == pytest.approx(expected, abs=1e-5)
    assert log["train/policy_gradient_loss"] == pytest.approx(np.mean(expected), abs=1e-5)
    assert log["train/clip_fraction"] > 0.1


class TestSynchronisation:
    """On a CPU that is told to work like another device, reads of numbers from tensors are counted."""

    READS = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "numpy", "cpu", "__array__")

    def counted(self, monkeypatch, model):
        """Who reads, in each update."""
        reads, updates = [], []

        def counting(name, read):
            def count(tensor, *args, **kwargs):
                caller = sys._getframe(1).f_globals.get("__name__", "")
                if caller.startswith("driftproof"):
                    reads.append((caller, sys._getframe(1).f_code.co_name, name))
                return read(tensor, *args, **kwargs)

            return count

        def begin(model):
            for name in self.READS:
                patch.setattr(torch.Tensor, name, counting(name, getattr(torch.Tensor, name)))

        def end(model):
            patch.undo()
            updates.append(list(reads))
            reads.clear()

        with monkeypatch.context() as patch:
            learn(model, 3, before=begin, after=end)
        return updates

    def test_an_update_reads_once(self, monkeypatch):
        model = learner(
            env=scripted(*LENGTHS, action_space=BOX),
            policy="MlpLstmPolicy",
            n_epochs=3,
            clip_range_vf=0.2,
            target_kl=0.01,
            kl_penalty=True,
            ent_coef=0.01,
            cvar_alpha=0.5,
            variance_gradient_scaling=True,
        )
        model.learner.step.masked = True
        model.vgs._statistics.on_host = model.learner.kl_stop.on_host = False
        updates = self.counted(monkeypatch, model)
        # Indices of minibatches are made on the host, and only looked at there; the entropy schedule lives there.
        on_host = [("minibatches", "numpy"), ("_plain", "item")]
        own = [[read for read in reads if read[1:] not in on_host] for reads in updates]
        fetching = ("driftproof.learner.metrics", "fetch", "tolist")
        # The very first step creates the state of the optimizer.
        assert own == [[("driftproof.learner.step", "_finish", "__bool__"), fetching], [fetching], [fetching]]

    def test_the_host_form_is_seen_to_read(self, monkeypatch):
        updates = self.counted(monkeypatch, learner(n_epochs=3))
        assert all(len(reads) > 9 for reads in updates)


def test_a_layer_that_is_unfrozen_later_is_clipped_and_checked_like_the_others(monkeypatch):
    model = learner(optimizer_class="sgd", learning_rate=1.0, max_grad_norm=1e-6)
    layer = model.policy.actor_network[0]
    layer.requires_grad_(False)
    learn(model)
    layer.requires_grad_(True)
    before = layer.weight.detach().clone()
    learn(model)
    assert 0 < (layer.weight - before).norm() < 1e-5
