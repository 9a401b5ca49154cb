"""An agent in an ONNX file does and expects what the agent does and expects."""

import copy
import json

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from driftproof.export import ExportError, export_onnx, onnx_file
from driftproof.ppo import DistributionalPPO

from ..ppo.test_spaces import ACTIONS, IMAGE, OBSERVATIONS, PARTS, Chance, learned


class Runner:
    """Runs a file over batches of observations, and carries what it remembers from one to the next."""

    def __init__(self, path):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.state = {}

    def __call__(self, observation):
        inputs = {}
        for slot in self.session.get_inputs():
            name = slot.name
            if name == "observation":
                inputs[name] = observation
            elif name.startswith("observation_"):
                inputs[name] = observation[name.removeprefix("observation_")]
        batch = len(next(iter(inputs.values())))
        for slot in self.session.get_inputs():
            if slot.name not in inputs:
                layers, _, units = slot.shape
                inputs[slot.name] = self.state.get(slot.name, np.zeros((layers, batch, units), np.float32))
        names = [slot.name for slot in self.session.get_outputs()]
        outputs = dict(zip(names, self.session.run(names, inputs), strict=True))
        self.state = {name.removeprefix("next_"): x for name, x in outputs.items() if name.startswith("next_")}
        return outputs


def check_episodes(model, env, path, steps=12):
    """The file sees what environments give, the agent what its wrappers make of it; neither sees the other's memory."""
    runner, inner = Runner(path), env.venv if isinstance(env, VecNormalize) else env
    raw, state, critic_state = inner.reset(), None, None
    for _ in range(steps):
        seen = model.normalizer.normalize(raw)
        action, state = model.predict(seen, state, deterministic=True)
        quantiles, critic_state = model.predict_quantiles(seen, critic_state)
        outputs = runner(raw)
        np.testing.assert_allclose(outputs["action"], action, atol=1e-5)
        np.testing.assert_allclose(outputs["quantiles"], quantiles.swapaxes(0, 1), rtol=1e-5, atol=1e-5)
        raw, *_ = inner.step(action)
    return outputs


def exported(tmp_path, policy, observation_space, action_space, **networks):
    model = learned(policy, observation_space, action_space, **networks)
    return model, export_onnx(model, tmp_path / "agent.onnx")


NETWORKS = {
    "LSTM, layer normalisation": ("MlpLstmPolicy", "flat", "box", {"layer_norm": True}),
    "LSTM, choices": ("MlpLstmPolicy", "flat", "discrete from 1", {}),
    "GRU, shared, two layers, positions": (
        "MlpGruPolicy",
        "2-D",
        "box in 2-D",
        {"shared_recurrence": True, "n_lstm_layers": 2},
    ),
    "no memory, switches, atoms": ("MlpPolicy", "multi-discrete", "multi-binary", {"value_head": "categorical"}),
    "critics without memory, squashed": (
        "MlpLstmPolicy",
        "discrete",
        "box",
        {"enable_critic_lstm": False, "squash_output": True, "twin_critics": False},
    ),
}


SLOW = ("GRU, shared, two layers, positions", "no memory, switches, atoms")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in NETWORKS]
)
def test_file_and_agent_agree(name, tmp_path):
    policy, observations, actions, networks = NETWORKS[name]
    if networks.get("value_head") == "categorical":
        networks = {**networks, "num_atoms": 4}
    model, path = exported(tmp_path, policy, OBSERVATIONS[observations], ACTIONS[actions], **networks)
    check_episodes(model, model.get_env(), path)


def test_spread_of_state_dependent_exploration_is_in_the_file(tmp_path):
    model = DistributionalPPO("MlpLstmPolicy", "Pendulum-v1", n_steps=32, batch_size=32, n_epochs=1, use_sde=True)
    model.learn(32)
    outputs = check_episodes(model, model.get_env(), export_onnx(model, tmp_path / "agent.onnx"), steps=1)
    step = model.policy.stepper()(model.policy.normalized(torch.zeros(1, 3)), model.policy.initial_state(1))
    (std,) = Runner(tmp_path / "agent.onnx")(np.zeros((1, 3), np.float32))["std"]
    np.testing.assert_allclose(std, step.parameters[0, 1:].exp().detach(), rtol=1e-5)
    assert outputs["std"] != std  # It is not the same everywhere.


def test_images_and_keys_are_inputs_of_their_own(tmp_path):
    model, path = exported(tmp_path, "MultiInputGruPolicy", PARTS, ACTIONS["multi-discrete in 2-D"])
    outputs = check_episodes(model, model.get_env(), path)
    types = {slot.name: slot.type for slot in onnxruntime.InferenceSession(str(path)).get_inputs()}
    assert types["observation_picture"] == "tensor(uint8)"
    assert types["observation_key"] == "tensor(int64)"
    choices = np.split(outputs["probabilities"], np.cumsum([2, 3, 4])[:3], axis=1)
    np.testing.assert_allclose([part.sum(-1) for part in choices], 1, rtol=1e-6)


def test_normalisation_is_in_the_file(tmp_path):
    space = spaces.Dict({"far": spaces.Box(-np.inf, np.inf, (2,), np.float32), "near": OBSERVATIONS["flat"]})

    class Far(Chance):
        def reset(self, **kwargs):
            observation, info = super().reset(**kwargs)
            return {**observation, "far": 1000 + 10 * observation["far"]}, info

        def step(self, action):
            observation, *rest = super().step(action)
            return {**observation, "far": 1000 + 10 * observation["far"]}, *rest

    inner = DummyVecEnv([lambda: Far(space, ACTIONS["discrete"])])
    env = VecNormalize(inner, norm_reward=False, norm_obs_keys=["far"], clip_obs=1.0)
    model = DistributionalPPO("MultiInputLstmPolicy", env, n_steps=32, batch_size=32, n_epochs=1, device="cpu")
    model.learn(64)
    model.save(tmp_path / "agent")
    check_episodes(model, env, export_onnx(str(tmp_path / "agent"), tmp_path / "agent.onnx"))


@pytest.fixture(scope="module")
def model():
    env = make_vec_env("CartPole-v1", 2, seed=0)
    model = DistributionalPPO("MlpLstmPolicy", env, n_steps=32, batch_size=32, n_epochs=1, seed=0, device="cpu")
    return model.learn(64)


@pytest.fixture(scope="module")
def path(model, tmp_path_factory):
    before, generator = copy.deepcopy(model.policy.state_dict()), torch.get_rng_state()
    path = export_onnx(model, tmp_path_factory.mktemp("export") / "agent.onnx")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.policy.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    return path


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_batches_have_any_size(model, path, batch):
    observations = np.random.default_rng(0).normal(size=(batch, 4)).astype(np.float32)
    outputs = Runner(path)(observations)
    assert outputs["quantiles"].shape == (batch, 2, 32)
    np.testing.assert_array_equal(outputs["action"], model.predict(observations, deterministic=True)[0])


def test_rows_of_a_batch_do_not_know_each_other(path):
    both, alone = Runner(path), Runner(path)
    for step in range(5):
        observations = np.random.default_rng(step).normal(size=(2, 4)).astype(np.float32)
        np.testing.assert_allclose(
            both(observations)["probabilities"][1:], alone(observations[1:])["probabilities"], atol=1e-6
        )


def test_file_tells_what_it_is(path):
    proto = onnx.load(path)
    onnx.checker.check_model(proto, full_check=True)
    metadata = {entry.key: entry.value for entry in proto.metadata_props}
    assert metadata["driftproof.action_space"] == "Discrete(2)"
    assert json.loads(metadata["driftproof.state"])["actor_hidden"] == [1, 128]
    assert json.loads(metadata["driftproof.quantile_levels"])[0] == 1 / 64


@pytest.mark.parametrize("wrong", [1e-3, np.nan])
@pytest.mark.parametrize(
    ("name", "outputs"), [("action_head.bias", "probabilities"), ("critics.1.head.linear.bias", "quantiles")]
)
def test_file_that_differs_is_not_written(model, path, tmp_path, monkeypatch, name, outputs, wrong):
    proto = onnx.load(path)
    bias = next(x for x in proto.graph.initializer if x.name.endswith(name))
    numbers = onnx.numpy_helper.to_array(bias).copy()
    numbers[0] += wrong
    bias.CopyFrom(onnx.numpy_helper.from_array(numbers, bias.name))
    monkeypatch.setattr(onnx_file, "_convert", lambda *_: proto.SerializeToString())
    with pytest.raises(ExportError, match=rf"differs from the agent by .* in '{outputs}', at step 0"):
        export_onnx(model, tmp_path / "agent.onnx")
    assert not list(tmp_path.iterdir())


def test_file_that_does_not_run_is_not_written(model, path, tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_file, "_convert", lambda *_: path.read_bytes()[:-1000])
    with pytest.raises(ExportError, match="onnxruntime cannot run"):
        export_onnx(model, tmp_path / "agent.onnx")
    assert not list(tmp_path.iterdir())


class Sorting(BaseFeaturesExtractor):
    """Has an operation that ONNX knows nothing of."""

    def __init__(self, observation_space):
        super().__init__(observation_space, 3)

    def forward(self, observations):
        return torch.linalg.qr(observations.unsqueeze(-1).expand(-1, 3, 3) + torch.eye(3))[1][:, 0]


def test_what_onnx_cannot_say_is_an_error(tmp_path):
    model = learned(
        "MlpPolicy", OBSERVATIONS["flat"], ACTIONS["discrete"], features_extractor_class=Sorting, ortho_init=False
    )
    with pytest.raises(ExportError, match=r"with Sorting in front, cannot be written as ONNX: .*qr"):
        export_onnx(model, tmp_path / "agent.onnx")
    assert not list(tmp_path.iterdir())


def test_packages_that_lack_are_named(model, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "onnxscript", None)
    with pytest.raises(ImportError, match=r'^export to ONNX needs onnxscript\. .*pip install "\.\[onnx\]"'):
        export_onnx(model, tmp_path / "agent.onnx")


def test_agent_goes_on_learning(model, path):
    model.learn(64, reset_num_timesteps=False)


@pytest.mark.slow
@pytest.mark.parametrize("core", ["", "Lstm", "Gru"])
@pytest.mark.parametrize("actions", ACTIONS)
def test_actions_of_every_kind(core, actions, tmp_path):
    model, path = exported(tmp_path, f"Mlp{core}Policy", OBSERVATIONS["flat"], ACTIONS[actions])
    check_episodes(model, model.get_env(), path)


@pytest.mark.slow
@pytest.mark.parametrize("observations", [*OBSERVATIONS, "image"])
def test_observations_of_every_kind(observations, tmp_path):
    policy = "CnnLstmPolicy" if observations == "image" else "MlpLstmPolicy"
    space = IMAGE if observations == "image" else OBSERVATIONS[observations]
    model, path = exported(tmp_path, policy, space, ACTIONS["discrete"])
    check_episodes(model, model.get_env(), path)
