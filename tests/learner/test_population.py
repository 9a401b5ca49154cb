"""Updates of several learners at once: equal to those of each alone, with the same data and random numbers."""

from __future__ import annotations

import pytest
import torch
from stable_baselines3.common.env_util import make_vec_env
from torch.utils._python_dispatch import TorchDispatchMode

from driftproof.adversarial import PerturbationConfig, SAPPOConfig
from driftproof.adversarial.methods import Attack
from driftproof.learner.population import MemberGenerators, PopulationLearner, PopulationRollout, PopulationState
from driftproof.ppo import DistributionalPPO
from driftproof.state import compare, copy_tree
from tests.ppo.scripted import small_networks

SETTINGS = [
    {"learning_rate": 1e-4, "clip_range": 0.1, "ent_coef": 0.0, "gamma": 0.9, "gae_lambda": 0.8, "max_grad_norm": 0.1},
    {"learning_rate": 3e-4, "clip_range": 0.2, "ent_coef": 0.01, "gamma": 0.99, "gae_lambda": 0.95, "vf_coef": 1.0},
    {"learning_rate": 1e-3, "clip_range": 0.3, "ent_coef": 0.1, "gamma": 0.999, "gae_lambda": 1.0, "n_epochs": 3},
]
LOGGED = ("learning_rate", "clip_range", "ent_coef")
"""Hyper-parameters that the agent adds to the learner's metrics."""
OPTIMIZER = [
    {"sigma": 1e-3, "weight_decay": 0.0, "beta1": 0.9},
    {"sigma": 0.0, "weight_decay": 0.01, "beta1": 0.8},
    {"sigma": 1e-2, "weight_decay": 0.001, "beta2": 0.99},
]


def agent(member, policy, env="CartPole-v1", networks=None, **changes):
    settings = {"n_steps": 16, "batch_size": 24, "n_epochs": 2, "device": "cpu", "seed": member, **SETTINGS[member]}
    settings |= {"vgs_kwargs": {"warmup_steps": 3, "alpha": 0.1 * (member + 1)}}
    settings["optimizer_kwargs"] = OPTIMIZER[member]
    kwargs = small_networks(policy, changes.pop("policy_kwargs", {})) if networks is None else networks
    return DistributionalPPO(policy, make_vec_env(env, 3, seed=member), policy_kwargs=kwargs, **{**settings, **changes})


class Sideways(Attack):
    """An attack method of a user."""


def attacked(method, norm, **changes):
    perturbation = PerturbationConfig(epsilon=0.2, attack_method=method, norm_type=norm, attack_steps=2)
    return SAPPOConfig(perturbation=perturbation, adversarial_ratio=0.5, robust_kl_coef=5.0, **changes)


class Operations(TorchDispatchMode):
    """Counts operations that are not views."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def slow(value):
    return pytest.param(value, marks=pytest.mark.slow)


class Alone:
    """A single agent that trains with random numbers of its own."""

    def __init__(self, member, make):
        torch.manual_seed(100 + member)
        self.agent = make(member)
        self.generator = torch.get_rng_state()
        self.agent.learn(0)
        self.seen = []
        update = self.agent.learner.update
        self.agent.learner.update = lambda rollout, settings: (self.seen.append(settings), update(rollout, settings))[1]

    def collect(self):
        torch.set_rng_state(self.generator)
        _, callback = self.agent._setup_learn(1000, None, False)
        self.agent.collect_rollouts(self.agent.env, callback)
        self.generator = torch.get_rng_state()
        return self.agent._rollout

    def train(self):
        torch.set_rng_state(self.generator)
        self.agent.train()
        self.generator = torch.get_rng_state()
        return {**self.agent.logger.name_to_value}


def stacked(agents, generators):
    state = PopulationState([each.learner for each in agents])
    first = agents[0]
    rollout = PopulationRollout(state.policy, first.n_steps, first.n_envs, first.batches.sequence_length)
    return state, rollout, PopulationLearner(state, MemberGenerators(generators, torch.device("cpu")))


def trained(make, updates=3):
    """Agents that trained alone, and the state of a population that got the same rollouts; metrics of the last."""
    singles = [Alone(member, make) for member in range(3)]
    shells = [make(member) for member in range(3)]
    for single, shell in zip(singles, shells, strict=True):
        shell.load_state_tree(single.agent.state_tree())
    state, rollout, learner = stacked(shells, [single.generator for single in singles])
    generators = learner.generators
    for _ in range(updates):
        for member, single in enumerate(singles):
            rollout.fill(member, single.collect())
            generators.states[member] = single.generator
        alone = [single.train() for single in singles]
        together = learner.update(rollout, [single.seen[-1] for single in singles])
        for member, single in enumerate(singles):
            assert torch.equal(generators.states[member], single.generator), "other random numbers were drawn"
    return [single.agent for single in singles], state, alone, together


def check(singles, state, tolerance=1e-5):
    for member, single in enumerate(singles):
        state.write(member)
        shell = state.learners[member]
        for name, tensor in single.policy.state_dict().items():
            torch.testing.assert_close(shell.policy.state_dict()[name], tensor, rtol=0, atol=tolerance)
        for part in ("vgs", "return_scale", "kl_penalty"):
            if getattr(single.learner, part) is None:
                continue
            expected = getattr(single.learner, part).state_dict()
            for name, value in getattr(shell, part).state_dict().items():
                # On a CPU a single agent follows the largest gradient, which is a metric, in some steps only.
                if isinstance(value, torch.Tensor) and name != "largest":
                    torch.testing.assert_close(
                        value, expected[name], rtol=max(1e-3, 20 * tolerance), atol=tolerance, msg=f"{part}.{name}"
                    )


@pytest.mark.parametrize("policy", ["MlpLstmPolicy", "MlpPolicy"])
def test_an_update_of_several_members_equals_one_of_each(policy):
    """With the networks that agents have by default, in float32."""
    singles, state, alone, together = trained(lambda member: agent(member, policy, networks={}), 2)
    check(singles, state)
    for member in range(3):
        logged = {name for name in alone[member] if name.split("/")[0] not in ("rollout", "time")}
        missing = logged - {f"train/{name}" for name in (*LOGGED, "n_updates")} - together[member].keys()
        assert not missing
        for name, value in together[member].items():
            if name != "vgs/grad_max_ema":
                assert value == pytest.approx(alone[member][name], rel=1e-2, abs=1e-4, nan_ok=True), name


@pytest.mark.parametrize(
    "changes",
    [
        {"policy": "MlpGruPolicy", "env": "Pendulum-v1", "clip_range_vf": 0.1, "target_kl": 0.01, "kl_penalty": True},
        {"policy_kwargs": {"value_head": "categorical"}, "target_kl": 0.001, "cvar_alpha": 0.5},
        {"layer_norm": True, "exploration_floor": 0.01, "init_decay": 0.5, "optimism": 0.5},
        slow({"optimizer_class": "upgd", "optimizer_kwargs": {"sigma": 0.01}, "vgs_kwargs": {"apply_to": "update"}}),
        slow({"optimizer_kwargs": {"sigma": 0.1, "adaptive_noise": True, "noise_reference": "gradient"}}),
        {"policy_kwargs": {"shared_recurrence": True, "twin_critics": False}, "n_steps": 18, "sequence_length": 8},
        {"adversarial": attacked("sgld", "l2", warmup_updates=1), "recycle_dormant": 0.3, "target_kl": 1e-4},
        slow({"policy": "MlpPolicy", "env": "Pendulum-v1", "adversarial": attacked("pgd", "linf", warmup_updates=0)}),
    ],
    ids=[
        "gru-box-clip-penalty",
        "categorical-stop-cvar",
        "drift-parts",
        "upgd-update",
        "adaptive-noise",
        "shared-one-critic-padded",
        "adversarial-sgld-dormant",
        "adversarial-pgd-box",
    ],
)
def test_options(changes):
    def make(member):
        made = agent(member, **{"policy": "MlpLstmPolicy", **changes})
        if made.adversary is not None:
            made.hyperparams["adversary.epsilon"] = 0.1 * (member + 1)
        return made

    singles, state, alone, together = trained(make, updates=2)
    check(singles, state)
    for member, single in enumerate(singles):
        if single.adversary is not None:
            pair = (state.learners[member].adversary, single.adversary)
            found, expected = (each.attack.state_dict() for each in pair)
            assert torch.equal(found["generator"], expected["generator"])
            assert found["counters"] == pytest.approx(expected["counters"], rel=1e-4)
            assert expected["counters"]["norm_max"] == pytest.approx(0.1 * (member + 1))
            for name in ("epsilon", "share", "robust_kl", "value_smoothing", "perturbation_norm"):
                value = alone[member][f"adversarial/{name}"]
                assert together[member][f"adversarial/{name}"] == pytest.approx(value, rel=1e-3, abs=1e-6), name


@pytest.mark.parametrize(("policy", "tolerance"), [("MlpPolicy", 1e-5), ("MlpLstmPolicy", 5e-3)])
def test_mixed_precision(policy, tolerance):
    """Networks in bfloat16, as on CUDA. A single agent's LSTM rounds elsewhere than one with a member axis."""
    contexts = []

    def autocast():
        contexts.append(torch.autocast("cpu", torch.bfloat16))
        return contexts[-1]

    def make(member):
        model = agent(member, policy)
        model.learner.step.autocast = autocast
        return model

    singles, state, alone, together = trained(make, updates=2)
    assert contexts
    check(singles, state, tolerance)
    for one, other in zip(alone, together, strict=True):
        assert other["train/loss"] == pytest.approx(one["train/loss"], rel=1e-3)


class TestMembers:
    """What happens to one member does not touch the others."""

    def updated(self, spoil=None, active=None):
        singles = [Alone(member, lambda member: agent(member, "MlpLstmPolicy", skip_limit=3)) for member in range(3)]
        generators = [torch.manual_seed(i).get_state() for i in range(3)]
        state, rollout, learner = stacked([single.agent for single in singles], generators)
        for member, single in enumerate(singles):
            rollout.fill(member, single.collect())
        if spoil is not None:
            spoil(rollout, state)
        before = {name: tensor.detach().clone() for name, tensor in state.weights.items()}
        metrics = learner.update(rollout, [single.agent.update_settings() for single in singles], active)
        return state, before, learner.diverged, metrics

    @staticmethod
    def same(one, other, member):
        pairs = zip(one.tensors.values(), other.tensors.values(), strict=True)
        return all(torch.equal(a[name][member], b[name][member]) for a, b in pairs for name in a)

    def test_minibatches_that_are_not_finite_are_skipped_and_noticed(self):
        whole, _, diverged, _ = self.updated()
        assert diverged == [False] * 3
        state, before, diverged, metrics = self.updated(lambda rollout, _: rollout.rewards[1].fill_(torch.nan))
        assert diverged == [False, True, False]
        assert metrics[1]["train/optimizer_steps"] == 0
        assert all(torch.equal(tensor[1], before[name][1]) for name, tensor in state.weights.items())
        assert self.same(state, whole, 0)
        assert self.same(state, whole, 2)

    def test_weights_that_are_not_finite_are_noticed(self):
        _, _, diverged, _ = self.updated(lambda _, state: state.weights["action_head.bias"].data[2].fill_(torch.inf))
        assert diverged == [False, False, True]

    def test_those_that_do_not_train_do_not_change(self):
        whole, _, _, _ = self.updated()
        state, before, _, _ = self.updated(active=[True, False, True])
        assert all(torch.equal(tensor[1], before[name][1]) for name, tensor in state.weights.items())
        assert self.same(state, whole, 0)
        assert self.same(state, whole, 2)

    def test_a_copy_takes_few_operations_for_any_number_of_members(self):
        state, *_ = self.updated()
        counts = []
        for targets, sources in (([0], [2]), ([0, 1], [2, 2])):
            with Operations() as operations:
                state.copy(targets, sources)
            counts.append(operations.count)
        assert counts[0] == counts[1] < 60

    @pytest.mark.parametrize("reset", [False, True])
    def test_a_copy_is_the_whole_state_of_the_donor(self, reset):
        state, *_ = self.updated()
        for i in range(3):
            state.write(i)
        parts = [state.learners[i].components() for i in (2, 0)]
        expected = copy_tree([{name: dict(part.state_dict()) for name, part in each.items()} for each in parts])
        state.copy([0, 2], [2, 0], reset_optimizer=reset)
        for member, source in zip((0, 2), expected, strict=True):
            state.write(member)
            parts = state.learners[member].components()
            names = ("policy", "vgs", "return_scale", *(() if reset else ("optimizer",)))
            for name in names:
                found = dict(parts[name].state_dict())
                assert not compare({**found, "param_groups": 0}, {**source[name], "param_groups": 0}), name
            if reset:
                assert all(e["step"] == 0 for e in parts["optimizer"].state_dict()["state"].values())


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"optimizer_class": "adam", "optimizer_kwargs": {}}, "optimizer Adam"),
        ({"adversarial": SAPPOConfig(perturbation=PerturbationConfig(attack_method=Sideways))}, "attack Sideways"),
        ({"env": "Pendulum-v1", "use_sde": True}, "use_sde"),
    ],
)
def test_parts_without_a_form_for_several_members_are_refused(changes, what):
    with pytest.raises(ValueError, match=what):
        PopulationState([agent(0, "MlpLstmPolicy", **changes).learner])
