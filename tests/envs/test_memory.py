"""The registered tasks that need memory: what a policy with memory earns, and one without."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import driftproof  # noqa: F401  # registers the ids

IDS = ["driftproof/MemoryCue-v0", "driftproof/RepeatPrevious-v0", "driftproof/CartPoleNoVelocity-v0"]


@pytest.mark.parametrize("env_id", IDS)
def test_they_are_environments_of_gymnasium(env_id):
    env = gymnasium.make(env_id)
    if env_id != IDS[2]:  # Gymnasium's checker warns of CartPole's own bounds.
        check_env(env.unwrapped, skip_render_check=True)
    first, _ = env.reset(seed=3)
    assert np.array_equal(first, env.reset(seed=3)[0])
    assert env.observation_space.contains(first)


def played(env_id, policy, episodes=20):
    """Mean return of a policy that sees all observations of its episode."""
    env, returns = gymnasium.make(env_id), []
    for episode in range(episodes):
        seen, total, over = [env.reset(seed=episode)[0]], 0.0, False
        while not over:
            observation, reward, terminated, truncated, _ = env.step(policy(seen))
            seen.append(observation)
            total, over = total + reward, terminated or truncated
        returns.append(total)
    return np.mean(returns)


def test_the_cue_is_known_from_the_first_step_only():
    assert played(IDS[0], lambda seen: int(np.argmax(seen[0][:4]))) == 1
    assert played(IDS[0], lambda seen: int(np.argmax(seen[-1][:4])), episodes=200) == pytest.approx(0.25, abs=0.1)


def test_symbols_are_repeated_four_steps_later():
    assert played(IDS[1], lambda seen: seen[-5] if len(seen) > 4 else 0) == pytest.approx(1)
    assert played(IDS[1], lambda seen: seen[-1]) == pytest.approx(-0.5, abs=0.1)


def test_velocities_are_hidden():
    env, whole = gymnasium.make(IDS[2]), gymnasium.make("CartPole-v1")
    assert env.spec.id == IDS[2]
    env.reset(seed=0), whole.reset(seed=0)
    for action in (0, 1, 1):
        np.testing.assert_array_equal(env.step(action)[0], whole.step(action)[0][[0, 2]])
    short = gymnasium.make(IDS[2], max_episode_steps=2)
    short.reset(seed=0)
    assert [short.step(0)[3] for _ in range(2)] == [False, True]
