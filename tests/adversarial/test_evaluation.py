"""Returns under attack: the same episodes, true memories, normalised observations, and attacks that hurt."""

from __future__ import annotations

import copy
import json

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from driftproof.adversarial import (
    AttackResult,
    PerturbationConfig,
    Robustness,
    SAPPOConfig,
    evaluate_under_attack,
    playing,
    train_adversary,
)
from driftproof.adversarial import evaluation as evaluation_module
from driftproof.adversarial.evaluation import _SEARCH, _attack, _scaled
from driftproof.adversarial.learned import AdversaryEnv, LearnedAttack, _defaults, perturbation_of
from driftproof.adversarial.playing import Player, as_the_agent_sees_it, play
from driftproof.ppo import DistributionalPPO
from driftproof.state import compare, copy_tree

from ..ppo.scripted import agent, learn, scripted, small_networks, weights
from .test_training import Mixed

ATTACKS = ["clean", "random", "mad", "critic"]


class Follow(gymnasium.Env):
    """A number wanders; the reward is high for saying it. Observations are the number, times ten, and noise."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.age, self.number = 0, self.np_random.uniform(-0.5, 0.5)
        return self.observe(), {}

    def step(self, action):
        reward = -abs(float(action[0]) - self.number)
        self.age += 1
        self.number = float(np.clip(self.number + self.np_random.normal() * 0.2, -1, 1))
        return self.observe(), reward, False, self.age == 12, {}

    def observe(self):
        return np.array([10 * self.number, self.np_random.normal()], np.float32)


def follow(number=4):
    return DummyVecEnv([lambda: Monitor(Follow())] * number)


def make_agent(policy, env=None, **arguments):
    return DistributionalPPO(
        policy,
        VecNormalize(follow(8), norm_reward=False) if env is None else env,
        **{
            "n_steps": 48,
            "batch_size": 96,
            "n_epochs": 5,
            "learning_rate": 5e-3,
            "gamma": 0.5,
            "seed": 0,
            "device": "cpu",
            "policy_kwargs": small_networks(policy, {"log_std_init": -1.0}, units=16, width=16),
            **arguments,
        },
    )


@pytest.fixture(scope="module")
def agents():
    """Two that follow well, one of which remembers."""
    torch.manual_seed(0)
    return {policy: make_agent(policy).learn(6_144) for policy in ("MlpPolicy", "MlpLstmPolicy")}


@pytest.mark.parametrize("policy", ["MlpPolicy", "MlpLstmPolicy"])
def test_attacks_hurt_the_more_the_farther_they_reach(agents, policy):
    model = agents[policy]
    table = evaluate_under_attack(model, follow(), ATTACKS, [0.1, 0.5], 12)
    by_name = {(r.attack, r.epsilon): r.mean for r in table.results}
    assert list(by_name) == [
        ("clean", 0.0),
        *((name, epsilon) for name in ("random", "mad", "critic") for epsilon in (0.1, 0.5)),
    ]
    assert by_name["clean", 0.0] > -2.5
    assert by_name["mad", 0.5] < by_name["mad", 0.1] < by_name["clean", 0.0]
    assert by_name["mad", 0.5] < by_name["random", 0.5] - 1
    assert table.worst(0.5).attack == "mad"


@pytest.mark.parametrize("policy", ["MlpPolicy", "MlpLstmPolicy"])
def test_clean_is_what_others_measure(agents, policy):
    model, env = agents[policy], follow()
    (clean,) = evaluate_under_attack(model, env, ["clean"], [], 12, seed=3).results
    normalised = VecNormalize(follow(), norm_reward=False, training=False)
    normalised.obs_rms = model.get_env().obs_rms
    normalised.seed(3)
    returns, _ = evaluate_policy(model, normalised, 12, return_episode_rewards=True, deterministic=True)
    assert sorted(clean.returns) == pytest.approx(sorted(returns), abs=1e-4)


def test_a_tiny_ball_is_no_attack(agents):
    model = agents["MlpLstmPolicy"]
    table = evaluate_under_attack(model, follow(), ATTACKS, [1e-6], 8)
    clean = table.results[0]
    for result in table.results[1:]:
        assert result.returns == pytest.approx(clean.returns, abs=1e-3)


def test_the_same_again(agents):
    model, before = agents["MlpLstmPolicy"], torch.get_rng_state()
    attacks = [*ATTACKS, "learned"]
    first, second = (evaluate_under_attack(model, follow(), attacks, [0.2], 6, adversary_steps=64) for _ in range(2))
    assert first == second
    assert torch.equal(torch.get_rng_state(), before)
    assert evaluate_under_attack(model, follow(), ["random"], [0.2], 6, seed=1) != first


@pytest.mark.parametrize("policy", ["MlpPolicy", "MlpLstmPolicy"])
def test_the_agent_is_left_as_it_was(agents, policy):
    model = agents[policy]
    before, statistics = weights(model), copy_tree(model.normalizer.state_dict())
    gradients = [None if p.grad is None else p.grad.clone() for p in model.policy.parameters()]
    env = VecNormalize(follow(), norm_reward=False)
    env.obs_rms = copy.deepcopy(model.get_env().obs_rms)
    evaluate_under_attack(model, env, [*ATTACKS, "learned"], [0.2], 4, adversary_steps=64)
    assert torch.equal(weights(model), before)
    assert all(p.requires_grad for p in model.policy.parameters())
    for p, old in zip(model.policy.parameters(), gradients, strict=True):
        assert (p.grad is None and old is None) or torch.equal(p.grad, old)
    assert not compare(model.normalizer.state_dict(), statistics)
    # The statistics of the environment neither moved, nor are they frozen now.
    assert env.obs_rms.count == model.get_env().obs_rms.count
    assert env.training


def test_a_victim_remembers_what_it_was_shown(agents):
    """Acting under attack step by step equals one pass over all that was shown, cut where episodes start."""
    model = agents["MlpLstmPolicy"]
    shown, started, actions = [], [], []
    attack = perturbation_of(model, PerturbationConfig(epsilon=0.5), 0)

    def perturb(player, observation, starts):
        shown.append(attack.random(observation))
        started.append(starts.copy())
        return shown[-1]

    class Watched(Player):
        def act(self, observation):
            actions.append(super().act(observation))
            return actions[-1]

    with as_the_agent_sees_it(model, follow(2)) as env:
        play(Watched(model), env, perturb, 4, 0)
    assert len(shown) == 24
    keep = torch.from_numpy(~np.stack(started)).float()
    with torch.no_grad():
        parameters = model.policy.evaluate_actor(torch.stack(shown), model.policy.initial_state(2), None, keep)
    expected = model.policy.distribution.to_env(model.policy.distribution.mode(parameters))
    torch.testing.assert_close(torch.stack(actions), expected, atol=1e-5, rtol=0)


class TestNormalisation:
    """What is attacked is what the policy sees."""

    @pytest.mark.parametrize("wrapped", [False, True])
    def test_epsilon_is_in_normalised_units(self, agents, monkeypatch, wrapped):
        model, moved = agents["MlpPolicy"], []
        perturbation = evaluation_module.perturbation_of

        def watched(*arguments):
            attack = perturbation(*arguments)
            random = attack.random

            def remember(observation):
                result = random(observation)
                moved.append((observation.clone(), result))
                return result

            attack.random = remember
            return attack

        monkeypatch.setattr(evaluation_module, "perturbation_of", watched)
        env = follow()
        if wrapped:
            env = VecNormalize(env, norm_reward=False)
            env.obs_rms = model.get_env().obs_rms
        evaluate_under_attack(model, env, ["random"], [0.2], 8)
        clean, seen = (torch.stack(parts) for parts in zip(*moved, strict=True))
        assert clean.std(dim=(0, 1))[0] < 2  # The environment's own are 5.
        assert 0.19 < (seen - clean).abs().max() <= 0.2 + 1e-6

    def test_an_agent_without_it_sees_what_there_is(self):
        model = make_agent("MlpPolicy", follow()).learn(192)
        table = evaluate_under_attack(model, follow(), ["clean", "mad"], [0.1], 4)
        assert len(table.results) == 2

    def test_statistics_that_are_not_those_of_training_are_told(self):
        """A wrapper that has seen nothing, and one around an agent that never had one."""
        model = agent(VecNormalize(scripted([5]), norm_reward=False))
        fresh = VecNormalize(scripted([5]), norm_reward=False)
        evaluate_under_attack(model, fresh, ["clean"], [], 1)  # As good as the agent's own.
        learn(model)
        with pytest.warns(UserWarning, match="has seen no observations"):
            evaluate_under_attack(model, fresh, ["clean"], [], 1)
        with pytest.warns(UserWarning, match="trained without one"):
            evaluate_under_attack(agent(scripted([5])), fresh, ["clean"], [], 1)
        idle = VecNormalize(scripted([5]), norm_obs=False, norm_reward=False)
        evaluate_under_attack(agent(scripted([5])), idle, ["clean"], [], 1)


@pytest.mark.parametrize("policy", ["MlpPolicy", "MlpLstmPolicy"])
def test_what_each_attack_looks_for(policy):
    """Critics expect less where theirs ends, and the distribution of actions differs more where the other's does."""
    model = agent(scripted([5]), policy)
    player = Player(model)
    player.begin(20)
    player.act(torch.randn(20, 3))
    before = copy.deepcopy(player.state)
    clean, starts = torch.randn(20, 3), np.zeros(20, bool)
    attack = perturbation_of(model, _scaled(_SEARCH, 0.3), 0)
    random, mad, critic = (_attack(name, attack, None)(player, clean, starts) for name in ("random", "mad", "critic"))
    with torch.no_grad():
        value, intended = player.value(clean), player.actor(clean)
        assert (player.value(critic) < value).float().mean() >= 0.9
        assert player.value(critic).mean() < player.value(random).mean()
        kl = [model.policy.distribution.kl(intended, player.actor(seen)) for seen in (mad, random, critic)]
        assert kl[0].mean() > kl[1].mean() > 0
        assert (kl[0] >= kl[2] - 1e-6).float().mean() > 0.7
        # The more cautious of both critics, with what they remember.
        state = model.policy.stepper()(clean, player.state)
        both = model.policy.predict_returns(state[1])
        smaller = torch.minimum(*(head.mean(p) for head, p in zip(model.policy.heads, both, strict=True)))
    torch.testing.assert_close(value, smaller)
    # Looking is not remembering.
    assert all(torch.equal(a, b) for a, b in zip(player.state.actor, before.actor, strict=True))


def test_the_search_is_in_proportion_to_the_radius():
    config = PerturbationConfig(epsilon=2.0, attack_lr=0.5, attack_steps=7, norm_type="l2", clip_min=-1.0)
    smaller = _scaled(config, 0.1)
    assert smaller.attack_lr == pytest.approx(0.025)
    assert vars(smaller) == {**vars(config), "epsilon": 0.1, "attack_lr": smaller.attack_lr}


def test_a_step_that_only_resets_is_forgotten():
    """After the last step of an episode a vector environment takes one that is none, and then the next begins."""
    model = agent(make_vec_env("CartPole-v1", 2), "MlpLstmPolicy")
    started = []

    def perturb(player, observation, starts):
        started.append(starts.copy())
        return observation

    with as_the_agent_sees_it(model, gymnasium.make_vec("CartPole-v1", num_envs=2)) as env:
        play(Player(model), env, perturb, 6, 0)
    for starts in np.array(started)[1:].T:
        first = np.flatnonzero(starts[:-1] & ~np.append(False, starts[:-2]))
        assert len(first) >= 2
        assert starts[first + 1].all()


def test_random_actions_are_the_same_again():
    """And what the agent will draw when it goes on is not."""
    model, before = agent(scripted([5]), seed=1), torch.get_rng_state()

    def evaluate(seed):
        env = scripted([5], reward=lambda step, index, action: action)
        return evaluate_under_attack(model, env, ["clean"], [], 20, deterministic=False, seed=seed)

    tables = [evaluate(seed) for seed in (0, 0, 1)]
    assert torch.equal(torch.get_rng_state(), before)
    assert tables[0] == tables[1] != tables[2]
    evaluate(None)
    assert not torch.equal(torch.get_rng_state(), before)


def test_dictionaries_that_are_normalised_with_memory_and_more_environments_than_episodes():
    policy = "MultiInputLstmPolicy"
    model = DistributionalPPO(
        policy,
        VecNormalize(DummyVecEnv([Mixed] * 2), norm_reward=False, norm_obs_keys=["numbers"]),
        n_steps=8,
        batch_size=16,
        n_epochs=1,
        seed=0,
        device="cpu",
        policy_kwargs=small_networks(policy),
    ).learn(16)
    attacks = [*ATTACKS, "learned"]
    table = evaluate_under_attack(model, DummyVecEnv([Mixed] * 3), attacks, np.array([0.1]), 1, adversary_steps=8)
    assert [(r.attack, len(r.returns)) for r in table.results] == [(name, 1) for name in attacks]


def test_an_environment_that_was_made_here_is_closed(monkeypatch):
    closed = []
    env = scripted([5]).envs[0]
    monkeypatch.setattr(env, "close", lambda: closed.append(env))
    monkeypatch.setattr(playing, "make", lambda name: env)
    evaluate_under_attack(agent(scripted([5])), "Scripted-v0", ["clean"], [], 1)
    assert closed == [env]
    with pytest.raises(ValueError, match="but the agent was made for"):
        evaluate_under_attack(make_agent("MlpPolicy"), "Scripted-v0", ["clean"], [], 1)
    assert closed == [env, env]


class TestLearnedAdversary:
    @pytest.mark.slow
    def test_learns_to_mislead(self, agents):
        """Better than chance, though it knows nothing of the victim's networks."""
        model = agents["MlpPolicy"]
        adversary = train_adversary(
            model, follow(8), 0.5, 12_000, n_steps=64, batch_size=128, learning_rate=3e-3, gamma=0.5
        )
        table = evaluate_under_attack(
            model, follow(), ["clean", "random", "learned"], [0.5], 20, adversaries={0.5: adversary}
        )
        clean, random, learned = (result.mean for result in table.results)
        assert learned < random - 1 < clean - 1

    def test_is_rewarded_for_losses_and_moves_no_farther(self, agents):
        model, seen = agents["MlpLstmPolicy"], []
        adversary = train_adversary(
            model,
            follow(2),
            0.3,
            128,
            callback=lambda locals_, _: seen.append((locals_["rewards"].copy(), locals_["infos"])) or True,
        )
        assert adversary.policy.is_recurrent
        assert adversary.action_space == spaces.Box(-1, 1, (2,), np.float32)
        assert all((rewards >= 0).all() for rewards, _ in seen)
        # What is told of episodes is the victim's.
        assert all(info["episode"]["r"] < 0 for _, infos in seen for info in infos if "episode" in info)
        attack = perturbation_of(model, PerturbationConfig(epsilon=0.3))
        learned = LearnedAttack(adversary, attack)
        player = Player(model)
        player.begin(5)
        clean = torch.randn(5, 2)
        moved = learned(player, clean, np.ones(5, dtype=bool))
        assert (moved - clean).abs().max() <= 0.3 + 1e-6

    def test_its_victim_forgets_where_episodes_end(self):
        model = agent(scripted([3], [5]), "MlpLstmPolicy")
        env = scripted([3], [5], reward=lambda step, index, action: step + index)
        world = AdversaryEnv(env, Player(model), perturbation_of(model, PerturbationConfig(epsilon=0.3)))
        world.reset()
        remembered, rewards = [], []
        for _ in range(5):
            _, reward, _, _ = world.step(np.zeros((2, 3), np.float32))
            rewards.append(reward.tolist())
            hidden, *_ = world.victim.state.actor
            remembered.append(hidden[0].any(-1).tolist())
        assert rewards == [[-step, -step - 1] for step in range(5)]
        assert remembered == [[True, True], [True, True], [False, True], [True, True], [True, False]]

    @pytest.mark.parametrize("policy", ["MlpPolicy", "MlpLstmPolicy"])
    def test_a_file_of_it_attacks_as_it_did(self, policy, tmp_path):
        model = agent(VecNormalize(scripted([5], [3]), norm_reward=False), policy)
        learn(model)
        adversary = train_adversary(model, scripted([5], [3]), 0.3, 64)
        adversary.save(tmp_path / "adversary.zip")
        loaded = DistributionalPPO.load(tmp_path / "adversary.zip", device="cpu")
        tables = [
            evaluate_under_attack(model, scripted([5], [3]), ["learned"], [0.3], 2, adversaries={0.3: each})
            for each in (adversary, loaded)
        ]
        assert tables[0] == tables[1]
        clean, starts = torch.randn(2, 3), np.ones(2, bool)
        moves = [
            LearnedAttack(each, perturbation_of(model, PerturbationConfig(epsilon=0.3)))(Player(model), clean, starts)
            for each in (adversary, loaded)
        ]
        assert torch.equal(*moves)
        assert not torch.equal(moves[0], clean)

    def test_is_trained_for_the_ball_that_is_evaluated(self, monkeypatch):
        asked = []

        def train(*arguments, **options):
            asked.append((arguments[2:], options))
            return train_adversary(*arguments[:3], 1, **options)

        monkeypatch.setattr(evaluation_module, "train_adversary", train)
        config = PerturbationConfig(norm_type="l2")
        options = {"perturbation": config, "adversary_steps": 77, "seed": 5}
        evaluate_under_attack(agent(scripted([5])), scripted([5]), ["learned"], [0.1, 0.2], 1, **options)
        assert asked == [((radius, 77), {"norm_type": "l2", "seed": 5}) for radius in (0.1, 0.2)]

    def test_it_looks_as_far_ahead_as_its_victim(self):
        model = agent(scripted([5]), "MlpGruPolicy")
        model.gamma = 0.8
        defaults = _defaults(model, 1, 1_000)
        assert (defaults["gamma"], defaults["policy"]) == (0.8, "MlpLstmPolicy")
        assert _defaults(agent(scripted([5])), 1, 1_000)["policy"] == "MlpPolicy"

    def test_its_memory_is_its_own(self, agents):
        """Episode by episode: with the same observations, attacks repeat after every start."""
        model = agents["MlpLstmPolicy"]
        adversary = train_adversary(model, follow(2), 0.3, 64)
        learned = LearnedAttack(adversary, perturbation_of(model, PerturbationConfig(epsilon=0.3)))
        player = Player(model)
        player.begin(2)
        clean, moves = torch.randn(2, 2), []
        for starts in ([True, True], [False, False], [True, False], [False, False]):
            moves.append(learned(player, clean, np.array(starts)))
        assert torch.equal(moves[2][0], moves[0][0])
        assert torch.equal(moves[3][0], moves[1][0])
        assert not torch.equal(moves[1][0], moves[0][0])

    @pytest.mark.parametrize(("arguments", "message"), [((-1, 10), "Invalid epsilon"), ((0.1, 0), "Invalid steps")])
    def test_bad_arguments_are_refused(self, agents, arguments, message):
        with pytest.raises(ValueError, match=message):
            train_adversary(agents["MlpPolicy"], follow(), *arguments)

    @pytest.mark.parametrize("envs", [1, 3, 10, 100])
    @pytest.mark.parametrize("policy", ["MlpPolicy", "MlpLstmPolicy"])
    def test_any_number_of_environments(self, agents, policy, envs):
        for steps in (1, 1_000, 1_000_000):
            DistributionalPPO(env=follow(envs), **_defaults(agents[policy], envs, steps))


class TestTable:
    def table(self):
        return Robustness(
            (
                AttackResult.of("clean", 0.0, [10.0, 12.0]),
                AttackResult.of("mad", 0.1, [8.0, 8.0]),
                AttackResult.of("mad", 0.2, [4.0, 8.0]),
                AttackResult.of("random", 0.1, [9.0, 9.5]),
            )
        )

    def test_is_printed(self):
        assert str(self.table()).splitlines() == [
            "attack  epsilon  return  95% interval  episodes",
            "clean   0        11      [10, 12]      2",
            "mad     0.1      8       [8, 8]        2",
            "mad     0.2      6       [4, 8]        2",
            "random  0.1      9.25    [9, 9.5]      2",
        ]

    def test_knows_the_worst(self):
        table = self.table()
        assert (table.worst().attack, table.worst().epsilon) == ("mad", 0.2)
        assert table.worst(0.1).mean == 8
        with pytest.raises(ValueError, match=r"no attack with epsilon 0.7: there are \[0.0, 0.1, 0.2\]"):
            table.worst(0.7)

    def test_is_plain_values(self):
        table = self.table()
        plain = json.loads(json.dumps(table.to_dict()))
        assert plain["results"][2] == {
            "attack": "mad",
            "epsilon": 0.2,
            "returns": [4.0, 8.0],
            "mean": 6.0,
            "low": 4.0,
            "high": 8.0,
        }

    def test_is_drawn(self, tmp_path):
        axes = self.table().plot(path=tmp_path / "robustness.png")
        assert (tmp_path / "robustness.png").stat().st_size > 1_000
        lines = {line.get_label(): line.get_xdata() for line in axes.get_lines()}
        assert list(lines["mad"]) == [0.0, 0.1, 0.2]
        assert list(lines["random"]) == [0.0, 0.1]

    def test_intervals_cover_the_mean_as_often_as_they_say(self):
        generator, hits = np.random.default_rng(0), 0
        for _ in range(100):
            result = AttackResult.of("clean", 0.0, generator.normal(size=30).tolist())
            hits += result.low <= 0 <= result.high
        assert 88 <= hits <= 99


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((["clen"], [0.1], 1), ValueError, "Invalid attacks: 'clen'"),
        (("mad", [0.1], 1), TypeError, r"such as \['mad'\]"),
        ((["mad"], [], 1), ValueError, "nothing to evaluate"),
        (([], [0.1], 1), ValueError, "nothing to evaluate"),
        ((["mad"], [0.0], 1), ValueError, "Invalid epsilons: 0.0"),
        ((["mad"], [0.1], 0), ValueError, "Invalid episodes: 0"),
        ((["mad"], 0.1, 1), TypeError, r"such as \[0.1\]"),
        ((["mad"], np.array([]), 1), ValueError, "nothing to evaluate"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        evaluate_under_attack(agent(scripted([5])), scripted([5]), *arguments)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"perturbation": {"epsilon": 1}}, TypeError, "perturbation must be a PerturbationConfig"),
        ({"adversary_steps": 0}, ValueError, "Invalid adversary_steps: 0"),
        ({"adversaries": {0.1: 7}}, TypeError, "agents that train_adversary.. made, not 7"),
        ({"adversaries": {0.1: make_agent("MlpPolicy")}}, ValueError, "an adversary of this agent sees"),
    ],
    ids=["perturbation", "steps", "none", "other"],
)
def test_bad_options_are_refused_before_anybody_plays(monkeypatch, options, error, message):
    monkeypatch.setattr(evaluation_module, "play", lambda *_: pytest.fail("somebody played"))
    with pytest.raises(error, match=message):
        evaluate_under_attack(agent(scripted([5])), scripted([5]), ["clean", "learned"], [0.1], 1, **options)


def test_another_environment_is_refused(agents):
    with pytest.raises(ValueError, match="but the agent was made for"):
        evaluate_under_attack(agents["MlpPolicy"], "CartPole-v1", ["clean"], [], 1)


@pytest.mark.parametrize("policy", ["MlpPolicy", pytest.param("MlpLstmPolicy", marks=pytest.mark.slow)])
def test_discrete_actions_and_vector_environments(policy):
    model = DistributionalPPO(
        policy,
        make_vec_env("CartPole-v1", 2),
        n_steps=32,
        batch_size=64,
        n_epochs=1,
        seed=0,
        device="cpu",
        policy_kwargs=small_networks(policy),
    )
    model.learn(64)
    env = gymnasium.make_vec("CartPole-v1", num_envs=3)
    table = evaluate_under_attack(model, env, [*ATTACKS, "learned"], [0.1], 5, adversary_steps=64)
    assert [len(result.returns) for result in table.results] == [5] * 5
    assert evaluate_under_attack(model, "CartPole-v1", ["clean"], [], 2).results[0].mean >= 8


@pytest.mark.slow
def test_training_against_attacks_makes_an_agent_that_holds():
    """Twins with equal steps: the one that was attacked loses less under attack, and follows nearly as well."""
    plain = make_agent("MlpPolicy").learn(30_000)
    config = SAPPOConfig(
        warmup_updates=20,
        robust_kl_coef=0.3,
        perturbation=PerturbationConfig(epsilon=0.3, attack_lr=0.12),
    )
    robust = make_agent("MlpPolicy", adversarial=config).learn(30_000)
    tables = [evaluate_under_attack(model, follow(), ATTACKS, [0.3], 50) for model in (plain, robust)]
    print(*tables, sep="\n")
    clean = [table.results[0].mean for table in tables]
    worst = [table.worst(0.3).mean for table in tables]
    assert worst[1] > worst[0]
    assert clean[1] - worst[1] < clean[0] - worst[0]
