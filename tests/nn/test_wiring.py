"""Reordered weights: a policy does with other sensors and actions what it did with the former ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.torch_layers import FlattenExtractor

from driftproof.nn.policies import CnnPolicy, MlpGruPolicy, MlpLstmPolicy, MlpPolicy, MultiInputPolicy
from driftproof.nn.types import Rewiring

SENSORS, STEPS, BATCH = 5, 7, 3
VECTOR = spaces.Box(-np.inf, np.inf, (SENSORS,), np.float32)
ACTIONS = {
    "Discrete": spaces.Discrete(4),
    "Box": spaces.Box(-1, 1, (3,), np.float32),
    "MultiDiscrete": spaces.MultiDiscrete([2, 3]),
    "MultiBinary": spaces.MultiBinary(3),
}
POLICIES = {
    "mlp": (MlpPolicy, {}),
    "no layers": (MlpPolicy, {"net_arch": []}),
    "layer norm": (MlpPolicy, {"layer_norm": True, "twin_critics": False}),
    "own extractors": (MlpPolicy, {"share_features_extractor": False}),
    "shared": (MlpPolicy, {"shared_recurrence": True}),
    "lstm": (MlpLstmPolicy, {}),
    "shared lstm": (MlpLstmPolicy, {"shared_lstm": True, "enable_critic_lstm": False}),
    "shared recurrence": (MlpLstmPolicy, {"shared_recurrence": True, "n_lstm_layers": 2}),
    "critics without recurrence": (MlpLstmPolicy, {"enable_critic_lstm": False}),
    "gru": (MlpGruPolicy, {"layer_norm": True}),
    "categorical": (MlpGruPolicy, {"value_head": "categorical", "v_min": -1.0, "v_max": 1.0}),
}


def built(kind, actions="Discrete", **changes):
    policy, options = POLICIES[kind]
    networks = {"net_arch": [6], **({"lstm_hidden_size": 4} if policy is not MlpPolicy else {}), **options, **changes}
    torch.manual_seed(0)
    made = policy(VECTOR, ACTIONS[actions], **networks)
    with torch.no_grad():
        for parameter in made.parameters():  # Also biases, and standard deviations that differ.
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made


def wiring(policy):
    rng = np.random.default_rng(0)
    found = policy.wiring()
    order = rng.permutation(found.actions) if found.can_reorder else np.arange(found.actions)
    signs = rng.choice([-1.0, 1.0], found.actions) if not found.is_discrete and found.can_reorder else 1.0
    sensors, sensor_signs = np.array([3, 0, 4, 1, 2]), np.array([1.0, -1, 1, -1, -1])
    return Rewiring(sensors, sensor_signs, order, np.ones(found.actions) * signs)


@torch.no_grad()
def outputs(policy, observations):
    return policy.evaluate(observations, policy.initial_state(BATCH))


@pytest.mark.parametrize("actions", ACTIONS)
@pytest.mark.parametrize("kind", POLICIES)
def test_outputs_are_the_same_for_reordered_sensors_and_actions(kind, actions):
    policy = built(kind, actions)
    found, x = wiring(policy), torch.randn(STEPS, BATCH, SENSORS)
    before = outputs(policy, x)
    policy.rewire(found)
    seen = x[..., found.sensors] * torch.from_numpy(found.sensor_signs).float()
    after = outputs(policy, seen)
    for own, other in zip(after.predictions, before.predictions, strict=True):
        torch.testing.assert_close(own, other)
    expected = before.parameters
    if actions == "Discrete":
        expected = expected[..., found.actions]
    elif actions == "Box":
        means, log_stds = expected.chunk(2, -1)
        signs = torch.from_numpy(found.action_signs).float()
        expected = torch.cat((means[..., found.actions] * signs, log_stds[..., found.actions]), -1)
    torch.testing.assert_close(after.parameters, expected)
    assert not torch.allclose(outputs(policy, x).parameters, before.parameters)


@pytest.mark.parametrize("full_std", [True, False])
def test_state_dependent_exploration(full_std):
    policy = built("mlp", "Box", use_sde=True, full_std=full_std)
    found, x = wiring(policy), torch.randn(STEPS, BATCH, SENSORS)
    means, log_stds = outputs(policy, x).parameters.chunk(2, -1)
    policy.rewire(found)
    after = outputs(policy, x[..., found.sensors] * torch.from_numpy(found.sensor_signs).float()).parameters
    signs = torch.from_numpy(found.action_signs).float()
    torch.testing.assert_close(after, torch.cat((means[..., found.actions] * signs, log_stds[..., found.actions]), -1))


def test_what_can_be_reordered():
    found = {name: built("mlp", name).wiring() for name in ACTIONS}
    assert found["Discrete"] == (4, True, True)
    assert found["Box"] == (3, False, True)
    assert found["MultiDiscrete"] == (2, False, False)
    assert found["MultiBinary"] == (3, False, False)


class Doubled(FlattenExtractor):
    """Somebody's own."""

    def forward(self, observations):
        return 2 * super().forward(observations)


def test_networks_that_do_not_read_observations_directly_cannot():
    image, actions = spaces.Box(0, 255, (3, 36, 36), np.uint8), ACTIONS["Discrete"]
    assert CnnPolicy(image, actions).wiring() is None
    assert MultiInputPolicy(spaces.Dict({"a": VECTOR}), actions).wiring() is None
    assert MlpPolicy(VECTOR, actions, features_extractor_class=Doubled).wiring() is None
