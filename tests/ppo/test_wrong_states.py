"""Whatever is wrong with a state, at whichever leaf: one kind of error, and an agent that is what it was."""

import itertools
import random
import warnings

import gymnasium
import numpy as np
import pytest
import torch
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from driftproof.adversarial import PerturbationConfig, SAPPOConfig
from driftproof.pbt.member import Trainee
from driftproof.ppo import DistributionalPPO
from driftproof.state import CheckpointError, compare, copy_tree, write
from tests.state.wrong_trees import MISSING, at, places, replaced, wrong_values

from .resuming import Walk

UPDATE = 32
SMALL = {"n_steps": 16, "batch_size": 16, "n_epochs": 1, "device": "cpu", "seed": 0}
NETS = {"net_arch": [4], "num_quantiles": 4}
MEMORY = {**NETS, "lstm_hidden_size": 4}
CONTROLLED = {
    "target_kl": 0.1,
    "kl_penalty": True,
    "ent_coef": 0.01,
    "ent_coef_final": 0.001,
    "ent_coef_start": "plateau",
    "clip_range_vf": 0.2,
    "cvar_alpha": 0.5,
    "vgs_kwargs": {"warmup_steps": 1},
    "adversarial": SAPPOConfig(warmup_updates=0, perturbation=PerturbationConfig(attack_steps=1)),
}


class CarefulWalk(Walk):
    """Moves before it finds out that it should not have: whoever loads a state has to undo that."""

    def load_state_dict(self, state):
        self.position = state["position"]
        self.left = state["left"]
        if set(state) != {"position", "left"} or not isinstance(self.position, float) or abs(self.position) > 1e6:
            raise RuntimeError("no such place")
        if type(self.left) is not int or not -1000 < self.left < 1000:
            raise KeyError("no such time")


def careful_walk():
    return Monitor(gymnasium.wrappers.TimeLimit(CarefulWalk(), 30))


def cartpole(count=2):
    return DummyVecEnv([lambda: Monitor(gymnasium.make("CartPole-v1"))] * count)


def everything():
    env = VecNormalize(cartpole(), norm_reward=False)
    return DistributionalPPO("MlpLstmPolicy", env, **SMALL, **CONTROLLED, policy_kwargs=MEMORY)


def gru():
    return DistributionalPPO("MlpGruPolicy", cartpole(), **SMALL, optimizer_class="adam", policy_kwargs=MEMORY)


def feed_forward():
    options = {"optimizer_class": "sgd", "optimizer_kwargs": {"momentum": 0.9}}
    return DistributionalPPO("MlpPolicy", cartpole(), **SMALL, **options, policy_kwargs=NETS)


def continuing():
    env = VecNormalize(DummyVecEnv([careful_walk] * 2), norm_reward=False)
    options = {"optimizer_class": "adamw", "optimizer_kwargs": {"amsgrad": True}}
    return DistributionalPPO("MlpLstmPolicy", env, **SMALL, **options, policy_kwargs=MEMORY)


def exploring():
    env = DummyVecEnv([lambda: Monitor(gymnasium.make("Pendulum-v1"))] * 2)
    return DistributionalPPO("MlpPolicy", env, **SMALL, optimizer_class="adam", use_sde=True, policy_kwargs=NETS)


def drift_kit():
    options = {"drift_kit": True, "init_decay": 0.01, "policy_kwargs": NETS}
    return DistributionalPPO("MlpPolicy", cartpole(), **SMALL, **options)


AGENTS = [everything, gru, feed_forward, continuing, exploring, drift_kit]


def trained(make):
    agent = make().learn(3 * UPDATE)
    agent.worker.restart(5) if make is everything else None
    if make is drift_kit:
        response = agent.learner.drift_response
        response.archive.append({**response._worlds.copy(), "return": 10.0, "length": 10.0})
    return agent


def whole_state(agent):
    """Also what the tree does not hold: what is in force, and what the next rollout begins with."""
    own = {"lr": [group["lr"] for group in agent.policy.optimizer.param_groups]}
    own["current"] = {name: agent.hyperparams.current(name) for name in agent.hyperparams}
    own["last_obs"], own["forget"] = agent._last_obs, agent.worker.state is None
    return copy_tree({"tree": agent.current_states(), **own})


def assert_unchanged(agent, before, wrong):
    differences = compare(whole_state(agent), before)
    assert not differences, f"changed by {wrong}: {differences[:3]}"


def attempt(agent, tree):
    """Whether an agent takes a tree; anything but a short CheckpointError is an error."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            agent.load_state_tree(tree)
    except CheckpointError as error:
        message = str(error)
        assert 0 < len(message) <= 500
        assert message.isprintable()
        return False
    return True


def assert_goes_on(agent, wrong):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        agent.learn(UPDATE, reset_num_timesteps=False)
    for name, weights in agent.policy.state_dict().items():
        assert weights.isfinite().all(), f"{name} after {wrong}"


def check_cases(agent, cases):
    """Each of the trees is refused and changes nothing, or is fine to go on learning with."""
    original, before, accepted = agent.state_tree(), whole_state(agent), []
    for path, group in itertools.groupby(cases, key=lambda case: case[0]):
        for _, value in group:
            wrong = f"{'/'.join(map(str, path))} = {'missing' if value is MISSING else repr(value)[:60]}"
            try:
                if not attempt(agent, replaced(original, path, value)):
                    continue
            except Exception as error:
                raise AssertionError(f"{wrong}: {type(error).__name__}: {error}") from error
            accepted.append(wrong)
            assert_goes_on(agent, wrong)
            agent.load_state_tree(original)
            before = whole_state(agent)
        assert_unchanged(agent, before, f"wrong values at {path}")
    return accepted


def all_cases(agent):
    tree = agent.state_tree()
    return [(path, value) for path in places(tree) for value in wrong_values(at(tree, path))]


@pytest.mark.parametrize("make", AGENTS)
def test_wrong_values_at_some_leaves(make):
    agent = trained(make)
    cases = random.Random(0).sample(all_cases(agent), 100)
    accepted = check_cases(agent, cases)
    assert len(accepted) < 30


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("make", AGENTS)
def test_wrong_values_at_every_leaf(make):
    agent = trained(make)
    check_cases(agent, all_cases(agent))


EXAMPLES = {
    ("rollout", "running", "reset_seed"): -5,
    ("rollout", "successes"): "x",
    ("rollout", "episodes", "r"): np.array(["a", "b"]),
    ("rollout", "running", "starts"): np.ones(3, bool),
    ("rollout", "running", "memory", "actor"): (torch.zeros(1, 2, 99),) * 2,
    ("rollout", "running", "observation"): np.full((2, 4), np.nan, np.float32),
    ("optimizer", "state", 0, "step"): "x",
    ("optimizer", "state", 1, "step"): torch.tensor(-1.0),
    ("optimizer", "state", 2, "step"): torch.tensor(1e30),
    ("optimizer", "state", 3, "step"): torch.ones(2),
    ("optimizer", "state", 0, "first_moment"): torch.zeros(16, 4, dtype=torch.int64),
    ("optimizer", "param_groups", 0, "lr"): 1e308,
    ("hyperparams", "learning_rate"): 1e308,
    ("hyperparams", "gamma"): 1.5,
    ("hyperparams", "n_epochs"): 2**70,
    ("counters", "num_timesteps"): -1,
    ("counters", "n_updates"): True,
    ("counters", "episode_num"): 2**200,
    ("normalizer", "obs_rms", "", "var"): -np.ones(4),
    ("normalizer", "obs_rms", "", "mean"): np.full(4, np.nan),
    ("vgs", "step_count"): torch.tensor(-1.0),
    ("adversary", "updates"): -1,
    ("adversary", "attack", "generator"): torch.zeros(5056, dtype=torch.uint8),
    ("random", "numpy", "state", "pos"): 2**30,
    ("random", "numpy", "state", "key"): np.zeros(623, np.uint32),
    ("random", "numpy", "has_gauss"): 2,
    ("random", "numpy", "gauss"): float("nan"),
    ("random", "numpy", "bit_generator"): "PCG64",
    ("random", "python", 1): np.full(625, 2**32 - 1, np.uint32),
    ("random", "python", 2): float("inf"),
    ("random", "torch"): torch.zeros(5056, dtype=torch.uint8),
    ("random", "environments", 0, "state", "inc"): 2,
    ("random", "environments", 0, "has_uint32"): 7,
}


@pytest.fixture(scope="module")
def agent():
    return trained(everything)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: "/".join(map(str, path)))
def test_values_that_once_went_wrong(agent, path):
    original, before = agent.state_tree(), whole_state(agent)
    assert at(original, path) is not None or path[-1] in ("reset_seed", 2)
    assert not attempt(agent, replaced(original, path, EXAMPLES[path]))
    assert_unchanged(agent, before, path)


def test_numbers_that_a_torch_generator_has_drawn_ahead_are_numbers(agent):
    state = torch.get_rng_state()
    state[5024:5032] = torch.tensor([float("nan")], dtype=torch.float64).view(torch.uint8)
    assert not attempt(agent, replaced(agent.state_tree(), ("random", "torch"), state))


def test_parameters_that_are_wrong_change_nothing(agent, tmp_path):
    before = whole_state(agent)
    name = next(name for name, weights in agent.policy.state_dict().items() if weights.ndim == 2)
    wrong = replaced(agent.get_parameters(), ("policy", name), torch.zeros(3, 5, 7))
    with pytest.raises(CheckpointError, match="of shape"):
        agent.set_parameters(wrong)
    with pytest.raises(ValueError, match="the states lack"):
        agent.set_parameters({})
    for parameters in ({1: 2}, {"policy": None}):
        with pytest.raises(CheckpointError):
            agent.set_parameters(parameters, exact_match=True)
    write(tmp_path / "wrong.zip", replaced(agent.state_tree(), ("policy", name), torch.full((4, 4), torch.nan)))
    with pytest.raises(CheckpointError):
        agent.set_parameters(tmp_path / "wrong.zip")
    write(tmp_path / "list.zip", [1, 2])
    with pytest.raises(CheckpointError):
        agent.set_parameters(tmp_path / "list.zip")
    assert_unchanged(agent, before, "set_parameters")


def test_a_refused_exploit_changes_nothing(agent):
    before = whole_state(agent)
    for name in ("policy.optimizer", "vgs_state"):
        parameters = replaced(agent.get_parameters(), (name,), MISSING)
        with pytest.raises(CheckpointError):
            Trainee(agent, 3).inherit(parameters, "v2_full_parameters", {"learning_rate": 1e-5}, "reset")
    with pytest.raises(CheckpointError), pytest.warns(FutureWarning, match="a policy only"):
        Trainee(agent, 3).inherit({"weight": torch.zeros(2)}, "v1_policy_only", {})
    assert_unchanged(agent, before, "inherit")


class Picky:
    """A component that says nothing of its state before it has it."""

    def __init__(self):
        self.value = 1

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]
        torch.rand(3), np.random.rand(3), random.random()
        if self.value != 1:
            raise AttributeError("picky")


def test_components_that_find_out_too_late(agent):
    agent = trained(gru)
    agent.register("picky", Picky())
    tree, before = agent.state_tree(), whole_state(agent)
    with torch.no_grad():
        wrong = {**tree, "policy": {name: weights + 1 for name, weights in tree["policy"].items()}}
    assert not attempt(agent, {**wrong, "picky": {"value": 2}})
    assert_unchanged(agent, before, "a component that failed")


def test_a_file_without_its_rollout_begins_new_episodes(tmp_path):
    agent = trained(gru)
    agent.save(tmp_path / "agent.zip", exclude=["rollout"])
    with pytest.warns(UserWarning, match="rollout"):
        loaded = DistributionalPPO.load(tmp_path / "agent.zip", cartpole(), device="cpu")
    assert_goes_on(loaded, "a file without its rollout")


def test_wrong_files_do_not_become_agents(agent, tmp_path):
    tree, before = agent.state_tree(), whole_state(agent)
    for path in (("policy",), ("hyperparams",), ("normalizer",), ("rollout",), ("random",)):
        for value in (None, [], "x", {"a": 1}, 7):
            write(tmp_path / "agent.zip", replaced(tree, path, value), config=agent.config())
            env = VecNormalize(cartpole(), norm_reward=False)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with pytest.raises(CheckpointError):
                    DistributionalPPO.load(tmp_path / "agent.zip", env, device="cpu")
    assert_unchanged(agent, before, "load")
